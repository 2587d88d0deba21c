//! Connections to storage servers, and the fabric they go over.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Connection, Fabric};
use strake_links::{ConnectionPool, connect, pool::Limits};
use strake_proto::{Result, pb};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// After a failed connect, requests for that server fail at once for this long before another try:
/// many requests for it are repeated after shorter pauses.
const FAILURE_STANDS: Duration = Duration::from_millis(500);

/// One connection per storage server, over the best of its endpoints that answered, kept until it
/// breaks.
pub(super) struct Links {
    fabric: Arc<dyn Fabric>,
    /// By the servers' endpoints.
    pool: ConnectionPool<Vec<String>>,
}

impl Links {
    pub(super) fn new(fabric: Arc<dyn Fabric>) -> Links {
        let limits = Limits { failure_stands: FAILURE_STANDS, ..Limits::default() };
        Links { fabric, pool: ConnectionPool::new(limits) }
    }

    pub(super) fn fabric(&self) -> &dyn Fabric {
        &*self.fabric
    }

    /// The connection to a storage server, made if there is none. A failure is returned to all that
    /// waited for it, and to requests soon after.
    pub(super) async fn get(&self, node: &pb::Node) -> Result<Arc<dyn Connection>> {
        self.pool.get(&node.endpoints, || connect(&*self.fabric, node, CONNECT_TIMEOUT)).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use futures_util::future::try_join_all;
    use strake_fabric::{Endpoint, Listener, Pool, Service, conformance::Open};
    use strake_proto::{Code, Error};
    use tokio::time::Instant;

    use super::*;

    /// Reaches every host, by TCP only, except the host `dead`, which is silent. Counts failed
    /// connection attempts.
    struct Nowhere(Pool, Arc<AtomicUsize>);

    #[async_trait]
    impl Fabric for Nowhere {
        async fn connect(
            &self,
            to: &Endpoint,
            _: Option<Arc<dyn Service>>,
        ) -> Result<Arc<dyn Connection>> {
            if matches!(to, Endpoint::Rdma(..)) || to.to_string().contains(":dead:") {
                self.1.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(CONNECT_TIMEOUT * 2).await;
            }
            Ok(Arc::new(Open::default()))
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nothing listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_dead_server_is_told_with_the_first_and_it_is_tried_again_later() {
        let tried = Arc::new(AtomicUsize::new(0));
        let links = Links::new(Arc::new(Nowhere(Pool::new(1 << 20), tried.clone())));
        let node = |host: &str| pb::Node {
            endpoints: vec![format!("tcp:{host}:1")],
            ..Default::default()
        };
        let (dead, start) = (node("dead"), Instant::now());
        let all = futures_util::future::join_all((0..100).map(|_| links.get(&dead))).await;
        assert!(all.iter().all(|r| r.as_ref().is_err_and(|e| e.code == Code::TimedOut)));
        assert_eq!((tried.load(Ordering::Relaxed), start.elapsed()), (1, CONNECT_TIMEOUT));
        // A request soon after is answered at once, too, but one for another server is not.
        assert!(links.get(&dead).await.is_err() && links.get(&node("h")).await.is_ok());
        assert_eq!((tried.load(Ordering::Relaxed), start.elapsed()), (1, CONNECT_TIMEOUT));
        tokio::time::sleep(FAILURE_STANDS).await;
        assert!(links.get(&dead).await.is_err());
        assert_eq!(tried.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_transport_that_leads_nowhere_is_not_tried_again_while_another_is_open() {
        let tried = Arc::new(AtomicUsize::new(0));
        let links = Links::new(Arc::new(Nowhere(Pool::new(1 << 20), tried.clone())));
        let both = ["rdma:h:1", "tcp:h:1"].map(String::from).to_vec();
        let node = pb::Node { endpoints: both, ..Default::default() };
        let start = Instant::now();
        let all = try_join_all((0..8).map(|_| links.get(&node))).await.unwrap();
        assert!(all.iter().all(|c| Arc::ptr_eq(c, &all[0])), "who waited has the same");
        assert!(Arc::ptr_eq(&all[0], &links.get(&node).await.unwrap()));
        assert_eq!((tried.load(Ordering::Relaxed), start.elapsed()), (1, CONNECT_TIMEOUT));
        // It is made when the other one breaks.
        all[0].close();
        assert!(!links.get(&node).await.unwrap().is_closed());
        assert_eq!(tried.load(Ordering::Relaxed), 2);
    }
}
