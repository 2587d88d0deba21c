//! Connections to storage servers: a few per node, made when first needed and made again after they
//! broke.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use strake_fabric::{Connection, Fabric};
use strake_links::{
    ConnectionPool, connect,
    pool::{Attempt, Limits},
};
use strake_proto::{NodeId, Result, pb};

use crate::data::relays::Relays;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long after a failure other callers get the same error before the node is tried again.
const FAILURE_STANDS: Duration = Duration::from_millis(100);

pub(crate) struct Connections {
    pool: ConnectionPool<NodeId>,
    /// Servers that can pass requests on to a node that is not reached directly, if used.
    relays: Option<Arc<Relays>>,
}

impl Connections {
    pub fn new(per_node: usize) -> Connections {
        Connections::with(per_node, None)
    }

    /// Like `new`, but nodes that are not reached directly are reached through others.
    pub fn relayed(per_node: usize, relays: Arc<Relays>) -> Connections {
        Connections::with(per_node, Some(relays))
    }

    fn with(per_server: usize, relays: Option<Arc<Relays>>) -> Connections {
        let end_together = relays.is_some();
        let limits = Limits { per_server, failure_stands: FAILURE_STANDS, end_together };
        Connections { pool: ConnectionPool::new(limits), relays }
    }

    /// A working connection to a node, round robin among its connections.
    pub fn get<'a>(
        &'a self,
        fabric: &'a Arc<dyn Fabric>,
        node: &'a pb::Node,
    ) -> BoxFuture<'a, Result<Arc<dyn Connection>>> {
        Box::pin(self.pool.get(&node.id, move || self.reach(fabric, node)))
    }

    fn reach<'a>(&'a self, fabric: &'a Arc<dyn Fabric>, node: &'a pb::Node) -> Attempt<'a> {
        let direct = connect(&**fabric, node, CONNECT_TIMEOUT);
        match &self.relays {
            Some(relays) => Box::pin(relays.reach(fabric, node, direct)),
            None => direct,
        }
    }

    /// The connections that are open.
    pub fn statuses(&self) -> Vec<pb::ConnectionStatus> {
        let status = |(node, c): (NodeId, Arc<dyn Connection>)| {
            let t = c.traffic();
            pb::ConnectionStatus { node, endpoint: c.addr(), sent: t.sent, received: t.received }
        };
        self.pool.open().into_iter().map(status).collect()
    }

    pub fn close(&self) {
        self.pool.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

    use async_trait::async_trait;
    use parking_lot::Mutex;
    use strake_fabric::{Endpoint, Listener, Message, Pool, Service};
    use strake_proto::{Code, Error};

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
            assert_eq!(conns.statuses().len(), 3);
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
