//! cuFile as far as it is used here, behind a small border: NVIDIA's library, or a stand-in that can be told to fail and to lie.

use std::{io, os::fd::BorrowedFd, time::Duration};

use parking_lot::Mutex;

use crate::mem::Fault;

/// What cuFile counts of a process, since the driver was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that went through the kernel's ordinary interface and host memory.
    pub posix: u64,
    /// Reads that went straight: by nvidia-fs, or from the disk to the GPU as peers.
    pub straight: u64,
    /// Bytes of all reads.
    pub bytes: u64,
}

/// cuFile, with its driver open and its compatibility mode off.
pub trait CuFile: Send + Sync + 'static {
    /// Makes a file known to it, which stays open until [`CuFile::deregister`] returned. Its word for the file.
    fn register(&self, file: BorrowedFd<'_>) -> Result<u64, Fault>;

    /// Undoes a [`CuFile::register`].
    fn deregister(&self, handle: u64);

    /// Reads `len` bytes at `offset` of a file to an address of the device, by a thread that has a stream of the device. Returns what the library said as it is:
    /// bytes; -1 and errno; a negative code; and, up to version 1.15, a code as if it were bytes.
    fn read(&self, handle: u64, to: u64, len: usize, offset: u64) -> isize;

    /// What it counted until now.
    fn counters(&self) -> Result<Counters, Fault>;

    /// Held during a read: the counters are of all reads, so that what they grew by would be nobody's otherwise.
    fn one_at_a_time(&self) -> &Mutex<()>;

    /// How long a self-test waits for a read, which nobody can stop.
    fn patience(&self) -> Duration {
        Duration::from_secs(15)
    }
}

/// One read that is believed only if all of it came and the counters say that it went straight.
pub fn read(cufile: &dyn CuFile, handle: u64, to: u64, len: usize, offset: u64) -> Result<(), Fault> {
    let _one = cufile.one_at_a_time().lock();
    let before = cufile.counters()?;
    let said = cufile.read(handle, to, len, offset);
    let errno = io::Error::last_os_error();
    let after = cufile.counters()?;
    judge(said, &errno, len, before, after)
}

/// Codes of cuFile, which older versions return as if they were bytes. Nobody asks for so many: they are no whole blocks.
const CODES: std::ops::RangeInclusive<isize> = 5001..=5099;

fn judge(said: isize, errno: &io::Error, len: usize, before: Counters, after: Counters) -> Result<(), Fault> {
    let failed = |code: isize, name: String| Err(Fault::Driver { call: "cuFileRead", code: code as i32, name });
    match said {
        -1 => return failed(-1, errno.to_string()),
        ..0 => return failed(said, "a code of cuFile's".into()),
        _ if said as usize == len => {}
        _ if CODES.contains(&said) => {
            return failed(said, "a code of cuFile's that was returned as if it were a number of bytes".into());
        }
        _ => return failed(said, format!("bytes, where {len} were asked for")),
    }
    let grew = |of: fn(&Counters) -> u64| of(&after).saturating_sub(of(&before));
    let (posix, straight, bytes) = (grew(|c| c.posix), grew(|c| c.straight), grew(|c| c.bytes));
    if posix > 0 || straight == 0 || bytes < len as u64 {
        return Err(Fault::Detour { len: len as u64, posix, straight, bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_believed_only_if_all_of_it_came_and_went_straight() {
        let at = |posix, straight, bytes| Counters { posix, straight, bytes };
        let judge = |said, after| judge(said, &io::Error::from_raw_os_error(5), 8192, at(3, 5, 1000), after);
        assert_eq!(judge(8192, at(3, 6, 9192)), Ok(()));
        assert_eq!(judge(8192, at(3, 8, 10_000)), Ok(()), "in pieces");
        let lies = [at(4, 6, 9192), at(4, 5, 9192), at(3, 5, 9192), at(3, 6, 9191), at(3, 5, 1000), at(0, 0, 0)];
        for after in lies {
            let r = judge(8192, after);
            assert!(matches!(r, Err(Fault::Detour { len: 8192, .. })), "{after:?}: {r:?}");
        }
        for (said, words) in [
            (-1, "Input/output error"),
            (-5008, "a code of cuFile's"),
            (5006, "as if it were a number of bytes"),
            (4096, "bytes, where 8192 were asked for"),
            (8193, "bytes, where 8192 were asked for"),
            (0, "bytes, where 8192 were asked for"),
        ] {
            // Whatever the counters say.
            let e = judge(said, at(3, 6, 9192)).unwrap_err();
            assert!(matches!(&e, Fault::Driver { code, .. } if *code == said as i32), "{e}");
            assert!(e.to_string().contains(words), "{e}");
        }
    }
}
