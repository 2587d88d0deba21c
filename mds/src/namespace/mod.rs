//! The namespace as a deterministic state machine over a [`MetaStore`]: log entries in, replies
//! out.
//!
//! `apply` (entries, sessions, request deduplication) calls `ops` (operation lists; `names`,
//! `attrs`, `xattrs` have the operations that change something) on a `txn` (an overlay over the
//! store). `placement` chooses chains, `away` lets a file wait for them. `perm` checks permissions,
//! `acl` has access control lists. `gc` removes what has no name any more, `queue` finds it.
//! `writers` records which sessions may write a file, `seals` has immutable files, `repair` fixes
//! what fsck found. `locks` has the locks (`spans` is the arithmetic of ranges, `ranges` stores
//! them, `lock_cache` keeps some in memory). `steps` limits the cost of a list, `effects` says what
//! clients can see of changes, `keys` is the on-disk key format, `watched` notes damage of the
//! store. `level` has the feature levels of commands.

mod acl;
mod apply;
mod attrs;
mod away;
pub(crate) mod effects;
mod gc;
mod keys;
pub(crate) mod level;
mod lock_cache;
pub mod locks;
mod names;
mod ops;
mod perm;
mod placement;
mod queue;
mod ranges;
mod repair;
mod seals;
pub mod spans;
mod steps;
mod txn;
mod watched;
mod writers;
mod xattrs;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use prost::Message;
use strake_proto::{ChainId, Code, Error, FEATURE_LEVEL, Ino, Result, SessionId, map::MapView, pb};
use strake_store::MetaStore;

use crate::cluster;

pub use apply::MAX_DEAD;
use apply::{Apply, Session, merge};
use effects::Effect;
use lock_cache::{Cached, LockCache};
pub use placement::PLACEMENT;
use placement::Placement;
use queue::{Found, Queue};
pub use ranges::is_index as check_lock_index;
use txn::{Fail, Layer, Txn};
use watched::{Damage, Watched};

/// The newest version of the state's format; a newer state is refused. A state has the version of
/// the newest kind of record that was ever put into it: 1, 2 with locks, 3 with files that may have
/// holes, 4 with sealed files, 5 with a cluster map that has `placement` or `min_copies`, 6 with
/// chains that began anew, 7 with one record per locked range, or with page locks, or 8 with a
/// feature level.
pub const FORMAT_VERSION: u32 = level::FORMAT;
const FORMAT_FIRST: u32 = 1;
/// States with rules that older programs do not know: `placement` and `min_copies` of the cluster
/// map, and that a file may have holes after a writer is gone that did not report everything.
const FORMAT_CHAINS: u32 = 5;
/// States with an entry that older programs do not know: chains that hold nothing begin anew.
const FORMAT_ANEW: u32 = 6;
/// States with one record per locked range, and an index.
const FORMAT_RANGES: u32 = 7;

/// The newest rules for applying an entry; the leader writes them into what it logs. Older entries
/// keep their old effect. From 1 on: `RENAME_WHITEOUT`, a limit on the names of an inode's extended
/// attributes, set-group-id bits as since Linux 6.1, and `Layout.drafts`. From 2 on: a limit on the
/// cost of one list. From 3 on: a record for each locked range. From 4 on: page locks.
pub const RULES: u32 = 4;
const RULES_STEPS: u32 = 2;
const RULES_RANGES: u32 = 3;
const RULES_PAGES: u32 = 4;

/// How far a change's number may be ahead of the session's last change in the log. Opens for
/// reading, and refused changes, use numbers and leave no trace in the log: a client that does
/// nothing else for years stays within this limit.
const MOST_AHEAD: u64 = 1 << 48;

/// Prefixes of the numbered records that workers process from the lowest number on.
const QUEUES: [u8; 3] = [keys::GC, keys::TRIM, keys::ORPHAN];

