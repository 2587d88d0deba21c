//! The state machine of one replica of one chain.

use std::{collections::BTreeMap, ops::RangeInclusive};

use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, SessionId,
    data::{BootId, Version, Writer},
    pb::ReplicaState,
};

use super::{
    Committed, Input, Local, MAX_QUEUE, Op, OpId, Outcome, Output, View, What,
    epoch_memory::EpochMemory,
    rows::{Epoch, Event, Progress, Reads},
    slot::{Current, Due, Next, Refusal, Slot, Staging, Update},
};

/// The state machine of one target's part in one chain. It does no I/O and has no clock: what it
/// depends on comes as [`Input`], what is to be done goes out as [`Output`].
#[derive(Clone, Debug, Hash)]
pub struct ChainCore {
    chain: ChainId,
    me: BootId,
    /// The number of the target's start; `me.number` also changes whenever this replica falls out of
    /// sync.
    life: u64,
    view: View,
    /// Epochs up to this one are about an earlier run of this target.
    stale_through: u64,
    /// The predecessor has sent a message in an epoch in which it knew this replica as SERVING.
    confirmed: bool,
    /// Why this target cannot store what its successor has.
    failed: Option<Code>,
    slots: BTreeMap<ChunkId, Slot>,
    /// Chunk of each operation that is in a slot.
    ops: BTreeMap<OpId, ChunkId>,
    /// What was refused, given up and removed in this epoch.
    memory: EpochMemory,
}

fn refuse(op: OpId, code: Code, message: String) -> Output {
    Output::Done { op, outcome: Outcome::Refused(Error::new(code, message)) }
}

impl ChainCore {
    /// `stale_through`: the chain's epoch in the map that this target registered with, if the
    /// target was in the chain then.
    pub fn new(chain: ChainId, me: BootId, stale_through: u64) -> ChainCore {
        ChainCore {
            chain,
            me,
            life: me.number,
            view: View::outside(0),
            stale_through,
            confirmed: false,
            failed: None,
            slots: BTreeMap::new(),
            ops: BTreeMap::new(),
            memory: EpochMemory::default(),
        }
    }

    /// What this replica knows of its chain now.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The boot id that acknowledgements carry. An unchanged one means that this replica stayed in
    /// sync without a restart, and so still has everything it committed.
    pub fn boot_id(&self) -> BootId {
        self.me
    }

    /// Whether this target cannot store what its successor has. It then serves nothing of the chain.
    pub fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// How many chunks have something in flight.
    pub fn busy(&self) -> usize {
        self.slots.len()
    }

    /// The version that the update in a slot will have.
    pub fn version_of(&self, op: OpId) -> Option<Version> {
        match self.slots.get(self.ops.get(&op)?)?.current.as_ref()? {
            Current::Update(u) if u.op == op => Some(u.version),
            _ => None,
        }
    }

    /// Whether a replica that was lost since may have shown readers an update that is in a slot
    /// here. Until it is committed, this replica answers no reads of the chunk. But a replica that
    /// comes into sync behind this one would.
    pub fn owes_shown(&self) -> bool {
        let shown =
            |s: &Slot| matches!(&s.current, Some(Current::Update(u)) if u.shown && !u.dropped);
        self.slots.values().any(shown)
    }

    /// Indices, from `from.index` on, of the file's chunks that have something in flight.
    pub fn busy_from(&self, from: ChunkId) -> Vec<u64> {
        let end = ChunkId { index: u64::MAX, ..from };
        self.slots.range(from..=end).map(|(c, _)| c.index).collect()
    }

    /// From now on no session's update may make a chunk of this data, except those in flight. No
    /// client writes the data any more. But late copies of old writes may arrive, and no chunk is
    /// left that recognizes them. Copies from another epoch are refused for their epoch.
    pub fn data_is_gone(&mut self, data: u64) {
        self.memory.data_is_gone(data);
    }

    /// Whether [`ChainCore::data_is_gone`] was called for this data in this epoch.
    pub fn is_gone(&self, data: u64) -> bool {
        self.memory.is_gone(data)
    }

