//! Connections to storage servers: a few per node, made when first needed and made again after they
//! broke.

use futures_util::future::BoxFuture;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_fabric::{Connection, Fabric};
use strake_proto::{Code, Error, NodeId, Result, pb};
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::data::relays::Relays;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long after a failure other callers get the same error before the node is tried again.
const FAILURE_STANDS: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Slot {
    conn: Option<(Arc<dyn Connection>, Instant)>,
    failed: Option<(Instant, Error)>,
}

struct Node {
    slots: Vec<AsyncMutex<Slot>>,
    turn: AtomicUsize,
    /// When a connection of this node was last seen to have ended: no connection made before that
    /// is trusted.
    ended: Mutex<Option<Instant>>,
}

impl Node {
    /// A connection whose end is not noticed yet is as dead as the one that was noticed, and each
    /// would be waited for in turn.
    fn notice_ends(&self) {
        let mut any = false;
        for mut slot in self.slots.iter().filter_map(|s| s.try_lock().ok()) {
            any |= slot.conn.take_if(|(c, _)| c.is_closed()).is_some();
        }
        if any {
            *self.ended.lock() = Some(Instant::now());
        }
    }
}

pub(crate) struct Connections {
    per_node: usize,
    nodes: Mutex<BTreeMap<NodeId, Arc<Node>>>,
    /// Servers that can pass requests on to a node that is not reached directly, if used.
    relays: Option<Arc<Relays>>,
}

impl Connections {
    pub fn new(per_node: usize) -> Connections {
        Connections { per_node, nodes: Mutex::default(), relays: None }
    }

    /// Like `new`, but nodes that are not reached directly are reached through others.
    pub fn relayed(per_node: usize, relays: Arc<Relays>) -> Connections {
        Connections { relays: Some(relays), ..Connections::new(per_node) }
    }

    /// A working connection to a node, round robin among its connections.
    pub fn get<'a>(
        &'a self,
        fabric: &'a Arc<dyn Fabric>,
        node: &'a pb::Node,
    ) -> BoxFuture<'a, Result<Arc<dyn Connection>>> {
        Box::pin(async move {
            let n = self.nodes.lock().entry(node.id).or_insert_with(|| self.new_node()).clone();
            let turn = n.turn.fetch_add(1, Relaxed) % n.slots.len();
            if self.relays.is_some() {
                n.notice_ends();
            }
            let mut slot = n.slots[turn].lock().await;
            let ended = *n.ended.lock();
            if let Some((c, made)) = &slot.conn
                && !c.is_closed()
                && ended.is_none_or(|ended| *made >= ended)
            {
                return Ok(c.clone());
            }
            if let Some((at, e)) = &slot.failed
                && at.elapsed() < FAILURE_STANDS
            {
                return Err(e.clone());
            }
            slot.conn = None;
            let direct = connect(fabric, node);
            let made = match &self.relays {
                Some(relays) => relays.reach(fabric, node, direct).await,
                None => direct.await,
            };
            match made {
                Ok(c) => {
                    *slot = Slot { conn: Some((c.clone(), Instant::now())), failed: None };
                    Ok(c)
                }
                Err(e) => {
                    slot.failed = Some((Instant::now(), e.clone()));
                    Err(e)
                }
            }
        })
    }

    fn new_node(&self) -> Arc<Node> {
        let slots = (0..self.per_node).map(|_| AsyncMutex::default()).collect();
        Arc::new(Node { slots, turn: AtomicUsize::new(0), ended: Mutex::default() })
    }

    /// The connections that are open.
    pub fn ways(&self) -> Vec<pb::WayStatus> {
        let nodes = self.nodes.lock();
        let mut all = Vec::new();
        for (node, n) in nodes.iter() {
            let open = n
                .slots
                .iter()
                .filter_map(|s| s.try_lock().ok()?.conn.clone().filter(|c| !c.0.is_closed()));
            all.extend(open.map(|(c, _)| {
                let t = c.traffic();
                pb::WayStatus {
                    node: *node,
                    endpoint: c.addr(),
                    sent: t.sent,
                    received: t.received,
                }
            }));
        }
        all
    }

    pub fn close(&self) {
        for n in std::mem::take(&mut *self.nodes.lock()).into_values() {
            for s in &n.slots {
                if let Ok(s) = s.try_lock()
                    && let Some((c, _)) = &s.conn
                {
                    c.close();
                }
            }
        }
    }
}

/// The resource that a connection lacks, here or there, may become available: a caller that may
/// wait does so, as for a server that is away. The error says that the server is away even where it
/// answered that it has too many connections. Only a client that is refused for its identity or
/// protocol sees that error itself.
fn away(e: Error) -> Error {
    match e.code {
        Code::Unauthenticated | Code::Protocol | Code::TimedOut => e,
        _ => Error { code: Code::Disconnected, ..e },
    }
}

