//! The way to the metadata leader: one connection, one session, exactly-once mutations.
//!
//! A mutation gets a sequence number once and keeps it through every retry and every leader, so that the servers run it
//! once. When a new leader answers, the session reasserts what it holds open before anything else is sent there. When
//! the servers say that the session is gone, a new one is opened; unstable bytes of the old one are lost to their
//! handles (`EIO`).

pub(crate) mod followers;
pub(crate) mod opens;
pub(crate) mod request_ids;

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Connection, Endpoint, Message};
use strake_proto::{Code, Error, Result, SessionId, opcode, pb};
use tokio::time::timeout;

use crate::{
    config::{Counters, FollowerReads},
    core::{Attempts, Core},
    handover::{self, Handover, Numbers},
    leases::lease_cache::forgotten,
    metadata::request_ids::RequestIds,
    rows::Holder,
    shared::retry::{in_doubt, meta_passes},
    shared::unreachable::Kind,
};

const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// One attempt at a request. A leader that is cut off says nothing; the next one answers the retry.
pub(crate) const META_TRY: Duration = Duration::from_secs(5);
/// One renewal. A leader that stopped must be found out before the leases are over.
pub(crate) const HELLO_TRY: Duration = Duration::from_secs(1);
/// When the time is over.
const MIN_TRY: Duration = Duration::from_millis(1);
/// How often leases are renewed. They live about three times as long.
const LEASE_RENEWAL: Duration = Duration::from_millis(400);
/// A shrink is answered when the bytes are gone from every replica.
const SHRINK_TRY: Duration = Duration::from_secs(30);

/// The connection to the server that led last.
#[derive(Default)]
pub(crate) struct Link {
    current: Option<Leader>,
    made: u64,
    /// Of the last connection.
    number: u64,
    /// Servers in a row that accepted a connection and did not answer on it in time.
    slow: u32,
    /// Servers in a row that do not take this client's key, or do not prove theirs.
    refused: usize,
}

#[derive(Clone)]
pub(crate) struct Leader {
    pub conn: Arc<dyn Connection>,
    at: Endpoint,
    /// Rising, also from one process to the next that takes its place.
    pub number: u64,
}

/// One session at the metadata servers.
pub(crate) struct Session {
    pub id: SessionId,
    pub root: u64,
    pub term: Duration,
    pub fs_uuid: Bytes,
    request_ids: Mutex<RequestIds>,
    /// Numbers of data writes: a space of their own. With kept memory it is there.
    data_seq: AtomicU64,
    /// See [`strake_proto::data::DataRequest::round`]. With kept memory it is there.
    round: AtomicU64,
    /// The metadata servers ask for what it holds back before they tell others of a file.
    pub may_hold_back: bool,
    keep: Option<Arc<Handover>>,
}

impl Session {
    /// The first of `n` numbers for data writes.
    pub(crate) fn take_data_numbers(&self, n: u64) -> u64 {
        match &self.keep {
            Some(k) => k.take_data_numbers(n),
            None => self.data_seq.fetch_add(n, Relaxed),
        }
    }

    fn rounds(&self) -> &AtomicU64 {
        self.keep.as_ref().map_or(&self.round, |k| k.round())
    }

    /// What data requests that are sent now say.
    pub(crate) fn round(&self) -> u64 {
        self.rounds().load(SeqCst)
    }

    /// An update is given up that may be on its way: what is written from now on is not to be overwritten by it.
    /// Which round begins.
    pub(crate) fn next_round(&self) -> u64 {
        self.rounds().fetch_add(1, SeqCst) + 1
    }

    /// An update that was sent in this round may be on its way and is sent again: in a later one, so that the copy is not made once this was heard of.
    pub(crate) fn leave_round(&self, round: u64) {
        // Whoever is not the first to leave it finds the next one.
        let _ = self.rounds().compare_exchange(round, round + 1, SeqCst, SeqCst);
    }

