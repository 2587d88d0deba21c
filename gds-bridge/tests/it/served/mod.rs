//! The in-memory cluster of the client's tests, served over real sockets, for programs in other
//! processes.

#![allow(dead_code)]

use std::{os::unix::fs::PermissionsExt, path::PathBuf, sync::Arc};

use strake_client::{Client, Config};
use strake_fabric::{Fabric, Identity, Listener, Pool, TcpFabric};
use strake_proto::cap::derive_key;
use strake_runtime::Env;

use super::common::{Cluster, MDS, node};

/// Served until it is dropped.
pub struct Served {
    pub cluster: Cluster,
    /// The value for `mds=`.
    pub mds: String,
    /// A file with the client key.
    pub key: PathBuf,
    pub dir: tempfile::TempDir,
    _listeners: Vec<Listener>,
    runtime: tokio::runtime::Runtime,
}

const CLUSTER_KEY: [u8; 32] = [9; 32];

impl Served {
    /// `targets` storage servers with two replicas per chain, and three metadata servers.
    pub fn new(targets: u32) -> Served {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let cluster = Cluster::new(targets, 2);
        let fabric = TcpFabric::new(
            Env::system(),
            Identity::server(&CLUSTER_KEY),
            None,
            Pool::default(),
            Default::default(),
        );
        let nodes: Vec<u32> = MDS.iter().copied().chain((0..targets).map(node)).collect();
        let listen = async |n: u32| {
            let at = "tcp:127.0.0.1:0".parse().unwrap();
            fabric.listen(&at, cluster.net.service(n)).await.unwrap()
        };
        let listeners: Vec<Listener> = nodes.iter().map(|n| runtime.block_on(listen(*n))).collect();
        let at: Vec<String> = listeners.iter().map(|l| l.endpoint().to_string()).collect();
        cluster.change_map(|map| {
            for n in &mut map.nodes {
                n.endpoints = nodes
                    .iter()
                    .zip(&at)
                    .filter(|(id, _)| **id == n.id)
                    .map(|(_, at)| at.clone())
                    .collect();
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("client.key");
        std::fs::write(&key, hex::encode(derive_key(&CLUSTER_KEY, "strake client v1"))).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        let mds = at[..MDS.len()].join(",");
        Served { cluster, mds, key, dir, _listeners: listeners, runtime }
    }

    /// A client in this process, which also uses the sockets.
    pub async fn client(&self) -> Client {
        let identity = Identity::client(derive_key(&CLUSTER_KEY, "strake client v1"));
        let fabric =
            TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default());
        let config = Config::new(self.mds.split(',').map(|e| e.parse().unwrap()).collect());
        Client::connect(config, Env::system(), Arc::new(fabric)).await.unwrap()
    }

    pub fn block_on<T>(&self, f: impl Future<Output = T>) -> T {
        self.runtime.block_on(f)
    }
}
