//! Servers from folders, over TCP.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Buf, Endpoint, Fabric, Identity, Listener, Message, Pool, tcp::TcpFabric};
use strake_proto::{
    CapKey, Capability, Code, Rights,
    cap::derive_key,
    checksum::block_sums,
    data::{DataReply, DataRequest, FLAG_STABLE, Kind},
    opcode, pb,
};
use strake_runtime::Env;

use super::bed::{Authority, CHAIN, SESSION, bytes, chunk};
use crate::server::{Config, OssServer, TargetConfig, start_on_disk};

pub(super) const KEY: [u8; 32] = [7; 32];

pub(super) fn any_port() -> Endpoint {
    Endpoint::Tcp("127.0.0.1".into(), 0)
}

pub(super) async fn authority() -> (Arc<Authority>, Listener) {
    let a = Arc::new(Authority::default());
    a.map.lock().fs_uuid = vec![1; 16].into();
    let fabric = TcpFabric::new(
        Env::system(),
        Identity::server(&KEY),
        None,
        Pool::default(),
        Default::default(),
    );
    let listener = fabric.listen(&any_port(), a.clone()).await.unwrap();
    (a, listener)
}

pub(super) fn config(i: u32, dir: &std::path::Path, mds: &Endpoint) -> Config {
    let mut cfg = Config::new(format!("oss{i}"), any_port(), vec![mds.clone()]);
    let path = dir.join(format!("t{i}"));
    cfg.targets =
        vec![TargetConfig { path, size: 32 << 20, device: None, force: false, create: true }];
    cfg
}

pub(super) async fn call(
    server: &OssServer,
    op: u16,
    make: impl Fn() -> DataRequest,
    data: &[u8],
) -> (DataReply, Vec<u8>) {
    let identity = Identity::client(derive_key(&KEY, "strake client v1"));
    let fabric = TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default());
    let conn = fabric.connect(&server.endpoint(), None).await.unwrap();
    loop {
        let payload = if data.is_empty() { Vec::new() } else { vec![Buf::copy_from(data)] };
        let m = Message::new(op, make().encode()).with_payload(payload);
        match conn.call(m, Duration::from_secs(5)).await {
            Ok(m) => {
                let got = m.payload.iter().flat_map(|b| b.to_vec()).collect();
                return (DataReply::decode(&m.body).unwrap(), got);
            }
            Err(e) if e.is_retryable() => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(e) => panic!("{e:?}"),
        }
    }
}

#[tokio::test]
async fn two_servers_replicate_over_tcp_and_keep_it_across_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, mds) = authority().await;
    let mut servers = Vec::new();
    for i in 0..2 {
        servers.push(
            start_on_disk(config(i, dir.path(), mds.endpoint()), Env::system(), KEY).await.unwrap(),
        );
    }
    {
        let mut map = authority.map.lock();
        let replicas = [0, 1]
            .map(|target| pb::Replica { target, state: pb::ReplicaState::ReplicaServing as i32 });
        map.chains = vec![pb::Chain {
            id: CHAIN,
            epoch: 1,
            replicas: replicas.into(),
            preferred: vec![0, 1],
            lost: false,
        }];
        map.version += 1;
    }
    let cap_key = CapKey::from_cluster_key(&KEY);
    let rights = Rights::READ.and(Rights::WRITE);
    let cap = Capability {
        ino: 4,
        data: 9,
        session: SESSION,
        session_epoch: 1,
        expiry_ms: u64::MAX,
        rights,
        bound: strake_proto::Bound::Any,
        as_of: 0,
    };
    let request = |to| DataRequest {
        cap: Some(cap_key.seal(&cap)),
        session: SESSION,
        ..DataRequest::new(CHAIN, authority.chain().epoch, to, chunk(0))
    };
    let data = bytes(1, 3 << 20);
    let write = || DataRequest {
        kind: Kind::Write,
        flags: FLAG_STABLE,
        len: data.len() as u32,
        seq: 1,
        sums: block_sums(0, [&data[..]]),
        ..request(0)
    };
    let (r, _) = call(&servers[0], opcode::WRITE, write, &data).await;
    assert!(r.stable && r.boot_ids.len() == 2);
    let read = |to| move || DataRequest { len: 4 << 20, ..request(to) };
    assert!(call(&servers[1], opcode::READ, read(1), &[]).await.1 == data);

    servers.pop().unwrap().shutdown().await.unwrap();
    servers.push(
        start_on_disk(config(1, dir.path(), mds.endpoint()), Env::system(), KEY).await.unwrap(),
    );
    assert!(
        call(&servers[1], opcode::READ, read(1), &[]).await.1 == data,
        "in sync again by itself"
    );
    let status = servers[1].status();
    assert_eq!((status.targets[0].id, status.targets[0].chunks), (1, 1));
}

#[tokio::test]
async fn targets_of_another_cluster_and_missing_disks_are_refused() {
    let mut twice = config(0, std::path::Path::new("/nowhere"), &any_port());
    let device = Some("/dev/absent".into());
    twice.targets = ["a", "b"]
        .map(|p| TargetConfig {
            path: p.into(),
            size: 0,
            device: device.clone(),
            ..twice.targets[0].clone()
        })
        .into();
    let e = start_on_disk(twice, Env::system(), KEY).await.err().unwrap();
    assert!(
        e.code == Code::Inval && e.message.contains("two targets name the device /dev/absent"),
        "{e}"
    );
    let dir = tempfile::tempdir().unwrap();
    let (authority, mds) = authority().await;
    let server =
        start_on_disk(config(0, dir.path(), mds.endpoint()), Env::system(), KEY).await.unwrap();
    let refused = async |cfg: Config, why: &str| {
        let server = start_on_disk(cfg, Env::system(), KEY).await.unwrap();
        let status = server.status();
        assert!(status.targets.is_empty() && status.refused.len() == 1, "{status:?}");
        assert!(
            status.refused[0].why.contains(why) && status.notices[0].contains(why),
            "{status:?}"
        );
        server.shutdown().await.unwrap();
    };
    refused(config(0, dir.path(), mds.endpoint()), "another process serves").await;
    server.shutdown().await.unwrap();
    authority.map.lock().fs_uuid = vec![2; 16].into();
    refused(config(0, dir.path(), mds.endpoint()), "another cluster").await;
    let mut cfg = config(5, dir.path(), mds.endpoint());
    cfg.targets[0].create = false;
    refused(cfg, "no such target folder").await;
}
