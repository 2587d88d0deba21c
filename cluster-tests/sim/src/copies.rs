//! Good copies must be readable: a block that cannot be read at the end breaks a promise if any
//! target that is up has a copy that the file may hold, wherever that target is in the chain.

use std::sync::Arc;

use strake_client::Client;
use strake_fabric::{Endpoint, Fabric, Message, Role};
use strake_proto::{
    Code, Error, Result, checksum::BLOCK, data::DataRequest, layout::StripeMap, map::MapView,
    opcode,
};

use crate::{
    cluster::Cluster,
    leaks::PATIENCE,
    net::SimFabric,
    workload::{Lost, Shared, root},
};

/// The node that asks, on the network.
const ASKS: u32 = 242;

/// Asks every target for the blocks that were noted as lost.
pub async fn check(cluster: &Cluster, client: &Client, found: &Shared) -> Result<()> {
    let lost = std::mem::take(&mut found.lock().lost);
    if lost.is_empty() {
        return Ok(());
    }
    let map =
        cluster.map().ok_or_else(|| Error::new(Code::NotLeader, "no metadata server is up"))?;
    let (map, fabric) = (MapView::new(map)?, cluster.fabric(ASKS, Role::Server));
    for block in &lost {
        for (target, bytes) in copies(&map, &fabric, client, block).await? {
            if block.model.check(block.offset, &bytes).is_ok() {
                let m = format!(
                    "block at {} of inode {:#x} is lost, and target {target} has it",
                    block.offset, block.ino
                );
                found.lock().broken(m);
            }
        }
    }
    found.lock().lost = lost;
    Ok(())
}

/// The bytes that each target has of a block, of those that have it whole.
async fn copies(
    map: &MapView,
    fabric: &Arc<SimFabric>,
    client: &Client,
    lost: &Lost,
) -> Result<Vec<(u32, Vec<u8>)>> {
    let layout = client.layouts().get(&root(), lost.ino).await?.layout;
    let layout = layout.ok_or_else(|| Error::new(Code::NoEnt, "it has no data"))?;
    let place = StripeMap::resolve(lost.ino, &layout, map)?;
    let mut all = Vec::new();
    let Some(piece) = place.split(lost.offset, BLOCK as u64).next() else { return Ok(all) };
    for target in &map.map.targets {
        let node = map.node_of(target.id).and_then(|n| n.endpoints.first());
        let Some(at) = node else { continue };
        let r = DataRequest {
            offset: piece.offset,
            len: piece.len,
            ..DataRequest::new(piece.chain, 0, target.id, piece.chunk)
        };
        let link = fabric.connect(&at.parse::<Endpoint>()?, None).await?;
        let answer = link.call(Message::new(opcode::READ_COPY, r.encode()), PATIENCE).await;
        link.close();
        let Ok(answer) = answer else { continue };
        let mut bytes: Vec<u8> = answer.payload.iter().flat_map(|b| b.iter().copied()).collect();
        // A chunk reads as zeros past its end, if there is a chunk.
        if !bytes.is_empty() {
            bytes.resize(piece.len as usize, 0);
            all.push((target.id, bytes));
        }
    }
    Ok(all)
}
