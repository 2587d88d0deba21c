//! One fabric over several transports: each endpoint names its transport, and of a server's
//! endpoints the best one that both ends support is taken.

use std::sync::{Arc, Once, OnceLock};

use async_trait::async_trait;
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;

use crate::{
    Connection, Endpoint, Fabric, Identity, Listener, Pool, RdmaFabric, Service, TcpFabric,
    Traffic, conn::Options, rdma,
};

/// Which transports may be used to reach a server that has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    /// RDMA where both ends have it, TCP where not, or where RDMA fails.
    #[default]
    Best,
    /// TCP only.
    Tcp,
    /// RDMA only: without it no server is reached.
    Rdma,
}

impl Use {
    /// The pool for a program that uses these transports. It is smaller, with a log line, where
    /// RDMA is the only transport and the limit for locked memory allows no more. `NoMem`: it
    /// allows none.
    pub fn pool(self, wanted: Pool) -> Result<Pool> {
        if self != Use::Rdma {
            return Ok(wanted);
        }
        let (limit, why) = rdma::pool_limit(wanted.stats().limit)?;
        let Some(why) = why else { return Ok(wanted) };
        tracing::warn!("{why}");
        Ok(Pool::new(limit))
    }
}

/// TCP for `tcp:` endpoints and RDMA for `rdma:` ones, with one pool. Neither replaces the other:
/// where a machine has no RDMA, using an `rdma:` endpoint is an error that says what is missing.
#[derive(Clone)]
pub struct Transports {
    choice: Use,
    tcp: TcpFabric,
    /// Made on first use, if possible.
    pub(crate) rdma: Arc<OnceLock<RdmaFabric>>,
    new_rdma: Arc<dyn Fn() -> Result<RdmaFabric> + Send + Sync>,
    /// Whether it was logged that RDMA is available and not used.
    said: Arc<Once>,
}

impl Transports {
    /// As [`TcpFabric::new`].
    pub fn new(
        env: Env,
        identity: Identity,
        cluster_uuid: Option<[u8; 16]>,
        pool: Pool,
        options: Options,
    ) -> Transports {
        let tcp = TcpFabric::new(
            env.clone(),
            identity.clone(),
            cluster_uuid,
            pool.clone(),
            options.clone(),
        );
        let new_rdma = Arc::new(move || {
            RdmaFabric::new(
                env.clone(),
                identity.clone(),
                cluster_uuid,
                pool.clone(),
                options.clone(),
            )
        });
        Transports {
            choice: Use::Best,
            tcp,
            rdma: Arc::default(),
            new_rdma,
            said: Arc::new(Once::new()),
        }
    }

    /// Limits the transports that are used to reach servers that have several.
    #[must_use]
    pub fn only(mut self, choice: Use) -> Transports {
        self.choice = choice;
        self
    }

    fn rdma(&self) -> Result<&RdmaFabric> {
        if let Some(f) = self.rdma.get() {
            return Ok(f);
        }
        let made = (self.new_rdma)()?;
        Ok(self.rdma.get_or_init(|| made))
    }

    fn transport(&self, at: &Endpoint) -> Result<&dyn Fabric> {
        match at {
            Endpoint::Rdma(..) => match self.rdma() {
                Ok(f) => Ok(f),
                Err(e) => Err(e.context(format!("cannot use {at}"))),
            },
            _ => Ok(&self.tcp),
        }
    }

    fn rdma_with_all_memory(&self) -> Result<&RdmaFabric> {
        let f = self.rdma()?;
        f.with_all_memory().map(|()| f)
    }
}

