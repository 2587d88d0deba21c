//! Ways for kernel requests to reach the [VFS core](crate::vfs): `/dev/fuse` by our own hands
//! (`dev`), or through the fuser crate. The conformance suite runs on both.

use strake_proto::{Code, Error};

pub(crate) mod dev;
pub(crate) mod fuser;
pub(crate) mod kernel;
mod signals;

/// What a program sees. Retries are over when an error gets here, so "try again" would make it
/// spin: that is EIO. Only a lock that somebody else has is worth another try.
fn errno(e: &Error) -> i32 {
    match e.errno() {
        libc::EAGAIN if e.code != Code::LockConflict => {
            tracing::warn!("request given up: {e}");
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
