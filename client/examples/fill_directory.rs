//! Makes a directory of many files with few requests: `fill_directory MDS,... KEYFILE NAME COUNT`.
//! The files are named stay-0 and so on, in the new directory NAME of the root. Used by
//! `cluster-tests/posix/big-directory`.

use std::{env, error::Error, sync::Arc};

use strake_client::{Client, Config, Creds};
use strake_fabric::{Identity, Pool, tcp::TcpFabric};
use strake_proto::pb::{self, op::Op};
use strake_runtime::{Env, keyfile::read_client};

/// Files made by one request; a request may have 8192 operations.
const AT_ONCE: usize = 4096;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [mds, key_file, name, count] = &args[..] else {
        return Err("usage: MDS,... KEYFILE NAME COUNT".into());
    };
    let (mds, count) =
        (mds.split(',').map(str::parse).collect::<strake_proto::Result<_>>()?, count.parse()?);
    let env = Env::system();
    let fabric = TcpFabric::new(
        env.clone(),
        Identity::client(read_client(key_file.as_ref())?),
        None,
        Pool::default(),
        Default::default(),
    );
    let client = Client::connect(Config::new(mds), env, Arc::new(fabric)).await?;
    let root = Creds::default();
    let parent = client.mkdir(&root, client.root(), name.as_bytes(), 0o777).await?.ino;
    for start in (0..count).step_by(AT_ONCE) {
        let make = |i: usize| pb::Mknod {
            parent,
            name: format!("stay-{i}").into_bytes().into(),
            mode: 0o100_644,
            ..Default::default()
        };
        let ops =
            (start..count.min(start + AT_ONCE)).map(|i| pb::Op { op: Some(Op::Mknod(make(i))) });
        let made = client.compound(&root, ops.collect()).await?;
        if let Some(status) = made.into_iter().find_map(|r| r.status) {
            return Err(format!("file {start} or one after it: {}", status.message).into());
        }
    }
    client.close().await?;
    Ok(())
}
