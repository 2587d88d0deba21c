//! The targets of this server: those that serve, those out of service, those that wait to join, and
//! the background tasks of each.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use strake_fabric::Pool;
use strake_proto::{Code, Error, Incarnation, Result, TargetId, pb};
use tokio::{sync::oneshot, task::JoinHandle, time::Instant};

use super::{
    come_back,
    config::TargetConfig,
    context::Context,
    group::Group,
    lease::Lease,
    refused_targets::{self, RefusedTarget},
    replicas::Replicas,
    scrub::{self, Ask},
    target::Target,
};
use crate::engine::{Engine, TargetIdentity};

/// How long the server tries to register a new target.
const JOIN: Duration = Duration::from_secs(20);

/// A target to be registered while the others serve.
pub(super) struct Joining {
    pub target: Arc<Target>,
    pub until: Instant,
    pub done: oneshot::Sender<Result<TargetId>>,
}

/// See the module.
pub(super) struct Targets {
    pub ctx: Arc<Context>,
    pub group: Arc<Group>,
    pub lease: Arc<Lease>,
    /// For targets that are opened while the server runs.
    pub pool: Pool,
    replicas: Arc<Replicas>,
    /// Changed only by the task that registers them.
    serving: ArcSwap<Vec<Arc<Target>>>,
    refused: Mutex<Vec<Arc<RefusedTarget>>>,
    /// Targets that came back empty in this run of the server.
    emptied: Mutex<BTreeSet<TargetId>>,
    joining: Mutex<VecDeque<Joining>>,
    /// Background tasks of each target, by its boot id; 0 for those out of service.
    tasks: Mutex<Vec<(u64, JoinHandle<()>)>>,
}

impl Targets {
    /// `engines`: one per target that serves; `refused`: those out of service.
    pub(super) fn new(
        (ctx, group, lease): (Arc<Context>, Arc<Group>, Arc<Lease>),
        replicas: Arc<Replicas>,
        pool: Pool,
        engines: Vec<Arc<Engine>>,
        refused: Vec<Arc<RefusedTarget>>,
    ) -> Arc<Targets> {
        let serving = engines.into_iter().map(|e| Target::new(e, ctx.env.random_u64())).collect();
        Arc::new(Targets {
            ctx,
            group,
            lease,
            pool,
            replicas,
            serving: ArcSwap::from_pointee(serving),
            refused: Mutex::new(refused),
            emptied: Mutex::default(),
            joining: Mutex::default(),
            tasks: Mutex::default(),
        })
    }

    /// Those that serve.
    pub(super) fn all(&self) -> Arc<Vec<Arc<Target>>> {
        self.serving.load_full()
    }

    pub(super) fn get(&self, id: TargetId) -> Option<Arc<Target>> {
        self.serving.load().iter().find(|t| t.id() == id).cloned()
    }

    /// Only for the task that registers them.
    pub(super) fn replace(&self, all: Vec<Arc<Target>>) {
        self.serving.store(Arc::new(all));
    }

    /// Starts the tasks that flush and scrub a target.
    pub(super) fn tend(&self, target: &Arc<Target>) {
        let ctx = &self.ctx;
        let (t, clock, every) =
            (target.clone(), ctx.env.clone(), Duration::from_millis(ctx.cfg.flush_ms));
        let flush = async move {
            loop {
                tokio::time::sleep(every).await;
                let flushed = if t.engine.is_dirty() { t.engine.flush().await } else { Ok(()) };
                t.flushed(clock.boot(), &flushed);
                t.damage.sync().await;
            }
        };
        let scrub = scrub::run(ctx.clone(), self.replicas.clone(), target.clone());
        let repairs =
            scrub::retry_repairs_forever(ctx.clone(), self.replicas.clone(), target.clone());
        let env = &ctx.env;
        let (scrub, repairs) = (env.spawn(scrub), env.spawn(repairs));
        let tasks = [env.spawn(flush), scrub, repairs];
        self.tasks.lock().extend(tasks.map(|task| (target.boot_id, task)));
    }

