//! Why an operation did not happen.

use bytes::Bytes;
use prost::Message;
use strake_proto::{Code, Error};

/// Why an operation did not happen. An `Op` failure is an answer, the same on every member. A
/// `Store` failure concerns this member's store only: no answer may be given, and the whole batch
/// is dropped. `Later`: the list has not run, on any member, and may come again under its number.
pub(super) enum Fail {
    Op(Error),
    Store(Error),
    Later(Error),
}

pub(super) type Res<T> = Result<T, Fail>;

impl From<Error> for Fail {
    fn from(e: Error) -> Fail {
        Fail::Op(e)
    }
}

/// A failed operation with its cause as text.
pub(super) fn fail<T>(code: Code, message: impl Into<String>) -> Res<T> {
    Err(Fail::Op(Error::new(code, message)))
}

/// Refuses an operation on records that contradict each other, so that it makes nothing worse.
/// `EIO`, and not a panic: an entry that panics stops every member, again after each restart.
pub(super) fn holds(is: bool, what: impl FnOnce() -> String) -> Res<()> {
    if is {
        return Ok(());
    }
    fail(Code::Corrupt, format!("{}; check the file system", what()))
}

/// Takes the next number of a counter of the state. `ENOSPC`: there is none left.
pub(super) fn next(counter: &mut u64, what: &str) -> Res<u64> {
    let now = *counter;
    match now.checked_add(1) {
        Some(next) => *counter = next,
        None => return fail(Code::NoSpc, format!("{what} are used up")),
    }
    Ok(now)
}

/// Reads a stored record; invalid bytes mean that this member's store is corrupt.
pub(super) fn decode<M: Message + Default>(key: &[u8], value: Bytes) -> Res<M> {
    M::decode(value).map_err(|e| {
        let m = format!("metadata record {:02x?} is damaged ({e})", key);
        Fail::Store(Error::new(Code::Corrupt, m))
    })
}
