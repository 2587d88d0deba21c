//! Metadata servers: one state behind three nodes, one of which leads. There is one directory, and
//! only the operations the tests need.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Message, Peer, Service};
use strake_proto::{
    CapKey, Capability, Code, Error, Result, Rights,
    layout::StripeMap,
    map::MapView,
    opcode,
    pb::{self, op::Op},
};
use tokio::{sync::Notify, time::timeout};

use super::Oss;

#[derive(Default)]
struct Session {
    uuid: Vec<u8>,
    alive: bool,
    replies: BTreeMap<u64, pb::MetaReply>,
    answered_below: u64,
}

#[derive(Clone)]
struct Inode {
    attr: pb::Attr,
    layout: pb::Layout,
}

struct State {
    leader: u32,
    map: pb::ClusterMap,
    names: BTreeMap<Vec<u8>, u64>,
    inodes: BTreeMap<u64, Inode>,
    sessions: BTreeMap<u64, Session>,
    opens: BTreeMap<(u64, u64), i64>,
    /// Sessions (with inode) that have an inode open for writing, with the number of the last open.
    writers: BTreeMap<(u64, u64), u64>,
    /// Writers stay on record until they release the inode; a close alone is not enough.
    releases: bool,
    next: u64,
    now_ns: i64,
    cap_ms: u64,
    caps: u32,
    /// Mutations that ran, for exactly-once.
    ran: u64,
    /// The sessions that may cache an inode, and the inodes that each session must still forget, by
    /// rising recall numbers.
    holders: BTreeMap<u64, BTreeSet<u64>>,
    owed: BTreeMap<u64, BTreeMap<u64, u64>>,
    recalls: u64,
    /// Requested reports that are not made yet, by session and number: the inode, and whether the
    /// request was sent.
    reports: BTreeMap<(u64, u64), (u64, bool)>,
    /// How often a client said that a report takes longer.
    worked: u64,
    /// The session that holds the append lock of an inode.
    ends: BTreeMap<u64, u64>,
    /// META requests that were answered.
    asked: u64,
    /// The answer to the next renewal that is not a hello grants no leases.
    denies: bool,
    /// The answer to the next open is delayed this long, after the open took effect.
    late_open: Duration,
    /// Like `late_open`, for every open.
    slow_opens: Duration,
    /// How often a session reasserted all its open files.
    reassertions: u64,
    /// This many reassertions on connections in use are refused. With `loses`, one gets no effect
    /// and no answer.
    refuses: u32,
    loses: bool,
    /// Closes are refused.
    busy: bool,
}

pub struct Mds {
    key: CapKey,
    oss: Arc<Oss>,
    state: Mutex<State>,
    /// Something was recalled or forgotten.
    news: Notify,
}

fn e<T>(code: Code, m: &str) -> Result<T> {
    Err(Error::new(code, m))
}

