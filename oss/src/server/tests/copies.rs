//! The last good copy is on a replica that is not in sync.

use std::{sync::atomic::Ordering, time::Duration};

use strake_proto::{Code, data::DataRequest, map::ChainExt, opcode, pb::ReplicaState};
use tokio::time::Instant;

use super::{
    bed::Cluster,
    flip_everywhere, flip_now,
    leaving::{chunks, empty, shall_have},
    scrub::{counts, filled, flip_record, in_sync, is_whole, key, scrubbed, status},
};
use crate::engine::record::segment_key;

const AT: u32 = 8192;

/// Seconds of paused time.
async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

/// Node 1 has died and the others know it; block 2 of chunk 1 is damaged on node 0, the only one
/// left.
async fn one_away(nodes: u32) -> (Cluster, Vec<Vec<u8>>) {
    let mut c = Cluster::start(nodes).await;
    if nodes > 2 {
        shall_have(&c, &[0, 1]);
        empty(&c, 2).await;
    }
    let want = filled(&c).await;
    c.kill(1);
    pass(3).await;
    c.authority.tick();
    flip_everywhere(&c, 0, &want[1][AT as usize..AT as usize + 4096]).await;
    (c, want)
}

async fn is_lost(c: &Cluster, target: u32) {
    let read = DataRequest { offset: AT, len: 10, ..c.request(target, 1) };
    let e = c.call(target, opcode::READ, &read, &[]).await.unwrap_err();
    assert_eq!(e.code, Code::Corrupt, "{e}");
}

/// The returning member has the block intact at an older version: another part of its chunk was
/// written since.
#[tokio::test(start_paused = true)]
async fn a_member_that_returns_gives_what_is_unchanged_before_it_is_filled() {
    let (mut c, mut want) = one_away(2).await;
    c.write(1, 400_000, b"while it was away", 50).await.unwrap();
    want[1][400_000..400_017].copy_from_slice(b"while it was away");
    assert_eq!(counts(&scrubbed(&c, 0).await), (1, 0, 1), "nobody has it good now");
    c.boot(1).await;
    in_sync(&c).await;
    for i in 0..2 {
        is_whole(&c, i, &want).await;
        assert_eq!(status(&c, i as usize).lost, 0, "target {i}");
    }
    assert_eq!(counts(&status(&c, 0)), (1, 1, 0));
    assert_eq!(status(&c, 0).findings[0].repaired_from, Some(1));
}

/// As above, but the block itself was written since. Then no reader may see the member's copy.
#[tokio::test(start_paused = true)]
async fn an_older_block_is_no_copy() {
    let (mut c, want) = one_away(2).await;
    // First the block's neighbour, so that the write succeeds and the block stays as it is. Then
    // the block itself, which is damaged after that.
    let new = vec![7; 4096];
    c.write(1, AT, &new, 50).await.unwrap();
    c.flush().await.unwrap();
    flip_now(&c, 0, &new);
    c.boot(1).await;
    in_sync(&c).await;
    for i in 0..2 {
        is_lost(&c, i).await;
        assert!(c.read(i, 1, 0, AT).await.unwrap().1 == want[1][..AT as usize]);
    }
    c.write(1, AT, &want[1][AT as usize..AT as usize + 4096], 51).await.unwrap();
    for i in 0..2 {
        is_whole(&c, i, &want).await;
    }
}

/// A record of 64 blocks is damaged, so their checksums are not known. Only a copy of the same
/// version has the right contents.
#[tokio::test(start_paused = true)]
async fn without_checksums_only_the_same_version_helps() {
    for written in [false, true] {
        let (mut c, mut want) = one_away(2).await;
        if written {
            c.write(2, 2_000_000, b"while it was away", 50).await.unwrap();
            want[2][2_000_000..2_000_017].copy_from_slice(b"while it was away");
        }
        c.flush().await.unwrap();
        c.kill(0);
        c.boot(0).await;
        flip_record(&c, 0, &segment_key(&key(2), 1), 700);
        c.boot(1).await;
        in_sync(&c).await;
        pass(60).await;
        for i in 0..2 {
            if !written {
                is_whole(&c, i, &want).await;
                continue;
            }
            let read = c.read(i, 2, 262_144, 10).await;
            assert_eq!(read.unwrap_err().code, Code::Corrupt);
            assert!(c.read(i, 2, 0, 262_144).await.unwrap().1 == want[2][..262_144]);
        }
    }
}