    /// Takes an input. Returns what is to be done because of it, in this order. `local`: the
    /// committed chunks.
    pub fn handle(&mut self, input: Input, local: &mut dyn Local) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::View(v) => self.new_view(v, local, &mut out),
            Input::Op(op) => self.admit(op, local, &mut out),
            Input::Staged { op, result } => {
                if let Some(u) = self.update(op) {
                    u.staging = result.map_or_else(Staging::Failed, |()| Staging::Ok);
                    self.advance(op, local, &mut out);
                }
            }
            Input::Answer { op, attempt, result } => {
                self.answer(op, attempt, result, local, &mut out)
            }
            Input::Pushed { op, attempt, result } => {
                self.pushed(op, attempt, result, local, &mut out)
            }
            Input::Retry { op, attempt } => {
                if let Some(u) = self
                    .update(op)
                    .filter(|u| u.attempt == attempt && matches!(u.next, Next::Paused))
                {
                    u.next = Next::Idle;
                    self.advance(op, local, &mut out);
                }
            }
            Input::Release { op } => {
                let Some(chunk) = self.ops.remove(&op) else { return out };
                if let Some(s) = self.slots.get_mut(&chunk) {
                    s.current = None;
                }
                self.next_in_queue(chunk, local, &mut out);
            }
        }
        out
    }

    /// Whether the committed bytes of a chunk may be returned to a reader now.
    pub fn read(&self, chunk: &ChunkId, epoch: u64) -> Result<()> {
        self.read_all(chunk..=chunk, epoch)
    }

    /// Whether the committed bytes of all these chunks may be returned to a reader now.
    pub fn read_all(&self, chunks: RangeInclusive<&ChunkId>, epoch: u64) -> Result<()> {
        self.check_epoch(epoch)?;
        if !self.view.serving() {
            Reads::NotServing.taken();
            return Err(self.not_serving("is not in sync here"));
        }
        if !self.confirmed {
            Reads::Unconfirmed.taken();
            return Err(self.not_serving("has just come into sync; ask again"));
        }
        let mut slots = self.slots.range(*chunks.start()..=*chunks.end()).peekable();
        if slots.peek().is_none() {
            Reads::Clean.taken();
        }
        match slots.find(|(_, s)| s.is_dirty(self.view.tail)) {
            None => Ok(()),
            Some((chunk, _)) => Err(Error::new(
                Code::NotServing,
                format!("chunk {chunk} is being changed (dirty); ask the tail"),
            )),
        }
    }

    /// For flushes and other messages of the chain that are not updates: they must carry this
    /// epoch, and this replica must take updates in it.
    pub fn check_member(&self, epoch: u64) -> Result<()> {
        self.check_epoch(epoch)?;
        if self.view.takes_updates() {
            Ok(())
        } else {
            Err(self.not_serving("is not in sync here"))
        }
    }

    /// A message from the predecessor in `epoch` arrived and was accepted.
    pub fn heard_predecessor(&mut self, epoch: u64) {
        self.confirmed |= epoch == self.view.epoch && self.view.serving();
    }

    fn check_epoch(&self, epoch: u64) -> Result<()> {
        if self.failed() {
            return Err(self.not_serving("is on a failed target"));
        }
        if epoch != self.view.epoch {
            let m = format!("chain {}: epoch {epoch} asked, {} here", self.chain, self.view.epoch);
            return Err(Error::new(Code::StaleEpoch, m));
        }
        Ok(())
    }

    fn not_serving(&self, why: &str) -> Error {
        let m = format!(
            "chain {} {why} (target {}, epoch {})",
            self.chain, self.me.target, self.view.epoch
        );
        Error::new(Code::NotServing, m)
    }

    fn update(&mut self, op: OpId) -> Option<&mut Update> {
        let slot = self.slots.get_mut(self.ops.get(&op)?)?;
        match slot.current.as_mut()? {
            Current::Update(u) if u.op == op => Some(u),
            _ => None,
        }
    }

    // --- a new epoch

    fn new_view(&mut self, mut view: View, local: &mut dyn Local, out: &mut Vec<Output>) {
        if view.epoch <= self.view.epoch {
            return;
        }
        if view.epoch <= self.stale_through {
            view = View::outside(view.epoch);
        }
        let was_serving = self.view.serving();
        self.confirmed = view.serving() && (view.head || (was_serving && self.confirmed));
        self.view = view;
        self.memory = EpochMemory::default();
        if let Some(to) = self.view.serving_successor() {
            out.push(Output::Greet { to, epoch: self.view.epoch });
        }
        let keeps =
            matches!(self.view.state, ReplicaState::ReplicaServing | ReplicaState::ReplicaLastsrv);
        if !keeps {
            // A source that lacks some of the committed data may overwrite it.
            self.me.number = self.life ^ self.view.epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // A resync brings what was missing for lack of space, once there is space.
            self.failed.take_if(|why| *why == Code::NoSpc);
        }
        let chunks: Vec<ChunkId> = self.slots.keys().copied().collect();
        for chunk in chunks {
            let Some(slot) = self.slots.get_mut(&chunk) else { continue };
            for op in slot.queue.drain(..) {
                Epoch::QueueStale.taken();
                out.push(refuse(
                    op.id,
                    Code::StaleEpoch,
                    format!("chain {} has a newer epoch", self.chain),
                ));
            }
            let Some(Current::Update(u)) = slot.current.as_mut() else { continue };
            u.new_epoch();
            match (keeps, self.view.takes_updates(), self.view.successor) {
                (true, true, Some(_)) => Epoch::Successor.taken(),
                (true, true, None) => Epoch::Last.taken(),
                (true, false, _) => Epoch::Kept.taken(),
                (false, ..) => Epoch::Dropped.taken(),
            }
            if !keeps && !u.dropped {
                u.dropped = true;
                for id in std::iter::once(u.op).chain(u.also.drain(..)) {
                    out.push(refuse(
                        id,
                        Code::NotServing,
                        format!("chain {} is not in sync here", self.chain),
                    ));
                }
            }
            let op = u.op;
            self.advance(op, local, out);
        }
        debug_assert!(
            self.slots.values().all(|s| s.queue.is_empty()),
            "operations of an earlier epoch wait"
        );
        debug_assert!(
            keeps
                || self.slots.values().all(|s| match &s.current {
                    Some(Current::Update(u)) => u.dropped,
                    _ => true,
                }),
            "a replica out of sync keeps an update that may still be committed"
        );
    }

    // --- into the slot

    fn admit(&mut self, op: Op, local: &mut dyn Local, out: &mut Vec<Output>) {
        if op.epoch > self.view.epoch {
            out.push(Output::RefreshMap);
        }
        if let Err(e) = self.may_enter(&op) {
            out.push(Output::Done { op: op.id, outcome: Outcome::Refused(e) });
            return;
        }
        if let What::Client { session, round, .. } = op.what
            && self.memory.is_late(session, round)
        {
            Event::ClientLate.taken();
            let m = format!(
                "session {session} has given up an update since this one was sent; send it again"
            );
            return out.push(refuse(op.id, Code::Overloaded, m));
        }
        let of_session = matches!(
            op.what,
            What::Client { session: 1.., .. } | What::Forward { session: 1.., .. }
        );
        if of_session && self.is_gone(op.chunk.data) {
            match op.what {
                What::Client { .. } => Event::ClientGone.taken(),
                _ => Event::ForwardGone.taken(),
            }
            return out.push(refuse(
                op.id,
                Code::Stale,
                format!("the data of chunk {} was removed", op.chunk),
            ));
        }
        if matches!(op.what, What::Forward { .. }) {
            self.heard_predecessor(op.epoch);
        }
        let slot = self.slots.entry(op.chunk).or_default();
        if let (Some(Current::Update(u)), What::Forward { version, .. }) =
            (slot.current.as_mut(), &op.what)
            && u.version == *version
            && !u.dropped
        {
            Event::ForwardJoins.taken();
            u.also.push(op.id);
            return;
        }
        if slot.queue.len() >= MAX_QUEUE {
            Event::QueueFull.taken();
            out.push(refuse(
                op.id,
                Code::Overloaded,
                format!("chunk {} has {MAX_QUEUE} updates waiting", op.chunk),
            ));
            return;
        }
        let chunk = op.chunk;
        if slot.current.is_some() {
            match op.what {
                What::Client { .. } => Event::ClientQueues.taken(),
                What::Forward { .. } => Event::ForwardQueues.taken(),
                What::Hold => Event::HoldQueues.taken(),
            }
        }
        slot.queue.push_back(op);
        debug_assert!(slot.queue.len() <= MAX_QUEUE);
        if slot.current.is_none() {
            self.next_in_queue(chunk, local, out);
        }
    }

    fn may_enter(&self, op: &Op) -> Result<()> {
        self.check_member(op.epoch)?;
        match op.what {
            What::Client { .. } if !(self.view.serving() && self.view.head) => {
                Err(self.not_serving("takes updates at its head; this is not its head"))
            }
            What::Forward { .. } if self.view.head => {
                Err(self.not_serving("has its head here; replicas do not forward to the head"))
            }
            _ => Ok(()),
        }
    }

    /// The head got a flush of a session in this round.
    pub fn heard_round(&mut self, epoch: u64, session: SessionId, round: u64) -> Result<()> {
        self.check_member(epoch)?;
        if !(self.view.serving() && self.view.head) {
            return Err(self.not_serving("is flushed at its head; this is not its head"));
        }
        self.memory.is_late(session, round);
        Ok(())
    }

    fn next_in_queue(&mut self, chunk: ChunkId, local: &mut dyn Local, out: &mut Vec<Output>) {
        loop {
            let Some(slot) = self.slots.get_mut(&chunk) else { return };
            if slot.current.is_some() {
                return;
            }
            let Some(op) = slot.queue.pop_front() else {
                self.slots.remove(&chunk);
                return;
            };
            self.start(op, local, out);
        }
    }

    /// Gives the free slot to an operation, or answers it at once.
    fn start(&mut self, op: Op, local: &mut dyn Local, out: &mut Vec<Output>) {
        // A new epoch empties the queues, so an operation starts where it was allowed to enter.
        debug_assert!(
            match op.what {
                What::Client { .. } => self.view.serving() && self.view.head,
                What::Forward { .. } => !self.view.head,
                What::Hold => true,
            },
            "an operation starts at a replica that may not take it"
        );
        debug_assert!(
            self.slots.get(&op.chunk).is_none_or(|s| s.current.is_none()),
            "a chunk has one operation in its slot at a time"
        );
        let current = match op.what {
            What::Hold => {
                Event::HoldGranted.taken();
                out.push(Output::Done { op: op.id, outcome: Outcome::Granted });
                Current::Hold(op.id)
            }
            What::Client { session, seq, replay, .. } => {
                match self.assign(&op, session, seq, replay, local) {
                    Ok(u) => Current::Update(Box::new(u)),
                    Err(outcome) => return out.push(Output::Done { op: op.id, outcome }),
                }
            }
            What::Forward { session, seq, version, prev } => {
                match self.accept(&op, Writer { session, seq, version }, prev, local) {
                    Ok(u) => Current::Update(Box::new(u)),
                    Err(outcome) => return out.push(Output::Done { op: op.id, outcome }),
                }
            }
        };
        let update = matches!(current, Current::Update(_));
        self.ops.insert(op.id, op.chunk);
        self.slots.entry(op.chunk).or_default().current = Some(current);
        if update {
            out.push(Output::Stage { op: op.id });
            self.advance(op.id, local, out);
        }
    }

    /// At the head: answers a repeated update, or gives a new one its version.
    fn assign(
        &self,
        op: &Op,
        session: u64,
        seq: u64,
        replay: Option<Version>,
        local: &dyn Local,
    ) -> Result<Update, Outcome> {
        let now = local.committed(&op.chunk).map_err(Outcome::Refused)?;
        if session != 0
            && let Some(w) = now.writers.iter().find(|w| w.session == session && w.seq == seq)
        {
            Event::ClientKnown.taken();
            return Err(Outcome::Known { version: w.version });
        }
        if let Some(e) = self.memory.refusal_of(session, seq) {
            Event::ClientRefused.taken();
            return Err(Outcome::Refused(e));
        }
        if let Some(first) = replay
            && (!reaches_back(&now, first)
                || now.writers.iter().any(|w| w.version > first && w.session != session))
        {
            Event::ClientOvertaken.taken();
            let m = format!(
                "chunk {} was changed by other clients meanwhile; this write's bytes are lost",
                op.chunk
            );
            return Err(Outcome::Refused(Error::new(Code::Overtaken, m)));
        }
        let epoch = self.view.epoch;
        // A version that a successor was asked to make and refused may reach it once more, so it is
        // never given to another update.
        let spent = self.memory.spent_version(&op.chunk).filter(|v| v.epoch == epoch);
        let spent = spent.map_or(0, |v| v.number);
        let version = Version { epoch, number: now.version.number.max(spent).saturating_add(1) };
        debug_assert!(
            version.number > now.version.number.max(spent) || version.number == u64::MAX,
            "a version names one update"
        );
        Event::ClientStarts.taken();
        Ok(Update::new(op, version, now.version, Writer { session, seq, version }))
    }

    /// At other replicas: takes an update that builds on the version committed here.
    fn accept(
        &mut self,
        op: &Op,
        writer: Writer,
        prev: Version,
        local: &dyn Local,
    ) -> Result<Update, Outcome> {
        let version = writer.version;
        let now = match local.committed(&op.chunk) {
            Ok(c) => c.version,
            Err(e) => {
                self.memory.spend(op.chunk, version, &e);
                return Err(Outcome::Refused(e));
            }
        };
        if now == version {
            Event::ForwardKnown.taken();
            return Err(Outcome::Known { version });
        }
        if writer.session == 0 && now == Version::default() && self.is_gone(op.chunk.data) {
            Event::ForwardForgotten.taken();
            return Err(Outcome::Known { version });
        }
        if let Some(code) = self.memory.refused_version(&op.chunk, version) {
            Event::ForwardRefused.taken();
            let m = format!("version {version:?} of chunk {} was refused here before", op.chunk);
            return Err(Outcome::Refused(Error::new(code, m)));
        }
        if now != prev {
            Event::ForwardGap.taken();
            let m =
                format!("chunk {} is at {now:?} here, but the update builds on {prev:?}", op.chunk);
            return Err(Outcome::Refused(Error::new(Code::VersionGap, m)));
        }
        Event::ForwardStarts.taken();
        Ok(Update::new(op, version, prev, writer))
    }

    // --- through the slot

    /// Does the next steps of the update until it must wait for something.
    fn advance(&mut self, op: OpId, local: &mut dyn Local, out: &mut Vec<Output>) {
        let Some(chunk) = self.ops.get(&op).copied() else { return };
        let (view, me) = (self.view.clone(), self.me);
        let Some(u) = self.update(op) else { return };
        match u.due(&view) {
            Due::Wait => {}
            Due::Forward(to) => {
                u.attempt = u.attempt.wrapping_add(1);
                (u.next, u.exposed) = (Next::Asked, true);
                u.shown |= view.serving_successor() == Some(to);
                let (attempt, version, prev) = (u.attempt, u.version, u.prev);
                out.push(Output::Forward { op, attempt, to, epoch: view.epoch, version, prev });
            }
            Due::Commit(behind) => match u.commit(op, local) {
                Ok(()) => {
                    let version = u.version;
                    self.memory.committed(&chunk);
                    let boot_ids: Vec<BootId> = std::iter::once(me).chain(behind).collect();
                    self.finish(
                        chunk,
                        || Outcome::Applied { version, boot_ids: boot_ids.clone() },
                        local,
                        out,
                    );
                }
                Err(e) => {
                    Progress::CommitFailed.taken();
                    self.fail(e.context("commit of an update failed"), out);
                }
            },
            Due::Refuse(e) => {
                let (writer, told) = (u.writer, u.exposed || !view.head);
                self.remember(writer, &e);
                if told {
                    self.memory.spend(chunk, writer.version, &e);
                }
                self.finish(chunk, || Outcome::Refused(e.clone()), local, out);
            }
            Due::Fail(e) => {
                self.fail(
                    e.context("the successor committed an update that could not be stored here"),
                    out,
                );
            }
            Due::Free => {
                if let Some(s) = self.slots.get_mut(&chunk) {
                    s.current = None;
                }
                self.ops.remove(&op);
                self.next_in_queue(chunk, local, out);
            }
        }
    }

    /// Answers the update in the slot and its repetitions, then starts the next in the queue.
    fn finish(
        &mut self,
        chunk: ChunkId,
        outcome: impl Fn() -> Outcome,
        local: &mut dyn Local,
        out: &mut Vec<Output>,
    ) {
        let Some(slot) = self.slots.get_mut(&chunk) else { return };
        if let Some(Current::Update(u)) = slot.current.take() {
            self.ops.remove(&u.op);
            for id in std::iter::once(u.op).chain(u.also) {
                out.push(Output::Done { op: id, outcome: outcome() });
            }
        }
        self.next_in_queue(chunk, local, out);
    }

    /// Remembers that a client's update was refused, unless the client may retry it.
    fn remember(&mut self, writer: Writer, e: &Error) {
        if writer.session != 0 && self.view.head && !e.is_retryable() {
            self.memory.refused(writer.session, writer.seq, e);
        }
    }

    fn fail(&mut self, reason: Error, out: &mut Vec<Output>) {
        if self.failed.is_none() {
            self.failed = Some(reason.code);
            out.push(Output::Failed { reason });
        }
    }

    fn answer(
        &mut self,
        op: OpId,
        attempt: u32,
        result: Result<Vec<BootId>>,
        local: &mut dyn Local,
        out: &mut Vec<Output>,
    ) {
        let syncing = self.view.syncing_successor();
        let (chain, epoch, me) = (self.chain, self.view.epoch, self.me.target);
        let chunk = self.ops.get(&op).copied();
        let Some(u) =
            self.update(op).filter(|u| u.attempt == attempt && matches!(u.next, Next::Asked))
        else {
            return;
        };
        let error = match result {
            Ok(boot_ids) => {
                if matches!(u.staging, Staging::Pending) {
                    Progress::AnsweredFirst.taken();
                }
                u.next = Next::Done(boot_ids);
                return self.advance(op, local, out);
            }
            Err(e) => e,
        };
        match (Refusal::of(error.code), syncing, chunk) {
            (Refusal::Final, _, _) => {
                u.next = Next::Refused(error);
                return self.advance(op, local, out);
            }
            (Refusal::Gap, Some(to), Some(chunk)) => {
                Progress::Push.taken();
                u.attempt = u.attempt.wrapping_add(1);
                u.next = Next::Pushing;
                return out.push(Output::Push { op, attempt: u.attempt, to, epoch, chunk });
            }
            (Refusal::Gap, _, _) => {
                Progress::Gap.taken();
                // Attempts are 20 ms apart until the chain changes, so not each raises an alarm.
                if u.attempt.is_power_of_two() {
                    let message = format!(
                        "chain {chain} epoch {epoch}: the in-sync successor of target {me} refused version {:?} built \
                         on {:?}: {error}",
                        u.version, u.prev
                    );
                    out.push(Output::Alarm { message });
                }
            }
            (Refusal::Transient, _, _) => {
                Progress::TryAgain.taken();
                if error.code == Code::StaleEpoch {
                    out.push(Output::RefreshMap);
                }
            }
        }
        u.next = Next::Paused;
        out.push(Output::RetryLater { op, attempt: u.attempt });
    }

    fn pushed(
        &mut self,
        op: OpId,
        attempt: u32,
        result: Result<()>,
        local: &mut dyn Local,
        out: &mut Vec<Output>,
    ) {
        let Some(u) =
            self.update(op).filter(|u| u.attempt == attempt && matches!(u.next, Next::Pushing))
        else {
            return;
        };
        match result {
            Ok(()) => {
                u.next = Next::Idle;
                self.advance(op, local, out);
            }
            Err(e) => {
                if e.code == Code::StaleEpoch {
                    out.push(Output::RefreshMap);
                }
                u.next = Next::Paused;
                out.push(Output::RetryLater { op, attempt });
            }
        }
    }
}

/// Whether the remembered writers include every change of the chunk since version `first`. If not,
/// another session that is no longer remembered may have written in between.
fn reaches_back(now: &Committed, first: Version) -> bool {
    let Some(oldest) = now.writers.first().map(|w| w.version) else { return now.version <= first };
    let follows = Version { number: first.number.saturating_add(1), ..first };
    oldest <= first || oldest == follows || oldest.number <= 1
}
