//! Lists of operations that are much work are answered one at a time, whoever sent them: all other
//! requests wait for at most one of them. Lists of one machine wait for each other first, so that a
//! machine has one place in that queue. After a long list there is a pause of the same length, for
//! all other requests, and for members that apply the log more slowly than the leader. While others
//! are active, lists of one machine get an eighth of the time: its next one waits seven times as
//! long as the last one took.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, pb};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Most groups of a caller, as in Linux.
const MAX_GROUPS: usize = 65_536;
/// A list that took less needs no pause after it; most lists of real clients take less.
const LONG: Duration = Duration::from_millis(10);
/// No list is more work than this; a list that took longer waited for something else.
const LONGEST: Duration = Duration::from_millis(100);
/// What a list counts that is refused before it runs: it was decoded and checked.
const REFUSED: Duration = Duration::from_millis(3);
/// While others are active, a machine waits this many times as long as its last list took.
const SPACED: u32 = 7;
/// Most machines that are remembered while none of their lists waits.
const KEPT: usize = 64;

/// Sorts the groups and removes duplicates; this is what is logged. `E2BIG` for more groups than a
/// process can have.
pub(super) fn order_groups(creds: &mut Option<pb::Creds>) -> Result<()> {
    let Some(groups) = creds.as_mut().map(|c| &mut c.groups).filter(|g| !g.is_empty()) else {
        return Ok(());
    };
    if groups.len() > MAX_GROUPS {
        let m = format!("the caller has {} groups; {MAX_GROUPS} are the limit", groups.len());
        return Err(Error::new(Code::TooBig, m));
    }
    if !groups.is_sorted_by(|a, b| a < b) {
        groups.sort_unstable();
        groups.dedup();
    }
    Ok(())
}

/// The machine of a peer.
pub(super) fn machine(addr: &str) -> &str {
    addr.rsplit_once(':').map_or(addr, |(host, _)| host)
}

/// See the module.
#[derive(Default)]
pub(super) struct Heavy {
    all: Arc<Line>,
    machines: Mutex<BTreeMap<String, Arc<Line>>>,
}

/// A queue: one list at a time, and none before the pause is over.
struct Line {
    one: Arc<Semaphore>,
    pause: Mutex<Option<Instant>>,
}

impl Default for Line {
    fn default() -> Line {
        Line { one: Arc::new(Semaphore::new(1)), pause: Mutex::default() }
    }
}

impl Line {
    async fn turn(&self) -> Result<OwnedSemaphorePermit> {
        let closed = |_| Error::new(Code::Disconnected, "this server is stopping");
        let permit = self.one.clone().acquire_owned().await.map_err(closed)?;
        let pause = *self.pause.lock();
        if let Some(until) = pause {
            tokio::time::sleep_until(until).await;
        }
        Ok(permit)
    }

    fn is_at_rest(&self) -> bool {
        self.one.available_permits() > 0
            && self.pause.lock().is_none_or(|until| until <= Instant::now())
    }
}

/// While it lives, no other heavy list is answered.
pub(super) struct Turn {
    begun: Instant,
    all: Arc<Line>,
    machine: Arc<Line>,
    /// Whether other sessions are active.
    others: bool,
    /// The list is refused. Refused lists would follow each other at once.
    pub(super) refused: bool,
    _of_all: OwnedSemaphorePermit,
    _of_machine: OwnedSemaphorePermit,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let least = if self.refused { REFUSED } else { Duration::ZERO };
        let (now, took) = (Instant::now(), self.begun.elapsed().clamp(least, LONGEST));
        *self.all.pause.lock() = (took >= LONG).then(|| now + took);
        *self.machine.pause.lock() = self.others.then(|| now + took * SPACED);
    }
}

impl Heavy {
    /// Waits for a list's turn. `others`: other sessions are active.
    pub(super) async fn turn(&self, addr: &str, others: bool) -> Result<Turn> {
        let line = self.of_machine(machine(addr));
        let of_machine = line.turn().await?;
        let of_all = self.all.turn().await?;
        let (all, begun) = (self.all.clone(), Instant::now());
        let (refused, machine) = (false, line);
        Ok(Turn { begun, all, machine, others, refused, _of_all: of_all, _of_machine: of_machine })
    }