/// Decoded records in memory; always equal to the store.
#[derive(Default)]
struct Memory {
    header: pb::StateHeader,
    place: Arc<Placement>,
    sessions: BTreeMap<SessionId, Session>,
    uuids: BTreeMap<Bytes, SessionId>,
    /// The newest feature level that this program knows.
    knows: u32,
    /// The store is being replaced, or is not whole: nothing may be read from it.
    void: bool,
}

impl Memory {
    fn readable(&self) -> Result<()> {
        if self.void { Err(Error::not_leader(0)) } else { Ok(()) }
    }
}

/// What a new leader must know about sessions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// All sessions, and whether each may keep dirty data.
    pub sessions: Vec<(SessionId, bool)>,
    /// Which session may write which file.
    pub writers: Vec<(SessionId, Ino)>,
    /// Files that evicted sessions could write, with the number of the last such eviction, until
    /// they are trimmed.
    pub fences: Vec<(Ino, u64)>,
    /// Those of them that others write, until their size is found out.
    pub ends: Vec<(Ino, u64)>,
}

/// An answer, and what it depends on.
pub struct ReadAt {
    pub reply: pb::MetaReply,
    /// The inodes that were read.
    pub looked: BTreeSet<Ino>,
    /// Those of them that other sessions are on record as writing.
    pub written: BTreeSet<Ino>,
    /// Those whose size must still be found out.
    pub endless: BTreeSet<Ino>,
    /// The last entry that it includes.
    pub version: u64,
}

/// The metadata of a file system. One task applies entries; any number may read, and see only whole
/// commits.
pub struct Namespace {
    store: Arc<dyn MetaStore>,
    damage: Arc<Damage>,
    memory: RwLock<Memory>,
    /// By key prefix, see [`QUEUES`]. Changed together with the store, under `memory`.
    queues: Mutex<[Queue; QUEUES.len()]>,
    /// Held while entries are applied.
    applier: Mutex<()>,
    hash_mask: u64,
    lock_news: locks::News,
    /// Changed together with the store, under `memory`.
    lock_cache: LockCache,
}

fn damaged(what: &str, e: impl std::fmt::Display) -> Error {
    Error::new(Code::Corrupt, format!("metadata state: {what} is damaged ({e})"))
}

fn load(store: &dyn MetaStore, knows: u32) -> Result<Memory> {
    let mut m = Memory { knows, ..Memory::default() };
    m.header.format_version = FORMAT_FIRST;
    if let Some(h) = store.get(keys::HEADER)? {
        m.header = pb::StateHeader::decode(h).map_err(|e| damaged("the header", e))?;
    }
    if m.header.format_version > FORMAT_VERSION {
        let v = m.header.format_version;
        let text = format!(
            "metadata state has format {v}, this program knows {FORMAT_VERSION}: run a newer strake"
        );
        return Err(Error::new(Code::Protocol, text));
    }
    if let Some(map) = store.get(keys::MAP)? {
        let map = pb::ClusterMap::decode(map).map_err(|e| damaged("the cluster map", e))?;
        level::check_known(map.level, knows)?;
        m.place = Arc::new(Placement::new(Arc::new(MapView::new(map)?)));
    }
    for pair in store.prefix(&[keys::SESSION]) {
        let (key, value) = pair?;
        let id = keys::last_number(&key).ok_or_else(|| damaged("a session's key", "too short"))?;
        let record = pb::SessionRecord::decode(value).map_err(|e| damaged("a session", e))?;
        m.uuids.insert(record.client_uuid.clone(), id);
        m.sessions.insert(id, Session { record, ..Default::default() });
    }
    for pair in store.prefix(&[keys::REPLY]) {
        let (key, _) = pair?;
        let id = key.get(1..9).and_then(keys::last_number);
        let session = id.and_then(|id| m.sessions.get_mut(&id));
        let seq = keys::last_number(&key);
        match (session, seq) {
            (Some(s), Some(seq)) => s.seqs.insert(seq),
            _ => return Err(damaged("a kept reply", "it belongs to no session")),
        };
    }
    Ok(m)
}

