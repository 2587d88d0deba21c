//! The scrub: each target reads everything that it holds from time to time, so that damage is found
//! and repaired while there is a good copy, not when the last copy is needed.
//!
//! A pass goes through the chunks of the target's chains in order of their ids, at a limited rate,
//! and more slowly while the target serves requests. It looks at committed data: updates never
//! touch committed blocks, so an update in flight does not look like damage, and a repair waits for
//! it. Chains that are not in sync here are skipped, because they are resynced anyway.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::{ChainId, ChunkId, Code, Error, Result, pb};
use tokio::{sync::Notify, time::Instant};

use super::{
    damage::{Outcome, Still},
    node::{Node, Target},
    repair::left_of,
    replica::Replica,
};
use crate::engine::{Position, STEP};

const PAGE: usize = 256;
/// Pause after the start: the server first brings its chains into sync.
const SETTLE: Duration = Duration::from_secs(30);
/// How often the position is stored, and how often failed repairs are tried again.
const NOTE_EVERY: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(30);
/// Longest sleep: wall clocks jump, so the time is checked again after so long.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// What one look costs besides the bytes it reads, in bytes.
const RECORDS: u64 = 4096;
/// How many times slower a pass is while the target serves requests.
const YIELD: u32 = 4;
/// Shorter pauses are accumulated: a timer is no finer than a millisecond.
const NAP: Duration = Duration::from_millis(10);
/// How long a repair waits for updates of its chunk, and how many attempts it makes.
const PATIENCE: Duration = Duration::from_secs(20);
const ATTEMPTS: u32 = 3;

/// Requests of an administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Start a pass at the first chunk now, without regard to other requests.
    Start,
    /// Stop, until one of the others is requested or the server restarts.
    Stop,
    /// Continue a stopped pass.
    Resume,
}

#[derive(Default)]
struct State {
    position: Position,
    ask: Option<Ask>,
    /// The current pass was requested.
    asked: bool,
    paused: bool,
    running: bool,
    /// When this server began or resumed this pass, and the pass's bytes at that time.
    since: Option<(Instant, u64)>,
    /// Chains that were not in sync when their turn came.
    skipped: u64,
    /// Why this pass could not look at everything.
    trouble: String,
}

/// The scrub of one target.
pub(super) struct Scrub {
    state: Mutex<State>,
    news: Notify,
}

impl Scrub {
    /// Continues where an earlier run of the server stopped.
    pub(super) fn new(position: Position) -> Scrub {
        Scrub { state: Mutex::new(State { position, ..State::default() }), news: Notify::new() }
    }

    pub(super) fn ask(&self, what: Ask) {
        self.state.lock().ask = Some(what);
        self.news.notify_one();
    }

    /// `None`: a pass continues or begins now. Otherwise how long there is nothing to do.
    fn wait(&self, now_ms: u64, every_s: u64) -> Option<Duration> {
        let mut s = self.state.lock();
        match s.ask.take() {
            Some(Ask::Start) => {
                s.begin(now_ms, true);
                return None;
            }
            Some(Ask::Stop) => s.paused = true,
            Some(Ask::Resume) => (s.paused, s.asked) = (false, s.position.at.is_some()),
            None => {}
        }
        if s.position.at.is_some() && !s.paused {
            return None;
        }
        if s.paused || every_s == 0 {
            return Some(LONGEST_WAIT);
        }
        s.position.began_ms = s.position.began_ms.min(now_ms);
        let due = s.position.began_ms.saturating_add(every_s.saturating_mul(1000));
        if s.position.pass > 0 && now_ms < due {
            return Some(Duration::from_millis(due - now_ms).min(LONGEST_WAIT));
        }
        s.begin(now_ms, false);
        None
    }

    /// Whether a request is pending.
    fn is_asked(&self) -> bool {
        self.state.lock().ask.is_some()
    }

    async fn nap(&self, long: Duration) {
        tokio::select! {
            biased;
            () = self.news.notified() => {}
            () = tokio::time::sleep(long) => {}
        }
    }

    fn at(&self) -> Option<(ChainId, Option<ChunkId>)> {
        self.state.lock().position.at
    }

    fn go_to(&self, at: Option<(ChainId, Option<ChunkId>)>) {
        self.state.lock().position.at = at;
    }