    /// A number for a mutation, or for what opens and closes files: the one that a former client used for the same request, or a new one. `EIO` when that
    /// client's session is lost: it ran or it did not.
    pub(crate) fn begin(&self, numbers: Option<&Numbers>) -> Result<Turn<'_>> {
        if let Some((session, n)) = numbers.and_then(Numbers::mutation) {
            if session != self.id {
                let m = "the session was lost while the mount was restarted, and with it the answer";
                return Err(Error::new(Code::Io, m));
            }
            return Ok(Turn(self, n));
        }
        let mut request_ids = self.request_ids.lock();
        let n = request_ids.begin();
        if let Some(k) = &self.keep {
            k.next_mutation().store(request_ids.next(), Relaxed);
        }
        drop(request_ids);
        if let Some(numbers) = numbers {
            numbers.set_mutation(self.id, n);
        }
        Ok(Turn(self, n))
    }

    pub(crate) fn lowest_unanswered(&self) -> u64 {
        self.request_ids.lock().lowest_unanswered()
    }

    /// Nobody will repeat it.
    pub(crate) fn abandon(&self, numbers: &Numbers) {
        if let Some((session, n)) = numbers.mutation()
            && session == self.id
        {
            self.request_ids.lock().end(n);
        }
    }
}

/// A mutation's number, given back when its answer came or nobody waits for one.
pub(crate) struct Turn<'a>(&'a Session, pub u64);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.request_ids.lock().end(self.1);
    }
}

/// A reply's body.
pub(crate) fn decode<M: prost::Message + Default>(m: &Message) -> Result<M> {
    M::decode(m.body.clone()).map_err(|e| Error::new(Code::Protocol, format!("a metadata server's reply: {e}")))
}

/// Whether a list changes anything.
pub(crate) fn is_mutation(ops: &[pb::Op]) -> bool {
    ops.iter().any(strake_proto::ops::is_mutation)
}

/// Whether a list changes what others see: names, attributes, layouts or bytes. Not what only says who is there, nor what makes
/// earlier writes safe: files that were written are opened again for that.
fn alters(ops: &[pb::Op]) -> bool {
    use pb::op::Op::*;
    let harmless = |o: &pb::Op| matches!(o.op, Some(Open(_) | Close(_) | Release(_) | SetLock(_) | Extend(_)));
    is_mutation(ops) && !ops.iter().all(harmless)
}

/// Whether running a list twice does what running it once does, as far as its sender can tell. What a lost session had locked
/// is lost with it.
fn is_repeatable(ops: &[pb::Op]) -> bool {
    use pb::op::Op::*;
    ops.iter().all(|o| matches!(o.op, Some(Open(_) | Close(_) | Release(_) | SetLock(_)))) || !is_mutation(ops)
}

/// Whether a repetition after a restart of the mount must find the answer of the first run. The others may run twice.
fn keeps_number(ops: &[pb::Op]) -> bool {
    !is_repeatable(ops) && !ops.iter().all(|o| matches!(o.op, Some(pb::op::Op::Extend(_))))
}

fn is_resize(ops: &[pb::Op]) -> bool {
    ops.iter().any(|o| matches!(&o.op, Some(pb::op::Op::Setattr(s)) if s.size.is_some()))
}

impl Core {
    /// Sends a request to the leader, whoever that is, until it is answered or the time is over. `body`: for the connection of
    /// this number.
    pub(crate) async fn mds_call(
        self: &Arc<Self>,
        opcode: u16,
        body: impl Fn(u64) -> Bytes,
        one_try: Duration,
        at: &mut Attempts,
    ) -> Result<Message> {
        loop {
            // Others may be trying to connect before this one's turn comes.
            let none = || Error::new(Code::Disconnected, "no connection to a metadata server");
            let leader = timeout(at.left().max(MIN_TRY), self.leader()).await;
            let cause = match leader.unwrap_or_else(|_| Err(none())) {
                Ok(leader) => {
                    Counters::add(&self.stats.meta_requests, 1);
                    Counters::add(&self.stats.operations, u64::from(opcode == opcode::META));
                    let limit = one_try.min(at.left()).max(MIN_TRY);
                    match leader.conn.call(Message::new(opcode, body(leader.number)), limit).await {
                        Ok(m) => {
                            self.answered(Kind::Metadata, "");
                            return Ok(m);
                        }
                        Err(e) => {
                            self.leader_failed(&leader, &e).await;
                            e
                        }
                    }
                }
                Err(e) => e,
            };
            if !meta_passes(&cause) {
                self.answered(Kind::Metadata, "");
                return Err(cause);
            }
            at.pause(self, cause).await?;
        }
    }

