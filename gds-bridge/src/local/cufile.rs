//! The part of cuFile that is used here, behind a small interface: NVIDIA's library, or reads into
//! host memory in its place.

use std::{io, os::fd::BorrowedFd, time::Duration};

use super::rounds::Rounds;
use crate::fault::Fault;

/// cuFile's counters of the process, since the driver was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that went through the kernel's ordinary interface and host memory.
    pub posix: u64,
    /// Direct reads: by nvidia-fs, or from the disk to the GPU as peers.
    pub straight: u64,
    /// Bytes of all reads.
    pub bytes: u64,
}

/// cuFile, with its driver open and its compatibility mode off.
pub trait CuFile: Send + Sync + 'static {
    /// Registers a file, which must stay open until [`CuFile::deregister`] returned. Returns the
    /// library's handle for it.
    fn register(&self, file: BorrowedFd<'_>) -> Result<u64, Fault>;

    /// Undoes a [`CuFile::register`].
    fn deregister(&self, handle: u64);

    /// Reads `len` bytes at `offset` of a file to an address of the device, on a thread that has a
    /// stream of the device. Returns the library's result unchanged: bytes; -1 and errno; a
    /// negative code; and, up to version 1.15, a code that looks like a number of bytes.
    fn read(&self, handle: u64, to: u64, len: usize, offset: u64) -> isize;

    /// The current counters.
    fn counters(&self) -> Result<Counters, Fault>;

    /// The rounds of reads of the process.
    fn rounds(&self) -> &Rounds;

    /// How long a self-test waits for a read, which cannot be stopped, and a read for other reads.
    fn patience(&self) -> Duration {
        Duration::from_secs(15)
    }
}

/// One read. It is only trusted if all of it came and the counters say that it was direct.
/// `patience`: how long it waits for other reads.
pub fn read(
    cufile: &dyn CuFile,
    patience: Duration,
    handle: u64,
    to: u64,
    len: usize,
    offset: u64,
) -> Result<(), Fault> {
    let once = || {
        let said = cufile.read(handle, to, len, offset);
        came(said, &io::Error::last_os_error(), len)
    };
    cufile.rounds().read(cufile, patience, len as u64, once)
}

/// Codes of cuFile. Versions from 1.16 on put them into errno; older ones return them like a number
/// of bytes. No read asks for so few bytes: these are not whole blocks.
const CODES: std::ops::RangeInclusive<isize> = 5001..=5099;

/// Checks the return value of a read.
fn came(said: isize, errno: &io::Error, len: usize) -> Result<(), Fault> {
    let failed = |code: isize, name: String| {
        Err(Fault::Driver { call: "cuFileRead", code: code as i32, name })
    };
    match said {
        -1 => match errno.raw_os_error() {
            // The system has no text for it.
            Some(code) if CODES.contains(&(code as isize)) => {
                failed(said, format!("errno {code}, an error code of cuFile"))
            }
            _ => failed(said, errno.to_string()),
        },
        ..0 => failed(said, "an error code of cuFile".into()),
        _ if said as usize == len => Ok(()),
        _ if CODES.contains(&said) => {
            failed(said, "an error code of cuFile, returned like a number of bytes".into())
        }
        _ => failed(said, format!("bytes, but {len} were requested")),
    }
}

/// Checks what this many reads of this many bytes in all, and no others, changed in the counters.
pub(super) fn went(reads: u64, len: u64, before: Counters, after: Counters) -> Result<(), Fault> {
    let grew = |of: fn(&Counters) -> u64| of(&after).saturating_sub(of(&before));
    let (posix, straight, bytes) = (grew(|c| c.posix), grew(|c| c.straight), grew(|c| c.bytes));
    if posix > 0 || straight < reads || bytes < len {
        Err(Fault::Detour { len, posix, straight, bytes })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_believed_only_if_all_of_it_came_and_went_straight() {
        let at = |posix, straight, bytes| Counters { posix, straight, bytes };
        let judge = |after| went(1, 8192, at(3, 5, 1000), after);
        assert_eq!(judge(at(3, 6, 9192)), Ok(()));
        assert_eq!(judge(at(3, 8, 10_000)), Ok(()), "in pieces");
        let two = |after| went(2, 16_384, at(3, 5, 1000), after);
        assert_eq!(two(at(3, 7, 17_384)), Ok(()));
        // Parts of one read do not hide that the other one was not counted.
        for after in [at(3, 6, 17_384), at(3, 9, 17_383), at(3, 9, 9192), at(4, 7, 17_384)] {
            assert!(matches!(two(after), Err(Fault::Detour { len: 16_384, .. })), "{after:?}");
        }
        let lies = [
            at(4, 6, 9192),
            at(4, 5, 9192),
            at(3, 5, 9192),
            at(3, 6, 9191),
            at(3, 5, 1000),
            at(0, 0, 0),
        ];
        for after in lies {
            let r = judge(after);
            assert!(matches!(r, Err(Fault::Detour { len: 8192, .. })), "{after:?}: {r:?}");
        }
        for (said, words) in [
            (-1, "Input/output error"),
            (-5008, "an error code of cuFile"),
            (5006, "returned like a number of bytes"),
            (4096, "bytes, but 8192 were requested"),
            (8193, "bytes, but 8192 were requested"),
            (0, "bytes, but 8192 were requested"),
        ] {
            let e = came(said, &io::Error::from_raw_os_error(5), 8192).unwrap_err();
            assert!(matches!(&e, Fault::Driver { code, .. } if *code == said as i32), "{e}");
            assert!(e.to_string().contains(words), "{e}");
        }
        assert_eq!(came(8192, &io::Error::from_raw_os_error(5), 8192), Ok(()));
        for (errno, words) in [
            (5001, "errno 5001, an error code of cuFile"),
            (5024, "errno 5024, an error code of cuFile"),
            (5099, "errno 5099, an error code of cuFile"),
            (5100, "os error 5100"),
        ] {
            let e = came(-1, &io::Error::from_raw_os_error(errno), 8192).unwrap_err();
            assert!(
                e.to_string().contains(words) && e.to_string().contains("failed with -1"),
                "{e}"
            );
        }
    }
}