impl Namespace {
    /// Loads header, map and sessions; an empty store means a file system that is not formatted
    /// yet. Refuses a newer format.
    pub fn open(store: Arc<dyn MetaStore>) -> Result<Namespace> {
        Namespace::open_knowing(store, FEATURE_LEVEL)
    }

    /// The same for a program that knows feature levels up to this one.
    pub fn open_knowing(store: Arc<dyn MetaStore>, knows: u32) -> Result<Namespace> {
        Namespace::open_with(store, u64::MAX, knows)
    }

    fn open_with(store: Arc<dyn MetaStore>, hash_mask: u64, knows: u32) -> Result<Namespace> {
        let damage = Arc::new(Damage::default());
        let store = Arc::new(Watched { store, damage: damage.clone() });
        let memory = RwLock::new(load(&*store, knows)?);
        Ok(Namespace {
            store,
            damage,
            memory,
            queues: Mutex::default(),
            applier: Mutex::new(()),
            hash_mask,
            lock_news: Default::default(),
            lock_cache: Default::default(),
        })
    }

    /// The store; damage that is found through it is noted.
    pub fn store(&self) -> Arc<dyn MetaStore> {
        self.store.clone()
    }

    /// The first damage that was found, by any reader.
    pub fn damage(&self) -> Option<Error> {
        self.damage.found()
    }

    /// Notes damage if this state includes entry `since` and has a lower feature level than another.
    pub(crate) fn compare_level(&self, level: u32, since: u64) {
        let m = self.memory.read();
        if !m.void && m.header.applied_index >= since {
            let same = level::check_same(m.place.view.map.level, level);
            let _ = same.inspect_err(|e| self.damage.note(e));
        }
    }

    /// Deletes everything that is stored, and forgets its damage.
    pub fn clear(&self) -> Result<()> {
        self.void();
        self.store.clear()?;
        self.damage.forget();
        Ok(())
    }

    /// Reads up to `bytes` bytes of what is stored, after a key, so that undetected damage is
    /// noted. Returns how many bytes were read, and the last key, `None` at the end.
    pub fn scrub(&self, after: Option<&Bytes>, bytes: usize) -> Result<(usize, Option<Bytes>)> {
        let from = after.map_or(std::ops::Bound::Unbounded, |k| std::ops::Bound::Excluded(&k[..]));
        let mut read = 0;
        for pair in self.store.range(from, std::ops::Bound::Unbounded) {
            let (key, value) = pair?;
            read += key.len() + value.len();
            if read >= bytes {
                return Ok((read, Some(key)));
            }
        }
        Ok((read, None))
    }

    /// Reads up to `bytes` bytes of inodes, after a key. Returns those of `chains` on which these
    /// files have data, or may have, and the last key, `None` at the end.
    pub fn holders(
        &self,
        after: Option<&Bytes>,
        bytes: usize,
        chains: &BTreeSet<ChainId>,
    ) -> Result<(BTreeSet<ChainId>, Option<Bytes>)> {
        let memory = self.memory.read();
        memory.readable()?;
        let (map, end) = (memory.place.view.clone(), [keys::INODE + 1]);
        let first = [keys::INODE];
        let from = after
            .map_or(std::ops::Bound::Included(&first[..]), |k| std::ops::Bound::Excluded(&k[..]));
        let (mut read, mut held) = (0, BTreeSet::new());
        for pair in self.store.range(from, std::ops::Bound::Excluded(&end[..])) {
            let (key, value) = pair?;
            read += key.len() + value.len();
            let bad = |e| damaged("an inode", e);
            let record = pb::InodeRecord::decode(value).map_err(bad)?;
            let ino =
                keys::last_number(&key).ok_or_else(|| damaged("an inode's key", "too short"))?;
            held.extend(cluster::anew::held(&map, ino, &record, chains));
            if read >= bytes {
                return Ok((held, Some(key)));
            }
        }
        Ok((held, None))
    }

    /// The error of a failure for callers; notes damaged records.
    fn told(&self, f: Fail) -> Error {
        let (Fail::Op(e) | Fail::Store(e) | Fail::Later(e)) = f;
        self.damage.note(&e);
        e
    }