    /// The connection to the leader. Makes one to the next candidate when there is none; fails when that one fails.
    pub(crate) async fn leader(self: &Arc<Self>) -> Result<Leader> {
        let mut link = self.link.lock().await;
        if let Some(l) = link.current.as_ref().filter(|l| !l.conn.is_closed()) {
            return Ok(l.clone());
        }
        link.current = None;
        let none = || Error::new(Code::Inval, "no metadata server is configured");
        let at = self.finder.lock().whom().ok_or_else(none)?;
        let map = self.map();
        let node = map.map.nodes.iter().find(|n| n.endpoints.iter().any(|e| e.parse() == Ok(at.clone())));
        let silent = || Err(Error::new(Code::TimedOut, "does not answer"));
        let direct =
            async { timeout(CONNECT_TIMEOUT, self.fabric.connect(&at, None)).await.unwrap_or_else(|_| silent()) };
        let asked = match node {
            Some(node) => timeout(CONNECT_TIMEOUT, self.relays.reach(&self.fabric, node, direct)).await,
            None => Ok(direct.await),
        };
        let conn = match asked.unwrap_or_else(|_| silent()) {
            Ok(conn) => conn,
            Err(e) => return Err(self.unreachable(&mut link, &at, e)),
        };
        link.refused = 0;
        let leader = Leader { conn, at, number: (link.number + 1).max(self.env.boot().as_nanos() as u64) };
        link.number = leader.number;
        if let Some(s) = self.current_session() {
            let patience = (HELLO_TRY * 2u32.saturating_pow(link.slow)).min(META_TRY);
            match self.renew_on(&leader, &s, true, patience).await {
                // No session: the leader is right, the session is what must be replaced, by whoever needs it.
                Ok(()) => self.answered(Kind::Metadata, ""),
                Err(e) if e.code == Code::NoSession => {}
                Err(e) => {
                    // Likely it has much to do: who begins anew each time adds to that.
                    link.slow = if e.code == Code::TimedOut { (link.slow + 1).min(8) } else { 0 };
                    self.learn_leader(&leader, &e).await;
                    self.note_failure(&leader, &e);
                    return Err(e);
                }
            }
        }
        link.made += 1;
        if link.made > 1 {
            Counters::add(&self.stats.failovers, 1);
        }
        link.slow = 0;
        self.finder.lock().found(&leader.at);
        self.followers.leader_is(&leader.at);
        link.current = Some(leader.clone());
        Ok(leader)
    }

    /// A host that does not resolve or refuses now may do better later; a wrong key never does. But one among several may be no
    /// server of the cluster, and a session shows that the key is right.
    fn unreachable(&self, link: &mut Link, at: &Endpoint, e: Error) -> Error {
        self.finder.lock().failed(at);
        self.failed(Kind::Metadata, &at.to_string(), &e);
        let e = e.context(format_args!("metadata server {at}"));
        link.refused = if e.code == Code::Unauthenticated { link.refused + 1 } else { 0 };
        let by_all = link.refused >= self.finder.lock().all().len();
        if by_all && self.current_session().is_none() { e } else { Error { code: Code::Disconnected, ..e } }
    }

