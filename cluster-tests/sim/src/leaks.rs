//! Checks at the end, like those of `strake fsck`: no target in sync has a chunk that belongs to no
//! file and is not to be deleted, a chunk past its file's end, or a chunk on another chain than its
//! file's. All replicas in sync of a chain have the same chunks, with the same versions and
//! lengths. A file in which no hole was made lacks no chunk.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use strake_client::Client;
use strake_fabric::{Endpoint, Fabric, Message, Role};
use strake_proto::{
    ChunkId, Code, Error, Ino, Result, TargetId,
    data::{DataRequest, ListEntry, Version},
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};
use tokio::time::{Instant, sleep};

use crate::{
    cluster::Cluster,
    net::SimFabric,
    nodes::ANY_MDS,
    workload::{Shared, root},
};

/// The node that asks, on the network.
const LOOKER: u32 = 241;
/// How many entries one request asks for.
const PAGE: u32 = 4096;
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Deletions must be done within this time after the last fault.
const DELETED: Duration = Duration::from_secs(120);

/// A chunk that a target has.
#[derive(Debug)]
struct Found {
    chain: u32,
    target: TargetId,
    entry: ListEntry,
}

/// What one look found.
struct Look {
    /// Violations, as sentences.
    wrong: Vec<String>,
    /// How many data are still to be removed or truncated.
    going: usize,
}

/// Where a file's chunks belong.
struct Place {
    data: u64,
    size: u64,
    dense: bool,
    map: StripeMap,
}

/// Waits until everything that is to be deleted is gone. What is wrong after that breaks a promise.
pub async fn check(cluster: &Cluster, client: &Client, found: &Shared) -> Result<()> {
    cluster.net.wait_sent_on().await;
    let fabric = cluster.fabric(LOOKER, Role::Server);
    let begun = Instant::now();
    loop {
        let late = begun.elapsed() > DELETED;
        match look(cluster, &fabric, client).await {
            Ok(look) if look.wrong.is_empty() && look.going == 0 => return Ok(()),
            Ok(look) if late => {
                let mut found = found.lock();
                if look.going > 0 {
                    found.broken(format!(
                        "{} deletions and cuts are not done {DELETED:?} after the end",
                        look.going
                    ));
                }
                look.wrong.into_iter().for_each(|w| found.broken(w));
                return Ok(());
            }
            Err(e) if late => return Err(e.context("looking for chunks that no file has")),
            _ => sleep(Duration::from_millis(500)).await,
        }
    }
}

/// Lists chunks first and pending deletions last: a file that is deleted in between then counts as
/// deleted or pending.
async fn look(cluster: &Cluster, fabric: &Arc<SimFabric>, client: &Client) -> Result<Look> {
    let map =
        cluster.map().ok_or_else(|| Error::new(Code::NotLeader, "no metadata server is up"))?;
    let map = MapView::new(map)?;
    let (mut all, mut wrong) = (Vec::new(), Vec::new());
    for chain in &map.map.chains {
        let from = all.len();
        for target in chain.serving() {
            let list = list(fabric, &map, chain, target).await?;
            let chunks = list.into_iter().filter(|e| !e.tombstone);
            all.extend(chunks.map(|entry| Found { chain: chain.id, target, entry }));
        }
        wrong.extend(diverged(chain, &all[from..]));
    }
    let inos: BTreeSet<Ino> = all.iter().map(|f| f.entry.chunk.ino).collect();
    let mut files = BTreeMap::new();
    for ino in inos {
        match place(client, &map, ino).await {
            Ok(place) => drop(files.insert(ino, place)),
            Err(e) if e.code == Code::NoEnt => {}
            Err(e) => return Err(e),
        }
    }
    let going = going(fabric).await?;
    let stays = |f: &&Found| !going.contains(&(f.entry.chunk.ino, f.entry.chunk.data));
    wrong.extend(all.iter().filter(stays).filter_map(|f| astray(f, files.get(&f.entry.chunk.ino))));
    let there: BTreeSet<ChunkId> = all.iter().map(|f| f.entry.chunk).collect();
    for (ino, p) in files.iter().filter(|(ino, p)| p.dense && !going.contains(&(**ino, p.data))) {
        let chunk = |index| ChunkId { ino: *ino, data: p.data, index };
        let missing: Vec<u64> =
            (0..p.map.cut(p.size).first_gone).filter(|i| !there.contains(&chunk(*i))).collect();
        if !missing.is_empty() {
            wrong.push(format!(
                "inode {ino} of {} bytes, in which nobody made a hole, lacks chunks {missing:?}",
                p.size
            ));
        }
    }
    Ok(Look { going: going.len(), wrong })
}

