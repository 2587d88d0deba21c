//! The log on disk: what is written is read back, a torn tail is dropped, and every kind of damage
//! is refused.

use std::{
    fs,
    path::{Path, PathBuf},
};

use raft::eraftpb::{Entry, HardState};

use super::super::{disk_log, log, pages};
use super::*;

const SEGMENT: usize = 64 << 10;

fn entry(index: u64, term: u64, data: &[u8]) -> LogOp {
    LogOp::Append(Entry { index, term, data: data.to_vec().into(), ..Default::default() })
}

fn hard(term: u64, vote: u64, commit: u64) -> LogOp {
    LogOp::HardState(HardState { term, vote, commit, ..Default::default() })
}

fn open_as(dir: &Path, cluster: [u8; 16], member: u64) -> Result<DiskLog> {
    DiskLog::open(dir, cluster, member, &[1, 2, 3], 99, DiskOptions { segment_bytes: SEGMENT })
}

fn open(dir: &Path) -> Result<DiskLog> {
    open_as(dir, CLUSTER, 1)
}

async fn image(dir: &Path) -> Result<LogImage> {
    open(dir)?.load().await
}

/// A log of a few batches, the last one of two pages and a bit.
async fn sample(dir: &Path) -> LogImage {
    let log = open(dir).unwrap();
    log.write(&[hard(1, 1, 0), entry(1, 1, b"one"), entry(2, 1, b"two")]).await.unwrap();
    log.write(&[hard(2, 3, 1), entry(2, 2, b"two again")]).await.unwrap();
    log.write(&[entry(3, 2, &[b'x'; 9000]), hard(2, 3, 2)]).await.unwrap();
    drop(log);
    image(dir).await.unwrap()
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for f in fs::read_dir(from).unwrap() {
        let f = f.unwrap();
        fs::copy(f.path(), to.path().join(f.file_name())).unwrap();
    }
    to
}

fn segment(dir: &Path, n: u64) -> PathBuf {
    dir.join(format!("log-{n:08}"))
}

fn segments(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|n| n.starts_with("log-"));
    names.sort();
    names
}

fn assert_refused(r: Result<LogImage>, what: &str) {
    let e = r.expect_err(what);
    assert_eq!(e.code, Code::Corrupt, "{what}: {e}");
    assert!(e.message.contains("Changing the group of metadata servers"), "{what}: {e}");
}

#[tokio::test]
async fn what_is_written_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = image(dir.path()).await.unwrap();
    assert!(fresh.is_pristine());
    assert_eq!((fresh.voters.clone(), fresh.stamp), (vec![1, 2, 3], 99));
    let got = sample(dir.path()).await;
    assert_eq!(
        (got.first(), got.last(), got.hard.term, got.hard.vote, got.hard.commit),
        (1, 3, 2, 3, 2)
    );
    assert_eq!(got.get(2).unwrap().data, "two again");
    assert_eq!(got.get(3).unwrap().data.len(), 9000);
    let log = open(dir.path()).unwrap();
    log.write(&[LogOp::Cut { index: 2, term: 2 }, LogOp::Peer { id: 2, stamp: 5 }]).await.unwrap();
    log.write(&[LogOp::Restoring { index: 50, term: 3 }]).await.unwrap();
    drop(log);
    let got = image(dir.path()).await.unwrap();
    assert_eq!((got.base, got.last(), got.restoring, got.peers[&2]), ((2, 2), 3, Some((50, 3)), 5));
    open(dir.path()).unwrap().write(&[LogOp::Reset { index: 50, term: 3 }]).await.unwrap();
    let got = image(dir.path()).await.unwrap();
    assert_eq!((got.base, got.last(), got.restoring, got.hard.term), ((50, 3), 50, None, 2));
}

#[tokio::test]
async fn segments_roll_go_when_cut_and_reopen_at_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = LogImage::new(vec![1, 2, 3], 99);
    let mut most = 0;
    for i in 1..=200u64 {
        let mut ops = vec![
            hard(1 + i / 50, 1, i.saturating_sub(5)),
            entry(i, 1 + i / 50, &vec![i as u8; 3000]),
        ];
        if i % 20 == 0 {
            // A new leader overwrites the last three.
            ops = vec![
                hard(2 + i / 20, 1, i - 5),
                entry(i - 3, 2 + i / 20, b"new"),
                entry(i - 2, 2 + i / 20, b"new"),
            ];
            ops.extend((i - 1..=i).map(|j| entry(j, 2 + i / 20, b"more")));
        } else if let LogOp::Append(e) = &mut ops[1] {
            e.term = 2 + i / 20;
            ops[0] = hard(2 + i / 20, 1, i.saturating_sub(5));
        }
        if i % 30 == 0 {
            let index = i - 10;
            ops.push(LogOp::Cut { index, term: model.term(index).unwrap() });
        }
        let log = open(dir.path()).unwrap();
        log.write(&ops).await.unwrap();
        ops.iter().for_each(|op| model.apply(op).unwrap());
        drop(log);
        assert_eq!(image(dir.path()).await.unwrap(), model, "after {i}");
        most = most.max(segments(dir.path()).len());
    }
    assert!((2..8).contains(&most), "{most} segments at once");
    assert!(!segments(dir.path()).contains(&"log-00000001".to_string()));
}

