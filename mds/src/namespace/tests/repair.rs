//! The repairs of `strake fsck --repair`: damage planted in the store behind the namespace's back,
//! and what must be refused.

use pb::repair::What;
use strake_store::{Batch, MetaStore as _};

use super::{seals::closed, *};

fn repair(fs: &mut Fs, what: What) -> Option<Code> {
    code_of(fs.log(Command::Repair(pb::Repair { what: Some(what) })).status.as_ref())
}

fn chunks(ino: Ino, data_id: u64, chains: &[u32]) -> What {
    What::Chunks(pb::RepairChunks { ino, data_id, chains: chains.to_vec(), misplaced: false })
}

fn misplaced(ino: Ino, data_id: u64, chains: &[u32]) -> What {
    What::Chunks(pb::RepairChunks { ino, data_id, chains: chains.to_vec(), misplaced: true })
}

fn end(fs: &mut Fs, ino: Ino, size: u64) -> Option<Code> {
    let data_id = fs.record(ino).and_then(|r| r.attr).map_or(1, |a| a.data_id);
    repair(fs, What::End(pb::RepairEnd { ino, data_id, size }))
}

fn name(parent: Ino, name: &str, ino: Ino) -> What {
    What::Name(pb::RepairName { parent, name: bytes(name), ino })
}

/// Removes an inode and leaves everything that refers to it.
fn lose(fs: &Fs, ino: Ino) {
    let mut batch = Batch::default();
    batch.delete(keys::numbered(keys::INODE, ino));
    fs.store.commit(batch).unwrap();
}

fn refuses_nothing_known(fs: &mut Fs) {
    let none = fs.log(Command::Repair(pb::Repair { what: None }));
    assert_eq!(code_of(none.status.as_ref()), Some(Code::OpNotSupp));
}

/// The chains of a file, and one that it is not on.
fn chains_of(fs: &Fs, ino: Ino) -> (u64, Vec<u32>, u32) {
    let c = fs.record(ino).unwrap().layout.unwrap().components.remove(0);
    let other =
        fs.ns.map().map.chains.iter().map(|x| x.id).find(|id| !c.chains.contains(id)).unwrap();
    assert!(!c.chains.is_empty());
    (c.data_id, c.chains, other)
}

#[test]
fn chunks_that_some_file_has_are_never_deleted() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 9_000_000);
    let (data, own, other) = chains_of(&fs, f);
    assert_eq!(repair(&mut fs, chunks(f, data, &own)), Some(Code::Exist));
    assert_eq!(
        repair(&mut fs, chunks(f, data, &[other])),
        Some(Code::Exist),
        "they are not leaked"
    );
    assert_eq!(
        repair(&mut fs, misplaced(f, data, &[other, own[0]])),
        Some(Code::Exist),
        "one of them is enough"
    );
    // Removed but open, it is an orphan.
    fs.one(mk_unlink(ROOT, "f"));
    assert_eq!(repair(&mut fs, chunks(f, data, &own)), Some(Code::Exist));
    // What a file could still get.
    let h = fs.ns.header();
    assert_eq!(repair(&mut fs, chunks(h.next_ino, data, &own)), Some(Code::Inval));
    assert_eq!(repair(&mut fs, chunks(f, h.next_data_id, &own)), Some(Code::Inval));
    assert_eq!(repair(&mut fs, chunks(9, data, &[])), Some(Code::Inval));
    assert_eq!(repair(&mut fs, chunks(9, data, &[77_777])), Some(Code::Inval));
    assert_eq!(fs.ns.backlog().gc_queue(9), []);
    refuses_nothing_known(&mut fs);
}

#[test]
fn chunks_that_no_file_has_are_queued_for_deletion() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 9_000_000);
    let (data, own, other) = chains_of(&fs, f);
    // On chains where the layout does not put them, and of a data id that is not the file's (any
    // more).
    assert_eq!(repair(&mut fs, misplaced(f, data, &[other])), None);
    fs.one(mk_create(ROOT, "later"));
    assert_eq!(repair(&mut fs, chunks(f, data + 1, &own)), None);
    // Of an inode that is gone.
    fs.one(mk_unlink(ROOT, "f"));
    assert_eq!(fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f] })).status, None);
    let before: Vec<u64> = fs.ns.backlog().gc_queue(9).into_iter().map(|g| g.0).collect();
    assert_eq!(before.len(), 3);
    assert_eq!(repair(&mut fs, chunks(f, data, &[own[0], other])), None);
    let (_, last) = fs.ns.backlog().gc_queue(9).pop().unwrap();
    let layout = last.layout.unwrap();
    let map = strake_proto::layout::StripeMap::resolve(last.ino, &layout, &fs.ns.map()).unwrap();
    assert_eq!((map.ino, map.data, map.chains, last.size), (f, data, vec![own[0], other], 0));
}

