//! Host memory of the program. An invalid address must be an error of the call and must not crash
//! the program. So bytes are copied through a file in memory, and the kernel accesses the address.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::{
    abi,
    errors::{CallError, Done},
};

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

fn passage() -> Done<OwnedFd> {
    memfd_create("strake-cufile", MemfdFlags::CLOEXEC).map_err(|e| CallError::Os(e.raw_os_error()))
}

/// The kernel's result: a number of bytes, or an error for an invalid address.
fn passed(n: isize) -> Done<usize> {
    match n {
        1.. => Ok(n as usize),
        0 => Err(CallError::Op(abi::INTERNAL_ERROR)),
        _ => match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EFAULT) | None => Err(CallError::Op(abi::CUDA_POINTER_INVALID)),
            Some(errno) => Err(CallError::Os(errno)),
        },
    }
}

/// Copies bytes to an address that the program named.
pub fn put(to: u64, bytes: &[u8]) -> Done<()> {
    let file = passage()?;
    for (i, piece) in bytes.chunks(PIECE).enumerate() {
        let at = to.wrapping_add((i * PIECE) as u64);
        let mut done = 0;
        while done < piece.len() {
            let rest = &piece[done..];
            // SAFETY: reads from a slice.
            let n = passed(unsafe {
                libc::pwrite(file.as_raw_fd(), rest.as_ptr().cast(), rest.len(), done as i64)
            })?;
            done += n;
        }
        let mut done = 0;
        while done < piece.len() {
            let (to, left) = (at.wrapping_add(done as u64), piece.len() - done);
            // SAFETY: the program passed this memory for writing; the kernel returns an error if it
            // is invalid.
            done +=
                passed(unsafe { libc::pread(file.as_raw_fd(), to as *mut _, left, done as i64) })?;
        }
    }
    Ok(())
}

/// Copies bytes from an address that the program named.
pub fn get(from: u64, len: usize) -> Done<Vec<u8>> {
    let (file, mut bytes) = (passage()?, vec![0; len]);
    for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
        let at = from.wrapping_add((i * PIECE) as u64);
        let mut done = 0;
        while done < piece.len() {
            let (from, left) = (at.wrapping_add(done as u64), piece.len() - done);
            // SAFETY: the program passed this memory for reading; the kernel returns an error if it
            // is invalid.
            done += passed(unsafe {
                libc::pwrite(file.as_raw_fd(), from as *const _, left, done as i64)
            })?;
        }
        let mut done = 0;
        while done < piece.len() {
            let rest = &mut piece[done..];
            // SAFETY: writes to a slice.
            done += passed(unsafe {
                libc::pread(file.as_raw_fd(), rest.as_mut_ptr().cast(), rest.len(), done as i64)
            })?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_there_and_back() {
        let data: Vec<u8> = (0..3 * PIECE + 5).map(|i| (i * 7) as u8).collect();
        let mut there = vec![0; data.len()];
        put(there.as_mut_ptr() as u64, &data).unwrap();
        assert!(there == data && get(there.as_ptr() as u64, there.len()).unwrap() == data);
        assert_eq!((put(1, &[]), get(1, 0)), (Ok(()), Ok(vec![])));
    }

    #[test]
    fn addresses_that_lead_nowhere_are_errors() {
        for bad in [0, 1, u64::MAX - 10, 1 << 60] {
            assert_eq!(put(bad, b"12"), Err(CallError::Op(abi::CUDA_POINTER_INVALID)), "{bad:#x}");
            assert_eq!(get(bad, 2), Err(CallError::Op(abi::CUDA_POINTER_INVALID)), "{bad:#x}");
        }
        // Constants can be read but not written. A range that goes beyond valid memory fails as a
        // whole.
        static FIXED: [u8; 4] = *b"text";
        assert_eq!(get(FIXED.as_ptr() as u64, 4).unwrap(), FIXED);
        assert_eq!(
            put(FIXED.as_ptr() as u64, b"TEXT"),
            Err(CallError::Op(abi::CUDA_POINTER_INVALID))
        );
    }
}
