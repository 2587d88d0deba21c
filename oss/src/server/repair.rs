//! Repair of a damaged chunk from other in-sync replicas. Only the bytes that are damaged here are
//! fetched, so copies that are damaged in different places repair each other.

use std::{iter, ops::Range, sync::Arc};

use strake_fabric::{Buf, Message};
use strake_proto::{
    ChunkId, Code, Error, Result, TargetId,
    data::{DataReply, DataRequest, Kind, Version, Writer},
    layout::MAX_CHUNK,
    opcode,
    pb::{self, ReplicaState},
};

use super::{
    copies::Part,
    damage::{Outcome, Still},
    peers::Lane,
    replica::Replica,
    resync::LIST_ONE,
};
use crate::{
    chain::{OpId, View},
    engine::{Look, Staged, Update},
};

/// If a chunk has more damaged ranges, everything from the first to the last is fetched at once.
const MAX_PARTS: usize = 64;

/// Why a chunk was not repaired.
pub(super) struct Unrepaired {
    /// Every in-sync replica and every other possible source was asked, and none has a good copy.
    pub lost: bool,
    /// Some possible source did not answer. It will later, or it leaves the chain.
    pub unasked: bool,
    /// An update of the chunk is staged.
    pub busy: bool,
    /// What is still damaged; empty if that is everything that was damaged.
    left: Vec<Range<u32>>,
    pub cause: Error,
}

impl From<Error> for Unrepaired {
    /// A failure on this side tells nothing about other copies.
    fn from(cause: Error) -> Unrepaired {
        let (unasked, busy) = (cause.is_retryable(), cause.code == Code::Busy);
        Unrepaired { lost: false, unasked, busy, left: Vec::new(), cause }
    }
}

impl Replica {
    /// Repairs a chunk for a reader of this part, when nothing is in flight for the chunk. Data
    /// known to be lost is not searched again in the same epoch, unless a member that is out of
    /// service may have it.
    pub(super) async fn repair(self: &Arc<Self>, chunk: ChunkId, part: Range<u32>) -> Result<()> {
        let lost = self.target.damage.lost_in(&self.key(chunk), self.view().epoch, &part);
        match lost.filter(|_| !self.may_be_found(chunk)) {
            Some(cause) => Err(Error::new(Code::Corrupt, cause)),
            None => self.try_mend(chunk, None).await.map_err(|u| match u.unasked {
                // A possible source did not answer. It will later, or no longer counts.
                true => Error::new(Code::NotServing, u.cause.message),
                false => u.cause,
            }),
        }
    }

    /// Repairs the chunk's header if it is damaged, because an update builds on it. `prev`: the
    /// version that the update builds on, if its sender says so. Errors are left to the update to
    /// report.
    pub(super) async fn prepare(self: &Arc<Self>, chunk: ChunkId, prev: Option<Version>) {
        let (key, whole) = (self.key(chunk), 0..MAX_CHUNK as u32);
        let headless = matches!(self.engine().meta(&key), Err(e) if e.code == Code::Corrupt);
        if headless && self.target.damage.lost_in(&key, self.view().epoch, &whole).is_none() {
            let _ = self.mend(chunk, prev).await;
        }
    }

    /// As [`Replica::repair`], even for data known to be lost. `version`: the chunk's version, in
    /// case its header is damaged.
    pub(super) async fn mend(
        self: &Arc<Self>,
        chunk: ChunkId,
        version: Option<Version>,
    ) -> Result<()> {
        self.try_mend(chunk, version).await.map_err(|u| u.cause)
    }

    async fn try_mend(
        self: &Arc<Self>,
        chunk: ChunkId,
        version: Option<Version>,
    ) -> Result<(), Unrepaired> {
        let epoch = self.view().epoch;
        let _hold = self.hold(chunk, epoch).await?;
        self.repair_as(chunk, version).await
    }

    /// Repairs the committed chunk and reports the result. The caller holds the chunk's slot.
    /// `Corrupt` if a repair is not possible now.
    pub(super) async fn repair_held(self: &Arc<Self>, chunk: ChunkId) -> Result<()> {
        self.repair_as(chunk, None).await.map_err(|u| u.cause)
    }

