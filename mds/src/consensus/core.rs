//! The protocol: raft-rs with guards, as a state machine without clock, socket, disk or randomness.
//!
//! Inputs are ticks, messages, proposals, reads, and reports that something is persisted or
//! applied. [`Core::ready`] says what to do next. Rules that hold here whatever the driver does:
//!
//! - A message that promises something (a vote, an acknowledgement) leaves only after the promise
//!   is persisted.
//! - Entries are handed out for applying only when committed and persisted in this member's own
//!   log.
//! - Election timeouts come from the seed. raft-rs draws its own from a huge range, so each of its
//!   draws is recognised and replaced.
//! - A restarted member that may have promised something votes for nobody for one election timeout.
//!   A member that has heard from its leader votes for nobody for as long, but for a candidate that
//!   the leader has chosen. The leader's lease rests on both ([`leader_lease`](super::leader_lease)).
//! - A member does not ask to be elected while its state is lost or being replaced, or its disk
//!   takes no writes. If a leader loses its state, it takes no proposals and gives no copies; it
//!   only sends its log on until another member has taken over. Its promises are in its log, and
//!   the log stays: its votes and acknowledgements remain valid.

use std::time::Duration;

use bytes::Bytes;
use protobuf::Message as _;
use raft::{
    CAMPAIGN_TRANSFER, GetEntriesContext, RawNode, ReadOnlyOption, SnapshotStatus, StateRole,
    Storage,
    eraftpb::{
        ConfChangeV2, ConfState, Entry, EntryType, HardState, Message, MessageType, Snapshot,
    },
    storage::RaftState,
};
use strake_proto::{Code, Error, Result, layout::splitmix64};

use super::{
    check,
    leader_lease::{self, LeaderLease, Promise},
    log::{LogImage, LogOp},
    logger::logger,
    types::Config,
};

/// When raft-rs asks to be elected, it reads all committed and unapplied entries at once (limited
/// upstream by #530). With more than this many a member does not ask.
const MAX_UNAPPLIED_AT_ELECTION: u64 = 4096;
/// Bytes of entries in one append message, and in one batch to apply.
const MAX_APPEND: u64 = 1 << 20;
/// raft-rs's own draws are almost surely above this; ours are below.
const OWN_TIMEOUTS: usize = 1 << 20;

/// What raft-rs reads back: the log and the last applied entry.
struct Store {
    image: LogImage,
    conf: ConfState,
    applied: (u64, u64),
}

/// What to do next, in this order: persist `ops`, then call [`Core::persisted`]; send `messages` at
/// once; apply.
#[derive(Default)]
pub struct Output {
    pub number: u64,
    /// `Some`: give it to the log, even if empty, and report it as persisted, in order. `None`:
    /// there is nothing to report.
    pub persist: Option<Vec<LogOp>>,
    /// Make the state received from a peer this member's own, before `persist`: (index, term,
    /// membership).
    pub restore: Option<(u64, u64, ConfState)>,
    pub messages: Vec<Message>,
    /// To be applied in order; then call [`Core::applied`].
    pub committed: Vec<Entry>,
    /// The membership after the last of `committed`, if one of them changed it.
    pub conf_state: Option<ConfState>,
    /// Endpoints of members that `committed` adds.
    pub endpoints: Vec<(u64, String)>,
    /// (number, index): reads that were asked for with this number may be answered once this index
    /// is applied.
    pub reads: Vec<(u64, u64)>,
}

pub struct Core {
    raw: RawNode<Store>,
    id: u64,
    timeouts: (usize, usize),
    rng: u64,
    promise: Promise,
    /// How long the promise lasts at least, as the others are told.
    vote_wait: Duration,
    pub(super) lease: LeaderLease,
    /// The state is being replaced, or is lost: nothing is applied until a snapshot is in.
    lost_state: bool,
    /// The log does not take writes at the moment.
    stalled: bool,
    /// A term, and the last index up to which this log is known to equal that of the term's leader.
    followed: (u64, u64),
    /// How often this member has asked to be elected since it last knew a leader.
    campaigns: u32,
    /// Numbers that the driver has not reported as persisted yet, with the messages that wait for
    /// them.
    waiting: std::collections::VecDeque<(u64, Vec<Message>)>,
    written: HardState,
}