/// A replacement was resynced with the damage, and the returning target is no member any more.
#[tokio::test(start_paused = true)]
async fn a_former_member_that_returns_is_asked_before_what_it_has_goes() {
    let (mut c, mut want) = one_away(3).await;
    shall_have(&c, &[0, 2]);
    in_sync(&c).await;
    for i in [0, 2] {
        is_lost(&c, i).await;
        assert_eq!(counts(&scrubbed(&c, i as usize).await), (1, 0, 1), "target {i}");
    }
    // Both members have changed the chunk since, elsewhere, and truncated and removed other chunks.
    c.write(1, 400_000, b"while it was away", 50).await.unwrap();
    want[1][400_000..400_017].copy_from_slice(b"while it was away");
    c.trim(3, 1_000_000).await;
    want[2].truncate(1_000_000);
    want[3].clear();
    // The replica that was resynced with the damage is now the only one, and then resyncs the
    // other.
    c.kill(0);
    c.wipe(0).await;
    pass(3).await;
    c.boot(0).await;
    in_sync(&c).await;
    is_lost(&c, 0).await;
    let before = c.nodes[2].server.as_ref().unwrap().status().targets[0].chunks;
    c.boot(1).await;
    pass(10).await;
    for i in [0, 2] {
        is_whole(&c, i, &want).await;
        assert_eq!(status(&c, i as usize).lost, 0, "target {i}");
        assert_eq!(chunks(&c, i as usize), before, "nothing comes back");
    }
    empty(&c, 1).await;
}

/// A member shut out for a bad link may still be reachable from the damaged one, at once or later.
#[tokio::test(start_paused = true)]
async fn a_member_that_is_shut_out_gives_what_is_lost_while_it_is_out() {
    for cut in [false, true] {
        let c = Cluster::start(2).await;
        let want = filled(&c).await;
        c.authority.shut_out.lock().insert(1);
        pass(3).await;
        assert_eq!(c.authority.states()[1], (1, ReplicaState::ReplicaOffline));
        let epoch = c.authority.chain().epoch;
        flip_everywhere(&c, 0, &want[1][AT as usize..AT as usize + 4096]).await;
        let read = async || {
            let read = DataRequest { offset: AT, len: 4096, ..c.request(0, 1) };
            c.call(0, opcode::READ, &read, &[]).await
        };
        if cut {
            c.net.cut.lock().insert(1);
            let began = Instant::now();
            for _ in 0..3 {
                assert_eq!(read().await.unwrap_err().code, Code::NotServing);
            }
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
            assert_eq!(counts(&status(&c, 0)), (1, 0, 1), "nobody who is there has it");
            c.net.cut.lock().remove(&1);
            pass(1).await;
        }
        assert!(read().await.unwrap().1 == want[1][AT as usize..AT as usize + 4096]);
        assert_eq!((counts(&status(&c, 0)), c.authority.chain().epoch), ((1, 1, 0), epoch));
        is_whole(&c, 0, &want).await;
    }
}

/// The member answers, and has no good copy either. Reads of lost data do not ask it each time.
#[tokio::test(start_paused = true)]
async fn a_member_that_is_shut_out_and_cannot_help_is_not_asked_by_every_read() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    c.authority.shut_out.lock().insert(1);
    pass(3).await;
    for i in [0, 1] {
        flip_everywhere(&c, i, &want[1][AT as usize..AT as usize + 4096]).await;
    }
    let asked = || c.net.copies_asked.load(Ordering::Relaxed);
    for seconds in 0..3 {
        for _ in 0..50 {
            let read = DataRequest { offset: AT, len: 4096, ..c.request(0, 1) };
            assert_eq!(
                c.call(0, opcode::READ, &read, &[]).await.unwrap_err().code,
                Code::NotServing
            );
        }
        assert_eq!(asked(), seconds + 1);
        pass(1).await;
    }
}