    fn go(&self) {
        let mut s = self.state.lock();
        (s.running, s.since) = (true, Some((Instant::now(), s.position.bytes)));
    }

    /// Ends or interrupts the pass. Returns whether it is complete.
    fn rest(&self, now_ms: u64) -> bool {
        let mut s = self.state.lock();
        s.running = false;
        let p = &mut s.position;
        let complete = p.at.is_none();
        if complete {
            (p.ended_ms, p.took_ms) = (now_ms, now_ms.saturating_sub(p.began_ms));
            s.asked = false;
        }
        complete
    }

    fn is_in_trouble(&self, what: &Error) {
        tracing::error!("the scrub leaves something out: {what}");
        self.state.lock().trouble = what.to_string();
    }
}

impl State {
    fn begin(&mut self, now_ms: u64, asked: bool) {
        let p = &mut self.position;
        (p.pass, p.began_ms, p.chunks, p.bytes, p.at) = (p.pass + 1, now_ms, 0, 0, Some((0, None)));
        (self.asked, self.paused, self.skipped) = (asked, false, 0);
        self.trouble.clear();
        self.since = None;
    }
}

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
pub(super) async fn run(node: Arc<Node>, target: Arc<Target>) {
    let scrub = &target.scrub;
    scrub.nap(SETTLE).await;
    loop {
        let wait = match target.failed() {
            true => Some(LONGEST_WAIT),
            false => scrub.wait(node.env.unix_ms(), node.cfg.scrub_every_s),
        };
        if let Some(wait) = wait {
            scrub.nap(wait).await;
            continue;
        }
        note(&target);
        scrub.go();
        let result = pass(&node, &target).await;
        heal_once(&node, &target).await;
        if let Err(e) = &result {
            scrub.is_in_trouble(e);
        }
        if scrub.rest(node.env.unix_ms()) {
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
    if let Err(e) = target.engine.note_scrub_position(&position) {
        tracing::warn!("target {}: cannot write down how far its scrub is: {e}", target.id());
    }
}

/// Continues until the pass is complete or something else is requested.
async fn pass(node: &Arc<Node>, target: &Arc<Target>) -> Result<()> {
    let scrub = &target.scrub;
    let usage = target.engine.usage();
    let mut pace = Pace { owed: Duration::ZERO, served: usage.reads + usage.writes };
    let mut noted = Instant::now();
    while let Some((chain, after)) = scrub.at() {
        if scrub.is_asked() || target.failed() || node.stopped() {
            return Ok(());
        }
        let Some(replica) = node.next_replica(target.id(), chain) else {
            scrub.go_to(None);
            return Ok(());
        };
        let after = after.filter(|_| replica.chain == chain);
        if !page(&replica, after, &mut pace).await? {
            scrub.go_to(replica.chain.checked_add(1).map(|next| (next, None)));
        }
        if noted.elapsed() >= NOTE_EVERY {
            note(target);
            noted = Instant::now();
        }
    }
    Ok(())
}

/// Looks at some chunks of a chain. Returns whether there may be more.
async fn page(replica: &Arc<Replica>, after: Option<ChunkId>, pace: &mut Pace) -> Result<bool> {
    let (scrub, view) = (&replica.target.scrub, replica.view());
    if !view.serving() {
        let of_chain = view.state != pb::ReplicaState::ReplicaUnknown;
        scrub.state.lock().skipped += u64::from(of_chain);
        return Ok(false);
    }
    let list =
        match replica.engine().list(replica.chain, after, PAGE) {
            Err(e) if e.code == Code::Corrupt => {
                replica.cannot_look(&e);
                scrub.is_in_trouble(&e.context(format_args!(
                    "target {}, chunks of chain {}",
                    replica.id, replica.chain
                )));
                return Ok(false);
            }
            other => other?,
        };
    for entry in &list {
        if !chunk(replica, entry.chunk, pace).await? {
            return Ok(true);
        }
        scrub.go_to(Some((replica.chain, Some(entry.chunk))));
    }
    Ok(list.len() == PAGE)
}

/// Looks at a chunk, and has it repaired. Returns `false` if interrupted.
async fn chunk(replica: &Arc<Replica>, chunk: ChunkId, pace: &mut Pace) -> Result<bool> {
    let (target, key) = (&replica.target, replica.key(chunk));
    let mut from = 0;
    loop {
        let look = match replica.engine().check(&key, from..from + STEP).await {
            Err(e) if matches!(e.code, Code::Corrupt | Code::Io) => {
                replica.cannot_look(&e);
                target.scrub.is_in_trouble(&e);
                return Ok(true);
            }
            other => other?,
        };
        let Some(look) = look else { break };
        target.scrub.state.lock().position.bytes += look.bytes;
        pace.take(target, look.bytes + RECORDS, replica.node.cfg.scrub_rate).await;
        if target.scrub.is_asked() {
            return Ok(false);
        }
        if !look.is_whole() {
            if let Err(e) = mend(replica, chunk).await {
                let (epoch, version, left) = (replica.view().epoch, look.version, left_of(&look));
                let still = Still { epoch, version, lost: false, left, cause: e.message };
                target.damage.report(
                    key,
                    &look,
                    &Outcome::Still(still),
                    replica.node.env.unix_ms(),
                );
            }
            break;
        }
        if look.healed > 0 {
            target.damage.report(key, &look, &Outcome::Repaired(None), replica.node.env.unix_ms());
        }
        from += STEP;
        if from >= look.len {
            target.damage.whole(&key);
            break;
        }
    }
    target.scrub.state.lock().position.chunks += 1;
    Ok(true)
}

/// Has a chunk repaired and reported, if this replica is in sync. An error means that it was not
/// looked at, because an update of it hangs.
pub(super) async fn mend(replica: &Arc<Replica>, chunk: ChunkId) -> Result<()> {
    let mut result = Ok(());
    for _ in 0..ATTEMPTS {
        if !replica.view().serving() {
            return Ok(());
        }
        result = match tokio::time::timeout(PATIENCE, replica.mend(chunk, None)).await {
            Ok(Err(e)) if e.code != Code::Corrupt => Err(e),
            Ok(_) => return Ok(()),
            Err(_) => Err(Error::new(
                Code::TimedOut,
                format!("chunk {chunk} is being changed for {PATIENCE:?}"),
            )),
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    result
}

/// Retries failed repairs for ever.
pub(super) async fn heal(node: Arc<Node>, target: Arc<Target>) {
    loop {
        tokio::time::sleep(AGAIN).await;
        heal_once(&node, &target).await;
    }
}

/// Retries failed repairs of chunks whose chain has other replicas now, or that were written anew.
async fn heal_once(node: &Node, target: &Target) {
    for (key, still) in target.damage.open() {
        let replica = node.next_replica(target.id(), key.chain).filter(|r| r.chain == key.chain);
        let Some(replica) = replica.filter(|_| !target.failed()) else { continue };
        let given_up = node.map.load().chain(key.chain).is_some_and(|c| c.lost);
        if given_up || replica.view().state == pb::ReplicaState::ReplicaUnknown {
            target.damage.whole(&key); // the target left the chain, or the chain was given up
            continue;
        }
        let unchanged = match target.engine.meta(&key) {
            Ok(m) => m.is_some_and(|m| m.version == still.version),
            Err(_) => true,
        };
        if !(still.lost && unchanged && still.epoch == replica.view().epoch) {
            // An update that hangs is no problem: the next round tries again.
            let _ = mend(&replica, key.chunk).await;
        }
    }
}

/// The state of a target's scrub, for `strake scrub status`.
pub(super) fn status(node: &Node, target: &Target) -> pb::ScrubStatus {
    let (usage, counts) = (target.engine.usage(), target.damage.counts());
    let (findings, left_out) = target.damage.findings();
    let s = target.scrub.state.lock();
    let p = &s.position;
    let left = if p.at.is_some() { usage.used.saturating_sub(p.bytes) } else { 0 };
    let done = s
        .since
        .filter(|_| s.running)
        .map(|(since, from)| (p.bytes - from, since.elapsed().as_millis() as u64));
    // The measured rate says more than the limit.
    let eta_s = match done {
        Some((bytes, ms)) if bytes > 0 && ms > 1000 => left / (bytes * 1000 / ms).max(1),
        _ => left.checked_div(node.cfg.scrub_rate).unwrap_or(0),
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
        rate: node.cfg.scrub_rate,
        every_s: node.cfg.scrub_every_s,
    }
}
