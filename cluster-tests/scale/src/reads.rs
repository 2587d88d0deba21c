//! Reads that no cache answers, at the leader only and with followers: how many there are, and what
//! they cost the leader.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use strake_client::{Client, FollowerReads};
use strake_proto::pb::{self, op::Op};
use tokio::time::{Instant, sleep};

use crate::{
    Result,
    clients::Clients,
    cluster::{Cluster, usage},
    report::Report,
};

/// Number of names in the directory that is read; all are directories.
const NAMES: u64 = 1000;
/// Length of each measurement. Each kind of clients is measured `TURNS` times, in turn.
const SECONDS: u64 = 5;
const TURNS: usize = 3;

/// The request that a client repeats.
#[derive(Clone, Copy)]
enum Ask {
    /// One stat.
    Stat,
    /// All names with their attributes.
    List,
}

/// The result for one kind of clients.
#[derive(Default)]
struct Sum {
    reads: u64,
    seconds: f64,
    /// CPU seconds of the leader, and of the other metadata servers.
    leader: f64,
    others: f64,
    followed: u64,
}

impl Sum {
    fn text(&self) -> String {
        let (rate, each) = (self.reads as f64 / self.seconds, 1000.0 / self.reads.max(1) as f64);
        format!(
            "{rate:.0}/s; CPU s per 1,000: leader {:.3}, the other two {:.3}; {:.0} % answered by followers",
            self.leader * each,
            self.others * each,
            self.followed as f64 * 100.0 / self.reads.max(1) as f64
        )
    }
}

/// Measures with `n` clients of each kind.
pub async fn measure(cluster: &Cluster, n: usize, report: &mut Report) -> Result<()> {
    let mut kinds = Vec::new();
    for mode in [FollowerReads::Never, FollowerReads::Always] {
        kinds.push((mode, Clients::connect_as(cluster, n, mode).await?));
    }
    let (first, me) = (&kinds[0].1.all[0], kinds[0].1.me.clone());
    let dir = first.mkdir(&me, first.root(), b"reads", 0o755).await?.ino;
    let mut inos = Vec::new();
    for i in 0..NAMES {
        inos.push(first.mkdir(&me, dir, format!("name-{i:05}").as_bytes(), 0o755).await?.ino);
    }
    for (ask, what, expected) in [
        (Ask::Stat, "stats", ["6,000/s, leader 0.10", "4,000/s, leader 0.03"]),
        (
            Ask::List,
            "listings of 1,000 names with attributes",
            ["300/s, leader 2", "300/s, leader 0.1"],
        ),
    ] {
        let mut sums = [Sum::default(), Sum::default()];
        for _ in 0..TURNS {
            for ((_, clients), sum) in kinds.iter().zip(&mut sums) {
                once(cluster, clients, ask, dir, &inos, sum).await?;
            }
        }
        for (((mode, _), sum), expected) in kinds.iter().zip(&sums).zip(expected) {
            let value = sum.leader * 1000.0 / sum.reads.max(1) as f64;
            report.row(
                format!("{what}, {n} clients, follower_reads={mode:?}"),
                expected,
                sum.text(),
                value,
            );
        }
    }
    for (_, clients) in kinds {
        clients.close().await;
    }
    Ok(())
}

async fn once(
    cluster: &Cluster,
    clients: &Clients,
    ask: Ask,
    dir: u64,
    inos: &[u64],
    sum: &mut Sum,
) -> Result<()> {
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let leader = cluster.leader()?;
    let cpu = || -> Result<(f64, f64)> {
        let mut both = (0.0, 0.0);
        for (name, pid) in cluster.pids()?.into_iter().filter(|(name, _)| name.starts_with("mds")) {
            *(if name == leader { &mut both.0 } else { &mut both.1 }) += usage(pid)?.cpu;
        }
        Ok(both)
    };
    let followed = || clients.all.iter().map(|c| c.stats().follower_reads).sum::<u64>();
    let (began, before, followed_before) = (Instant::now(), cpu()?, followed());
    let timer = async {
        sleep(Duration::from_secs(SECONDS)).await;
        let took = began.elapsed().as_secs_f64();
        let after = cpu()?;
        (sum.seconds, sum.leader, sum.others) =
            (sum.seconds + took, sum.leader + after.0 - before.0, sum.others + after.1 - before.1);
        sum.reads += reads.load(Relaxed);
        sum.followed += followed() - followed_before;
        stop.store(true, Relaxed);
        Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    };
    let asking = clients.each(|i, client| {
        let (stop, reads, me) = (stop.clone(), reads.clone(), clients.me.clone());
        let inos = inos.to_vec();
        async move {
            for n in (i * 37).. {
                if stop.load(Relaxed) {
                    break;
                }
                look(&client, &me, ask, dir, inos[n % inos.len()]).await?;
                reads.fetch_add(1, Relaxed);
            }
            Ok(())
        }
    });
    let (timed, asked) = tokio::join!(timer, asking);
    timed?;
    asked.map(drop)
}

/// Sends a list of operations, which no cache answers.
async fn look(
    client: &Client,
    me: &strake_client::Creds,
    ask: Ask,
    dir: u64,
    ino: u64,
) -> Result<()> {
    let op = match ask {
        Ask::Stat => Op::Getattr(pb::GetAttr { ino }),
        Ask::List => Op::Readdir(pb::Readdir { dir, cookie: 0, limit: NAMES as u32, attrs: true }),
    };
    let results = client.compound(me, vec![pb::Op { op: Some(op) }]).await?;
    match results.first() {
        Some(r)
            if r.status.is_none()
                && (matches!(ask, Ask::Stat) || r.entries.len() as u64 == NAMES) =>
        {
            Ok(())
        }
        r => Err(format!("an odd answer: {:?}", r.map(|r| &r.status)).into()),
    }
}
