//! Dirty data of write-back: when the client holds writes back, in which pieces it sends them, what
//! other clients and the next process see, and which calls report a loss.

use std::{sync::Arc, time::Duration};

use crate::{common::*, left::*};
use proptest::prelude::*;
use strake_client::{Client, Config, File, Former};
use strake_fabric::Buf;
use strake_fuse::HandoverMemory;
use strake_proto::{Code, pb};

const RW: u32 = 2;
const O_DSYNC: u32 = 0o10000;
const KIB: usize = 1 << 10;

fn holding() -> Config {
    Config { write_back: true, ..config() }
}

/// A cluster that records writers, tells them so, and expects releases.
fn cluster(targets: u32, copies: u32) -> Cluster {
    let c = Cluster::new(targets, copies);
    c.mds.want_releases();
    c
}

async fn file(c: &Client) -> File {
    c.create(&user(), c.root(), b"f", 0o644, RW, false, striped(1 << 20, -1)).await.unwrap().0
}

async fn content(f: &File) -> Vec<u8> {
    join(&f.read(0, 64 << 20).await.unwrap())
}

fn held(c: &Client) -> (u64, u64) {
    (c.stats().held_writes, c.stats().held_bytes)
}

#[tokio::test(start_paused = true)]
async fn small_writes_are_sent_in_large_pieces_and_read_at_once() {
    let c = cluster(2, 2);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    let before = a.stats().data_requests;
    let mut want = Vec::new();
    for i in 0..256usize {
        f.write_all_at((i * 4 * KIB) as u64, &[i as u8; 4 * KIB]).await.unwrap();
        want.extend([i as u8; 4 * KIB]);
        assert_eq!(f.attr().size as usize, want.len());
    }
    assert_eq!((held(&a), a.stats().data_requests), ((256, 1 << 20), before));
    assert!(content(&f).await == want);
    assert!(f.read_ready(5000, 100_000).map(|b| join(&b)).unwrap() == want[5000..105_000]);
    assert_eq!(a.stats().data_requests, before, "from memory");
    f.fsync().await.unwrap();
    assert_eq!(
        (a.stats().data_writes, a.stats().held_bytes, c.mds.size_of(f.ino())),
        (1, 0, 1 << 20)
    );
    c.restart(&[0, 1]);
    assert!(content(&f).await == want, "stable");
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_sent_by_itself_and_when_somebody_here_looks() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 10]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((held(&a), c.oss.counts(|n| n.applied)), ((1, 10), 0));
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!((held(&a).1, c.oss.counts(|n| n.applied), c.mds.size_of(f.ino())), (0, 1, 10));
    // Attributes carry the size and times, so the client sends the dirty data first.
    f.write_all_at(10, &[2; 10]).await.unwrap();
    assert_eq!(a.getattr(&user(), f.ino()).await.unwrap().size, 20);
    assert_eq!((held(&a).1, c.mds.size_of(f.ino())), (0, 20));
    f.write_all_at(20, &[3; 10]).await.unwrap();
    assert_eq!(a.lookup(&user(), a.root(), b"f").await.unwrap().size, 30);
    f.write_all_at(30, &[4; 10]).await.unwrap();
    let set = pb::SetAttr { ino: f.ino(), mtime_ns: Some(77), ..Default::default() };
    assert_eq!(a.setattr(&user(), set).await.unwrap().mtime_ns, 77);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(
        a.getattr(&user(), f.ino()).await.unwrap().mtime_ns,
        77,
        "a time that was set stays"
    );
    f.write_all_at(1 << 20, &[5; 10]).await.unwrap();
    assert_eq!((f.seek_data(4096).await.unwrap(), f.seek_hole(0).await.unwrap()), (1 << 20, 4096));
    f.write_all_at(5, &[6; 10]).await.unwrap();
    f.punch(0, 10).await.unwrap();
    f.write_all_at(2, &[7; 2]).await.unwrap();
    let want = [&[0, 0, 7, 7, 0, 0, 0, 0, 0, 0][..], &[6; 5], &[2; 5], &[3; 10], &[4; 10]].concat();
    assert_eq!(content(&f).await[..40], want);
    f.write_all_at(30, &[8; 20]).await.unwrap();
    f.truncate(35).await.unwrap();
    f.truncate(50).await.unwrap();
    let want = [&want[..30], &[8; 5], &[0; 15]].concat();
    assert_eq!(content(&f).await, want);
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn writes_that_go_through_lie_over_what_was_held_back_before() {
    let c = cluster(3, 2);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    let (stable, _) = a.open(&user(), f.ino(), RW | O_DSYNC).await.unwrap();
    let mut want = vec![1; 3 << 20];
    for at in (0..3 << 20).step_by(64 * KIB) {
        f.write_all_at(at as u64, &[1; 64 * KIB]).await.unwrap();
    }
    stable.write_all_at(100, &[2; 50]).await.unwrap();
    want[100..150].fill(2);
    assert_eq!(a.stats().held_bytes, 0);
    f.write_all_at(120, &[3; 5]).await.unwrap();
    f.write_all_at(1 << 20, &vec![4; 1 << 20]).await.unwrap();
    f.write_all_at(1500 * KIB as u64, &[5; KIB]).await.unwrap();
    want[120..125].fill(3);
    want[1 << 20..2 << 20].fill(4);
    want[1500 * KIB..1501 * KIB].fill(5);
    assert_eq!(f.append(vec![Buf::copy_from(&[6; 10])]).await.unwrap(), 3 << 20);
    want.extend([6; 10]);
    assert!(content(&f).await == want);
    f.fsync().await.unwrap();
    c.restart(&[0, 1, 2]);
    assert!(content(&f).await == want);
}

