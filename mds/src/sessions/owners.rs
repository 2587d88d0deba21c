//! Which clients may use which session, and how many sessions each machine has. Session ids are
//! easy to guess, so a session may be used only over connections on which its client named its
//! uuid, a random one that only that client knows. Clients of versions before this name none, and
//! their sessions are not protected. Pure tables.

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{Code, Error, Result, SessionId};

/// Most sessions that may be opened on one connection: a client needs one, and another when it has
/// lost that.
const OF_CONNECTION: usize = 64;
/// Most sessions of one machine.
pub(crate) const OF_MACHINE: usize = 4_096;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    /// By connection: the sessions that were proved on it.
    proved: BTreeMap<u64, BTreeSet<SessionId>>,
    machines: BTreeMap<SessionId, String>,
    counts: BTreeMap<String, usize>,
}

impl Owners {
    /// Whether a machine may open another session on this connection. `Overloaded`, with the
    /// reason, if not.
    pub(crate) fn may_open(&self, connection: u64, machine: &str) -> Result<()> {
        let full = |m: String| Err(Error::new(Code::Overloaded, m));
        if self.proved.get(&connection).is_some_and(|s| s.len() >= OF_CONNECTION) {
            return full(format!(
                "{OF_CONNECTION} sessions were opened on one connection, which is the limit"
            ));
        }
        let own = self.counts.get(machine).copied().unwrap_or(0);
        if own >= OF_MACHINE {
            let m = "sessions of clients that died end when their term is over; unmount what is \
                     not needed";
            return full(format!(
                "{own} sessions are of {machine}, which is the limit for one machine: {m}"
            ));
        }
        Ok(())
    }

    /// The client on this connection, of this machine, has proved that it knows the session's
    /// secret. The session counts for this machine from now on, unless the machine has its most: a
    /// session that another machine opened for it stays counted there then.
    pub(crate) fn prove(&mut self, connection: u64, machine: &str, session: SessionId) {
        self.proved.entry(connection).or_default().insert(session);
        let full = self.counts.get(machine).is_some_and(|n| *n >= OF_MACHINE);
        if self.machines.get(&session).is_some_and(|known| known == machine || full) {
            return;
        }
        self.leave(session);
        self.machines.insert(session, machine.to_owned());
        *self.counts.entry(machine.to_owned()).or_default() += 1;
    }

    pub(crate) fn has_proved(&self, connection: u64, session: SessionId) -> bool {
        self.proved.get(&connection).is_some_and(|s| s.contains(&session))
    }

    /// The machine for which a session counts.
    pub(crate) fn machine(&self, session: SessionId) -> Option<&str> {
        self.machines.get(&session).map(String::as_str)
    }

    /// A connection has ended.
    pub(crate) fn disconnected(&mut self, connection: u64) {
        self.proved.remove(&connection);
    }

    /// A session has ended.
    pub(crate) fn leave(&mut self, session: SessionId) {
        let Some(machine) = self.machines.remove(&session) else { return };
        if let Some(n) = self.counts.get_mut(&machine) {
            *n -= 1;
            if *n == 0 {
                self.counts.remove(&machine);
            }
        }
    }

    /// Forgets sessions that have ended.
    pub(crate) fn retain(&mut self, lives: impl Fn(SessionId) -> bool) {
        let gone: Vec<SessionId> = self.machines.keys().copied().filter(|id| !lives(*id)).collect();
        gone.into_iter().for_each(|id| self.leave(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_proved_for_one_connection_until_that_ends() {
        let mut o = Owners::default();
        o.prove(7, "a", 1);
        assert!(o.has_proved(7, 1) && !o.has_proved(8, 1) && !o.has_proved(7, 2));
        o.prove(8, "a", 1);
        o.disconnected(7);
        assert!(!o.has_proved(7, 1) && o.has_proved(8, 1));
        assert_eq!(o.counts["a"], 1, "it counts once");
        o.retain(|_| false);
        assert!(o.counts.is_empty() && o.machines.is_empty());
    }

    /// It opens them through another machine, for which they count, and renews them directly.
    #[test]
    fn a_machine_has_no_more_sessions_by_way_of_another() {
        let mut o = Owners::default();
        let open = |o: &mut Owners, machine: &str, id: u64| {
            o.may_open(id, machine).map(|()| o.prove(id, machine, id)).is_ok()
        };
        let mut opened = 0;
        for id in 0..3 * OF_MACHINE as u64 {
            if open(&mut o, "relay", id) {
                opened += 1;
                o.prove(1 << 32 | id, "a", id);
            }
        }
        assert_eq!((o.counts["a"], o.counts["relay"]), (OF_MACHINE, OF_MACHINE));
        assert_eq!(opened, 2 * OF_MACHINE);
        assert!(!open(&mut o, "a", 1 << 40));
        // A new leader has no other machine to leave it with.
        let mut o = Owners::default();
        (0..=OF_MACHINE as u64).for_each(|id| o.prove(id, "a", id));
        assert_eq!(o.counts["a"], OF_MACHINE + 1);
    }

    #[test]
    fn one_machine_cannot_have_all_sessions() {
        let mut o = Owners::default();
        for id in 0..OF_MACHINE as u64 {
            let connection = id / 10;
            o.may_open(connection, "a").unwrap();
            o.prove(connection, "a", id);
        }
        let e = o.may_open(9_999, "a").unwrap_err();
        assert!(e.code == Code::Overloaded && e.message.contains("one machine"), "{e}");
        o.may_open(9_999, "b").unwrap();
        // It moved, with its client.
        o.prove(1, "b", 5);
        o.may_open(9_999, "a").unwrap();
        o.leave(6);
        assert_eq!((o.counts["a"], o.counts["b"]), (OF_MACHINE - 2, 1));
        (0..OF_CONNECTION as u64).for_each(|id| o.prove(20_000, "c", 100_000 + id));
        assert!(o.may_open(20_000, "c").unwrap_err().message.contains("one connection"));
    }
}
