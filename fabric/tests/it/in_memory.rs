//! The connection code over pipes in memory, in one thread and under paused time, as a simulator
//! runs it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{
    Connection, Endpoint, Fabric, Identity, Listener, Pool, Service, TcpFabric, conformance,
    tcp::Options,
};
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;
use tokio::sync::watch;

struct Listening {
    fabric: TcpFabric,
    service: Arc<dyn Service>,
    /// Gone when the listener was dropped.
    stop: Weak<watch::Sender<()>>,
    stopping: watch::Receiver<()>,
}

#[derive(Clone)]
struct Pipes {
    fabric: TcpFabric,
    env: Env,
    listeners: Arc<Mutex<BTreeMap<Endpoint, Listening>>>,
}

#[async_trait]
impl Fabric for Pipes {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        {
            let listeners = self.listeners.lock();
            let l = listeners.get(to).filter(|l| l.stop.strong_count() > 0);
            let l =
                l.ok_or_else(|| Error::new(Code::Disconnected, format!("nobody listens at {to}")))?;
            let (f, service, stopping) = (l.fabric.clone(), l.service.clone(), l.stopping.clone());
            let (rd, wr) = tokio::io::split(theirs);
            self.env.spawn(
                async move { f.accept_over(rd, wr, "pipe".into(), service, stopping).await },
            );
        }
        let (rd, wr) = tokio::io::split(ours);
        self.fabric.connect_over(rd, wr, to.to_string(), back).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let (stop, stopping) = watch::channel(());
        let stop = Arc::new(stop);
        let l = Listening {
            fabric: self.fabric.clone(),
            service,
            stop: Arc::downgrade(&stop),
            stopping,
        };
        self.listeners.lock().insert(at.clone(), l);
        Ok(Listener::new(at.clone(), Box::new(stop)))
    }

    fn pool(&self) -> &Pool {
        self.fabric.pool()
    }
}

#[tokio::test(start_paused = true)]
async fn conforms_under_paused_time() {
    let env = Env::system();
    let fabric = TcpFabric::new(
        env.clone(),
        Identity::server(&[1; 32]),
        None,
        Pool::new(512 << 20),
        Options::default(),
    );
    let pipes = Pipes { fabric, env, listeners: Arc::default() };
    conformance::all(&pipes, &pipes, &Endpoint::Sim(1)).await;
}
