//! What is left when all is over: no target in sync may have a chunk that no file has and that no deletion is to remove. `strake fsck` calls
//! such chunks leaked; nothing removes them but its repair.

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
    data::{DataRequest, ListEntry},
    map::{ChainExt, MapView},
    opcode, pb,
};
use tokio::time::{Instant, sleep};

use crate::{
    cluster::{Cluster, MDS},
    net::SimFabric,
    workload::{Shared, root},
};

/// Who looks, on the network.
const LOOKER: u32 = 241;
/// How many entries are asked for at once.
const PAGE: u32 = 4096;
const PATIENCE: Duration = Duration::from_secs(5);
/// Deletions are done so long after the last fault at most.
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
    leaked: Vec<Found>,
    /// Data that are still to be removed or cut.
    going: usize,
}

/// Waits until all that was to be deleted is. What is left then and belongs to no file is a promise broken.
pub async fn check(cluster: &Cluster, client: &Client, found: &Shared) -> Result<()> {
    cluster.net.wait_sent_on().await;
    let fabric = cluster.fabric(LOOKER, Role::Server);
    let begun = Instant::now();
    loop {
        let late = begun.elapsed() > DELETED;
        match look(cluster, &fabric, client).await {
            Ok(look) if look.leaked.is_empty() && look.going == 0 => return Ok(()),
            Ok(look) if late => {
                let mut found = found.lock();
                if look.going > 0 {
                    found.broken(format!("{} deletions and cuts are not done {DELETED:?} after the end", look.going));
                }
                for Found { chain, target, entry: e } in look.leaked {
                    let (at, version) = (e.chunk, e.version);
                    found.broken(format!(
                        "a chunk is left that no file has and no deletion is to remove: {at}, {} bytes, chain {chain}, target {target}, \
                         version {version:?}",
                        e.len
                    ));
                }
                return Ok(());
            }
            Err(e) if late => return Err(e.context("looking for chunks that no file has")),
            _ => sleep(Duration::from_millis(500)).await,
        }
    }
}

/// Chunks first, what is going last: a file deleted in between is then known to be gone or going.
async fn look(cluster: &Cluster, fabric: &Arc<SimFabric>, client: &Client) -> Result<Look> {
    let map = cluster.map().ok_or_else(|| Error::new(Code::NotLeader, "no metadata server is up"))?;
    let map = MapView::new(map)?;
    let mut all = Vec::new();
    for chain in &map.map.chains {
        for target in chain.serving() {
            let list = list(fabric, &map, chain, target).await?;
            let chunks = list.into_iter().filter(|e| !e.tombstone);
            all.extend(chunks.map(|entry| Found { chain: chain.id, target, entry }));
        }
    }
    let inos: BTreeSet<Ino> = all.iter().map(|f| f.entry.chunk.ino).collect();
    let mut data = BTreeMap::new();
    for ino in inos {
        match client.getattr(&root(), ino).await {
            Ok(attr) => drop(data.insert(ino, attr.data_id)),
            Err(e) if e.code == Code::NoEnt => {}
            Err(e) => return Err(e),
        }
    }
    let going = going(fabric).await?;
    let is_leaked = |f: &Found| {
        let chunk = f.entry.chunk;
        data.get(&chunk.ino) != Some(&chunk.data) && !going.contains(&(chunk.ino, chunk.data))
    };
    Ok(Look { going: going.len(), leaked: all.into_iter().filter(is_leaked).collect() })
}

async fn ask(fabric: &Arc<SimFabric>, at: &Endpoint, request: Message) -> Result<Message> {
    let link = fabric.connect(at, None).await?;
    let answer = link.call(request, PATIENCE).await;
    link.close();
    answer
}

async fn list(fabric: &Arc<SimFabric>, map: &MapView, chain: &pb::Chain, target: TargetId) -> Result<Vec<ListEntry>> {
    let at = map.node_of(target).and_then(|n| n.endpoints.first());
    let at: Endpoint = at.ok_or_else(|| Error::new(Code::NoDev, format!("target {target} has no node")))?.parse()?;
    let (mut all, mut after) = (Vec::new(), ChunkId { ino: 0, data: 0, index: 0 });
    loop {
        let request = DataRequest { len: PAGE, ..DataRequest::new(chain.id, chain.epoch, target, after) };
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

/// The data of files without a name, of the deletion queue and of cuts, as the leader says.
async fn going(fabric: &Arc<SimFabric>) -> Result<BTreeSet<(Ino, u64)>> {
    let mut last = Error::new(Code::NotLeader, "nobody was asked");
    for at in 1..=MDS {
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
        let reply = pb::PendingReply::decode(reply.body).map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
        all.extend(reply.items.iter().map(|i| (i.ino, i.data_id)));
    }
    Ok(all)
}
