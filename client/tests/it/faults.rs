//! File I/O while servers die, restart, lie and fill up.

use std::time::Duration;

use crate::common::*;
use strake_client::{Client, Config, File};
use strake_fabric::Buf;
use strake_proto::{Code, layout::splitmix64, pb};
use tokio::time::Instant;

const RW: u32 = 2;

async fn file(c: &Client, count: i32) -> File {
    c.create(&user(), c.root(), b"f", 0o644, RW, false, striped(65536, count)).await.unwrap().0
}

async fn content(f: &File) -> Vec<u8> {
    join(&f.read(0, 64 << 20).await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn unstable_bytes_of_restarted_replicas_are_written_again_in_order() {
    for copies in [1, 2] {
        let c = Cluster::new(3, copies);
        let a = c.client(1).await;
        let f = file(&a, -1).await;
        f.write_all_at(0, &[1; 400_000]).await.unwrap();
        f.fsync().await.unwrap();
        f.write_all_at(0, &[2; 300_000]).await.unwrap();
        f.write_all_at(100_000, &[3; 100_000]).await.unwrap();
        c.restart(&[0, 1, 2]);
        // Written before the loss is noticed, on top of lost bytes.
        f.write_all_at(150_000, &[4; 1000]).await.unwrap();
        let mut want = vec![1; 400_000];
        want[..300_000].fill(2);
        want[100_000..200_000].fill(3);
        want[150_000..151_000].fill(4);
        f.fsync().await.unwrap();
        assert!(a.stats().replays > 0);
        assert!(content(&f).await == want);
        // Stable now: another restart loses nothing.
        c.restart(&[0, 1, 2]);
        assert!(content(&f).await == want);
        assert_eq!(a.stats().unstable_bytes, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn one_surviving_replica_needs_no_replay() {
    let c = Cluster::new(2, 2);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[5; 500_000]).await.unwrap();
    c.take_out(0);
    c.oss.lose_unflushed(0);
    f.fsync().await.unwrap();
    assert_eq!(a.stats().replays, 0);
    assert!(content(&f).await == [5; 500_000]);
}

#[tokio::test(start_paused = true)]
async fn writes_under_way_survive_a_map_change_and_apply_once() {
    let c = Cluster::new(3, 2);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    c.oss.faults(|f| f.write_delay = Duration::from_millis(20));
    let write = tokio::spawn({
        let f = f.clone();
        async move { f.write_all_at(0, &[6; 1 << 20]).await }
    });
    tokio::time::sleep(Duration::from_millis(10)).await;
    c.net.set_down(node(0), true);
    c.take_out(0);
    write.await.unwrap().unwrap();
    assert!(content(&f).await == [6; 1 << 20]);
    f.fsync().await.unwrap();
    assert!(a.stats().retries > 0);
}

#[tokio::test(start_paused = true)]
async fn lost_replies_never_apply_twice() {
    let c = Cluster::new(3, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    for i in 0..20u64 {
        for t in 0..3 {
            c.net.lose_replies(node(t), 2);
        }
        c.net.lose_replies(1, 1);
        f.write_all_at(i * 65536, &[i as u8; 65536]).await.unwrap();
        let name = format!("n{i}");
        a.create(&user(), a.root(), name.as_bytes(), 0o600, RW, true, None)
            .await
            .unwrap()
            .0
            .close()
            .await
            .unwrap();
    }
    assert_eq!(c.oss.counts(|n| n.applied), 20);
    assert!(c.oss.counts(|n| n.known) > 0);
    assert!(content(&f).await == (0..20u8).flat_map(|i| vec![i; 65536]).collect::<Vec<_>>());
}

/// The file may have no name any more: if one close counted twice, the servers would free the file
/// under the other handle.
#[tokio::test(start_paused = true)]
async fn a_close_is_told_once_though_its_answer_is_lost() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, 1).await;
    for lost in 1..5 {
        let (second, _) = a.open(&user(), f.ino(), RW).await.unwrap();
        assert_eq!(c.mds.opens(), 2);
        c.net.lose_replies(1, lost);
        second.close().await.unwrap();
        // At the latest, the reassertion on the next connection closes it.
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(c.mds.opens(), 1, "{lost} answers lost");
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_is_found_by_hint_and_without_and_opens_are_reasserted() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    let (g, _) = a.open(&user(), f.ino(), 0).await.unwrap();
    for (leader, dead) in [(2, None), (3, Some(2)), (1, None), (2, Some(1))] {
        c.mds.elect(leader);
        if let Some(d) = dead {
            c.net.set_down(d, true);
        }
        let name = format!("by{leader}");
        let began = tokio::time::Instant::now();
        let (n, _) =
            a.create(&user(), a.root(), name.as_bytes(), 0o600, RW, true, None).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(2));
        assert_eq!(c.mds.opens(), 3, "two old handles are reasserted");
        n.close().await.unwrap();
        a.unlink(&user(), a.root(), name.as_bytes()).await.unwrap();
        if let Some(d) = dead {
            c.net.set_down(d, false);
        }
    }
    // A leader that falls silent is left after one attempt.
    c.net.set_silent(2, true);
    c.mds.elect(3);
    a.getattr(&user(), f.ino()).await.unwrap();
    f.close().await.unwrap();
    g.close().await.unwrap();
    assert_eq!(c.mds.opens(), 0);
    assert!(a.stats().failovers >= 4);
}

#[tokio::test(start_paused = true)]
async fn dirty_replicas_send_the_reader_to_the_tail() {
    let c = Cluster::new(3, 3);
    let a = c.client(1).await;
    let f = file(&a, 1).await;
    f.write_all_at(0, &[8; 65536]).await.unwrap();
    c.oss.faults(|f| f.dirty = [0, 1, 2].into());
    let began = tokio::time::Instant::now();
    assert!(content(&f).await == [8; 65536]);
    assert!(began.elapsed() < Duration::from_millis(5), "no pause on the way to the tail");
    // Clean chunks are read from all replicas.
    c.oss.faults(|f| f.dirty.clear());
    f.write_all_at(0, &vec![8; 4 << 20]).await.unwrap();
    let d = a.open(&user(), f.ino(), 0o40000).await.unwrap().0;
    d.read(0, 4 << 20).await.unwrap();
    assert!(
        c.oss.counts(|n| n.reads.values().all(|r| *r >= 10)),
        "{:?}",
        c.oss.counts(|n| n.reads.clone())
    );
}

#[tokio::test(start_paused = true)]
async fn bad_bytes_of_one_replica_are_never_returned() {
    let c = Cluster::new(3, 2);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[9; 1 << 20]).await.unwrap();
    c.oss.faults(|f| f.corrupt = [1].into());
    assert!(content(&f).await == [9; 1 << 20]);
    assert!(a.stats().corrupt_replies > 0);
    c.oss.faults(|f| f.corrupt = [0, 1, 2].into());
    let (direct, _) = a.open(&user(), f.ino(), 0o40000).await.unwrap();
    let e = direct.read(0, 4096).await.unwrap_err();
    assert_eq!((e.code, e.errno()), (Code::Corrupt, 5));
}

#[tokio::test(start_paused = true)]
async fn changed_bytes_are_sent_again_and_full_targets_say_so() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    c.oss.faults(|f| f.resend = 3);
    f.write_all_at(0, &[1; 200_000]).await.unwrap();
    assert_eq!(a.stats().resends, 3);
    c.oss.faults(|f| f.full = true);
    assert_eq!(f.write(0, vec![Buf::copy_from(&[2; 10])]).await.unwrap_err().errno(), 28);
    c.oss.faults(|f| f.full = false);
    f.fsync().await.unwrap();
    assert!(content(&f).await == [1; 200_000]);
}

#[tokio::test(start_paused = true)]
async fn an_evicted_client_loses_unstable_bytes_loudly_and_works_on() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    let (g, _) = a.open(&user(), f.ino(), RW).await.unwrap();
    f.write_all_at(0, &[1; 100_000]).await.unwrap();
    c.mds.evict_all();
    c.oss.faults(|f| f.no_session = 1);
    assert_eq!(f.fsync().await.unwrap_err().errno(), 5, "once for each open file");
    assert_eq!(g.fsync().await.unwrap_err().errno(), 5);
    f.fsync().await.unwrap();
    let (h, _) = a.open(&user(), f.ino(), RW).await.unwrap();
    h.fsync().await.unwrap();
    // Using the handle reopens it in the new session; the program need not do anything.
    f.write_all_at(0, &[2; 100_000]).await.unwrap();
    g.fsync().await.unwrap();
    assert!(content(&g).await == [2; 100_000]);
    assert_eq!(a.stats().sessions_lost, 1);
    assert_eq!(c.mds.opens(), 3);
    for x in [f, g, h] {
        x.close().await.unwrap();
    }
    assert_eq!(c.mds.opens(), 0);
}