    /// One that does not lead may name one that was taken in a moment ago: its map has that one's address.
    async fn learn_leader(&self, asked: &Leader, e: &Error) {
        let map = self.map();
        if e.code != Code::NotLeader || e.leader == 0 || map.node(e.leader).is_some() {
            return;
        }
        let m = Message::new(opcode::MAP, pb::MapRequest { have: map.version(), latest: false }.encode_to_vec());
        let reply = asked.conn.call(m, Duration::from_secs(1)).await;
        let map =
            reply.and_then(|m| decode::<pb::MapReply>(&m)).and_then(|r| r.map.map_or(Ok(()), |m| self.install_map(m)));
        if let Err(e) = map {
            tracing::debug!("asking {} who leads: {e}", asked.at);
        }
    }

    fn note_failure(&self, leader: &Leader, e: &Error) {
        self.failed(Kind::Metadata, &leader.at.to_string(), e);
        let mut finder = self.finder.lock();
        finder.failed(&leader.at);
        if e.code == Code::NotLeader && e.leader != 0 {
            let map = self.map();
            let hint = map.node(e.leader).and_then(|n| n.endpoints.iter().find_map(|e| e.parse().ok()));
            if let Some(h) = hint {
                finder.hint(h);
            }
        }
    }

    /// Whether that is the end of the connection.
    pub(crate) async fn leader_failed(&self, leader: &Leader, e: &Error) -> bool {
        if !matches!(e.code, Code::NotLeader | Code::Disconnected | Code::TimedOut) {
            return false;
        }
        let mut link = self.link.lock().await;
        if link.current.as_ref().is_some_and(|l| l.number == leader.number) {
            link.current = None;
            self.learn_leader(leader, e).await;
            self.note_failure(leader, e);
        }
        true
    }

    // --- session ---

    pub(crate) fn current_session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    /// The session, opened if there is none.
    pub(crate) async fn session(self: &Arc<Self>) -> Result<Arc<Session>> {
        self.session_within(self.cfg.op_timeout).await
    }

    pub(crate) async fn session_within(self: &Arc<Self>, limit: Duration) -> Result<Arc<Session>> {
        if let Some(s) = self.current_session() {
            return Ok(s);
        }
        let _one = self.session_change.lock().await;
        if let Some(s) = self.current_session() {
            return Ok(s);
        }
        if self.is_ending() {
            return Err(Error::new(Code::Io, "the client is being closed"));
        }
        let body = pb::SessionOpenRequest {
            client_uuid: self.uuid.to_vec().into(),
            hostname: self.cfg.hostname.clone(),
            version: self.cfg.version.clone(),
            pid: self.cfg.pid,
            dead: self.cfg.dead.iter().map(|uuid| uuid.to_vec().into()).collect(),
            incarnation: self.map().map.incarnation,
            write_back: self.cfg.write_back,
            proves: true,
        };
        let mut at = self.attempts_for("opening a session", limit);
        let body = Bytes::from(body.encode_to_vec());
        let m = self.mds_call(opcode::SESSION_OPEN, |_| body.clone(), META_TRY, &mut at).await;
        let m = m.map_err(|e| match (e.code, self.unreachable.lock().list()) {
            (Code::TimedOut, list) if !list.is_empty() => {
                Error::new(Code::TimedOut, format!("no answer in {:.0} s from {list}", limit.as_secs_f64()))
            }
            _ => e,
        })?;
        let r: pb::SessionOpenReply = decode(&m)?;
        if let Some(map) = r.map {
            self.install_map(map)?;
        }
        let keep = self.cfg.handover.clone();
        let request_ids = match &keep {
            Some(k) => RequestIds::resume(k.next_mutation().load(Relaxed), k.in_doubt(r.session)),
            None => RequestIds::default(),
        };
        if let Some(k) = &keep {
            k.set_session(r.session);
        }
        let s = Arc::new(Session {
            id: r.session,
            root: r.root,
            term: Duration::from_millis(u64::from(r.term_ms)),
            fs_uuid: r.fs_uuid,
            request_ids: Mutex::new(request_ids),
            data_seq: AtomicU64::new(1),
            round: AtomicU64::new(0),
            may_hold_back: self.cfg.write_back && r.write_back,
            keep,
        });
        if self.cfg.handover.as_ref().is_some_and(|k| k.former_session() == s.id) {
            // What a former process had on its way, and nobody repeats.
            s.next_round();
        }
        *self.session.lock() = Some(s.clone());
        Ok(s)
    }

