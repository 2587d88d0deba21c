//! `strake target list|wait|drain|keep|remove|replace`: where data lies, and moving it to other
//! targets. The metadata leader moves it (`docs/replication.md`, "Moves"); these commands request
//! moves and show their progress.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_mds::cluster::{
    moves::{
        MOVES, is_moving,
        target_action::{DRAIN, GIVE_UP, REMOVE},
    },
    slow::words,
};
use strake_proto::{
    ChainId, Code, Error, Result, TargetId,
    map::{ChainExt, MapView},
    pb,
};
use strake_runtime::ClientKey;
use strake_term::{size, span, table};

use crate::{
    add_target::{self, AddArgs},
    address::Place,
    answers::{percent, slow_json, unix_ms},
    losses,
    members::{Group, Reach, UNFINISHED, passes},
    scrub::{self, Damage},
    servers::storage_admin,
};
use pb::members_request::Change;
pub(crate) use strake_mds::cluster::moves::target_action::KEEP;

#[derive(Subcommand)]
pub enum Command {
    /// Add a target to a storage server while it serves.
    Add(AddArgs),
    /// Show targets, how full they are, and what is moving.
    List(ListArgs),
    /// Wait until no data moves between targets any more, for example after a target was added.
    /// Shows the progress.
    Wait(ListArgs),
    /// Move all data of targets to other targets while the file system is in use. Waits for the
    /// end.
    Drain(DrainArgs),
    /// Cancel a drain: data that has not moved yet stays. Also takes back a target that was given
    /// up.
    Keep(TargetsArgs),
    /// Declare that dead targets never come back. Data that only they had is lost: programs get EIO
    /// for it instead of waiting.
    GiveUp(TargetsArgs),
    /// Remove stopped targets that hold no needed data from the cluster.
    Remove(TargetsArgs),
    /// Move the data of one target to another one. What that one cannot take moves elsewhere.
    Replace(ReplaceArgs),
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct TargetsArgs {
    /// Targets, by number.
    #[arg(required = true)]
    target: Vec<TargetId>,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct DrainArgs {
    #[command(flatten)]
    targets: TargetsArgs,
    /// Do not wait; the drain goes on by itself.
    #[arg(long)]
    no_wait: bool,
}

#[derive(Args)]
pub struct ReplaceArgs {
    /// The target to empty.
    old: TargetId,
    /// The target that takes its data.
    new: TargetId,
    #[command(flatten)]
    reach: Reach,
    /// Do not wait; the move goes on by itself.
    #[arg(long)]
    no_wait: bool,
}

const LOOK: Duration = Duration::from_millis(400);
/// If nothing moves for this long, nothing will: it is longer than any pause between two moves.
const STUCK: Duration = Duration::from_secs(15);
/// If nothing has moved for this long, nothing will: it is longer than a leader takes to plan the
/// next move from heartbeats.
const SETTLED: Duration = Duration::from_secs(5);

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Add(a) => add_target::run(&a),
        Command::List(a) => {
            act_by(Group::to_list(&a.reach)?, a.reach.json, async |_| Ok(Vec::new()))
        }
        Command::Wait(a) => act(&a.reach, wait),
        Command::Drain(a) => {
            let (ids, wait) = (a.targets.target, !a.no_wait);
            act(&a.targets.reach, async |g| drain(g, &ids, None, wait).await)
        }
        Command::Keep(a) => act(&a.reach, async |g| keep(g, &a.target).await),
        Command::GiveUp(a) => act(&a.reach, async |g| give_up(g, &a.target).await),
        Command::Remove(a) => act(&a.reach, async |g| remove(g, &a.target).await),
        Command::Replace(a) => {
            act(&a.reach, async |g| drain(g, &[a.old], Some(a.new), !a.no_wait).await)
        }
    }
}

/// Makes the change, then prints the messages about it and all targets.
pub(crate) fn act(
    reach: &Reach,
    work: impl AsyncFnOnce(&mut Group) -> Result<Vec<String>>,
) -> Result<ExitCode> {
    act_by(Group::new(reach)?, reach.json, work)
}