fn oops(e: raft::Error) -> Error {
    Error::new(Code::Io, format!("raft: {e}"))
}

impl Core {
    /// `applied` and `conf` are those of the state machine; `conf` is empty if it never saw a
    /// membership change.
    pub fn new(
        cfg: &Config,
        mut image: LogImage,
        applied: (u64, u64),
        conf: &[u8],
        seed: u64,
    ) -> Result<Core> {
        let conf = if conf.is_empty() {
            ConfState { voters: image.voters.clone(), ..Default::default() }
        } else {
            ConfState::parse_from_bytes(conf)
                .map_err(|_| bad_state("its membership record is unreadable"))?
        };
        let lost_state =
            image.restoring.is_some() || applied.0 < image.base.0 || conf.voters.is_empty();
        if lost_state && conf.voters == [cfg.id] {
            return Err(bad_state(
                "its state is lost and there is no other member to copy it from; restore a backup (docs/operations.md, 'When the group is \
                 lost')",
            ));
        }
        check_applied(&image, applied, lost_state)?;
        let pristine = image.is_pristine();
        let floor = if lost_state { image.base.0 } else { applied.0 };
        image.hard.commit = image.hard.commit.max(floor).min(image.last());
        let written = image.hard.clone();
        let config = raft::Config {
            id: cfg.id,
            election_tick: cfg.election_ticks.0,
            heartbeat_tick: cfg.heartbeat_ticks,
            // While the state is lost nothing is applied, so nothing may be given out for applying.
            applied: if lost_state { image.hard.commit } else { applied.0 },
            max_size_per_msg: MAX_APPEND,
            max_inflight_msgs: cfg.max_inflight,
            check_quorum: true,
            pre_vote: true,
            min_election_tick: cfg.election_ticks.0,
            max_election_tick: usize::MAX / 2,
            read_only_option: ReadOnlyOption::Safe,
            max_uncommitted_size: cfg.max_uncommitted.max(MAX_APPEND),
            max_committed_size_per_ready: MAX_APPEND,
            ..raft::Config::default()
        };
        let raw = RawNode::new(&config, Store { image, conf, applied }, &logger()).map_err(oops)?;
        let mut core = Core {
            raw,
            id: cfg.id,
            timeouts: cfg.election_ticks,
            rng: seed,
            promise: Promise::new(
                cfg.election_ticks.0,
                if pristine { 0 } else { cfg.start_wait_ticks() },
            ),
            vote_wait: cfg.vote_wait(),
            lease: LeaderLease::new(cfg.lease_reads),
            lost_state,
            stalled: false,
            followed: (0, 0),
            campaigns: 0,
            waiting: Default::default(),
            written,
        };
        core.own_timeout();
        if core.conf().voters == [core.id] {
            core.promise = Promise::new(cfg.election_ticks.0, 0);
            core.raw.campaign().map_err(oops)?;
        }
        Ok(core)
    }

    pub fn tick(&mut self) {
        self.promise.tick();
        let raft = &self.raw.raft;
        let fires = raft.state != StateRole::Leader
            && raft.election_elapsed + 1 >= raft.randomized_election_timeout();
        if fires && !self.may_campaign() {
            return;
        }
        self.campaigns = if raft.leader_id != 0 {
            u32::from(fires)
        } else {
            self.campaigns.saturating_add(fires.into())
        };
        self.raw.tick();
        self.ask_for_state();
        self.own_timeout();
    }

