//! An administrator drains targets and later keeps them after all, while everything else goes on.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use rand::{RngExt, rngs::StdRng};
use strake_fabric::{Endpoint, Fabric, Message, Role};
use strake_mds::cluster::moves::target_action::{DRAIN, KEEP};
use strake_proto::{Code, Error, Result, opcode, pb};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cluster::Cluster,
    faults::{Change, Fault, Timed},
    ledger::Kind,
    net::SimFabric,
    nodes::{ANY_MDS, OSS},
};

/// The administrator's number on the network.
const ADMIN: u32 = 240;
const PATIENCE: Duration = Duration::from_secs(2);
/// Longer than servers take to recover.
const RECOVERY: Duration = Duration::from_secs(120);

/// Decisions of a run of this length: a target is drained and kept again some time later, then the
/// next.
pub fn draw(rng: &mut StdRng, length: Duration) -> Vec<Timed> {
    let (mut all, mut at) = (Vec::new(), Duration::ZERO);
    loop {
        let target = rng.random_range(0..OSS);
        let heir = rng.random_bool(0.3).then(|| (target + 1) % OSS);
        for change in [Change::Drain { target, heir }, Change::Keep { target }] {
            at += Duration::from_millis(rng.random_range(100..3000));
            if at >= length {
                return all;
            }
            all.push(Timed { at, fault: Fault::Move(change) });
        }
    }
}

/// Asks for a decision; it is made if a metadata leader can be reached.
pub fn ask(cluster: &Cluster, change: Change) {
    let (fabric, net) = (cluster.fabric(ADMIN, Role::Server), cluster.net.clone());
    let nodes = cluster.nodes();
    tokio::spawn(async move {
        if decide(&fabric, change).await.is_ok() {
            net.made(Kind::Moved, nodes.iter().any(|n| net.is_busy(*n)));
        }
    });
}

/// Keeps all targets, at the end of a run when nothing is broken any more.
pub async fn keep_all(cluster: &Cluster) -> Result<()> {
    let fabric = cluster.fabric(ADMIN, Role::Server);
    let begun = Instant::now();
    for target in 0..OSS {
        while let Err(e) = decide(&fabric, Change::Keep { target }).await {
            if begun.elapsed() > RECOVERY {
                return Err(e.context(format!(
                    "target {target} cannot be kept {RECOVERY:?} after the last fault"
                )));
            }
            sleep(Duration::from_millis(500)).await;
        }
    }
    Ok(())
}

/// Asks one metadata server after the other until one does it.
async fn decide(fabric: &Arc<SimFabric>, change: Change) -> Result<()> {
    let change = match change {
        Change::Drain { target, heir } => {
            pb::TargetChange { target, action: DRAIN, heir, slow: None }
        }
        Change::Keep { target } => {
            pb::TargetChange { target, action: KEEP, heir: None, slow: None }
        }
    };
    let change = pb::members_request::Change::Target(change);
    let body = pb::MembersRequest { change: Some(change), levels: false }.encode_to_vec();
    let mut last = Error::new(Code::NotLeader, "nobody was asked");
    for at in ANY_MDS {
        let ask = async {
            let link = fabric.connect(&Endpoint::Sim(at), None).await?;
            let answer = link.call(Message::new(opcode::MEMBERS, body.clone()), PATIENCE).await;
            link.close();
            answer
        };
        match timeout(PATIENCE, ask).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(e)) => last = e,
            Err(_) => last = Error::new(Code::TimedOut, "no answer"),
        }
    }
    Err(last)
}
