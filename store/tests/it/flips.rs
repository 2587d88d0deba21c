//! Bits that flip in a store's files: a read returns the right data or `Corrupt`.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use strake_proto::{Code, Result};
use strake_store::{Batch, FjallStore, MetaStore, Reader, fjall_store::Options};

const KEYS: u32 = 12_000;

fn options() -> Options {
    Options { memtable_bytes: 1 << 20, cache_bytes: 1 << 20, ..Options::default() }
}

fn key(n: u32) -> String {
    format!("key{n:08}")
}

fn value(n: u32) -> Vec<u8> {
    n.to_le_bytes().repeat(40)
}

fn put(s: &FjallStore, n: u32) -> Result<()> {
    let mut b = Batch::default();
    b.put(key(n), value(n));
    s.commit(b)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for e in fs::read_dir(dir).unwrap() {
        let p = e.unwrap().path();
        if p.is_dir() { found.extend(files(&p)) } else { found.push(p) }
    }
    found.sort();
    found
}

fn tables(dir: &Path) -> Vec<PathBuf> {
    files(dir).into_iter().filter(|f| f.parent().is_some_and(|p| p.ends_with("tables"))).collect()
}

/// A store with most of its data in tables.
fn filled(dir: &Path) -> FjallStore {
    let s = FjallStore::open_with(dir, &options()).unwrap();
    (0..KEYS).for_each(|n| put(&s, n).unwrap());
    s.sync().unwrap();
    while tables(dir).is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    s
}

/// Whether all data can be read. `Corrupt` is allowed, wrong data is not.
fn whole(dir: &Path) -> bool {
    let s = match FjallStore::open_with(dir, &options()) {
        Ok(s) => s,
        Err(e) => {
            assert_eq!(e.code, Code::Corrupt, "{e}");
            return false;
        }
    };
    let mut whole = true;
    for n in 0..KEYS {
        match s.get(key(n).as_bytes()) {
            Ok(v) => assert_eq!(v.as_deref(), Some(&value(n)[..]), "{n}"),
            Err(e) => {
                assert_eq!(e.code, Code::Corrupt, "{e}");
                whole = false;
            }
        }
    }
    let walked = s.prefix(b"").take_while(Result::is_ok).count() as u32;
    assert_eq!(walked == KEYS, whole, "{walked}");
    whole
}

fn flip(file: &Path, at: u64, bit: u8) {
    let f = File::options().read(true).write(true).open(file).unwrap();
    let mut b = [0];
    f.read_exact_at(&mut b, at).unwrap();
    f.write_all_at(&[b[0] ^ 1 << bit], at).unwrap();
}

/// Flips one bit in each byte of the lists of tables, and in some bytes of each table, which is
/// long.
#[test]
fn a_flipped_bit_is_no_other_data() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    assert!(whole(dir.path()));
    let current = |f: &PathBuf| {
        let n = u64::from_le_bytes(fs::read(f).unwrap()[..8].try_into().unwrap());
        f.with_file_name(format!("v{n}"))
    };
    let named: Vec<PathBuf> =
        files(dir.path()).into_iter().filter(|f| f.ends_with("current")).collect();
    let lists: Vec<PathBuf> = named.iter().cloned().chain(named.iter().map(current)).collect();
    assert_eq!(lists.len(), 4, "of the keyspace and of fjall's own");
    for list in &lists {
        for at in 0..fs::metadata(list).unwrap().len() {
            let bit = (at % 8) as u8;
            flip(list, at, bit);
            let e = FjallStore::open_with(dir.path(), &options()).err();
            assert!(
                e.as_ref().is_some_and(|e| e.code == Code::Corrupt),
                "{list:?} {at}.{bit}: {e:?}"
            );
            flip(list, at, bit);
        }
    }
    let tables = tables(dir.path());
    for (i, table) in tables.iter().enumerate() {
        let len = fs::metadata(table).unwrap().len();
        for at in
            (i as u64 * 97..len).step_by((len / 12) as usize).chain(len - 400..len).step_by(40)
        {
            flip(table, at, (at % 8) as u8);
            whole(dir.path());
            flip(table, at, (at % 8) as u8);
        }
        flip(table, len / 3, 0);
        assert!(!whole(dir.path()), "{table:?}");
        flip(table, len / 3, 0);
    }
    assert!(whole(dir.path()), "all of it was mended");
}

/// Damage in fjall's own list of keyspaces.
#[test]
fn a_damaged_store_can_be_cleared() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let s = FjallStore::open_with(dir.path(), &options()).unwrap();
    for table in tables(dir.path()) {
        let len = fs::metadata(&table).unwrap().len();
        (0..len).step_by(30).for_each(|at| flip(&table, at, 3));
    }
    assert_eq!(s.prefix(b"").find_map(Result::err).unwrap().code, Code::Corrupt);
    s.clear().unwrap();
    put(&s, 7).unwrap();
    drop(s);
    assert_eq!(FjallStore::open_with(dir.path(), &options()).unwrap().prefix(b"").count(), 1);
}

/// A compaction that meets damage is not taken for a full disk, and a store that failed because of
/// it can be cleared.
#[test]
fn damage_met_in_the_background_is_named_and_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let s = filled(dir.path());
    for table in tables(dir.path()) {
        let len = fs::metadata(&table).unwrap().len();
        (0..len).step_by(1000).for_each(|at| flip(&table, at, 3));
    }
    // The same keys again, so that tables are merged.
    let failed = (0..60 * KEYS).find_map(|n| put(&s, n % KEYS).err()).expect("a compaction");
    assert_eq!(failed.code, Code::Corrupt, "{failed}");
    assert_eq!(put(&s, 0).unwrap_err().code, Code::Corrupt);
    let view = s.snapshot().unwrap();
    assert_eq!(s.clear().unwrap_err().code, Code::Busy, "it is read");
    drop(view);
    s.clear().unwrap();
    assert_eq!(s.prefix(b"").count(), 0);
    put(&s, 7).unwrap();
    s.sync().unwrap();
    drop(s);
    let s = FjallStore::open_with(dir.path(), &options()).unwrap();
    assert_eq!(s.prefix(b"").map(|p| p.unwrap().0).collect::<Vec<_>>(), [key(7)]);
}