/// The damage is not known when a target is drained.
#[tokio::test(start_paused = true)]
async fn what_a_drained_target_had_goes_only_when_the_others_can_read_it() {
    let c = Cluster::start(3).await;
    let want = filled(&c).await;
    c.flush().await.unwrap();
    for i in [0, 1] {
        flip_everywhere(&c, i, &want[1][AT as usize..AT as usize + 4096]).await;
    }
    shall_have(&c, &[0, 1]);
    empty(&c, 2).await;
    for i in [0, 1] {
        is_whole(&c, i, &want).await;
        assert_eq!(counts(&status(&c, i as usize)), (1, 1, 0), "target {i}");
    }
}

/// The target keeps a chunk that the others cannot read and that it cannot give, until they do not
/// need it.
#[tokio::test(start_paused = true)]
async fn a_chunk_that_is_damaged_elsewhere_is_kept() {
    let (mut c, want) = one_away(3).await;
    let new = vec![7; 4096];
    c.write(1, AT, &new, 50).await.unwrap();
    c.flush().await.unwrap();
    flip_now(&c, 0, &new);
    shall_have(&c, &[0, 2]);
    in_sync(&c).await;
    c.boot(1).await;
    pass(100).await;
    assert_eq!(chunks(&c, 1), 1);
    let notices = c.nodes[1].server.as_ref().unwrap().status().notices;
    assert!(notices.iter().any(|n| n.contains("keeps 1 chunks")), "{notices:?}");
    is_lost(&c, 0).await;
    c.write(1, AT, &want[1][AT as usize..AT as usize + 4096], 51).await.unwrap();
    empty_soon(&c, 1).await;
    is_whole(&c, 2, &want).await;
}

async fn empty_soon(c: &Cluster, node: usize) {
    pass(40).await;
    empty(c, node).await;
}

/// The replacement is not there yet: the former member keeps what it has, and gives what is lost.
#[tokio::test(start_paused = true)]
async fn a_former_member_keeps_all_until_its_replacement_is_filled() {
    let (mut c, want) = one_away(3).await;
    c.kill(2);
    shall_have(&c, &[0, 2]);
    pass(3).await;
    let had = 4;
    c.boot(1).await;
    pass(60).await;
    assert_eq!(chunks(&c, 1), had);
    assert_ne!(c.authority.chain().state_of(2), Some(ReplicaState::ReplicaServing));
    is_whole(&c, 0, &want).await;
    c.boot(2).await;
    in_sync(&c).await;
    empty(&c, 1).await;
    is_whole(&c, 2, &want).await;
}

/// An update of a part of the damaged block comes while the replica with the good copy is resynced:
/// both apply it, or none.
#[tokio::test(start_paused = true)]
async fn an_update_of_a_part_of_what_is_damaged_beside_a_fill_takes_nobody_out() {
    for other in [false, true] {
        let (mut c, mut want) = one_away(2).await;
        if other {
            c.write(1, 400_000, b"elsewhere", 49).await.unwrap();
            want[1][400_000..400_009].copy_from_slice(b"elsewhere");
        }
        c.boot(1).await;
        for seq in 0..40 {
            let at = AT as usize + 10 * seq;
            c.write(1, at as u32, b"part", 50 + seq as u64).await.unwrap();
            want[1][at..at + 4].copy_from_slice(b"part");
        }
        in_sync(&c).await;
        for i in 0..2 {
            is_whole(&c, i, &want).await;
            let notices = c.nodes[i as usize].server.as_ref().unwrap().status().notices;
            assert!(notices.iter().all(|n| n.contains("direct I/O")), "{notices:?}");
        }
    }
}
