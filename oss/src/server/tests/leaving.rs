//! A target that has left a chain.

use std::time::Duration;

use strake_proto::pb::{self, ReplicaState};

use super::bed::{CHAIN, Cluster, bytes};

const CHUNKS: u64 = 600;

async fn filled() -> Cluster {
    let c = Cluster::start(3).await;
    for i in 0..CHUNKS {
        c.write(i, 0, &bytes(i, 5000), i + 1).await.unwrap();
    }
    c
}

/// Makes these the targets of the chain. One that is new to it begins out of sync.
pub(super) fn shall_have(c: &Cluster, targets: &[u32]) {
    let mut map = c.authority.map.lock();
    let chain = &mut map.chains[0];
    chain.replicas.retain(|r| targets.contains(&r.target));
    for t in targets {
        if chain.replicas.iter().all(|r| r.target != *t) {
            chain
                .replicas
                .push(pb::Replica { target: *t, state: ReplicaState::ReplicaOffline as i32 });
        }
    }
    chain.preferred = targets.to_vec();
    chain.epoch += 1;
    map.version += 1;
}

pub(super) fn chunks(c: &Cluster, node: usize) -> u64 {
    c.nodes[node].server.as_ref().unwrap().status().targets[0].chunks
}

pub(super) async fn empty(c: &Cluster, node: usize) {
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        if chunks(c, node) == 0 {
            return;
        }
    }
    panic!("{} chunks stay", chunks(c, node));
}

#[tokio::test(start_paused = true)]
async fn what_it_had_is_removed_and_stays_so_over_a_restart() {
    let mut c = filled().await;
    let used = |c: &Cluster| c.nodes[2].server.as_ref().unwrap().status().targets[0].used;
    let before = used(&c);
    shall_have(&c, &[0, 1]);
    empty(&c, 2).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(used(&c) < before / 10, "{} of {before} bytes stay", used(&c));
    for i in 0..CHUNKS {
        assert!(c.read(1, i, 0, 5000).await.unwrap().1 == bytes(i, 5000));
    }
    // It remembers that it has left, for a metadata group that may not know.
    c.kill(2);
    c.boot(2).await;
    let sight = c.authority.sights.lock().iter().find(|s| s.chain == CHAIN).cloned().unwrap();
    assert!(sight.epoch == 2 && sight.replicas.iter().all(|r| r.target != 2), "{sight:?}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(chunks(&c, 2), 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_restart_interrupted_is_removed_then() {
    let mut c = filled().await;
    c.flush().await.unwrap();
    c.net.cut.lock().insert(2);
    shall_have(&c, &[0, 1]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(chunks(&c, 2), CHUNKS, "it has not heard of it");
    c.kill(2);
    c.net.cut.lock().clear();
    c.boot(2).await;
    empty(&c, 2).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_joins_again_is_filled_wherever_its_removal_stood() {
    for pause_ms in [0, 1, 10, 25, 45, 2000] {
        let c = filled().await;
        shall_have(&c, &[0, 1]);
        tokio::time::sleep(Duration::from_millis(250 + pause_ms)).await;
        shall_have(&c, &[0, 1, 2]);
        c.write(3, 0, b"written meanwhile", CHUNKS + 1).await.unwrap();
        c.whole().await;
        assert_eq!(chunks(&c, 2), CHUNKS, "after {pause_ms} ms");
        for i in 0..CHUNKS {
            let mut want = bytes(i, 5000);
            if i == 3 {
                want[..17].copy_from_slice(b"written meanwhile");
            }
            assert!(
                c.read(2, i, 0, 5000).await.unwrap().1 == want,
                "chunk {i} after {pause_ms} ms"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_removed_while_nobody_has_it_for_certain() {
    let c = filled().await;
    let doubt = |c: &Cluster, yes| {
        let mut map = c.authority.map.lock();
        let fresh = || pb::Doubt { chain: CHAIN, epoch: 1, ..Default::default() };
        map.doubts = if yes { vec![fresh()] } else { Vec::new() };
        map.chains[0].epoch += 1;
        map.version += 1;
    };
    doubt(&c, true);
    shall_have(&c, &[0, 1]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(chunks(&c, 2), CHUNKS);
    doubt(&c, false);
    empty(&c, 2).await;
}