    /// The servers do not know `session` any more: its unstable writes are lost to their files. The next operation
    /// opens a new session.
    pub(crate) fn session_gone(&self, session: &Session) {
        let mut current = self.session.lock();
        if current.as_ref().is_none_or(|s| s.id != session.id) {
            return;
        }
        // Before there can be another session, in which the lost end would be reported.
        self.live_inodes().iter().for_each(|i| i.forget_end(session.id));
        *current = None;
        drop(current);
        // The leader waits for its leases until they are over, and by then copies are, too.
        drop(self.forget_all());
        self.forget_kept();
        Counters::add(&self.stats.sessions_lost, 1);
        tracing::warn!(session = session.id, "the session is gone; unstable writes of open files are lost");
        {
            let mut unstable = self.unstable.lock();
            unstable.forget_session(session.id).values().for_each(|h| h.inode.lost_with(session.id, Vec::new()));
        }
        self.live_inodes().iter().for_each(|i| i.back.lose(|parts| i.lost_with(session.id, parts)));
        self.holding.lock().clear();
    }

    pub(crate) fn renew_interval(&self) -> Duration {
        let term = self.current_session().map_or(Duration::from_secs(4), |s| s.term);
        (term / 4).clamp(Duration::from_millis(10), LEASE_RENEWAL)
    }

    /// Renews the session and its leases; on a new connection it says hello, having forgotten everything.
    pub(crate) async fn renew_on(
        &self,
        leader: &Leader,
        s: &Session,
        reassert: bool,
        patience: Duration,
    ) -> Result<()> {
        let hello = !self.lease_cache.is_greeted(s.id, leader.number);
        if hello {
            forgotten(self.forget_all()).await;
        }
        let mut opens = Vec::new();
        if reassert {
            self.forget_kept();
            self.begin_reassertion();
            // Once per handle: the server counts.
            for i in self.live_inodes() {
                opens.extend(std::iter::repeat_n(i.ino, i.handles_of(s.id)));
            }
        }
        // What a former daemon of the mount told the kernel it may remember yet.
        let lives_on = hello && self.cfg.handover.as_ref().is_some_and(|k| k.former_session() == s.id);
        let (session, map, connection) = (s.id, self.map(), leader.number);
        let (map_version, incarnation) = (map.version(), map.map.incarnation);
        // Whose session it is, once for each connection.
        let client_uuid = if hello || reassert { Bytes::copy_from_slice(&self.uuid) } else { Bytes::new() };
        let body = pb::SessionRenewRequest {
            session,
            map_version,
            reassert,
            opens,
            connection,
            hello,
            lives_on,
            incarnation,
            client_uuid,
        };
        let m = Message::new(opcode::SESSION_RENEW, body.encode_to_vec());
        Counters::add(&self.stats.meta_requests, 1);
        let sent = self.env.boot();
        let m = leader.conn.call(m, patience).await?;
        let r: pb::SessionRenewReply = decode(&m)?;
        if r.lease_ms != 0 {
            let term = Duration::from_millis(u64::from(r.lease_ms));
            if self.lease_cache.renewed(self.env.boot(), sent, term) {
                self.forget_bytes();
            }
            self.lease_cache.greeted(s.id, leader.number);
            if hello {
                self.greeted.notify_one();
            }
        } else {
            // The same server was elected again. What was asked for on this connection may run yet, so another one is greeted.
            self.lease_cache.greeted(0, 0);
            if !hello {
                Holder::NoLeases.taken();
                return Err(Error::new(Code::Disconnected, "the metadata leader has no leases for this connection"));
            }
        }
        match r.map {
            Some(map) => self.install_map(map),
            None => Ok(()),
        }
    }