    /// A member without a state asks its leader for a copy. raft-rs allows that only when the last
    /// entry is of the leader's term. That may never happen: a leader whose log still begins with
    /// the first entry sends a new member that log, one message at a time, and waits for each
    /// acknowledgement; a member without a state sends none. It is enough that the last entry is in
    /// the leader's log: the copy is no older, so nothing is lost.
    fn ask_for_state(&mut self) {
        // A copy has arrived and is about to be persisted.
        if self.raw.snap().is_some() {
            return;
        }
        let raft = &mut self.raw.raft;
        let nobody = raft.leader_id == 0 || raft.state == StateRole::Leader;
        if !self.lost_state || nobody || raft.pending_request_snapshot != 0 {
            return;
        }
        let last = raft.raft_log.last_index();
        if self.raw.request_snapshot().is_err()
            && last > 0
            && self.followed == (self.raw.raft.term, last)
        {
            // The answer to the next heartbeat carries the request.
            self.raw.raft.pending_request_snapshot = last;
        }
    }

    /// Why a message from a peer would be dropped as improper, `None` if it would not.
    pub fn refuses(&self, m: &Message) -> Option<&'static str> {
        let sent = if m.term == self.followed.0 { self.followed.1 } else { 0 };
        check::refuse(&self.raw.raft, sent, m)
    }

    /// Takes a message from a peer. Improper ones are dropped.
    pub fn step(&mut self, m: Message) {
        use MessageType::*;
        let kind = m.get_msg_type();
        if let Some(why) = self.refuses(&m) {
            tracing::warn!(from = m.from, ?kind, "dropped a raft message that {why}");
            return;
        }
        let may_vote = self.promise.may_vote(m.context == CAMPAIGN_TRANSFER);
        if !may_vote && matches!(kind, MsgRequestVote | MsgRequestPreVote) {
            return;
        }
        if kind == MsgTimeoutNow && !self.may_campaign() {
            return;
        }
        if m.term > self.term() {
            // What an earlier leader was asked for may never exist: let this leader's entries
            // arrive, then ask again.
            self.raw.raft.pending_request_snapshot = 0;
        }
        let (from, term) = (m.from, m.term);
        let last = m.entries.last().map_or((m.index, m.log_term), |e| (e.index, e.term));
        // An error means that the message is from a removed member.
        if let Err(e) = self.raw.step(m) {
            tracing::debug!(from, ?kind, "raft message not accepted: {e}");
        }
        if term == self.term() && from == self.leader() {
            self.promise.heard();
        }
        if kind == MsgAppend
            && term == self.term()
            && self.raw.raft.raft_log.match_term(last.0, last.1)
        {
            let before = if self.followed.0 == term { self.followed.1 } else { 0 };
            self.followed = (term, before.max(last.0));
        }
        if let Some(p) = self.raw.raft.mut_prs().get_mut(from)
            && p.next_idx <= p.matched
        {
            p.next_idx = p.matched + 1;
        }
        self.own_timeout();
    }

    /// Appends entries. Returns the index and the term of the first one; if they are ever applied,
    /// they have that term and consecutive indexes.
    pub fn propose(&mut self, data: impl IntoIterator<Item = Bytes>) -> Result<(u64, u64)> {
        let entries = data.into_iter().map(|d| Entry { data: d, ..Default::default() });
        self.propose_entries(entries.collect())
    }

    /// Proposes a membership change. Refused (`Busy`) while another one is under way.
    pub fn propose_change(&mut self, change: &ConfChangeV2) -> Result<(u64, u64)> {
        if self.raw.raft.has_pending_conf() || !self.raw.store().conf.voters_outgoing.is_empty() {
            return Err(Error::new(
                Code::Busy,
                "another membership change is in progress; try again when it is complete",
            ));
        }
        self.lease.suspend();
        let data = change.write_to_bytes().map_err(|e| Error::new(Code::Inval, e.to_string()))?;
        let mut e = Entry { data: data.into(), ..Default::default() };
        e.set_entry_type(EntryType::EntryConfChangeV2);
        self.propose_entries(vec![e])
    }

    fn propose_entries(&mut self, entries: Vec<Entry>) -> Result<(u64, u64)> {
        if !self.is_leader() {
            return Err(Error::not_leader(self.leader() as u32));
        }
        if self.lost_state {
            return Err(Error::not_leader(0));
        }
        let first = self.raw.raft.raft_log.last_index() + 1;
        let mut m = Message { from: self.id, ..Default::default() };
        m.set_msg_type(MessageType::MsgPropose);
        m.set_entries(entries.into());
        match self.raw.step(m) {
            Ok(()) => Ok((first, self.term())),
            Err(_) => Err(Error::new(
                Code::Overloaded,
                "too many metadata changes wait for a majority; try again",
            )),
        }
    }

    /// Asks for a read index under a number that the caller chooses; see [`Output::reads`]. Only a
    /// leader for which [`Core::can_read`] holds answers. The answer also renews its lease, from
    /// `now` on.
    pub fn read_index(&mut self, number: u64, now: Duration) {
        let is_changing =
            self.raw.raft.has_pending_conf() || !self.conf().voters_outgoing.is_empty();
        if self.is_settled_leader() && !is_changing {
            self.lease.begin(number, self.term(), now);
        }
        self.raw.read_index(number.to_le_bytes().to_vec());
    }
    /// This member leads and has committed an entry of its own term.
    pub fn can_read(&self) -> bool {
        self.is_leader() && !self.lost_state && self.raw.raft.commit_to_current_term()
    }

    /// What to do next, `None` if nothing.
    pub fn ready(&mut self) -> Option<Output> {
        if !self.raw.has_ready() {
            return None;
        }
        let mut rd = self.raw.ready();
        let mut out = Output { number: rd.number(), ..Output::default() };
        let must_sync = rd.must_sync();
        let mut ops = Vec::new();
        let image = &mut self.raw.mut_store().image;
        if let Some(hard) = rd.hs() {
            image.hard = hard.clone();
        }
        if must_sync && image.hard != self.written {
            self.written = image.hard.clone();
            ops.push(LogOp::HardState(image.hard.clone()));
        }
        if !rd.snapshot().is_empty() {
            let meta = rd.snapshot().get_metadata();
            ops.push(LogOp::Reset { index: meta.index, term: meta.term });
            out.restore = Some((meta.index, meta.term, meta.get_conf_state().clone()));
        }
        ops.extend(rd.take_entries().into_iter().map(LogOp::Append));
        for op in &ops {
            // raft-rs's entries follow those it gave before.
            #[allow(clippy::expect_used, reason = "a failure is a bug of raft-rs, not bad input")]
            image.apply(op).expect("raft's own entries are consecutive");
        }
        out.messages = rd.take_messages();
        let mut after = rd.take_persisted_messages();
        out.committed = rd.take_committed_entries();
        out.reads = rd.take_read_states().iter().filter_map(read_number).collect();
        if let Some((number, _)) = out.reads.last() {
            let others = leader_lease::other_voters(self, self.id);
            self.lease.confirm(*number, self.vote_wait, &others);
        }
        if self.lost_state && out.restore.is_none() && self.conf().voters.is_empty() {
            // An acknowledgement would make a new member eligible for promotion, but without a
            // state it cannot serve the group.
            let mute = |m: &Message| m.get_msg_type() != MessageType::MsgAppendResponse || m.reject;
            out.messages.retain(mute);
            after.retain(mute);
        }
        self.raw.advance_append_async(rd);
        if ops.is_empty() && self.waiting.is_empty() {
            self.raw.on_persist_ready(out.number);
            out.messages.append(&mut after);
        } else {
            self.waiting.push_back((out.number, after));
            out.persist = Some(ops);
        }
        if let Some((index, term, conf)) = &out.restore {
            let store = self.raw.mut_store();
            (store.applied, store.conf) = ((*index, *term), conf.clone());
            self.lost_state = false;
        }
        self.take_committed(&mut out);
        self.own_timeout();
        Some(out)
    }

    /// Membership changes take effect as they are handed out. While the state is lost all are
    /// skipped: the snapshot to come includes them.
    fn take_committed(&mut self, out: &mut Output) {
        if self.lost_state {
            if out.committed.iter().any(|e| e.get_entry_type() != EntryType::EntryNormal) {
                // A leader must know the members.
                self.step_down();
            }
            if let Some(last) = out.committed.last().map(|e| e.index) {
                self.raw.advance_apply_to(last);
            }
            out.committed.clear();
            return;
        }
        for i in 0..out.committed.len() {
            let entry = &out.committed[i];
            let change = match entry.get_entry_type() {
                EntryType::EntryNormal => continue,
                // This program never proposes these.
                EntryType::EntryConfChange => continue,
                EntryType::EntryConfChangeV2 => ConfChangeV2::parse_from_bytes(&entry.data),
            };
            let applied = change.map_err(|e| e.to_string()).and_then(|change| {
                out.endpoints.extend(endpoint_of(&change));
                self.raw.apply_conf_change(&change).map_err(|e| e.to_string())
            });
            match applied {
                Ok(conf) => {
                    self.lease.suspend();
                    self.raw.mut_store().conf = conf.clone();
                    out.conf_state = Some(conf);
                    // raft-rs 0.7.0 panics in a leader that has no progress of its own.
                    if self.raw.raft.prs().get(self.id).is_none() {
                        self.step_down();
                    }
                }
                // All members refuse it alike.
                Err(e) => {
                    tracing::warn!(index = entry.index, "membership change not possible: {e}")
                }
            }
        }
    }

    /// Everything up to `number` is durable. Returns the messages that may leave now.
    pub fn persisted(&mut self, number: u64) -> Vec<Message> {
        let mut out = Vec::new();
        while self.waiting.front().is_some_and(|(n, _)| *n <= number) {
            out.extend(self.waiting.pop_front().into_iter().flat_map(|(_, m)| m));
        }
        self.raw.on_persist_ready(number);
        // A persisted snapshot counts as applied.
        let (base, log) = (self.raw.store().image.base.0, &self.raw.raft.raft_log);
        if log.applied < base && log.persisted >= base {
            self.raw.advance_apply_to(base);
        }
        self.own_timeout();
        out
    }

    /// The state machine has applied everything up to here.
    pub fn applied(&mut self, index: u64, term: u64) {
        self.raw.mut_store().applied = (index, term);
        self.raw.advance_apply_to(index);
    }

    /// Forgets entries up to `index`; returns the change to write. `None` if they are not applied
    /// yet, or while the state is lost.
    pub fn cut(&mut self, index: u64) -> Option<LogOp> {
        if self.lost_state || index > self.raw.raft.raft_log.applied {
            return None;
        }
        let image = &mut self.raw.mut_store().image;
        let op = LogOp::Cut { index, term: image.term(index)? };
        (index > image.base.0 && image.apply(&op).is_ok()).then_some(op)
    }

    /// Records another member's log stamp; returns the change to write.
    pub fn note_peer(&mut self, id: u64, stamp: u64) -> LogOp {
        self.raw.mut_store().image.peers.insert(id, stamp);
        LogOp::Peer { id, stamp }
    }

    /// A peer's state as of (index, term) is about to replace this member's; returns the change to
    /// write first.
    pub fn begin_restore(&mut self, index: u64, term: u64) -> LogOp {
        self.lost_state = true;
        self.raw.mut_store().image.restoring = Some((index, term));
        LogOp::Restoring { index, term }
    }

    /// The state is lost: nothing is applied until a copy of the leader's has arrived. `handed`:
    /// the last entry that was handed out and will not be applied. Not for a member that is the
    /// only voter.
    pub fn lose_state(&mut self, handed: Option<u64>) {
        self.lost_state = true;
        // With this, no copy of it is given and no read allowed.
        self.raw.mut_store().applied = (0, 0);
        if let Some(index) = handed {
            self.raw.advance_apply_to(index);
        }
    }

    /// Whether a copy of `from`'s state as of (index, term) is useful: this member follows `from`,
    /// and its own log cannot lead to that state, or its own state is lost. Once raft-rs has asked
    /// for a snapshot, it would accept an older one than it asked for and drop entries that this
    /// member has acknowledged.
    pub fn wants_snapshot(&self, from: u64, index: u64, term: u64) -> bool {
        let asked = self.raw.raft.pending_request_snapshot;
        let news = if asked > 0 { index >= asked } else { self.image().term(index) != Some(term) };
        self.leader() == from
            && term <= self.term()
            && index > 0
            && news
            && (self.lost_state || index > self.committed())
    }

    /// Whether this member's log contains (index, term) already. A snapshot message for it then
    /// only moves the commit index: the leader did not know how long this log is.
    pub fn needs_no_copy(&self, index: u64, term: u64) -> bool {
        let known = index < self.committed() || self.image().term(index) == Some(term);
        known && !self.lost_state && self.raw.raft.pending_request_snapshot == 0
    }

    /// Hands leadership over, if this member leads.
    pub fn transfer(&mut self, to: u64) {
        if self.is_leader() {
            self.lease.give_up(self.term());
            self.raw.transfer_leader(to);
        }
    }
    /// Stops leading at once; the others elect after their timeouts.
    pub fn step_down(&mut self) {
        if self.is_leader() {
            let term = self.term();
            self.raw.raft.become_follower(term, 0);
            self.own_timeout();
        }
    }
    /// While set, this member neither leads nor asks to be elected.
    pub fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
        if stalled {
            self.step_down();
        }
    }
    pub fn report_unreachable(&mut self, to: u64) {
        self.raw.report_unreachable(to);
    }
    pub fn report_snapshot(&mut self, to: u64, ok: bool) {
        self.raw
            .report_snapshot(to, if ok { SnapshotStatus::Finish } else { SnapshotStatus::Failure });
    }

    pub fn is_leader(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }
    /// Leading and not handing over.
    pub fn is_settled_leader(&self) -> bool {
        self.is_leader() && self.raw.raft.lead_transferee.is_none()
    }
    pub fn leader(&self) -> u64 {
        self.raw.raft.leader_id
    }
    pub fn term(&self) -> u64 {
        self.raw.raft.term
    }
    pub fn role(&self) -> StateRole {
        self.raw.raft.state
    }
    pub fn committed(&self) -> u64 {
        self.raw.raft.raft_log.committed
    }
    pub fn applied_to(&self) -> (u64, u64) {
        self.raw.store().applied
    }

    pub fn image(&self) -> &LogImage {
        &self.raw.store().image
    }
    pub fn conf(&self) -> &ConfState {
        &self.raw.store().conf
    }
    pub fn has_lost_state(&self) -> bool {
        self.lost_state
    }
    /// Batches handed out and not yet reported as persisted.
    pub fn unpersisted(&self) -> usize {
        self.waiting.len()
    }
    /// Last index that a follower is known to have. `None` if it is not a member or this member
    /// does not lead.
    pub fn matched(&self, id: u64) -> Option<u64> {
        if !self.is_leader() {
            return None;
        }
        self.raw.raft.prs().get(id).map(|p| p.matched)
    }

    /// Whether this leader has heard that a majority of the voters knows everything up to `index`
    /// to be committed.
    pub fn majority_knows(&self, index: u64) -> bool {
        let (raft, voters) = (&self.raw.raft, &self.conf().voters);
        let knows = |id: &u64| {
            let known = if *id == raft.id {
                raft.raft_log.committed
            } else {
                raft.prs().get(*id).map_or(0, |p| p.committed_index)
            };
            known >= index
        };
        voters.iter().filter(|id| knows(id)).count() * 2 > voters.len()
    }

    /// raft-rs asserts that no write to the disk is outstanding when a member becomes leader.
    fn may_campaign(&self) -> bool {
        let log = &self.raw.raft.raft_log;
        self.promise.has_started()
            && !self.lost_state
            && !self.stalled
            && self.waiting.is_empty()
            && log.persisted == log.last_index()
            && log.committed - log.applied.min(log.committed) <= MAX_UNAPPLIED_AT_ELECTION
    }

    /// The first campaign that gets no answer, or ties with another member's, is repeated after a
    /// shorter time: all have waited for the leader already. Later ones wait the full time, so that
    /// an election succeeds on slow disks and networks, too.
    fn own_timeout(&mut self) {
        let raft = &mut self.raw.raft;
        if raft.randomized_election_timeout() < OWN_TIMEOUTS {
            return;
        }
        let (min, max) = self.timeouts;
        let draw = splitmix64(&mut self.rng) as usize;
        raft.set_randomized_election_timeout(min + draw % (max - min).max(1));
        if self.campaigns == 1
            && matches!(raft.state, StateRole::PreCandidate | StateRole::Candidate)
        {
            let short = min / 4 + draw % (max / 2 - min / 4).max(1);
            // raft-rs accepts no timeout below the minimum, so part of it counts as elapsed.
            raft.election_elapsed = raft.randomized_election_timeout().saturating_sub(short.max(1));
        }
    }
}