    /// Reads everything again after the store was replaced by a snapshot.
    pub fn reload(&self) -> Result<()> {
        let _one = self.applier.lock();
        let fresh = load(&*self.store, self.memory.read().knows)?;
        let mut memory = self.memory.write();
        *memory = fresh;
        *self.queues.lock() = Default::default();
        self.lock_cache.clear();
        Ok(())
    }

    /// Applies entries `(index, term, data)` in log order, in one commit that also records `last`
    /// (index and term) and the configuration of the Raft group. Returns one reply per entry; empty
    /// or foreign data is answered with an error and changes nothing. On `Err` (the store failed)
    /// nothing has changed, and the same call may be made again.
    pub fn apply(
        &self,
        entries: &[(u64, u64, Bytes)],
        last: (u64, u64),
        conf_state: Option<&[u8]>,
    ) -> Result<Vec<pb::LogReply>> {
        self.apply_and_tell(entries, last, conf_state, |_| ())
    }

    /// The same, and calls `tell` with the entries' effects before any reader can see them. `tell`
    /// must not call this namespace.
    pub fn apply_and_tell(
        &self,
        entries: &[(u64, u64, Bytes)],
        last: (u64, u64),
        conf_state: Option<&[u8]>,
        tell: impl FnOnce(&[Effect]),
    ) -> Result<Vec<pb::LogReply>> {
        let _one = self.applier.lock();
        // Nothing else writes `memory`, so this read lock only keeps other readers from waiting.
        let memory = self.memory.read();
        if last.0 < memory.header.applied_index {
            let m = format!(
                "asked to apply up to entry {} after {}",
                last.0, memory.header.applied_index
            );
            return Err(Error::new(Code::Inval, m));
        }
        let store = self.cached();
        let mut work = Apply::new(&store, &memory, self.hash_mask);
        let replies = entries
            .iter()
            .map(|(index, _, data)| work.entry(*index, data))
            .collect::<Result<Vec<_>>>();
        let replies = replies.inspect_err(|e| self.damage.note(e))?;
        (work.header.applied_index, work.header.applied_term) = last;
        if let Some(c) = conf_state {
            work.header.conf_state = Bytes::copy_from_slice(c);
        }
        let batch = work.take_batch();
        let queued: Vec<_> =
            batch.ops.iter().filter_map(|(k, v)| Some((queue_of(k)?, v.is_some()))).collect();
        let (locked, of_locks) = (locks::touched(&batch), lock_cache::of_locks(&batch));
        let Apply { header, place, sessions, uuids, effects, .. } = work;
        drop(memory);
        let mut memory = self.memory.write();
        self.store.commit(batch).map_err(|e| e.context("committing applied log entries"))?;
        let mut queues = self.queues.lock();
        queued.into_iter().for_each(|((queue, key), live)| queues[queue].note(key, live));
        drop(queues);
        self.lock_cache.committed(of_locks.iter());
        memory.header = header;
        memory.place = place;
        merge(&mut memory.sessions, sessions);
        merge(&mut memory.uuids, uuids);
        tell(&effects);
        drop(memory);
        self.lock_news.add(locked);
        Ok(replies)
    }

    /// Answers operations that change nothing, up to the first failure, from all entries applied so
    /// far. `session` 0 is the server itself.
    pub fn read(&self, session: SessionId, creds: &pb::Creds, ops: &[pb::Op]) -> pb::MetaReply {
        self.read_at(session, creds, ops).map_or_else(
            |e| {
                let result = pb::OpResult { status: Some(e.to_status()), ..Default::default() };
                pb::MetaReply { results: vec![result], granted: Vec::new() }
            },
            |r| r.reply,
        )
    }

    /// The same, with what the answer depends on. An error is not an answer: `NoSession`, or a
    /// fault of the store.
    pub fn read_at(&self, session: SessionId, creds: &pb::Creds, ops: &[pb::Op]) -> Result<ReadAt> {
        self.try_read(&self.memory.read(), session, creds, ops)
    }

