//! What the leader does besides answering: it formats a new file system, keeps the metadata servers
//! in the map, and runs the membership tick, the sessions' terms and the orphans. All of it ends
//! with its term.

use std::{sync::Arc, time::Duration};

use strake_proto::{Code, Result, map::ROLE_MDS, pb};
use strake_runtime::watch;
use tokio::time::sleep;

use super::{
    anew,
    changes::Changes,
    chunks::Trims,
    lease_service,
    locks::LockService,
    member::{BATCH, Lead, Member, never_ran},
    session_service::SessionService,
    size_recovery,
};
use crate::{
    cluster::{
        manager::{Manager, Options, Proposal},
        slow,
    },
    consensus::Leadership,
    levels::Levels,
    lock_waiters::LockWaiters,
    namespace::PLACEMENT,
    sessions::Sessions,
};
use pb::log_command::Command;

/// Time between two evaluations of leases and chains.
const CLUSTER_TICK: Duration = Duration::from_millis(100);
/// A tick this late means that the process was stopped: it could hear no other process.
const STALL: Duration = Duration::from_secs(1);
/// Orphans are not freed earlier than this after an election. The former leader may have answered
/// an open until then. A client accepts that answer for 5 s after it asked (by its clock, which may
/// be slow by a tenth), and then reports it to this leader, see `client/src/metadata/opens.rs`.
const MIN_GRACE: Duration = Duration::from_secs(6);
/// No session may have had an orphan open for this long.
const ORPHAN_PAUSE: Duration = Duration::from_secs(1);
const ORPHAN_TICK: Duration = Duration::from_millis(500);
const ORPHANS: usize = 16_384;

/// Runs for ever; does the leader's work while this server leads.
pub(super) async fn run(leader: Arc<Leader>) {
    let member = &leader.member;
    let mut leadership = member.leadership.clone();
    loop {
        let l = *leadership.borrow_and_update();
        if !l.ready {
            if leadership.changed().await.is_err() {
                return;
            }
            continue;
        }
        tracing::info!(term = l.term, "this metadata server is the leader now");
        tokio::select! {
            biased;
            () = lost(&mut leadership, l.term) => (),
            () = leader.lead(l.term) => (),
        }
        *member.lead.lock() = None;
        member.recalls.stop();
        member.machine.namespace.lock_news().listen(false);
        tracing::info!(term = l.term, "this metadata server is no longer the leader");
    }
}

async fn lost(leadership: &mut watch::Receiver<Leadership>, term: u64) {
    while leadership.changed().await.is_ok() {
        let l = *leadership.borrow_and_update();
        if !l.ready || l.term != term {
            return;
        }
    }
}

/// See the module.
pub(super) struct Leader {
    pub member: Arc<Member>,
    pub sessions: Arc<SessionService>,
    pub changes: Arc<Changes>,
    pub locks: Arc<LockService>,
    pub trims: Arc<Trims>,
}

impl Leader {
    async fn lead(&self, term: u64) {
        while let Err(e) = self.format().await {
            tracing::warn!("formatting the file system: {e}");
            sleep(CLUSTER_TICK).await;
        }
        let now = self.member.env.boot();
        let options = Options {
            lease: self.member.cfg.lease(),
            expect_targets: self.member.cfg.expect_targets,
            chains_per_target: self.member.cfg.chains_per_target,
            balance_percent: self.member.cfg.balance_percent,
            rebuild_after: self.member.cfg.rebuild_after(),
            slow: slow::Options {
                factor: self.member.cfg.slow_factor,
                floor: Duration::from_millis(self.member.cfg.slow_floor_ms),
                lasts: Duration::from_millis(self.member.cfg.slow_for_ms),
                drain: self.member.cfg.drain_slow,
            },
        };
        let mut sessions = Sessions::default();
        for (id, s) in self.member.machine.namespace.sessions() {
            sessions.inherit(now, id, s.epoch);
        }
        let manager = Manager::new(options, now, &self.member.map());
        while let Err(e) = self.member.recalls.start(term, &self.member.machine.namespace) {
            tracing::warn!("reading which sessions write to which files: {e}");
            sleep(CLUSTER_TICK).await;
        }
        self.member.machine.namespace.lock_news().listen(true);
        *self.member.lead.lock() = Some(Lead {
            term,
            manager,
            sessions,
            lock_waiters: LockWaiters::default(),
            levels: Levels::default(),
        });
        tokio::join!(
            self.announce(),
            self.settings(),
            self.tick_cluster(),
            self.end_sessions(),
            self.free_orphans(),
            self.locks.serve(),
            lease_service::end_leases(&self.member),
            self.trims.cut_files(term),
            size_recovery::find_ends(&self.member, term),
            self.trims.delete_files(),
            anew::run(&self.member),
        );
    }