/// Whether this member is the only voter: then no other can lead.
pub fn is_only_voter(core: &Core) -> bool {
    let c = core.conf();
    c.voters_outgoing.is_empty() && c.voters == [core.raw.raft.id]
}

/// Endpoints of members added by entries that are applied and still in the log.
pub fn taken_in(core: &Core) -> Vec<(u64, String)> {
    let (applied, _) = core.applied_to();
    let changes = core.image().entries.iter().filter(|e| e.index <= applied);
    let changes = changes.filter(|e| e.get_entry_type() == EntryType::EntryConfChangeV2);
    let at = changes.filter_map(|e| endpoint_of(&ConfChangeV2::parse_from_bytes(&e.data).ok()?));
    let conf = core.conf();
    at.filter(|(id, _)| conf.voters.contains(id) || conf.learners.contains(id)).collect()
}

fn bad_state(m: &str) -> Error {
    Error::new(Code::Corrupt, format!("this metadata server cannot start: {m}"))
}

/// Checks that this log can have produced the state.
fn check_applied(image: &LogImage, applied: (u64, u64), lost_state: bool) -> Result<()> {
    if lost_state {
        return Ok(());
    }
    let fits = match image.term(applied.0) {
        Some(term) => term == applied.1,
        None => false,
    };
    if fits {
        return Ok(());
    }
    Err(bad_state(&format!(
        "its state has applied entry {} of term {}, which its log (entries {} to {}) does not have: the log is damaged \
         or belongs to another state. It must not vote again: replace it (docs/operations.md, 'Changing the group of metadata servers')",
        applied.0,
        applied.1,
        image.first(),
        image.last()
    )))
}

