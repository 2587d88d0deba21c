//! `strake pool list|new|add|remove|destroy`: named groups of targets to which files can be
//! confined (`lfs setstripe -p`).

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_mds::cluster::state::pool_action::{ADD, DESTROY, NEW, REMOVE};
use strake_proto::{Code, Error, Result, TargetId, map::MapView, pb};
use strake_term::{size, table};

use crate::{
    lfs::setstripe,
    members::{Group, Reach, UNFINISHED, passes},
};
use pb::members_request::Change;

/// How long a new pool's chains are waited for: the leader makes them within a second or two.
const CHAINS: Duration = Duration::from_secs(10);

#[derive(Subcommand)]
pub enum Command {
    /// Show pools, their targets and how full they are.
    List(ListArgs),
    /// Create a pool.
    New(PoolArgs),
    /// Put targets into a pool.
    Add(MembersArgs),
    /// Take targets out of a pool. Data that files of the pool have there moves to the remaining
    /// targets of the pool.
    Remove(MembersArgs),
    /// Remove a pool. Its files stay where they are, but are no longer kept together.
    Destroy(NameArgs),
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct NameArgs {
    /// The pool: 1 to 15 letters, digits, '_', '-' and '.'.
    pool: String,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct PoolArgs {
    #[command(flatten)]
    name: NameArgs,
    /// Its targets, by number.
    target: Vec<TargetId>,
}

#[derive(Args)]
pub struct MembersArgs {
    #[command(flatten)]
    name: NameArgs,
    /// Targets, by number.
    #[arg(required = true)]
    target: Vec<TargetId>,
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::List(a) => act(Group::to_list(&a.reach)?, a.reach.json, &[]),
        Command::New(a) => make_all(&a.name.reach, &[change(&a.name.pool, NEW, a.target)]),
        Command::Add(a) => make_all(&a.name.reach, &[change(&a.name.pool, ADD, a.target)]),
        Command::Remove(a) => make_all(&a.name.reach, &[change(&a.name.pool, REMOVE, a.target)]),
        Command::Destroy(a) => destroy(&a),
    }
}

fn change(pool: &str, action: u32, targets: Vec<TargetId>) -> pb::PoolChange {
    pb::PoolChange { pool: pool.into(), action, targets }
}

/// All members leave at once: one after the other, the data of each would move to the remaining
/// ones.
fn destroy(a: &NameArgs) -> Result<ExitCode> {
    let mut group = Group::new(&a.reach)?;
    let map = crate::run(1, group.map())?;
    let members = map
        .map
        .pools
        .iter()
        .find(|p| p.name == a.pool)
        .map(|p| p.targets.clone())
        .unwrap_or_default();
    group.done();
    let mut steps = vec![change(&a.pool, DESTROY, Vec::new())];
    if !members.is_empty() {
        steps.insert(0, change(&a.pool, REMOVE, members));
    }
    make_all(&a.reach, &steps)
}

fn make_all(reach: &Reach, steps: &[pb::PoolChange]) -> Result<ExitCode> {
    act(Group::new(reach)?, reach.json, steps)
}

/// Makes the changes, then shows all pools.
fn act(mut group: Group, json: bool, steps: &[pb::PoolChange]) -> Result<ExitCode> {
    crate::run(1, async {
        let now = made(&mut group, steps).await;
        group.done();
        match now {
            Ok(map) if json => println!("{:#}", as_json(&map)),
            Ok(map) => print!("{}", rows(&map)),
            Err(e) if e.code == Code::TimedOut => {
                eprintln!("strake: {e}; `strake pool list` shows what was done");
                return Ok(ExitCode::from(UNFINISHED));
            }
            Err(e) => return Err(e),
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn made(g: &mut Group, steps: &[pb::PoolChange]) -> Result<MapView> {
    for step in steps {
        make(g, step).await?;
    }
    let begun = Instant::now();
    loop {
        let map = g.map().await?;
        let waits =
            |s: &pb::PoolChange| matches!(s.action, NEW | ADD) && lacks_chains(&map, &s.pool);
        if !steps.iter().any(waits) || begun.elapsed() > CHAINS {
            return Ok(map);
        }
        g.pause("the pool's chains are being made").await?;
    }
}

/// Whether a pool that could have chains for the usual number of copies has none yet. Until then
/// copies of its files may be outside of it.
fn lacks_chains(map: &MapView, pool: &str) -> bool {
    let copies = map.map.default_copies.max(1);
    let Some(p) = map.map.pools.iter().find(|p| p.name == pool) else { return false };
    let may = !p.targets.is_empty() && setstripe::servers_of(&map.map, Some(p)) >= copies as usize;
    may && !map.map.sets.iter().any(|s| s.pool == pool && s.copies == copies)
}

async fn make(g: &mut Group, step: &pb::PoolChange) -> Result<()> {
    let mut again = false;
    loop {
        match g.ask_once(Some(Change::Pool(step.clone()))).await {
            Err(e) if passes(&e) => g.pause(&e.message).await?,
            // The change was made, but the answer was lost.
            Err(e) if again && is_done(step.action, &e) => return Ok(()),
            r => return r.map(drop),
        }
        again = true;
    }
}

fn is_done(action: u32, e: &Error) -> bool {
    e.code == if matches!(action, NEW | ADD) { Code::Exist } else { Code::NoEnt }
}

/// Used and total bytes on the targets of a pool.
fn space(map: &MapView, p: &pb::Pool) -> (u64, u64) {
    let of = p.targets.iter().filter_map(|t| map.target(*t));
    of.fold((0, 0), |(used, all), t| (used + t.used, all + t.capacity))
}

fn rows(map: &MapView) -> String {
    let mut rows = vec![["POOL", "TARGETS", "USED", "CAPACITY"].map(String::from).to_vec()];
    for p in &map.map.pools {
        let members = p.targets.iter().map(TargetId::to_string).collect::<Vec<_>>().join(",");
        let (used, all) = space(map, p);
        rows.push(vec![
            p.name.clone(),
            if members.is_empty() { "-".into() } else { members },
            size(used),
            size(all),
        ]);
    }
    table(&rows) + &too_small(map)
}

/// Pools on fewer servers than files have copies.
fn too_small(map: &MapView) -> String {
    let copies = map.map.default_copies.max(1) as usize;
    let servers = |p: &pb::Pool| setstripe::servers_of(&map.map, Some(p));
    let small = map.map.pools.iter().filter(|p| !p.targets.is_empty() && servers(p) < copies);
    let lacking = map.map.pools.iter().filter(|p| lacks_chains(map, &p.name));
    let lacking = lacking.fold(String::new(), |text, p| {
        let name = &p.name;
        text + &format!(
            "note: pool {name} has no chains yet: its files have copies outside of it\n"
        )
    });
    small.fold(lacking, |text, p| {
        text + &format!(
            "note: pool {} has targets on {} storage servers: files in it cannot have {copies} \
             copies, which is the default\n",
            p.name,
            servers(p)
        )
    })
}

fn as_json(map: &MapView) -> Value {
    let pool = |p: &pb::Pool| {
        let (used, capacity) = space(map, p);
        json!({ "pool": p.name, "targets": p.targets, "used": used, "capacity": capacity })
    };
    json!({ "pools": map.map.pools.iter().map(pool).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_shown_with_their_space() {
        let target = |id| pb::Target { id, used: 1 << 20, capacity: 4 << 20, ..Default::default() };
        let pool = |(name, targets): (&str, &[u32])| pb::Pool {
            name: name.into(),
            targets: targets.to_vec(),
        };
        let map = MapView::new(pb::ClusterMap {
            targets: (0..3).map(target).collect(),
            pools: [("fast", &[0, 2][..]), ("empty", &[])].map(pool).to_vec(),
            ..Default::default()
        });
        let map = map.unwrap();
        let lines: Vec<Vec<String>> =
            rows(&map).lines().map(|l| l.split_whitespace().map(String::from).collect()).collect();
        assert_eq!(lines[1], ["fast", "0,2", "2.0", "MiB", "8.0", "MiB"]);
        assert_eq!(lines[2][..2], ["empty", "-"]);
        assert_eq!(as_json(&map)["pools"][0]["capacity"], 8 << 20);
        let mut two = map.map.clone();
        two.default_copies = 2;
        let said = rows(&MapView::new(two).unwrap());
        assert!(said.contains("note: pool fast has targets on 1 storage servers"), "{said}");
        assert!(!said.contains("pool empty has"), "{said}");
        // With two servers it can have chains, and has none yet.
        let mut wide = map.map.clone();
        wide.targets[2].node = 9;
        (wide.default_copies, wide.nodes) = (2, Vec::new());
        let map = MapView::new(wide.clone()).unwrap();
        assert!(rows(&map).contains("note: pool fast has no chains yet"), "{}", rows(&map));
        wide.sets = vec![pb::ChainSet { pool: "fast".into(), copies: 2, ..Default::default() }];
        let map = MapView::new(wide).unwrap();
        assert!(!rows(&map).contains("note:"), "{}", rows(&map));
    }

    #[test]
    fn a_repetition_that_finds_it_done_is_no_error() {
        let e = |code| Error::new(code, "x");
        assert!(
            is_done(NEW, &e(Code::Exist))
                && is_done(ADD, &e(Code::Exist))
                && !is_done(ADD, &e(Code::NoEnt))
        );
        assert!(is_done(DESTROY, &e(Code::NoEnt)) && !is_done(DESTROY, &e(Code::NotEmpty)));
    }
}