/// A release ends the record of the session for all opens up to the one that it names, including an
/// open that is answered later.
#[tokio::test(start_paused = true)]
async fn a_file_is_not_released_before_an_earlier_open_is_answered_and_closed() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let b = c.client_with(2, holding()).await;
    let f = file(&a).await;
    let ino = f.ino();
    f.close().await.unwrap();
    let soon = || tokio::time::sleep(Duration::from_millis(500));
    soon().await;
    assert!(!c.mds.is_written(ino));
    c.mds.answer_next_open_after(Duration::from_millis(700));
    let opener = a.clone();
    let opening = tokio::spawn(async move { opener.open(&user(), ino, RW).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let (late, _) = a.open(&user(), ino, RW).await.unwrap();
    late.close().await.unwrap();
    assert!(!opening.is_finished());
    let f = opening.await.unwrap().unwrap().0;
    soon().await;
    assert!(c.mds.is_written(ino), "nobody would ask this client for what it holds back");
    f.write_all_at(0, &[7; 100]).await.unwrap();
    assert_eq!(held(&a), (1, 100));
    let (g, _) = b.open(&user(), ino, 0).await.unwrap();
    assert_eq!(content(&g).await, [7; 100]);
    f.close().await.unwrap();
    soon().await;
    assert!(!c.mds.is_written(ino));
}

/// A new session reports the open files, and also releases files that close during that report.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_closed_while_a_new_session_learns_of_it_is_released() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    let ino = f.ino();
    c.mds.evict_all();
    c.mds.answer_next_open_after(Duration::from_millis(700));
    while !c.mds.is_written(ino) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    f.close().await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(c.mds.is_written(ino));
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!((c.mds.is_written(ino), c.mds.opens()), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_held_back_of_what_others_write_or_without_a_lease() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let b = c.client_with(2, holding()).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 100]).await.unwrap();
    assert_eq!(held(&a).0, 1);
    f.fsync().await.unwrap();
    let (g, _) = b.open(&user(), f.ino(), RW).await.unwrap();
    f.write_all_at(0, &[2; 100]).await.unwrap();
    g.write_all_at(50, &[3; 100]).await.unwrap();
    g.fsync().await.unwrap();
    assert_eq!((held(&a).0, held(&b).0), (1, 0));
    assert_eq!(content(&f).await, [[2; 50], [3; 50], [3; 50]].concat());
    g.close().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await; // released
    assert_eq!(content(&f).await.len(), 150);
    f.write_all_at(0, &[4; 100]).await.unwrap();
    assert_eq!(held(&a), (2, 100), "alone again");
    // Without leases the client sends its dirty data, and later writes go straight to the servers.
    MDS.iter().for_each(|n| c.net.set_silent(*n, true));
    tokio::time::sleep(Duration::from_secs(2)).await;
    f.write_all_at(100, &[5; 50]).await.unwrap();
    assert_eq!(held(&a), (2, 0));
    MDS.iter().for_each(|n| c.net.set_silent(*n, false));
    assert_eq!(content(&f).await, [[4; 50], [4; 50], [5; 50]].concat());
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_with_the_session_is_told_by_each_handle_once_and_never_sent() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    let (other, _) = a.open(&user(), f.ino(), RW).await.unwrap();
    f.write_all_at(0, &[1; 100]).await.unwrap();
    f.fsync().await.unwrap();
    for late in [false, true] {
        f.write_all_at(50, &[2; 100]).await.unwrap();
        assert_eq!(a.stats().held_bytes, 100);
        // In one round the session error comes while the write is on its way.
        c.oss.faults(|f| f.write_delay = Duration::from_millis(if late { 3000 } else { 0 }));
        if late {
            tokio::time::sleep(Duration::from_secs(1)).await;
            c.oss.faults(|f| f.no_session = 1000);
        }
        c.mds.evict_all();
        while a.stats().sessions_lost < 1 + u64::from(late) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        c.oss.faults(|f| (f.no_session, f.write_delay) = (0, Duration::ZERO));
        tokio::time::sleep(Duration::from_secs(4)).await;
        for f in [&f, &other] {
            assert_eq!(f.fsync().await.unwrap_err().code, Code::Io, "late: {late}");
            f.fsync().await.unwrap();
        }
        assert_eq!(
            f.read(0, 100).await.unwrap_err().code,
            Code::Io,
            "older bytes are not taken for those"
        );
        if !late {
            let (new, _) = a.open(&user(), f.ino(), RW).await.unwrap();
            assert_eq!(content(&new).await, [1; 100]);
            new.close().await.unwrap();
        }
    }
    f.write_all_at(0, &[3; 10]).await.unwrap();
    f.fsync().await.unwrap();
    let mut seen = [0; 10];
    assert_eq!((f.read_into(0, &mut seen).await.unwrap(), seen), (10, [3; 10]));
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_space_is_told_by_fsync_and_then_by_writes() {
    let c = cluster(1, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 100]).await.unwrap();
    c.oss.faults(|f| f.full = true);
    assert_eq!(f.fsync().await.unwrap_err().code, Code::NoSpc);
    f.fsync().await.unwrap();
    assert_eq!(f.write_all_at(0, &[2; 100]).await.unwrap_err().code, Code::NoSpc);
    c.oss.faults(|f| f.full = false);
    f.write_all_at(0, &[3; 100]).await.unwrap();
    f.close().await.unwrap();
    let (f, _) = a.open(&user(), f_ino(&c), RW).await.unwrap();
    f.write_all_at(0, &[4; 100]).await.unwrap();
    c.oss.faults(|f| f.full = true);
    assert_eq!(f.close().await.unwrap_err().code, Code::NoSpc, "or by close");
}

