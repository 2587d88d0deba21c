//! The sessions: one library client each. All share a runtime, a fabric and its pool of buffers.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, TryStreamExt, future::join_all, stream};
use parking_lot::Mutex;
use strake_client::{Client, Config, Creds, FollowerReads};
use strake_fabric::{Endpoint, Fabric, Identity, Pool, TcpFabric};
use strake_runtime::Env;
use tokio::time::Instant;

use crate::{
    Result,
    cluster::{Cluster, usage},
    counting::{Counting, Counts},
    report::{Report, mib, ms},
};

/// Sessions that are opened at a time.
const AT_ONCE: usize = 32;

pub struct Clients {
    pub all: Vec<Client>,
    pub me: Creds,
    counts: Arc<Mutex<Counts>>,
}

impl Clients {
    pub async fn connect(cluster: &Cluster, n: usize, report: &mut Report) -> Result<Clients> {
        let (before, began) = (usage(0)?, Instant::now());
        let clients = Self::connect_as(cluster, n, FollowerReads::default()).await?;
        let (took, after) = (began.elapsed(), usage(0)?);
        report.row("sessions opened, 32 at a time", "3 s", ms(took), n as f64);
        let each = (after.rss.saturating_sub(before.rss)) as f64 / n as f64;
        let measured = format!("{} each ({} threads for all)", mib(each), after.threads);
        report.row(
            "memory of a session in this process, its map included",
            "0.5 MiB",
            measured,
            each,
        );
        Ok(clients)
    }

    /// Opens `n` sessions with this mode of follower reads.
    pub async fn connect_as(
        cluster: &Cluster,
        n: usize,
        follower_reads: FollowerReads,
    ) -> Result<Clients> {
        let mds = cluster
            .mds
            .iter()
            .map(|s| s.parse())
            .collect::<strake_proto::Result<Vec<Endpoint>>>()?;
        let (env, counts) = (Env::system(), Arc::default());
        let identity = Identity::client(cluster.client_key);
        let tcp = TcpFabric::new(env.clone(), identity, None, Pool::default(), Default::default());
        let fabric: Arc<dyn Fabric> = Arc::new(Counting::new(Arc::new(tcp), Arc::clone(&counts)));
        let one = |i: usize| {
            let config = Config {
                hostname: format!("scale-{i}"),
                follower_reads,
                ..Config::new(mds.clone())
            };
            Client::connect(config, env.clone(), fabric.clone())
        };
        let all: Vec<Client> =
            stream::iter((0..n).map(one)).buffer_unordered(AT_ONCE).try_collect().await?;
        // SAFETY: these only read the ids of this process.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        Ok(Clients { all, me: Creds { uid, gid, groups: vec![] }, counts })
    }

    pub fn counts(&self) -> Counts {
        self.counts.lock().clone()
    }

    /// Runs `f` for all clients at the same time and returns how long each took, sorted. Fails with
    /// the first error.
    pub async fn each<F, Fut>(&self, f: F) -> Result<Vec<Duration>>
    where
        F: Fn(usize, Client) -> Fut,
        Fut: Future<Output = Result<()>> + Send + 'static,
    {
        let timed = |(i, c): (usize, &Client)| {
            let work = f(i, c.clone());
            tokio::spawn(async move {
                let began = Instant::now();
                work.await.map(|()| began.elapsed())
            })
        };
        let running: Vec<_> = self.all.iter().enumerate().map(timed).collect();
        let mut times = Vec::with_capacity(running.len());
        for done in join_all(running).await {
            times.push(done??);
        }
        times.sort_unstable();
        Ok(times)
    }

    /// How many clients may answer this inode's attributes from their cache.
    pub async fn hold(&self, ino: u64) -> Result<usize> {
        let mut n = 0;
        for c in &self.all {
            let attr = c.getattr(&self.me, ino).await?;
            n += usize::from(!c.copies().attr_valid(&attr).is_zero());
        }
        Ok(n)
    }

    pub async fn close(self) {
        stream::iter(self.all)
            .for_each_concurrent(AT_ONCE, |c| async move { drop(c.close().await) })
            .await;
    }
}