    /// The same on a member that does not lead. An error is not an answer: the session is not known
    /// here, or the state cannot be read now.
    pub fn read_following(
        &self,
        session: SessionId,
        creds: &pb::Creds,
        ops: &[pb::Op],
    ) -> Result<ReadAt> {
        let memory = self.memory.read();
        if session == 0 {
            return Err(Error::new(Code::NoSession, "a client's request needs a session"));
        }
        self.try_read(&memory, session, creds, ops)
    }

    fn try_read(
        &self,
        memory: &Memory,
        session: SessionId,
        creds: &pb::Creds,
        ops: &[pb::Op],
    ) -> Result<ReadAt> {
        memory.readable()?;
        if session != 0 && !memory.sessions.contains_key(&session) {
            return Err(Error::new(
                Code::NoSession,
                format!("session {session} has ended; mount again"),
            ));
        }
        let none = Layer::default();
        let store = self.cached();
        let mut t =
            Txn::new(&store, &none, memory.header.clone(), memory.place.clone(), self.hash_mask);
        match ops::run(
            &mut t,
            ops::By { creds, session, index: 0, ends_matter: false, rules: RULES },
            ops,
            false,
        ) {
            Ok((reply, _)) => {
                let (looked, endless, mut written) =
                    (t.notes.looked.take(), t.notes.endless.take(), BTreeSet::new());
                for (ino, writers) in t.notes.written.take() {
                    let own = self.store.get(&keys::writer(session, ino))?.is_some();
                    if writers > u32::from(own) {
                        written.insert(ino);
                    }
                }
                Ok(ReadAt { reply, looked, written, endless, version: memory.header.applied_index })
            }
            Err(f) => Err(self.told(f)),
        }
    }

    /// The store is about to be replaced, or is not whole: no request is answered from it before
    /// the next [`Namespace::reload`]. Returns when all readers have finished.
    pub fn void(&self) {
        self.memory.write().void = true;
    }

    /// The last applied index: a read at this index is up to date.
    pub fn version(&self) -> u64 {
        self.memory.read().header.applied_index
    }

    /// Passes to `look` everything that a new leader's table needs. No entry is applied meanwhile,
    /// so between what `look` records and the effects reported afterwards nothing is missing.
    pub fn survey<T>(&self, look: impl FnOnce(Survey) -> T) -> Result<T> {
        let memory = self.memory.read();
        memory.readable()?;
        let mut s = Survey::default();
        for pair in self.store.prefix(&[keys::WRITER]) {
            let (key, _) = pair?;
            let session = key.get(..9).and_then(keys::last_number);
            s.writers.extend(session.zip(keys::last_number(&key)));
        }
        let cut = self.store.prefix(&[keys::TRIM]).map(|pair| Ok(keys::last_number(&pair?.0)));
        let cut: Vec<Ino> = cut.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let written: BTreeSet<Ino> = s.writers.iter().map(|w| w.1).chain(cut).collect();
        for ino in written {
            let Some(r) = self.inode(ino) else { continue };
            let fence = r.fence.max(r.trim.map_or(0, |t| t.fence));
            s.fences.extend((fence != 0).then_some((ino, fence)));
            s.ends.extend((r.fence != 0).then_some((ino, r.fence)));
        }
        s.sessions = memory.sessions.iter().map(|(id, x)| (*id, x.record.write_back)).collect();
        Ok(look(s))
    }

    /// News of changed locks, see [`locks::News`].
    pub fn lock_news(&self) -> &locks::News {
        &self.lock_news
    }

    /// All locks of a file, from all entries applied so far.
    pub fn locks_of(&self, ino: Ino) -> Result<locks::Locks> {
        self.looking(|t| locks::of_file(t, ino))
    }

    /// At most `limit` conflicting locks, and the file's fence as in [`locks::Locks`].
    pub fn barring(
        &self,
        want: &locks::Want,
        limit: usize,
    ) -> Result<(Vec<(locks::Owner, spans::Span)>, u64)> {
        self.looking(|t| locks::barring(t, want, limit))
    }

