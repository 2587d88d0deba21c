//! Heartbeats that arrived and have no answer yet, because it is not confirmed yet that this server
//! leads. While they wait their senders send no others: that is not the silence of a dead node.
//! A heartbeat without an answer grants no lease, so to believe in its sender for longer than in
//! others only delays that its targets leave their chains.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::NodeId;

/// A wait is believed for so long. A leader without a majority ends sooner, and its waits with it.
pub(crate) const LONGEST: Duration = Duration::from_secs(10);

/// When those arrived that wait, by the node that sent them.
#[derive(Default)]
pub(crate) struct KeptWaiting(BTreeMap<NodeId, Vec<Duration>>);

impl KeptWaiting {
    pub(crate) fn begin(&mut self, arrived: Duration, node: NodeId) {
        self.0.entry(node).or_default().push(arrived);
    }

    /// Whether it was believed to the end.
    pub(crate) fn end(&mut self, now: Duration, arrived: Duration, node: NodeId) -> bool {
        let Some(all) = self.0.get_mut(&node) else { return false };
        let Some(at) = all.iter().position(|a| *a == arrived) else { return false };
        all.swap_remove(at);
        if all.is_empty() {
            self.0.remove(&node);
        }
        is_believed(now, arrived)
    }

    /// When the first one arrived of those of a node that are believed.
    pub(crate) fn since(&self, now: Duration, node: NodeId) -> Option<Duration> {
        self.0.get(&node)?.iter().copied().filter(|a| is_believed(now, *a)).min()
    }
}

fn is_believed(now: Duration, arrived: Duration) -> bool {
    now.saturating_sub(arrived) < LONGEST
}
