//! Servers that are not reached directly: another server passes requests on, see
//! [`strake_links::relay`]. So one cut link holds nothing up.
//!
//! The direct connection is tried first, and alone for a while. A refused direct connection is not
//! relayed: the machine is there, but no server runs on it. A relayed connection is left as soon as
//! the direct one works again.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use strake_fabric::{Connection, Fabric};
use strake_links::{Relayed, connect, pool::Attempt, relay};
use strake_proto::{Code, Error, NodeId, Result, map::MapView, pb};
use strake_runtime::Env;
use tokio::time::{sleep, timeout};

/// For how long the direct connection is tried alone.
const ALONE: Duration = Duration::from_millis(500);
/// Time limit for one relaying server, including its own connection.
const ONE: Duration = Duration::from_millis(600);
/// How long the relays may take after the direct connection failed: most often the server is gone.
const GRACE: Duration = Duration::from_millis(300);
/// Number of servers that are asked in one round.
const ASKED: usize = 2;
/// How often the direct connection is tried while a relay is in use.
const LOOK: Duration = Duration::from_secs(5);

/// See the module.
pub(crate) struct Relays {
    env: Env,
    on: bool,
    map: ArcSwap<MapView>,
    /// Index of the server to ask first; advanced after a failure.
    turn: AtomicUsize,
    /// Number of relayed connections made.
    pub made: AtomicU64,
}

impl Relays {
    /// The turn depends on the uuid, so that clients begin with different servers.
    pub fn new(env: Env, on: bool, uuid: &[u8; 16]) -> Relays {
        let turn = AtomicUsize::new(usize::from(uuid[0]));
        Relays { env, on, map: ArcSwap::default(), turn, made: AtomicU64::new(0) }
    }

    pub fn learn(&self, map: &Arc<MapView>) {
        self.map.store(map.clone());
    }

    /// A connection to a server: the one that `direct` makes, or one through another server if the
    /// direct one does not answer.
    pub async fn reach(
        &self,
        fabric: &Arc<dyn Fabric>,
        node: &pb::Node,
        direct: impl Future<Output = Result<Arc<dyn Connection>>>,
    ) -> Result<Arc<dyn Connection>> {
        if !self.on {
            return direct.await;
        }
        let mut direct = pin!(direct);
        let first = timeout(ALONE, &mut direct).await;
        match first {
            Ok(Err(e)) if e.code == Code::TimedOut => self.around(fabric, node).await.ok_or(e),
            Ok(done) => done,
            Err(_) => {
                let mut around = pin!(self.around(fabric, node));
                tokio::select! {
                    biased;
                    d = &mut direct => match d {
                        Err(e) if e.code == Code::TimedOut => {
                            timeout(GRACE, around).await.ok().flatten().ok_or(e)
                        }
                        done => done,
                    },
                    made = &mut around => match made {
                        Some(conn) => Ok(conn),
                        None => direct.await,
                    },
                }
            }
        }
    }

    /// A connection through another server, if there is one that reaches the server.
    async fn around(
        &self,
        fabric: &Arc<dyn Fabric>,
        node: &pb::Node,
    ) -> Option<Arc<dyn Connection>> {
        let map = self.map.load_full();
        let others: Vec<&pb::Node> = candidates(&map, node).collect();
        for _ in 0..ASKED.min(others.len()) {
            let via = others[self.turn.load(Relaxed) % others.len()];
            let asked = timeout(ONE, through(fabric, via, node.id)).await;
            match asked.unwrap_or_else(|_| Err(Error::new(Code::TimedOut, "does not answer"))) {
                Ok(conn) => {
                    tracing::info!(
                        "{} does not answer; it is reached through {}",
                        node.name,
                        via.name
                    );
                    self.made.fetch_add(1, Relaxed);
                    self.look_again(fabric, node, &conn);
                    return Some(conn);
                }
                Err(e) => tracing::debug!("{} cannot relay to {}: {e}", via.name, node.name),
            }
            self.turn.fetch_add(1, Relaxed);
        }
        None
    }

