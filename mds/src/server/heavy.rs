//! Lists of operations that are much work are answered one at a time, whoever sent them: everybody
//! else's requests wait for one of them at most. Those of one machine wait among themselves, so
//! that it takes one place in that queue. After one that took long there is a pause as long, for
//! everybody else's requests, and for members that execute the log more slowly than the leader.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, pb};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

/// Groups of a caller, as in Linux.
const MAX_GROUPS: usize = 65_536;
/// A list that took less needs no pause after it: most of those that clients send in earnest.
const LONG: Duration = Duration::from_millis(10);
/// Machines that are remembered while nobody there waits.
const KEPT: usize = 64;

/// `E2BIG` for more groups than a process can have. Puts them in order, each once: this is what is
/// logged.
pub(super) fn order_groups(creds: &mut Option<pb::Creds>) -> Result<()> {
    let Some(groups) = creds.as_mut().map(|c| &mut c.groups).filter(|g| !g.is_empty()) else { return Ok(()) };
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
pub(super) struct Heavy {
    one: Arc<Semaphore>,
    /// No list begins before.
    pause: Arc<Mutex<Option<Instant>>>,
    machines: Mutex<BTreeMap<String, Weak<Semaphore>>>,
}

/// While it lives, no other heavy list is answered.
pub(super) struct Turn {
    begun: Instant,
    pause: Arc<Mutex<Option<Instant>>>,
    _of_all: OwnedSemaphorePermit,
    _of_machine: OwnedSemaphorePermit,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        *self.pause.lock() = (took >= LONG).then(|| Instant::now() + took);
    }
}

impl Default for Heavy {
    fn default() -> Heavy {
        Heavy { one: Arc::new(Semaphore::new(1)), pause: Arc::default(), machines: Mutex::default() }
    }
}

impl Heavy {
    /// Waits for a list's turn.
    pub async fn turn(&self, addr: &str) -> Result<Turn> {
        let closed = |_| Error::new(Code::Disconnected, "the server stops");
        let own = self.of_machine(machine(addr));
        let of_machine = own.acquire_owned().await.map_err(closed)?;
        let of_all = self.one.clone().acquire_owned().await.map_err(closed)?;
        let pause = *self.pause.lock();
        if let Some(until) = pause {
            tokio::time::sleep_until(until).await;
        }
        Ok(Turn { begun: Instant::now(), pause: self.pause.clone(), _of_all: of_all, _of_machine: of_machine })
    }

    fn of_machine(&self, name: &str) -> Arc<Semaphore> {
        let mut all = self.machines.lock();
        if let Some(known) = all.get(name).and_then(Weak::upgrade) {
            return known;
        }
        if all.len() >= KEPT {
            all.retain(|_, s| s.strong_count() > 0);
        }
        let new = Arc::new(Semaphore::new(1));
        all.insert(name.to_owned(), Arc::downgrade(&new));
        new
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
            let turn = h.turn("tcp:10.0.0.1:1").await.unwrap();
            assert_eq!(begun.elapsed(), Duration::from_millis(at));
            tokio::time::advance(Duration::from_millis(took)).await;
            drop(turn);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_has_one_place_in_the_queue() {
        let h = Arc::new(Heavy::default());
        let first = h.turn("tcp:10.0.0.1:1").await.unwrap();
        let ask = |addr: &'static str| {
            let h = h.clone();
            tokio::spawn(async move { h.turn(addr).await.map(|t| (addr, t)) })
        };
        let many: Vec<_> = (0..5).map(|_| ask("tcp:10.0.0.1:2")).collect();
        tokio::task::yield_now().await;
        let other = ask("tcp:10.0.0.2:1");
        tokio::task::yield_now().await;
        drop(first);
        // The one that waits for all of the first machine is not before the other machine's.
        let (_, turn) = timeout(Duration::from_secs(1), other).await.unwrap().unwrap().unwrap();
        assert!(many.iter().all(|m| !m.is_finished()));
        drop(turn);
        for m in many {
            drop(timeout(Duration::from_secs(1), m).await.unwrap().unwrap().unwrap());
        }
        for i in 0..1000 {
            drop(h.turn(&format!("tcp:10.1.{i}.1:5")).await.unwrap());
        }
        assert!(h.machines.lock().len() <= KEPT);
    }
}
