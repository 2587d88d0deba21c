//! `strake node list|drain|keep|remove`: manages storage servers with all of their targets.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_proto::{
    Code, Error, Result, TargetId,
    map::{MapView, ROLE_OSS},
    pb,
};
use strake_term::{size, table};

use crate::{
    answers::percent,
    members::{Group, Reach, UNFINISHED},
    targets::{self, Held},
};

#[derive(Subcommand)]
pub enum Command {
    /// Show storage servers: their racks, how full they are, and what is moving.
    List(ListArgs),
    /// Move all data on the targets of storage servers to other servers.
    Drain(NodesArgs),
    /// Cancel a drain: data that has not moved yet stays.
    Keep(NodesArgs),
    /// Remove stopped storage servers that hold no needed data from the cluster, with all of their
    /// targets.
    Remove(NodesArgs),
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct NodesArgs {
    /// Storage servers, by name.
    #[arg(required = true)]
    node: Vec<String>,
    #[command(flatten)]
    reach: Reach,
    /// Do not wait; the drain goes on by itself.
    #[arg(long)]
    no_wait: bool,
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::List(a) => list(&a.reach),
        Command::Drain(a) => targets::act(&a.reach, async |g| {
            let ids = targets_of(&g.map().await?, &a.node)?;
            targets::drain(g, &ids, None, !a.no_wait).await
        }),
        Command::Keep(a) => targets::act(&a.reach, async |g| {
            let ids = targets_of(&g.map().await?, &a.node)?;
            targets::change_each(g, &ids, targets::KEEP, "stays").await
        }),
        Command::Remove(a) => targets::act(&a.reach, async |g| {
            let ids = targets_of(&g.map().await?, &a.node)?;
            targets::remove(g, &ids).await
        }),
    }
}

/// The targets of the storage servers with these names.
pub(crate) fn targets_of(map: &MapView, names: &[String]) -> Result<Vec<TargetId>> {
    let mut ids = Vec::new();
    for name in names {
        let node = map
            .map
            .nodes
            .iter()
            .find(|n| n.role == ROLE_OSS && n.name == *name)
            .ok_or_else(|| {
                let all: Vec<&str> =
                    map.map.nodes.iter().filter(|n| n.role == ROLE_OSS).map(|n| &*n.name).collect();
                Error::new(
                    Code::NoEnt,
                    format!("there is no storage server '{name}'; there are {}", all.join(", ")),
                )
            })?;
        ids.extend(map.map.targets.iter().filter(|t| t.node == node.id).map(|t| t.id));
    }
    Ok(ids)
}

fn list(reach: &Reach) -> Result<ExitCode> {
    let mut group = Group::to_list(reach)?;
    crate::run(1, async {
        let map = group.map().await;
        group.done();
        let map = match map {
            Err(e) if e.code == Code::TimedOut => {
                eprintln!("strake: {e}");
                return Ok(ExitCode::from(UNFINISHED));
            }
            map => map?,
        };
        let all: Vec<Server> = map
            .map
            .nodes
            .iter()
            .filter(|n| n.role == ROLE_OSS)
            .map(|n| Server::of(&map, n))
            .collect();
        match reach.json {
            true => println!(
                "{:#}",
                json!({ "nodes": all.iter().map(Server::as_json).collect::<Vec<_>>() })
            ),
            false => print!("{}", rows(&all)),
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The totals of all targets of a storage server.
struct Server<'a> {
    node: &'a pb::Node,
    targets: Vec<TargetId>,
    alive: usize,
    draining: usize,
    used: u64,
    capacity: u64,
    held: Held,
}

impl Server<'_> {
    fn of<'a>(map: &MapView, node: &'a pb::Node) -> Server<'a> {
        let own: Vec<&pb::Target> = map.map.targets.iter().filter(|t| t.node == node.id).collect();
        let count = |is: fn(&pb::Target) -> bool| own.iter().filter(|t| is(t)).count();
        Server {
            node,
            targets: own.iter().map(|t| t.id).collect(),
            alive: count(|t| t.alive),
            draining: count(|t| t.draining),
            used: own.iter().map(|t| t.used).sum(),
            capacity: own.iter().map(|t| t.capacity).sum(),
            held: own.iter().map(|t| Held::of(map, t.id)).sum(),
        }
    }

    fn state(&self) -> &'static str {
        match (self.targets.len(), self.alive, self.draining) {
            (0, ..) => "no targets",
            (_, 0, _) => "dead",
            (all, _, draining) if draining == all => "draining",
            (all, alive, _) if alive < all => "in part",
            _ => "alive",
        }
    }

    fn percent(&self) -> f64 {
        percent(&pb::Target { used: self.used, capacity: self.capacity, ..Default::default() })
    }

    fn as_json(&self) -> Value {
        json!({
            "server": self.node.name, "id": self.node.id, "rack": self.node.rack, "version": self.node.version, "endpoints": self.node.endpoints,
            "state": self.state(), "targets": self.targets, "alive": self.alive, "draining": self.draining, "used": self.used,
            "capacity": self.capacity, "percent": self.percent(), "replicas": self.held.all, "heads": self.held.heads,
            "leaving": self.held.leaving, "arriving": self.held.arriving,
        })
    }
}

fn rows(all: &[Server]) -> String {
    let head = [
        "SERVER", "RACK", "STATE", "TARGETS", "USED", "CAPACITY", "FULL", "REPLICAS", "HEADS",
        "LEAVING", "ARRIVING",
    ];
    let row = |s: &Server| {
        let rack = if s.node.rack.is_empty() { "-" } else { &s.node.rack };
        let targets = s.targets.iter().map(TargetId::to_string).collect::<Vec<_>>().join(",");
        vec![
            s.node.name.clone(),
            rack.into(),
            s.state().into(),
            targets,
            size(s.used),
            size(s.capacity),
            format!("{} %", s.percent()),
            s.held.all.to_string(),
            s.held.heads.to_string(),
            s.held.leaving.to_string(),
            s.held.arriving.to_string(),
        ]
    };
    table(
        &std::iter::once(head.map(String::from).to_vec())
            .chain(all.iter().map(row))
            .collect::<Vec<_>>(),
    )
}
