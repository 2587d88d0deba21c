//! Applies log entries: commands in, replies and one batch of writes out. The result depends only
//! on the state, the entry and its place in the log, never on a clock or random numbers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use prost::Message;
use strake_proto::{
    Code, Error, Incarnation, Result, Rights, SessionId,
    ids::{ROOT_INO, shard_of},
    map::MapView,
    pb,
};
use strake_store::{Batch, Reader};

use super::{
    caller::By,
    effects::{self, Effect, Ending},
    ends,
    fail::{Fail, Res, decode, fail, next},
    format::{FORMAT_ANEW, FORMAT_CHAINS},
    gc,
    inode::{DIR_SIZE, S_IFDIR},
    keys, level,
    locks::table,
    memory::{Memory, Session},
    ops,
    placement::{PLACEMENT, Placement},
    removal, repair,
    txn::{Layer, Txn},
    writers::{self, Left},
};
use crate::cluster;
use pb::log_command::Command;

/// Replies kept per session; beyond, the oldest is dropped, and with it the answer to a late retry.
pub(super) const MAX_REPLIES: usize = 4_096;
pub(super) const MAX_EVICTED: usize = 10_000;
const MAX_SESSIONS: usize = 65_536;
/// Longest hostname and version a client may register.
const MAX_TEXT: usize = 255;
/// Most dead clients that one new session may name.
pub const MAX_DEAD: usize = 64;
/// Session ids are never reused, so one epoch per session is enough; eviction asks for the next.
const SESSION_EPOCH: u64 = 1;
const FIRST_INO: u64 = 2;
/// No session ends if the next number is beyond this one.
const LAST_NUMBER: u64 = u64::MAX / 2;

/// The text of an error is not part of the state: versions that run side by side may word it
/// differently.
fn wordless(reply: &pb::MetaReply) -> pb::MetaReply {
    let mut r = reply.clone();
    r.results.iter_mut().filter_map(|r| r.status.as_mut()).for_each(|s| s.message.clear());
    r
}

/// The state after the entries so far, where it differs from store and memory.
pub(super) struct Apply<'a> {
    store: &'a dyn Reader,
    memory: &'a Memory,
    batch: Layer,
    hash_mask: u64,
    pub header: pb::StateHeader,
    pub place: Arc<Placement>,
    /// `None` = ended.
    pub sessions: BTreeMap<SessionId, Option<Session>>,
    pub uuids: BTreeMap<Bytes, Option<SessionId>>,
    /// The effects of each entry that changed something.
    pub effects: Vec<Effect>,
}

fn ok() -> pb::LogReply {
    pb::LogReply::default()
}

fn refused(e: &Error) -> pb::LogReply {
    pb::LogReply { status: Some(e.to_status()), reply: None }
}

fn refusal(code: Code, message: &str) -> pb::LogReply {
    refused(&Error::new(code, message))
}