    /// Background: keeps the session, or replaces a lost one and reopens what is open.
    pub(crate) async fn renew(self: Arc<Self>) {
        let Some(s) = self.current_session() else {
            if self.is_ending() {
                return;
            }
            match self.session().await {
                Ok(_) => self.reopen_all().await,
                Err(e) => tracing::warn!("{e}"),
            }
            return;
        };
        let outcome = match self.leader().await {
            Ok(leader) => match self.renew_on(&leader, &s, false, HELLO_TRY).await {
                Ok(()) => Ok(()),
                Err(e) => {
                    self.leader_failed(&leader, &e).await;
                    Err(e)
                }
            },
            Err(e) => Err(e),
        };
        match outcome {
            Ok(()) => self.answered(Kind::Metadata, ""),
            Err(e) if e.code == Code::NoSession => self.session_gone(&s),
            // The pause is short: this runs again before the term is over.
            Err(e) => tracing::debug!("renewing the session: {e}"),
        }
    }

    /// Ends the session; what is open is closed by that.
    pub(crate) async fn end_session(self: &Arc<Self>) -> Result<()> {
        // Before it is taken away: whoever finds none must not open another.
        self.set_ending();
        let Some(s) = self.session.lock().take() else { return Ok(()) };
        let body = Bytes::from(pb::SessionCloseRequest { session: s.id }.encode_to_vec());
        let mut at = self.attempts_for("closing the session", Duration::from_secs(5));
        match self.mds_call(opcode::SESSION_CLOSE, |_| body.clone(), Duration::from_secs(2), &mut at).await {
            Err(e) if e.code != Code::NoSession => Err(e),
            _ => Ok(()),
        }
    }

    // --- requests ---

    /// `EROFS` for a client that is to change nothing.
    pub(crate) fn may_alter(&self) -> Result<()> {
        if self.read_only.load(Relaxed) {
            return Err(Error::new(Code::RoFs, "the mount is read-only"));
        }
        Ok(())
    }

    /// Runs a list of operations; mutations exactly once. The answer ends with the first failure, if any.
    ///
    /// `EIO` when the session was lost while a mutation was in doubt: it may or may not have run.
    pub(crate) async fn meta(self: &Arc<Self>, creds: &pb::Creds, ops: Vec<pb::Op>) -> Result<Vec<pb::OpResult>> {
        self.meta_within(None, creds, ops).await
    }

    /// As [`Core::meta`], for what makes sense in one session only: `NoSession` when there is another.
    pub(crate) async fn meta_within(
        self: &Arc<Self>,
        only: Option<SessionId>,
        creds: &pb::Creds,
        ops: Vec<pb::Op>,
    ) -> Result<Vec<pb::OpResult>> {
        if alters(&ops) {
            self.may_alter()?;
        }
        let mut at = self.attempts("metadata request");
        let mutation = is_mutation(&ops);
        // What it opens and closes counts once, however often it arrives.
        let counts = ops.iter().any(|o| matches!(o.op, Some(pb::op::Op::Open(_) | pb::op::Op::Close(_))));
        let one_try = if is_resize(&ops) { SHRINK_TRY } else { META_TRY };
        let sent = ops.len();
        let numbers = if mutation && keeps_number(&ops) { handover::numbers() } else { None };
        let mut request = pb::MetaRequest { creds: Some(creds.clone()), ops, ..Default::default() };
        loop {
            let s = self.session().await?;
            if only.is_some_and(|id| id != s.id) {
                return Err(Error::new(Code::NoSession, "the session was lost"));
            }
            let turn = if mutation || counts { Some(s.begin(numbers.as_deref())?) } else { None };
            request.session = s.id;
            request.seq = turn.as_ref().map_or(0, |t| t.1);
            request.lowest_unanswered = s.lowest_unanswered();
            if !mutation && let Some(results) = self.ask_follower(&request).await {
                return Ok(results);
            }
            let mut asking = self.lease_cache.begin(&request.ops);
            request.dropped = std::mem::take(&mut asking.dropped);
            forgotten(asking.forgetting.take()).await;
            let body = request.encode_to_vec();
            let on = |connection| {
                // Fields may come in any order: the number of the connection goes behind the rest.
                let last = pb::MetaRequest { connection, ..Default::default() };
                [&body[..], &last.encode_to_vec()].concat().into()
            };
            let reply = self.mds_call(opcode::META, on, one_try, &mut at).await;
            drop(turn);
            match reply {
                Ok(m) => {
                    let reply = check(decode::<pb::MetaReply>(&m)?, sent)?;
                    asking.answered(self.env.boot(), creds, &request.ops, &reply);
                    if !mutation && self.cfg.follower_reads != FollowerReads::Never {
                        self.followers.told_by_leader(&request.ops, &reply);
                    }
                    return Ok(reply.results);
                }
                Err(e) if e.code == Code::NoSession => {
                    self.session_gone(&s);
                    if at.in_doubt && !is_repeatable(&request.ops) {
                        return Err(e.context("the session was lost and with it the answer"));
                    }
                    at.pause(self, e).await?;
                }
                Err(e) => {
                    if !at.in_doubt && !in_doubt(&e) {
                        asking.never_ran();
                    }
                    return Err(e);
                }
            }
        }
    }
}