async fn connect(fabric: &Arc<dyn Fabric>, node: &pb::Node) -> Result<Arc<dyn Connection>> {
    let mut last = Error::new(
        Code::Disconnected,
        format!("node {} ({}) has no usable endpoint", node.id, node.name),
    );
    let failed = |e: Error| away(e).context(format_args!("connecting to {}", node.name));
    for endpoint in fabric.ways(&node.endpoints).map_err(failed)? {
        last = match tokio::time::timeout(CONNECT_TIMEOUT, fabric.connect(&endpoint, None)).await {
            Ok(Ok(c)) => return Ok(c),
            Ok(Err(e)) => {
                away(e).context(format_args!("connecting to {} at {endpoint}", node.name))
            }
            Err(_) => {
                Error::new(Code::TimedOut, format!("{} at {endpoint} does not answer", node.name))
            }
        };
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use async_trait::async_trait;
    use strake_fabric::{Endpoint, Listener, Message, Pool, Service};

    use super::*;

    /// A fabric on which every connect fails with this code; without one, every connect succeeds.
    struct Reached {
        why_not: Mutex<Option<Code>>,
        pool: Pool,
    }

    struct Open;

    #[async_trait]
    impl Connection for Open {
        async fn call(&self, _: Message, _: Duration) -> Result<Message> {
            Err(Error::new(Code::Disconnected, "nobody"))
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
    impl Fabric for Reached {
        async fn connect(
            &self,
            _: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            match *self.why_not.lock() {
                Some(code) => Err(Error::new(code, "of this reason")),
                None => Ok(Arc::new(Open)),
            }
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.pool
        }
    }

    /// A connection that ends when the test says so.
    struct Numbered(usize, AtomicBool);

    #[async_trait]
    impl Connection for Numbered {
        async fn call(&self, _: Message, _: Duration) -> Result<Message> {
            Err(Error::new(Code::Disconnected, "nobody"))
        }
        fn is_closed(&self) -> bool {
            self.1.load(Relaxed)
        }
        fn addr(&self) -> String {
            self.0.to_string()
        }
        fn close(&self) {
            self.1.store(true, Relaxed);
        }
    }

    /// A fabric that connects and counts the connects.
    struct Counts(AtomicUsize, Pool);

    #[async_trait]
    impl Fabric for Counts {
        async fn connect(
            &self,
            _: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            Ok(Arc::new(Numbered(self.0.fetch_add(1, Relaxed), AtomicBool::new(false))))
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.1
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_one_connection_ends_no_other_one_of_before_is_waited_for() {
        let fabric: Arc<dyn Fabric> = Arc::new(Counts(AtomicUsize::new(0), Pool::new(1 << 20)));
        let node = pb::Node {
            id: 4,
            name: "oss4".into(),
            endpoints: vec!["tcp:h:1".into()],
            ..Default::default()
        };
        let relays = Arc::new(Relays::new(strake_runtime::Env::system(), true, &[0; 16]));
        for (conns, renewed) in
            [(Connections::relayed(3, relays), true), (Connections::new(3), false)]
        {
            let mut all = Vec::new();
            for _ in 0..3 {
                all.push(conns.get(&fabric, &node).await.unwrap());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            all[0].close();
            let mut news = 0;
            for round in 0..9 {
                let c = conns.get(&fabric, &node).await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
                let old = all.iter().any(|a| a.addr() == c.addr());
                assert!(!(old && renewed), "round {round}");
                if !old {
                    news += 1;
                }
            }
            assert_eq!(news, if renewed { 9 } else { 3 }, "each has its turn three times");
            assert_eq!(conns.ways().len(), 3);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connect_that_fails_for_lack_of_anything_is_a_server_that_is_away() {
        let reached = Arc::new(Reached { why_not: Mutex::default(), pool: Pool::new(1 << 20) });
        let fabric: Arc<dyn Fabric> = reached.clone();
        let node = pb::Node {
            id: 4,
            name: "oss4".into(),
            endpoints: vec!["rdma:h:1".into()],
            ..Default::default()
        };
        let conns = Connections::new(1);
        for code in Code::ALL {
            *reached.why_not.lock() = Some(*code);
            tokio::time::sleep(FAILURE_STANDS * 2).await;
            let e = conns.get(&fabric, &node).await.err().unwrap();
            let whole = "connecting to oss4 at rdma:h:1: of this reason";
            assert_eq!(e.message, whole, "{code:?}");
            let refused = matches!(code, Code::Unauthenticated | Code::Protocol);
            // The error is as for a server that does not answer, and it says why.
            assert_eq!(
                matches!(e.code, Code::Disconnected | Code::TimedOut),
                !refused,
                "{code:?} reads as {:?}",
                e.code
            );
            // Asked again right after that: the same error.
            assert_eq!(conns.get(&fabric, &node).await.err().unwrap().message, whole);
        }
        *reached.why_not.lock() = None;
        tokio::time::sleep(FAILURE_STANDS * 2).await;
        assert!(conns.get(&fabric, &node).await.is_ok());
    }
}
