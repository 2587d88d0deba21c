//! A simple form of a metadata server's leases for tests: every client gets them, and the test
//! recalls them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use strake_proto::pb::{self, op::Op};
use tokio::sync::watch;

/// How long a request for recalls waits when there are none.
const WAIT: Duration = Duration::from_secs(3);

pub struct Leases {
    /// Term of the leases in milliseconds; 0: no leases are given.
    pub term_ms: AtomicU32,
    /// Metadata requests that were answered.
    pub requests: AtomicU64,
    recalls: watch::Sender<Vec<pb::Recall>>,
    /// The last recall number that each session has acknowledged.
    acknowledged: watch::Sender<BTreeMap<u64, u64>>,
}

impl Default for Leases {
    fn default() -> Leases {
        let (recalls, acknowledged) = (watch::Sender::default(), watch::Sender::default());
        Leases { term_ms: AtomicU32::new(0), requests: AtomicU64::new(0), recalls, acknowledged }
    }
}

impl Leases {
    pub fn grant(&self, ops: &[pb::Op], reply: &mut pb::MetaReply) {
        self.requests.fetch_add(1, Relaxed);
        if self.term_ms.load(Relaxed) == 0 {
            return;
        }
        let parents = ops.iter().filter_map(|o| match o.op.as_ref()? {
            Op::Lookup(o) => Some(o.parent),
            Op::Create(o) => Some(o.parent),
            Op::Mkdir(o) => Some(o.parent),
            Op::Mknod(o) => Some(o.parent),
            Op::Symlink(o) => Some(o.parent),
            Op::Link(o) => Some(o.parent),
            Op::Unlink(o) => Some(o.parent),
            Op::Rmdir(o) => Some(o.parent),
            Op::Readdir(o) => Some(o.dir),
            _ => None,
        });
        let found = reply.results.iter().flat_map(|r| {
            let listed = r.entries.iter().filter_map(|e| e.attr);
            r.attr.into_iter().chain(listed).map(|a| a.ino)
        });
        let all: BTreeSet<u64> = parents.chain(found).collect();
        reply.granted = all.into_iter().collect();
    }

    /// Recalls these inodes from all; returns when all have forgotten them.
    pub async fn recall(&self, inos: &[u64]) {
        let mut last = 0;
        self.recalls.send_modify(|all| {
            for ino in inos {
                last = all.len() as u64 + 1;
                all.push(pb::Recall { number: last, ino: *ino, ..Default::default() });
            }
        });
        let mut acknowledged = self.acknowledged.subscribe();
        let settled = acknowledged.wait_for(|by| by.values().all(|n| *n >= last));
        tokio::time::timeout(WAIT * 2, settled)
            .await
            .expect("a recall is not acknowledged")
            .unwrap();
    }

    pub async fn asked(&self, r: pb::RecallRequest) -> pb::RecallReply {
        self.acknowledged.send_modify(|by| {
            by.insert(r.session, r.acknowledged);
        });
        let mut recalls = self.recalls.subscribe();
        let more = recalls.wait_for(|all| all.len() as u64 > r.acknowledged);
        let recalls = match tokio::time::timeout(WAIT, more).await {
            Ok(all) => all.unwrap()[r.acknowledged as usize..].to_vec(),
            Err(_) => Vec::new(),
        };
        pb::RecallReply { recalls, ..Default::default() }
    }
}