    async fn format(&self) -> Result<()> {
        if !self.member.machine.namespace.header().fs_uuid.is_empty() {
            return Ok(());
        }
        let format = pb::Format {
            fs_uuid: self.member.env.random_bytes::<16>().to_vec().into(),
            fs_name: self.member.cfg.fs_name.clone(),
            name_hash_key: self.member.env.random_bytes::<16>().to_vec().into(),
            default_copies: self.member.cfg.default_copies,
            root_mode: 0o755,
            root_uid: self.member.cfg.root_uid,
            root_gid: self.member.cfg.root_gid,
            placement: PLACEMENT,
            level: self.member.cfg.first_level,
        };
        self.member.propose(Command::Format(format)).await?;
        tracing::info!(name = self.member.cfg.fs_name, "made a new file system");
        Ok(())
    }

    /// Keeps the metadata servers in the map, so that clients find all of them, and removes those
    /// that left: the server that changed the group may have stopped before it changed the map.
    async fn announce(&self) {
        loop {
            match self.announcement().await {
                Ok(None) => {}
                Ok(Some(change)) => match self.member.propose(Command::MdsNodes(change)).await {
                    Ok(_) => continue,
                    Err(e) => tracing::warn!("announcing the metadata servers: {e}"),
                },
                Err(e) => tracing::warn!("announcing the metadata servers: {e}"),
            }
            sleep(STALL).await;
        }
    }

    /// Puts this leader's settings for all chains into the map.
    async fn settings(&self) {
        let asked = pb::Settings { min_copies: self.member.cfg.min_copies };
        while self.member.map().map.min_copies.max(1) != asked.min_copies {
            match self.member.propose(Command::Settings(asked)).await {
                Ok(_) => tracing::info!(
                    "chains take writes with {} or more copies in sync",
                    asked.min_copies
                ),
                Err(e) => tracing::warn!("setting min_copies: {e}"),
            }
            sleep(STALL).await;
        }
    }

    /// How the map must change to name the members, `None` if it need not.
    async fn announcement(&self) -> Result<Option<pb::MdsNodes>> {
        let (map, group) = (self.member.map(), self.member.node.group().await?);
        let known = |id: u32| map.map.nodes.iter().find(|n| n.id == id && n.role == ROLE_MDS);
        let mut nodes = Vec::new();
        for m in &group.members {
            let id = u32::try_from(m.id).unwrap_or(0);
            let own = id == self.member.own_id();
            // A configuration may be older than the last replacement, so only members count. For a
            // member, the configuration is preferred to an older map, and the change that added it
            // to nothing.
            let configured = self.member.cfg.peers.iter().find(|p| p.0 == m.id).map(|p| &p.1);
            let at = match own {
                true => Some(self.member.advertised.get().unwrap_or(&self.member.cfg.listen)),
                false => configured.or(m.endpoint.as_ref().filter(|_| known(id).is_none())),
            };
            let Some(at) = at else { continue };
            let (name, version) = match known(id) {
                _ if own => (self.member.cfg.name(), env!("CARGO_PKG_VERSION").into()),
                Some(n) => (n.name.clone(), n.version.clone()),
                None => (format!("mds-{id}"), String::new()),
            };
            let endpoints = vec![at.to_string()];
            nodes.push(pb::Node {
                id,
                role: ROLE_MDS,
                endpoints,
                name,
                version,
                ..Default::default()
            });
        }
        // Members that left, in case the server that removed them failed to change the map.
        let left = |n: &&pb::Node| n.role == ROLE_MDS && group.get(u64::from(n.id)).is_none();
        let gone: Vec<u32> = map.map.nodes.iter().filter(left).map(|n| n.id).collect();
        let same = gone.is_empty() && nodes.iter().all(|n| known(n.id) == Some(n));
        Ok((!same).then_some(pb::MdsNodes { nodes, gone }))
    }

    async fn tick_cluster(&self) {
        loop {
            let before = self.member.env.boot();
            sleep(CLUSTER_TICK).await;
            let now = self.member.env.boot();
            let proposal = self.member.with_lead(|l| {
                if now.saturating_sub(before) > STALL {
                    l.manager.all_heard(now);
                    l.sessions.all_heard(now);
                }
                let map = self.member.map();
                l.manager.map_changed(now, &map);
                Ok(l.manager.tick(now, &map))
            });
            self.lift_fences();
            if let Ok(Some(p)) = proposal {
                self.change_map(p).await;
            } else if self.member.with_lead(|l| Ok(l.manager.in_doubt())).unwrap_or(false) {
                self.settle_map().await;
            }
            self.judge_slow(now).await;
        }
    }