#[tokio::test(start_paused = true)]
async fn without_space_granted_writes_go_through_and_tell_of_it() {
    let c = cluster(2, 2);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    c.oss.faults(|f| f.full = true);
    assert_eq!(f.write_all_at(0, &[1; 100]).await.unwrap_err().code, Code::NoSpc);
    assert_eq!(held(&a), (0, 0));
    c.oss.faults(|f| f.full = false);
    f.write_all_at(0, &[2; 100]).await.unwrap();
    f.fsync().await.unwrap();
    assert_eq!(
        (held(&a).0, c.oss.counts(|n| n.granted)),
        (0, 0),
        "it has just failed, and it is not asked at once"
    );
    f.close().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (f, _) = a.open(&user(), f_ino(&c), RW).await.unwrap();
    f.write_all_at(0, &[3; 100]).await.unwrap();
    let asked = a.stats().grant_requests;
    for i in 1..100 {
        f.write_all_at(i * 100, &[3; 100]).await.unwrap();
    }
    assert_eq!((held(&a), a.stats().grant_requests), ((100, 10_000), asked));
    // A write that is not held back uses no grant.
    let (stable, _) = a.open(&user(), f.ino(), RW | O_DSYNC).await.unwrap();
    stable.write_all_at(20_000, &[4; 100]).await.unwrap();
    assert_eq!((a.stats().held_bytes, c.oss.counts(|n| n.granted)), (0, 1));
    // An older server grants no space.
    c.oss.faults(|f| f.no_grants = true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    f.write_all_at(0, &[5; 100]).await.unwrap();
    assert_eq!((held(&a), c.oss.counts(|n| n.granted)), ((100, 0), 1));
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_waits_long_stays_granted() {
    let c = cluster(1, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 100]).await.unwrap();
    c.oss.faults(|f| f.write_delay = Duration::from_secs(8));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = a.stats().grant_requests;
    for i in 0..6 {
        f.write_all_at(4096 * i, &[2; 100]).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!((2..5).contains(&(a.stats().grant_requests - asked)), "every other second");
    assert_eq!(held(&a).0, 7);
    f.close().await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let asked = a.stats().grant_requests;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(a.stats().grant_requests, asked, "nothing is held back");
}

fn f_ino(_: &Cluster) -> u64 {
    102
}

#[tokio::test(start_paused = true)]
async fn a_soft_mount_that_gives_up_says_so() {
    let c = cluster(1, 1);
    let a = c.client_with(1, Config { op_timeout: Duration::from_secs(2), ..holding() }).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 100]).await.unwrap();
    c.net.set_down(node(0), true);
    assert_eq!(f.fsync().await.unwrap_err().code, Code::Io);
    c.net.set_down(node(0), false);
    assert_eq!(f.write_all_at(0, &[2; 100]).await.unwrap_err().code, Code::Io, "each kind of call");
    f.write_all_at(0, &[3; 100]).await.unwrap();
    f.fsync().await.unwrap();
    assert_eq!(content(&f).await, [3; 100]);
}

