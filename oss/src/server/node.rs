//! The services of one storage server. This only wires them.

use std::sync::Arc;

use strake_fabric::{Fabric, Turns};
use strake_proto::{CapKey, SessionId};
use strake_runtime::Env;

use super::{
    config::Config, context::Context, group::Group, lease::Lease, map_updates::MapUpdates,
    membership::Membership, refused_targets::RefusedTarget, replicas::Replicas,
    revocations::Revocations, targets::Targets,
};
use crate::engine::Engine;

/// Requests of one machine in work while others are active: enough to keep a device busy.
const SHARED: usize = 64;
/// Limits of the bytes of client requests in work, in units of [`HEAVY`]: of all machines, and of
/// one machine while others are active.
const BULK: usize = 512;
const BULK_SHARED: usize = 16;
/// A request with more bytes than this also waits for its turn among large requests.
pub(super) const HEAVY: usize = 64 << 10;

/// The parts of a server; the simulator brings its own.
pub struct Parts {
    /// Clock, randomness and tasks.
    pub env: Env,
    /// The network.
    pub fabric: Arc<dyn Fabric>,
    /// One per target, opened.
    pub targets: Vec<Arc<Engine>>,
    /// Checks the capabilities that metadata servers gave to clients.
    pub cap_key: CapKey,
}

/// Decides which client's request is worked on next.
pub(super) struct RequestTurns {
    pub clients: Turns,
    /// The same for requests with many bytes, which wait here first.
    pub bulk: Turns,
}

impl RequestTurns {
    /// Notes that a session is active here, which limits what others have in work.
    pub(super) fn note(&self, session: SessionId) {
        self.clients.note(session);
        self.bulk.note(session);
    }
}

/// See the module.
pub(super) struct Node {
    pub ctx: Arc<Context>,
    pub cap_key: CapKey,
    pub lease: Arc<Lease>,
    pub revocations: Arc<Revocations>,
    pub replicas: Arc<Replicas>,
    pub targets: Arc<Targets>,
    pub membership: Arc<Membership>,
    pub turns: RequestTurns,
}

impl Node {
    pub(super) fn new(cfg: Config, parts: Parts, refused: Vec<Arc<RefusedTarget>>) -> Arc<Node> {
        let Parts { env, fabric, targets: engines, cap_key } = parts;
        let turns = RequestTurns {
            clients: Turns::shared(cfg.max_requests, SHARED),
            bulk: Turns::shared(BULK, BULK_SHARED),
        };
        let pool = fabric.pool().clone();
        let lease = Arc::new(Lease::new(env.clone(), cfg.name.clone()));
        let revocations = Revocations::new(cfg.end_capabilities);
        let ctx = Context::new(cfg, env, fabric);
        let (group, replicas) = (Arc::<Group>::default(), Replicas::new(ctx.clone()));
        let given = (ctx.clone(), group.clone(), lease.clone());
        let targets = Targets::new(given, replicas.clone(), pool, engines, refused);
        let maps = MapUpdates::new(ctx.clone(), targets.clone(), replicas.clone());
        let membership = Arc::new(Membership {
            ctx: ctx.clone(),
            group,
            lease: lease.clone(),
            revocations: revocations.clone(),
            targets: targets.clone(),
            replicas: replicas.clone(),
            maps,
        });
        Arc::new(Node { ctx, cap_key, lease, revocations, replicas, targets, membership, turns })
    }

    /// Gives up the lease, and drops the replicas.
    pub(super) fn stop(&self) {
        self.ctx.stop();
        self.lease.end();
        self.targets.stop();
        self.replicas.clear();
    }
}
