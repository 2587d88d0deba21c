//! The leader's workers at the storage servers: they trim chunks of truncated files and delete
//! chunks of removed files. Both retry until done; a job that cannot be done now does not hold up
//! the rest. A trim that was made is not made again.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::try_join_all,
    stream::{self, FuturesUnordered, StreamExt},
};
use parking_lot::Mutex;
use strake_fabric::{Connection, Message};
use strake_proto::{
    ChunkId, Code, Error, Ino, Result,
    data::{DataReply, DataRequest, FLAG_TOMBSTONE, Version},
    layout::{Cut, StripeMap},
    map::{ChainExt, MapView},
    opcode, pb,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::member::Member;
use crate::trim_progress::{Did, TrimProgress};
use pb::{log_command::Command, op::Op};

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// After this long a file makes way for others, if some wait.
const TURN: Duration = Duration::from_secs(3);
/// Most chains of one file that are asked at the same time.
pub(super) const CHAINS_AT_ONCE: usize = 16;
/// Most files that are trimmed at the same time.
const CUTS_AT_ONCE: usize = 64;
/// Pauses before another try.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Most jobs that wait for another try; more new ones stay in the state.
const MAX_LATER: usize = 4096;
/// How long the reply to a truncation waits until the bytes are gone from every replica.
const TRIM_WAIT: Duration = Duration::from_secs(25);
/// The same for the reply to an open; the client asks again then.
const OPEN_WAIT: Duration = Duration::from_secs(4);
const CUT_POLL: Duration = Duration::from_secs(1);
const DELETE_POLL: Duration = Duration::from_millis(200);

/// Trims that a leader has made in its term.
#[derive(Default)]
pub(super) struct CutsMade {
    term: u64,
    /// Inode and number of the trim.
    cuts: BTreeSet<(Ino, u64)>,
}

impl CutsMade {
    fn begin(&mut self, term: u64) {
        if self.term != term {
            *self = CutsMade { term, ..CutsMade::default() };
        }
    }
}

/// See the module.
pub(super) struct Trims {
    member: Arc<Member>,
    /// A reply waits for a file to be trimmed.
    trim_wanted: Notify,
    cuts_made: Mutex<CutsMade>,
}

impl Trims {
    pub(super) fn new(member: Arc<Member>) -> Trims {
        Trims { member, trim_wanted: Notify::new(), cuts_made: Mutex::default() }
    }

    /// Trims the chunks of truncated files on every chain, and then lets the replies go.
    pub(super) async fn cut_files(&self, term: u64) {
        // Trims that were made but are not in the log yet. Once one is, the file can be written
        // again, and another trim may follow.
        let made = &self.cuts_made;
        made.lock().begin(term);
        let progress = &TrimProgress::default();
        let wanted = |(ino, number): (Ino, u64)| {
            self.member.machine.namespace.backlog().trim_of(ino).is_some_and(|t| t.number == number)
        };
        let list = |n: usize| {
            made.lock().cuts.retain(|cut| wanted(*cut));
            let trims = self.member.machine.namespace.backlog().trims(n);
            if trims.len() < n {
                // These are all trims. A trim that a later one replaced does not continue.
                progress.retain(|number| trims.iter().any(|(_, t, _)| t.number == number));
            }
            trims
                .into_iter()
                .map(|(ino, t, layout)| ((ino, t.number), (ino, t, layout)))
                .collect::<Vec<_>>()
        };
        let job = |(ino, trim, layout): (Ino, pb::Trim, pb::Layout)| async move {
            if !made.lock().cuts.contains(&(ino, trim.number)) {
                self.member.check_fence(trim.fence)?;
                let map = self.member.map();
                let stripes = StripeMap::resolve(ino, &layout, &map)?;
                if trim_chunks(&self.member, &map, &stripes, Some(&trim), (progress, trim.number))
                    .await?
                    == Did::Part
                {
                    return Ok(Did::Part);
                }
                made.lock().cuts.insert((ino, trim.number));
            }
            Ok(Did::All)
        };
        let done = |keys: Vec<(Ino, u64)>| async move {
            let each = |(ino, number)| {
                self.member.propose(Command::TrimDone(pb::TrimDone { ino, number }))
            };
            try_join_all(keys.into_iter().map(each)).await.map(|_| ())
        };
        work_off(
            CUTS_AT_ONCE,
            (CUT_POLL, RETRY_MAX),
            || self.trim_wanted.notified(),
            list,
            job,
            done,
        )
        .await;
    }

    /// Removes all chunks of deleted files.
    pub(super) async fn delete_files(&self) {
        let progress = &TrimProgress::default();
        let list = |n: usize| {
            self.member
                .machine
                .namespace
                .backlog()
                .gc_queue(n)
                .into_iter()
                .map(|(n, r)| (n, (n, r)))
                .collect::<Vec<_>>()
        };
        let job = |(number, r): (u64, pb::GcRecord)| async move {
            let Some(layout) = &r.layout else { return Ok(Did::All) };
            let map = self.member.map();
            let stripes = StripeMap::resolve(r.ino, layout, &map)?;
            fenced_before(&self.member, number, &stripes, &map)?;
            trim_chunks(&self.member, &map, &stripes, None, (progress, number)).await
        };
        let done = |numbers: Vec<u64>| async move {
            self.member.propose(Command::GcDone(pb::GcDone { numbers })).await.map(|_| ())
        };
        work_off(
            self.member.cfg.gc_parallel,
            (DELETE_POLL, RETRY_MAX),
            std::future::pending,
            list,
            job,
            done,
        )
        .await;
    }

    /// Holds the reply to a list that sets sizes or permits writes until no replica has bytes
    /// beyond a truncation any more. They must not reappear when the file grows again, and data
    /// written from now on must not be trimmed.
    pub(super) async fn wait_for_trims(
        &self,
        term: u64,
        ops: &[pb::Op],
        results: &[pb::OpResult],
    ) -> Result<()> {
        for (op, r) in ops.iter().zip(results) {
            let (ino, limit) = match &op.op {
                Some(Op::Setattr(s)) if s.size.is_some() => (s.ino, TRIM_WAIT),
                Some(Op::Extend(e)) => (e.ino, TRIM_WAIT),
                Some(Op::Open(_) | Op::Create(_) | Op::Tmpfile(_)) if r.writer != 0 => {
                    (0, OPEN_WAIT)
                }
                _ => continue,
            };
            self.wait_for_trim(term, if ino == 0 { r.ino } else { ino }, limit).await?;
        }
        Ok(())
    }

    async fn wait_for_trim(&self, term: u64, ino: Ino, limit: Duration) -> Result<()> {
        let mut applied = self.member.machine.applied_watch();
        let mut leadership = self.member.leadership.clone();
        let deadline = tokio::time::Instant::now() + limit;
        while self.member.machine.namespace.backlog().trim_of(ino).is_some() {
            if self.member.leading()? != term {
                return Err(Error::not_leader(0));
            }
            self.trim_wanted.notify_one();
            tokio::select! {
                biased;
                r = applied.changed() => r.map_err(|_| Error::new(Code::Disconnected, "this server is stopping"))?,
                r = leadership.changed() => r.map_err(|_| Error::new(Code::Disconnected, "this server is stopping"))?,
                () = tokio::time::sleep_until(deadline) => {
                    let m = format!("inode {ino:#x} was truncated, but not all replicas have \
                                     dropped the bytes yet");
                    // If it is sent again under the same number, a list that ran continues to wait.
                    return Err(Error::new(if limit < TRIM_WAIT { Code::Overloaded } else { Code::TimedOut }, m));
                }
            }
        }
        Ok(())
    }
}

/// Checks before a deletion, whose number comes from the same counter as evictions, that no write
/// can arrive later and make a chunk without a file. Every session that had the file open closed
/// it, or was evicted before this number was given. Only the file's own chains matter, in the
/// epochs of `map`.
fn fenced_before(member: &Member, number: u64, stripes: &StripeMap, map: &MapView) -> Result<()> {
    for id in stripes.chains.iter().collect::<BTreeSet<_>>() {
        let Some(chain) = map.chain(*id).filter(|c| !c.lost) else { continue };
        // A server that was not heard of knows no eviction. Asked in this order, so that evictions
        // in between count.
        let known = member.with_lead(|l| Ok(l.manager.known_of(chain, map)))?;
        if let Some(eviction) = member
            .machine
            .namespace
            .backlog()
            .eviction_after(known)
            .filter(|eviction| *eviction < number)
        {
            return Err(Error::new(
                Code::Overloaded,
                format!("not all of chain {id} know of eviction {eviction} yet"),
            ));
        }
    }
    Ok(())
}

/// Runs `job` for all that `list` names, at most `parallel` at a time, and passes the finished ones
/// to `done`. Looks for new jobs when woken, after each job and every `poll`. `most`: the longest
/// pause before a retry. Never returns. Jobs that have done a part continue in half of the places,
/// in turns; the other places are for new ones.
pub(super) async fn work_off<K, T, W, J, D>(
    parallel: usize,
    (poll, most): (Duration, Duration),
    wake: impl Fn() -> W,
    list: impl Fn(usize) -> Vec<(K, T)>,
    job: impl Fn(T) -> J,
    done: impl Fn(Vec<K>) -> D,
) where
    K: Ord + Copy + std::fmt::Debug,
    W: Future<Output = ()>,
    J: Future<Output = Result<Did>>,
    D: Future<Output = Result<()>>,
{
    let mut running = FuturesUnordered::new();
    let mut busy: BTreeMap<K, Job> = BTreeMap::new();
    loop {
        let free = parallel - running.len();
        let run_on = busy.values().filter(|job| job.runs_on()).count();
        let mut long = parallel.div_ceil(2).saturating_sub(run_on);
        if free > 0 {
            let now = Instant::now();
            let listed = list(busy.len() + parallel);
            let ready = ready(&mut busy, listed, parallel, now);
            let has_place = |(_, _, begun, _): &Ready<K, T>| !begun || take_one(&mut long);
            for (_, key, _, what) in ready.into_iter().filter(has_place).take(free) {
                busy.entry(key).and_modify(|job| job.at = None);
                let run = job(what);
                running.push(async move { (key, run.await) });
            }
        }
        let wait = Instant::now() + poll;
        let waits = busy.values().filter(|job| !job.begun || long > 0);
        let next_try = waits.filter_map(|job| job.at).min().filter(|_| running.len() < parallel);
        let until =
            next_try.map_or(wait, |t| t.min(wait)).max(Instant::now() + Duration::from_millis(1));
        tokio::select! {
            biased;
            Some((key, result)) = running.next(), if !running.is_empty() => {
                let mut ended = vec![(key, result)];
                while let Some(Some(next)) = running.next().now_or_never() {
                    ended.push(next);
                }
                settle(&mut busy, ended, most, &done).await;
            }
            () = wake() => (),
            () = sleep_until(until) => (),
        }
    }
}

/// A job that may run: since when, its key, whether it has done a part, and what it is.
type Ready<K, T> = (Instant, K, bool, T);

/// The jobs that are due, of those that are listed. Failed jobs must not keep new ones away, nor
/// new ones them: the job that has been due longest is first.
fn ready<K: Ord + Copy, T>(
    busy: &mut BTreeMap<K, Job>,
    listed: Vec<(K, T)>,
    parallel: usize,
    now: Instant,
) -> Vec<Ready<K, T>> {
    let due: BTreeSet<K> = listed.iter().map(|l| l.0).collect();
    busy.retain(|k, job| job.at.is_none() || due.contains(k));
    let mut fresh = busy.values().filter(|job| job.is_fresh()).count();
    let mut ready = Vec::new();
    for (key, what) in listed {
        if !busy.contains_key(&key) {
            if fresh >= parallel || busy.len() >= MAX_LATER {
                continue;
            }
            fresh += 1;
        }
        let job = busy.entry(key).or_insert_with(|| Job::new(now));
        ready.extend(job.at.filter(|at| *at <= now).map(|at| (at, key, job.begun, what)));
    }
    ready.sort_unstable_by_key(|(at, key, ..)| (*at, *key));
    ready
}

/// Notes how jobs ended, and reports those that are finished.
async fn settle<K, D>(
    busy: &mut BTreeMap<K, Job>,
    ended: Vec<(K, Result<Did>)>,
    most: Duration,
    done: &impl Fn(Vec<K>) -> D,
) where
    K: Ord + Copy + std::fmt::Debug,
    D: Future<Output = Result<()>>,
{
    let mut finished = Vec::new();
    for (key, result) in ended {
        match result {
            Ok(Did::All) => finished.push(key),
            Ok(Did::Part) => made_way(busy, key),
            Err(e) => failed(busy, key, &e, most),
        }
    }
    if finished.is_empty() {
        return;
    }
    let reported = done(finished.clone()).await;
    for key in finished {
        match &reported {
            Ok(()) => drop(busy.remove(&key)),
            Err(e) => failed(busy, key, e, most),
        }
    }
}

/// A job that runs or waits.
struct Job {
    /// Since when, or from when on, it waits; `None` while it runs.
    at: Option<Instant>,
    /// The pause before another try, if it fails.
    pause: Duration,
    /// It has done a part.
    begun: bool,
}

impl Job {
    fn new(at: Instant) -> Job {
        Job { at: Some(at), pause: RETRY_MIN, begun: false }
    }

    fn is_fresh(&self) -> bool {
        self.at.is_some() && self.pause == RETRY_MIN && !self.begun
    }

    fn runs_on(&self) -> bool {
        self.at.is_none() && self.begun
    }
}

fn take_one(places: &mut usize) -> bool {
    let some = *places > 0;
    *places -= usize::from(some);
    some
}

fn made_way<K: Ord>(busy: &mut BTreeMap<K, Job>, key: K) {
    busy.insert(key, Job { begun: true, ..Job::new(Instant::now()) });
}

fn failed<K: Ord + Copy + std::fmt::Debug>(
    busy: &mut BTreeMap<K, Job>,
    key: K,
    e: &Error,
    most: Duration,
) {
    tracing::debug!(?key, "will be tried again at the storage servers: {e}");
    let now = Instant::now();
    let job = busy.entry(key).or_insert_with(|| Job::new(now));
    job.at = Some(now + job.pause);
    job.pause = (job.pause * 2).min(most);
}

/// Trims a file's chunks on all its chains, or removes all if its data is gone for good. `number`:
/// that of the job. It makes way for others after a while, and starts nothing more after a failure.
async fn trim_chunks(
    member: &Member,
    map: &MapView,
    stripes: &StripeMap,
    trim: Option<&pb::Trim>,
    (progress, number): (&TrimProgress, u64),
) -> Result<Did> {
    let requests = trim_requests(stripes, trim.map(|t| t.size), map)?;
    let until = progress.has_room(requests.len()).then(|| Instant::now() + TURN);
    let stop = &AtomicBool::new(false);
    let calls = requests.into_iter().map(|(node, first)| async move {
        let at = (number, first.chain);
        let mut step = progress.of(at);
        while !step.is_done(first.epoch) {
            if stop.load(Ordering::Relaxed) || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(Did::Part);
            }
            let conn = member.links.get(&node).await?;
            let request = step.request(&first);
            let reply = match trim {
                None => call(&*conn, &request).await?,
                Some(trim) => cut_once(member, &*conn, stripes.ino, trim, request.clone()).await?,
            };
            step = step.after(&request, &reply)?;
            progress.put(at, step.clone());
        }
        Ok::<Did, Error>(Did::All)
    });
    let mut calls = stream::iter(calls).buffer_unordered(CHAINS_AT_ONCE);
    let (mut did, mut failed) = (Did::All, None);
    while let Some(r) = calls.next().await {
        match r {
            Ok(Did::All) => {}
            Ok(Did::Part) => did = Did::Part,
            Err(e) => {
                // Requests already running at a storage server would be in the way of the next try.
                stop.store(true, Ordering::Relaxed);
                failed.get_or_insert(e);
            }
        }
    }
    if let Some(e) = failed {
        return Err(e);
    }
    if did == Did::All {
        progress.done(number);
    }
    Ok(did)
}