    /// Registers one more target while the others serve; returns its number. After an error nothing
    /// has changed here. Whether the metadata servers know the target is not known then, and does
    /// not matter: the call may be repeated.
    pub(super) async fn add(&self, engine: Arc<Engine>) -> Result<TargetId> {
        let (done, answer) = oneshot::channel();
        let target = Target::new(engine, self.ctx.env.random_u64());
        {
            let mut joining = self.joining.lock();
            if !self.ctx.stopped() {
                joining.push_back(Joining { target, until: Instant::now() + JOIN, done });
            }
        }
        self.ctx.kick.notify_one();
        answer
            .await
            .map_err(|_| Error::new(Code::Disconnected, "this storage server is stopping"))?
    }

    /// The next target that waits to join.
    pub(super) fn next_joining(&self) -> Option<Joining> {
        self.joining.lock().pop_front()
    }

    /// It could not be registered yet.
    pub(super) fn join_later(&self, joining: Joining) {
        self.joining.lock().push_back(joining);
    }

    /// Applies a request to the scrubs of these targets (all if empty). Returns their state
    /// afterwards. `NoEnt`: no such target here.
    pub(super) fn scrub(
        &self,
        ask: Option<Ask>,
        targets: &[TargetId],
    ) -> Result<Vec<pb::ScrubStatus>> {
        if let Some(unknown) = targets.iter().find(|t| self.get(**t).is_none()) {
            let m = format!("storage server '{}' has no target {unknown}", self.ctx.cfg.name);
            return Err(Error::new(Code::NoEnt, m));
        }
        let own = self.all();
        let chosen = own.iter().filter(|t| targets.is_empty() || targets.contains(&t.id()));
        let each = chosen.map(|t| {
            ask.into_iter().for_each(|a| t.scrub.ask(a));
            scrub::status(&self.ctx, t)
        });
        Ok(each.collect())
    }

    // --- out of service

    pub(super) fn refused(&self) -> Vec<Arc<RefusedTarget>> {
        self.refused.lock().clone()
    }

    /// Targets that came back empty in this run of the server.
    pub(super) fn emptied(&self) -> Vec<TargetId> {
        self.emptied.lock().iter().copied().collect()
    }

    /// Starts the task that brings a target back into service.
    pub(super) fn look_after(self: &Arc<Self>, refused: Arc<RefusedTarget>) {
        let task = self.ctx.env.spawn(come_back::come_back(self.clone(), refused));
        self.tasks.lock().push((0, task));
    }

    /// Targets whose tables cannot be read have left their chains. Once nothing on them is needed,
    /// they are treated like targets that were found damaged at the start.
    pub(super) fn retire_unreadable(self: &Arc<Self>) {
        let map = self.ctx.map.load_full();
        for t in self.all().iter() {
            let why = t.unreadable().filter(|_| {
                refused_targets::needed(&map, &t.engine.identity(), t.engine.used().as_ref())
                    .is_none()
            });
            let Some(damaged) = why.and_then(|why| t.engine.as_damaged(why)) else { continue };
            self.take_out(t, RefusedTarget::damaged(damaged));
        }
    }

    /// Takes a target out of service and starts the task that brings it back.
    fn take_out(self: &Arc<Self>, t: &Arc<Target>, refused: Arc<RefusedTarget>) {
        let others = self.all().iter().filter(|o| !Arc::ptr_eq(o, t)).cloned().collect();
        self.replace(others);
        self.replicas.remove_of(t.id());
        self.tasks
            .lock()
            .extract_if(.., |(boot_id, _)| *boot_id == t.boot_id)
            .for_each(|(_, task)| task.abort());
        self.refused.lock().push(refused.clone());
        self.look_after(refused);
    }

