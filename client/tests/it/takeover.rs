//! A client dies, and the next one continues with its handover memory. The first client is leaked
//! in a runtime that has ended: nothing of it runs any more and nothing is cleaned up, as after a
//! kill.

use std::{sync::Arc, time::Duration};

use crate::{common::*, left::*};
use strake_client::{Caller, Client, Config, File, Former, Operation};
use strake_fabric::Buf;
use strake_fuse::HandoverMemory;
use strake_proto::Code;

const RW: u32 = 2;

fn with(keep: &Arc<HandoverMemory>) -> Config {
    Config { handover: Some(keep.clone()), ..config() }
}

fn new_keep() -> Arc<HandoverMemory> {
    HandoverMemory::create([7; 16], 64 << 20).unwrap()
}

async fn file(c: &Client) -> File {
    c.create(&user(), c.root(), b"f", 0o644, RW, false, striped(65536, -1)).await.unwrap().0
}

async fn take_over(c: &Cluster, keep: &HandoverMemory, ino: u64) -> (Client, File) {
    let keep = next(keep);
    let b = c.client_with(2, with(&keep)).await;
    let former = Former { ino, flags: RW, uid: 1000, gid: 1000 };
    let f =
        b.take_over(&[former], &operations(&keep.left_requests())).await.pop().unwrap().unwrap();
    (b, f)
}

const INO: u64 = 102;

/// Writes synced bytes, then unsynced ones whose end the metadata server does not know.
fn half_synced(c: &Cluster, keep: &Arc<HandoverMemory>) {
    killed(|| async {
        let a = c.client_with(1, with(keep)).await;
        let f = file(&a).await;
        assert_eq!(f.ino(), INO);
        f.write(0, kept(keep, 1, 300_000)).await.unwrap();
        f.fsync().await.unwrap();
        f.write(250_000, kept(keep, 2, 100_000)).await.unwrap();
        f.write(260_000, kept(keep, 3, 1)).await.unwrap();
        assert_eq!(c.mds.size_of(INO), 300_000, "not told yet");
        std::mem::forget((a, f));
    });
}

