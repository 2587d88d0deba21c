//! Transports that bring kernel requests to the [VFS core](crate::vfs): our own `/dev/fuse`
//! implementation (`dev`), or the fuser crate (`fuser`, in builds with the feature of that name).
//! The conformance suite runs on both.

use strake_proto::{Code, Error};

pub(crate) mod dev;
#[cfg(feature = "fuser")]
pub(crate) mod fuser;

/// The errno that a program sees. All retries are over when an error gets here, and "try again"
/// would make the program spin, so that becomes EIO. Only a conflicting lock is worth another try.
fn errno(e: &Error) -> i32 {
    match e.errno() {
        libc::EAGAIN if e.code != Code::LockConflict => {
            tracing::warn!("a request was given up: {e}");
            libc::EIO
        }
        libc::EIO => {
            tracing::warn!("I/O error: {e}");
            libc::EIO
        }
        n => n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lock_is_worth_another_try() {
        for code in Code::ALL {
            let again = errno(&Error::new(*code, "x")) == libc::EAGAIN;
            assert_eq!(again, *code == Code::LockConflict, "{code:?}");
        }
    }
}