    /// As [`Replica::repair_held`]. `version`: as for [`Replica::mend`].
    pub(super) async fn repair_as(
        self: &Arc<Self>,
        chunk: ChunkId,
        version: Option<Version>,
    ) -> Result<(), Unrepaired> {
        // Taken after the slot: a repair that has a permit waits for no slot.
        let _turn = self.target.repairs.acquire().await;
        let (view, key, now) = (self.view(), self.key(chunk), self.node.env.unix_ms());
        let look = self.engine().check_whole(&key).await.inspect_err(|e| self.cannot_look(e))?;
        let Some(look) = look.filter(|l| !l.is_whole() || l.healed > 0) else {
            // It was repaired or written anew meanwhile.
            self.target.damage.whole(&key);
            return Ok(());
        };
        let result = if look.headless {
            self.replace(&view, chunk, version).await.map(Some)
        } else if look.is_whole() {
            Ok(None) // its records go to the store again from memory
        } else {
            self.patch(&view, chunk, &look).await.map(Some)
        };
        let outcome = match &result {
            Ok(from) => Outcome::Repaired(*from),
            Err(u) => {
                let left = if u.left.is_empty() { left_of(&look) } else { u.left.clone() };
                let (epoch, version, cause) = (view.epoch, look.version, u.cause.message.clone());
                Outcome::Still(Still { epoch, version, lost: u.lost, left, cause })
            }
        };
        // A replica that is not in sync is resynced in any case.
        if view.serving() && self.target.damage.report(key, &look, &outcome, now) {
            self.say(chunk, &look, &outcome);
        }
        match result {
            Ok(_) => Ok(()),
            Err(u) => {
                self.target.note(&u.cause);
                Err(Unrepaired { cause: Error::new(Code::Corrupt, u.cause.message), ..u })
            }
        }
    }

    /// The error for a client that reads bytes of which no in-sync replica has a good copy. While a
    /// replica that may have them is away, the client waits for it, as for a chain with no replica.
    pub(super) fn told_damaged(&self, chunk: ChunkId, e: Error) -> Error {
        if e.code != Code::Corrupt {
            return e;
        }
        // A replica being resynced gets no chunk without a header. So it is not in sync, and no
        // help, until the header is repaired.
        let headless =
            matches!(self.engine().meta(&self.key(chunk)), Err(e) if e.code == Code::Corrupt);
        let may_help = |r: &pb::Replica| match r.state() {
            ReplicaState::ReplicaServing => false,
            ReplicaState::ReplicaSyncing => !headless,
            _ => true,
        };
        let map = self.node.map.load();
        match map.chain(self.chain).filter(|c| !c.lost && c.replicas.iter().any(may_help)) {
            Some(_) => Error::new(
                Code::NotServing,
                format!("no good copy is there, and a replica is away ({})", e.message),
            ),
            None => e,
        }
    }

    /// Reports the damaged parts of a chunk that a resync brought: its source had no good copy of
    /// them.
    pub(super) fn report_given(&self, r: &DataRequest) {
        let key = self.key(r.chunk);
        if r.damaged.is_empty() {
            return self.target.damage.whole(&key);
        }
        let left = r.damaged.clone();
        let look =
            Look { version: r.version, len: r.len, damaged: left.clone(), ..Look::default() };
        let cause = format!("chunk {} had no good copy when this target was filled", r.chunk);
        let outcome =
            Outcome::Still(Still { epoch: r.epoch, version: r.version, lost: true, left, cause });
        if self.target.damage.report(key, &look, &outcome, self.node.env.unix_ms()) {
            self.say(r.chunk, &look, &outcome);
        }
    }

    /// The chunk table itself cannot be read in places, which no copy of a chunk repairs. If all
    /// its chains can continue without it, the target leaves them, and comes back empty if the
    /// table is damaged (`refused_targets.rs`). Otherwise it serves what it can.
    pub(super) fn cannot_look(&self, e: &Error) {
        if matches!(e.code, Code::Corrupt | Code::Io) && !self.node.is_last(self.id) {
            self.target.cannot_be_read(e);
        }
    }

    /// Logs one line, with the file's path if the metadata servers return it soon.
    fn say(&self, chunk: ChunkId, look: &Look, outcome: &Outcome) {
        let then = match outcome {
            Outcome::Repaired(Some(from)) => format!("repaired from {from}"),
            Outcome::Still(s) if s.lost => format!("with no good copy: {}", s.cause),
            Outcome::Still(s) => format!("not repaired yet: {}", s.cause),
            Outcome::Repaired(None) | Outcome::Gone => return,
        };
        let is_lost = matches!(outcome, Outcome::Still(s) if s.lost);
        let (node, chain, here, look) = (self.node.clone(), self.chain, self.id, look.clone());
        self.node.env.spawn(async move {
            let file = node.places.of(&node.map.load_full(), chunk).await;
            let (file, at) = match file {
                Ok((path, start)) => (path, place(&look, start)),
                Err(e) => (
                    format!("inode {} (no path: {})", chunk.ino, e.message),
                    format!("{} of the chunk", place(&look, 0)),
                ),
            };
            let what = format!(
                "{file}: {at}, chunk {chunk} of chain {chain}, damaged on target {here}, {then}"
            );
            if is_lost {
                tracing::error!("{what}");
            } else {
                tracing::warn!("{what}");
            }
        });
    }