#[tokio::test]
async fn a_batch_longer_than_a_segment_gets_a_longer_one() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    log.write(&[entry(1, 1, &vec![7; 3 * SEGMENT])]).await.unwrap();
    log.write(&[entry(2, 1, b"after")]).await.unwrap();
    drop(log);
    let got = image(dir.path()).await.unwrap();
    assert_eq!((got.last(), got.get(1).unwrap().data.len()), (2, 3 * SEGMENT));
}

#[tokio::test]
async fn a_torn_tail_is_cut_and_the_log_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let whole = sample(dir.path()).await;
    // Pages: header, checkpoint, batch, batch, then three of the last batch.
    let last = 4 * pages::PAGE..7 * pages::PAGE;
    let bytes = fs::read(segment(dir.path(), 1)).unwrap();
    assert!(
        bytes[last.clone()].iter().any(|b| *b != 0) && bytes[last.end..].iter().all(|b| *b == 0)
    );
    for missing in 1..8u32 {
        let torn = copy(dir.path());
        let mut b = bytes.clone();
        for page in (0..3).filter(|p| missing & 1 << p != 0) {
            b[last.start + page * pages::PAGE..][..pages::PAGE].fill(0);
        }
        fs::write(segment(torn.path(), 1), b).unwrap();
        let got = image(torn.path()).await.unwrap();
        assert_eq!((got.last(), got.hard.commit), (2, 1), "missing pages {missing:03b}");
        open(torn.path()).unwrap().write(&[entry(3, 3, b"other")]).await.unwrap();
        assert_eq!(image(torn.path()).await.unwrap().get(3).unwrap().data, "other");
    }
    assert_eq!(whole.last(), 3);
}

#[tokio::test]
async fn truncated_at_each_byte_of_the_last_record_it_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    log.write(&[hard(1, 1, 0), entry(1, 1, b"one")]).await.unwrap();
    log.write(&[entry(2, 1, &[b'y'; 5000])]).await.unwrap();
    drop(log);
    let bytes = fs::read(segment(dir.path(), 1)).unwrap();
    let (start, end) = (3 * pages::PAGE, 5 * pages::PAGE);
    for len in start..end {
        let h = pages::decode_header(&bytes).unwrap();
        let scan = pages::scan(&bytes[..len], h.first_batch, h.stamp).unwrap();
        assert_eq!((scan.batches.len(), scan.end), (2, start), "cut at {len}");
    }
    for len in [start, start + 1, start + 4095, start + 4096, end - 1] {
        let torn = copy(dir.path());
        fs::write(segment(torn.path(), 1), &bytes[..len]).unwrap();
        assert_eq!(image(torn.path()).await.unwrap().last(), 1, "cut at {len}");
        open(torn.path()).unwrap().write(&[entry(2, 2, b"again")]).await.unwrap();
        assert_eq!(image(torn.path()).await.unwrap().get(2).unwrap().data, "again");
    }
}

#[tokio::test]
async fn any_flipped_bit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    sample(dir.path()).await;
    let bytes = fs::read(segment(dir.path(), 1)).unwrap();
    // In memory for every byte of header, batches and a stretch of unused space, a different bit
    // each.
    for at in 0..9 * pages::PAGE {
        let mut b = bytes.clone();
        b[at] ^= 1 << (at % 8);
        let refused = match pages::decode_header(&b) {
            Err(_) => true,
            Ok(h) => pages::scan(&b, h.first_batch, h.stamp).is_err(),
        };
        assert!(refused, "byte {at}");
    }
    let on_disk =
        [0, 9, 20, 40, 4000, 5000, 8192, 8300, 13000, 17000, 21000, 25000, 30000, SEGMENT - 1];
    for at in on_disk {
        let bad = copy(dir.path());
        let mut b = bytes.clone();
        b[at] ^= 0x10;
        fs::write(segment(bad.path(), 1), &b).unwrap();
        assert_refused(image(bad.path()).await, &format!("byte {at}"));
    }
    let bad = copy(dir.path());
    let mut marker = fs::read(dir.path().join("member")).unwrap();
    marker[33] ^= 1;
    fs::write(bad.path().join("member"), marker).unwrap();
    assert_refused(image(bad.path()).await, "marker");
}

