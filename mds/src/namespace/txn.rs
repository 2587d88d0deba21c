//! A transaction over the store: reads see its own writes, then those of earlier entries of the
//! same batch, then the store. Dropping it undoes it.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use bytes::Bytes;
use prost::Message;
use strake_proto::{Code, Error, Ino, pb};
use strake_store::{Reader, prefix_end};

use super::{
    effects::Notes,
    fail::{Fail, Res, decode, fail},
    keys::{self, NameHash, SLOTS},
    placement::Placement,
    steps::{self, Steps},
};

/// Writes not in the store yet; `None` = deleted. Inodes stay decoded, they change often within a
/// batch.
#[derive(Default)]
pub(super) struct Layer {
    kv: BTreeMap<Bytes, Option<Bytes>>,
    inodes: BTreeMap<Ino, Option<pb::InodeRecord>>,
}

impl Layer {
    /// Puts a later layer on top of this one.
    pub(super) fn merge(&mut self, later: Layer) {
        self.kv.extend(later.kv);
        self.inodes.extend(later.inodes);
    }

    pub(super) fn put(&mut self, key: Bytes, value: Option<Bytes>) {
        self.kv.insert(key, value);
    }

    pub(super) fn into_batch(self) -> strake_store::Batch {
        let mut ops: Vec<_> = self.kv.into_iter().collect();
        let inodes = self.inodes.into_iter();
        ops.extend(inodes.map(|(ino, r)| {
            (keys::numbered(keys::INODE, ino), r.map(|r| r.encode_to_vec().into()))
        }));
        strake_store::Batch { ops }
    }
}

/// Where a name is, or where it would go.
pub(super) enum Spot {
    Taken(u64, pb::DentryRecord),
    /// `None`: all slots of its hash are taken.
    Free(Option<u64>),
}

pub(super) struct Txn<'a> {
    store: &'a dyn Reader,
    base: &'a Layer,
    own: Layer,
    names: NameHash,
    pub notes: Notes,
    pub steps: Steps,
    pub header: pb::StateHeader,
    pub place: Arc<Placement>,
}

