//! Disks that decay: a record of a storage server's chunk table, a record of a metadata server's
//! state, or its Raft log is damaged, while the server runs or is down. In one run only one server
//! of each kind is damaged, so that everything has a good copy elsewhere.

use std::{sync::Arc, time::Duration};

use strake_mds::namespace::Namespace;
use strake_oss::engine::record::{TABLE_DIGEST_KEY, TARGET_KEY};
use strake_proto::{Code, Error, Result};
use strake_store::{MemStore, MetaStore as _};
use tokio::time::sleep;

use super::Cluster;
use crate::faults::Stored;

impl Cluster {
    /// Damages something on a node's disk; `dice` decides what. `busy`: an operation was under way
    /// there. The two records that say whose a table is and how much it holds are spared: a target
    /// without them is refused as a whole and needs its folder to recover, which the simulator does
    /// not have.
    pub fn spoil(&mut self, node: u32, what: Stored, dice: u64, busy: bool) {
        let mds = self.mds.iter().find(|m| m.node == node);
        let oss = self.oss.iter().find(|o| o.node == node);
        let hit = match (what, mds, oss) {
            (Stored::Table, _, Some(o)) => {
                o.table.flip(dice, |k| k != TARGET_KEY && k != TABLE_DIGEST_KEY)
            }
            (Stored::State, Some(m), _) => m.store.spoil(dice, |_| true),
            (Stored::Log, Some(m), _) => {
                m.log.damage();
                Some(Default::default())
            }
            _ => None,
        };
        if let Some(key) = hit {
            self.net.note(&format!("spoilt {node} {what:?} {key:02x?}"));
            self.net.made(what.kind(), busy);
        }
    }
}

/// Checks that a metadata server whose log is damaged refuses to start: otherwise it could
/// vote, or claim entries that it may have lost. Returns an error if it does start.
pub async fn refuses(cluster: &mut Cluster, node: u32) -> Result<()> {
    cluster.launch(node).await?;
    for _ in 0..1000 {
        sleep(Duration::from_millis(1)).await;
        match cluster.are_up(&[node]) {
            Err(e) if e.message.contains("damaged") => return Ok(()),
            Err(e) => return Err(e.context("not because its log is damaged")),
            Ok(true) => break,
            Ok(false) => {}
        }
    }
    Err(Error::new(Code::Corrupt, format!("metadata server {node} started on a damaged log")))
}

/// As [`start_on_disk`](strake_mds::server::start_on_disk) does with a state that cannot be opened:
/// removes it, so that the server starts without and gets a copy from the others.
pub(super) fn set_aside_if_damaged(store: &Arc<MemStore>) -> Result<bool> {
    let damaged = Namespace::open(store.clone()).is_err_and(|e| e.code == Code::Corrupt);
    if damaged {
        store.clear()?;
        store.sync()?;
    }
    Ok(damaged)
}