    /// Takes damaged parts from elsewhere and the rest from here. Parts with a good copy are
    /// repaired even if others have none.
    async fn patch(
        self: &Arc<Self>,
        view: &View,
        chunk: ChunkId,
        look: &Look,
    ) -> Result<TargetId, Unrepaired> {
        let key = self.key(chunk);
        let meta = self.engine().meta(&key)?.unwrap_or_default();
        let (mut good, failed) = self.gather(view, chunk, meta.version, look).await;
        if let Some(mut failed) = failed {
            for p in good {
                let update = Update::Write { offset: p.at.start, data: p.data, sums: p.sums };
                if let Err(e) = self.put_in(chunk, update, meta.version, Vec::new()).await {
                    (failed.lost, failed.busy, failed.cause) =
                        (false, failed.busy || e.code == Code::Busy, e);
                    failed.left.push(p.at);
                }
            }
            return Err(failed);
        }
        good.sort_by_key(|p| p.at.start);
        let (mut data, mut sums, mut at, mut source) = (Vec::new(), Vec::new(), 0, self.id);
        for p in good {
            self.own(chunk, at..p.at.start, &mut data, &mut sums).await?;
            data.extend(p.data);
            sums.extend(p.sums);
            (at, source) = (p.at.end, p.from);
        }
        self.own(chunk, at..look.len, &mut data, &mut sums).await?;
        self.put_in(
            chunk,
            Update::Replace { data, sums, tombstone: false, damaged: Vec::new() },
            meta.version,
            meta.writers,
        )
        .await?;
        Ok(source)
    }

    /// Good copies of the damaged parts: from in-sync replicas, else from others. Also returns why
    /// some are missing.
    async fn gather(
        self: &Arc<Self>,
        view: &View,
        chunk: ChunkId,
        version: Version,
        look: &Look,
    ) -> (Vec<Part>, Option<Unrepaired>) {
        let (mut good, mut failed) = (Vec::new(), None::<Unrepaired>);
        for bad in parts_of(look) {
            let mut e = match self.borrow(view, chunk, version, bad.clone()).await {
                Ok((from, r, data)) => {
                    good.push(Part { at: bad, from, data, sums: r.sums });
                    continue;
                }
                Err(e) => e,
            };
            let within = |d: &&Range<u32>| bad.start <= d.start && d.end <= bad.end;
            let blocks: Vec<Range<u32>> = look.damaged.iter().filter(within).cloned().collect();
            let found = self.search(chunk, version, &blocks).await;
            good.extend(found.parts);
            if found.left.is_empty() {
                continue;
            }
            if let Some(cause) = found.unasked {
                (e.lost, e.unasked, e.cause) = (false, true, cause);
            }
            let f = failed.get_or_insert(Unrepaired {
                lost: true,
                unasked: false,
                left: Vec::new(),
                ..e
            });
            (f.lost, f.unasked) = (f.lost && e.lost, f.unasked || e.unasked);
            f.left.extend(found.left);
        }
        (good, failed)
    }

    /// Appends a part that is intact here.
    pub(super) async fn own(
        &self,
        chunk: ChunkId,
        part: Range<u32>,
        data: &mut Vec<Buf>,
        sums: &mut Vec<u32>,
    ) -> Result<()> {
        if part.start < part.end {
            let own =
                self.engine().read(&self.key(chunk), part.start, part.end - part.start).await?;
            data.extend(own.data);
            sums.extend(own.sums);
        }
        Ok(())
    }

    /// Stages the chunk as the update leaves it, taken from the successor that has committed it (in
    /// sync or being resynced). For an update that builds on damaged bytes here, of which there may
    /// be no copy left.
    pub(super) async fn take_over(&self, op: OpId, chunk: ChunkId) -> Option<Staged> {
        let (view, version) = (self.view(), self.version_of(op)?);
        let whole = 0..MAX_CHUNK as u32;
        let (r, data) = match view.successor? {
            (to, ReplicaState::ReplicaServing) => {
                self.fetch(to, view.epoch, chunk, whole, true).await.ok()?
            }
            (to, _) => self.copy_of(to, chunk, whole).await.ok()?,
        };
        if r.version != version {
            return None;
        }
        self.engine().stage(self.key(chunk), Update::Rewrite { data, sums: r.sums }).await.ok()
    }

