//! One fabric of several roads: each endpoint says which one leads to it.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use strake_proto::Result;

use crate::{
    Connection, Endpoint, Env, Fabric, Identity, Listener, Pool, RdmaFabric, Service, TcpFabric, conn::Options, rdma,
};

/// TCP for `tcp:` endpoints and RDMA for `rdma:` ones, with one pool. Neither ever stands in for the other: where a machine has no RDMA,
/// using an `rdma:` endpoint is an error that says what is missing.
#[derive(Clone)]
pub struct Roads {
    tcp: TcpFabric,
    /// Made when it is first asked for and can be.
    rdma: Arc<OnceLock<RdmaFabric>>,
    new_rdma: Arc<dyn Fn() -> Result<RdmaFabric> + Send + Sync>,
}

impl Roads {
    /// As [`TcpFabric::new`].
    pub fn new(env: Env, identity: Identity, cluster_uuid: Option<[u8; 16]>, pool: Pool, options: Options) -> Roads {
        let tcp = TcpFabric::new(env.clone(), identity.clone(), cluster_uuid, pool.clone(), options.clone());
        let new_rdma = Arc::new(move || {
            if let (_, Some(why)) = rdma::pool_limit(pool.stats().limit)? {
                tracing::warn!("{why}");
            }
            RdmaFabric::new(env.clone(), identity.clone(), cluster_uuid, pool.clone(), options.clone())
        });
        Roads { tcp, rdma: Arc::default(), new_rdma }
    }

    fn road(&self, at: &Endpoint) -> Result<&dyn Fabric> {
        match at {
            Endpoint::Rdma(..) => {
                if self.rdma.get().is_none() {
                    let made = (self.new_rdma)().map_err(|e| e.context(format!("cannot use {at}")))?;
                    let _ = self.rdma.set(made);
                }
                Ok(self.rdma.get().expect("made above"))
            }
            _ => Ok(&self.tcp),
        }
    }
}

#[async_trait]
impl Fabric for Roads {
    async fn connect(&self, to: &Endpoint, back: Option<Arc<dyn Service>>) -> Result<Arc<dyn Connection>> {
        self.road(to)?.connect(to, back).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        self.road(at)?.listen(at, service).await
    }

    fn pool(&self) -> &Pool {
        self.tcp.pool()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::TestService;

    #[tokio::test]
    async fn an_endpoint_is_never_reached_by_another_road() {
        let roads =
            Roads::new(Env::system(), Identity::server(&[1; 32]), None, Pool::new(16 << 20), Options::default());
        let service = Arc::new(TestService::default());
        let guard = roads.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service.clone()).await.unwrap();
        assert!(roads.connect(guard.endpoint(), None).await.is_ok());
        let Endpoint::Tcp(host, port) = guard.endpoint().clone() else { unreachable!() };
        let rdma = Endpoint::Rdma(host, port);
        let e = roads.connect(&rdma, None).await.err().unwrap();
        match crate::rdma::probe() {
            Ok(_) => println!("skipped: this machine has RDMA"),
            Err(why) => {
                assert!(e.code == why.code && e.message.ends_with(&why.message), "{e}");
                assert!(roads.listen(&rdma, service).await.is_err());
            }
        }
    }
}