    /// Tries the direct connection until it works again; then the relayed one is left.
    fn look_again(&self, fabric: &Arc<dyn Fabric>, node: &pb::Node, conn: &Arc<Relayed>) {
        let (fabric, node, conn) = (fabric.clone(), node.clone(), Arc::downgrade(conn));
        self.env.spawn(async move {
            loop {
                sleep(LOOK).await;
                if conn.upgrade().is_none_or(|c| c.is_closed()) {
                    return;
                }
                if let Ok(direct) = directly(&fabric, &node).await {
                    direct.close();
                    if let Some(c) = conn.upgrade() {
                        tracing::info!("{} is reachable again", node.name);
                        c.retire();
                    }
                    return;
                }
            }
        });
    }
}

/// The servers that may relay to this one: first those of its own role, which know it best.
fn candidates<'a>(map: &'a MapView, node: &'a pb::Node) -> impl Iterator<Item = &'a pb::Node> {
    let others = |same: bool| {
        map.map.nodes.iter().filter(move |n| n.id != node.id && (n.role == node.role) == same)
    };
    let of_its_kind = others(true).count();
    others(true).chain(others(false).filter(move |_| of_its_kind < ASKED))
}

async fn through(fabric: &Arc<dyn Fabric>, via: &pb::Node, node: NodeId) -> Result<Arc<Relayed>> {
    relay::through(directly(fabric, via).await?, node, ONE).await
}

fn directly<'a>(fabric: &'a Arc<dyn Fabric>, node: &'a pb::Node) -> Attempt<'a> {
    connect(&**fabric, node, ONE)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use parking_lot::Mutex;
    use strake_fabric::{Endpoint, Listener, Pool, Service};
    use tokio::time::Instant;

    use super::*;

    /// A fabric that notes the servers it was asked to connect to, and reaches none.
    struct Nobody(Mutex<Vec<String>>, Pool);

    #[async_trait]
    impl Fabric for Nobody {
        async fn connect(
            &self,
            to: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            self.0.lock().push(to.to_string());
            Err(Error::new(Code::Disconnected, "refused"))
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.1
        }
    }

    /// Metadata servers 1 to 3 and storage servers 4 to 6.
    fn map() -> Arc<MapView> {
        let node = |id| pb::Node {
            id,
            role: if id < 4 { 1 } else { 2 },
            name: format!("n{id}"),
            endpoints: vec![format!("tcp:n{id}:1")],
            ..Default::default()
        };
        let map =
            pb::ClusterMap { version: 1, nodes: (1..=6).map(node).collect(), ..Default::default() };
        Arc::new(MapView::new(map).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_is_gone_round_and_who_refuses_is_not() {
        let (nobody, map) = (Arc::new(Nobody(Mutex::default(), Pool::new(1 << 20))), map());
        let fabric: Arc<dyn Fabric> = nobody.clone();
        let failing = |code, after: u64| async move {
            sleep(Duration::from_millis(after)).await;
            Err(Error::new(code, "in this test"))
        };
        let relays = |on| {
            let new = Relays::new(Env::system(), on, &[0; 16]);
            new.learn(&map);
            new
        };
        for (on, code, after, asked) in [
            (true, Code::Disconnected, 0, &[][..]),
            (true, Code::Unauthenticated, 400, &[]),
            (true, Code::TimedOut, 0, &["tcp:n5:1", "tcp:n6:1"]),
            (true, Code::TimedOut, 1000, &["tcp:n5:1", "tcp:n6:1"]),
            (true, Code::Disconnected, 1000, &["tcp:n5:1", "tcp:n6:1"]),
            (false, Code::TimedOut, 1000, &[]),
        ] {
            let (relays, begun) = (relays(on), Instant::now());
            let e = relays
                .reach(&fabric, map.node(4).unwrap(), failing(code, after))
                .await
                .err()
                .unwrap();
            assert_eq!(e.code, code, "what the direct way said");
            assert_eq!(std::mem::take(&mut *nobody.0.lock()), asked, "{code:?} after {after} ms");
            assert!(begun.elapsed() <= Duration::from_millis(after) + GRACE);
        }
        // Other metadata servers are asked first for a metadata server: they know it best.
        let relays = relays(true);
        let _ = relays.reach(&fabric, map.node(1).unwrap(), failing(Code::TimedOut, 0)).await;
        assert_eq!(*nobody.0.lock(), ["tcp:n2:1", "tcp:n3:1"]);
        assert_eq!(relays.made.load(Relaxed), 0);
    }
}
