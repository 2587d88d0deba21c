//! Byte-range locks of one inode inside one client: overlapping writes run one after the other, in
//! the order of arrival.
//!
//! [`Queue`] is the pure part. A waiter proceeds when no earlier entry, waiting or holding,
//! overlaps it.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::oneshot;

struct Entry {
    range: Range<u64>,
    /// Present while it waits.
    wake: Option<oneshot::Sender<()>>,
}

/// Holders and waiters, by ticket.
#[derive(Default)]
struct Queue {
    entries: BTreeMap<u64, Entry>,
    next: u64,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Queue {
    /// Whether `ticket` may proceed now.
    fn is_free(&self, ticket: u64, range: &Range<u64>) -> bool {
        !self.entries.range(..ticket).any(|(_, e)| overlap(&e.range, range))
    }

    fn enter(
        &mut self,
        range: Range<u64>,
        wake: impl FnOnce() -> oneshot::Sender<()>,
    ) -> (u64, bool) {
        let ticket = self.next;
        self.next += 1;
        let free = self.is_free(ticket, &range);
        self.entries.insert(ticket, Entry { range, wake: if free { None } else { Some(wake()) } });
        (ticket, free)
    }

    fn leave(&mut self, ticket: u64) {
        let Some(gone) = self.entries.remove(&ticket) else { return };
        let ready: Vec<u64> = self
            .entries
            .range(ticket..)
            .filter(|(t, e)| {
                e.wake.is_some() && overlap(&e.range, &gone.range) && self.is_free(**t, &e.range)
            })
            .map(|(t, _)| *t)
            .collect();
        for t in ready {
            if let Some(w) = self.entries.get_mut(&t).and_then(|e| e.wake.take()) {
                // The waiter may have gone away; then its guard leaves the queue.
                let _ = w.send(());
            }
        }
    }
}

/// The locks of one inode.
#[derive(Clone, Default)]
pub(crate) struct RangeLock(Arc<Mutex<Queue>>);

/// Holds a range until dropped.
pub(crate) struct RangeGuard {
    lock: RangeLock,
    ticket: u64,
}

impl RangeLock {
    /// Waits for the lock. Dropping the future gives the place in the queue up.
    pub async fn lock(&self, range: Range<u64>) -> RangeGuard {
        let mut wait = None;
        let ticket = self.0.lock().enter(range, || {
            let (tx, rx) = oneshot::channel();
            wait = Some(rx);
            tx
        });
        let guard = RangeGuard { lock: self.clone(), ticket: ticket.0 };
        if let Some(rx) = wait {
            // The sender is dropped only after it sent.
            let _ = rx.await;
        }
        guard
    }

    pub async fn lock_all(&self) -> RangeGuard {
        self.lock(0..u64::MAX).await
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.lock.0.lock().leave(self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In any order of arrivals and departures, two holders never overlap, and overlapping ones
        /// hold in the order of arrival.
        #[test]
        fn holders_never_overlap_and_order_is_kept(ops in prop::collection::vec((0u64..50, 1u64..20, any::<bool>()), 1..80)) {
            let mut q = Queue::default();
            let mut waits: BTreeMap<u64, oneshot::Receiver<()>> = BTreeMap::new();
            let mut holding: BTreeMap<u64, Range<u64>> = BTreeMap::new();
            let mut waiting: BTreeMap<u64, Range<u64>> = BTreeMap::new();
            for (start, len, leave) in ops {
                if leave {
                    if let Some(t) = holding.keys().nth(start as usize % holding.len().max(1)).copied() {
                        holding.remove(&t);
                        q.leave(t);
                    }
                } else {
                    let r = start..start + len;
                    let mut rx = None;
                    let (t, free) = q.enter(r.clone(), || { let (tx, x) = oneshot::channel(); rx = Some(x); tx });
                    if free { holding.insert(t, r); } else { waits.insert(t, rx.unwrap()); waiting.insert(t, r); }
                }
                let woken: Vec<u64> = waits.iter_mut().filter_map(|(t, rx)| rx.try_recv().is_ok().then_some(*t)).collect();
                for t in woken {
                    waits.remove(&t);
                    holding.insert(t, waiting.remove(&t).unwrap());
                }
                for (t, a) in &holding {
                    for (u, b) in &holding {
                        prop_assert!(t == u || !overlap(a, b));
                    }
                    for (u, b) in waiting.range(..t) {
                        prop_assert!(!overlap(a, b), "{t} went before {u}");
                    }
                }
                for (t, b) in &waiting {
                    let blocked = holding.values().any(|a| overlap(a, b)) || waiting.range(..t).any(|(_, a)| overlap(a, b));
                    prop_assert!(blocked, "{t} waits for nothing");
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_waiter_blocks_nobody() {
        let l = RangeLock::default();
        let first = l.lock(0..10).await;
        // Given up while it waits.
        assert!(
            tokio::time::timeout(std::time::Duration::from_millis(1), l.lock(5..15)).await.is_err()
        );
        let third = l.lock(10..15).await;
        drop((first, third));
        l.lock_all().await;
    }
}
