//! The Raft log as found on a disk: pages, changes and whole folders. A folder must be refused, or
//! be readable and writable.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use raft::eraftpb::{Entry, HardState};
use strake_mds::consensus::{
    DiskLog, DiskOptions, LogImage, LogOp, LogStore,
    disk_log::read_segment,
    fuzzing::{PAGE, SegmentHeader, decode_header, encode_batch, encode_header, scan},
    log::{decode_ops, encode_op},
};
use strake_proto::checksum::crc32c;

use crate::{input::Input, world};

const CLUSTER: [u8; 16] = [4; 16];
const STAMP: u64 = 7;

/// The first byte chooses between bytes of one format and a folder.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    match i.u8() % 8 {
        0 => changes(i.0),
        1 => pages(i.0),
        2..6 => {
            let bytes = segment(&mut i, 1);
            let _ = read_segment(&bytes);
        }
        _ => folder(&mut i),
    }
}

/// What decodes must encode to the same bytes; what applies once must apply again.
fn changes(data: &[u8]) {
    let Ok(ops) = decode_ops(data) else { return };
    let mut again = Vec::new();
    ops.iter().for_each(|op| encode_op(op, &mut again));
    assert_eq!(again, data);
    let (mut one, mut two) = (LogImage::new(vec![1], STAMP), LogImage::new(vec![1], STAMP));
    let applied = ops.iter().take_while(|op| one.apply(op).is_ok()).count();
    ops[..applied].iter().for_each(|op| two.apply(op).expect("it applied before"));
    assert_eq!(one, two);
    assert_eq!(one.last() - one.base.0, one.entries.len() as u64);
}

fn pages(data: &[u8]) {
    let _ = decode_header(data);
    // The same bytes as fields of a header page with a correct checksum.
    let header = SegmentHeader {
        cluster: CLUSTER,
        member: 1,
        segment: 1,
        first_batch: 1,
        stamp: STAMP,
        voters: vec![1],
    };
    let mut page = encode_header(&header);
    let n = data.len().min(PAGE - 12);
    page[8..8 + n].copy_from_slice(&data[..n]);
    let crc = crc32c(&page[..PAGE - 4]);
    page[PAGE - 4..].copy_from_slice(&crc.to_le_bytes());
    if let Ok(h) = decode_header(&page) {
        assert_eq!(decode_header(&encode_header(&h)).expect("what was encoded"), h);
    }
    let _ = scan(&[&page[..], data].concat(), 1, STAMP);
}

fn change(i: &mut Input) -> LogOp {
    let (index, term) = (i.number(), i.number());
    match i.u8() % 10 {
        0 => LogOp::Cut { index, term },
        1 => LogOp::Reset { index, term },
        2 => LogOp::Restoring { index, term },
        3 => LogOp::Peer { id: index, stamp: term },
        4 => LogOp::HardState(HardState {
            term,
            vote: index,
            commit: i.number(),
            ..Default::default()
        }),
        _ => LogOp::Append(Entry {
            index,
            term,
            data: i.bytes().to_vec().into(),
            ..Default::default()
        }),
    }
}

/// The batch of a checkpoint: base and last entry, then changes.
fn checkpoint(i: &mut Input) -> Vec<u8> {
    let mut out = vec![8, 32, 0, 0, 0];
    let words = if i.u8() == 0 { [i.number(), i.number(), i.number(), i.number()] } else { [0; 4] };
    words.iter().for_each(|w| out.extend_from_slice(&w.to_le_bytes()));
    encode_op(&LogOp::HardState(HardState::default()), &mut out);
    out
}

/// A segment that is mostly well formed.
fn segment(i: &mut Input, number: u64) -> Vec<u8> {
    let strange = i.u8();
    let first_batch = if strange & 1 == 0 { 1 } else { i.number() };
    let segment = if strange & 2 == 0 { number } else { i.number() };
    let h = SegmentHeader {
        cluster: CLUSTER,
        member: 1,
        segment,
        first_batch,
        stamp: STAMP,
        voters: vec![1, 2, 3],
    };
    let mut out = encode_header(&h).to_vec();
    let batches = 1 + i.u8() % 6;
    for n in 0..u64::from(batches) {
        let mut payload = Vec::new();
        match i.u8() % 16 {
            0 => payload = i.bytes().to_vec(),
            1 => {
                payload = vec![7, 8, 0, 0, 0];
                payload.extend_from_slice(&i.number().to_le_bytes());
            }
            _ if n == 0 => payload = checkpoint(i),
            _ => (0..1 + i.u8() % 4).for_each(|_| encode_op(&change(i), &mut payload)),
        }
        let batch = if i.u8() == 255 { i.number() } else { first_batch.wrapping_add(n) };
        out.extend_from_slice(&encode_batch(batch, STAMP, &payload));
    }
    match i.u8() {
        0 => out.truncate(out.len() - usize::from(i.u16()) % out.len()),
        1 => {
            let at = usize::from(i.u16()) % out.len();
            out[at] ^= i.u8();
        }
        2 => {
            // A page that was never written.
            let at = usize::from(i.u8()) % (out.len() / PAGE) * PAGE;
            out[at..at + PAGE].fill(0);
        }
        n => out.resize(out.len() + PAGE * usize::from(n % 4), 0),
    }
    out
}

/// A folder for one input, in memory if the machine has `/dev/shm`.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shm = Path::new("/dev/shm");
        let base = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
        let at =
            base.join(format!("strake-fuzz-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed)));
        fs::create_dir_all(&at).expect("a folder for temporary files");
        Folder(at)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open(dir: &Path) -> strake_proto::Result<DiskLog> {
    DiskLog::open(dir, CLUSTER, 1, &[1, 2, 3], STAMP, DiskOptions { segment_bytes: 8 * PAGE })
}

/// A log that opens must take writes, and read back the same when it is opened again.
fn folder(i: &mut Input) {
    let dir = Folder::new();
    let write = |name: &str, bytes: &[u8]| {
        fs::write(dir.0.join(name), bytes).expect("room for a small file")
    };
    let h = SegmentHeader {
        cluster: CLUSTER,
        member: 1,
        segment: 0,
        first_batch: 0,
        stamp: STAMP,
        voters: vec![1, 2, 3],
    };
    match i.u8() {
        0 => {}
        1 => write("member", i.bytes()),
        _ => write("member", &encode_header(&h)),
    }
    let first = if i.u8() == 0 { i.number() } else { 1 };
    for n in 0..u64::from(i.u8() % 4) {
        let number = first.saturating_add(n);
        write(&format!("log-{number:08}"), &segment(i, number));
    }
    let Ok(log) = open(&dir.0) else { return };
    world::run(async {
        let mut image = log.load().await.expect("it is open");
        for _ in 0..i.u8() % 8 {
            let (index, term) = (image.last() + 1, image.term(image.last()).unwrap_or(1));
            let ops = vec![LogOp::Append(Entry {
                index,
                term,
                data: i.bytes().to_vec().into(),
                ..Default::default()
            })];
            if log.write(&ops).await.is_err() {
                return;
            }
            ops.iter().for_each(|op| image.apply(op).expect("an entry that follows"));
        }
        drop(log);
        let again = open(&dir.0).expect("what it wrote itself").load().await.expect("it is open");
        assert_eq!(again, image);
    });
}