    /// Takes out targets that do not fit the cluster of this map: they would keep the others out.
    pub(super) fn refuse_unfit(self: &Arc<Self>, map: &pb::ClusterMap) {
        let mut seen = BTreeSet::new();
        for t in self.all().iter() {
            let id = t.engine.identity();
            let twice = (!seen.insert(id.target_uuid)).then(|| is_a_copy(&id));
            // A target moved here may still have its lease at the old server: wait for its end.
            let waits = |e: &Error| {
                let up = self.ctx.env.boot().saturating_sub(self.ctx.started);
                e.code == Code::Busy && up < JOIN
            };
            let why = twice
                .or_else(|| refused_targets::unfit(map, &self.ctx.cfg.name, &id))
                .filter(|e| !waits(e));
            if let (Some(why), Some(path)) = (why, t.engine.path()) {
                self.take_out(t, RefusedTarget::refused(path.clone(), why.context(path.display())));
            }
        }
    }

    /// Checks a target that is to join.
    pub(super) fn check_fit(&self, new: &Target, map: &pb::ClusterMap) -> Result<()> {
        let id = new.engine.identity();
        if self.all().iter().any(|t| t.engine.identity().target_uuid == id.target_uuid) {
            return Err(is_a_copy(&id));
        }
        refused_targets::unfit(map, &self.ctx.cfg.name, &id).map_or(Ok(()), Err)
    }

    /// Forgets targets out of service whose folders an administrator has removed from the
    /// configuration. The others are looked at now, including targets that have failed.
    pub(super) fn look_again(self: &Arc<Self>, configured: &[TargetConfig]) {
        for t in self.all().iter().filter(|t| t.failed()) {
            if let Some(path) = t.engine.path() {
                let why = Error::new(Code::Io, format!("{}: it had failed", path.display()));
                self.take_out(t, RefusedTarget::refused(path, why));
            }
        }
        self.refused.lock().retain(|o| configured.iter().any(|t| t.path == o.path));
        for o in self.refused() {
            configured.iter().filter(|t| t.path == o.path).for_each(|t| o.look_again(t));
        }
    }

    /// A target that was out serves again; empty at first if its table was lost.
    pub(super) fn is_back(&self, refused: &Arc<RefusedTarget>, id: TargetId, is_empty: bool) {
        self.refused.lock().retain(|o| !Arc::ptr_eq(o, refused));
        if is_empty {
            self.emptied.lock().insert(id);
        } else {
            tracing::info!("target {id} is back in service: {}", refused.path.display());
        }
    }

    /// Identities of all targets, including those out of service if they are of this cluster.
    pub(super) fn identities(&self) -> Vec<TargetIdentity> {
        let (serving, fs) = (self.all(), self.group.fs());
        let own =
            |id: &TargetIdentity| id.fs_uuid == [0; 16] || fs.is_none_or(|fs| fs == id.fs_uuid);
        let refused = self.refused().into_iter().filter_map(|o| o.id()).filter(own);
        serving.iter().map(|t| t.engine.identity()).chain(refused).collect()
    }

    /// The latest incarnation of the metadata group that the server or one of its targets has
    /// belonged to.
    pub(super) fn incarnation(&self) -> Incarnation {
        let known =
            self.identities().into_iter().map(|id| id.incarnation).chain([self.group.joined()]);
        known.map(Incarnation).max_by_key(|i| i.era()).unwrap_or_default()
    }

    /// Targets that wait to join get an error.
    pub(super) fn stop(&self) {
        self.joining.lock().clear();
    }

    /// Aborts the background tasks of the targets and returns them, to be waited for.
    pub(super) fn abort_tasks(&self) -> Vec<JoinHandle<()>> {
        let tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.iter().for_each(|(_, task)| task.abort());
        tasks.into_iter().map(|(_, task)| task).collect()
    }
}

fn is_a_copy(id: &TargetIdentity) -> Error {
    let m = format!(
        "another folder of this server holds target {}, too; one of them is a copy",
        id.target_id
    );
    Error::new(Code::Inval, m)
}