#[tokio::test(start_paused = true)]
async fn unstable_bytes_and_sizes_are_taken_over() {
    for restarted in [false, true] {
        let (c, keep) = (Cluster::new(3, 2), new_keep());
        half_synced(&c, &keep);
        if restarted {
            c.restart(&[0, 1, 2]);
        }
        let (b, f) = take_over(&c, &keep, INO).await;
        assert_eq!(c.mds.opens(), 1, "that of the dead client is not counted");
        let mut want = vec![1; 350_000];
        want[250_000..].fill(2);
        want[260_000] = 3;
        assert_eq!(f.attr().size, 350_000);
        f.fsync().await.unwrap();
        assert_eq!((b.stats().replays > 0, c.mds.size_of(INO)), (restarted, 350_000));
        f.write_all_at(0, &[1]).await.unwrap();
        assert_eq!(
            c.oss.counts(|n| n.round),
            1,
            "what the former client had on its way is given up"
        );
        f.fsync().await.unwrap();
        c.restart(&[0, 1, 2]);
        assert!(join(&f.read(0, 1 << 20).await.unwrap()) == want, "stable now");
        f.close().await.unwrap();
        b.close().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_only_client_takes_over_what_was_written_before() {
    let (c, keep) = (Cluster::new(3, 2), new_keep());
    half_synced(&c, &keep);
    let keep = next(&keep);
    let b = c.client_with(2, Config { read_only: true, ..with(&keep) }).await;
    let former = Former { ino: INO, flags: RW, uid: 1000, gid: 1000 };
    let f =
        b.take_over(&[former], &operations(&keep.left_requests())).await.pop().unwrap().unwrap();
    f.fsync().await.unwrap();
    assert_eq!((f.attr().size, c.mds.size_of(INO)), (350_000, 350_000));
    f.close().await.unwrap();
    b.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn bytes_outside_of_kept_memory_are_lost_only_with_a_server() {
    for restarted in [false, true] {
        let (c, keep) = (Cluster::new(3, 2), new_keep());
        killed(|| async {
            let a = c.client_with(1, with(&keep)).await;
            let f = file(&a).await;
            f.write_all_at(0, &[1; 100_000]).await.unwrap();
            std::mem::forget((a, f));
        });
        if restarted {
            c.restart(&[0, 1, 2]);
        }
        let (_b, f) = take_over(&c, &keep, INO).await;
        assert_eq!(f.fsync().await.is_err(), restarted);
        f.fsync().await.expect("told once");
        assert_eq!(f.flush().await.is_err(), restarted);
        f.close().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_with_its_session_is_told_by_each_call() {
    let (c, keep) = (Cluster::new(3, 2), new_keep());
    half_synced(&c, &keep);
    c.mds.evict_all();
    let (_b, f) = take_over(&c, &keep, INO).await;
    assert_eq!(f.write_all_at(0, &[9]).await.unwrap_err().code, Code::Io);
    assert_eq!(f.fsync().await.unwrap_err().code, Code::Io);
    assert_eq!(f.flush().await.unwrap_err().code, Code::Io);
    assert_eq!(c.mds.size_of(INO), 300_000, "nobody reads zeros beyond the recorded end");
    // Each call has reported the loss once; now the file works again.
    f.write_all_at(0, &[9]).await.unwrap();
    f.fsync().await.unwrap();
    f.close().await.unwrap();
}

/// A soft mount's close gives up while the servers are away. The client keeps sending the written
/// bytes, and so does the next daemon.
#[tokio::test(start_paused = true)]
async fn writes_of_a_file_that_nobody_has_open_are_taken_over() {
    let (c, keep) = (Cluster::new(3, 2), new_keep());
    half_synced(&c, &keep);
    c.restart(&[0, 1, 2]);
    let keep = next(&keep);
    let b = c.client_with(2, with(&keep)).await;
    assert!(b.take_over(&[], &operations(&keep.left_requests())).await.is_empty());
    let (f, _) = b.open(&user(), INO, RW).await.unwrap();
    f.fsync().await.unwrap();
    c.restart(&[0, 1, 2]);
    let mut want = vec![1; 350_000];
    want[250_000..].fill(2);
    want[260_000] = 3;
    assert!(join(&f.read(0, 1 << 20).await.unwrap()) == want);
    f.close().await.unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await; // in paused time: the other one's close
    assert_eq!(c.mds.opens(), 0);
    b.close().await.unwrap();
}

/// Creates a file exclusively, so a second run fails.
async fn make(c: &Client, operation: Option<&Operation>) -> strake_proto::Result<File> {
    let caller = Caller { creds: &user(), operation };
    Ok(c.create(caller, c.root(), b"new", 0o644, RW, true, None).await?.0)
}

/// Appends ten fives, as a part of this operation.
async fn append(
    f: &File,
    keep: &HandoverMemory,
    operation: Option<&Operation>,
) -> strake_proto::Result<u64> {
    f.append_in_turn(operation, kept(keep, 5, 10), None, ()).await.map(|landed| landed.offset)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_again_is_not_done_again() {
    let (c, keep) = (Cluster::new(3, 2), new_keep());
    killed(|| async {
        let a = c.client_with(1, with(&keep)).await;
        let f = file(&a).await;
        f.write_all_at(0, &[1; 10]).await.unwrap();
        let (making, appending) = (keep.begin(100, 0, 1), keep.begin(102, 0, INO));
        let made = make(&a, making.as_ref()).await.unwrap();
        assert_eq!(append(&f, &keep, appending.as_ref()).await.unwrap(), 10);
        // The requests are done, but the program has no answer.
        std::mem::forget((a, f, made, making, appending));
    });
    let keep = next(&keep);
    let b = c.client_with(2, with(&keep)).await;
    let left = keep.left_requests();
    let request = |unique| left.iter().find(|r| r.unique == unique).map(|r| r.operation.clone());
    let former = Former { ino: INO, flags: RW, uid: 1000, gid: 1000 };
    let f = b.take_over(&[former], &operations(&left)).await.pop().unwrap().unwrap();
    // Another append comes first: it leaves space for the one that will be sent again.
    assert_eq!(f.append(kept(&keep, 6, 10)).await.unwrap(), 20);
    let ran = c.mds.ran();
    make(&b, request(100).as_ref()).await.expect("the first run's answer");
    assert_eq!(c.mds.ran(), ran, "not run again");
    assert_eq!(append(&f, &keep, request(102).as_ref()).await.unwrap(), 10);
    let want = [[1; 10], [5; 10], [6; 10]].concat();
    assert_eq!(join(&f.read(0, 100).await.unwrap()), want);
    assert_eq!(make(&b, None).await.err().unwrap().code, Code::Exist, "a new request");
    f.close().await.unwrap();
}

/// Another client gets the append lock as soon as this one releases it, and asks for the size.
#[tokio::test(start_paused = true)]
async fn others_append_after_what_comes_again() {
    for (comes, arrived) in [(true, true), (true, false), (false, true), (false, false)] {
        let (c, keep) = (Cluster::new(3, 2), new_keep());
        killed(|| async {
            let a = c.client_with(1, with(&keep)).await;
            let f = file(&a).await;
            f.write_all_at(0, &[1; 10]).await.unwrap();
            f.fsync().await.unwrap();
            let appending = keep.begin(102, 0, INO);
            if !arrived {
                c.oss.faults(|f| f.write_delay = Duration::from_secs(1000));
            }
            let append = append(&f, &keep, appending.as_ref());
            let done = tokio::time::timeout(Duration::from_secs(1), append).await;
            assert_eq!(done.ok().map(|r| r.unwrap()), arrived.then_some(10));
            std::mem::forget((a, f, appending));
        });
        c.oss.faults(|f| f.write_delay = Duration::ZERO);
        let keep = next(&keep);
        let b = c.client_with(2, with(&keep)).await;
        let mut left = keep.left_requests();
        let former = Former { ino: INO, flags: RW, uid: 1000, gid: 1000 };
        let f = b.take_over(&[former], &operations(&left)).await.pop().unwrap().unwrap();
        let other = c.client(3).await;
        let g = other.open(&user(), INO, RW).await.unwrap().0;
        let theirs = tokio::spawn(async move { g.append(vec![Buf::copy_from(&[7; 10])]).await });
        // An append of this client also waits for the lock, and must not block the resent one
        // either.
        let (mine, own) = (f.clone(), kept(&keep, 6, 10));
        let mine = tokio::spawn(async move { mine.append(own).await });
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(!theirs.is_finished(), "it is not known yet where the file ends");
        let request = left.pop().map(|r| r.operation);
        if comes {
            assert_eq!(append(&f, &keep, request.as_ref()).await.unwrap(), 10);
        }
        drop(request);
        let mut at = [theirs.await.unwrap().unwrap(), mine.await.unwrap().unwrap()];
        at.sort_unstable();
        if comes || arrived {
            assert_eq!(at, [20, 30], "{comes} {arrived}");
            assert_eq!(join(&f.read(10, 10).await.unwrap()), [5; 10]);
        } else {
            // This client's own append may have left space for the request that never arrived.
            assert!(at == [10, 20] || at == [20, 30], "{at:?}");
        }
    }
}

/// When the session was lost, another client's append took the place.
#[tokio::test(start_paused = true)]
async fn an_append_of_a_lost_session_is_an_error() {
    let (c, keep) = (Cluster::new(3, 2), new_keep());
    killed(|| async {
        let a = c.client_with(1, with(&keep)).await;
        let f = file(&a).await;
        let appending = keep.begin(102, 0, INO);
        assert_eq!(append(&f, &keep, appending.as_ref()).await.unwrap(), 0);
        std::mem::forget((a, f, appending));
    });
    c.mds.evict_all();
    let other = c.client(3).await;
    let g = other.open(&user(), INO, RW).await.unwrap().0;
    assert_eq!(g.append(vec![Buf::copy_from(&[7; 20])]).await.unwrap(), 0);
    let keep = next(&keep);
    let b = c.client_with(2, with(&keep)).await;
    let left = keep.left_requests();
    let former = Former { ino: INO, flags: RW, uid: 1000, gid: 1000 };
    let f = b.take_over(&[former], &operations(&left)).await.pop().unwrap().unwrap();
    assert_eq!(
        f.write_all_at(0, &[7]).await.unwrap_err().code,
        Code::Io,
        "what was not synced is lost"
    );
    let request = left.first().map(|r| &r.operation);
    let e = append(&f, &keep, request).await.unwrap_err();
    assert!(e.code == Code::Io && e.message.contains("during an append"), "{e}");
    assert_eq!(join(&g.read(0, 100).await.unwrap()), [7; 20]);
}
