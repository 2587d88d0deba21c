//! The namespace as a deterministic state machine over a [`MetaStore`]: log entries in, replies
//! out.
//!
//! From the lowest layer up; no file uses one of a later row:
//!
//! | files | idea |
//! |---|---|
//! | `format`, `level`, `keys`, `inode`, `caller`, `fail` | versions, on-disk keys, what records say, who asks, why not |
//! | `acl`, `perm`, `placement`, `away`, `locks::spans`, `queue`, `steps` | pure tables and rules: permissions, chains of a new file and whether it waits for them, ranges of locks, lowest numbers, the cost limit of a list |
//! | `effects`, `watched`, `locks::cache` | what clients can see of changes, damage of the store, locks in memory |
//! | `txn` | the transaction: an overlay over the store |
//! | `gc`, `writers`, `locks::table`, `removal`, `repair` | parts of the state that operations share: what is to be removed, who may write, locks, inodes without a name, what fsck found |
//! | `ops` | lists of operations; `ops::names`, `ops::attrs`, … have the operations |
//! | `ends`, `heavy` | sizes that were found out, how much work a list may be |
//! | `memory`, `state` | decoded records in memory, and how readers see whole commits |
//! | `apply` | entries, sessions, request deduplication: the transaction that applies an entry |
//! | `queries`, `backlog` | what readers and background workers ask |

mod acl;
mod apply;
mod away;
mod backlog;
mod caller;
pub(crate) mod effects;
mod ends;
mod fail;
mod format;
mod gc;
mod heavy;
mod inode;
mod keys;
pub(crate) mod level;
pub mod locks;
mod memory;
mod ops;
mod perm;
mod placement;
mod queries;
mod queue;
mod removal;
mod repair;
mod state;
mod steps;
mod txn;
mod watched;
mod writers;

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, ops::Bound, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use strake_proto::{ChainId, Code, Error, FEATURE_LEVEL, Ino, Result, SessionId, map::MapView, pb};
use strake_store::MetaStore;

use crate::cluster;

use apply::Apply;
pub use apply::MAX_DEAD;
pub use backlog::Backlog;
use effects::Effect;
pub use format::{FORMAT_VERSION, RULES};
use locks::{cache, table};
pub use locks::{ranges::is_index as check_lock_index, spans};
use memory::{damaged, merge};
pub use placement::PLACEMENT;
pub use queries::{ReadAt, Survey};
use state::{State, queue_of};

/// The metadata of a file system. One task applies entries; any number may read, and see only whole
/// commits.
pub struct Namespace {
    state: State,
    /// Held while entries are applied.
    applier: Mutex<()>,
    lock_news: locks::News,
}

