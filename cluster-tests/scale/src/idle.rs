//! CPU time and memory of processes while no requests are made.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    Result,
    cluster::{Cluster, Usage, usage},
    report::{Report, mib},
};

/// Percent of a core that each process took, by server; this one's is `self`.
pub struct Sample {
    percent: BTreeMap<String, f64>,
    leader: String,
}

pub async fn sample(cluster: &Cluster, seconds: u64) -> Result<Sample> {
    // Waits until the work after the start, or after opening the sessions, is done.
    sleep(Duration::from_secs(3)).await;
    let leader = cluster.leader()?;
    let mut pids = cluster.pids()?;
    pids.insert("self".into(), 0);
    let look = || {
        pids.iter()
            .map(|(n, pid)| Ok((n.clone(), usage(*pid)?)))
            .collect::<Result<BTreeMap<_, Usage>>>()
    };
    let (before, began) = (look()?, Instant::now());
    sleep(Duration::from_secs(seconds)).await;
    let (after, seconds) = (look()?, began.elapsed().as_secs_f64());
    let percent =
        after.iter().map(|(n, u)| (n.clone(), (u.cpu - before[n].cpu) / seconds * 100.0)).collect();
    Ok(Sample { percent, leader })
}

impl Sample {
    fn mean(&self, of: impl Fn(&str) -> bool) -> f64 {
        let all: Vec<f64> = self.percent.iter().filter(|(n, _)| of(n)).map(|(_, p)| *p).collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    }
}

/// `alone`: the sample without sessions.
pub fn report(alone: &Sample, with: &Sample, report: &mut Report) {
    let mut row = |what: &str, expected, of: &dyn Fn(&Sample, &str) -> bool| {
        let (a, b) = (alone.mean(|n| of(alone, n)), with.mean(|n| of(with, n)));
        report.row(what, expected, format!("{a:.1} % → {b:.1} %"), b);
    };
    row("idle CPU of the metadata leader, without → with sessions", "2 % → 20 %", &|s, n| {
        n == s.leader
    });
    let follows = |s: &Sample, n: &str| n.starts_with("mds") && n != s.leader;
    row("idle CPU of a follower", "1 % → 1 %", &follows);
    row("idle CPU of a storage server, mean", "0.5 % → 0.5 %", &|_, n| n.starts_with("oss"));
    row("idle CPU of the process with all sessions", "0 % → 35 %", &|_, n| n == "self");
}

/// Resident memory at the end.
pub fn memory(cluster: &Cluster, report: &mut Report) -> Result<()> {
    let leader = cluster.leader()?;
    let all = cluster
        .pids()?
        .into_iter()
        .map(|(n, pid)| Ok((n, usage(pid)?)))
        .collect::<Result<BTreeMap<_, _>>>()?;
    let most = |of: &dyn Fn(&str) -> bool| {
        all.iter().filter(|(n, _)| of(n)).map(|(_, u)| u.rss).max().unwrap_or(0) as f64
    };
    let mut row = |what: &str, expected, bytes: f64| report.row(what, expected, mib(bytes), bytes);
    row("memory of the metadata leader at the end", "120 MiB", most(&|n| n == leader));
    row(
        "memory of a follower, the larger",
        "80 MiB",
        most(&|n| n.starts_with("mds") && n != leader),
    );
    row("memory of a storage server, the largest", "60 MiB", most(&|n| n.starts_with("oss")));
    row("memory of the process with all sessions", "550 MiB", usage(0)?.rss as f64);
    Ok(())
}
