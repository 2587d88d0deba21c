//! Connections to storage servers, and the fabric they go over.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_fabric::{Connection, Fabric};
use strake_proto::{Code, Error, Result, pb};
use tokio::time::{Instant, timeout};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// After a failed connect, requests for that server fail at once for this long before another try:
/// otherwise many waiting requests would each try for a second, one after the other.
const FAILURE_STANDS: Duration = Duration::from_millis(500);
/// Beyond this many connections broken ones are forgotten.
const MAX_LINKS: usize = 1024;

/// The connection to one server, or the result of the last try for one.
#[derive(Default)]
struct Link {
    open: Option<Arc<dyn Connection>>,
    failed: Option<(Instant, Error)>,
}

/// Locked while the connection is made.
type Slot = Arc<tokio::sync::Mutex<Link>>;

/// One connection per storage server, over the best of its endpoints that answered, kept until it
/// breaks.
pub(super) struct Links {
    fabric: Arc<dyn Fabric>,
    /// By the servers' endpoints.
    open: Mutex<BTreeMap<Vec<String>, Slot>>,
}

impl Links {
    pub(super) fn new(fabric: Arc<dyn Fabric>) -> Links {
        Links { fabric, open: Mutex::default() }
    }

    pub(super) fn fabric(&self) -> &dyn Fabric {
        &*self.fabric
    }

    fn slot(&self, at: &[String]) -> Slot {
        let mut open = self.open.lock();
        if open.len() >= MAX_LINKS && !open.contains_key(at) {
            // Servers may have returned at other addresses, again and again.
            open.retain(|_, s| {
                s.try_lock().map_or(true, |l| l.open.as_ref().is_some_and(|c| !c.is_closed()))
            });
        }
        open.entry(at.to_vec()).or_default().clone()
    }

    /// The connection to a storage server, made if there is none. A failure is returned to all that
    /// waited for it, and to requests soon after.
    pub(super) async fn get(&self, node: &pb::Node) -> Result<Arc<dyn Connection>> {
        let slot = self.slot(&node.endpoints);
        let mut slot = slot.lock().await;
        if let Some(c) = slot.open.as_ref().filter(|c| !c.is_closed()) {
            return Ok(c.clone());
        }
        if let Some((at, e)) = &slot.failed
            && at.elapsed() < FAILURE_STANDS
        {
            return Err(e.clone());
        }
        let made = self.connect(node).await;
        *slot = match &made {
            Ok(c) => Link { open: Some(c.clone()), failed: None },
            Err(e) => Link { open: None, failed: Some((Instant::now(), e.clone())) },
        };
        made
    }

    async fn connect(&self, node: &pb::Node) -> Result<Arc<dyn Connection>> {
        let mut last =
            Error::new(Code::Inval, format!("storage server '{}' has no endpoint", node.name));
        let failed = |e: Error| e.context(format_args!("storage server '{}'", node.name));
        for at in self.fabric.ways(&node.endpoints).map_err(failed)? {
            match timeout(CONNECT_TIMEOUT, self.fabric.connect(&at, None)).await {
                Ok(Ok(c)) => return Ok(c),
                Ok(Err(e)) => {
                    last = e.context(format_args!("storage server '{}' at {at}", node.name))
                }
                Err(_) => {
                    last = Error::new(
                        Code::TimedOut,
                        format!("storage server '{}' at {at}", node.name),
                    )
                }
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use async_trait::async_trait;
    use futures_util::future::try_join_all;
    use strake_fabric::{Endpoint, Listener, Message, Pool, Service};

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
            Ok(Arc::new(Open(AtomicBool::new(false))))
        }
        async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
            Err(Error::new(Code::OpNotSupp, "nothing listens here"))
        }
        fn pool(&self) -> &Pool {
            &self.0
        }
    }

    struct Open(AtomicBool);

    #[async_trait]
    impl Connection for Open {
        async fn call(&self, _: Message, _: Duration) -> Result<Message> {
            Err(Error::new(Code::Disconnected, "nobody"))
        }
        fn is_closed(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
        fn addr(&self) -> String {
            "nowhere".into()
        }
        fn close(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn links_that_broke_are_forgotten_when_there_are_many() {
        let links = Links::new(Arc::new(Nowhere(Pool::new(1 << 20), Arc::default())));
        let node =
            |n: usize| pb::Node { endpoints: vec![format!("tcp:h:{n}")], ..Default::default() };
        let kept = links.get(&node(1)).await.unwrap();
        for n in 2..=3 * MAX_LINKS {
            links.get(&node(n)).await.unwrap().close();
            assert!(links.open.lock().len() <= MAX_LINKS);
        }
        let again = links.get(&node(1)).await.unwrap();
        assert!(Arc::ptr_eq(&kept, &again), "one that works stays");
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
    async fn a_road_that_leads_nowhere_is_not_tried_again_while_another_is_open() {
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
