//! Finds the files with data on given chains: what is lost if a target is given up, and what comes
//! back with a target that is kept.

use std::{collections::BTreeSet, time::Duration};

use strake_client::{Client, Creds};
use strake_proto::{ChainId, Code, Ino, Result, layout::StripeMap, pb};
use strake_runtime::ClientKey;

use crate::mount;

/// Time limit of the search, and the maximum number of files named.
const PATIENCE: Duration = Duration::from_secs(20);
const NAMED: usize = 100;

/// The result of a search so far.
#[derive(Default)]
struct Found {
    files: usize,
    paths: Vec<String>,
    more: usize,
}

/// Lines that name the files with data on one of these chains, as far as they are found within the
/// time limit.
pub(crate) async fn files_on(
    mds: &[String],
    key: ClientKey,
    chains: &BTreeSet<ChainId>,
) -> Vec<String> {
    let mut found = Found::default();
    let all = async {
        let client = mount::connect(mds, key).await?;
        let walked = walk(&client, chains, &mut found).await;
        client.close().await.and(walked)
    };
    let end = tokio::time::timeout(PATIENCE, all).await;
    let mut lines: Vec<String> = found.paths.iter().map(|p| format!("  {p}")).collect();
    if found.more > 0 {
        lines.push(format!("  and {} more", found.more));
    }
    match end {
        Ok(Ok(())) if lines.is_empty() => lines.push("  none".into()),
        Ok(Ok(())) => {}
        Ok(Err(e)) => lines.push(format!(
            "  the list of files is incomplete ({e}); `strake fsck` names all of them"
        )),
        Err(_) => {
            let (n, s) = (found.files, PATIENCE.as_secs());
            lines.push(format!(
                "  only {n} files were checked in {s} s; `strake fsck` names all of them"
            ));
        }
    }
    lines
}

async fn walk(client: &Client, chains: &BTreeSet<ChainId>, found: &mut Found) -> Result<()> {
    let creds = Creds { uid: 0, gid: 0, groups: vec![] };
    let mut folders = vec![(client.root(), String::new())];
    while let Some((dir, path)) = folders.pop() {
        let mut cookie = 0;
        loop {
            let page = match client.readdir(&creds, dir, cookie, 1000, true).await {
                Err(e) if e.code == Code::NoEnt => break, // removed since its name was seen
                page => page?,
            };
            for e in &page.entries {
                cookie = cookie.max(e.cookie);
                let path = format!("{path}/{}", String::from_utf8_lossy(&e.name));
                match e.r#type << 12 {
                    libc::S_IFDIR => folders.push((e.ino, path)),
                    libc::S_IFREG => {
                        found.files += 1;
                        match is_on(client, &creds, e.ino, e.attr.as_ref(), chains).await {
                            Ok(true) if found.paths.len() < NAMED => found.paths.push(path),
                            Ok(true) => found.more += 1,
                            Ok(false) => {}
                            Err(e) if e.code == Code::NoEnt => {}
                            Err(e) => return Err(e),
                        }
                    }
                    _ => {}
                }
            }
            if page.end || page.entries.is_empty() {
                break;
            }
        }
    }
    Ok(())
}

/// Whether bytes below the file's end belong on one of these chains.
async fn is_on(
    client: &Client,
    creds: &Creds,
    ino: Ino,
    attr: Option<&pb::Attr>,
    chains: &BTreeSet<ChainId>,
) -> Result<bool> {
    let size = match attr {
        Some(a) => a.size,
        None => client.getattr(creds, ino).await?.size,
    };
    if size == 0 {
        return Ok(false);
    }
    let Some(layout) = client.layouts().get(creds, ino).await?.layout else { return Ok(false) };
    let map = StripeMap::resolve(ino, &layout, &client.servers().map())?;
    let chunks = map.cut(size).first_gone;
    let ours = map.chains.iter().filter(|c| chains.contains(c));
    Ok(ours.into_iter().any(|c| map.first_on_chain(0, *c) < chunks))
}