    /// Names targets that are slow compared with the others, and gets one of them drained.
    async fn judge_slow(&self, now: Duration) {
        let judged = self.member.with_lead(|l| {
            let (map, slow) = (self.member.map(), &mut l.manager.slow);
            Ok((slow.judge(now, self.member.env.unix_ms(), &map), slow.to_drain(now, &map.map)))
        });
        let Ok((said, change)) = judged else { return };
        said.iter().for_each(|s| tracing::warn!("cluster: {s}"));
        let Some(change) = change else { return };
        match self.member.propose(Command::TargetChange(change)).await {
            Ok(_) => tracing::warn!(
                "cluster: target {} is being drained because it is slow. `strake target keep {0}` \
                 cancels this",
                change.target
            ),
            Err(e) => {
                tracing::warn!(
                    "cluster: target {} is slow, but was not drained: {e}",
                    change.target
                )
            }
        }
    }

    /// Lets requests continue that wait for writes of evicted sessions, once those can no longer
    /// arrive anywhere.
    fn lift_fences(&self) {
        if self.member.recalls.fences() {
            let known = self.member.with_lead(|l| {
                Ok((l.term, l.manager.known_to_all(self.member.env.boot(), &self.member.map())))
            });
            // If this server no longer leads, they are sent elsewhere.
            let _ = known.and_then(|(term, upto)| self.member.recalls.fenced(term, upto));
        }
    }

    async fn change_map(&self, p: Proposal) {
        for w in &p.why {
            tracing::info!("cluster: {w}");
        }
        let known = match self.member.propose(Command::MapUpdate(p.update)).await {
            Ok(_) => true,
            Err(e) => {
                tracing::info!("the map change was not made: {e}");
                never_ran(&e)
            }
        };
        let now = self.member.env.boot();
        let _ = self.member.with_lead(|l| {
            l.manager.map_changed(now, &self.member.map());
            l.manager.resolved(known);
            Ok(())
        });
    }

    /// A lone server whose disk was full keeps leading, and a map change under way may have been
    /// made. That is known when a later log entry is applied: a change that changes nothing.
    async fn settle_map(&self) {
        let nothing =
            pb::MapUpdate { expect_version: self.member.map().version(), ..Default::default() };
        match self.member.propose(Command::MapUpdate(nothing)).await {
            Err(e) if e.code != Code::Busy => {
                tracing::debug!("it is not known yet whether the map was changed: {e}")
            }
            _ => {
                let now = self.member.env.boot();
                let _ = self.member.with_lead(|l| {
                    l.manager.map_changed(now, &self.member.map());
                    l.manager.resolved(true);
                    Ok(())
                });
            }
        }
    }

    async fn end_sessions(&self) {
        let term = self.member.cfg.session_term();
        let pause = (term / 16).clamp(Duration::from_millis(20), Duration::from_secs(1));
        loop {
            sleep(pause).await;
            let now = self.member.env.boot();
            let known = self.member.machine.namespace.sessions();
            let silent = self.member.with_lead(|l| {
                for (id, s) in &known {
                    // If it has ended since it was listed, it must not return into the table.
                    if self.member.machine.namespace.session(*id).is_some() {
                        l.sessions.learn(now, *id, s.epoch);
                    }
                }
                for id in l.sessions.ids() {
                    if self.member.machine.namespace.session(id).is_none() {
                        l.sessions.remove(id);
                        l.lock_waiters.remove(id);
                    }
                }
                l.levels.retain(|id| self.member.machine.namespace.session(id).is_some());
                Ok(l.sessions.expire(now, term))
            });
            self.changes.forget_ended();
            self.sessions.forget_ended();
            let Ok(silent) = silent else { continue };
            for batch in silent.chunks(BATCH) {
                tracing::warn!(sessions = ?batch, "evicting sessions that were silent for their term");
                let end = pb::SessionEnd { sessions: batch.to_vec(), evict: true };
                if let Err(e) = self.member.propose(Command::SessionEnd(end)).await {
                    tracing::warn!("ending sessions: {e}");
                }
            }
        }
    }

    /// Frees files without a name that no session has open. What was open under a former leader is
    /// known when all sessions of that time have reported it, at the latest when their term is
    /// over.
    async fn free_orphans(&self) {
        let (began, term) = (self.member.env.boot(), self.member.cfg.session_term());
        sleep(MIN_GRACE).await;
        while self.member.env.boot().saturating_sub(began) < term
            && !self.member.with_lead(|l| Ok(l.sessions.all_told())).unwrap_or(false)
        {
            sleep(ORPHAN_TICK).await;
        }
        loop {
            sleep(ORPHAN_TICK).await;
            let orphans = self.member.machine.namespace.backlog().orphans(ORPHANS);
            let now = self.member.env.boot();
            let Ok(free) =
                self.member.with_lead(|l| Ok(l.sessions.free(now, &orphans, ORPHAN_PAUSE)))
            else {
                continue;
            };
            for batch in free.chunks(BATCH) {
                if let Err(e) = self
                    .member
                    .propose(Command::FreeOrphans(pb::FreeOrphans { inos: batch.to_vec() }))
                    .await
                {
                    tracing::warn!("freeing removed files: {e}");
                }
            }
        }
    }
}
