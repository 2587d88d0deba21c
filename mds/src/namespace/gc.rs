//! What is still to be removed at the storage servers: chunks to delete, files to trim.

use prost::Message;
use strake_proto::pb;

use super::{
    fail::{Res, next},
    inode::Inode,
    keys,
    txn::Txn,
};

/// The next of the numbers that order deletions, trims and evictions.
pub(super) fn number(t: &mut Txn<'_>) -> Res<u64> {
    next(&mut t.header.next_number, "numbers of deletions")
}

/// Puts the chunks of a file's current data id on the list of chunks to delete. The metadata server
/// does not know whether any exist: writers report an end after they wrote.
pub(super) fn discard_data(t: &mut Txn<'_>, r: &pb::InodeRecord) -> Res<()> {
    let Some(layout) = &r.layout else { return Ok(()) };
    discard(
        t,
        pb::GcRecord { ino: r.attr().ino, layout: Some(layout.clone()), size: r.attr().size },
    )
}

/// Puts chunks on that list.
pub(super) fn discard(t: &mut Txn<'_>, chunks: pb::GcRecord) -> Res<()> {
    let key = keys::numbered(keys::GC, number(t)?);
    t.put(key, chunks.encode_to_vec());
    Ok(())
}

/// Leaves a [`pb::Trim`] to remove the bytes from `size` on. None may reappear when the file grows
/// again.
pub(super) fn cut(t: &mut Txn<'_>, r: &mut pb::InodeRecord, size: u64) -> Res<()> {
    let before = r.trim.unwrap_or(pb::Trim { size, ..Default::default() });
    let trim = pb::Trim {
        number: number(t)?,
        size: before.size.min(size),
        fence: before.fence.max(r.fence),
    };
    t.put(keys::numbered(keys::TRIM, r.attr().ino), trim.encode_to_vec());
    debug_assert!(trim.size <= size && r.trim.is_none_or(|t| t.number < trim.number));
    r.trim = Some(trim);
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
