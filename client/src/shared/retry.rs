//! The only retry policy: which errors are transient, how long to pause, when to give up.

use std::time::Duration;

use strake_proto::{Code, Error};

const FIRST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(250);

/// Exponential pauses from 5 to 250 ms, each shortened by up to half, so that clients do not retry
/// in step.
#[derive(Debug, Default)]
pub struct Backoff {
    attempt: u32,
}

impl Backoff {
    /// The next pause; `random` is any number.
    pub fn next(&mut self, random: u64) -> Duration {
        let full = (FIRST * 2u32.saturating_pow(self.attempt.min(16))).min(LONGEST);
        self.attempt += 1;
        let half = full / 2;
        half + Duration::from_nanos(random % (half.as_nanos() as u64 + 1))
    }
}

/// What to do about a failed request to a storage server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataVerdict {
    /// Fetch the cluster map, pause, try again.
    Refresh,
    /// This replica may not answer now (dirty chunk, or out of sync): ask the tail, else as
    /// `Refresh`.
    AskTail,
    /// The bytes changed on the way: send a private copy.
    Resend,
    /// Get a new capability, then try again.
    NewCapability,
    /// The bytes of this replica are bad: another one may have good ones.
    OtherReplica,
    /// The session is gone.
    SessionLost,
    /// The error is the caller's answer.
    Fail,
}

/// Classifies the errors of the data path.
pub fn data_verdict(e: &Error) -> DataVerdict {
    match e.code {
        Code::Resend => DataVerdict::Resend,
        Code::NotServing => DataVerdict::AskTail,
        Code::BadCap => DataVerdict::NewCapability,
        Code::Corrupt => DataVerdict::OtherReplica,
        Code::NoSession => DataVerdict::SessionLost,
        _ if e.is_retryable() => DataVerdict::Refresh,
        _ => DataVerdict::Fail,
    }
}

/// Whether a request to a metadata server may be tried again, perhaps at another one.
pub fn meta_passes(e: &Error) -> bool {
    e.is_retryable()
}

/// Whether the failed request may have run nevertheless.
pub fn in_doubt(e: &Error) -> bool {
    matches!(e.code, Code::Disconnected | Code::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_a_limit_and_jitter_takes_at_most_half() {
        for random in [0, 1, 12_345_678, u64::MAX] {
            let mut b = Backoff::default();
            let mut full = FIRST;
            for _ in 0..100 {
                let d = b.next(random);
                assert!(d >= full / 2 && d <= full, "{d:?} of {full:?}");
                full = (full * 2).min(LONGEST);
            }
        }
    }

    #[test]
    fn every_code_has_the_verdict_its_documentation_promises() {
        for code in Code::ALL {
            let e = Error::new(*code, "");
            let v = data_verdict(&e);
            match code {
                Code::StaleEpoch
                | Code::LeaseExpired
                | Code::Overloaded
                | Code::Disconnected
                | Code::TimedOut => {
                    assert_eq!(v, DataVerdict::Refresh);
                }
                Code::NoSpc | Code::DQuot | Code::Inval | Code::Io | Code::Overtaken => {
                    assert_eq!(v, DataVerdict::Fail);
                }
                _ => {}
            }
            assert!(!in_doubt(&e) || meta_passes(&e), "{code:?}");
        }
    }
}