impl Mds {
    pub fn new(map: pb::ClusterMap, key: CapKey, oss: Arc<Oss>) -> Mds {
        let state = State {
            leader: 1,
            map,
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            sessions: BTreeMap::new(),
            opens: BTreeMap::new(),
            writers: BTreeMap::new(),
            releases: false,
            next: 100,
            now_ns: 1,
            cap_ms: u64::MAX / 2,
            caps: 0,
            ran: 0,
            holders: BTreeMap::new(),
            owed: BTreeMap::new(),
            recalls: 0,
            reports: BTreeMap::new(),
            worked: 0,
            ends: BTreeMap::new(),
            asked: 0,
            denies: false,
            late_open: Duration::ZERO,
            slow_opens: Duration::ZERO,
            reassertions: 0,
            refuses: 0,
            loses: false,
            busy: false,
        };
        Mds { key, oss, state: Mutex::new(state), news: Notify::new() }
    }
    pub fn map(&self) -> pb::ClusterMap {
        self.state.lock().map.clone()
    }
    pub fn set_map(&self, map: pb::ClusterMap) {
        self.state.lock().map = map;
    }
    /// Another server leads; the volatile open table is gone, as after an election.
    pub fn elect(&self, leader: u32) {
        let mut s = self.state.lock();
        s.leader = leader;
        s.opens.clear();
        s.holders.clear();
        s.owed.clear();
    }
    /// The same server is elected again: it does not know the connections that said hello before.
    pub fn elect_again(&self) {
        let mut s = self.state.lock();
        (s.denies, s.holders, s.owed) = (true, BTreeMap::new(), BTreeMap::new());
    }
    pub fn evict_all(&self) {
        let mut s = self.state.lock();
        s.sessions.values_mut().for_each(|s| s.alive = false);
        s.opens.clear();
        s.ends.clear();
        s.writers.clear();
        s.reports.clear();
    }
    /// Writers are told that they are on record, and are so until they release what they wrote.
    pub fn want_releases(&self) {
        self.state.lock().releases = true;
    }
    pub fn answer_next_open_after(&self, d: Duration) {
        self.state.lock().late_open = d;
    }
    /// How often a session reasserted all its open files.
    pub fn reassertions(&self) -> u64 {
        self.state.lock().reassertions
    }
    /// Refuses the next `n` reassertions on connections that are in use.
    pub fn refuse_reassertions(&self, n: u32) {
        self.state.lock().refuses = n;
    }
    pub fn lose_next_reassertion(&self) {
        self.state.lock().loses = true;
    }
    pub fn refuse_closes(&self, refuse: bool) {
        self.state.lock().busy = refuse;
    }
    fn loses(&self, r: &pb::SessionRenewRequest) -> bool {
        r.reassert && !r.hello && std::mem::take(&mut self.state.lock().loses)
    }
    pub fn answer_opens_after(&self, d: Duration) {
        self.state.lock().slow_opens = d;
    }
    pub fn is_written(&self, ino: u64) -> bool {
        self.state.lock().writers.keys().any(|(_, i)| *i == ino)
    }
    /// Names in the directory, in order.
    pub fn names(&self) -> Vec<Vec<u8>> {
        self.state.lock().names.keys().cloned().collect()
    }
    pub fn opens(&self) -> i64 {
        self.state.lock().opens.values().sum()
    }
    pub fn ran(&self) -> u64 {
        self.state.lock().ran
    }
    /// META requests so far.
    pub fn asked(&self) -> u64 {
        self.state.lock().asked
    }
    pub fn size_of(&self, ino: u64) -> u64 {
        self.state.lock().inodes[&ino].attr.size
    }
    /// Capabilities given so far; each has its number.
    pub fn caps(&self) -> u32 {
        self.state.lock().caps
    }
    /// Capabilities given from now on expire at this wall clock time, milliseconds.
    pub fn caps_expire(&self, at_ms: u64) {
        self.state.lock().cap_ms = at_ms;
    }

