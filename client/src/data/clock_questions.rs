//! Asks storage servers for the time of their clocks. See `clocks.rs`.

use std::{sync::Arc, time::Duration};

use strake_fabric::Message;
use strake_proto::{
    ChainId, Code, Error, NodeId, Result,
    data::Clock,
    map::{ChainExt, MapView},
    opcode, pb,
};

use crate::{
    data::{
        chains::{chain_of, node_of},
        clocks::Heard,
        service::Storage,
    },
    shared::{retry::in_doubt, unreachable::Kind as Server},
};

const ASK_TRY: Duration = Duration::from_secs(5);

impl Storage {
    /// The time at a storage server, for an update that is sent there now.
    pub(crate) async fn clock_at(self: &Arc<Self>, node: &pb::Node) -> Result<Heard> {
        let now = self.shared.env.boot();
        let Some(heard) = self.clocks.of(node.id, now) else { return self.ask_clock(node).await };
        if heard.is_old(now) {
            let (core, node) = (self.clone(), node.clone());
            if self.clocks.asks_again(node.id) {
                self.shared.env.spawn(async move { drop(core.ask_clock(&node).await) });
            }
        }
        Ok(heard)
    }

    async fn ask_clock(&self, node: &pb::Node) -> Result<Heard> {
        let conn = self.connections.get(&self.shared.fabric, node).await?;
        let asked = self.shared.env.boot();
        let reply = conn.call(Message::new(opcode::CLOCK, Vec::new()), ASK_TRY).await;
        let clock = match reply.and_then(|m| Clock::decode(&m.body)) {
            Ok(clock) => Some(clock),
            Err(e) if in_doubt(&e) => return Err(e),
            Err(_) => None,
        };
        let heard = Heard { clock, asked, answered: self.shared.env.boot(), asking: false };
        self.clocks.put(node.id, heard);
        Ok(heard)
    }

    /// As [`Storage::clock_at`], for the head of a chain.
    pub(crate) async fn clock_of_head(
        self: &Arc<Self>,
        map: &MapView,
        chain: ChainId,
    ) -> Result<(NodeId, Heard)> {
        let chain = chain_of(map, chain)?;
        let head = chain.head().ok_or_else(|| self.deserted(map, chain))?;
        let node = node_of(map, head)?;
        let heard = self
            .clock_at(node)
            .await
            .inspect_err(|e| self.shared.failed(Server::Storage, &node.name, e))?;
        Ok((node.id, heard))
    }

    /// A server refused an update because it does not know its clock field: a server of an older
    /// version has replaced the one that told the time. The update must be sent again without it.
    pub(crate) fn knows_no_clock(&self, node: NodeId, heard: &Heard, e: Error) -> Error {
        if e.code == Code::Overloaded {
            // The server's clock may have started anew.
            self.clocks.forget(node);
        }
        if heard.says() == 0 || e.code != Code::Protocol {
            return e;
        }
        let now = self.shared.env.boot();
        self.clocks.put(node, Heard { clock: None, asked: now, answered: now, asking: false });
        Error { code: Code::Overloaded, ..e }
    }
}
