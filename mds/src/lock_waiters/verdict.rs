//! The decision about a try for a lock, from what the leader sees at one moment. Pure; the caller
//! is `server::locks`.

use std::collections::BTreeSet;

use strake_proto::SessionId;

use crate::namespace::{
    locks::{Owner, Want},
    spans::Span,
};

/// What to do with a try.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Ask these sessions what they still hold, then check again.
    Ask(BTreeSet<SessionId>),
    /// Report a conflict.
    Refused(&'static str),
    /// It is another's turn, and this comes after it: check again when something changes.
    AfterTurn,
    /// It may go to the log.
    Free,
}

/// The sessions that have conflicting locks and were not asked yet. The client itself checks locks
/// of its own session.
pub fn to_ask(
    want: &Want,
    barring: &[(Owner, Span)],
    asked: &BTreeSet<SessionId>,
) -> BTreeSet<SessionId> {
    let barring = barring.iter().map(|(who, _)| who.session);
    barring.filter(|id| *id != want.who.session && !asked.contains(id)).collect()
}

/// `patient`: it is told of a conflict at once, as it waits anyway. `turn`: it is another waiter's
/// turn.
pub fn judge(
    want: &Want,
    patient: bool,
    barring: &[(Owner, Span)],
    turn: bool,
    asked: &BTreeSet<SessionId>,
) -> Verdict {
    let new = to_ask(want, barring, asked);
    match (patient, turn) {
        (false, _) if !new.is_empty() => Verdict::Ask(new),
        _ if !barring.is_empty() => Verdict::Refused("another owner has the lock"),
        (_, false) => Verdict::Free,
        (true, true) => Verdict::Refused("another owner is next in turn"),
        (false, true) => Verdict::AfterTurn,
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::pb::LockKind;

    use super::*;

    #[test]
    fn holders_elsewhere_are_asked_once_and_turns_come_after_them() {
        let who = |session| Owner { kind: LockKind::LockPosix, session, owner: 1 };
        let span = Span { start: 0, end: 9, write: true, pid: 0 };
        let want = Want { ino: 5, who: who(1), span };
        let (none, both) = (BTreeSet::new(), [(who(1), span), (who(2), span)]);
        assert_eq!(judge(&want, false, &both, true, &none), Verdict::Ask([2].into()));
        assert!(matches!(judge(&want, false, &both, true, &[2].into()), Verdict::Refused(_)));
        assert!(matches!(judge(&want, true, &both, false, &none), Verdict::Refused(_)));
        assert_eq!(judge(&want, false, &[], true, &none), Verdict::AfterTurn);
        assert!(matches!(judge(&want, true, &[], true, &none), Verdict::Refused(_)));
        assert_eq!(judge(&want, true, &[], false, &none), Verdict::Free);
    }
}