    /// Asks the writers of a file to report it; returns when they have.
    pub async fn report(&self, ino: u64) {
        self.report_to(0, ino).await;
    }
    async fn report_to(&self, asks: u64, ino: u64) {
        let mine: Vec<(u64, u64)> = {
            let s = &mut *self.state.lock();
            let writers: Vec<u64> =
                s.writers.keys().filter(|w| w.1 == ino && w.0 != asks).map(|w| w.0).collect();
            let number = |id| {
                s.recalls += 1;
                (id, s.recalls)
            };
            let mine: Vec<_> = writers.into_iter().map(number).collect();
            s.reports.extend(mine.iter().map(|key| (*key, (ino, false))));
            mine
        };
        self.news.notify_waiters();
        while mine.iter().any(|key| self.state.lock().reports.contains_key(key)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    /// How often a client said that a report takes longer.
    pub fn worked(&self) -> u64 {
        self.state.lock().worked
    }

    fn leads(&self, node: u32) -> Result<()> {
        let leader = self.state.lock().leader;
        if leader == node { Ok(()) } else { Err(Error::not_leader(leader)) }
    }

    fn session_open(&self, r: pb::SessionOpenRequest) -> pb::SessionOpenReply {
        let s = &mut *self.state.lock();
        let found = s
            .sessions
            .iter()
            .find(|(_, x)| x.alive && x.uuid == r.client_uuid[..])
            .map(|(id, _)| *id);
        let id = found.unwrap_or_else(|| {
            s.next += 1;
            let new = Session { uuid: r.client_uuid.to_vec(), alive: true, ..Default::default() };
            s.sessions.insert(s.next, new);
            s.next
        });
        pb::SessionOpenReply {
            session: id,
            epoch: 1,
            term_ms: 4000,
            root: 1,
            map: Some(s.map.clone()),
            write_back: r.write_back,
            ..Default::default()
        }
    }

    fn renew(&self, r: pb::SessionRenewRequest) -> Result<pb::SessionRenewReply> {
        let s = &mut *self.state.lock();
        s.sessions
            .get(&r.session)
            .filter(|s| s.alive)
            .ok_or_else(|| Error::new(Code::NoSession, "no session"))?;
        if r.reassert {
            s.reassertions += 1;
            if !r.hello && s.refuses > 0 {
                s.refuses -= 1;
                return e(Code::Overloaded, "too much to do");
            }
            s.opens.retain(|(id, _), _| *id != r.session);
            for ino in r.opens {
                *s.opens.entry((r.session, ino)).or_default() += 1;
            }
        }
        if r.hello {
            s.holders.values_mut().for_each(|h| h.retain(|id| *id != r.session));
            s.owed.remove(&r.session);
            s.reports
                .iter_mut()
                .filter(|((id, _), _)| *id == r.session)
                .for_each(|(_, (_, sent))| *sent = false);
            self.news.notify_waiters();
        }
        let denied = !r.hello && std::mem::take(&mut s.denies);
        let lease_ms = if denied { 0 } else { 1500 };
        Ok(pb::SessionRenewReply {
            map: (s.map.version > r.map_version).then(|| s.map.clone()),
            lease_ms,
        })
    }

    /// Returns what a session must forget, as soon as there is something.
    async fn recall(&self, r: pb::RecallRequest) -> pb::RecallReply {
        let at_once = !r.reported.is_empty() || !r.working.is_empty();
        {
            let s = &mut *self.state.lock();
            s.reports.retain(|(id, number), _| *id != r.session || !r.reported.contains(number));
            s.worked += r.working.len() as u64;
        }
        let _ = timeout(Duration::from_secs(3), async {
            loop {
                let news = self.news.notified();
                {
                    let s = &mut *self.state.lock();
                    let asked =
                        s.reports.iter().any(|((id, _), (_, sent))| *id == r.session && !sent);
                    if at_once || asked {
                        return;
                    }
                    let mine = s.owed.entry(r.session).or_default();
                    let before = mine.len();
                    mine.retain(|number, _| *number > r.acknowledged);
                    if mine.len() < before {
                        self.news.notify_waiters();
                    }
                    if !mine.is_empty() {
                        return;
                    }
                }
                news.await;
            }
        })
        .await;
        let s = &mut *self.state.lock();
        let one = |(number, ino): (&u64, &u64)| pb::Recall {
            number: *number,
            ino: *ino,
            ..Default::default()
        };
        let recalls = s.owed.get(&r.session).into_iter().flatten().map(one).collect();
        let unsent = s.reports.iter_mut().filter(|((id, _), (_, sent))| *id == r.session && !sent);
        let report = |((_, number), (ino, sent)): (&(u64, u64), &mut (u64, bool))| {
            *sent = true;
            pb::Recall { number: *number, ino: *ino, ..Default::default() }
        };
        let reports = unsent.map(report).collect();
        pb::RecallReply { recalls, reports, locks: Vec::new() }
    }

    /// Answers once all other sessions have forgotten what was changed, or their time is over. A
    /// request for attributes first waits until the other sessions have reported the size.
    async fn meta(&self, r: pb::MetaRequest) -> Result<pb::MetaReply> {
        for o in &r.ops {
            if let Some(Op::Getattr(g)) = &o.op {
                self.report_to(r.session, g.ino).await;
            }
        }
        if self.state.lock().busy && r.ops.iter().any(|o| matches!(o.op, Some(Op::Close(_)))) {
            return e(Code::Overloaded, "too much to do");
        }
        let opens = r.ops.iter().any(|o| matches!(o.op, Some(Op::Open(_))));
        let (reply, upto, late) = {
            let reply = self.meta_now(r)?;
            let mut s = self.state.lock();
            s.asked += 1;
            let late = if opens {
                std::mem::take(&mut s.late_open).max(s.slow_opens)
            } else {
                Duration::ZERO
            };
            (reply, s.recalls, late)
        };
        tokio::time::sleep(late).await;
        let settled = async {
            loop {
                let news = self.news.notified();
                if !self.state.lock().owed.values().any(|o| o.keys().any(|n| *n <= upto)) {
                    return;
                }
                news.await;
            }
        };
        let _ = timeout(Duration::from_millis(1500), settled).await;
        Ok(reply)
    }

    /// Recalls the inode from all other sessions that may cache it.
    fn changed(&self, s: &mut State, by: u64, ino: u64) {
        for holder in s.holders.remove(&ino).into_iter().flatten().filter(|h| *h != by) {
            s.recalls += 1;
            s.owed.entry(holder).or_default().insert(s.recalls, ino);
        }
        self.news.notify_waiters();
    }

    fn meta_now(&self, r: pb::MetaRequest) -> Result<pb::MetaReply> {
        let s = &mut *self.state.lock();
        let session = s.sessions.get_mut(&r.session).filter(|s| s.alive);
        let session = session.ok_or_else(|| Error::new(Code::NoSession, "no session"))?;
        if r.seq > 0 {
            if let Some(reply) = session.replies.get(&r.seq) {
                return Ok(reply.clone());
            }
            if r.seq < session.answered_below {
                return e(Code::ReplyGone, "reply gone");
            }
            session.answered_below = session.answered_below.max(r.lowest_unanswered);
            let below = session.answered_below;
            session.replies.retain(|q, _| *q >= below);
            s.ran += 1;
        }
        let mut reply = pb::MetaReply::default();
        let mut shown = BTreeSet::new();
        for op in r.ops {
            if let Some(Op::Lookup(l)) = &op.op {
                shown.insert(l.parent);
            }
            let result = self.op(s, r.session, op.op.unwrap());
            let failed = result.is_err();
            reply.results.push(result.unwrap_or_else(|e| pb::OpResult {
                status: Some(e.to_status()),
                ..Default::default()
            }));
            if failed {
                break;
            }
        }
        shown.extend(reply.results.iter().filter_map(|r| Some(r.attr?.ino)));
        for ino in shown {
            let others = s.writers.keys().any(|(id, i)| *id != r.session && *i == ino);
            if r.connection != 0 && !others {
                s.holders.entry(ino).or_default().insert(r.session);
                reply.granted.push(ino);
            }
        }
        if r.seq > 0 {
            s.sessions.get_mut(&r.session).unwrap().replies.insert(r.seq, reply.clone());
        }
        Ok(reply)
    }

    fn op(&self, s: &mut State, session: u64, op: Op) -> Result<pb::OpResult> {
        s.now_ns += 1_000_000;
        let now = s.now_ns;
        let gone = || Error::new(Code::NoEnt, "no such inode");
        let with =
            |i: &Inode| pb::OpResult { ino: i.attr.ino, attr: Some(i.attr), ..Default::default() };
        match op {
            Op::Lookup(l) => {
                let ino = s.names.get(&l.name[..]).ok_or_else(gone)?;
                Ok(with(&s.inodes[ino]))
            }
            Op::Getattr(g) => Ok(with(s.inodes.get(&g.ino).ok_or_else(gone)?)),
            Op::Open(o) => self.open(s, session, o.ino, o.flags),
            Op::Close(c) => {
                let left = s.opens.entry((session, c.ino)).or_default();
                *left -= 1;
                if *left <= 0 && !s.releases {
                    s.writers.remove(&(session, c.ino));
                }
                Ok(pb::OpResult::default())
            }
            Op::Create(c) => {
                if let Some(ino) = s.names.get(&c.name[..]).copied() {
                    return if c.exclusive {
                        e(Code::Exist, "exists")
                    } else {
                        self.open(s, session, ino, c.flags)
                    };
                }
                self.changed(s, session, c.parent);
                s.next += 1;
                let (ino, spec) = (s.next, c.layout.unwrap_or_default());
                let all = s.map.chains.len() as u32;
                let count = if spec.stripe_count <= 0 { all } else { spec.stripe_count as u32 };
                let component = pb::Component {
                    end: u64::MAX,
                    stripe_size: if spec.stripe_size == 0 { 1 << 20 } else { spec.stripe_size },
                    data_id: ino,
                    set: Some(pb::ChainSetRef { set: 1, seed: 0, start: 0, count }),
                    ..Default::default()
                };
                let attr = pb::Attr {
                    ino,
                    mode: 0o100_000 | c.mode,
                    nlink: 1,
                    mtime_ns: now,
                    data_id: ino,
                    ..Default::default()
                };
                let layout = pb::Layout { generation: 1, components: vec![component], drafts: 0 };
                s.inodes.insert(ino, Inode { attr, layout });
                s.names.insert(c.name.to_vec(), ino);
                Ok(pb::OpResult { created: true, ..self.open(s, session, ino, c.flags)? })
            }
            Op::Release(r) => {
                if s.writers.get(&(session, r.ino)) == Some(&r.writer) {
                    s.writers.remove(&(session, r.ino));
                }
                Ok(pb::OpResult::default())
            }
            Op::Unlink(u) => {
                self.changed(s, session, u.parent);
                s.names.remove(&u.name[..]).ok_or_else(gone)?;
                Ok(pb::OpResult::default())
            }
            // There is only one directory.
            Op::Rename(r) => {
                self.changed(s, session, r.parent);
                let ino = s.names.remove(&r.name[..]).ok_or_else(gone)?;
                s.names.insert(r.new_name.to_vec(), ino);
                Ok(pb::OpResult::default())
            }
            Op::Extend(x) => {
                self.changed(s, session, x.ino);
                let i = s.inodes.get_mut(&x.ino).ok_or_else(gone)?;
                i.attr.size = i.attr.size.max(x.end);
                i.attr.sparse |= x.holes;
                i.attr.mtime_ns = now;
                i.attr.change += 1;
                Ok(with(i))
            }
            Op::Setattr(a) => {
                self.changed(s, session, a.ino);
                self.setattr(s, a, now)
            }
            Op::Setlayout(l) => {
                self.changed(s, session, l.ino);
                s.next += 1;
                let data = s.next;
                let i = s.inodes.get_mut(&l.ino).ok_or_else(gone)?;
                i.layout.generation += 1;
                i.layout.components[0].data_id = data;
                i.attr.data_id = data;
                i.attr.change += 1;
                Ok(with(i))
            }
            // Only the lock that appends take.
            Op::SetLock(l) => {
                let holder = s.ends.get(&l.ino).copied();
                if holder.is_some_and(|id| id != session) {
                    return e(Code::LockConflict, "another has the lock");
                }
                if l.span.is_some_and(|s| s.r#type == pb::LockType::LockUnlock as i32) {
                    s.ends.remove(&l.ino);
                } else {
                    s.ends.insert(l.ino, session);
                }
                Ok(pb::OpResult {
                    lock: Some(pb::LockReply { session, ..Default::default() }),
                    ..Default::default()
                })
            }
            Op::GetSeal(_) => e(Code::NoData, "the file is not sealed"),
            _ => e(Code::OpNotSupp, "not in this fake"),
        }
    }

    fn setattr(&self, s: &mut State, a: pb::SetAttr, now: i64) -> Result<pb::OpResult> {
        let map = MapView::new(s.map.clone())?;
        let i = s.inodes.get_mut(&a.ino).ok_or_else(|| Error::new(Code::NoEnt, "no such inode"))?;
        if let Some(size) = a.size {
            if size < i.attr.size {
                let cut = StripeMap::resolve(a.ino, &i.layout, &map)?.cut(size);
                self.oss.trim(a.ino, cut.first_gone, cut.kept);
            }
            i.attr.sparse |= a.holes && size > i.attr.size;
            i.attr.size = size;
            i.attr.mtime_ns = now;
        }
        if let Some(t) = a.mtime_ns {
            i.attr.mtime_ns = t;
        }
        i.attr.change += 1;
        Ok(pb::OpResult { ino: a.ino, attr: Some(i.attr), ..Default::default() })
    }

    fn open(&self, s: &mut State, session: u64, ino: u64, flags: u32) -> Result<pb::OpResult> {
        let i = s.inodes.get(&ino).ok_or_else(|| Error::new(Code::NoEnt, "no such inode"))?;
        let rights = match flags & 3 {
            0 => Rights::READ,
            1 => Rights::WRITE,
            _ => Rights::READ.and(Rights::WRITE),
        };
        let (attr, layout) = (i.attr, i.layout.clone());
        if flags & 3 != 0 {
            self.changed(s, session, ino);
            s.writers.insert((session, ino), s.now_ns as u64);
        }
        let data = layout.components[0].data_id;
        s.caps += 1;
        let cap = Capability {
            ino,
            data,
            session,
            session_epoch: 1,
            expiry_ms: s.cap_ms,
            rights,
            bound: strake_proto::Bound::Any,
            as_of: s.caps,
        };
        *s.opens.entry((session, ino)).or_default() += 1;
        Ok(pb::OpResult {
            ino,
            attr: Some(attr),
            layout: Some(layout),
            writer: if s.releases && flags & 3 != 0 { s.now_ns as u64 } else { 0 },
            capability: self.key.seal(&cap).to_vec().into(),
            ..Default::default()
        })
    }
}

pub struct Front(pub Arc<Mds>, pub u32);

fn body<M: prost::Message + Default>(m: &Message) -> M {
    M::decode(m.body.clone()).unwrap()
}

#[async_trait]
impl Service for Front {
    async fn handle(&self, _peer: &Peer, m: Message) -> Result<Message> {
        tokio::time::sleep(Duration::from_micros(200)).await;
        self.0.leads(self.1)?;
        let reply = match m.opcode {
            opcode::SESSION_OPEN => self.0.session_open(body(&m)).encode_to_vec(),
            opcode::SESSION_RENEW => {
                let r = body(&m);
                if self.0.loses(&r) {
                    std::future::pending::<()>().await;
                }
                self.0.renew(r)?.encode_to_vec()
            }
            opcode::SESSION_CLOSE => {
                let r: pb::SessionCloseRequest = body(&m);
                let mut s = self.0.state.lock();
                s.opens.retain(|(id, _), _| *id != r.session);
                s.writers.retain(|(id, _), _| *id != r.session);
                s.holders.values_mut().for_each(|h| h.retain(|id| *id != r.session));
                s.owed.remove(&r.session);
                s.sessions.remove(&r.session);
                self.0.news.notify_waiters();
                vec![]
            }
            opcode::MAP => {
                let r: pb::MapRequest = body(&m);
                let map = self.0.map();
                pb::MapReply { map: (map.version > r.have).then_some(map) }.encode_to_vec()
            }
            opcode::META => self.0.meta(body(&m)).await?.encode_to_vec(),
            // All waiters may try again.
            opcode::LOCK_WAIT => {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let r: pb::LockWaitRequest = body(&m);
                let ready = r.waits.iter().filter(|w| !w.trying).map(|w| w.id).collect();
                pb::LockWaitReply { ready, ..Default::default() }.encode_to_vec()
            }
            opcode::RECALL => self.0.recall(body(&m)).await.encode_to_vec(),
            o => return Err(strake_fabric::unknown_opcode(o)),
        };
        Ok(Message::new(0, reply))
    }
}