fn read_number(r: &raft::ReadState) -> Option<(u64, u64)> {
    Some((u64::from_le_bytes(r.request_ctx.as_slice().try_into().ok()?), r.index))
}

/// The context of a change that adds a member is `ID=ENDPOINT`.
fn endpoint_of(change: &ConfChangeV2) -> Option<(u64, String)> {
    let (id, endpoint) = std::str::from_utf8(&change.context).ok()?.split_once('=')?;
    Some((id.parse().ok()?, endpoint.to_string()))
}

impl Storage for Store {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState::new(self.image.hard.clone(), self.conf.clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low < self.image.first() {
            return Err(raft::StorageError::Compacted.into());
        }
        if high > self.image.last() + 1 {
            return Err(raft::StorageError::Unavailable.into());
        }
        let limit = max_size.into().unwrap_or(u64::MAX);
        let mut size = 0;
        let mut out = Vec::new();
        for index in low..high {
            let Some(e) = self.image.get(index) else { break };
            size += super::log::entry_cost(e) as u64;
            if size > limit && !out.is_empty() {
                break;
            }
            out.push(e.clone());
        }
        Ok(out)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index < self.image.base.0 {
            return Err(raft::StorageError::Compacted.into());
        }
        self.image.term(index).ok_or_else(|| raft::StorageError::Unavailable.into())
    }
    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.image.first())
    }
    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.image.last())
    }

    /// Only says which state could be sent: the driver sends the data first and then names the
    /// state that it really sent.
    fn snapshot(&self, request_index: u64, _to: u64) -> raft::Result<Snapshot> {
        if self.applied.0 == 0 || self.applied.0 < request_index {
            return Err(raft::StorageError::SnapshotTemporarilyUnavailable.into());
        }
        let mut s = Snapshot::default();
        let meta = s.mut_metadata();
        (meta.index, meta.term) = self.applied;
        meta.set_conf_state(self.conf.clone());
        Ok(s)
    }
}