/// A reply must be as long as the list, or end with a failure.
pub(crate) fn check(reply: pb::MetaReply, sent: usize) -> Result<pb::MetaReply> {
    let r = &reply.results;
    let failed_at = r.iter().position(|o| o.status.as_ref().is_some_and(|s| s.code != 0));
    match failed_at {
        None if r.len() == sent => Ok(reply),
        Some(i) if i + 1 == r.len() && i < sent => Ok(reply),
        _ => Err(Error::new(Code::Protocol, format!("{} results for {sent} operations", r.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_the_wrong_shape_are_refused() {
        let ok = pb::OpResult::default;
        let bad = || pb::OpResult { status: Some(Error::new(Code::NoEnt, "").to_status()), ..Default::default() };
        let reply = |results| pb::MetaReply { results, granted: Vec::new() };
        assert!(check(reply(vec![ok(), ok()]), 2).is_ok());
        assert!(check(reply(vec![ok(), bad()]), 3).is_ok());
        assert!(check(reply(vec![ok()]), 2).is_err());
        assert!(check(reply(vec![bad(), ok()]), 2).is_err());
        assert!(check(reply(vec![ok(), ok(), ok()]), 2).is_err());
    }

    #[test]
    fn a_read_only_client_alters_nothing() {
        use pb::op::Op::*;
        let op = |op| pb::Op { op: Some(op) };
        let open = |flags| op(Open(pb::Open { ino: 1, flags }));
        for good in [
            open(0),
            open(2),
            op(SetLock(Default::default())),
            op(Release(Default::default())),
            op(Extend(Default::default())),
        ] {
            assert!(!alters(&[good]));
        }
        for bad in [op(Setattr(Default::default())), op(Unlink(Default::default())), op(Setlayout(Default::default()))]
        {
            assert!(alters(std::slice::from_ref(&bad)));
            assert!(alters(&[op(Release(Default::default())), bad]));
        }
    }

    #[test]
    fn reads_have_no_number() {
        use pb::op::Op::*;
        let op = |op| pb::Op { op: Some(op) };
        assert!(!is_mutation(&[op(Getattr(pb::GetAttr { ino: 1 })), op(Open(pb::Open { ino: 1, flags: 0 }))]));
        assert!(is_mutation(&[op(Open(pb::Open { ino: 1, flags: 2 }))]), "it makes the session a writer");
        assert!(is_mutation(&[
            op(Getattr(pb::GetAttr { ino: 1 })),
            op(Extend(pb::Extend { ino: 1, ..Default::default() }))
        ]));
    }
}
