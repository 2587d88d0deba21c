//! Repair of a damaged chunk from other in-sync replicas. Only the bytes that are damaged here are
//! fetched, so copies that are damaged in different places repair each other.

use std::{iter, ops::Range, sync::Arc, time::Duration};

use strake_fabric::Buf;
use strake_proto::{
    ChunkId, Code, Error, Result, TargetId,
    data::{DataReply, DataRequest, Version, Writer},
    layout::MAX_CHUNK,
    pb::{self, ReplicaState},
};

use super::{
    copies::{Copies, Part},
    damage::{Outcome, Still},
    links::LIST_ONE,
    replica::Replica,
};
use crate::{
    chain::{OpId, View},
    engine::{Look, Staged, Update},
};

/// If a chunk has more damaged ranges, everything from the first to the last is fetched at once.
const MAX_PARTS: usize = 64;
/// How long a repair waits for updates of its chunk, and how many attempts it makes.
const PATIENCE: Duration = Duration::from_secs(20);
const ATTEMPTS: u32 = 3;

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

/// See the module.
pub(super) struct Repair {
    replica: Arc<Replica>,
    /// Where to look if no replica in sync has a good copy.
    copies: Arc<Copies>,
}

impl Repair {
    pub(super) fn new(replica: Arc<Replica>, copies: Arc<Copies>) -> Arc<Repair> {
        Arc::new(Repair { replica, copies })
    }

    /// Repairs a chunk for a reader of this part, when nothing is in flight for the chunk. Data
    /// known to be lost is not searched again in the same epoch, unless a member that is out of
    /// service may have it.
    pub(super) async fn repair_for_read(&self, chunk: ChunkId, part: Range<u32>) -> Result<()> {
        let lost = self.replica.target.damage.lost_in(
            &self.replica.key(chunk),
            self.replica.view().epoch,
            &part,
        );
        match lost.filter(|_| !self.copies.may_be_found(chunk)) {
            Some(cause) => Err(Error::new(Code::Corrupt, cause)),
            None => self.try_repair(chunk, None).await.map_err(|u| match u.unasked {
                // A possible source did not answer. It will later, or no longer counts.
                true => Error::new(Code::NotServing, u.cause.message),
                false => u.cause,
            }),
        }
    }

    /// Repairs the chunk's header if it is damaged, because an update builds on it. `prev`: the
    /// version that the update builds on, if its sender says so. Errors are left to the update to
    /// report.
    pub(super) async fn prepare(&self, chunk: ChunkId, prev: Option<Version>) {
        let (key, whole) = (self.replica.key(chunk), 0..MAX_CHUNK as u32);
        let headless =
            matches!(self.replica.engine().meta(&key), Err(e) if e.code == Code::Corrupt);
        if headless
            && self.replica.target.damage.lost_in(&key, self.replica.view().epoch, &whole).is_none()
        {
            let _ = self.repair(chunk, prev).await;
        }
    }

    /// As [`Repair::repair_for_read`], even for data known to be lost. `version`: the chunk's version, in
    /// case its header is damaged.
    pub(super) async fn repair(&self, chunk: ChunkId, version: Option<Version>) -> Result<()> {
        self.try_repair(chunk, version).await.map_err(|u| u.cause)
    }

