//! Tables that lost synced changes: refused, never served.

use std::{
    fs,
    ops::Bound,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use strake_proto::{Code, Error, Result, data::ListEntry};
use strake_store::{Batch, FjallStore, MetaStore, PairIter, Reader};

use super::*;
use crate::{
    device::{
        Device,
        mem::{Op, Tear},
    },
    engine::{
        record::{self, TABLE_DIGEST_KEY, header_key},
        table_digest::{Mark, TableDigest},
    },
};

const FLUSHES: u64 = 8;

/// A file of the table. Everything after `bytes` up to `len` is zeros.
struct Saved {
    path: PathBuf,
    bytes: Vec<u8>,
    len: u64,
}

fn save(dir: &Path, out: &mut Vec<Saved>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            save(&path, out);
            continue;
        }
        let mut bytes = fs::read(&path).unwrap();
        let len = bytes.len() as u64;
        bytes.truncate(bytes.iter().rposition(|b| *b != 0).map_or(0, |n| n + 1));
        out.push(Saved { path, bytes, len });
    }
    out.sort_by(|a, b| a.path.cmp(&b.path));
}

/// Puts the saved files into the folder, with one byte of one of them changed.
fn restore(dir: &Path, files: &[Saved], change: Option<(usize, usize, u8)>) {
    fs::remove_dir_all(dir).unwrap();
    for (n, f) in files.iter().enumerate() {
        let mut bytes = f.bytes.clone();
        if let Some((_, at, mask)) = change.filter(|c| c.0 == n) {
            bytes[at] ^= mask;
        }
        fs::create_dir_all(f.path.parent().unwrap()).unwrap();
        fs::write(&f.path, bytes).unwrap();
        fs::File::options().write(true).open(&f.path).unwrap().set_len(f.len).unwrap();
    }
}

/// Everything the target holds.
async fn contents(e: &Engine) -> Result<Vec<(ListEntry, Vec<u8>)>> {
    let mut out = Vec::new();
    for entry in e.list(CHAIN, None, 100)? {
        let bytes = read_all(e, key(entry.chunk.index)).await?;
        out.push((entry, bytes));
    }
    Ok(out)
}

async fn fill(e: &Engine) {
    for n in 1..=FLUSHES {
        apply(e, key(n), write(0, &pattern(n, 5000)), 1).await.unwrap();
        apply(e, key(0), write(n as u32 * 1000, &pattern(n + 50, 700)), n).await.unwrap();
        if n == 5 {
            apply(e, key(2), Update::Remove, 2).await.unwrap();
        }
        e.flush().await.unwrap();
    }
}

#[derive(Debug, Default)]
struct Outcomes {
    same: usize,
    refused: usize,
}

async fn one_flip(
    bed: &Bed,
    dir: &Path,
    whole: &[(ListEntry, Vec<u8>)],
    what: &str,
    o: &mut Outcomes,
) {
    let Ok(store) = FjallStore::open(dir) else { return o.refused += 1 };
    let opened =
        Engine::open(bed.device.clone(), Arc::new(store), Pool::default(), bed.options.clone())
            .await;
    let Ok(e) = opened else { return o.refused += 1 };
    assert_eq!(contents(&e).await.unwrap(), whole, "{what}");
    o.same += 1;
}

/// A target with data and its table on a real disk; also returns everything it holds.
async fn filled_on_disk(
    path: &Path,
    more: impl FnOnce(&FjallStore),
) -> (Bed, Vec<(ListEntry, Vec<u8>)>) {
    let bed = Bed::new(1024).await;
    let least =
        strake_store::fjall_store::Options { memtable_bytes: 1 << 20, ..Default::default() };
    let store = Arc::new(FjallStore::open_with(path, &least).unwrap());
    Engine::format(&*bed.device, &*store, identity()).await.unwrap();
    let e = Engine::open(bed.device.clone(), store.clone(), Pool::default(), bed.options.clone())
        .await
        .unwrap();
    fill(&e).await;
    let whole = contents(&e).await.unwrap();
    assert_eq!(whole.len(), FLUSHES as usize + 1);
    drop(e);
    more(&store);
    (bed, whole)
}

/// Changes each byte of the journal that can hold a tag, a length or a trailer, and bytes of every
/// other file. Nothing panics.
#[tokio::test]
async fn a_flipped_byte_of_the_tables_files_never_loses_a_chunk_silently() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    let (bed, whole) = filled_on_disk(&path, |_| ()).await;
    let mut files = Vec::new();
    save(&path, &mut files);
    restore(&path, &files, None);
    let mut o = Outcomes::default();
    one_flip(&bed, &path, &whole, "nothing changed", &mut o).await;
    assert_eq!(o.same, 1, "the copy alone changes nothing");
    let (mut journal, mut others) = (Outcomes::default(), Outcomes::default());
    for (n, f) in files.iter().enumerate() {
        let is_journal = f.path.extension().is_some_and(|e| e == "jnl");
        let (step, o) = if is_journal { (17, &mut journal) } else { (31, &mut others) };
        for at in (0..f.bytes.len()).step_by(step) {
            let mask = [0x01, 0x04, 0x10, 0x80][at / step % 4];
            restore(&path, &files, Some((n, at, mask)));
            one_flip(
                &bed,
                &path,
                &whole,
                &format!("{}: byte {at} ^ {mask:#x}", f.path.display()),
                o,
            )
            .await;
        }
    }
    println!("journal {journal:?}, other files {others:?}");
    assert!(
        journal.refused > 100 && others.refused > 0,
        "journal {journal:?}, other files {others:?}"
    );
}

