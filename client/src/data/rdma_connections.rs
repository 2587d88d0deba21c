//! Separate connections for foreign memory, several to each storage server. One queue pair into a
//! GPU's memory is slower than its link. A call that is given up ends its connection, which must
//! not disturb other requests.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_fabric::{Connection, Fabric};
use strake_proto::{Code, Error, NodeId, Result, pb};
use tokio::time::Instant;

use crate::data::connections::Connections;

/// Least number of connections to each storage server, whatever the number of other connections.
/// They are spread over the rails in the same way.
pub(crate) const LANES: usize = 4;

/// When no connection could be opened for so long to a server that is reached otherwise, the server
/// counts as having none. This is longer than a dead server's connections stay open.
const GIVE_UP: Duration = Duration::from_secs(4);
/// A failure older than this says nothing about the next one.
const FORGET: Duration = Duration::from_secs(10);

pub(crate) struct RdmaConnections {
    connections: Connections,
    /// Nodes to which no connection could be opened: the first and the last failure.
    failing: Mutex<BTreeMap<NodeId, (Instant, Instant)>>,
}

impl RdmaConnections {
    pub fn new(wanted: usize) -> RdmaConnections {
        RdmaConnections {
            connections: Connections::new(wanted.max(LANES)),
            failing: Mutex::default(),
        }
    }

    /// The next connection to a node, round robin; opened when first needed. `OpNotSupp`: there is
    /// none that lends memory, or none can be opened although `others` reach the server.
    pub async fn get(
        &self,
        fabric: &Arc<dyn Fabric>,
        node: &pb::Node,
        others: &Connections,
    ) -> Result<Arc<dyn Connection>> {
        match self.open(fabric, node).await {
            Err(e) if matches!(e.code, Code::Disconnected | Code::TimedOut) => {
                if self.has_failed_long(node.id) && others.get(fabric, node).await.is_ok() {
                    let m = format_args!(
                        "{} is reachable, but not by RDMA, so memory cannot be lent to it",
                        node.name
                    );
                    return Err(Error { code: Code::OpNotSupp, ..e }.context(m));
                }
                Err(e)
            }
            r => {
                self.failing.lock().remove(&node.id);
                r
            }
        }
    }

    /// Notes a failure; returns whether failures have gone on for [`GIVE_UP`].
    fn has_failed_long(&self, node: NodeId) -> bool {
        let (now, mut failing) = (Instant::now(), self.failing.lock());
        let (first, last) = failing.entry(node).or_insert((now, now));
        if *last + FORGET < now {
            *first = now;
        }
        *last = now;
        now - *first >= GIVE_UP
    }

    async fn open(&self, fabric: &Arc<dyn Fabric>, node: &pb::Node) -> Result<Arc<dyn Connection>> {
        let node = &without_tcp(node)?;
        // What is missing on this node does not appear by waiting, and the caller can do without
        // it.
        let missing = |e: Error| match fabric.routes(&node.endpoints) {
            Err(why) => Error {
                code: Code::OpNotSupp,
                ..why.context(format_args!("lending memory to {}", node.name))
            },
            Ok(_) => e,
        };
        let conn = self.connections.get(fabric, node).await.map_err(missing)?;
        if conn.lends() { Ok(conn) } else { Err(no_lane(node)) }
    }

    /// The connections that are open.
    pub fn statuses(&self) -> Vec<pb::ConnectionStatus> {
        self.connections.statuses()
    }

    pub fn close(&self) {
        self.connections.close();
    }
}

fn no_lane(node: &pb::Node) -> Error {
    let m = format!("{} is not reachable by RDMA, so memory cannot be lent to it", node.name);
    Error::new(Code::OpNotSupp, m)
}