impl<'a> Apply<'a> {
    pub(super) fn new(store: &'a dyn Reader, memory: &'a Memory, hash_mask: u64) -> Apply<'a> {
        Apply {
            store,
            memory,
            batch: Layer::default(),
            hash_mask,
            header: memory.header.clone(),
            place: memory.place.clone(),
            sessions: BTreeMap::new(),
            uuids: BTreeMap::new(),
            effects: Vec::new(),
        }
    }

    /// Everything to write, including the header if it changed; the rest of `self` is for
    /// [`Memory`].
    pub(super) fn take_batch(&mut self) -> Batch {
        let mut layer = std::mem::take(&mut self.batch);
        for (id, s) in &self.sessions {
            let value = s.as_ref().map(|s| s.record.encode_to_vec().into());
            layer.put(keys::numbered(keys::SESSION, *id), value);
        }
        layer.put(Bytes::from_static(keys::HEADER), Some(self.header.encode_to_vec().into()));
        layer.into_batch()
    }

    /// Applies one entry. An `Err` means that this member's store failed; the batch must be
    /// dropped.
    pub(super) fn entry(&mut self, index: u64, data: &Bytes) -> Result<pb::LogReply> {
        if index <= self.header.applied_index {
            return Ok(refusal(Code::ReplyGone, "the log entry was applied before"));
        }
        let (now_ns, command) = match pb::LogCommand::decode(data.clone()) {
            Ok(pb::LogCommand { now_ns, command: Some(c) }) => (now_ns, c),
            _ => {
                return Ok(refusal(Code::Protocol, "this version does not know the log entry"));
            }
        };
        if self.header.fs_uuid.is_empty() && !matches!(command, Command::Format(_)) {
            return Ok(refusal(Code::NoDev, "the file system is not formatted yet; try again"));
        }
        self.header.now_ns = self.header.now_ns.max(now_ns);
        let before = self.effects.len();
        let answer = self.command(index, command);
        self.effects[before..].iter_mut().for_each(|e| e.index = index);
        match answer {
            Ok(reply) => Ok(reply),
            Err(Fail::Op(e) | Fail::Later(e)) => Ok(refused(&e)),
            Err(Fail::Store(e)) => Err(e.context(format!("applying log entry {index}"))),
        }
    }

    fn command(&mut self, index: u64, command: Command) -> Res<pb::LogReply> {
        match command {
            Command::Format(f) => self.format(index, &f),
            Command::Meta(m) => self.meta(index, m),
            Command::SessionOpen(o) => self.session_open(o),
            Command::SessionEnd(e) => self.session_end(&e),
            Command::Register(r) => {
                let reply = self.change_map(|map| cluster::state::register(map, &r))?;
                let register = pb::RegisterReply { map: None, ..reply };
                Ok(pb::LogReply {
                    status: None,
                    reply: Some(pb::log_reply::Reply::Register(register)),
                })
            }
            Command::MapUpdate(u) => {
                self.change_map(|map| cluster::state::update(map, &u)).map(|()| ok())
            }
            Command::MdsNodes(n) => {
                self.change_map(|map| cluster::state::mds_nodes(map, &n)).map(|()| ok())
            }
            Command::PoolChange(p) => {
                self.change_map(|map| cluster::state::pool_change(map, &p)).map(|()| ok())
            }
            Command::TargetChange(c) => {
                self.change_map(|map| cluster::moves::target_change(map, &c)).map(|()| ok())
            }
            Command::GiveUp(g) => {
                self.change_map(|map| cluster::recovery::give_up(map, &g.targets)).map(|()| ok())
            }
            Command::Recover(r) => self.recover(&r),
            Command::GcDone(g) => self.change(|t| gc::gc_done(t, &g.numbers)).map(|()| ok()),
            Command::TrimDone(d) => self.change(|t| gc::trim_done(t, &d)).map(|()| ok()),
            Command::Repair(r) => self.change(|t| repair::repair(t, &r)).map(|()| ok()),
            Command::FreeOrphans(f) => {
                self.change(|t| removal::free_orphans(t, &f.inos)).map(|()| ok())
            }
            Command::Settings(s) => self.settings(&s),
            Command::EndFound(e) => self.change(|t| ends::end_found(t, &e, index)).map(|()| ok()),
            Command::ChainsAnew(b) => self.begin_anew(&b),
            Command::RaiseLevel(r) => self.raise_level(index, r.to),
        }
    }

    fn txn(&self) -> Txn<'_> {
        Txn::new(self.store, &self.batch, self.header.clone(), self.place.clone(), self.hash_mask)
    }

    /// Runs a change that is kept if it succeeds and undone otherwise.
    fn change<T>(&mut self, run: impl FnOnce(&mut Txn<'_>) -> Res<T>) -> Res<T> {
        let mut t = self.txn();
        let out = run(&mut t)?;
        let (layer, header, notes) = t.finish();
        self.batch.merge(layer);
        self.header = header;
        self.effects.push(Effect::of(notes));
        Ok(out)
    }

    /// Changes the cluster map, unless the change is refused or leaves an invalid map.
    fn change_map<T>(&mut self, change: impl FnOnce(&mut pb::ClusterMap) -> Result<T>) -> Res<T> {
        let mut map = self.place.view.map.clone();
        let out = change(&mut map)?;
        if map != self.place.view.map {
            self.set_map(map)?;
        }
        Ok(out)
    }

    fn set_map(&mut self, map: pb::ClusterMap) -> Res<()> {
        let bytes = map.encode_to_vec();
        self.place = Arc::new(Placement::new(Arc::new(MapView::new(map)?)));
        self.batch.put(Bytes::from_static(keys::MAP), Some(bytes.into()));
        Ok(())
    }

    fn format(&mut self, index: u64, f: &pb::Format) -> Res<pb::LogReply> {
        if !self.header.fs_uuid.is_empty() {
            return fail(Code::Exist, "the file system is formatted already");
        }
        if f.fs_uuid.len() != 16 || f.name_hash_key.len() != 16 {
            return fail(Code::Inval, "file system uuid and name hash key must have 16 bytes");
        }
        if !(1..=3).contains(&f.default_copies) {
            return fail(
                Code::Inval,
                format!("{} default copies; 1 to 3 are possible", f.default_copies),
            );
        }
        if f.placement > PLACEMENT {
            return fail(
                Code::Inval,
                format!("placement {}; this program knows {PLACEMENT}", f.placement),
            );
        }
        self.check_known(f.level)?;
        self.set_map(pb::ClusterMap {
            version: 1,
            fs_uuid: f.fs_uuid.clone(),
            fs_name: f.fs_name.clone(),
            default_copies: f.default_copies,
            placement: f.placement,
            shard_groups: vec![0],
            level: f.level,
            level_index: if f.level > 0 { index } else { 0 },
            ..Default::default()
        })?;
        let h = &mut self.header;
        if f.placement > 0 {
            h.format_version = FORMAT_CHAINS;
        }
        if f.level > 0 {
            h.format_version = level::FORMAT;
        }
        h.fs_uuid.clone_from(&f.fs_uuid);
        h.fs_name.clone_from(&f.fs_name);
        h.name_hash_key.clone_from(&f.name_hash_key);
        (h.next_ino, h.next_data_id, h.next_session, h.next_number, h.inodes) =
            (FIRST_INO, 1, 1, 1, 1);
        let now = h.now_ns;
        let attr = pb::Attr {
            ino: ROOT_INO,
            mode: S_IFDIR | f.root_mode & 0o7777,
            uid: f.root_uid,
            gid: f.root_gid,
            nlink: 2,
            size: DIR_SIZE,
            atime_ns: now,
            mtime_ns: now,
            ctime_ns: now,
            btime_ns: now,
            change: 1,
            ..Default::default()
        };
        self.change(|t| {
            t.put_inode(ROOT_INO, pb::InodeRecord { attr: Some(attr), ..Default::default() });
            Ok(ok())
        })
    }

    /// A request of a session, run at most once.
    fn meta(&mut self, index: u64, m: pb::MetaRequest) -> Res<pb::LogReply> {
        let Some(s) = self.session(m.session) else {
            return fail(Code::NoSession, format!("session {} has ended; mount again", m.session));
        };
        if s.seqs.contains(&m.seq) {
            return self.kept_reply(m.session, m.seq);
        }
        if m.seq == 0 || m.seq == u64::MAX {
            return fail(Code::Inval, "a change needs a sequence number between 0 and 2^64-1");
        }
        if m.seq < s.record.answered_below {
            let m =
                format!("request {} ran or was given up, and its reply is no longer kept", m.seq);
            return fail(Code::ReplyGone, m);
        }
        let Some(creds) = &m.creds else {
            return fail(Code::Inval, "the request does not name the caller");
        };
        let by =
            By { creds, session: m.session, index, ends_matter: m.ends_matter, rules: m.rules };
        let (reply, effect) = self.run(by, &m.ops)?;
        self.effects.push(Effect {
            session: m.session,
            seq: m.seq,
            connection: m.connection,
            named: m.ops.iter().flat_map(effects::named).collect(),
            told: effects::told(&m.ops, &reply.results),
            ..effect
        });
        let kept = pb::LogReply {
            status: None,
            reply: Some(pb::log_reply::Reply::Meta(wordless(&reply))),
        };
        self.batch.put(keys::reply(m.session, m.seq), Some(kept.encode_to_vec().into()));
        self.answered(m.session, m.seq, m.lowest_unanswered);
        Ok(pb::LogReply { status: None, reply: Some(pb::log_reply::Reply::Meta(reply)) })
    }

    fn run(&mut self, by: By<'_>, ops: &[pb::Op]) -> Res<(pb::MetaReply, Effect)> {
        let mut t = self.txn();
        let (reply, all) = ops::run(&mut t, by, ops, true)?;
        let (layer, header, notes) = t.finish();
        if !all {
            return Ok((reply, Effect::undone(notes)));
        }
        self.batch.merge(layer);
        self.header = header;
        Ok((reply, Effect::of(notes)))
    }

    fn kept_reply(&self, session: SessionId, seq: u64) -> Res<pb::LogReply> {
        let key = keys::reply(session, seq);
        match self.txn().get(&key)? {
            Some(v) => decode(&key, v),
            None => {
                let m = format!("the reply to request {seq} of session {session} is missing");
                Err(Fail::Store(Error::new(Code::Corrupt, m)))
            }
        }
    }

    /// Notes that the reply to `seq` is kept, and drops replies below `lowest` and the lowest ones
    /// beyond the limit.
    fn answered(&mut self, id: SessionId, seq: u64, lowest: u64) {
        let Some(Some(s)) = self.sessions.get_mut(&id) else { return };
        s.seqs.insert(seq);
        let mut below = s.record.answered_below.max(lowest.min(seq));
        while let Some(first) = s.seqs.first().copied() {
            if first >= below && s.seqs.len() <= MAX_REPLIES {
                break;
            }
            below = below.max(first.saturating_add(1));
            s.seqs.remove(&first);
            self.batch.put(keys::reply(id, first), None);
        }
        s.record.answered_below = below;
    }

    /// A living session, which this batch writes from now on.
    fn session(&mut self, id: SessionId) -> Option<&Session> {
        if !self.sessions.contains_key(&id) {
            let s = self.memory.sessions.get(&id)?.clone();
            self.sessions.insert(id, Some(s));
        }
        self.sessions.get(&id)?.as_ref()
    }

    fn session_of(&self, uuid: &Bytes) -> Option<SessionId> {
        let changed = self.uuids.get(uuid).copied();
        changed.unwrap_or_else(|| self.memory.uuids.get(uuid).copied())
    }

    fn living_sessions(&self) -> usize {
        let changed = self
            .sessions
            .iter()
            .filter(|(id, s)| s.is_some() != self.memory.sessions.contains_key(id));
        changed
            .fold(self.memory.sessions.len(), |n, (_, s)| if s.is_some() { n + 1 } else { n - 1 })
    }

    fn session_open(&mut self, o: pb::SessionOpenRequest) -> Res<pb::LogReply> {
        let text = |s: &str| s.len() <= MAX_TEXT && !s.chars().any(char::is_control);
        if o.client_uuid.len() != 16 || !text(&o.hostname) || !text(&o.version) {
            return fail(
                Code::Inval,
                "a session needs a client uuid of 16 bytes and short, printable names",
            );
        }
        if o.dead.len() > MAX_DEAD {
            return fail(
                Code::Inval,
                format!("{} dead clients named at once; {MAX_DEAD} are the limit", o.dead.len()),
            );
        }
        let dead = o
            .dead
            .iter()
            .filter(|uuid| **uuid != o.client_uuid)
            .filter_map(|uuid| self.session_of(uuid));
        let sessions: Vec<_> = dead.collect();
        if !sessions.is_empty() {
            self.session_end(&pb::SessionEnd { sessions, evict: true })?;
        }
        let known = self.session_of(&o.client_uuid);
        let (id, mut s) = match known.and_then(|id| Some((id, self.session(id)?.clone()))) {
            Some(found) => found,
            None => {
                if self.living_sessions() >= MAX_SESSIONS {
                    return fail(
                        Code::Overloaded,
                        format!("{MAX_SESSIONS} sessions are open; try again later"),
                    );
                }
                let id = next(&mut self.header.next_session, "session ids")?;
                self.uuids.insert(o.client_uuid.clone(), Some(id));
                (id, Session::default())
            }
        };
        s.record = pb::SessionRecord {
            client_uuid: o.client_uuid,
            hostname: o.hostname,
            version: o.version,
            pid: o.pid,
            epoch: SESSION_EPOCH,
            answered_below: s.record.answered_below,
            // A session that was opened again may still have dirty data from before.
            write_back: o.write_back || s.record.write_back,
            proves: o.proves || s.record.proves,
        };
        let write_back = s.record.write_back;
        if write_back {
            self.effects.push(Effect { holds_back: Some(id), ..Default::default() });
        }
        self.sessions.insert(id, Some(s));
        let reply = pb::SessionOpenReply {
            session: id,
            epoch: SESSION_EPOCH,
            root: ROOT_INO,
            fs_uuid: self.header.fs_uuid.clone(),
            write_back,
            ..Default::default()
        };
        Ok(pb::LogReply { status: None, reply: Some(pb::log_reply::Reply::SessionOpen(reply)) })
    }

    fn session_end(&mut self, e: &pb::SessionEnd) -> Res<pb::LogReply> {
        // Each eviction takes a number, and each file that is cut. What has begun must not fail.
        if self.header.next_number > LAST_NUMBER {
            return fail(Code::NoSpc, "numbers of evictions are used up");
        }
        for id in &e.sessions {
            let Some(s) = self.session(*id).cloned() else { continue };
            for seq in &s.seqs {
                self.batch.put(keys::reply(*id, *seq), None);
            }
            self.uuids.insert(s.record.client_uuid.clone(), None);
            self.sessions.insert(*id, None);
            let (mut left, mut fence) = (Left::Surplus, 0);
            if e.evict {
                let n = next(&mut self.header.next_number, "numbers of evictions")?;
                (left, fence) = (Left::Evicted(n), n);
                let min_epoch = s.record.epoch.saturating_add(1);
                let r = pb::EvictedRecord { session: *id, min_epoch, below: false };
                self.batch.put(keys::numbered(keys::EVICTED, n), Some(r.encode_to_vec().into()));
            }
            self.change(|t| {
                table::end_session(t, *id, fence)?;
                writers::release_all(t, *id, left)
            })?;
            // Storage servers learn of evictions in another way.
            let endings = if e.evict {
                vec![]
            } else {
                vec![Ending { session: *id, ino: 0, rights: Rights::ALL }]
            };
            self.effects.push(Effect {
                ended: vec![(*id, !e.evict)],
                endings,
                ..Default::default()
            });
        }
        if e.evict { self.forget_old_evictions() } else { Ok(ok()) }
    }

    fn settings(&mut self, s: &pb::Settings) -> Res<pb::LogReply> {
        self.change_map(|map| cluster::state::settings(map, s))?;
        self.header.format_version = self.header.format_version.max(FORMAT_CHAINS);
        Ok(ok())
    }

    fn begin_anew(&mut self, b: &pb::ChainsAnew) -> Res<pb::LogReply> {
        self.change_map(|map| cluster::anew::begin(map, b))?;
        self.header.format_version = self.header.format_version.max(FORMAT_ANEW);
        Ok(ok())
    }

    fn raise_level(&mut self, index: u64, to: u32) -> Res<pb::LogReply> {
        self.check_known(to)?;
        self.change_map(|map| level::raise(map, to, index))?;
        self.header.format_version = self.header.format_version.max(level::FORMAT);
        Ok(ok())
    }

    /// Stops this member at an entry of a feature level that it does not know: it would make
    /// another state of it than the others.
    fn check_known(&self, level: u32) -> Res<()> {
        level::check_known(level, self.memory.knows).map_err(Fail::Store)
    }

    /// The group begins anew. What the former group gave out after this state is unknown here:
    /// counters continue beyond it, and every session is evicted, including those opened since.
    fn recover(&mut self, r: &pb::Recover) -> Res<pb::LogReply> {
        let (new, mut h) = (Incarnation(r.incarnation), self.header.clone());
        for counter in
            [&mut h.next_ino, &mut h.next_data_id, &mut h.next_session, &mut h.next_number]
        {
            let next = new.beyond(*counter) | 1;
            if next <= *counter || next > LAST_NUMBER {
                return fail(Code::NoSpc, "a counter is used up: no other recovery is possible");
            }
            *counter = next;
        }
        if shard_of(h.next_ino) != 0 {
            return fail(Code::NoSpc, "inode ids are used up: no other recovery is possible");
        }
        self.change_map(|map| cluster::recovery::recover(map, r))?;
        self.header = h;
        let known: BTreeSet<SessionId> =
            self.memory.sessions.keys().chain(self.sessions.keys()).copied().collect();
        self.session_end(&pb::SessionEnd { sessions: known.into_iter().collect(), evict: true })?;
        let below = self.header.next_session;
        let number = next(&mut self.header.next_number, "numbers of evictions")?;
        let all = pb::EvictedRecord { session: below, min_epoch: 0, below: true };
        self.batch.put(keys::numbered(keys::EVICTED, number), Some(all.encode_to_vec().into()));
        Ok(ok())
    }

    fn forget_old_evictions(&mut self) -> Res<pb::LogReply> {
        let mut numbers = Vec::new();
        self.txn().scan(&[keys::EVICTED], &[], |key, _| {
            numbers.push(Bytes::copy_from_slice(key));
            Ok(true)
        })?;
        let old = numbers.len().saturating_sub(MAX_EVICTED);
        numbers.into_iter().take(old).for_each(|key| self.batch.put(key, None));
        Ok(ok())
    }
}
