//! Waits until a cluster is in service: all of it, or as much as possible.

use std::time::{Duration, Instant};

use strake_proto::{Code, Error, Result, map::ChainExt, pb};
use strake_term::Progress;

use super::{Cluster, process, process::Role};
use crate::{admin, answers::Behind};

/// If the state does not change for this long while something is known to be missing, it will not
/// change. A storage server looks for a missing disk every 5 s.
const SETTLED: Duration = Duration::from_secs(10);

/// The state of the cluster at one moment.
struct State {
    /// The metadata servers have a leader.
    led: bool,
    /// What is still to come, as a text that changes while it comes.
    lacking: Option<String>,
    /// What will not come by itself, and why.
    refused: Vec<String>,
}

/// Waits until there is a leader, every target is alive and every chain has all its replicas in
/// sync. A server that has ended, or a target that its server refuses, is not waited for once
/// everything else is done: returns what the cluster lacks, and why. An error if it cannot serve at
/// all, or is new.
pub(super) fn wait(
    cluster: &Cluster,
    limit: Duration,
    is_new: bool,
    progress: &mut Progress,
) -> Result<Vec<String>> {
    let key = cluster.key()?;
    let (start, mut since) = (Instant::now(), (Instant::now(), None));
    crate::run(1, async {
        loop {
            let ended: Vec<Role> = cluster
                .roles()
                .into_iter()
                .filter(|r| process::running(cluster, r).is_none())
                .collect();
            let without_vote = ended.iter().filter(|r| matches!(r, Role::Mds(_))).count();
            let members = cluster.admin_mds().len();
            if let Some(first) =
                ended.first().filter(|_| is_new || 2 * (members - without_vote) <= members)
            {
                return Err(process::failure(cluster, first, "ended"));
            }
            let state = look(cluster, &key, &ended).await;
            let Some(what) = &state.lacking else { return Ok(state.refused) };
            if since.1.as_ref() != Some(what) {
                since = (Instant::now(), Some(what.clone()));
            }
            let settled = !state.refused.is_empty() && since.0.elapsed() > SETTLED;
            if state.led && !is_new && (settled || start.elapsed() > limit) {
                return Ok([state.refused, vec![what.clone()]].concat());
            }
            if start.elapsed() > limit {
                let m = format!(
                    "{what} after {} s; see the logs in {}",
                    limit.as_secs(),
                    cluster.logs().display()
                );
                return Err(Error::new(Code::TimedOut, m));
            }
            progress.say(what);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

async fn look(cluster: &Cluster, key: &[u8; 32], ended: &[Role]) -> State {
    let mut refused: Vec<String> = ended
        .iter()
        .map(|r| format!("{} does not run: {}", r.name(), process::last_words(cluster, r)))
        .collect();
    let runs = |role: Role| !ended.contains(&role);
    let Ok(leader) = admin::leader_status(&cluster.admin_mds(), key).await else {
        return State { led: false, lacking: Some("no metadata leader yet".into()), refused };
    };
    let (mut silent, mut behind, mut members) = (None, Vec::new(), Vec::new());
    for (n, addr) in (1..).zip(cluster.admin_mds()).filter(|(n, _)| runs(Role::Mds(*n))) {
        match admin::ask(&addr, key).await {
            Ok(s) => members.push(s),
            Err(_) => {
                silent = Some(format!("the metadata server mds{n} at {addr} does not answer yet"))
            }
        }
    }
    for b in Behind::of(&leader, &members) {
        behind.push(b.to_string());
        refused.push(b.why());
    }
    // After a restart of everything the map may still mark targets alive that do not come back.
    for (n, addr) in (1..).zip(cluster.admin_oss()).filter(|(n, _)| runs(Role::Oss(*n))) {
        match admin::ask(&addr, key).await {
            Ok(s) => refused.extend(s.refused.iter().map(|r| {
                let target = r
                    .target
                    .map_or_else(|| r.path.clone(), |id| format!("target {id} in {}", r.path));
                format!("oss{n}: {target} is out of service: {}; {}", r.why, r.now)
            })),
            Err(_) => silent = Some(format!("the storage server at {addr} does not answer yet")),
        }
    }
    let lacking =
        lacking(&leader, cluster).or(still_alive(&leader, ended)).or(silent).or(behind.pop());
    State { led: true, lacking, refused }
}

/// A server that has ended and whose targets the map still marks alive: others continue without
/// them only after they are marked dead.
fn still_alive(s: &pb::StatusReply, ended: &[Role]) -> Option<String> {
    let map = s.map.as_ref()?;
    let node = |role: &Role| map.nodes.iter().find(|n| n.name == role.name());
    let counts = |role: &&Role| {
        node(role).is_some_and(|n| map.targets.iter().any(|t| t.node == n.id && t.alive))
    };
    ended.iter().find(counts).map(|role| format!("{} still counts as in service", role.name()))
}

/// What a cluster in full service still lacks.
fn lacking(s: &pb::StatusReply, cluster: &Cluster) -> Option<String> {
    let map = s.map.as_ref()?;
    let alive = map.targets.iter().filter(|t| t.alive).count();
    if alive < cluster.target_count() {
        return Some(format!("{alive} of {} targets in service", cluster.target_count()));
    }
    if map.chains.is_empty() {
        return Some("chains are being made".into());
    }
    // Lost chains are not waited for.
    let whole =
        map.chains.iter().filter(|c| c.lost || c.serving().count() == c.replicas.len()).count();
    (whole < map.chains.len()).then(|| format!("{whole} of {} chains in sync", map.chains.len()))
}