/// How far a change's number may be ahead of the session's last change in the log. Opens for
/// reading, and refused changes, use numbers and leave no trace in the log: a client that does
/// nothing else for years stays within this limit.
const MOST_AHEAD: u64 = 1 << 48;

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
        let state = State::open(store, hash_mask, knows)?;
        Ok(Namespace { state, applier: Mutex::new(()), lock_news: Default::default() })
    }

    /// The store; damage that is found through it is noted.
    pub fn store(&self) -> Arc<dyn MetaStore> {
        self.state.store.clone()
    }

    /// The first damage that was found, by any reader.
    pub fn damage(&self) -> Option<Error> {
        self.state.damage.found()
    }

    /// Notes damage if this state includes entry `since` and has a lower feature level than another.
    pub(crate) fn compare_level(&self, level: u32, since: u64) {
        let m = self.state.memory.read();
        if !m.void && m.header.applied_index >= since {
            let same = level::check_same(m.place.view.map.level, level);
            let _ = same.inspect_err(|e| self.state.damage.note(e));
        }
    }

    /// Deletes everything that is stored, and forgets its damage.
    pub fn clear(&self) -> Result<()> {
        self.void();
        self.state.store.clear()?;
        self.state.damage.forget();
        Ok(())
    }

    /// Reads up to `bytes` bytes of what is stored, after a key, so that undetected damage is
    /// noted. Returns how many bytes were read, and the last key, `None` at the end.
    pub fn scrub(&self, after: Option<&Bytes>, bytes: usize) -> Result<(usize, Option<Bytes>)> {
        let from = after.map_or(Bound::Unbounded, |k| Bound::Excluded(&k[..]));
        let mut read = 0;
        for pair in self.state.store.range(from, Bound::Unbounded) {
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
        let memory = self.state.memory.read();
        memory.readable()?;
        let (map, end) = (memory.place.view.clone(), [keys::INODE + 1]);
        let first = [keys::INODE];
        let from = after.map_or(Bound::Included(&first[..]), |k| Bound::Excluded(&k[..]));
        let (mut read, mut held) = (0, BTreeSet::new());
        for pair in self.state.store.range(from, Bound::Excluded(&end[..])) {
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

    /// Reads everything again after the store was replaced by a snapshot.
    pub fn reload(&self) -> Result<()> {
        let _one = self.applier.lock();
        self.state.reload()
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
        let memory = self.state.memory.read();
        if last.0 < memory.header.applied_index {
            let m = format!(
                "asked to apply up to entry {} after {}",
                last.0, memory.header.applied_index
            );
            return Err(Error::new(Code::Inval, m));
        }
        let store = self.state.cached();
        let mut work = Apply::new(&store, &memory, self.state.hash_mask);
        let replies = entries
            .iter()
            .map(|(index, _, data)| work.entry(*index, data))
            .collect::<Result<Vec<_>>>();
        let replies = replies.inspect_err(|e| self.state.damage.note(e))?;
        (work.header.applied_index, work.header.applied_term) = last;
        if let Some(c) = conf_state {
            work.header.conf_state = Bytes::copy_from_slice(c);
        }
        let batch = work.take_batch();
        let queued: Vec<_> =
            batch.ops.iter().filter_map(|(k, v)| Some((queue_of(k)?, v.is_some()))).collect();
        let (locked, of_locks) = (locks::touched(&batch), cache::of_locks(&batch));
        let Apply { header, place, sessions, uuids, effects, .. } = work;
        drop(memory);
        let mut memory = self.state.memory.write();
        self.state.store.commit(batch).map_err(|e| e.context("committing applied log entries"))?;
        let mut queues = self.state.queues.lock();
        queued.into_iter().for_each(|((queue, key), live)| queues[queue].note(key, live));
        drop(queues);
        self.state.lock_cache.committed(of_locks.iter());
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
        queries::read_at(&self.state, session, creds, ops)
    }

    /// The same on a member that does not lead. An error is not an answer: the session is not known
    /// here, or the state cannot be read now.
    pub fn read_following(
        &self,
        session: SessionId,
        creds: &pb::Creds,
        ops: &[pb::Op],
    ) -> Result<ReadAt> {
        if session == 0 {
            return Err(Error::new(Code::NoSession, "a client's request needs a session"));
        }
        queries::read_at(&self.state, session, creds, ops)
    }

    /// Passes to `look` everything that a new leader's table needs. No entry is applied meanwhile,
    /// so between what `look` records and the effects reported afterwards nothing is missing.
    pub fn survey<T>(&self, look: impl FnOnce(Survey) -> T) -> Result<T> {
        let memory = self.state.memory.read();
        memory.readable()?;
        Ok(look(queries::survey(&self.state, &memory)?))
    }

    /// Whether a list may be so much work that others wait for it. Most lists are short, and need
    /// no check.
    pub fn is_heavy(&self, ops: &[pb::Op]) -> Result<bool> {
        queries::is_heavy(&self.state, ops)
    }

    /// Whether a list that is heavy must be refused because of its renames.
    pub fn has_too_many_moves(ops: &[pb::Op]) -> bool {
        heavy::has_too_many_moves(ops)
    }

    /// Whether a list of changes would now get the answer that there is no space for a file, but
    /// not if targets that are away were up. Runs the list without keeping its result.
    pub fn waits_for_targets(
        &self,
        session: SessionId,
        creds: Option<&pb::Creds>,
        ops: &[pb::Op],
    ) -> Result<bool> {
        queries::waits_for_targets(&self.state, session, creds, ops)
    }

    /// What background workers ask for.
    pub fn backlog(&self) -> Backlog<'_> {
        Backlog(&self.state)
    }

    /// The store is about to be replaced, or is not whole: no request is answered from it before
    /// the next [`Namespace::reload`]. Returns when all readers have finished.
    pub fn void(&self) {
        self.state.memory.write().void = true;
    }

    /// The last applied index: a read at this index is up to date.
    pub fn version(&self) -> u64 {
        self.state.memory.read().header.applied_index
    }

    /// News of changed locks, see [`locks::News`].
    pub fn lock_news(&self) -> &locks::News {
        &self.lock_news
    }

    /// All locks of a file, from all entries applied so far.
    pub fn locks_of(&self, ino: Ino) -> Result<locks::Locks> {
        self.state.looking(|t| table::of_file(t, ino))
    }

    /// At most `limit` conflicting locks, and the file's fence as in [`locks::Locks`].
    pub fn barring(
        &self,
        want: &locks::Want,
        limit: usize,
    ) -> Result<(Vec<(locks::Owner, spans::Span)>, u64)> {
        self.state.looking(|t| table::barring(t, want, limit))
    }

    /// Whether another session may have page locks of the file.
    pub fn pages_of_others(&self, ino: Ino, session: SessionId) -> Result<bool> {
        let who = locks::Owner { kind: pb::LockKind::LockPages, session, owner: locks::PAGES };
        let span = spans::Span { start: 0, end: u64::MAX, write: true, pid: 0 };
        Ok(!self.barring(&locks::Want { ino, who, span }, 1)?.0.is_empty())
    }

    /// How many ranges a session has locked, 0: all sessions.
    pub fn locked_by(&self, session: SessionId) -> u64 {
        self.state.looking(|t| table::total(t, session, 0)).map_or(0, |n| n.ranges)
    }

    /// Whether a list has to go through the log.
    pub fn is_mutation(ops: &[pb::Op]) -> bool {
        ops.iter().any(strake_proto::ops::is_mutation)
    }

    /// Counters, applied index and identity; `fs_uuid` is empty before the file system is
    /// formatted.
    pub fn header(&self) -> pb::StateHeader {
        self.state.memory.read().header.clone()
    }

    pub fn map(&self) -> Arc<MapView> {
        self.state.memory.read().place.view.clone()
    }

    pub fn session(&self, id: SessionId) -> Option<pb::SessionRecord> {
        self.state.memory.read().sessions.get(&id).map(|s| s.record.clone())
    }

    /// Whether a session's request ran and its reply is kept.
    pub fn has_reply(&self, id: SessionId, seq: u64) -> bool {
        self.state.memory.read().sessions.get(&id).is_some_and(|s| s.seqs.contains(&seq))
    }

    /// Whether a session may use a number for a change that has not run yet. `ReplyGone` for a
    /// number so low that it ran or was given up; `Inval` for 0, or a number so far ahead that no
    /// client reaches it.
    pub fn takes_number(&self, id: SessionId, seq: u64) -> Result<()> {
        let memory = self.state.memory.read();
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
        self.state.memory.read().sessions.iter().map(|(id, s)| (*id, s.record.clone())).collect()
    }

    /// Fails if the record of an inode exists and cannot be read; then no entry may be proposed
    /// that reads it.
    pub fn check_record(&self, ino: Ino) -> Result<()> {
        self.state.looking(|t| t.inode(ino)).map(drop)
    }
}
