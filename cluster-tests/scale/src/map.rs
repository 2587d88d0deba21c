//! The cluster map: its size, and how long until all clients have a new one.

use std::time::Duration;

use prost::Message as _;
use tokio::time::{Instant, sleep, timeout};

use crate::{Result, clients::Clients, cluster::Cluster, report::Report};

const LIMIT: Duration = Duration::from_secs(60);

pub async fn measure(
    cluster: &Cluster,
    clients: &Clients,
    rounds: u32,
    report: &mut Report,
) -> Result<()> {
    let map = clients.all[0].servers().fetch_map().await?;
    let bytes = map.map.encoded_len();
    let measured = format!(
        "{bytes} bytes, {} targets, {} chains",
        map.map.targets.len(),
        map.map.chains.len()
    );
    report.row("size of the cluster map", "95,000 bytes", measured, bytes as f64);
    let mut times = Vec::new();
    for n in 0..rounds {
        let server = format!("oss{}", n % cluster.oss + 1);
        let before = clients.all[0].servers().fetch_map().await?.version();
        cluster.kill(&server)?;
        // Its lease runs out, then its targets leave their chains, which is one change of the map.
        let asked = timeout(LIMIT, async {
            loop {
                let asked = Instant::now();
                let version = clients.all[0].servers().fetch_map().await?.version();
                if version > before {
                    return Ok::<_, strake_proto::Error>((asked, version));
                }
                sleep(Duration::from_millis(2)).await;
            }
        });
        let (began, version) = asked.await.map_err(|_| "the map did not change")??;
        let mut waiting: Vec<_> = clients.all.iter().skip(1).collect();
        while !waiting.is_empty() {
            waiting.retain(|c| {
                let has = c.servers().map().version() >= version;
                if has {
                    times.push(began.elapsed());
                }
                !has
            });
            if began.elapsed() > LIMIT {
                return Err(
                    format!("{} clients have no new map after {LIMIT:?}", waiting.len()).into()
                );
            }
            sleep(Duration::from_millis(2)).await;
        }
        cluster.up()?;
        sleep(Duration::from_secs(2)).await;
    }
    times.sort_unstable();
    report.times(
        "a storage server dies: from the new map until a client has it",
        "p50 200 ms, longest 500 ms",
        &times,
    );
    Ok(())
}
