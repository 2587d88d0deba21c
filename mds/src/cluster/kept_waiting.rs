//! Heartbeats that arrived and have no answer yet, because this server has not confirmed yet that
//! it leads. Their senders send no others meanwhile: that silence does not mean a dead node. A
//! heartbeat without an answer grants no lease. So it is safe to count such a sender as alive for
//! longer than others; this only delays the moment when its targets leave their chains.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::NodeId;

/// A waiting heartbeat counts for at most this long. A leader without a majority ends sooner, and
/// its waits with it.
pub(crate) const LONGEST: Duration = Duration::from_secs(10);

/// The arrival times of waiting heartbeats, by the node that sent them.
#[derive(Default)]
pub(crate) struct KeptWaiting(BTreeMap<NodeId, Vec<Duration>>);

impl KeptWaiting {
    pub(crate) fn begin(&mut self, arrived: Duration, node: NodeId) {
        self.0.entry(node).or_default().push(arrived);
    }

    /// Returns whether the wait counted until its end.
    pub(crate) fn end(&mut self, now: Duration, arrived: Duration, node: NodeId) -> bool {
        let Some(all) = self.0.get_mut(&node) else { return false };
        let Some(at) = all.iter().position(|a| *a == arrived) else { return false };
        all.swap_remove(at);
        if all.is_empty() {
            self.0.remove(&node);
        }
        is_believed(now, arrived)
    }

    /// The arrival of the first heartbeat of a node that still counts.
    pub(crate) fn since(&self, now: Duration, node: NodeId) -> Option<Duration> {
        self.0.get(&node)?.iter().copied().filter(|a| is_believed(now, *a)).min()
    }
}

fn is_believed(now: Duration, arrived: Duration) -> bool {
    now.saturating_sub(arrived) < LONGEST
}
