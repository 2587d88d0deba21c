//! Connections to other storage servers and to the metadata servers.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Connection, Endpoint, Fabric, Message};
use strake_links::{
    ConnectionPool, LeaderFinder, connect, payloads,
    pool::{Attempt, Limits},
    traffic,
};
use strake_proto::{Code, Error, NodeId, Result, map::MapView, opcode, pb};
use strake_runtime::Env;

/// Older failures are no longer reported, unless a connection is being tried.
const RECENT: Duration = Duration::from_secs(1);
const CONNECT: Duration = Duration::from_secs(1);

/// Separates messages that wait for other messages from those they wait for, so that full windows
/// cannot block in a circle. Messages to a replica with `n` replicas behind it use a connection of
/// their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Forward(u8),
    Flush(u8),
    /// The receiver answers alone.
    Other,
    /// The receiver answers after a look at its own data, for which it may ask others with messages
    /// of [`Lane::Other`].
    Vouch,
}

pub(super) struct Peers {
    env: Env,
    fabric: Arc<dyn Fabric>,
    pool: ConnectionPool<(NodeId, Lane)>,
    /// When a node last failed to answer, if it has not answered since.
    failing: Mutex<BTreeMap<NodeId, Duration>>,
    /// How many calls wait for a connection.
    connecting: Mutex<BTreeMap<NodeId, usize>>,
}

/// A call that waits for a connection to this node.
struct Connecting<'a>(&'a Peers, NodeId);

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        let mut connecting = self.0.connecting.lock();
        if let Some(n) = connecting.get_mut(&self.1) {
            *n -= 1;
            if *n == 0 {
                connecting.remove(&self.1);
            }
        }
    }
}

fn unanswered(e: &Error) -> bool {
    matches!(e.code, Code::Disconnected | Code::TimedOut | Code::Unauthenticated)
}

impl Peers {
    pub(super) fn new(env: Env, fabric: Arc<dyn Fabric>) -> Peers {
        Peers {
            env,
            fabric,
            pool: ConnectionPool::new(Limits::default()),
            failing: Mutex::default(),
            connecting: Mutex::default(),
        }
    }

    /// Calls a node of the map. Errors of connecting read as `Disconnected`: clients see them, and
    /// must not take them for a refusal of their own.
    pub(super) async fn call(
        &self,
        map: &MapView,
        node: NodeId,
        lane: Lane,
        m: Message,
        timeout: Duration,
    ) -> Result<Message> {
        let connecting = self.connecting(node);
        let connection = self.connect(map, node, lane).await;
        // From here on the node may be up again, but slow.
        drop(connecting);
        let result = match connection {
            Ok(conn) => conn.call(payloads::request(m), timeout).await,
            Err(e) => Err(Error::new(Code::Disconnected, e.message)),
        };
        let mut failing = self.failing.lock();
        match &result {
            Err(e) if unanswered(e) => failing.insert(node, self.env.boot()),
            _ => failing.remove(&node),
        };
        result
    }

    fn connecting(&self, node: NodeId) -> Connecting<'_> {
        *self.connecting.lock().entry(node).or_default() += 1;
        Connecting(self, node)
    }

    /// The connection of a lane, opened if there is none. A failed attempt counts for all calls
    /// that waited for it. If each made its own attempt in turn, the last of many would learn only
    /// after minutes that the node does not answer.
    async fn connect(
        &self,
        map: &MapView,
        node: NodeId,
        lane: Lane,
    ) -> Result<Arc<dyn Connection>> {
        let made = || -> Attempt<'_> {
            match map.node(node) {
                Some(n) => connect(&*self.fabric, n, CONNECT),
                None => Box::pin(async move {
                    let m = format!("node {node} is not in the map");
                    Err(Error::new(Code::Disconnected, m))
                }),
            }
        };
        self.pool.get(&(node, lane), made).await
    }

    /// Traffic over each transport.
    pub(super) fn transports(&self) -> Vec<pb::TransportStatus> {
        traffic::transports(&*self.fabric)
    }

    /// Nodes that recently did not answer, for the heartbeat. A node behind a cut link stays in the
    /// list between attempts, although an attempt takes as long as failures are remembered. If a
    /// heartbeat left it out, the metadata servers would start counting again.
    pub(super) fn unreachable(&self) -> Vec<NodeId> {
        let now = self.env.boot();
        let connecting = self.connecting.lock();
        let mut failing = self.failing.lock();
        failing.retain(|n, at| now.saturating_sub(*at) < RECENT || connecting.contains_key(n));
        failing.keys().copied().collect()
    }
}