fn act_by(
    mut group: Group,
    json: bool,
    work: impl AsyncFnOnce(&mut Group) -> Result<Vec<String>>,
) -> Result<ExitCode> {
    crate::run(1, async {
        let outcome: Result<_> = async {
            let said = work(&mut group).await?;
            Ok((said, group.map().await?, group.ask(None).await?.slow))
        }
        .await;
        group.done();
        match outcome {
            Ok((said, map, slow)) if json => println!("{:#}", as_json(&map, &slow, &said)),
            Ok((said, map, slow)) => {
                said.iter().for_each(|line| println!("{line}"));
                print!("{}{}", rows(&map, &slow), slowness(&map, &slow, unix_ms()));
            }
            Err(e) if e.code == Code::TimedOut => {
                eprintln!(
                    "strake: {e}; what was accepted goes on by itself: `strake target list` shows \
                     the progress"
                );
                return Ok(ExitCode::from(UNFINISHED));
            }
            Err(e) => return Err(e),
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Makes a change, waiting while errors are temporary. `EBUSY`, when something is in the way, is
/// returned.
async fn change(g: &mut Group, c: pb::TargetChange) -> Result<()> {
    loop {
        match g.ask_once(Some(Change::Target(c))).await {
            Err(e) if passes(&e) && e.code != Code::Busy => g.pause(&e.message).await?,
            r => return r.map(drop),
        }
    }
}

pub(crate) async fn change_each(
    g: &mut Group,
    ids: &[TargetId],
    action: u32,
    what: &str,
) -> Result<Vec<String>> {
    let mut said = Vec::new();
    for target in ids {
        change(g, pb::TargetChange { target: *target, action, heir: None, slow: None }).await?;
        said.push(format!("target {target} {what}"));
    }
    Ok(said)
}

/// Removes targets one after the other. Targets that an earlier call removed are not an error: it
/// may have failed at the next one, or its answer was lost.
pub(crate) async fn remove(g: &mut Group, ids: &[TargetId]) -> Result<Vec<String>> {
    let mut said = Vec::new();
    for target in ids {
        match change_each(g, &[*target], REMOVE, "is no longer a target").await {
            Err(e) if e.code == Code::NoEnt && *target < g.map().await?.map.next_target => {
                said.push(format!("target {target} was removed before"));
            }
            r => said.append(&mut r?),
        }
    }
    Ok(said)
}

fn lost(map: &MapView) -> BTreeSet<ChainId> {
    map.map.chains.iter().filter(|c| c.lost).map(|c| c.id).collect()
}

/// Gives targets up, and returns which files that costs.
async fn give_up(g: &mut Group, ids: &[TargetId]) -> Result<Vec<String>> {
    let before = lost(&g.map().await?);
    let damaged = without_good_copy(&g.place).await?;
    let mut said = change_each(
        g,
        ids,
        GIVE_UP,
        "is given up; its data is copied from other replicas where they have it",
    )
    .await?;
    said.extend(of_damage(damaged));
    let new: BTreeSet<ChainId> = lost(&g.map().await?).difference(&before).copied().collect();
    if !new.is_empty() {
        said.push(format!(
            "no other target had chains {}. Those without file data start anew by themselves. \
             These files have lost their data on the others (EIO):",
            list(&new)
        ));
        said.extend(files_on(&g.place, &new).await);
    }
    Ok(said)
}

/// Keeps targets, and returns which files that brings back.
async fn keep(g: &mut Group, ids: &[TargetId]) -> Result<Vec<String>> {
    let before = lost(&g.map().await?);
    let mut said = change_each(g, ids, KEEP, "stays").await?;
    let now = lost(&g.map().await?);
    let back: BTreeSet<ChainId> = before.difference(&now).copied().collect();
    if !back.is_empty() {
        said.push(format!(
            "chains {} are waited for again, with the data of these files there. Bytes that were \
             truncated meanwhile come back, too:",
            list(&back)
        ));
        said.extend(files_on(&g.place, &back).await);
    }
    Ok(said)
}

async fn files_on(place: &Place, chains: &BTreeSet<ChainId>) -> Vec<String> {
    losses::files_on(&place.mds, ClientKey::of(&place.key), chains).await
}

/// Messages about damage when a target is given up: each part only where there is some.
fn of_damage(damage: Damage) -> Vec<String> {
    let mut said = Vec::new();
    if !damage.lost.is_empty() {
        said.push(
            "a target that is given up may hold the only good copy of data that is damaged \
             elsewhere (`strake target keep` takes it back):"
                .into(),
        );
        said.extend(damage.lost);
    }
    if !damage.unknown.is_empty() {
        said.push("not all storage servers could be asked about damage:".into());
        said.extend(damage.unknown);
    }
    said
}

/// The damaged files without a good copy among the targets that answer.
async fn without_good_copy(place: &Place) -> Result<Damage> {
    let (servers, unknown) = storage_admin(place).await?;
    let mut damage = scrub::without_good_copy(servers, place.mds.clone(), place.key).await;
    damage.unknown.extend(unknown.iter().map(|(_, e)| format!("  {e}")));
    Ok(damage)
}

fn list(chains: &BTreeSet<ChainId>) -> String {
    chains.iter().map(ChainId::to_string).collect::<Vec<_>>().join(", ")
}

pub(crate) async fn drain(
    g: &mut Group,
    ids: &[TargetId],
    heir: Option<TargetId>,
    wait: bool,
) -> Result<Vec<String>> {
    for target in ids {
        change(g, pb::TargetChange { target: *target, action: DRAIN, heir, slow: None }).await?;
    }
    let names = || ids.iter().map(TargetId::to_string).collect::<Vec<_>>().join(", ");
    if !wait {
        return Ok(vec![format!("targets {} are being emptied", names())]);
    }
    let (start, mut first, mut moved) = (Instant::now(), None, (0, Instant::now()));
    loop {
        let map = g.map().await?;
        if let Some(t) = ids.iter().find(|id| map.target(**id).is_none_or(|t| !t.draining)) {
            return Err(Error::new(
                Code::Busy,
                format!("target {t} is to stay after all, or was removed"),
            ));
        }
        let left: Vec<Held> = ids.iter().map(|id| Held::of(&map, *id)).collect();
        let (all, moving) =
            (left.iter().map(|h| h.all).sum(), left.iter().map(|h| h.leaving).sum::<usize>());
        if all == 0 {
            return Ok(vec![format!(
                "targets {} are empty: stop them, then `strake target remove {}`",
                names(),
                names().replace(", ", " ")
            )]);
        }
        let first = *first.get_or_insert(all);
        if all != moved.0 || is_under_way(&map, ids) {
            moved = (all, Instant::now());
        } else if moved.1.elapsed() > STUCK {
            return Err(stuck(&map, ids));
        }
        let bytes = ids.iter().filter_map(|id| map.target(*id)).map(|t| t.used).sum();
        g.pause(&progress(first, all, moving, bytes, start.elapsed())).await?;
        tokio::time::sleep(LOOK).await;
    }
}

fn progress(first: usize, left: usize, moving: usize, bytes: u64, taken: Duration) -> String {
    let done = first.saturating_sub(left);
    let eta = match done {
        0 => String::new(),
        n => format!(", about {} s more", (taken.as_secs_f64() / n as f64 * left as f64).ceil()),
    };
    format!(
        "{done} of {first} replicas have moved, {moving} on their way, {} still there{eta}",
        size(bytes)
    )
}

/// Waits until all chains are at rest with all of their copies, and stay so for a while: the leader
/// looks once a second for a better placement.
async fn wait(g: &mut Group) -> Result<Vec<String>> {
    let (start, mut first, mut rests) = (Instant::now(), None, Instant::now());
    loop {
        let map = g.map().await?;
        let moving = map
            .map
            .chains
            .iter()
            .filter(|c| !c.lost && (is_moving(c) || is_filled(&map, c)))
            .count();
        if moving > 0 {
            rests = Instant::now();
        } else if rests.elapsed() > SETTLED {
            return Ok(vec!["nothing moves".into()]);
        }
        let left = uneven(&map);
        let first: u64 = *first.get_or_insert(left);
        g.pause(&format!(
            "{moving} chains on their way, {}",
            evening(first, left, start.elapsed())
        ))
        .await?;
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether a replica on a living target is still to come into sync.
fn is_filled(map: &MapView, c: &pb::Chain) -> bool {
    let comes = |r: &pb::Replica| {
        r.state() != pb::ReplicaState::ReplicaServing
            && map.target(r.target).is_some_and(|t| t.alive)
    };
    c.replicas.iter().any(comes)
}

/// Bytes that would have to move until all targets that are alive and not draining are equally
/// full.
fn uneven(map: &MapView) -> u64 {
    let stay: Vec<&pb::Target> =
        map.map.targets.iter().filter(|t| t.alive && !t.draining).collect();
    let sum = |of: fn(&pb::Target) -> u64| stay.iter().map(|t| u128::from(of(t))).sum::<u128>();
    let (used, capacity) = (sum(|t| t.used), sum(|t| t.capacity).max(1));
    let share = |t: &&pb::Target| (u128::from(t.capacity) * used / capacity) as u64;
    stay.iter().map(|t| t.used.saturating_sub(share(t))).sum()
}

fn evening(first: u64, left: u64, taken: Duration) -> String {
    let eta = match first.saturating_sub(left) {
        0 => String::new(),
        n => format!(
            ", about {} s more at most",
            (taken.as_secs_f64() / n as f64 * left as f64).ceil()
        ),
    };
    format!("{} above even{eta}", size(left))
}

/// Whether replicas are moving from or to these targets, or may be waiting for their turn: another
/// target may have as many moves as it does at a time.
fn is_under_way(map: &MapView, ids: &[TargetId]) -> bool {
    let mut ends: BTreeMap<TargetId, usize> = BTreeMap::new();
    // A chain without a source waits for ever, so it does not count.
    for c in map.map.chains.iter().filter(|c| !c.lost && c.head().is_some() && is_moving(c)) {
        let has: BTreeSet<TargetId> = c.replicas.iter().map(|r| r.target).collect();
        let wants: BTreeSet<TargetId> = c.preferred.iter().copied().collect();
        if ids.iter().any(|t| has.contains(t) || wants.contains(t)) {
            return true;
        }
        has.symmetric_difference(&wants).for_each(|t| *ends.entry(*t).or_default() += 1);
    }
    ends.values().any(|n| *n >= MOVES)
}

/// The error that says why nothing moves.
fn stuck(map: &MapView, ids: &[TargetId]) -> Error {
    let holds = |c: &&pb::Chain| {
        !c.lost && ids.iter().any(|t| c.preferred.contains(t) || c.state_of(*t).is_some())
    };
    let (dead, other): (Vec<&pb::Chain>, _) =
        map.map.chains.iter().filter(holds).partition(|c| c.head().is_none());
    let list = |chains: &[&pb::Chain]| {
        chains.iter().map(|c| c.id.to_string()).collect::<Vec<_>>().join(", ")
    };
    let why = match dead.is_empty() {
        true => {
            let m = "no living storage server can take one more copy; add a server, or start \
                     those that are down";
            format!("chains {}: {m}", list(&other))
        }
        false => format!(
            "chains {}: no replica in sync is alive; start the servers that hold them, or run \
             `strake target give-up` for targets that never come back",
            list(&dead)
        ),
    };
    Error::new(Code::Busy, format!("nothing moves any more: {why}"))
}

/// A target's share in chains.
#[derive(Default)]
pub(crate) struct Held {
    /// Replicas that it has, or is to have.
    pub all: usize,
    /// Replicas that it is to give away.
    pub leaving: usize,
    /// Replicas that it is to receive.
    pub arriving: usize,
    /// Chains of which it is the head: `lfs` shows their files as being on it.
    pub heads: usize,
}

impl std::iter::Sum for Held {
    fn sum<I: Iterator<Item = Held>>(all: I) -> Held {
        all.fold(Held::default(), |a, b| Held {
            all: a.all + b.all,
            leaving: a.leaving + b.leaving,
            arriving: a.arriving + b.arriving,
            heads: a.heads + b.heads,
        })
    }
}

impl Held {
    pub fn of(map: &MapView, id: TargetId) -> Held {
        let mut h = Held { all: 0, leaving: 0, arriving: 0, heads: 0 };
        for c in map.map.chains.iter().filter(|c| !c.lost) {
            let (has, wanted) = (c.state_of(id).is_some(), c.preferred.contains(&id));
            h.all += usize::from(has || wanted);
            h.heads += usize::from(c.ost_index() == id);
            h.leaving += usize::from(has && !wanted);
            let serves = c.state_of(id) == Some(pb::ReplicaState::ReplicaServing);
            h.arriving += usize::from(wanted && !serves && c.head().is_some());
        }
        h
    }
}

/// How a target is slow now, or was when it was drained for that.
fn slow_of<'a>(t: &'a pb::Target, now: &'a [pb::SlowTarget]) -> Option<&'a pb::Slow> {
    now.iter().find(|s| s.target == t.id).and_then(|s| s.slow.as_ref()).or(t.slow.as_ref())
}

fn state(t: &pb::Target, h: &Held, slow: bool) -> String {
    let mut words: BTreeSet<&str> = BTreeSet::new();
    if slow {
        words.insert("slow");
    }
    words.insert(if t.alive { "alive" } else { "dead" });
    if t.given_up {
        words.insert("given up");
    } else if t.draining {
        words.insert(if h.all == 0 { "empty" } else { "draining" });
    }
    words.into_iter().collect::<Vec<_>>().join(", ")
}

fn node_name(map: &MapView, t: &pb::Target) -> String {
    map.node(t.node).map(|n| n.name.clone()).unwrap_or_default()
}

/// A line about each slow target. `unix_ms`: the current time.
fn slowness(map: &MapView, now: &[pb::SlowTarget], unix_ms: u64) -> String {
    let mut text = String::new();
    for t in &map.map.targets {
        let Some(s) = slow_of(t, now) else { continue };
        let long = span(unix_ms.saturating_sub(s.since_ms) / 1000);
        let then = match (t.slow.is_some(), t.draining) {
            (true, _) => {
                format!(
                    ". It is drained because of that: replace its device, or cancel with `strake \
                     target keep {}`",
                    t.id
                )
            }
            (false, true) => ". It is drained".into(),
            (false, false) => String::new(),
        };
        text += &format!("target {} has been slow for {long}: {}{then}\n", t.id, words(s));
    }
    text
}

fn rows(map: &MapView, slow: &[pb::SlowTarget]) -> String {
    let head = [
        "TARGET", "SERVER", "STATE", "USED", "CAPACITY", "FULL", "REPLICAS", "HEADS", "LEAVING",
        "ARRIVING",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for t in &map.map.targets {
        let h = Held::of(map, t.id);
        rows.push(vec![
            t.id.to_string(),
            node_name(map, t),
            state(t, &h, slow_of(t, slow).is_some()),
            size(t.used),
            size(t.capacity),
            format!("{} %", percent(t)),
            h.all.to_string(),
            h.heads.to_string(),
            h.leaving.to_string(),
            h.arriving.to_string(),
        ]);
    }
    table(&rows)
}

fn as_json(map: &MapView, slow: &[pb::SlowTarget], said: &[String]) -> Value {
    let target = |t: &pb::Target| {
        let h = Held::of(map, t.id);
        json!({
            "target": t.id, "server": node_name(map, t), "alive": t.alive, "draining": t.draining, "given_up": t.given_up, "heir": t.heir, "used": t.used,
            "capacity": t.capacity, "percent": percent(t), "replicas": h.all, "heads": h.heads, "leaving": h.leaving, "arriving": h.arriving,
            "drained_because_slow": t.slow.is_some(), "slow": slow_of(t, slow).map(slow_json),
        })
    };
    let lost: Vec<u32> = map.map.chains.iter().filter(|c| c.lost).map(|c| c.id).collect();
    json!({ "message": said, "lost_chains": lost, "targets": map.map.targets.iter().map(target).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use strake_proto::map::ROLE_OSS;

    use super::*;

    #[test]
    fn silent_servers_are_not_called_damage() {
        let (lost, unknown) =
            (vec!["  /f: bytes 0 to 9".to_string()], vec!["  a:1: no answer in 2 s".to_string()]);
        let of = |lost: &[String], unknown: &[String]| {
            of_damage(Damage { lost: lost.to_vec(), unknown: unknown.to_vec() }).join("\n")
        };
        assert_eq!(of(&[], &[]), "");
        let silent = of(&[], &unknown);
        assert!(
            !silent.contains("only good copy") && silent.contains("could be asked"),
            "{silent}"
        );
        let both = of(&lost, &unknown);
        let at = |what: &str| both.find(what).unwrap_or(usize::MAX);
        assert!(
            at("only good copy") < at("/f:")
                && at("/f:") < at("could be asked")
                && at("could be asked") < at("a:1"),
            "{both}"
        );
    }

    fn map() -> MapView {
        let target = |id| pb::Target {
            id,
            node: 1001 + id,
            used: 50 << 20,
            capacity: 200 << 20,
            alive: id < 3,
            ..Default::default()
        };
        let node =
            |id| pb::Node { id, role: ROLE_OSS, name: format!("oss{id}"), ..Default::default() };
        let replica = |(target, state): (u32, i32)| pb::Replica { target, state };
        let chain = |id, on: &[(u32, i32)], preferred: &[u32]| pb::Chain {
            id,
            epoch: 1,
            replicas: on.iter().copied().map(replica).collect(),
            preferred: preferred.to_vec(),
            lost: false,
        };
        MapView::new(pb::ClusterMap {
            nodes: (1001..1005).map(node).collect(),
            targets: (0..4).map(target).collect(),
            chains: vec![
                chain(1, &[(0, 1), (1, 1)], &[0, 1]),
                chain(2, &[(0, 1), (1, 1), (2, 2)], &[2, 1]),
                chain(3, &[(3, 5)], &[3]),
            ],
            ..Default::default()
        })
        .unwrap()
    }

    #[test]
    fn what_is_uneven_is_told_with_the_time_it_takes() {
        let mut m = map().map.clone();
        m.targets.iter_mut().for_each(|t| (t.alive, t.draining) = (true, false));
        assert_eq!(uneven(&MapView::new(m.clone()).unwrap()), 0);
        // One target gets 40 MiB more: with four targets, three quarters of that are too much.
        m.targets[0].used += 40 << 20;
        assert_eq!(m.targets.len(), 4);
        assert_eq!(uneven(&MapView::new(m.clone()).unwrap()), 30 << 20);
        m.targets[0].draining = true;
        assert_eq!(uneven(&MapView::new(m).unwrap()), 0, "what is emptied is no part of it");
        assert_eq!(
            evening(30 << 20, 10 << 20, Duration::from_secs(10)),
            "10.0 MiB above even, about 5 s more at most"
        );
        assert_eq!(evening(30 << 20, 30 << 20, Duration::from_secs(10)), "30.0 MiB above even");
    }

    #[test]
    fn what_is_on_its_way_is_counted_at_both_ends() {
        let m = map();
        let counts = |id| {
            let h = Held::of(&m, id);
            (h.all, h.leaving, h.arriving)
        };
        assert_eq!([0, 1, 2, 3].map(counts), [(2, 1, 0), (2, 0, 0), (1, 0, 1), (1, 0, 0)]);
        let text = rows(&m, &[]);
        assert!(
            text.lines()
                .nth(3)
                .unwrap()
                .split_whitespace()
                .eq("2 oss1003 alive 50.0 MiB 200.0 MiB 25 % 1 1 0 1".split(' ')),
            "{text}"
        );
        assert_eq!(as_json(&m, &[], &[])["targets"][0]["leaving"], 1);
    }

    #[test]
    fn slow_targets_are_shown_with_what_is_done_about_them() {
        let slow = pb::Slow {
            since_ms: 1_700_000_000_000,
            what: 2,
            each_us: 45_000,
            peers_us: 300,
            ..Default::default()
        };
        let mut m = map().map;
        (m.targets[1].slow, m.targets[1].draining) = (Some(slow), true);
        let m = MapView::new(m).unwrap();
        let now = [pb::SlowTarget { target: 2, slow: Some(slow) }];
        let (text, lines) = (rows(&m, &now), slowness(&m, &now, 1_700_000_090_500));
        assert!(text.contains("alive, draining, slow") && text.contains("alive, slow"), "{text}");
        assert!(
            lines.contains("target 1 has been slow for 1 min 30 s: each change costs its device 45 ms, others 0.3 ms"),
            "{lines}"
        );
        assert!(lines.contains("`strake target keep 1`") && !lines.contains("keep 2"), "{lines}");
        let json = as_json(&m, &now, &[]);
        let told = [0, 1, 2].map(|t| {
            (&json["targets"][t]["slow"]["each_us"], &json["targets"][t]["drained_because_slow"])
        });
        assert_eq!(
            told,
            [
                (&Value::Null, &json!(false)),
                (&json!(45_000), &json!(true)),
                (&json!(45_000), &json!(false))
            ]
        );
    }

    #[test]
    fn what_moves_elsewhere_or_is_lost_is_not_waited_for() {
        let changed = |f: &dyn Fn(&mut pb::ClusterMap)| {
            let mut m = map().map.clone();
            f(&mut m);
            MapView::new(m).unwrap()
        };
        let m = map();
        // Chain 2 moves from 0 to 2, and 1 stays in it.
        assert_eq!([0, 1, 2, 3].map(|t| is_under_way(&m, &[t])), [true, true, true, false]);
        assert!(is_under_way(&m, &[3, 2]));
        let lost = changed(&|m| m.chains[1].lost = true);
        assert!(!is_under_way(&lost, &[0, 1, 2, 3]));
        let waits = changed(&|m| m.chains[1].replicas.iter_mut().for_each(|r| r.state = 5));
        assert!(!is_under_way(&waits, &[0, 1, 2, 3]));
        // Other targets have their turn.
        let more = |n: u32| {
            changed(&|m| {
                let again = |id| pb::Chain { id, ..m.chains[1].clone() };
                let more: Vec<pb::Chain> = (10..10 + n).map(again).collect();
                m.chains.extend(more);
            })
        };
        assert!(!is_under_way(&more(MOVES as u32 - 2), &[3]));
        assert!(is_under_way(&more(MOVES as u32 - 1), &[3]));
    }

    #[test]
    fn why_nothing_moves_is_said() {
        let m = map();
        assert!(stuck(&m, &[3]).message.contains("chains 3: no replica in sync is alive"));
        assert!(stuck(&m, &[1]).message.contains("chains 1, 2: no living storage server"));
        let targets_of = crate::nodes::targets_of;
        assert_eq!(targets_of(&m, &["oss1002".into()]).unwrap(), [1]);
        assert!(targets_of(&m, &["x".into()]).unwrap_err().message.contains("oss1001, oss1002"));
        assert_eq!(
            progress(10, 8, 2, 1 << 20, Duration::from_secs(4)),
            "2 of 10 replicas have moved, 2 on their way, 1.0 MiB still there, about 16 s more"
        );
    }
}
