//! The common error type. Each code has a POSIX errno; the message says what happened and what to
//! do next.

use std::fmt;

use crate::{NodeId, pb};

/// A result with the common error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $num:literal => $errno:literal,)*) => {
        /// Why a request failed. The numbers are wire format: append only.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Code { $($(#[$doc])* #[doc = concat!("Errno ", $errno, ".")] $name = $num,)* }

        impl Code {
            /// Unknown numbers (of a newer peer) read as [`Code::Io`].
            pub fn from_wire(n: u32) -> Code {
                match n { $($num => Code::$name,)* _ => Code::Io }
            }
            /// The Linux errno that a program sees.
            pub const fn errno(self) -> i32 {
                match self { $(Code::$name => $errno,)* }
            }
            /// All codes.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];
        }
    };
}

codes! {
    Perm = 1 => 1,
    NoEnt = 2 => 2,
    Intr = 4 => 4,
    Io = 5 => 5,
    NxIo = 6 => 6,
    TooBig = 7 => 7,
    BadF = 9 => 9,
    NoMem = 12 => 12,
    Access = 13 => 13,
    Busy = 16 => 16,
    Exist = 17 => 17,
    XDev = 18 => 18,
    NoDev = 19 => 19,
    NotDir = 20 => 20,
    IsDir = 21 => 21,
    Inval = 22 => 22,
    FBig = 27 => 27,
    NoSpc = 28 => 28,
    RoFs = 30 => 30,
    MLink = 31 => 31,
    Range = 34 => 34,
    Deadlock = 35 => 35,
    NameTooLong = 36 => 36,
    NoLock = 37 => 37,
    NotEmpty = 39 => 39,
    Loop = 40 => 40,
    NoData = 61 => 61,
    Overflow = 75 => 75,
    OpNotSupp = 95 => 95,
    Stale = 116 => 116,
    DQuot = 122 => 122,
    /// This server is not the leader; `leader` names it when known. Retry there.
    NotLeader = 1000 => 11,
    /// The chain epoch of a data request differs from the replica's. Refresh the map and retry.
    StaleEpoch = 1001 => 11,
    /// The addressed replica may not serve this (not in sync, not the head, chunk dirty). Refresh
    /// and retry elsewhere.
    NotServing = 1002 => 11,
    /// The sender's own lease has expired; it must renew it before it serves.
    LeaseExpired = 1003 => 11,
    /// A queue is full. Back off and retry.
    Overloaded = 1004 => 11,
    /// Payload or block checksum did not match on arrival; send it again from a private copy.
    Resend = 1005 => 11,
    /// The session ended or was evicted; all its requests are refused.
    NoSession = 1006 => 5,
    /// The capability is forged, expired or for something else.
    BadCap = 1007 => 13,
    /// The connection broke before an answer; the request may or may not have run.
    Disconnected = 1008 => 11,
    /// No answer within the deadline; the request may or may not have run.
    TimedOut = 1009 => 110,
    /// The peer sent something that this build does not understand.
    Protocol = 1010 => 71,
    /// Stored bytes do not match their checksum and no good copy is left.
    Corrupt = 1011 => 5,
    /// A retried request whose reply is no longer kept: it ran, but its answer is lost.
    ReplyGone = 1012 => 5,
    /// Chain write refused: the successor's committed version is ahead or behind. It needs the full
    /// chunk.
    VersionGap = 1013 => 11,
    /// The peer did not prove that it belongs to this cluster.
    Unauthenticated = 1014 => 13,
    /// A write to be repeated was overtaken by a write of another session; its bytes are lost.
    Overtaken = 1015 => 5,
    /// Another owner's lock conflicts. Not retried automatically: the program is told, or waits for
    /// its turn.
    LockConflict = 1016 => 11,
    /// The metadata server was removed from its group and no longer serves.
    NotMember = 1017 => 116,
}

/// An error with a message about its cause.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Error {
    /// What went wrong, for programs.
    pub code: Code,
    /// What went wrong, for people.
    pub message: String,
    /// With [`Code::NotLeader`]: the leader's node id, 0 if unknown.
    pub leader: NodeId,
}

impl Error {
    /// An error of this code.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), leader: 0 }
    }

    /// [`Code::NotLeader`], with the leader's node id, 0 if unknown.
    pub fn not_leader(leader: NodeId) -> Error {
        Error { code: Code::NotLeader, message: "not the metadata leader".into(), leader }
    }

    /// The Linux errno that a program sees.
    pub const fn errno(&self) -> i32 {
        self.code.errno()
    }

    /// Prefixes the message with what was being done.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Whether the same request may be tried again (after a refresh or a pause) and can then
    /// succeed.
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self.code,
            Code::NotLeader
                | Code::StaleEpoch
                | Code::NotServing
                | Code::LeaseExpired
                | Code::Overloaded
                | Code::Resend
                | Code::Disconnected
                | Code::TimedOut
                | Code::VersionGap
        )
    }

    /// The error as a message.
    pub fn to_status(&self) -> pb::Status {
        pb::Status { code: self.code as u32, message: self.message.clone(), leader: self.leader }
    }
}

impl From<pb::Status> for Error {
    fn from(s: pb::Status) -> Error {
        Error { code: Code::from_wire(s.code), message: s.message, leader: s.leader }
    }
}

impl From<std::io::Error> for Error {
    /// Keeps the errno where this type has it, `EIO` otherwise.
    fn from(e: std::io::Error) -> Error {
        let code = match e.raw_os_error() {
            Some(n) => Code::ALL
                .iter()
                .copied()
                .find(|c| (*c as u16) < 1000 && c.errno() == n)
                .unwrap_or(Code::Io),
            None => match e.kind() {
                std::io::ErrorKind::UnexpectedEof
                | std::io::ErrorKind::ConnectionReset
                | std::io::ErrorKind::ConnectionAborted
                | std::io::ErrorKind::BrokenPipe => Code::Disconnected,
                std::io::ErrorKind::TimedOut => Code::TimedOut,
                _ => Code::Io,
            },
        };
        Error::new(code, e.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            write!(f, "{:?}", self.code)
        } else {
            f.write_str(&self.message)
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.code, self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire_and_unknown_ones_are_io() {
        for c in Code::ALL {
            assert_eq!(Code::from_wire(*c as u32), *c);
            assert!(c.errno() > 0);
        }
        for n in [0, 3, 999, 1999, u32::MAX] {
            assert_eq!(Code::from_wire(n), Code::Io);
        }
    }
}
