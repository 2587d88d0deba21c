//! Removal after the name is gone: inodes that nothing refers to, and orphans.

use strake_proto::{Ino, ids::ROOT_INO, pb};

use super::{
    effects::Ending,
    fail::Res,
    gc::discard_data,
    inode::{Inode, is_file},
    keys,
    locks::table,
    txn::Txn,
    writers,
};

/// Removes an inode that nothing refers to any more.
pub(super) fn remove_inode(t: &mut Txn<'_>, r: &pb::InodeRecord) -> Res<()> {
    let ino = r.attr().ino;
    debug_assert!(ino != ROOT_INO && r.entries == 0, "inode {ino} is still needed");
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
    if is_file(r.attr()) {
        discard_data(t, r)?;
        if r.writers > 0 {
            // A session closed it but did not release it.
            t.notes.endings.push(Ending { session: 0, ino, rights: writers::TO_WRITE });
        }
        table::forget_file(t, ino)?;
        forget_pages(t, r);
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

/// Drops the pages of a sealed file's manifest.
pub(super) fn forget_pages(t: &mut Txn<'_>, r: &pb::InodeRecord) {
    let pages = r.seal.as_ref().map_or(0, |s| s.pages);
    (0..pages).for_each(|n| t.delete(keys::extents(r.attr().ino, n)));
}