#[tokio::test(start_paused = true)]
async fn memory_for_what_is_held_back_is_bounded() {
    let c = cluster(2, 1);
    let a = c.client_with(1, Config { unstable_limit: 1 << 20, ..holding() }).await;
    let f = file(&a).await;
    let mut want = Vec::new();
    for i in 0..2000usize {
        f.write_all_at((i * 4 * KIB) as u64, &[i as u8; 4 * KIB]).await.unwrap();
        want.extend([i as u8; 4 * KIB]);
        let s = a.stats();
        assert!(
            s.held_bytes + s.unstable_bytes <= 1 << 20,
            "{} {}",
            s.held_bytes,
            s.unstable_bytes
        );
    }
    assert!(content(&f).await == want);
    assert!(a.stats().data_writes < 200);
    f.close().await.unwrap();
    a.close().await.unwrap();
}

/// A handle that is dropped, and a client that is closed, leave nothing behind.
#[tokio::test(start_paused = true)]
async fn what_nobody_closes_is_sent_all_the_same() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    let ino = f.ino();
    f.write_all_at(0, &[1; 100]).await.unwrap();
    drop(f);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((c.mds.size_of(ino), c.mds.opens()), (100, 0));
    let f = file(&a).await;
    f.write_all_at(100, &[2; 100]).await.unwrap();
    a.close().await.unwrap();
    assert_eq!(c.mds.size_of(ino), 200);
    let b = c.client(2).await;
    assert_eq!(content(&file(&b).await).await, [[1; 100], [2; 100]].concat());
}

/// A client reports a file only after it has sent all dirty data and the size, however long that
/// takes.
#[tokio::test(start_paused = true)]
async fn what_is_held_back_is_sent_before_a_report() {
    let c = cluster(2, 1);
    let a = c.client_with(1, holding()).await;
    let f = file(&a).await;
    f.write_all_at(0, &[1; 100]).await.unwrap();
    c.mds.report(f.ino()).await;
    assert_eq!((held(&a).1, c.oss.counts(|n| n.applied), c.mds.size_of(f.ino())), (0, 1, 100));
    assert_eq!(c.mds.worked(), 0);
    f.write_all_at(50, &[2; 100]).await.unwrap();
    c.oss.faults(|f| f.write_delay = Duration::from_secs(8));
    c.mds.report(f.ino()).await;
    assert_eq!((c.oss.counts(|n| n.applied), c.mds.size_of(f.ino())), (2, 150));
    assert!((6..=9).contains(&c.mds.worked()), "{}", c.mds.worked());
}

