//! What is done about a damaged state. If another member has a good one, this member gives its own
//! up, lets another lead, and takes a copy. If none has, it continues with what can be read, and
//! returns errors for the rest.

use strake_proto::{Code, Error, Result};

use super::Driver;

/// A member that gave up its state and finds no leader ends after this many election timeouts.
/// Started again, it has what was left of its state, and can be elected if the others gave up
/// theirs as well.
const PATIENCE: u32 = 100;

impl Driver {
    /// Gives up a state that is damaged, once another member is known to have one.
    pub(super) fn mind_damage(&mut self) {
        if self.core.has_lost_state() {
            return;
        }
        if let Some(e) = self.sm.damage() {
            self.damage.note(e);
        }
        if self.damage.found.is_some()
            && self.stall.unfinished.is_none()
            && self.group().another_has_state()
        {
            self.give_up_state();
        }
    }

    fn give_up_state(&mut self) {
        tracing::warn!(
            "this metadata server discards its damaged state and will copy the state of another one"
        );
        let handed =
            self.stall.backlog.take().and_then(|work| work.entries.last().map(|e| e.index));
        self.core.lose_state(handed);
        self.sm.void();
        self.copies.abort_and_forget();
        self.unstall();
        self.fail_all(&Error::not_leader(0));
        self.hand_over(false);
    }

    /// A leader without a state hands leadership over; `again` if it tried before. While no member
    /// is close enough to take over, it keeps sending its log: others may lack entries that it has,
    /// and could not be elected over it.
    fn hand_over(&mut self, again: bool) {
        let group = self.group();
        let Some(to) = group.successor() else { return };
        if again && group.get(to).is_some_and(|m| m.matched >= group.last) {
            self.core.step_down();
        } else {
            self.core.transfer(to);
        }
    }

    /// Called once a tick. `Corrupt` when the wait for a leader was too long.
    pub(super) fn wait_for_state(&mut self) -> Result<()> {
        if self.core.has_lost_state() && self.core.is_settled_leader() {
            self.hand_over(true);
        }
        let nobody = self.core.leader() == 0 || self.core.is_leader();
        let waits = self.damage.found.is_some() && self.core.has_lost_state() && nobody;
        self.damage.leaderless_ticks = if waits { self.damage.leaderless_ticks + 1 } else { 0 };
        if self.damage.leaderless_ticks > PATIENCE * self.cfg.election_ticks.1 as u32 {
            let m = "its state is damaged, and no leader can give it another; start it again";
            return Err(Error::new(Code::Corrupt, m));
        }
        Ok(())
    }
}