    fn of_machine(&self, name: &str) -> Arc<Line> {
        let mut all = self.machines.lock();
        if let Some(known) = all.get(name) {
            return known.clone();
        }
        if all.len() >= KEPT {
            all.retain(|_, line| Arc::strong_count(line) > 1 || !line.is_at_rest());
        }
        all.entry(name.to_owned()).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn groups_are_put_in_order_and_bounded() {
        let of = |groups: Vec<u32>| Some(pb::Creds { groups, ..Default::default() });
        let mut c = of(vec![5, 1, 5, 3]);
        order_groups(&mut c).unwrap();
        assert_eq!(c.unwrap().groups, [1, 3, 5]);
        order_groups(&mut of((0..65_536).collect())).unwrap();
        assert_eq!(order_groups(&mut of(vec![5; 65_537])).unwrap_err().code, Code::TooBig);
        order_groups(&mut None).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_long_list_there_is_a_pause_as_long() {
        let (h, begun) = (Heavy::default(), Instant::now());
        for (took, at) in [(9, 0), (40, 9), (5, 89), (5, 94)] {
            let turn = h.turn("tcp:10.0.0.1:1", false).await.unwrap();
            assert_eq!(begun.elapsed(), Duration::from_millis(at));
            tokio::time::advance(Duration::from_millis(took)).await;
            drop(turn);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn while_others_are_active_a_machine_has_an_eighth_of_the_time() {
        let (h, begun) = (Heavy::default(), Instant::now());
        let list = async |addr: &str, others| {
            let turn = h.turn(addr, others).await.unwrap();
            let at = begun.elapsed().as_millis();
            tokio::time::advance(Duration::from_millis(5)).await;
            drop(turn);
            at
        };
        assert_eq!(list("tcp:10.0.0.1:1", true).await, 0);
        assert_eq!(list("tcp:10.0.0.2:1", true).await, 5, "another machine does not wait");
        assert_eq!(list("tcp:10.0.0.1:2", false).await, 40);
        assert_eq!(list("tcp:10.0.0.1:1", false).await, 45, "it was alone");
        // A list that waited long for the log.
        let turn = h.turn("tcp:10.0.0.1:1", true).await.unwrap();
        tokio::time::advance(Duration::from_secs(5)).await;
        drop(turn);
        assert_eq!(list("tcp:10.0.0.1:1", false).await, 50 + 5000 + 700);
        h.turn("tcp:10.0.0.1:1", true).await.unwrap().refused = true;
        assert_eq!(list("tcp:10.0.0.1:1", false).await, 5755 + 21);
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_has_one_place_in_the_queue() {
        let h = Arc::new(Heavy::default());
        let first = h.turn("tcp:10.0.0.1:1", false).await.unwrap();
        let ask = |addr: &'static str| {
            let h = h.clone();
            tokio::spawn(async move { h.turn(addr, false).await.map(|t| (addr, t)) })
        };
        let many: Vec<_> = (0..5).map(|_| ask("tcp:10.0.0.1:2")).collect();
        tokio::task::yield_now().await;
        let other = ask("tcp:10.0.0.2:1");
        tokio::task::yield_now().await;
        drop(first);
        // The first machine's waiting lists have one place, behind the other machine's list.
        let (_, turn) = timeout(Duration::from_secs(1), other).await.unwrap().unwrap().unwrap();
        assert!(many.iter().all(|m| !m.is_finished()));
        drop(turn);
        for m in many {
            drop(timeout(Duration::from_secs(1), m).await.unwrap().unwrap().unwrap());
        }
        for i in 0..1000 {
            drop(h.turn(&format!("tcp:10.1.{i}.1:5"), false).await.unwrap());
        }
        assert!(h.machines.lock().len() <= KEPT);
    }
}
