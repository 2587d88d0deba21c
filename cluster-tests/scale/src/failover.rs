//! The metadata leader is killed while all sessions are open.

use std::time::Duration;

use strake_client::Client;
use strake_proto::Code;
use tokio::time::{Instant, sleep};

use crate::{Result, clients::Clients, cluster::Cluster, report::Report};

pub async fn measure(
    cluster: &Cluster,
    clients: &Clients,
    rounds: u32,
    report: &mut Report,
) -> Result<()> {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for n in 0..rounds {
        let leader = cluster.leader()?;
        let began = Instant::now();
        cluster.kill(&leader)?;
        let me = clients.me.clone();
        // A name that was never looked up, so that no cache can answer.
        let ask = move |i: usize, c: Client| {
            let (me, name) = (me.clone(), format!("failover-{n}-{i}"));
            async move {
                match c.lookup(&me, c.root(), name.as_bytes()).await {
                    Err(e) if e.code != Code::NoEnt => Err(e.into()),
                    _ => Ok(()),
                }
            }
        };
        let skew = began.elapsed();
        let times = clients.each(ask).await?;
        first.push(times[0] + skew);
        last.push(times[times.len() - 1] + skew);
        sleep(Duration::from_secs(1)).await;
        cluster.up()?;
        sleep(Duration::from_secs(3)).await;
    }
    first.sort_unstable();
    last.sort_unstable();
    report.times(
        "the metadata leader is killed: until the first session is served",
        "1.0 s",
        &first,
    );
    report.times("until the last of all sessions is served", "2.0 s", &last);
    Ok(())
}