    /// Whether another session may have page locks of the file.
    pub fn pages_of_others(&self, ino: Ino, session: SessionId) -> Result<bool> {
        let who = locks::Owner { kind: pb::LockKind::LockPages, session, owner: locks::PAGES };
        let span = spans::Span { start: 0, end: u64::MAX, write: true, pid: 0 };
        Ok(!self.barring(&locks::Want { ino, who, span }, 1)?.0.is_empty())
    }

    /// How many ranges a session has locked, 0: all sessions.
    pub fn locked_by(&self, session: SessionId) -> u64 {
        self.looking(|t| locks::total(t, session, 0)).map_or(0, |n| n.ranges)
    }

    /// Whether a list may be so much work that others wait for it. Most lists are short, and need
    /// no check.
    pub fn is_heavy(&self, ops: &[pb::Op]) -> Result<bool> {
        if !steps::is_looked_at(ops) {
            return Ok(false);
        }
        let memory = self.memory.read();
        memory.readable()?;
        let none = Layer::default();
        let store = self.cached();
        let t =
            Txn::new(&store, &none, memory.header.clone(), memory.place.clone(), self.hash_mask);
        steps::is_heavy(&t, ops).map_err(|f| self.told(f))
    }

    /// Whether a list that is heavy must be refused because of its renames.
    pub fn has_too_many_moves(ops: &[pb::Op]) -> bool {
        steps::has_too_many_moves(ops)
    }

    /// Whether a list of changes would now get the answer that there is no space for a file, but
    /// not if targets that are away were up. Runs the list without keeping its result.
    pub fn waits_for_targets(
        &self,
        session: SessionId,
        creds: Option<&pb::Creds>,
        ops: &[pb::Op],
    ) -> Result<bool> {
        let Some(creds) = creds.filter(|_| away::any_chooses(ops)) else { return Ok(false) };
        let memory = self.memory.read();
        memory.readable()?;
        if !memory.place.any_waits() {
            return Ok(false);
        }
        let none = Layer::default();
        let store = self.cached();
        let mut t =
            Txn::new(&store, &none, memory.header.clone(), memory.place.clone(), self.hash_mask);
        let index = memory.header.applied_index + 1;
        let rules = level::rules(memory.place.view.map.level);
        let by = ops::By { creds, session, index, ends_matter: true, rules };
        match ops::run(&mut t, by, ops, true) {
            Ok(_) => Ok(t.notes.away.get()),
            Err(f) => Err(self.told(f)),
        }
    }