/// One round of a trim: gets a number for it, then trims with that number.
async fn cut_once(
    member: &Member,
    conn: &dyn Connection,
    ino: Ino,
    trim: &pb::Trim,
    request: DataRequest,
) -> Result<DataReply> {
    let term = member.with_lead(|l| Ok(l.term))?;
    let version = Version { epoch: term, number: 0 };
    let number =
        call(conn, &DataRequest { version, seq: 0, ..request.clone() }).await?.version.number;
    if number == 0 {
        return Err(Error::new(
            Code::Protocol,
            "a storage server of an older version truncates without a number",
        ));
    }
    // Checked only now: if the number was given after another trim of the file was done, using it
    // would undo later writes.
    if member.machine.namespace.backlog().trim_of(ino).is_none_or(|t| t.number != trim.number) {
        let m = format!("truncation {} of inode {ino:#x} is complete or was replaced", trim.number);
        return Err(Error::new(Code::Stale, m));
    }
    call(conn, &DataRequest { version, seq: number, ..request }).await
}

async fn call(conn: &dyn Connection, request: &DataRequest) -> Result<DataReply> {
    let reply = conn.call(Message::new(opcode::TRIM, request.encode()), CALL_TIMEOUT).await?;
    DataReply::decode(&reply.body)
}

/// The request to the head of each chain.
fn trim_requests(
    stripes: &StripeMap,
    size: Option<u64>,
    map: &MapView,
) -> Result<Vec<(pb::Node, DataRequest)>> {
    let Cut { first_gone, kept } = stripes.cut(size.unwrap_or(0));
    let flags = if size.is_none() { FLAG_TOMBSTONE } else { 0 };
    // Only one chain has the chunk that keeps some of its bytes.
    let partial = (kept != u32::MAX).then(|| stripes.chain_of(first_gone.saturating_sub(1)));
    let mut chains = stripes.chains.clone();
    chains.sort_unstable();
    chains.dedup();
    let mut out = Vec::with_capacity(chains.len());
    for id in chains {
        let chain = map
            .chain(id)
            .ok_or_else(|| Error::new(Code::Io, format!("chain {id} is not in the map")))?;
        if chain.lost {
            continue; // its data is lost, too
        }
        let head = chain.head().ok_or_else(|| {
            Error::new(Code::NotServing, format!("chain {id} has no replica to ask"))
        })?;
        let node = map
            .node_of(head)
            .ok_or_else(|| Error::new(Code::Io, format!("target {head} has no node")))?;
        let chunk = ChunkId { ino: stripes.ino, data: stripes.data, index: first_gone };
        let len = if partial == Some(id) { kept } else { u32::MAX };
        out.push((
            node.clone(),
            DataRequest { len, flags, ..DataRequest::new(id, chain.epoch, head, chunk) },
        ));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::time::timeout;

    use super::*;

    /// More jobs than are remembered as failed, and few at a time.
    #[tokio::test(start_paused = true)]
    async fn jobs_that_fail_are_tried_again_however_many_and_keep_nobody_away() {
        const ALL: u32 = 5000;
        let (heal, left, slow) = (
            AtomicBool::new(false),
            Mutex::new((0..ALL).collect::<BTreeSet<_>>()),
            AtomicUsize::new(0),
        );
        let list = |n: usize| left.lock().iter().take(n).map(|k| (*k, *k)).collect::<Vec<_>>();
        let job = |k: u32| {
            let (heal, slow) = (&heal, &slow);
            async move {
                if heal.load(Ordering::Relaxed) || k == 40 {
                    return Ok(Did::All);
                }
                if k < 32 {
                    slow.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_secs(2)).await;
                }
                Err(Error::new(Code::Io, "not now"))
            }
        };
        let done = |keys: Vec<u32>| {
            left.lock().retain(|k| !keys.contains(k));
            std::future::ready(Ok(()))
        };
        let work = work_off(16, (CUT_POLL, RETRY_MAX), std::future::pending::<()>, list, job, done);
        let mut work = std::pin::pin!(work);
        assert!(timeout(Duration::from_secs(30), &mut work).await.is_err());
        assert!(!left.lock().contains(&40), "the 32 slow ones before it do not keep it away");
        assert!(slow.load(Ordering::Relaxed) > 32, "they are tried again");
        assert!(timeout(Duration::from_secs(120), &mut work).await.is_err());
        heal.store(true, Ordering::Relaxed);
        assert!(timeout(Duration::from_secs(60), &mut work).await.is_err());
        assert_eq!(left.lock().len(), 0);
    }

    /// More jobs than places, and none of them ends. New ones come all the time.
    #[tokio::test(start_paused = true)]
    async fn long_jobs_take_turns_and_hold_up_no_short_ones() {
        const LONG: u32 = 40;
        let turns = Mutex::new(vec![0; LONG as usize]);
        let short: Mutex<BTreeMap<u32, Instant>> = Mutex::default();
        let worst = Mutex::new(Duration::ZERO);
        let list = |n: usize| {
            let short: Vec<u32> = short.lock().keys().copied().collect();
            (0..LONG).chain(short).take(n).map(|k| (k, k)).collect::<Vec<_>>()
        };
        let job = |k: u32| {
            let turns = &turns;
            async move {
                if k >= LONG {
                    return Ok(Did::All);
                }
                turns.lock()[k as usize] += 1;
                tokio::time::sleep(TURN).await;
                Ok(Did::Part)
            }
        };
        let done = |keys: Vec<u32>| {
            for k in keys {
                let came = short.lock().remove(&k).unwrap();
                let mut worst = worst.lock();
                *worst = came.elapsed().max(*worst);
            }
            std::future::ready(Ok(()))
        };
        let work = work_off(16, (CUT_POLL, RETRY_MAX), std::future::pending::<()>, list, job, done);
        let comes = async {
            // In their first turns they use all places.
            tokio::time::sleep(TURN * 5).await;
            for n in 0..1000 {
                short.lock().insert(LONG + n, Instant::now());
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            tokio::time::sleep(TURN).await;
        };
        tokio::select! {
            () = work => unreachable!(),
            () = comes => {}
        }
        assert_eq!(short.lock().len(), 0);
        assert!(*worst.lock() <= CUT_POLL * 2, "{:?}", worst.lock());
        let turns = turns.lock();
        let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        // 318 s, of which each of them has 8 / 40.
        assert!(*least >= 19 && most - least <= 2, "{turns:?}");
    }
}