    /// As [`Repair::repair`], if this replica is in sync, several times. An error means that the
    /// chunk was not looked at, because an update of it hangs.
    pub(super) async fn repair_patiently(&self, chunk: ChunkId) -> Result<()> {
        let mut result = Ok(());
        for _ in 0..ATTEMPTS {
            if !self.replica.view().serving() {
                return Ok(());
            }
            result = match tokio::time::timeout(PATIENCE, self.repair(chunk, None)).await {
                Ok(Err(e)) if e.code != Code::Corrupt => Err(e),
                Ok(_) => return Ok(()),
                Err(_) => Err(Error::new(
                    Code::TimedOut,
                    format!("chunk {chunk} has been changing for {PATIENCE:?}"),
                )),
            };
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        result
    }

    async fn try_repair(&self, chunk: ChunkId, version: Option<Version>) -> Result<(), Unrepaired> {
        let epoch = self.replica.view().epoch;
        let _hold = self.replica.hold(chunk, epoch).await?;
        self.repair_held_at(chunk, version).await
    }

    /// Repairs the committed chunk and reports the result. The caller holds the chunk's slot.
    /// `Corrupt` if a repair is not possible now.
    pub(super) async fn repair_held(&self, chunk: ChunkId) -> Result<()> {
        self.repair_held_at(chunk, None).await.map_err(|u| u.cause)
    }

    /// As [`Repair::repair_held`]. `version`: as for [`Repair::repair`].
    pub(super) async fn repair_held_at(
        &self,
        chunk: ChunkId,
        version: Option<Version>,
    ) -> Result<(), Unrepaired> {
        // Taken after the slot: a repair that has a permit waits for no slot.
        let _turn = self.replica.target.repairs.acquire().await;
        let (view, key, now) =
            (self.replica.view(), self.replica.key(chunk), self.replica.ctx.env.unix_ms());
        let look = self
            .replica
            .engine()
            .check_whole(&key)
            .await
            .inspect_err(|e| self.replica.target.cannot_look(e))?;
        let Some(look) = look.filter(|l| !l.is_whole() || l.healed > 0) else {
            // It was repaired or written anew meanwhile.
            self.replica.target.damage.whole(&key);
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
        if view.serving() && self.replica.target.damage.report(key, &look, &outcome, now) {
            self.say(chunk, &look, &outcome);
        }
        match result {
            Ok(_) => Ok(()),
            Err(u) => {
                self.replica.target.note(&u.cause);
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
        let headless = matches!(self.replica.engine().meta(&self.replica.key(chunk)), Err(e) if e.code == Code::Corrupt);
        let may_help = |r: &pb::Replica| match r.state() {
            ReplicaState::ReplicaServing => false,
            ReplicaState::ReplicaSyncing => !headless,
            _ => true,
        };
        let map = self.replica.ctx.map.load();
        match map.chain(self.replica.chain).filter(|c| !c.lost && c.replicas.iter().any(may_help)) {
            Some(_) => Error::new(
                Code::NotServing,
                format!("there is no good copy, and a replica does not answer ({})", e.message),
            ),
            None => e,
        }
    }

    /// Reports the damaged parts of a chunk that a resync brought: its source had no good copy of
    /// them.
    pub(super) fn report_given(&self, r: &DataRequest) {
        let key = self.replica.key(r.chunk);
        if r.damaged.is_empty() {
            return self.replica.target.damage.whole(&key);
        }
        let left = r.damaged.clone();
        let look =
            Look { version: r.version, len: r.len, damaged: left.clone(), ..Look::default() };
        let cause = format!("chunk {} had no good copy when this target was filled", r.chunk);
        let outcome =
            Outcome::Still(Still { epoch: r.epoch, version: r.version, lost: true, left, cause });
        if self.replica.target.damage.report(key, &look, &outcome, self.replica.ctx.env.unix_ms()) {
            self.say(r.chunk, &look, &outcome);
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
        let (ctx, chain, here, look) =
            (self.replica.ctx.clone(), self.replica.chain, self.replica.id, look.clone());
        self.replica.ctx.env.spawn(async move {
            let file = ctx.places.of(&ctx.map.load_full(), chunk).await;
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
        &self,
        view: &View,
        chunk: ChunkId,
        look: &Look,
    ) -> Result<TargetId, Unrepaired> {
        let key = self.replica.key(chunk);
        let meta = self.replica.engine().meta(&key)?.unwrap_or_default();
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
        let (mut data, mut sums, mut at, mut source) = (Vec::new(), Vec::new(), 0, self.replica.id);
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
        &self,
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
            let found = self.copies.search(chunk, version, &blocks).await;
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
            let own = self
                .replica
                .engine()
                .read(&self.replica.key(chunk), part.start, part.end - part.start)
                .await?;
            data.extend(own.data);
            sums.extend(own.sums);
        }
        Ok(())
    }

    /// Stages the chunk as the update leaves it, taken from the successor that has committed it (in
    /// sync or being resynced). For an update that builds on damaged bytes here, of which there may
    /// be no copy left.
    pub(super) async fn take_over(&self, op: OpId, chunk: ChunkId) -> Option<Staged> {
        let (view, version) = (self.replica.view(), self.replica.version_of(op)?);
        let whole = 0..MAX_CHUNK as u32;
        let (r, data) = match view.successor? {
            (to, ReplicaState::ReplicaServing) => {
                self.replica.links.fetch(to, view.epoch, chunk, whole, true).await.ok()?
            }
            (to, _) => self.replica.links.copy_of(to, view.epoch, chunk, whole).await.ok()?,
        };
        if r.version != version {
            return None;
        }
        self.replica
            .engine()
            .stage(self.replica.key(chunk), Update::Rewrite { data, sums: r.sums })
            .await
            .ok()
    }

    /// Replaces a whole chunk whose header is damaged, with this version. If the version is not
    /// known, takes it from a replica where nothing is in flight for the chunk.
    async fn replace(
        &self,
        view: &View,
        chunk: ChunkId,
        known: Option<Version>,
    ) -> Result<TargetId, Unrepaired> {
        let (whole, fits) =
            (0..MAX_CHUNK as u32, |r: &DataReply| known.is_none_or(|v| v == r.version));
        let (from, reply, data) =
            self.ask_others(view, chunk, whole, known.is_some(), fits).await?;
        let entry = self
            .replica
            .links
            .list_of(from, view.epoch, chunk, 1, LIST_ONE)
            .await?
            .into_iter()
            .next();
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
            format!("chunk {chunk} of chain {} has no other copy in sync", self.replica.chain),
        );
        let mut failed =
            Unrepaired { lost: true, unasked: false, busy: false, left: Vec::new(), cause: none };
        for to in view.serving.iter().copied().filter(|t| *t != self.replica.id) {
            let e = match self
                .replica
                .links
                .fetch(to, view.epoch, chunk, part.clone(), even_dirty)
                .await
            {
                Ok((r, data)) if fits(&r) => return Ok((to, r, data)),
                Ok(_) => {
                    Error::new(Code::VersionGap, format!("target {to} has another version of it"))
                }
                // A failing device is that target's own problem.
                Err(e) if e.code == Code::Io => Error::new(
                    Code::NotServing,
                    format!("chunk {chunk} is damaged and target {to} cannot repair it ({e})"),
                ),
                Err(e) => {
                    e.context(format!("chunk {chunk} is damaged and target {to} has no good copy"))
                }
            };
            failed.lost &= e.code == Code::Corrupt;
            failed.unasked |= e.is_retryable();
            failed.cause = e;
        }
        Err(failed)
    }

    async fn put_in(
        &self,
        chunk: ChunkId,
        update: Update,
        version: Version,
        writers: Vec<Writer>,
    ) -> Result<()> {
        let staged = self.replica.engine().stage(self.replica.key(chunk), update).await?;
        self.replica.engine().commit(staged, version, writers).map(drop)
    }
}

/// The damaged ranges as long as nothing is repaired.
pub(super) fn left_of(look: &Look) -> Vec<Range<u32>> {
    if look.headless { iter::once(0..MAX_CHUNK as u32).collect() } else { parts_of(look) }
}

/// The damaged part of a chunk that begins at `start`, as text.
fn place(look: &Look, start: u64) -> String {
    let at = |n: u32| start.saturating_add(u64::from(n));
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