#[tokio::test]
async fn acknowledged_batches_that_are_gone_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    sample(dir.path()).await;
    let bytes = fs::read(segment(dir.path(), 1)).unwrap();
    // A page of zeros before a later batch was acknowledged, not torn.
    for page in 1..=3 {
        let bad = copy(dir.path());
        let mut b = bytes.clone();
        b[page * pages::PAGE..][..pages::PAGE].fill(0);
        fs::write(segment(bad.path(), 1), b).unwrap();
        assert_refused(image(bad.path()).await, &format!("page {page} zeroed"));
    }
    let bad = copy(dir.path());
    fs::remove_file(segment(bad.path(), 1)).unwrap();
    assert_refused(image(bad.path()).await, "no segment");
    let bad = copy(dir.path());
    fs::remove_file(bad.path().join("member")).unwrap();
    assert_refused(image(bad.path()).await, "no marker");
}

#[tokio::test]
async fn a_missing_segment_is_refused_wherever_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 1..=60u64 {
        log.write(&[entry(i, 1, &[1; 3000])]).await.unwrap();
    }
    drop(log);
    let names = segments(dir.path());
    assert!(names.len() >= 4, "{names:?}");
    for name in &names {
        let bad = copy(dir.path());
        fs::remove_file(bad.path().join(name)).unwrap();
        assert_refused(image(bad.path()).await, name);
    }
    // A segment made just before a crash, not yet in use, is no loss.
    let newest = names.len() as u64;
    let end = fs::read(segment(dir.path(), newest - 1)).unwrap();
    let used = end
        .as_chunks::<{ pages::PAGE }>()
        .0
        .iter()
        .rposition(|p| p.iter().any(|b| *b != 0))
        .unwrap();
    let unused = copy(dir.path());
    let mut b = end.clone();
    b[used * pages::PAGE..].fill(0);
    fs::write(segment(unused.path(), newest - 1), b).unwrap();
    let mut b = fs::read(segment(unused.path(), newest)).unwrap();
    let kept = b[2 * pages::PAGE..].iter().any(|b| *b != 0);
    b[2 * pages::PAGE..].fill(0);
    if kept {
        assert_refused(image(unused.path()).await, "a used segment after one without an end");
    }
    fs::write(segment(unused.path(), newest), b).unwrap();
    let got = image(unused.path()).await.unwrap();
    assert!(got.last() < 60 && segments(unused.path()).len() as u64 == newest - 1);
}

#[tokio::test]
async fn other_owners_and_newer_formats_are_named() {
    let dir = tempfile::tempdir().unwrap();
    sample(dir.path()).await;
    let e = open_as(dir.path(), CLUSTER, 2).err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("metadata server 1, not of 2"), "{e}");
    let e = open_as(dir.path(), [8; 16], 1).err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("another cluster"), "{e}");
    for name in ["member", "log-00000001"] {
        let newer = copy(dir.path());
        let mut b = fs::read(dir.path().join(name)).unwrap();
        b[8] = 2;
        let crc = strake_proto::checksum::crc32c(&b[..pages::PAGE - 4]);
        b[pages::PAGE - 4..pages::PAGE].copy_from_slice(&crc.to_le_bytes());
        fs::write(newer.path().join(name), b).unwrap();
        let e = open(newer.path()).err().unwrap();
        assert!(e.code == Code::OpNotSupp && e.message.contains("format version 2"), "{e}");
    }
}

#[tokio::test]
async fn crashes_while_the_folder_is_made_leave_a_fresh_one() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).unwrap());
    let half = copy(dir.path());
    fs::remove_file(half.path().join("member")).unwrap();
    fs::write(half.path().join("spare.tmp"), b"part").unwrap();
    assert!(image(half.path()).await.unwrap().is_pristine());
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("spare.tmp"), b"part").unwrap();
    assert!(image(empty.path()).await.unwrap().is_pristine());
}

/// The bytes of version 1, which never change.
#[tokio::test]
async fn golden_segment() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/raft-log-v1.bin");
    let dir = tempfile::tempdir().unwrap();
    sample(dir.path()).await;
    let mut bytes = fs::read(segment(dir.path(), 1)).unwrap();
    bytes.truncate(7 * pages::PAGE);
    if std::env::var_os("STRAKE_WRITE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &bytes).unwrap();
    }
    let golden = fs::read(&path).unwrap();
    assert!(golden == bytes, "the raft log's format changed; that needs a new format version");
    let ops = disk_log::read_segment(&golden).unwrap();
    assert_eq!(ops.last(), Some(&hard(2, 3, 2)));
    let mut all = Vec::new();
    ops.iter().for_each(|op| log::encode_op(op, &mut all));
    assert_eq!(log::decode_ops(&all).unwrap(), ops);
    for len in 0..all.len() {
        let _ = log::decode_ops(&all[..len]);
    }
}
