//! A small cluster in memory that speaks the real requests: three metadata servers over one state,
//! and storage servers with one target each over one state. Replication is immediate, so that these
//! tests exercise only the client.

#![allow(dead_code)]

mod mds;
mod net;
mod oss;

use std::sync::Arc;

pub use mds::Mds;
pub use net::{MemFabric, Net, config, env};
pub use oss::Oss;
use strake_client::{Client, Config, Creds};
use strake_fabric::Buf;
use strake_proto::{CapKey, pb};

pub const MDS: [u32; 3] = [1, 2, 3];
/// Node of target `t`.
pub fn node(t: u32) -> u32 {
    100 + t
}

pub struct Cluster {
    pub net: Arc<Net>,
    pub mds: Arc<Mds>,
    pub oss: Arc<Oss>,
}

pub fn root() -> Creds {
    Creds::default()
}
pub fn user() -> Creds {
    Creds { uid: 1000, gid: 1000, groups: vec![] }
}

impl Cluster {
    /// `targets` targets; chain `c` starts at target `c` and has `copies` replicas.
    pub fn new(targets: u32, copies: u32) -> Cluster {
        let net = Arc::new(Net::default());
        let key = CapKey::from_cluster_key(&[9; 32]);
        let serving = pb::ReplicaState::ReplicaServing as i32;
        let mds_node = |id: u32| pb::Node {
            id,
            role: 1,
            endpoints: vec![format!("sim:{id}")],
            name: format!("mds{id}"),
            ..Default::default()
        };
        let oss_node = |t: u32| pb::Node {
            id: node(t),
            role: 2,
            endpoints: vec![format!("sim:{}", node(t))],
            name: format!("oss{t}"),
            ..Default::default()
        };
        let chain = |c: u32| pb::Chain {
            id: c,
            epoch: 1,
            replicas: (0..copies)
                .map(|i| pb::Replica { target: (c + i) % targets, state: serving })
                .collect(),
            preferred: vec![c],
            lost: false,
        };
        let map = pb::ClusterMap {
            version: 1,
            nodes: MDS.iter().copied().map(mds_node).chain((0..targets).map(oss_node)).collect(),
            targets: (0..targets)
                .map(|id| pb::Target {
                    id,
                    node: node(id),
                    alive: true,
                    stamp: 1,
                    ..Default::default()
                })
                .collect(),
            chains: (0..targets).map(chain).collect(),
            sets: vec![pb::ChainSet {
                id: 1,
                copies,
                chains: (0..targets).collect(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let oss = Arc::new(Oss::new(map.clone(), key.clone()));
        let mds = Arc::new(Mds::new(map, key, oss.clone()));
        for n in MDS {
            net.put(n, Arc::new(mds::Front(mds.clone(), n)));
        }
        for t in 0..targets {
            net.put(node(t), Arc::new(oss::Front(oss.clone(), t)));
        }
        Cluster { net, mds, oss }
    }

    pub async fn client(&self, seed: u8) -> Client {
        self.client_with(seed, config()).await
    }

    pub async fn client_with(&self, seed: u8, cfg: Config) -> Client {
        Client::connect(cfg, env(seed), Arc::new(MemFabric(self.net.clone()))).await.unwrap()
    }

    /// Changes the cluster map as the mds would; the servers know at once, clients when they ask.
    pub fn change_map(&self, f: impl FnOnce(&mut pb::ClusterMap)) {
        let mut map = self.mds.map();
        map.version += 1;
        f(&mut map);
        self.oss.set_map(map.clone());
        self.mds.set_map(map);
    }

    /// Ends all capabilities that were given so far.
    pub fn end_rights(&self) {
        let caps = self.mds.caps();
        self.oss.faults(|f| f.ended = caps);
    }

    /// Takes a target out of all chains that have another replica.
    pub fn take_out(&self, target: u32) {
        self.change_map(|m| {
            for c in &mut m.chains {
                let others = c.replicas.iter().any(|r| r.target != target);
                if let Some(r) = c.replicas.iter_mut().find(|r| r.target == target)
                    && others
                {
                    r.state = pb::ReplicaState::ReplicaOffline as i32;
                    c.epoch += 1;
                }
                c.replicas.sort_by_key(|r| r.state);
            }
        });
    }

    /// A process restart of targets: unflushed bytes are gone, boot ids are new; chains stay, with
    /// a new epoch.
    pub fn restart(&self, targets: &[u32]) {
        for t in targets {
            self.oss.lose_unflushed(*t);
        }
        self.oss.resync(targets);
        self.change_map(|m| {
            for c in &mut m.chains {
                if c.replicas.iter().any(|r| targets.contains(&r.target)) {
                    c.epoch += 1;
                }
            }
        });
    }
}

/// All bytes of a file as one vector.
pub fn join(bufs: &[Buf]) -> Vec<u8> {
    bufs.iter().flat_map(|b| b.to_vec()).collect()
}

/// A layout over all chains from chain 0.
pub fn striped(stripe_size: u32, count: i32) -> Option<pb::LayoutSpec> {
    Some(pb::LayoutSpec { stripe_size, stripe_count: count, ..Default::default() })
}

/// Runs a client until `live` returns, then kills it: it is in a runtime that ends, and nothing of
/// it is cleaned up.
pub fn killed<F: Future<Output = ()> + Send>(live: impl FnOnce() -> F + Send) {
    std::thread::scope(|s| {
        s.spawn(|| {
            let paused = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()
                .unwrap();
            paused.block_on(live());
        });
    });
}
