//! Removal after the name is gone: orphans, chunks to delete, chunks to trim.

use prost::Message;
use strake_proto::{Ino, pb};

use super::{
    effects::Ending,
    keys, locks,
    ops::Inode,
    perm, seals,
    txn::{Res, Txn},
    writers,
};

/// The next of the numbers that order deletions, trims and evictions.
pub(super) fn number(t: &mut Txn<'_>) -> u64 {
    let n = t.header.next_number;
    t.header.next_number += 1;
    n
}

/// Puts the chunks of a file's current data id on the list of chunks to delete. The metadata server
/// does not know whether any exist: writers report an end after they wrote.
pub(super) fn discard_data(t: &mut Txn<'_>, r: &pb::InodeRecord) {
    let Some(layout) = &r.layout else { return };
    discard(
        t,
        pb::GcRecord { ino: r.attr().ino, layout: Some(layout.clone()), size: r.attr().size },
    );
}

/// Puts chunks on that list.
pub(super) fn discard(t: &mut Txn<'_>, chunks: pb::GcRecord) {
    let key = keys::numbered(keys::GC, number(t));
    t.put(key, chunks.encode_to_vec());
}

/// Leaves a [`pb::Trim`] to remove the bytes from `size` on. None may reappear when the file grows
/// again.
pub(super) fn cut(t: &mut Txn<'_>, r: &mut pb::InodeRecord, size: u64) {
    let before = r.trim.unwrap_or(pb::Trim { size, ..Default::default() });
    let trim = pb::Trim {
        number: number(t),
        size: before.size.min(size),
        fence: before.fence.max(r.fence),
    };
    t.put(keys::numbered(keys::TRIM, r.attr().ino), trim.encode_to_vec());
    r.trim = Some(trim);
}

/// Removes an inode that nothing refers to any more.
pub(super) fn remove_inode(t: &mut Txn<'_>, r: &pb::InodeRecord) -> Res<()> {
    let ino = r.attr().ino;
    if r.xattrs > 0 {
        let mut found = Vec::new();
        t.scan(&keys::numbered(keys::XATTR, ino), &[], |key, _| {
            found.push(bytes::Bytes::copy_from_slice(key));
            Ok(true)
        })?;
        found.into_iter().for_each(|key| t.delete(key));
    }
    if r.trim.is_some() {
        t.delete(keys::numbered(keys::TRIM, ino));
    }
    if perm::is_file(r.attr()) {
        discard_data(t, r);
        if r.writers > 0 {
            // A session closed it but did not release it.
            t.notes.endings.push(Ending { session: 0, ino, rights: writers::TO_WRITE });
        }
        locks::forget_file(t, ino)?;
        seals::forget_pages(t, r);
    }
    t.delete_inode(ino);
    t.header.inodes = t.header.inodes.saturating_sub(1);
    Ok(())
}

/// Removes those of the inodes that are orphans; no session has them open any more.
pub(super) fn free_orphans(t: &mut Txn<'_>, inos: &[Ino]) -> Res<()> {
    for ino in inos {
        let key = keys::numbered(keys::ORPHAN, *ino);
        if t.get(&key)?.is_none() {
            continue;
        }
        t.delete(key);
        if let Some(r) = t.inode(*ino)? {
            remove_inode(t, &r)?;
        }
    }
    Ok(())
}

/// The chunks of these records are gone.
pub(super) fn gc_done(t: &mut Txn<'_>, numbers: &[u64]) -> Res<()> {
    for n in numbers {
        let key = keys::numbered(keys::GC, *n);
        if t.get(&key)?.is_some() {
            t.delete(key);
        }
    }
    Ok(())
}

/// The trim with this number is done; a newer one of the same inode stays.
pub(super) fn trim_done(t: &mut Txn<'_>, done: &pb::TrimDone) -> Res<()> {
    let Some(mut r) = t.inode(done.ino)? else { return Ok(()) };
    if r.trim.is_none_or(|trim| trim.number != done.number) {
        return Ok(());
    }
    r.trim = None;
    t.put_unseen(done.ino, r);
    t.delete(keys::numbered(keys::TRIM, done.ino));
    Ok(())
}
