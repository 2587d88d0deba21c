//! What the leader knows about clients' changes besides the log: which may still run, and which it
//! refused without an entry. A request may come more than once, also at the same time over two
//! connections, and has one outcome. A pure table.

use std::collections::BTreeMap;

use strake_proto::{Code, Error, Result, SessionId};

/// Most requests of one session that are remembered.
const MAX_OF_SESSION: usize = 1_024;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Attempt {
    /// It is being checked: whether it is refused is not known yet.
    Looked,
    /// It was proposed and its outcome is not known. This many attempts may still run.
    Proposed(usize),
    /// Its sender was told this error, and may have told others.
    Refused(Error),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Session {
    /// Its sender waits for no answer below this number.
    lowest: u64,
    attempts: BTreeMap<u64, Attempt>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestDedup {
    sessions: BTreeMap<SessionId, Session>,
}

/// How a request counts.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun {
    /// It was refused with this error.
    Refused(Error),
    /// The only attempt: it is being checked from now on, until it is
    /// [`passed`](RequestDedup::passed), [`refused`](RequestDedup::refused), or dropped by
    /// [`not_looked`](RequestDedup::not_looked).
    First,
    /// It may run, or have run, already: only the log can tell.
    Again,
}

fn given_up(seq: u64) -> Error {
    Error::new(
        Code::ReplyGone,
        format!("the sender of request {seq} no longer waits for an answer to it"),
    )
}

impl RequestDedup {
    /// A request has come. `lowest`: the lowest number that its sender still waits for.
    /// `Overloaded` while another attempt is being checked, or if the session has too many changes
    /// under way; `ReplyGone` if its sender no longer waits for it.
    pub fn begin(&mut self, session: SessionId, seq: u64, lowest: u64) -> Result<Begun> {
        let s = self.sessions.entry(session).or_default();
        if lowest > s.lowest {
            s.lowest = lowest;
            s.attempts = s.attempts.split_off(&lowest);
        }
        if seq < s.lowest {
            return Err(given_up(seq));
        }
        match s.attempts.get_mut(&seq) {
            Some(Attempt::Refused(e)) => return Ok(Begun::Refused(e.clone())),
            Some(Attempt::Looked) => {
                return Err(Error::new(
                    Code::Overloaded,
                    "an earlier attempt at the same request is still in progress",
                ));
            }
            Some(Attempt::Proposed(open)) => {
                *open += 1;
                return Ok(Begun::Again);
            }
            None => {}
        }
        if s.attempts.len() >= MAX_OF_SESSION {
            let oldest = s
                .attempts
                .iter()
                .find(|(_, a)| matches!(a, Attempt::Refused(_)))
                .map(|(seq, _)| *seq);
            let full = || {
                Error::new(
                    Code::Overloaded,
                    format!("{MAX_OF_SESSION} changes of session {session} are under way"),
                )
            };
            s.attempts.remove(&oldest.ok_or_else(full)?);
        }
        s.attempts.insert(seq, Attempt::Looked);
        Ok(Begun::First)
    }

    /// It was checked and goes to the log. `ReplyGone` if its sender no longer waits for it.
    pub fn passed(&mut self, session: SessionId, seq: u64) -> Result<()> {
        let s = self.sessions.entry(session).or_default();
        if seq < s.lowest {
            return Err(given_up(seq));
        }
        s.attempts.insert(seq, Attempt::Proposed(1));
        Ok(())
    }

    /// It was checked and refused: its sender gets this error, now and whenever the request comes
    /// again, and it never runs.
    pub fn refused(&mut self, session: SessionId, seq: u64, with: &Error) {
        if let Some(s) = self.sessions.get_mut(&session).filter(|s| seq >= s.lowest) {
            s.attempts.insert(seq, Attempt::Refused(with.clone()));
        }
    }

    /// Its check was not finished; it may come again.
    pub fn not_looked(&mut self, session: SessionId, seq: u64) {
        let at = self.sessions.get_mut(&session).map(|s| &mut s.attempts);
        if let Some(at) = at.filter(|at| matches!(at.get(&seq), Some(Attempt::Looked))) {
            at.remove(&seq);
        }
    }

    /// Its outcome is in the log.
    pub fn ran(&mut self, session: SessionId, seq: u64) {
        if let Some(s) = self.sessions.get_mut(&session) {
            s.attempts.remove(&seq);
        }
    }

    /// The log did not take this attempt. Returns whether no other attempt may run: then with an
    /// error it is [`refused`](RequestDedup::refused) from now on, without one it may come again.
    pub fn not_taken(&mut self, session: SessionId, seq: u64, with: Option<&Error>) -> bool {
        match self.sessions.get_mut(&session).and_then(|s| s.attempts.get_mut(&seq)) {
            Some(Attempt::Proposed(open)) if *open > 1 => *open -= 1,
            Some(Attempt::Proposed(_)) => {
                match with {
                    Some(e) => self.refused(session, seq, e),
                    None => self.ran(session, seq),
                }
                return true;
            }
            _ => {}
        }
        false
    }

    /// Forgets sessions that have ended.
    pub fn retain(&mut self, lives: impl Fn(SessionId) -> bool) {
        self.sessions.retain(|id, _| lives(*id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Error {
        Error::new(Code::LockConflict, "another's")
    }
    fn code(r: Result<Begun>) -> Code {
        r.unwrap_err().code
    }

    #[test]
    fn who_was_refused_is_refused_again() {
        let mut t = RequestDedup::default();
        assert_eq!(t.begin(1, 5, 4), Ok(Begun::First));
        assert_eq!(
            code(t.begin(1, 5, 4)),
            Code::Overloaded,
            "not while the first attempt may still pass"
        );
        t.refused(1, 5, &busy());
        assert_eq!(
            (t.begin(1, 5, 4), t.begin(1, 4, 4), t.begin(2, 5, 4)),
            (Ok(Begun::Refused(busy())), Ok(Begun::First), Ok(Begun::First))
        );
        // Its sender has the answer and continues.
        assert_eq!(t.begin(1, 6, 6), Ok(Begun::First));
        assert_eq!(
            (code(t.begin(1, 5, 4)), code(t.begin(1, 4, 4))),
            (Code::ReplyGone, Code::ReplyGone)
        );
        assert_eq!(t.sessions[&1].attempts.len(), 1);
        assert_eq!(t.passed(1, 4).unwrap_err().code, Code::ReplyGone);
        t.refused(1, 5, &busy());
        assert_eq!(t.sessions[&1].attempts.len(), 1);
    }

    #[test]
    fn what_was_proposed_is_for_the_log_to_tell_until_it_has() {
        let mut t = RequestDedup::default();
        assert_eq!(t.begin(1, 5, 0), Ok(Begun::First));
        t.not_looked(1, 5);
        assert_eq!(t.begin(1, 5, 0), Ok(Begun::First));
        t.passed(1, 5).unwrap();
        t.not_looked(1, 5);
        assert_eq!(t.begin(1, 5, 0), Ok(Begun::Again));
        t.ran(1, 5);
        assert_eq!(t.begin(1, 5, 0), Ok(Begun::First));
        t.retain(|id| id != 1);
        assert!(t.sessions.is_empty());
    }

    #[test]
    fn what_the_log_does_not_take_is_refused_unless_another_attempt_may_run() {
        let mut t = RequestDedup::default();
        t.begin(1, 5, 0).unwrap();
        t.passed(1, 5).unwrap();
        t.begin(1, 5, 0).unwrap();
        assert!(!t.not_taken(1, 5, Some(&busy())));
        assert!(t.not_taken(1, 5, Some(&busy())));
        assert_eq!(t.begin(1, 5, 0), Ok(Begun::Refused(busy())));
        assert!(!t.not_taken(1, 6, None), "it ran long ago");
    }

    #[test]
    fn a_session_that_waits_for_everything_fills_nothing() {
        let mut t = RequestDedup::default();
        for seq in 1..3_000 {
            t.begin(1, seq, 0).unwrap();
            t.refused(1, seq, &busy());
        }
        assert_eq!(t.sessions[&1].attempts.len(), MAX_OF_SESSION);
        assert_eq!(t.begin(1, 2_999, 0), Ok(Begun::Refused(busy())));
        // Requests that may still run are not forgotten.
        for seq in 3_000..3_000 + MAX_OF_SESSION as u64 {
            assert_eq!(t.begin(1, seq, 0), Ok(Begun::First));
        }
        assert_eq!(code(t.begin(1, 9_000, 0)), Code::Overloaded);
        assert_eq!(code(t.begin(1, 3_000, 0)), Code::Overloaded, "it is looked at");
    }
}
