//! The leader's worker that brings back chains that no replica serves and on which no file has data
//! ([`crate::cluster::anew`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{ChainId, Result, pb};
use tokio::time::sleep;

use super::member::Member;
use crate::cluster::anew::{AT_ONCE, Homes};
use pb::log_command::Command;

const LOOK: Duration = Duration::from_secs(2);
/// When a chain on which files have data is checked again: the files may have been removed. At
/// least `IDLE` times as long as the check took.
const AGAIN: Duration = Duration::from_secs(600);
const IDLE: u32 = 20;
/// Bytes read at once.
const PAGE: usize = 256 << 10;

/// Runs for ever.
pub(super) async fn run(member: &Member) {
    // Chains on which files had data, at this epoch, and when to check again.
    let mut later: BTreeMap<ChainId, (u64, Duration)> = BTreeMap::new();
    let again = match member.cfg.rebuild_after() {
        Duration::ZERO => AGAIN,
        some => AGAIN.min(some * 5),
    };
    loop {
        sleep(LOOK).await;
        let now = member.env.boot();
        let stranded =
            member.with_lead(|l| Ok(l.manager.stranded(now, &member.map()))).unwrap_or_default();
        later.retain(|c, _| stranded.iter().any(|s| s.0 == *c));
        let is_due = |(chain, epoch): &&(ChainId, u64)| {
            later.get(chain).is_none_or(|(seen, until)| seen != epoch || *until <= now)
        };
        let due: Vec<ChainId> = stranded.iter().filter(is_due).take(AT_ONCE).map(|c| c.0).collect();
        let planned = homes(member, &due);
        if planned.is_empty() {
            continue;
        }
        let held = match holders(member, planned.iter().map(|c| c.id).collect()).await {
            Ok(held) => held,
            Err(e) => {
                tracing::warn!(
                    "cannot find out whether files have data on chains without a replica: {e}"
                );
                due.iter().copied().collect()
            }
        };
        let took = member.env.boot().saturating_sub(now);
        for c in planned.iter().filter(|c| held.contains(&c.id)) {
            later.insert(c.id, (c.epoch - 1, now + took + again.max(took * IDLE)));
        }
        begin_anew(member, planned.into_iter().filter(|c| !held.contains(&c.id)).collect()).await;
    }
}

/// How chains can begin anew, for those that have enough targets.
fn homes(member: &Member, chains: &[ChainId]) -> Vec<pb::Chain> {
    let now = member.env.boot();
    let planned = member.with_lead(|l| {
        let map = member.map();
        let (mut homes, blank) =
            (Homes::new(&map.map), |t, c: &pb::Chain| l.manager.is_blank(now, t, c, &map));
        Ok(chains.iter().filter_map(|c| homes.of(*c, blank)).collect())
    });
    planned.unwrap_or_default()
}

/// Those of the chains on which files have data, or may have, read in a state in which no replica
/// serves them.
async fn holders(member: &Member, mut chains: BTreeSet<ChainId>) -> Result<BTreeSet<ChainId>> {
    let (mut held, mut after) = (BTreeSet::new(), None);
    loop {
        let (more, last) = member.machine.namespace.holders(after.as_ref(), PAGE, &chains)?;
        chains.retain(|c| !more.contains(c));
        held.extend(more);
        after = last;
        if after.is_none() || chains.is_empty() {
            return Ok(held);
        }
        // Lets other tasks run.
        sleep(Duration::from_millis(1)).await;
    }
}

async fn begin_anew(member: &Member, chains: Vec<pb::Chain>) {
    if chains.is_empty() {
        return;
    }
    let said: Vec<String> = chains.iter().map(|c| c.id.to_string()).collect();
    let said = said.join(", ");
    match member.propose(Command::ChainsAnew(pb::ChainsAnew { chains })).await {
        Ok(_) => tracing::warn!(
            "cluster: no replica is left of chains {said}; no file has data there, so nothing is \
             lost and they start anew on other targets"
        ),
        Err(e) => tracing::info!("chains {said} do not start anew yet: {e}"),
    }
}
