//! Times writes of 4 KiB, in order and at random, with and without write-back by turns:
//! `small_writes MDS,... KEYFILE MIB ROUNDS`. Each round's file is synced at its end, which counts.
//! Used for `docs/performance.md`.

use std::{env, error::Error, sync::Arc, time::Instant};

use strake_client::{Client, Config, Creds, File};
use strake_fabric::{Identity, Pool, tcp::TcpFabric};
use strake_proto::layout::splitmix64;
use strake_runtime::{Env, keyfile::read_client};

const BLOCK: u64 = 4096;
const RDWR: u32 = 2;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

async fn connect(mds: &str, key_file: &str, write_back: bool) -> Result<Client> {
    let mds = mds.split(',').map(str::parse).collect::<strake_proto::Result<_>>()?;
    let env = Env::system();
    let pool = Pool::new(512 << 20);
    let fabric = TcpFabric::new(
        env.clone(),
        Identity::client(read_client(key_file.as_ref())?),
        None,
        pool,
        Default::default(),
    );
    Ok(Client::connect(Config { write_back, ..Config::new(mds) }, env, Arc::new(fabric)).await?)
}

/// Seconds until all is written, and until it is synced.
async fn write(client: &Client, file: &File, blocks: u64, random: bool) -> Result<(f64, f64)> {
    let (began, mut seed) = (Instant::now(), 7);
    for n in 0..blocks {
        let mut block = client.pool().get(BLOCK as usize).await?;
        block.fill(n as u8);
        let at = if random { splitmix64(&mut seed) % blocks } else { n };
        file.write(at * BLOCK, vec![block.freeze()]).await?;
    }
    let written = began.elapsed().as_secs_f64();
    file.fsync().await?;
    Ok((written, began.elapsed().as_secs_f64()))
}

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [mds, key_file, mib, rounds] = &args[..] else {
        return Err("usage: MDS,... KEYFILE MIB ROUNDS".into());
    };
    let (blocks, rounds) = ((mib.parse::<u64>()? << 20) / BLOCK, rounds.parse::<u64>()?);
    let clients = [
        ("through", connect(mds, key_file, false).await?),
        ("back", connect(mds, key_file, true).await?),
    ];
    let root = Creds::default();
    for round in 0..rounds {
        for random in [false, true] {
            for (how, client) in &clients {
                let name = format!("small-{round}-{random}-{how}");
                let (file, _) = client
                    .create(&root, client.root(), name.as_bytes(), 0o644, RDWR, false, None)
                    .await?;
                let before = client.stats().data_writes;
                let (written, synced) = write(client, &file, blocks, random).await?;
                let requests = client.stats().data_writes - before;
                file.close().await?;
                client.unlink(&root, client.root(), name.as_bytes()).await?;
                let order = if random { "random" } else { "in order" };
                println!(
                    "{order}, {how}: {:.0} writes/s, {:.0} writes/s with fsync, {requests} requests",
                    blocks as f64 / written,
                    blocks as f64 / synced
                );
            }
        }
    }
    for (_, client) in &clients {
        client.close().await?;
    }
    Ok(())
}