// --- the next process ---

fn with(keep: &Arc<HandoverMemory>) -> Config {
    Config { handover: Some(keep.clone()), ..holding() }
}

async fn take_over(c: &Cluster, keep: &HandoverMemory, open: bool) -> (Client, Vec<File>) {
    let keep = next(keep);
    let b = c.client_with(2, with(&keep)).await;
    let former = Former { ino: 102, flags: RW, uid: 1000, gid: 1000 };
    let files = b
        .take_over(
            if open { std::slice::from_ref(&former) } else { &[] },
            &operations(&keep.left_requests()),
        )
        .await;
    (b, files.into_iter().map(Result::unwrap).collect())
}

/// The client is killed with dirty data, and in the middle of sending it.
#[tokio::test(start_paused = true)]
async fn what_was_held_back_is_taken_over() {
    for (sending, open) in [(0, true), (1, true), (2, true), (0, false), (1, false)] {
        let (c, keep) = (cluster(2, 1), HandoverMemory::create([7; 16], 64 << 20).unwrap());
        let mut want = vec![1; 2 << 20];
        killed(|| async {
            let a = c.client_with(1, with(&keep)).await;
            let f = file(&a).await;
            assert_eq!(f.ino(), 102);
            for at in (0..2 << 20).step_by(64 * KIB) {
                f.write(at, kept(&keep, 1, 64 * KIB)).await.unwrap();
            }
            f.write(1000, kept(&keep, 2, 5000)).await.unwrap();
            if sending > 0 {
                // The write arrives before the next process repeats it, or long after.
                c.oss.faults(|f| {
                    f.write_delay = Duration::from_millis(if sending == 1 { 1 } else { 100_000 })
                });
                let sync = f.fsync();
                let _ = tokio::time::timeout(
                    Duration::from_millis(if sending == 1 { 2 } else { 20 }),
                    sync,
                )
                .await;
            }
            f.write(2000, kept(&keep, 3, 10)).await.unwrap();
            f.write(4 << 20, kept(&keep, 4, 10)).await.unwrap();
            assert!(a.stats().held_bytes >= 20);
            std::mem::forget((a, f));
        });
        c.oss.faults(|f| f.write_delay = Duration::ZERO);
        want[1000..6000].fill(2);
        want[2000..2010].fill(3);
        want.resize(4 << 20, 0);
        want.extend([4; 10]);
        let (b, files) = take_over(&c, &keep, open).await;
        let f = match files.into_iter().next() {
            Some(f) => f,
            None => {
                tokio::time::sleep(Duration::from_secs(2)).await;
                file(&b).await
            }
        };
        assert!(content(&f).await == want, "sending {sending}, open {open}");
        f.write_all_at(3000, &[5; 10]).await.unwrap();
        want[3000..3010].fill(5);
        f.fsync().await.unwrap();
        assert_eq!(b.stats().held_bytes, 0);
        c.restart(&[0, 1]);
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert!(content(&f).await == want, "sending {sending}, open {open}: nothing comes late");
        f.close().await.unwrap();
        b.close().await.unwrap();
    }
}