/// When a session is lost, the servers discard what it wrote beyond the recorded end of the file.
/// If the client's next session reported the old end, reads there would return zeros.
#[tokio::test(start_paused = true)]
async fn an_evicted_client_does_not_report_the_end_of_bytes_that_were_cut() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 1000]).await.unwrap();
    f.fsync().await.unwrap();
    // The client learns of the eviction from its report or from a write: the order must not matter.
    for by_write in [false, true] {
        f.write_all_at(1000, &[2; 9000]).await.unwrap();
        c.mds.evict_all();
        c.oss.faults(|f| f.no_session = 1);
        if by_write {
            let _ = f.write_all_at(0, &[1; 10]).await;
        }
        assert_eq!(f.fsync().await.unwrap_err().errno(), 5);
        f.fsync().await.unwrap();
        // A new open sees where the file ends now.
        let (g, attr) = a.open(&user(), f.ino(), RW).await.unwrap();
        assert!(g.read(1000, 1).await.unwrap().is_empty() && attr.size == 10_000);
        g.close().await.unwrap();
        f.truncate(1000).await.unwrap();
        assert_eq!(a.getattr(&user(), f.ino()).await.unwrap().size, 1000);
    }
    f.write_all_at(1000, &[3; 10]).await.unwrap();
    f.fsync().await.unwrap();
    assert_eq!(a.getattr(&user(), f.ino()).await.unwrap().size, 1010);
}