    /// Replaces a whole chunk whose header is damaged, with this version. If the version is not
    /// known, takes it from a replica where nothing is in flight for the chunk.
    async fn replace(
        self: &Arc<Self>,
        view: &View,
        chunk: ChunkId,
        known: Option<Version>,
    ) -> Result<TargetId, Unrepaired> {
        let (whole, fits) =
            (0..MAX_CHUNK as u32, |r: &DataReply| known.is_none_or(|v| v == r.version));
        let (from, reply, data) =
            self.ask_others(view, chunk, whole, known.is_some(), fits).await?;
        let entry = self.list_of(from, view.epoch, chunk, 1, LIST_ONE).await?.into_iter().next();
        let (version, tombstone) =
            entry.map_or((Version::default(), true), |e| (e.version, e.tombstone));
        if version != reply.version {
            let m = format!("chunk {chunk} changed on target {from} while it was fetched");
            return Err(Error::new(Code::NotServing, m).into());
        }
        let (data, sums) = if tombstone { (Vec::new(), Vec::new()) } else { (data, reply.sums) };
        self.put_in(
            chunk,
            Update::Replace { data, sums, tombstone, damaged: Vec::new() },
            version,
            Vec::new(),
        )
        .await?;
        Ok(from)
    }

    /// Fetches a part of the chunk at this version.
    async fn borrow(
        &self,
        view: &View,
        chunk: ChunkId,
        version: Version,
        part: Range<u32>,
    ) -> Result<(TargetId, DataReply, Vec<Buf>), Unrepaired> {
        let len = part.end - part.start;
        self.ask_others(view, chunk, part, true, |r| r.version == version && r.len == len).await
    }

    /// The first fitting answer of another in-sync replica. `even_dirty`: the caller knows which
    /// version it wants, so the replica may answer while an update is in flight.
    async fn ask_others(
        &self,
        view: &View,
        chunk: ChunkId,
        part: Range<u32>,
        even_dirty: bool,
        fits: impl Fn(&DataReply) -> bool,
    ) -> Result<(TargetId, DataReply, Vec<Buf>), Unrepaired> {
        let none = Error::new(
            Code::Corrupt,
            format!("chunk {chunk} of chain {} has no other copy in sync", self.chain),
        );
        let mut failed =
            Unrepaired { lost: true, unasked: false, busy: false, left: Vec::new(), cause: none };
        for to in view.serving.iter().copied().filter(|t| *t != self.id) {
            let e = match self.fetch(to, view.epoch, chunk, part.clone(), even_dirty).await {
                Ok((r, data)) if fits(&r) => return Ok((to, r, data)),
                Ok(_) => {
                    Error::new(Code::VersionGap, format!("target {to} has another version of it"))
                }
                // A failing device is that target's own problem.
                Err(e) if e.code == Code::Io => Error::new(
                    Code::NotServing,
                    format!("chunk {chunk} is damaged and target {to} fails ({e})"),
                ),
                Err(e) => {
                    e.context(format!("chunk {chunk} is damaged and target {to} could not help"))
                }
            };
            failed.lost &= e.code == Code::Corrupt;
            failed.unasked |= e.is_retryable();
            failed.cause = e;
        }
        Err(failed)
    }

    async fn fetch(
        &self,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
        part: Range<u32>,
        even_dirty: bool,
    ) -> Result<(DataReply, Vec<Buf>)> {
        let kind = if even_dirty { Kind::Replace } else { Kind::None };
        let (offset, len) = (part.start, part.end - part.start);
        let r = DataRequest { kind, offset, len, ..DataRequest::new(self.chain, epoch, to, chunk) };
        self.call(to, Lane::Other, Message::new(opcode::READ, r.encode())).await
    }

    async fn put_in(
        &self,
        chunk: ChunkId,
        update: Update,
        version: Version,
        writers: Vec<Writer>,
    ) -> Result<()> {
        let staged = self.engine().stage(self.key(chunk), update).await?;
        self.engine().commit(staged, version, writers).map(drop)
    }
}

/// The damaged ranges as long as nothing is repaired.
pub(super) fn left_of(look: &Look) -> Vec<Range<u32>> {
    if look.headless { iter::once(0..MAX_CHUNK as u32).collect() } else { parts_of(look) }
}

/// The damaged part of a chunk that begins at `start`, as text.
fn place(look: &Look, start: u64) -> String {
    let at = |n: u32| start + u64::from(n);
    match &look.damaged[..] {
        [] => "its record".into(),
        [one] => format!("bytes {} to {}", at(one.start), at(one.end)),
        [first, .., last] => {
            format!(
                "{} places in bytes {} to {}",
                look.damaged.len(),
                at(first.start),
                at(last.end)
            )
        }
    }
}

/// The ranges to fetch: the damaged ones, at most [`MAX_PARTS`].
fn parts_of(look: &Look) -> Vec<Range<u32>> {
    match &look.damaged[..] {
        [first, .., last] if look.damaged.len() > MAX_PARTS => {
            iter::once(first.start..last.end).collect()
        }
        parts => parts.to_vec(),
    }
}