async fn connect_to(fabric: &dyn Fabric, to: &Endpoint) -> Result<Arc<dyn Connection>> {
    match tokio::time::timeout(CONNECT, fabric.connect(to, None)).await {
        Ok(r) => r,
        Err(_) => Err(Error::new(Code::TimedOut, format!("{to} does not accept connections"))),
    }
}

/// The connection to the leading metadata server.
pub(super) struct MdsLink {
    fabric: Arc<dyn Fabric>,
    finder: LeaderFinder,
    open: Option<(Endpoint, Arc<dyn Connection>)>,
}

impl MdsLink {
    /// `configured`: the servers to ask before a map names them.
    pub(super) fn new(fabric: Arc<dyn Fabric>, configured: Vec<Endpoint>) -> MdsLink {
        MdsLink { fabric, finder: LeaderFinder::new(configured), open: None }
    }

    /// One attempt. After a failure the next attempt goes to the leader if the answer named it,
    /// else to the next server.
    pub(super) async fn call(
        &mut self,
        map: &MapView,
        m: Message,
        timeout: Duration,
    ) -> Result<Message> {
        self.finder.learn(map.mds());
        let (at, conn) = self.connection().await?;
        let result = conn.call(m, timeout).await;
        match &result {
            Ok(_) => self.finder.found(&at),
            Err(e) => match e.code {
                Code::NotLeader
                | Code::Disconnected
                | Code::TimedOut
                | Code::Unauthenticated
                | Code::Protocol => {
                    self.open = None;
                    self.finder.failed(&at);
                    if e.code == Code::NotLeader && e.leader != 0 {
                        self.hint(map, &*conn, e.leader).await;
                    }
                }
                _ => {}
            },
        }
        result
    }

    /// Asks the leader next. It may have joined a moment ago; then the map of the server that named
    /// it has its address.
    async fn hint(&mut self, map: &MapView, named_by: &dyn Connection, leader: NodeId) {
        let address = |n: &pb::Node| n.endpoints.iter().find_map(|e| e.parse::<Endpoint>().ok());
        let mut at = map.node(leader).and_then(address);
        if at.is_none() {
            let m = Message::new(
                opcode::MAP,
                pb::MapRequest { have: map.version(), latest: false }.encode_to_vec(),
            );
            let reply = named_by.call(m, Duration::from_secs(1)).await.ok();
            let newer = reply.and_then(|m| pb::MapReply::decode(m.body).ok()?.map);
            at = newer.and_then(|map| map.nodes.iter().find(|n| n.id == leader).and_then(address));
        }
        if let Some(at) = at {
            self.finder.hint(at);
        }
    }

    /// The server that answered last is not the one to ask: go on to the next.
    pub(super) fn reject(&mut self) {
        if let Some((at, conn)) = self.open.take() {
            conn.close();
            self.finder.failed(&at);
        }
    }

