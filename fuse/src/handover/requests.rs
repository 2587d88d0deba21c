//! The records of requests that the kernel has sent.

use strake_client::{Appended, Operation, OperationRecord};
use strake_proto::{Ino, SessionId};
use strake_runtime::Record;

/// Words of a request's record.
mod word {
    pub const UNIQUE: usize = 0;
    pub const CHANNEL: usize = 1;
    pub const SESSION: usize = 2;
    pub const MUTATION: usize = 3;
    pub const DATA_SESSION: usize = 4;
    pub const DATA: usize = 5;
    /// The append's offset plus one, in the session of the data's numbers; 0 for none.
    pub const APPEND: usize = 6;
    pub const APPEND_END: usize = 7;
    pub const INO: usize = 8;
    /// How many there are.
    pub const ALL: usize = 9;
}

/// Words of a record.
pub(super) const WORDS: usize = word::ALL;

/// A request that was in progress when the previous daemon died.
#[derive(Debug)]
pub struct LeftRequest {
    /// The kernel's number of the request.
    pub unique: u64,
    /// Which of the mount's descriptors it came from.
    pub channel: usize,
    /// What is to be done again.
    pub operation: Operation,
}

impl LeftRequest {
    pub(super) fn of(record: Record) -> LeftRequest {
        LeftRequest {
            unique: record.get(word::UNIQUE),
            channel: record.get(word::CHANNEL) as usize,
            operation: operation(record),
        }
    }
}

/// The words of a new request about `ino`.
pub(super) fn words(unique: u64, channel: u64, ino: Ino) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    (words[word::UNIQUE], words[word::CHANNEL], words[word::INO]) = (unique, channel, ino);
    words
}

pub(super) fn operation(record: Record) -> Operation {
    Operation::new(Box::new(Request(record)))
}

/// The session and number of a request's mutation.
pub(super) fn mutation(record: &Record) -> Option<(SessionId, u64)> {
    let number = record.get(word::MUTATION);
    (number != 0).then(|| (record.get(word::SESSION), number))
}

pub(super) struct Request(pub(super) Record);

impl OperationRecord for Request {
    fn mutation(&self) -> Option<(SessionId, u64)> {
        mutation(&self.0)
    }

    fn set_mutation(&self, session: SessionId, number: u64) {
        self.0.set(word::SESSION, session);
        self.0.set(word::MUTATION, number);
    }

    fn data(&self) -> Option<(SessionId, u64)> {
        let first = self.0.get(word::DATA);
        (first != 0).then(|| (self.0.get(word::DATA_SESSION), first))
    }

    fn set_data(&self, session: SessionId, first: u64) {
        self.0.set(word::DATA, 0);
        self.0.set(word::DATA_SESSION, session);
        self.0.set(word::DATA, first);
    }

    fn append(&self) -> Option<(Ino, Appended)> {
        let next = self.0.get(word::APPEND);
        (next != 0).then(|| {
            let (end, session) = (self.0.get(word::APPEND_END), self.0.get(word::DATA_SESSION));
            (self.0.get(word::INO), Appended { offset: next - 1, end, session })
        })
    }

    fn set_append(&self, append: Option<Appended>) {
        self.0.set(word::APPEND, 0);
        let Some(Appended { offset, end, session }) = append else { return };
        self.0.set(word::DATA, 0);
        self.0.set(word::DATA_SESSION, session);
        self.0.set(word::APPEND_END, end);
        self.0.set(word::APPEND, offset.saturating_add(1));
    }
}