#[async_trait]
impl Fabric for Transports {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        self.transport(to)?.connect(to, back).await
    }

    async fn connect_as_client(&self, to: &Endpoint) -> Result<Arc<dyn Connection>> {
        self.transport(to)?.connect_as_client(to).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        self.transport(at)?.listen(at, service).await
    }

    fn pool(&self) -> &Pool {
        self.tcp.pool()
    }

    fn routes(&self, endpoints: &[String]) -> Result<Vec<Endpoint>> {
        let all = endpoints.iter().filter_map(|e| e.parse().ok());
        let (rdma, mut others): (Vec<Endpoint>, Vec<_>) =
            all.partition(|e| matches!(e, Endpoint::Rdma(..)));
        let lacks = |transport: &str, asked: &str| {
            let m = format!(
                "the server has no {transport} endpoint, only {}, and {asked} was asked for",
                endpoints.join(" and ")
            );
            Err(Error::new(Code::OpNotSupp, m))
        };
        match self.choice {
            Use::Tcp if others.is_empty() && !rdma.is_empty() => lacks("TCP", "TCP only"),
            Use::Rdma if rdma.is_empty() => lacks("RDMA", "RDMA only"),
            Use::Tcp => Ok(others),
            Use::Rdma => self.rdma().map(|f| f.by_rail(rdma)),
            Use::Best if rdma.is_empty() => Ok(others),
            Use::Best => match self.rdma_with_all_memory() {
                Ok(f) => Ok([f.by_rail(rdma), others].concat()),
                Err(e) if others.is_empty() => Err(e),
                Err(e) => {
                    match e.code {
                        // Both ends have RDMA, and a setting prevents its use.
                        Code::NoMem => self.said.call_once(|| tracing::warn!("{}", e.message)),
                        _ => tracing::debug!("RDMA is not used: {e}"),
                    }
                    others.dedup();
                    Ok(others)
                }
            },
        }
    }

    fn transports(&self) -> Vec<(&'static str, Traffic)> {
        [self.tcp.transports(), self.rdma.get().map(Fabric::transports).unwrap_or_default()]
            .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::TestService;

    fn transports() -> Transports {
        Transports::new(
            Env::system(),
            Identity::server(&[1; 32]),
            None,
            Pool::new(16 << 20),
            Options::default(),
        )
    }

    #[tokio::test]
    async fn an_endpoint_is_never_reached_by_another_transport() {
        let transports = transports();
        let service = Arc::new(TestService::default());
        let guard =
            transports.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service.clone()).await.unwrap();
        assert!(transports.connect(guard.endpoint(), None).await.is_ok());
        let Endpoint::Tcp(host, port) = guard.endpoint().clone() else { unreachable!() };
        let rdma = Endpoint::Rdma(host, port);
        let e = transports.connect(&rdma, None).await.err().unwrap();
        match crate::rdma::probe() {
            Ok(_) => println!("skipped: this machine has RDMA"),
            Err(why) => {
                assert!(e.code == why.code && e.message.ends_with(&why.message), "{e}");
                assert!(transports.listen(&rdma, service).await.is_err());
            }
        }
    }

    #[test]
    fn the_best_transport_that_both_ends_have_is_taken_and_no_other_than_asked_for() {
        let (tcp, rdma) = ("tcp:10.0.0.1:1".to_string(), "rdma:10.0.0.1:2".to_string());
        let both = [tcp.clone(), rdma.clone()];
        let said = |r: Result<Vec<Endpoint>>| {
            r.map(|v| v.iter().map(Endpoint::to_string).collect::<Vec<_>>())
        };
        let routes = |choice, e: &[String]| said(transports().only(choice).routes(e));
        assert_eq!(routes(Use::Tcp, &both).unwrap(), [tcp.as_str()]);
        assert_eq!(routes(Use::Best, std::slice::from_ref(&tcp)).unwrap(), [tcp.as_str()]);
        assert_eq!(routes(Use::Best, &["nonsense".into(), tcp.clone()]).unwrap(), [tcp.as_str()]);
        for (choice, only) in [(Use::Tcp, &rdma), (Use::Rdma, &tcp)] {
            let e = routes(choice, std::slice::from_ref(only)).unwrap_err();
            assert!(e.code == Code::OpNotSupp && e.message.contains(only.as_str()), "{e}");
        }
        match crate::rdma::probe() {
            Ok(_) => {
                assert_eq!(routes(Use::Rdma, &both).unwrap(), [rdma.as_str()]);
                assert_eq!(routes(Use::Best, &both).unwrap(), [rdma.as_str(), tcp.as_str()]);
            }
            Err(why) => {
                assert_eq!(routes(Use::Best, &both).unwrap(), [tcp.as_str()]);
                for (choice, e) in [(Use::Rdma, &both[..]), (Use::Best, &both[1..])] {
                    assert_eq!(routes(choice, e).unwrap_err().message, why.message);
                }
            }
        }
    }

    #[tokio::test]
    async fn bytes_are_counted_by_transport_and_connection() {
        let (near, far) = (transports(), transports());
        let service = Arc::new(TestService::default());
        let guard = far.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service.clone()).await.unwrap();
        let conn = near.connect(guard.endpoint(), None).await.unwrap();
        let payload = crate::conformance::pattern(100_000, 1);
        let m = crate::Message::new(strake_proto::opcode::ECHO, "").with_payload(vec![payload]);
        let got = conn.call(m, std::time::Duration::from_secs(10)).await.unwrap();
        assert_eq!(
            (got.went, got.payload[0].transport()),
            (crate::Transport::Tcp, crate::Transport::Tcp)
        );
        let of = conn.traffic();
        assert!(of.sent > 100_000 && of.received > 100_000 && of.sent < 101_000, "{of:?}");
        let total = |f: &Transports| f.transports()[0];
        assert!(
            total(&near).0 == "tcp"
                && total(&near).1.connections == 1
                && total(&near).1.sent >= of.sent
        );
        assert!(total(&far).1.received >= of.sent);
        drop(conn);
        service.until(|s| s.disconnected.load(std::sync::atomic::Ordering::SeqCst) == 1).await;
        while total(&near).1.connections + total(&far).1.connections > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert!(total(&near).1.sent >= of.sent, "kept when the connection is gone");
    }
}