    async fn connection(&mut self) -> Result<(Endpoint, Arc<dyn Connection>)> {
        if let Some((at, conn)) = self.open.as_ref().filter(|(_, c)| !c.is_closed()) {
            return Ok((at.clone(), conn.clone()));
        }
        let none = || Error::new(Code::Inval, "no metadata server is configured");
        let at = self.finder.whom().ok_or_else(none)?;
        match connect_to(&*self.fabric, &at).await {
            Ok(conn) => {
                self.open = Some((at.clone(), conn.clone()));
                Ok((at, conn))
            }
            Err(e) => {
                self.open = None;
                self.finder.failed(&at);
                Err(Error::new(Code::Disconnected, e.message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use async_trait::async_trait;
    use futures_util::future::join_all;
    use strake_fabric::{Listener, Pool, Service};
    use strake_runtime::Clock;
    use tokio::time::Instant;

    use super::*;

    struct PausedClock(Instant);

    impl Clock for PausedClock {
        fn unix_ns(&self) -> i64 {
            0
        }
        fn boot(&self) -> Duration {
            self.0.elapsed()
        }
    }

    /// Node 1 is silent, it does not even refuse; the others answer.
    struct Silence {
        attempts: AtomicU64,
        pool: Pool,
    }

    struct Open;

    #[async_trait]
    impl Connection for Open {
        async fn call(&self, m: Message, _: Duration) -> Result<Message> {
            Ok(m)
        }
        fn is_closed(&self) -> bool {
            false
        }
        fn addr(&self) -> String {
            "open".into()
        }
        fn close(&self) {}
    }

    #[async_trait]
    impl Fabric for Silence {
        async fn connect(
            &self,
            to: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            self.attempts.fetch_add(1, Relaxed);
            match to {
                Endpoint::Sim(1) => std::future::pending().await,
                _ => Ok(Arc::new(Open)),
            }
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.pool
        }
    }

    fn peers() -> (Peers, Arc<Silence>, MapView) {
        let fabric = Arc::new(Silence { attempts: AtomicU64::default(), pool: Pool::new(1 << 20) });
        let node = |id: u32| pb::Node {
            id,
            role: 2,
            endpoints: vec![format!("sim:{id}")],
            ..Default::default()
        };
        let map =
            pb::ClusterMap { version: 1, nodes: vec![node(1), node(2)], ..Default::default() };
        let env = Env::new(Arc::new(PausedClock(Instant::now())), [7; 32]);
        (Peers::new(env, fabric.clone()), fabric, MapView::new(map).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn one_attempt_to_connect_is_that_of_all_who_wait_for_it() {
        let (peers, fabric, map) = peers();
        let call = |node| peers.call(&map, node, Lane::Forward(0), Message::default(), CONNECT);
        for round in 1..4 {
            let began = Instant::now();
            for r in join_all((0..64).map(|_| call(1))).await {
                assert_eq!(r.unwrap_err().code, Code::Disconnected);
            }
            assert_eq!(
                (began.elapsed(), fabric.attempts.load(Relaxed)),
                (CONNECT, round),
                "who asks later tries anew"
            );
            assert_eq!(peers.unreachable(), [1]);
        }
    }

    /// An attempt to connect and the pause before it take longer than a failure is remembered.
    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_tried_again_and_again_stays_unreachable() {
        let (peers, _, map) = peers();
        let call = |node| peers.call(&map, node, Lane::Forward(0), Message::default(), CONNECT);
        call(1).await.unwrap_err();
        let tries = async {
            for _ in 0..3 {
                tokio::time::sleep(RECENT / 2).await;
                call(1).await.unwrap_err();
            }
        };
        let heartbeats = async {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                assert_eq!(peers.unreachable(), [1]);
            }
        };
        tokio::select! {
            () = tries => {}
            () = heartbeats => {}
        }
        // An open connection does not count against a node, however long a call takes.
        assert!(peers.connecting.lock().is_empty());
        tokio::time::sleep(RECENT).await;
        assert_eq!(peers.unreachable(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_connection_to_another() {
        let (peers, _, map) = peers();
        let call = |node| peers.call(&map, node, Lane::Forward(0), Message::default(), CONNECT);
        let began = Instant::now();
        let silent = async {
            call(1).await.unwrap_err();
            began.elapsed()
        };
        let other = async {
            call(2).await.unwrap();
            began.elapsed()
        };
        assert_eq!(tokio::join!(silent, other), (CONNECT, Duration::ZERO));
    }
}