#[test]
fn a_file_is_cut_at_its_end_unless_that_may_move() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 5000);
    assert_eq!(end(&mut fs, f, 4999), Some(Code::Busy), "it has grown");
    let wrong = What::End(pb::RepairEnd { ino: f, data_id: 77, size: 5000 });
    assert_eq!(repair(&mut fs, wrong), Some(Code::NoEnt));
    let held = fs.one(Op::Open(pb::Open { ino: f, flags: 1 }));
    assert_eq!(end(&mut fs, f, 5000), Some(Code::Busy), "it is open for writing");
    fs.one(Op::Release(pb::Release { ino: f, writer: held.writer, surplus: false }));
    let begun = fs.one(seals::begin(f));
    assert!(begun.seal.is_some());
    assert_eq!(end(&mut fs, f, 5000), Some(Code::Busy), "it is being sealed");
    fs.one(seals::undo(f));
    assert_eq!(fs.ns.backlog().trims(9), []);
    assert_eq!(end(&mut fs, f, 5000), None);
    let trims = fs.ns.backlog().trims(9);
    assert_eq!(trims.iter().map(|t| (t.0, t.1.size)).collect::<Vec<_>>(), [(f, 5000)]);
    assert_eq!(fs.attr(f).size, 5000);
    let done = pb::TrimDone { ino: f, number: trims[0].1.number };
    assert_eq!(fs.log(Command::TrimDone(done)).status, None);
    assert_eq!(end(&mut fs, ROOT, 4096), Some(Code::NoEnt));
    assert_eq!(end(&mut fs, 9999, 0), Some(Code::NoEnt));
}

#[test]
fn an_entry_without_an_inode_is_removed() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let (f, kept) = (closed(&mut fs, "f", 100), fs.create(d, "kept"));
    assert_eq!(repair(&mut fs, name(ROOT, "f", f)), Some(Code::Exist));
    assert_eq!(
        repair(&mut fs, name(ROOT, "f", f + 100)),
        Some(Code::NoEnt),
        "the name is another inode's"
    );
    assert_eq!(repair(&mut fs, name(kept, "x", f + 100)), Some(Code::NotDir));
    lose(&fs, f);
    fs.fails(mk_unlink(ROOT, "f"), Code::NoEnt);
    let before = fs.attr(ROOT);
    assert_eq!(repair(&mut fs, name(ROOT, "f", f)), None);
    assert_eq!(repair(&mut fs, name(ROOT, "f", f)), Some(Code::NoEnt), "asked again");
    let after = fs.attr(ROOT);
    assert!(
        after.change > before.change
            && after.mtime_ns > before.mtime_ns
            && after.nlink == before.nlink
    );
    fs.create(ROOT, "f");
    assert_eq!(fs.names(ROOT, 9).len(), 2);
    // The inode that was lost was counted; nothing else is left of it.
    miscounted(&mut fs, 1);
}

#[test]
fn a_directory_without_an_inode_keeps_its_entry_while_names_are_below() {
    let mut fs = Fs::new();
    let (d, e) = (fs.mkdir(ROOT, "d"), fs.mkdir(ROOT, "e"));
    let f = fs.create(d, "f");
    lose(&fs, d);
    lose(&fs, e);
    assert_eq!(repair(&mut fs, name(ROOT, "d", d)), Some(Code::NotEmpty));
    let nlink = fs.attr(ROOT).nlink;
    assert_eq!(repair(&mut fs, name(ROOT, "e", e)), None);
    assert_eq!(fs.attr(ROOT).nlink, nlink - 1);
    // The one below goes as well when it is lost.
    assert_eq!(fs.lookup(ROOT, "d"), Err(Code::NoEnt));
    let mut batch = Batch::default();
    let below: Vec<Bytes> = dump(&fs.store)
        .into_iter()
        .map(|(k, _)| k)
        .filter(|k| k.starts_with(&keys::dentry(d, 0)[..9]))
        .collect();
    assert_eq!(below.len(), 1);
    below.into_iter().for_each(|k| batch.delete(k));
    fs.store.commit(batch).unwrap();
    assert_eq!(repair(&mut fs, name(ROOT, "d", d)), None);
    assert_eq!(fs.names(ROOT, 9), Vec::<String>::new());
    assert!(fs.record(f).is_some());
    std::mem::forget(fs);
}

/// Counts inodes again by what exists.
fn miscounted(fs: &mut Fs, lost: u64) {
    let mut h = fs.ns.header();
    h.inodes -= lost;
    let mut batch = Batch::default();
    batch.put(Bytes::from_static(keys::HEADER), h.encode_to_vec());
    fs.store.commit(batch).unwrap();
    fs.ns.reload().unwrap();
}