async fn place(client: &Client, map: &MapView, ino: Ino) -> Result<Place> {
    let attr = client.getattr(&root(), ino).await?;
    let layout = client.layouts().get(&root(), ino).await?.layout;
    let layout = layout.ok_or_else(|| Error::new(Code::NoEnt, "it has no data"))?;
    Ok(Place {
        data: attr.data_id,
        size: attr.size,
        dense: !attr.sparse,
        map: StripeMap::resolve(ino, &layout, map)?,
    })
}

/// Why a chunk must not be where it is, if so.
fn astray(f: &Found, file: Option<&Place>) -> Option<String> {
    let chunk = f.entry.chunk;
    let why = match file.filter(|p| p.data == chunk.data) {
        None => "no file has, and no deletion is to remove".into(),
        Some(p) if p.map.chain_of(chunk.index) != f.chain => {
            format!("belongs on chain {}", p.map.chain_of(chunk.index))
        }
        Some(p) if chunk.index >= p.map.cut(p.size).first_gone => {
            format!("is beyond the end of its file, {} bytes", p.size)
        }
        Some(_) => return None,
    };
    let (len, version) = (f.entry.len, f.entry.version);
    Some(format!(
        "a chunk is left that {why}: {chunk}, {len} bytes, chain {}, target {}, version {version:?}",
        f.chain, f.target
    ))
}

/// Chunks that differ between the replicas in sync of a chain.
fn diverged(chain: &pb::Chain, found: &[Found]) -> Vec<String> {
    let members: Vec<TargetId> = chain.serving().collect();
    let mut seen: BTreeMap<ChunkId, BTreeMap<TargetId, (Version, u32)>> = BTreeMap::new();
    for f in found {
        seen.entry(f.entry.chunk).or_default().insert(f.target, (f.entry.version, f.entry.len));
    }
    let alike = |by: &BTreeMap<TargetId, (Version, u32)>| {
        members.windows(2).all(|w| by.get(&w[0]) == by.get(&w[1]))
    };
    let parted = seen.into_iter().filter(|(_, by)| !alike(by));
    parted
        .map(|(chunk, by)| {
            format!("replicas of chain {} differ in chunk {chunk}: {by:?}", chain.id)
        })
        .collect()
}

async fn ask(fabric: &Arc<SimFabric>, at: &Endpoint, request: Message) -> Result<Message> {
    let link = fabric.connect(at, None).await?;
    let answer = link.call(request, PATIENCE).await;
    link.close();
    answer
}

async fn list(
    fabric: &Arc<SimFabric>,
    map: &MapView,
    chain: &pb::Chain,
    target: TargetId,
) -> Result<Vec<ListEntry>> {
    let at = map.node_of(target).and_then(|n| n.endpoints.first());
    let at: Endpoint = at
        .ok_or_else(|| Error::new(Code::NoDev, format!("target {target} has no node")))?
        .parse()?;
    let (mut all, mut after) = (Vec::new(), ChunkId { ino: 0, data: 0, index: 0 });
    loop {
        let request =
            DataRequest { len: PAGE, ..DataRequest::new(chain.id, chain.epoch, target, after) };
        let reply = ask(fabric, &at, Message::new(opcode::LIST_CHUNKS, request.encode())).await?;
        let bytes: Vec<u8> = reply.payload.iter().flat_map(|b| b.iter().copied()).collect();
        let page = ListEntry::decode_all(&bytes)?;
        let (full, last) = (page.len() as u32 >= PAGE, page.last().map(|e| e.chunk));
        all.extend(page);
        match last {
            Some(last) if full => after = last,
            _ => return Ok(all),
        }
    }
}

/// The data of files without a name, of the deletion queue and of pending truncations, by the
/// leader.
async fn going(fabric: &Arc<SimFabric>) -> Result<BTreeSet<(Ino, u64)>> {
    let mut last = Error::new(Code::NotLeader, "nobody was asked");
    for at in ANY_MDS {
        match going_at(fabric, &Endpoint::Sim(at)).await {
            Err(e) => last = e,
            all => return all,
        }
    }
    Err(last)
}

async fn going_at(fabric: &Arc<SimFabric>, at: &Endpoint) -> Result<BTreeSet<(Ino, u64)>> {
    let mut all = BTreeSet::new();
    for kind in 1..=3 {
        let request = pb::PendingRequest { kind, after: 0, limit: PAGE, inos: Vec::new() };
        let reply = ask(fabric, at, Message::new(opcode::PENDING, request.encode_to_vec())).await?;
        let reply = pb::PendingReply::decode(reply.body)
            .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
        all.extend(reply.items.iter().map(|i| (i.ino, i.data_id)));
    }
    Ok(all)
}