impl<'a> Txn<'a> {
    pub(super) fn new(
        store: &'a dyn Reader,
        base: &'a Layer,
        header: pb::StateHeader,
        place: Arc<Placement>,
        hash_mask: u64,
    ) -> Txn<'a> {
        let names = NameHash::new(&header.name_hash_key, hash_mask);
        let (own, notes, steps) = Default::default();
        Txn { store, base, own, names, notes, steps, header, place }
    }

    /// What the transaction wrote, the header it leaves, and what it read and changed.
    pub(super) fn finish(self) -> (Layer, pb::StateHeader, Notes) {
        (self.own, self.header, self.notes)
    }

    pub(super) fn now(&self) -> i64 {
        self.header.now_ns
    }

    pub(super) fn get(&self, key: &[u8]) -> Res<Option<Bytes>> {
        self.steps.take(steps::RECORD)?;
        if let Some(v) = self.own.kv.get(key).or_else(|| self.base.kv.get(key)) {
            return Ok(v.clone());
        }
        self.store.get(key).map_err(Fail::Store)
    }

    pub(super) fn put(&mut self, key: Bytes, value: impl Into<Bytes>) {
        self.steps.spend(steps::WRITE);
        self.own.kv.insert(key, Some(value.into()));
    }

    pub(super) fn delete(&mut self, key: Bytes) {
        self.steps.spend(steps::WRITE);
        self.own.kv.insert(key, None);
    }

    /// Calls `each` for the pairs after `after` and within `prefix`, in key order, until it returns
    /// false. Returns true if it saw them all. Inode records are not included (they are never
    /// listed).
    pub(super) fn scan(
        &self,
        prefix: &[u8],
        after: &[u8],
        each: impl FnMut(&[u8], Bytes) -> Res<bool>,
    ) -> Res<bool> {
        let from = if after < prefix { Bound::Included(prefix) } else { Bound::Excluded(after) };
        let end = prefix_end(prefix);
        let to = end.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        self.range(from, to, each)
    }

    /// The same for pairs between two keys.
    pub(super) fn range(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        mut each: impl FnMut(&[u8], Bytes) -> Res<bool>,
    ) -> Res<bool> {
        self.steps.take(steps::RECORD)?;
        let mut each = |key: &[u8], value: Bytes| {
            self.steps.take(steps::NEXT)?;
            each(key, value)
        };
        let mut own = self.own.kv.range::<[u8], _>((from, to)).peekable();
        let mut base = self.base.kv.range::<[u8], _>((from, to)).peekable();
        let mut stored = self.store.range(from, to);
        let mut next = stored.next().transpose().map_err(Fail::Store)?;
        loop {
            let in_own = own.peek().map(|(k, _)| &k[..]);
            let in_base = base.peek().map(|(k, _)| &k[..]);
            let in_store = next.as_ref().map(|(k, _)| &k[..]);
            let Some(first) = [in_own, in_base, in_store].into_iter().flatten().min() else {
                return Ok(true);
            };
            let [is_own, is_base, is_stored] =
                [in_own, in_base, in_store].map(|k| k == Some(first));
            let written = if is_own { own.next() } else { None };
            let before = if is_base { base.next() } else { None };
            let kept = match is_stored {
                true => {
                    std::mem::replace(&mut next, stored.next().transpose().map_err(Fail::Store)?)
                }
                false => None,
            };
            let (key, value) = match (written.or(before), kept) {
                (Some((k, v)), _) => (k.clone(), v.clone()),
                (None, Some((k, v))) => (k, Some(v)),
                (None, None) => return Ok(true),
            };
            let Some(value) = value else {
                // Recent deletions by others cost nothing: not every member sees them.
                self.steps.take(if is_own { steps::NEXT } else { 0 })?;
                continue;
            };
            if !each(&key, value)? {
                return Ok(false);
            }
        }
    }

    pub(super) fn inode(&self, ino: Ino) -> Res<Option<pb::InodeRecord>> {
        let r = self.read_inode(ino)?;
        self.steps.take(r.as_ref().map_or(steps::RECORD, steps::of_inode))?;
        Ok(r)
    }

    fn read_inode(&self, ino: Ino) -> Res<Option<pb::InodeRecord>> {
        self.notes.looked.borrow_mut().insert(ino);
        if let Some(r) = self.own.inodes.get(&ino).or_else(|| self.base.inodes.get(&ino)) {
            return Ok(r.clone());
        }
        let key = keys::numbered(keys::INODE, ino);
        let Some(value) = self.store.get(&key).map_err(Fail::Store)? else { return Ok(None) };
        let r: pb::InodeRecord = decode(&key, value)?;
        if r.writers > 0 {
            self.notes.written.borrow_mut().insert(ino, r.writers);
        }
        if r.fence != 0 {
            self.notes.endless.borrow_mut().insert(ino);
        }
        if r.attr.is_none_or(|a| a.ino != ino) {
            let m = format!("the record of inode {ino} is not that inode's");
            return Err(Fail::Store(Error::new(Code::Corrupt, m)));
        }
        Ok(Some(r))
    }

    /// The inode, or `ENOENT`.
    pub(super) fn need(&self, ino: Ino) -> Res<pb::InodeRecord> {
        match self.inode(ino)? {
            Some(r) => Ok(r),
            None => fail(Code::NoEnt, format!("inode {ino} does not exist (any more)")),
        }
    }

    pub(super) fn put_inode(&mut self, ino: Ino, record: pb::InodeRecord) {
        self.notes.changed.insert(ino);
        self.put_unseen(ino, record);
    }

    /// Stores a record that looks to clients the same as before.
    pub(super) fn put_unseen(&mut self, ino: Ino, record: pb::InodeRecord) {
        self.steps.spend(steps::WRITE);
        self.own.inodes.insert(ino, Some(record));
    }

    pub(super) fn delete_inode(&mut self, ino: Ino) {
        self.notes.changed.insert(ino);
        self.own.inodes.insert(ino, None);
    }

    fn dentry(&self, dir: Ino, cookie: u64) -> Res<Option<pb::DentryRecord>> {
        let key = keys::dentry(dir, cookie);
        self.get(&key)?.map(|v| decode(&key, v)).transpose()
    }

    /// Walks the slots of the name's hash up to the first that was never used.
    pub(super) fn find(&self, dir: Ino, name: &[u8]) -> Res<Spot> {
        let first = self.names.first_cookie(name);
        let mut free = None;
        for cookie in first..first + SLOTS {
            match self.dentry(dir, cookie)? {
                Some(d) if d.ino == 0 => free = free.or(Some(cookie)),
                Some(d) if d.name == name => return Ok(Spot::Taken(cookie, d)),
                Some(_) => {}
                None => return Ok(Spot::Free(free.or(Some(cookie)))),
            }
        }
        Ok(Spot::Free(free))
    }

    pub(super) fn put_name(&mut self, dir: Ino, cookie: u64, name: &[u8], ino: Ino, kind: u32) {
        let d = pb::DentryRecord { ino, r#type: kind, name: Bytes::copy_from_slice(name) };
        self.put(keys::dentry(dir, cookie), d.encode_to_vec());
    }

    /// In a run of colliding names the slot stays marked, so that names after it are still found.
    pub(super) fn remove_name(&mut self, dir: Ino, cookie: u64) -> Res<()> {
        let last_slot = cookie % SLOTS == SLOTS - 1;
        if !last_slot && self.dentry(dir, cookie + 1)?.is_some() {
            self.put(keys::dentry(dir, cookie), Bytes::new());
            return Ok(());
        }
        self.delete(keys::dentry(dir, cookie));
        let mut at = cookie;
        while !at.is_multiple_of(SLOTS) && self.dentry(dir, at - 1)?.is_some_and(|d| d.ino == 0) {
            at -= 1;
            self.delete(keys::dentry(dir, at));
        }
        Ok(())
    }
}