/// The same with a table that was written out: bits of every file, wherever it has them.
#[tokio::test]
async fn a_flipped_byte_of_a_table_that_was_written_out_never_loses_a_chunk_silently() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("table");
    let tables = |files: &[Saved]| {
        files.iter().filter(|f| f.path.iter().any(|part| part == "tables")).count()
    };
    let mut files = Vec::new();
    let (bed, whole) = filled_on_disk(&path, |store| {
        // More than the store keeps in memory, under a key that no target uses.
        for n in 0..200u8 {
            put(store, b"z", Some(vec![n; 20_000].into()));
        }
        for _ in 0..500 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            files.clear();
            save(&path, &mut files);
            if tables(&files) > 0 {
                return;
            }
        }
        panic!(
            "the table is not written out: {:?}",
            files.iter().map(|f| &f.path).collect::<Vec<_>>()
        );
    })
    .await;
    files.clear();
    save(&path, &mut files);
    assert!(tables(&files) > 0);
    let mut all = Outcomes::default();
    for (n, f) in files.iter().enumerate() {
        let mut o = Outcomes::default();
        for (i, at) in (0..f.bytes.len()).step_by((f.bytes.len() / 60).max(1)).enumerate() {
            let mask = 1 << (i % 8);
            restore(&path, &files, Some((n, at, mask)));
            one_flip(
                &bed,
                &path,
                &whole,
                &format!("{}: byte {at} ^ {mask:#x}", f.path.display()),
                &mut o,
            )
            .await;
        }
        println!("{}: {} bytes, {o:?}", f.path.display(), f.bytes.len());
        (all.same, all.refused) = (all.same + o.same, all.refused + o.refused);
    }
    assert!(all.refused > 50 && all.same > 50, "{all:?}");
}

fn put(table: &dyn MetaStore, key: &[u8], value: Option<bytes::Bytes>) {
    table.commit(Batch { ops: vec![(bytes::Bytes::copy_from_slice(key), value)] }).unwrap();
    table.sync().unwrap();
}

async fn refused(bed: &Bed, words: &str) {
    let e = bed.try_open().await.err().unwrap_or_else(|| panic!("opened; wanted: {words}"));
    assert!(
        e.code == Code::Corrupt
            && e.message.contains(words)
            && e.message.contains("A target that is refused"),
        "{e}"
    );
}

async fn filled() -> Bed {
    let bed = Bed::new(1024).await;
    fill(&bed.open().await.clone()).await;
    bed
}

#[tokio::test]
async fn a_table_as_of_an_earlier_flush_is_refused() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    let mut states = Vec::new();
    for n in 0..6 {
        apply(&e, key(n), write(0, &pattern(n, 5000)), 1).await.unwrap();
        e.flush().await.unwrap();
        states.push(bed.table.prefix(b"").map(Result::unwrap).collect::<Vec<_>>());
    }
    e.flush().await.unwrap(); // nothing to write: neither table nor mark move
    drop(e);
    for (n, state) in states.iter().enumerate().rev() {
        bed.table.clear().unwrap();
        bed.table
            .commit(Batch {
                ops: state.iter().map(|(k, v)| (k.clone(), Some(v.clone()))).collect(),
            })
            .unwrap();
        match n {
            5 => drop(bed.open().await),
            _ => {
                refused(&bed, &format!("it is as of flush {}, but the device knows of 6", n + 1))
                    .await
            }
        }
    }
    // One copy of the mark is lost; the other one still counts.
    bed.device.flip_bit(2 * BLOCK + 33, 0);
    refused(&bed, "the device knows of 5").await;
}

#[tokio::test]
async fn a_record_that_is_missing_stale_or_too_much_is_refused() {
    let bed = filled().await;
    let records: Vec<_> =
        bed.table.prefix(b"").map(Result::unwrap).filter(|(k, _)| k.len() > 28).collect();
    assert!(records.len() > 15);
    for (k, v) in &records {
        put(&bed.table, k, None);
        refused(&bed, &format!("its {} records are not the {}", records.len() - 1, records.len()))
            .await;
        put(&bed.table, k, Some(v.clone()));
    }
    let k = header_key(&key(0));
    let mut old = record::Header::decode(&k, &bed.table.get(&k).unwrap().unwrap()).unwrap();
    old.meta.version.number -= 1;
    let now = bed.table.get(&k).unwrap();
    put(&bed.table, &k, Some(old.encode(&k)));
    refused(&bed, "records are not").await;
    put(&bed.table, &k, now);
    let dead = header_key(&key(77));
    put(&bed.table, &dead, Some(old.encode(&dead)));
    refused(&bed, "records are not").await;
    put(&bed.table, &dead, None);
    drop(bed.open().await);
    put(&bed.table, TABLE_DIGEST_KEY, None);
    refused(&bed, "its digest").await;
}

