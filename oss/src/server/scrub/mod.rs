//! The scrub: each target reads everything that it holds from time to time, so that damage is found
//! and repaired while there is a good copy, not when the last copy is needed.
//!
//! A pass goes through the chunks of the target's chains in order of their ids, at a limited rate,
//! and more slowly while the target serves requests. It looks at committed data: updates never
//! touch committed blocks, so an update in flight does not look like damage, and a repair waits for
//! it. Chains that are not in sync here are skipped, because they are resynced anyway.

mod state;

use std::{sync::Arc, time::Duration};

pub use state::Ask;
use state::LONGEST_WAIT;
pub(super) use state::Scrub;
use strake_proto::{ChunkId, Code, Result, pb};
use tokio::time::Instant;

use super::{
    chain_member::ChainMember,
    context::Context,
    damage::{Outcome, Still},
    repair::left_of,
    replicas::Replicas,
    target::Target,
};
use crate::engine::STEP;

const PAGE: usize = 256;
/// Pause after the start: the server first brings its chains into sync.
const SETTLE: Duration = Duration::from_secs(30);
/// How often the position is stored, and how often failed repairs are tried again.
const NOTE_EVERY: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(30);
/// What one look costs besides the bytes it reads, in bytes.
const RECORDS: u64 = 4096;
/// How many times slower a pass is while the target serves requests.
const YIELD: u32 = 4;
/// Shorter pauses are accumulated: a timer is no finer than a millisecond.
const NAP: Duration = Duration::from_millis(10);

/// Limits a pass to its rate.
struct Pace {
    owed: Duration,
    /// Requests that the target had served at the last check.
    served: u64,
}

impl Pace {
    async fn take(&mut self, target: &Target, bytes: u64, rate: u64) {
        let usage = target.engine.usage();
        let served = usage.reads + usage.writes;
        let busy = std::mem::replace(&mut self.served, served) != served;
        let Some(us) = (bytes * 1_000_000).checked_div(rate) else {
            return tokio::task::yield_now().await;
        };
        let yields = busy && !target.scrub.state.lock().asked;
        self.owed += Duration::from_micros(us) * if yields { YIELD } else { 1 };
        if self.owed >= NAP {
            target.scrub.nap(std::mem::take(&mut self.owed)).await;
        }
    }
}

/// Scrubs one target for ever.
pub(super) async fn run(ctx: Arc<Context>, replicas: Arc<Replicas>, target: Arc<Target>) {
    let scrub = &target.scrub;
    scrub.nap(SETTLE).await;
    loop {
        let wait = match target.failed() {
            true => Some(LONGEST_WAIT),
            false => scrub.wait(ctx.env.unix_ms(), ctx.cfg.scrub_every_s),
        };
        if let Some(wait) = wait {
            scrub.nap(wait).await;
            continue;
        }
        note(&target);
        scrub.go();
        let result = pass(&ctx, &replicas, &target).await;
        retry_repairs(&ctx, &replicas, &target).await;
        if let Err(e) = &result {
            scrub.is_in_trouble(e);
        }
        if scrub.rest(ctx.env.unix_ms()) {
            tracing::info!("target {}: a pass of the scrub is complete", target.id());
        }
        note(&target);
        if result.is_err() {
            scrub.nap(AGAIN).await;
        }
    }
}

fn note(target: &Target) {
    let position = target.scrub.state.lock().position;
    if let Err(e) = target.engine.notes().note_scrub_position(&position) {
        tracing::warn!("target {}: cannot record the progress of its scrub: {e}", target.id());
    }
}

/// Continues until the pass is complete or something else is requested.
async fn pass(ctx: &Context, replicas: &Replicas, target: &Arc<Target>) -> Result<()> {
    let scrub = &target.scrub;
    let usage = target.engine.usage();
    let mut pace = Pace { owed: Duration::ZERO, served: usage.reads + usage.writes };
    let mut noted = Instant::now();
    while let Some((chain, after)) = scrub.at() {
        if scrub.is_asked() || target.failed() || ctx.stopped() {
            return Ok(());
        }
        let Some(member) = replicas.next(target.id(), chain) else {
            scrub.go_to(None);
            return Ok(());
        };
        let after = after.filter(|_| member.replica.chain == chain);
        if !page(&member, after, &mut pace).await? {
            scrub.go_to(member.replica.chain.checked_add(1).map(|next| (next, None)));
        }
        if noted.elapsed() >= NOTE_EVERY {
            note(target);
            noted = Instant::now();
        }
    }
    Ok(())
}

/// Looks at some chunks of a chain. Returns whether there may be more.
async fn page(member: &ChainMember, after: Option<ChunkId>, pace: &mut Pace) -> Result<bool> {
    let replica = &member.replica;
    let (scrub, view) = (&replica.target.scrub, replica.view());
    if !view.serving() {
        let of_chain = view.state != pb::ReplicaState::ReplicaUnknown;
        scrub.state.lock().skipped += u64::from(of_chain);
        return Ok(false);
    }
    let list =
        match replica.engine().list(replica.chain, after, PAGE) {
            Err(e) if e.code == Code::Corrupt => {
                replica.target.cannot_look(&e);
                scrub.is_in_trouble(&e.context(format_args!(
                    "target {}, chunks of chain {}",
                    replica.id, replica.chain
                )));
                return Ok(false);
            }
            other => other?,
        };
    for entry in &list {
        if !chunk(member, entry.chunk, pace).await? {
            return Ok(true);
        }
        scrub.go_to(Some((replica.chain, Some(entry.chunk))));
    }
    Ok(list.len() == PAGE)
}