/// The same node without its TCP endpoints.
fn without_tcp(node: &pb::Node) -> Result<pb::Node> {
    let endpoints: Vec<String> =
        node.endpoints.iter().filter(|e| !e.starts_with("tcp:")).cloned().collect();
    if endpoints.is_empty() {
        return Err(no_lane(node));
    }
    Ok(pb::Node { endpoints, ..node.clone() })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    use async_trait::async_trait;
    use strake_fabric::{Endpoint, Listener, Message, Pool, Service};

    use super::*;

    /// A fabric that never connects by RDMA; by TCP it connects to every server or to none.
    struct NoRdma {
        tcp: Mutex<bool>,
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
    impl Fabric for NoRdma {
        async fn connect(
            &self,
            to: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            match to {
                Endpoint::Tcp(..) if *self.tcp.lock() => Ok(Arc::new(Open)),
                _ => Err(Error::new(Code::Disconnected, "refused")),
            }
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.pool
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_reached_otherwise_is_not_waited_for_and_one_that_is_away_is() {
        let no_rdma = Arc::new(NoRdma { tcp: Mutex::new(false), pool: Pool::new(1 << 20) });
        let fabric: Arc<dyn Fabric> = no_rdma.clone();
        let endpoints = vec!["rdma:127.0.0.1:1".into(), "tcp:127.0.0.1:1".into()];
        let node = pb::Node { id: 4, name: "oss4".into(), endpoints, ..Default::default() };
        let (lanes, others) = (RdmaConnections::new(1), Connections::new(1));
        let begun = Instant::now();
        while begun.elapsed() < GIVE_UP * 5 {
            let e = lanes.get(&fabric, &node, &others).await.err().unwrap();
            assert_eq!(e.code, Code::Disconnected, "it is away: {e}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        // The server is back, but not by RDMA. The earlier failure is too old to count.
        tokio::time::sleep(FORGET * 2).await;
        *no_rdma.tcp.lock() = true;
        let begun = Instant::now();
        let e = loop {
            let e = lanes.get(&fabric, &node, &others).await.err().unwrap();
            if e.code != Code::Disconnected {
                break e;
            }
            assert!(begun.elapsed() < GIVE_UP * 2, "{e}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        };
        assert!(begun.elapsed() >= GIVE_UP, "it may be on its way back");
        assert!(
            e.code == Code::OpNotSupp
                && e.message.starts_with("oss4 is reachable, but not by RDMA"),
            "{e}"
        );
    }

    /// A fabric that connects after a while, unless it is out of order, and counts how often it was
    /// asked to.
    struct Slow {
        asked: AtomicUsize,
        out_of_order: AtomicBool,
        pool: Pool,
    }

    struct Lane {
        n: usize,
        closed: AtomicBool,
    }

    #[async_trait]
    impl Connection for Lane {
        async fn call(&self, _: Message, _: Duration) -> Result<Message> {
            Err(Error::new(Code::Disconnected, "nobody"))
        }
        fn is_closed(&self) -> bool {
            self.closed.load(SeqCst)
        }
        fn lends(&self) -> bool {
            true
        }
        fn addr(&self) -> String {
            format!("lane {}", self.n)
        }
        fn close(&self) {
            self.closed.store(true, SeqCst);
        }
    }

    #[async_trait]
    impl Fabric for Slow {
        async fn connect(
            &self,
            to: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            assert!(matches!(to, Endpoint::Rdma(..)), "{to}");
            let n = self.asked.fetch_add(1, SeqCst);
            tokio::time::sleep(Duration::from_millis(100)).await;
            if self.out_of_order.load(SeqCst) {
                return Err(Error::new(Code::Disconnected, "refused"));
            }
            Ok(Arc::new(Lane { n, closed: AtomicBool::new(false) }))
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nobody listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.pool
        }
    }

    #[tokio::test(start_paused = true)]
    async fn there_are_four_lanes_whoever_asks_at_once_and_one_that_fails_is_replaced() {
        let slow = Arc::new(Slow {
            asked: AtomicUsize::new(0),
            out_of_order: AtomicBool::new(false),
            pool: Pool::new(1 << 20),
        });
        let fabric: Arc<dyn Fabric> = slow.clone();
        let endpoints = vec!["rdma:127.0.0.1:1".into(), "tcp:127.0.0.1:1".into()];
        let node = pb::Node { id: 4, name: "oss4".into(), endpoints, ..Default::default() };
        for (wanted, there) in [(1, 4), (4, 4), (6, 6)] {
            let (lanes, others) = (RdmaConnections::new(wanted), Connections::new(1));
            slow.asked.store(0, SeqCst);
            // Counts, for so many requests at once, how often each connection was returned; a
            // request that got none counts as "nobody".
            let take = async |requests: usize| {
                let all = (0..requests).map(|_| lanes.get(&fabric, &node, &others));
                let mut of = BTreeMap::<String, usize>::new();
                for got in futures_util::future::join_all(all).await {
                    *of.entry(got.map_or_else(|_| "nobody".into(), |c| c.addr())).or_default() += 1;
                }
                of
            };
            let named = |names: &[usize], times: usize| -> BTreeMap<String, usize> {
                names.iter().map(|n| (format!("lane {n}"), times)).collect()
            };
            let first: Vec<usize> = (0..there).collect();
            assert_eq!(take(2 * there).await, named(&first, 2), "each twice, none opened twice");
            assert_eq!(slow.asked.load(SeqCst), there);
            assert_eq!(lanes.statuses().len(), there);

            // One connection fails: the others stay, and only it is opened again.
            lanes.get(&fabric, &node, &others).await.unwrap().close();
            assert_eq!(lanes.statuses().len(), there - 1);
            let second: Vec<usize> = (1..=there).collect();
            assert_eq!(take(2 * there).await, named(&second, 2));
            assert_eq!(slow.asked.load(SeqCst), there + 1);

            // Where opening it fails too, the request whose turn it is gets the error, the others
            // get their connections, and it is tried again later.
            slow.out_of_order.store(true, SeqCst);
            take(1).await;
            lanes.get(&fabric, &node, &others).await.unwrap().close();
            let got = take(there).await;
            assert_eq!((got.len(), got.get("nobody")), (there, Some(&1)), "{got:?}");
            slow.out_of_order.store(false, SeqCst);
            tokio::time::sleep(Duration::from_secs(1)).await;
            let got = take(there).await;
            assert!(
                got.len() == there && got.contains_key(&format!("lane {}", there + 2)),
                "{got:?}"
            );
        }
    }

    #[test]
    fn a_server_without_rdma_has_no_lanes_and_is_named() {
        let node = |endpoints: &[&str]| pb::Node {
            name: "oss4".into(),
            endpoints: endpoints.iter().map(|e| (*e).into()).collect(),
            ..Default::default()
        };
        let e = without_tcp(&node(&["tcp:h:1"])).unwrap_err();
        assert!(
            e.code == Code::OpNotSupp && e.message.starts_with("oss4 is not reachable by RDMA"),
            "{e}"
        );
        assert_eq!(without_tcp(&node(&["tcp:h:1", "rdma:h:2"])).unwrap().endpoints, ["rdma:h:2"]);
    }
}