/// A damaged record still affects only its chunk, and does not hide that another one is missing.
#[tokio::test]
async fn damage_and_loss_together_are_refused() {
    let bed = filled().await;
    put(&bed.table, &header_key(&key(3)), Some(bytes::Bytes::from_static(b"junk")));
    let e = bed.open().await;
    assert_eq!(e.usage().checksum_errors, 1);
    apply(&e, key(1), write(0, b"new"), 2).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let gone = header_key(&key(4));
    let kept = bed.table.get(&gone).unwrap();
    put(&bed.table, &gone, None);
    refused(&bed, "records are not").await;
    put(&bed.table, &gone, kept);
    let e = bed.open().await;
    apply(&e, key(3), replace(b"whole again"), 2).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    // Opened without damage: values count again from the next flush on.
    let e = bed.open().await;
    apply(&e, key(1), write(0, b"newer"), 3).await.unwrap();
    e.flush().await.unwrap();
    assert!(
        !TableDigest::decode(&bed.table.get(TABLE_DIGEST_KEY).unwrap().unwrap()).unwrap().unsure
    );
    drop(bed.open().await);
}

#[tokio::test]
async fn a_target_of_a_version_without_a_digest_opens_and_is_watched_from_then_on() {
    let bed = filled().await;
    put(&bed.table, TABLE_DIGEST_KEY, None);
    bed.device.write(2 * BLOCK, vec![Buf::copy_from(&[0; 2 * BLOCK as usize])]).await.unwrap();
    let e = bed.open().await;
    let whole = contents(&e).await.unwrap();
    drop(e);
    let e = bed.open().await;
    apply(&e, key(1), write(0, b"new"), 2).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    assert_eq!(contents(&e).await.unwrap().len(), whole.len());
    drop(e);
    put(&bed.table, &header_key(&key(4)), None);
    refused(&bed, "records are not").await;
    // The mark of another target that used this device before has no effect.
    let other = Mark { uuid: [9; 16], flushes: 1000 }.encode();
    bed.device
        .write(2 * BLOCK, vec![Buf::copy_from(&other), Buf::copy_from(&other)])
        .await
        .unwrap();
    put(&bed.table, TABLE_DIGEST_KEY, None);
    drop(bed.open().await);
}

#[tokio::test]
async fn a_mark_that_cannot_be_written_or_is_lost_costs_nothing() {
    for seed in 0..20 {
        let bed = filled().await;
        let e = bed.open().await;
        apply(&e, key(1), write(0, &pattern(4, 4096)), 2).await.unwrap();
        bed.device.fail(Op::Write, 0, Code::Io); // the bytes are written already
        e.flush().await.unwrap();
        apply(&e, key(1), write(0, &pattern(5, 4096)), 3).await.unwrap();
        e.flush().await.unwrap();
        drop(e);
        bed.device.crash(seed, Tear::Sector);
        bed.table.crash(|_| 0);
        let e = bed.open().await;
        assert_eq!(e.meta(&key(1)).unwrap().unwrap().version, version(3));
    }
}

/// A store that fails all reads after a full disk until a commit finds space: like the store on
/// disk when it could not be reopened at once.
struct Closed {
    store: MemStore,
    closed: AtomicBool,
}

impl Reader for Closed {
    fn get(&self, key: &[u8]) -> Result<Option<bytes::Bytes>> {
        if self.closed.load(Relaxed) {
            return Err(Error::new(Code::NoSpc, "closed"));
        }
        self.store.get(key)
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.store.range(from, to)
    }
}

impl MetaStore for Closed {
    fn commit(&self, batch: Batch) -> Result<()> {
        self.closed.store(false, Relaxed);
        self.store.commit(batch)
    }
    fn sync(&self) -> Result<()> {
        self.store.sync()
    }
    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        self.store.snapshot()
    }
    fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }
    fn clear(&self) -> Result<()> {
        self.store.clear()
    }
}

#[tokio::test]
async fn a_store_that_a_full_disk_closed_is_opened_by_the_next_flush() {
    let bed = filled().await;
    let table = Arc::new(Closed { store: bed.table.clone(), closed: AtomicBool::new(false) });
    let e = Engine::open(bed.device.clone(), table.clone(), Pool::default(), bed.options.clone())
        .await
        .unwrap();
    apply(&e, key(1), write(0, b"new"), 2).await.unwrap();
    table.closed.store(true, Relaxed);
    e.flush().await.unwrap();
    drop(e);
    assert_eq!(bed.open().await.meta(&key(1)).unwrap().unwrap().version, version(2));
}