/// As SQLite does with its journal: after a failed fsync a program reads back what it wrote. It
/// must get an error, not older bytes or none.
#[tokio::test(start_paused = true)]
async fn lost_bytes_are_an_error_to_those_who_had_the_file_open() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 1000]).await.unwrap();
    f.fsync().await.unwrap();
    let (reader, _) = a.open(&user(), f.ino(), 0).await.unwrap();
    f.write_all_at(1000, &[2; 9000]).await.unwrap();
    c.mds.evict_all();
    c.oss.faults(|f| f.no_session = 1);
    assert_eq!(f.fsync().await.unwrap_err().errno(), 5);
    for old in [&f, &reader] {
        for (at, len) in [(1000, 10), (9999, 1), (0, 4096)] {
            assert_eq!(old.read(at, len).await.unwrap_err().errno(), 5, "{at} {len}");
            assert!(old.read_ready(at, len).is_none());
        }
        assert!(
            old.read(0, 1000).await.unwrap().iter().flat_map(|b| b.to_vec()).eq([1; 1000]),
            "these are there"
        );
        assert!(old.read(10_000, 10).await.unwrap().is_empty(), "nobody wrote there");
    }
    assert_eq!(
        a.getattr(&user(), f.ino()).await.unwrap().size,
        10_000,
        "it does not shrink under them"
    );
    let (new, _) = a.open(&user(), f.ino(), RW).await.unwrap();
    assert!(content(&new).await == [1; 1000]);
    new.write_all_at(1000, &[3; 500]).await.unwrap();
    assert!(
        f.read(1000, 500).await.unwrap().iter().flat_map(|b| b.to_vec()).eq([3; 500]),
        "written anew"
    );
    assert_eq!(f.read(1400, 200).await.unwrap_err().errno(), 5);
    f.close().await.unwrap();
    assert_eq!(reader.close().await.unwrap_err().errno(), 5, "once for each open file");
    assert_eq!(a.getattr(&user(), new.ino()).await.unwrap().size, 1500);
    new.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_was_overtaken_is_an_error_once() {
    let c = Cluster::new(1, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 1000]).await.unwrap();
    c.restart(&[0]);
    c.oss.faults(|f| f.overtaken = 1);
    assert_eq!(f.fsync().await.unwrap_err().errno(), 5);
    f.fsync().await.unwrap();
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_was_cut_off_is_never_replayed() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 300_000]).await.unwrap();
    f.truncate(1000).await.unwrap();
    f.truncate(300_000).await.unwrap();
    c.restart(&[0, 1]);
    f.fsync().await.unwrap();
    let mut want = vec![0; 300_000];
    want[..1000].fill(1);
    assert!(content(&f).await == want);
}