/// Another client asks for the file before the next process has taken over the dirty data of the
/// dead one.
#[tokio::test(start_paused = true)]
async fn nothing_is_reported_before_it_is_known_what_was_held_back() {
    let (c, keep) = (cluster(2, 1), HandoverMemory::create([7; 16], 64 << 20).unwrap());
    killed(|| async {
        let a = c.client_with(1, with(&keep)).await;
        let f = file(&a).await;
        f.write(0, kept(&keep, 1, 100)).await.unwrap();
        std::mem::forget((a, f));
    });
    let former = next(&keep);
    let b = c.client_with(2, with(&former)).await;
    let report = c.mds.report(102);
    tokio::pin!(report);
    assert!(tokio::time::timeout(Duration::from_secs(20), &mut report).await.is_err());
    assert!(c.mds.worked() > 10);
    let files = b
        .take_over(
            &[Former { ino: 102, flags: RW, uid: 1000, gid: 1000 }],
            &operations(&former.left_requests()),
        )
        .await;
    report.await;
    assert_eq!((c.mds.size_of(102), c.oss.counts(|n| n.applied)), (100, 1));
    assert_eq!(content(files[0].as_ref().unwrap()).await, [1; 100]);
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_with_the_session_of_a_former_process_is_told() {
    let (c, keep) = (cluster(2, 1), HandoverMemory::create([7; 16], 64 << 20).unwrap());
    killed(|| async {
        let a = c.client_with(1, with(&keep)).await;
        let f = file(&a).await;
        f.write(0, kept(&keep, 1, 100)).await.unwrap();
        f.fsync().await.unwrap();
        f.write(50, kept(&keep, 2, 100)).await.unwrap();
        std::mem::forget((a, f));
    });
    c.mds.evict_all();
    let (_b, files) = take_over(&c, &keep, true).await;
    assert_eq!(files[0].write_all_at(0, &[1]).await.unwrap_err().code, Code::Io);
    assert_eq!(files[0].fsync().await.unwrap_err().code, Code::Io);
    assert_eq!(content(&files[0]).await, [1; 100]);
}

/// A client with a handover does not hold back bytes outside its handover memory: they would not
/// survive the process.
#[tokio::test(start_paused = true)]
async fn what_is_not_in_kept_memory_goes_through() {
    let (c, keep) = (cluster(2, 1), HandoverMemory::create([7; 16], 64 << 20).unwrap());
    let a = c.client_with(1, with(&keep)).await;
    let f = file(&a).await;
    f.write(0, vec![Buf::copy_from(&[1; 100])]).await.unwrap();
    assert_eq!((held(&a).0, c.oss.counts(|n| n.applied)), (0, 1));
    f.write(0, kept(&keep, 1, 100)).await.unwrap();
    assert_eq!(held(&a).0, 1);
}

/// Losing the session loses the append lock. Then both clients ask for the size and for each
/// other's reports, and must not append at the same place.
#[tokio::test(start_paused = true)]
async fn an_append_that_loses_its_session_begins_anew() {
    let c = cluster(1, 1);
    let (a, b, other) = (c.client(1).await, c.client_with(2, holding()).await, c.client(3).await);
    let f = file(&b).await;
    f.write_all_at(0, &[1; 10]).await.unwrap();
    c.oss.faults(|f| f.write_delay = Duration::from_secs(1));
    let (g, h) = (
        a.open(&user(), f.ino(), RW).await.unwrap().0,
        other.open(&user(), f.ino(), RW).await.unwrap().0,
    );
    // The client now sends its own dirty data, which takes a second. The first append waits for it
    // and holds the lock.
    let first = tokio::spawn(async move { g.append(vec![Buf::copy_from(&[2; 10])]).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!first.is_finished());
    c.mds.evict_all();
    let second =
        tokio::time::timeout(Duration::from_secs(60), h.append(vec![Buf::copy_from(&[3; 10])]))
            .await;
    let second = second.expect("no waiting for ever").unwrap();
    let first = tokio::time::timeout(Duration::from_secs(60), first)
        .await
        .expect("no waiting for ever")
        .unwrap()
        .unwrap();
    assert!(first.abs_diff(second) >= 10, "at {first} and {second}");
    let got = content(&h).await;
    assert_eq!((got[first as usize], got[second as usize]), (2, 3), "{got:?}");
}

/// While an append sends dirty data, another client also appends: it holds the lock and waits for a
/// report of this client.
#[tokio::test(start_paused = true)]
async fn an_append_that_is_not_alone_any_more_waits_for_the_lock() {
    let c = cluster(1, 1);
    let (a, b) = (c.client_with(1, holding()).await, c.client(2).await);
    let f = file(&a).await;
    f.write_all_at(0, &[1; 10]).await.unwrap();
    c.oss.faults(|f| f.write_delay = Duration::from_secs(1));
    let at_once = f.clone();
    let first = tokio::spawn(async move { at_once.append(vec![Buf::copy_from(&[2; 10])]).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let g = b.open(&user(), f.ino(), RW).await.unwrap().0;
    let both = async {
        (g.append(vec![Buf::copy_from(&[3; 10])]).await.unwrap(), first.await.unwrap().unwrap())
    };
    let both = tokio::time::timeout(Duration::from_secs(30), both)
        .await
        .expect("neither waits for the other for ever");
    assert_eq!(both, (10, 20), "who has the lock is the first");
    let want = [[1; 10], [3; 10], [2; 10]].concat();
    assert_eq!((content(&f).await, content(&g).await), (want.clone(), want));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any sequence of operations of one client, concurrent ones included, reads the same as with
    /// write-through; after an fsync every other client reads the same, too.
    #[test]
    fn it_is_the_same_file(ops in prop::collection::vec((0u8..14, 0u64..40_000, 1usize..9000), 1..80)) {
        let paused = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        paused.block_on(async {
            let c = cluster(3, 1);
            let a = c.client_with(1, Config { unstable_limit: 256 << 10, ..holding() }).await;
            let f = a.create(&user(), a.root(), b"f", 0o644, RW, false, striped(65536, -1)).await.unwrap().0;
            let (stable, _) = a.open(&user(), f.ino(), RW | O_DSYNC).await.unwrap();
            let mut want: Vec<u8> = Vec::new();
            let put = |want: &mut Vec<u8>, at: usize, bytes: &[u8]| {
                want.resize(want.len().max(at + bytes.len()), 0);
                want[at..at + bytes.len()].copy_from_slice(bytes);
            };
            for (i, (what, at, len)) in ops.into_iter().enumerate() {
                let bytes = vec![i as u8 + 1; len];
                match what {
                    0..=4 => {
                        f.write_all_at(at, &bytes).await.unwrap();
                        put(&mut want, at as usize, &bytes);
                    }
                    5 => {
                        stable.write_all_at(at, &bytes).await.unwrap();
                        put(&mut want, at as usize, &bytes);
                    }
                    6 => {
                        f.truncate(at).await.unwrap();
                        want.resize(at as usize, 0);
                    }
                    7 => {
                        f.punch(at, len as u64).await.unwrap();
                        let end = want.len().min(at as usize + len);
                        want[(at as usize).min(end)..end].fill(0);
                    }
                    8 => {
                        let n = f.append(vec![Buf::copy_from(&bytes)]).await.unwrap();
                        assert_eq!(n as usize, want.len());
                        want.extend(bytes);
                    }
                    9 => f.fsync().await.unwrap(),
                    10 => tokio::time::sleep(Duration::from_millis(len as u64 / 10)).await,
                    11 => assert_eq!(a.getattr(&user(), f.ino()).await.unwrap().size as usize, want.len()),
                    12 => {
                        // A read runs while an fsync sends dirty data.
                        let (sync, got) = tokio::join!(f.fsync(), f.read(at, len));
                        sync.unwrap();
                        let end = want.len().min(at as usize + len);
                        assert_eq!(join(&got.unwrap()), want[(at as usize).min(end)..end]);
                        let (sync, wrote) = tokio::join!(f.fsync(), f.write_all_at(at, &bytes));
                        sync.and(wrote).unwrap();
                        put(&mut want, at as usize, &bytes);
                    }
                    _ => {
                        let end = want.len().min(at as usize + len);
                        let range = (at as usize).min(end)..end;
                        if let Some(got) = f.read_ready(at, len) {
                            assert_eq!(join(&got), want[range.clone()]);
                        }
                        assert_eq!(join(&f.read(at, len).await.unwrap()), want[range]);
                    }
                }
            }
            assert_eq!(content(&f).await, want.clone());
            f.fsync().await.unwrap();
            c.restart(&[0, 1, 2]);
            let b = c.client(2).await;
            assert_eq!(content(&file(&b).await).await, want);
        });
    }
}