    /// The store, for as long as `memory` is locked.
    fn cached(&self) -> Cached<'_> {
        Cached { store: &*self.store, cache: &self.lock_cache }
    }

    fn looking<T>(&self, look: impl FnOnce(&Txn<'_>) -> txn::Res<T>) -> Result<T> {
        let memory = self.memory.read();
        memory.readable()?;
        let none = Layer::default();
        let store = self.cached();
        let t =
            Txn::new(&store, &none, memory.header.clone(), memory.place.clone(), self.hash_mask);
        look(&t).map_err(|f| self.told(f))
    }

    /// Whether a list has to go through the log.
    pub fn is_mutation(ops: &[pb::Op]) -> bool {
        ops.iter().any(strake_proto::ops::is_mutation)
    }

    /// Counters, applied index and identity; `fs_uuid` is empty before the file system is
    /// formatted.
    pub fn header(&self) -> pb::StateHeader {
        self.memory.read().header.clone()
    }

    pub fn map(&self) -> Arc<MapView> {
        self.memory.read().place.view.clone()
    }

    pub fn session(&self, id: SessionId) -> Option<pb::SessionRecord> {
        self.memory.read().sessions.get(&id).map(|s| s.record.clone())
    }

    /// Whether a session's request ran and its reply is kept.
    pub fn has_reply(&self, id: SessionId, seq: u64) -> bool {
        self.memory.read().sessions.get(&id).is_some_and(|s| s.seqs.contains(&seq))
    }

    /// Whether a session may use a number for a change that has not run yet. `ReplyGone` for a
    /// number so low that it ran or was given up; `Inval` for 0, or a number so far ahead that no
    /// client reaches it.
    pub fn takes_number(&self, id: SessionId, seq: u64) -> Result<()> {
        let memory = self.memory.read();
        let Some(s) = memory.sessions.get(&id) else { return Ok(()) };
        let lowest = s.record.answered_below;
        if seq < lowest {
            let m = format!("request {seq} ran or was given up, and its reply is no longer kept");
            return Err(Error::new(Code::ReplyGone, m));
        }
        let newest = s.seqs.last().copied().unwrap_or(0).max(lowest);
        if seq == 0 || seq > newest.saturating_add(MOST_AHEAD).min(u64::MAX - 1) {
            let m = format!(
                "request {seq} of session {id}, whose last change was {newest}: numbers start at \
                 1 and increase by one"
            );
            return Err(Error::new(Code::Inval, m));
        }
        Ok(())
    }

    /// All sessions by id.
    pub fn sessions(&self) -> Vec<(SessionId, pb::SessionRecord)> {
        self.memory.read().sessions.iter().map(|(id, s)| (*id, s.record.clone())).collect()
    }

    /// Evictions with a number above `number`, oldest first; the last 10,000 are kept.
    pub fn evicted_after(&self, number: u64) -> Vec<pb::Evicted> {
        let all = self.list(keys::EVICTED, number, usize::MAX);
        let decoded =
            all.into_iter().filter_map(|(n, v)| Some((n, pb::EvictedRecord::decode(v).ok()?)));
        decoded
            .map(|(n, r)| pb::Evicted {
                number: n,
                session: r.session,
                min_epoch: r.min_epoch,
                below: r.below,
            })
            .collect()
    }

    /// The number of the first eviction after the one with this number.
    pub fn eviction_after(&self, number: u64) -> Option<u64> {
        self.list(keys::EVICTED, number, 1).first().map(|(n, _)| *n)
    }

    /// The oldest `limit` sets of chunks to delete, with the numbers for `GcDone`.
    pub fn gc_queue(&self, limit: usize) -> Vec<(u64, pb::GcRecord)> {
        let numbers = self.lowest(keys::GC, limit);
        // What cannot be read now is tried again later.
        let Ok(view) = self.store.snapshot() else { return Vec::new() };
        let record = |n| pb::GcRecord::decode(view.get(&keys::numbered(keys::GC, n)).ok()??).ok();
        numbers.into_iter().filter_map(|n| Some((n, record(n)?))).collect()
    }

    /// How many sets there are, counted up to `limit`.
    pub fn gc_waiting(&self, limit: usize) -> usize {
        self.lowest(keys::GC, limit).len()
    }

    /// Up to `limit` files whose chunks must be trimmed, by inode id.
    pub fn trims(&self, limit: usize) -> Vec<(Ino, pb::Trim, pb::Layout)> {
        let of = |ino| self.inode(ino).and_then(|r| Some((ino, r.trim?, r.layout?)));
        self.lowest(keys::TRIM, limit).into_iter().filter_map(of).collect()
    }

    /// The trim that an inode waits for.
    pub fn trim_of(&self, ino: Ino) -> Option<pb::Trim> {
        self.inode(ino)?.trim
    }

    /// A file that evicted sessions wrote beside others, until its size is found out.
    pub fn endless(&self, ino: Ino) -> Result<Option<pb::InodeRecord>> {
        Ok(self.looking(|t| t.inode(ino))?.filter(|r| r.fence != 0))
    }

    /// Up to `limit` files without a name, by inode id.
    pub fn orphans(&self, limit: usize) -> Vec<Ino> {
        self.lowest(keys::ORPHAN, limit)
    }

    /// Up to `limit` chunks that will be removed, of the kinds and in the order that
    /// `PendingRequest` names.
    pub fn pending(
        &self,
        request: &pb::PendingRequest,
        limit: usize,
    ) -> Result<Vec<pb::PendingItem>> {
        let after = request.after;
        let item = |key, ino, layout: Option<pb::Layout>, size| {
            let data_id = layout?.components.first()?.data_id;
            Some(pb::PendingItem { key, ino, data_id, size })
        };
        // Items without chunks are kept with data id 0, so that a page is short only at the end.
        let bare = |key, ino| pb::PendingItem { key, ino, data_id: 0, size: 0 };
        let read = |prefix| self.list(prefix, after, limit).into_iter();
        Ok(match request.kind {
            1 => read(keys::ORPHAN)
                .map(|(ino, _)| {
                    item(ino, ino, self.inode(ino).and_then(|r| r.layout), 0)
                        .unwrap_or(bare(ino, ino))
                })
                .collect(),
            2 => read(keys::GC)
                .map(|(n, v)| {
                    let g = pb::GcRecord::decode(v).unwrap_or_default();
                    item(n, g.ino, g.layout, 0).unwrap_or(bare(n, g.ino))
                })
                .collect(),
            3 => read(keys::TRIM)
                .map(|(ino, v)| {
                    let size = pb::Trim::decode(v).map_or(u64::MAX, |t| t.size);
                    item(ino, ino, self.inode(ino).and_then(|r| r.layout), size)
                        .unwrap_or(bare(ino, ino))
                })
                .collect(),
            4 => {
                let written = |ino: &&Ino| self.inode(**ino).is_some_and(|r| r.writers > 0);
                request
                    .inos
                    .iter()
                    .take(limit)
                    .filter(written)
                    .map(|ino| bare(*ino, *ino))
                    .collect()
            }
            kind => {
                return Err(Error::new(
                    Code::Inval,
                    format!("unknown kind {kind} of pending deletions"),
                ));
            }
        })
    }

    /// Fails if the record of an inode exists and cannot be read; then no entry may be proposed
    /// that reads it.
    pub fn check_record(&self, ino: Ino) -> Result<()> {
        self.looking(|t| t.inode(ino)).map(drop)
    }

    fn inode(&self, ino: Ino) -> Option<pb::InodeRecord> {
        let value = self.store.get(&keys::numbered(keys::INODE, ino)).ok().flatten()?;
        pb::InodeRecord::decode(value).ok()
    }

    /// The first numbers in one of the [`QUEUES`].
    fn lowest(&self, prefix: u8, limit: usize) -> Vec<u64> {
        let _whole = self.memory.read();
        let Some(queue) = QUEUES.iter().position(|p| *p == prefix) else { return Vec::new() };
        let search = |from: u64, most: usize| {
            let (from, end) = (keys::numbered(prefix, from), [prefix + 1]);
            let pairs =
                self.store.range(std::ops::Bound::Included(&from), std::ops::Bound::Excluded(&end));
            let (mut keys, mut all) = (Vec::new(), true);
            for pair in pairs {
                match pair {
                    Ok((k, _)) if keys.len() < most => keys.extend(keys::last_number(&k)),
                    // Ended early, by the limit or by a key that cannot be read.
                    _ => {
                        all = false;
                        break;
                    }
                }
            }
            Found { keys, all }
        };
        self.queues.lock()[queue].lowest(limit, search)
    }

    /// Numbered records above `after`. Unreadable ones are left out: these lists are for workers
    /// that look again, and applying an entry to a damaged store stops with the reason.
    fn list(&self, prefix: u8, after: u64, limit: usize) -> Vec<(u64, Bytes)> {
        let _whole = self.memory.read();
        let from = keys::numbered(prefix, after.saturating_add(1));
        let end = [prefix + 1];
        let pairs =
            self.store.range(std::ops::Bound::Included(&from), std::ops::Bound::Excluded(&end));
        let good = pairs.take(limit).map_while(Result::ok);
        good.filter_map(|(k, v)| Some((keys::last_number(&k)?, v))).collect()
    }
}

/// Which queue a key belongs to, and its number there.
fn queue_of(key: &[u8]) -> Option<(usize, u64)> {
    let queue = QUEUES.iter().position(|p| key.first() == Some(p))?;
    Some((queue, keys::last_number(key)?))
}