#[tokio::test(start_paused = true)]
async fn a_dead_chain_is_an_error_after_the_time_limit_and_heals_before_it() {
    let c = Cluster::new(1, 1);
    let a = c.client_with(1, Config { op_timeout: Duration::from_secs(5), ..config() }).await;
    let f = file(&a, -1).await;
    c.net.set_down(node(0), true);
    let began = tokio::time::Instant::now();
    let e = f.write_all_at(0, &[1]).await.unwrap_err();
    assert_eq!(e.errno(), 110);
    assert!(e.to_string().contains("connection refused"), "the cause is named: {e}");
    assert!(began.elapsed() >= Duration::from_secs(5) && began.elapsed() < Duration::from_secs(7));
    let write = tokio::spawn({
        let f = f.clone();
        async move { f.write_all_at(0, &[1]).await }
    });
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.net.set_down(node(0), false);
    write.await.unwrap().unwrap();
    assert!(a.stats().longest_stall_ms >= 3000);
    assert_eq!(c.oss.counts(|n| n.round), 1, "one was given up");
    // A server that takes requests and says nothing is as good as dead, until the map says so.
    let c = Cluster::new(2, 2);
    let a = c.client(2).await;
    let f = file(&a, -1).await;
    c.net.set_silent(node(0), true);
    let write = tokio::spawn({
        let f = f.clone();
        async move { f.write_all_at(0, &[1; 200_000]).await }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    c.take_out(0);
    let began = tokio::time::Instant::now();
    write.await.unwrap().unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "the new map ends the wait: {:?}",
        began.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn unstable_bytes_stay_within_their_limit_and_old_ones_are_flushed() {
    let c = Cluster::new(2, 1);
    let a = c.client_with(1, Config { unstable_limit: 1 << 20, ..config() }).await;
    let f = file(&a, -1).await;
    for i in 0..40u64 {
        f.write_all_at(i * 200_000, &vec![i as u8; 200_000]).await.unwrap();
        assert!(a.stats().unstable_bytes <= 1 << 20);
    }
    f.write_all_at(0, &vec![1; 3 << 20]).await.unwrap();
    assert!(c.oss.counts(|n| n.flushes) > 4);
    f.write_all_at(0, &[1]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1600)).await;
    assert_eq!(a.stats().unstable_bytes, 0, "flushed by age");
    // Many small writes to one chunk are flushed before the chunk forgets its writers.
    let before = c.oss.counts(|n| n.flushes);
    for i in 0..200u64 {
        f.write_all_at(i * 10, &[i as u8; 10]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert!(c.oss.counts(|n| n.flushes) >= before);
}

#[tokio::test(start_paused = true)]
async fn capabilities_are_renewed_before_they_expire_and_after_a_refusal() {
    let c = Cluster::new(2, 1);
    c.mds.caps_expire(1_700_000_000_000 + 300_000);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 10]).await.unwrap();
    c.mds.caps_expire(u64::MAX / 2);
    tokio::time::sleep(Duration::from_secs(290)).await;
    f.write_all_at(0, &[2; 10]).await.unwrap();
    assert_eq!(c.mds.opens(), 1, "the renewal leaves no open behind");
    c.oss.faults(|f| f.bad_cap = 1);
    f.write_all_at(0, &[3; 10]).await.unwrap();
    c.oss.faults(|f| f.bad_cap = 1);
    assert!(content(&f).await == [3; 10]);
    let (direct, _) = a.open(&user(), f.ino(), 0o40000).await.unwrap();
    c.oss.faults(|f| f.bad_cap = 100);
    assert_eq!(direct.read(0, 10).await.unwrap_err().code, Code::BadCap);
}

#[tokio::test(start_paused = true)]
async fn what_has_ended_is_asked_for_anew_at_once() {
    let c = Cluster::new(3, 2);
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    let (reader, _) = a.open(&user(), f.ino(), 0o40000).await.unwrap();
    f.write_all_at(0, &[1; 400_000]).await.unwrap();
    let begun = Instant::now();
    for i in 2..20 {
        c.end_rights();
        f.write_all_at(0, &[i; 400_000]).await.unwrap();
        c.end_rights();
        assert!(join(&reader.read(0, 1 << 20).await.unwrap()) == [i; 400_000]);
        c.end_rights();
        f.fsync().await.unwrap();
        assert_eq!(a.stats().unstable_bytes, 0);
    }
    // Messages take time here, but a pause of at least 2.5 ms for each of the 54 refusals would
    // exceed this limit.
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    assert_eq!(c.mds.opens(), 2, "renewals leave no open behind");
    // A flush and a write are repeated as often as they are refused.
    let one = c.client(2).await;
    let g =
        one.create(&user(), one.root(), b"g", 0o644, RW, false, striped(65536, 1)).await.unwrap().0;
    c.oss.faults(|f| f.bad_cap = 8);
    g.write_all_at(0, &[1; 10]).await.unwrap();
    c.oss.faults(|f| f.bad_cap = 8);
    g.fsync().await.unwrap();
    g.write_all_at(0, &[1; 10]).await.unwrap();
    c.oss.faults(|f| f.bad_cap = 100);
    assert_eq!(g.fsync().await.unwrap_err().code, Code::BadCap);
    c.oss.faults(|f| f.bad_cap = 0);
    g.fsync().await.expect("the bytes are kept");
}

#[tokio::test(start_paused = true)]
async fn replays_go_on_when_the_right_they_began_under_has_ended() {
    let c = Cluster::new(3, 2);
    c.mds.want_releases();
    let a = c.client(1).await;
    let f = file(&a, -1).await;
    f.write_all_at(0, &[1; 300_000]).await.unwrap();
    c.restart(&[0, 1, 2]);
    c.end_rights();
    f.fsync().await.unwrap();
    assert!(a.stats().replays > 0);
    c.restart(&[0, 1, 2]);
    assert!(content(&f).await == [1; 300_000]);

    // The close fails, but the client keeps the bytes and makes them stable when the servers
    // return.
    f.write_all_at(0, &[2; 300_000]).await.unwrap();
    let ino = f.ino();
    (0..3).for_each(|t| c.net.set_down(node(t), true));
    assert_eq!(f.close().await.unwrap_err().code, Code::TimedOut);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!c.mds.is_written(ino), "released");
    assert!(a.stats().unstable_bytes > 0);
    c.restart(&[0, 1, 2]);
    c.end_rights();
    (0..3).for_each(|t| c.net.set_down(node(t), false));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(a.stats().unstable_bytes, 0);
    c.restart(&[0, 1, 2]);
    let (f, _) = a.open(&user(), ino, 0).await.unwrap();
    assert!(content(&f).await == [2; 300_000]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!c.mds.is_written(ino), "released again");
}

#[tokio::test(start_paused = true)]
async fn what_was_written_before_a_client_became_read_only_is_made_safe() {
    let c = Cluster::new(3, 2);
    let a = c.client(1).await;
    c.mds.caps_expire(1);
    let f = file(&a, -1).await;
    f.write_all_at(0, &[7; 100_000]).await.unwrap();
    a.set_read_only(true);
    f.fsync().await.expect("opened again for that");
    assert_eq!(a.stats().unstable_bytes, 0);
    c.restart(&[0, 1, 2]);
    assert!(content(&f).await == [7; 100_000]);
    let ino = f.ino();
    let refused = |e: strake_proto::Error| assert_eq!(e.code, Code::RoFs, "{e}");
    refused(a.open(&user(), ino, 2).await.map(drop).unwrap_err());
    refused(a.open(&user(), ino, 1).await.map(drop).unwrap_err());
    refused(a.create(&user(), a.root(), b"f", 0o644, 2, false, None).await.map(drop).unwrap_err());
    a.open(&user(), ino, 0).await.expect("only to read").0.close().await.unwrap();
    a.set_read_only(false);
    a.open(&user(), ino, 2).await.expect("again").0.close().await.unwrap();
    f.close().await.unwrap();
}

/// Writes, truncates, restarts, lost replies, ended capabilities and leader changes in random
/// order, from a few seeds.
#[tokio::test(start_paused = true)]
async fn random_faults_against_a_model() {
    for seed in 1..=12u64 {
        let c = Cluster::new(4, 1 + (seed % 3) as u32);
        c.mds.want_releases();
        let a = c.client_with(seed as u8, Config { write_back: seed % 4 > 1, ..config() }).await;
        let f = file(&a, -1).await;
        let mut rnd = seed;
        let mut model = vec![0u8; 1 << 20];
        f.write_all_at(0, &model).await.unwrap();
        for i in 0..120u64 {
            let mut next = |n: u64| splitmix64(&mut rnd) % n;
            match next(11) {
                0 => {
                    let t = next(4) as u32;
                    c.restart(&[t]);
                }
                1 => c.restart(&[0, 1, 2, 3]),
                2 => {
                    let t = next(4) as u32;
                    c.net.lose_replies(node(t), next(4) as u32);
                }
                3 => {
                    c.mds.elect(1 + next(3) as u32);
                    c.net.lose_replies(1 + next(3) as u32, 1);
                }
                4 => {
                    f.fsync().await.unwrap();
                    assert!(content(&f).await == model, "seed {seed}, step {i}");
                }
                5 => tokio::time::sleep(Duration::from_millis(next(1500))).await,
                6 => {
                    let size = next(1 << 20) as usize;
                    f.truncate(size as u64).await.unwrap();
                    f.truncate(1 << 20).await.unwrap();
                    model[size..].fill(0);
                }
                7 => c.end_rights(),
                _ => {
                    let len = 1 + next(200_000) as usize;
                    let at = next((1 << 20) - len as u64) as usize;
                    f.write_all_at(at as u64, &vec![i as u8 + 1; len]).await.unwrap();
                    model[at..at + len].fill(i as u8 + 1);
                }
            }
        }
        f.fsync().await.unwrap();
        c.restart(&[0, 1, 2, 3]);
        assert!(content(&f).await == model, "seed {seed}");
        let attr = a.getattr(&pb::Creds::default(), f.ino()).await.unwrap();
        assert_eq!(attr.size, 1 << 20);
        f.close().await.unwrap();
    }
}