/// Looks at a chunk, and has it repaired. Returns `false` if interrupted.
async fn chunk(member: &ChainMember, chunk: ChunkId, pace: &mut Pace) -> Result<bool> {
    let replica = &member.replica;
    let (target, key) = (&replica.target, replica.key(chunk));
    let mut from = 0;
    loop {
        let look = match replica.engine().check(&key, from..from + STEP).await {
            Err(e) if matches!(e.code, Code::Corrupt | Code::Io) => {
                replica.target.cannot_look(&e);
                target.scrub.is_in_trouble(&e);
                return Ok(true);
            }
            other => other?,
        };
        let Some(look) = look else { break };
        target.scrub.state.lock().looked(look.bytes, 0);
        pace.take(target, look.bytes + RECORDS, replica.ctx.cfg.scrub_rate).await;
        if target.scrub.is_asked() {
            return Ok(false);
        }
        if !look.is_whole() {
            if let Err(e) = member.repair.repair_patiently(chunk).await {
                let (epoch, version, left) = (replica.view().epoch, look.version, left_of(&look));
                let still = Still { epoch, version, lost: false, left, cause: e.message };
                target.damage.report(key, &look, &Outcome::Still(still), replica.ctx.env.unix_ms());
            }
            break;
        }
        if look.healed > 0 {
            target.damage.report(key, &look, &Outcome::Repaired(None), replica.ctx.env.unix_ms());
        }
        from += STEP;
        if from >= look.len {
            target.damage.whole(&key);
            break;
        }
    }
    target.scrub.state.lock().looked(0, 1);
    Ok(true)
}

/// Retries failed repairs for ever.
pub(super) async fn retry_repairs_forever(
    ctx: Arc<Context>,
    replicas: Arc<Replicas>,
    target: Arc<Target>,
) {
    loop {
        tokio::time::sleep(AGAIN).await;
        retry_repairs(&ctx, &replicas, &target).await;
    }
}

/// Retries failed repairs of chunks whose chain has other replicas now, or that were written anew.
async fn retry_repairs(ctx: &Context, replicas: &Replicas, target: &Target) {
    for (key, still) in target.damage.open() {
        let member = replicas.next(target.id(), key.chain).filter(|r| r.replica.chain == key.chain);
        let Some(member) = member.filter(|_| !target.failed()) else { continue };
        let given_up = ctx.map.load().chain(key.chain).is_some_and(|c| c.lost);
        if given_up || member.replica.view().state == pb::ReplicaState::ReplicaUnknown {
            target.damage.whole(&key); // the target left the chain, or the chain was given up
            continue;
        }
        let unchanged = match target.engine.meta(&key) {
            Ok(m) => m.is_some_and(|m| m.version == still.version),
            Err(_) => true,
        };
        if !(still.lost && unchanged && still.epoch == member.replica.view().epoch) {
            // An update that hangs is no problem: the next round tries again.
            let _ = member.repair.repair_patiently(key.chunk).await;
        }
    }
}

/// The state of a target's scrub, for `strake scrub status`.
pub(super) fn status(ctx: &Context, target: &Target) -> pb::ScrubStatus {
    let (usage, counts) = (target.engine.usage(), target.damage.counts());
    let (findings, left_out) = target.damage.findings();
    let s = target.scrub.state.lock();
    let p = &s.position;
    let left = if p.at.is_some() { usage.used.saturating_sub(p.bytes) } else { 0 };
    let done = s
        .since
        .filter(|_| s.running)
        .map(|(since, from)| (p.bytes.saturating_sub(from), since.elapsed().as_millis() as u64));
    // The measured rate says more than the limit.
    let eta_s = match done {
        Some((bytes, ms)) if bytes > 0 && ms > 1000 => left / (bytes * 1000 / ms).max(1),
        _ => left.checked_div(ctx.cfg.scrub_rate).unwrap_or(0),
    };
    pb::ScrubStatus {
        target: target.id(),
        pass: p.pass,
        under_way: p.at.is_some() && !target.failed(),
        running: !target.failed() && (s.running || matches!(s.ask, Some(Ask::Start | Ask::Resume))),
        paused: s.paused || s.ask == Some(Ask::Stop),
        bytes: p.bytes,
        bytes_total: usage.used.max(p.bytes),
        chunks: p.chunks,
        chunks_total: usage.chunks.max(p.chunks),
        eta_s,
        began_ms: p.began_ms,
        ended_ms: p.ended_ms,
        took_ms: p.took_ms,
        skipped_chains: s.skipped,
        trouble: if target.failed() {
            format!("target {} has failed", target.id())
        } else {
            s.trouble.clone()
        },
        damaged: counts.damaged,
        repaired: counts.repaired,
        lost: counts.lost,
        findings,
        findings_left_out: left_out,
        rate: ctx.cfg.scrub_rate,
        every_s: ctx.cfg.scrub_every_s,
    }
}
