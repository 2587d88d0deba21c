//! The list of waits of this client's programs: the pure part of `lock_waiters.rs`.

use std::collections::BTreeMap;

use strake_proto::{Code, Error, Result, pb};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    Waits,
    /// It is this waiter's turn.
    Ready,
    /// The waiter was told that it is its turn, and tries.
    Trying,
    Failed(Error),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiter<W> {
    wait: pb::LockWait,
    state: State,
    news: W,
}

/// See the module. `W` wakes a waiter: the returned ones have news.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct List<W> {
    /// The highest number given out, to a wait or a list.
    last: u64,
    all: BTreeMap<u64, Waiter<W>>,
    /// Whether a task sends the list.
    served: bool,
    /// The leader was told of waits that are no longer on the list.
    shrunk: bool,
}

impl<W> Default for List<W> {
    fn default() -> List<W> {
        List { last: 0, all: BTreeMap::new(), served: false, shrunk: false }
    }
}

impl<W: Clone> List<W> {
    /// A number that is used only once, even by a later process with the same session, because time
    /// advances.
    pub fn number(&mut self, now: u64) -> u64 {
        self.last = (self.last + 1).max(now);
        self.last
    }

    /// Adds a waiter whose request was refused. Returns whether a task must be started to send the
    /// list.
    pub fn enter(&mut self, wait: pb::LockWait, news: W) -> bool {
        self.all.insert(wait.id, Waiter { wait, state: State::Trying, news });
        !std::mem::replace(&mut self.served, true)
    }

    /// The waiter waits for its turn from now on.
    pub fn waits(&mut self, id: u64) {
        if let Some(w) = self.all.get_mut(&id) {
            w.state = State::Waits;
        }
    }

    /// Returns `Some` if it is the waiter's turn, and it tries from now on. `Deadlock` when its
    /// turn will never come.
    pub fn turn(&mut self, id: u64) -> Option<Result<()>> {
        let w = self.all.get_mut(&id)?;
        match &w.state {
            State::Ready => {
                w.state = State::Trying;
                Some(Ok(()))
            }
            State::Failed(e) => Some(Err(e.clone())),
            State::Waits | State::Trying => None,
        }
    }

    /// The waiter leaves. `done`: the leader knows without a report. Returns whether it must be
    /// told.
    pub fn leave(&mut self, id: u64, done: bool) -> bool {
        self.all.remove(&id);
        self.shrunk |= !done;
        !done
    }

    /// The list to send; `None` when there is nothing to send, and the sending task ends.
    pub fn told(&mut self, closed: bool) -> Option<Vec<pb::LockWait>> {
        if closed || self.all.is_empty() && !self.shrunk {
            self.served = false;
            return None;
        }
        self.shrunk = false;
        let one =
            |w: &Waiter<W>| pb::LockWait { trying: matches!(w.state, State::Trying), ..w.wait };
        Some(self.all.values().map(one).collect())
    }

    /// The leader may not have received the last list: even an empty one is sent again.
    pub fn not_told(&mut self) {
        self.shrunk = true;
    }

    fn set(&mut self, id: u64, state: State) -> Option<W> {
        let w = self.all.get_mut(&id).filter(|w| matches!(w.state, State::Waits))?;
        w.state = state;
        Some(w.news.clone())
    }

    /// All waiters on the list fail.
    pub fn fail(&mut self, e: &Error) -> Vec<W> {
        let ids: Vec<u64> = self.all.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.set(id, State::Failed(e.clone()))).collect()
    }

    /// The leader has answered.
    pub fn answered(&mut self, r: &pb::LockWaitReply) -> Vec<W> {
        let deadlock = || {
            Error::new(
                Code::Deadlock,
                "deadlock: the holder of this lock waits for a lock of the caller",
            )
        };
        let failed: Vec<W> =
            r.deadlock.iter().filter_map(|id| self.set(*id, State::Failed(deadlock()))).collect();
        let ready = r.ready.iter().filter_map(|id| self.set(*id, State::Ready));
        failed.into_iter().chain(ready).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_that_may_be_lost_is_told_again() {
        let mut list = List::default();
        assert!(list.enter(pb::LockWait { id: 1, ..Default::default() }, ()));
        assert!(list.leave(1, false));
        assert_eq!(list.told(false), Some(vec![]));
        list.not_told();
        assert_eq!((list.told(false), list.told(false)), (Some(vec![]), None));
    }
}
