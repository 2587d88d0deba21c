//! Paths of files with damaged chunks, for log messages. They come from the metadata servers, which
//! may not know them or not answer.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use strake_fabric::{Endpoint, Fabric, Message};
use strake_proto::{ChunkId, Code, Error, Result, map::MapView, opcode, pb};
use tokio::sync::{Mutex, Semaphore};

use super::peers::MdsLink;

/// How long to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Most requests at a time; beyond that, log lines have no path.
const AT_ONCE: usize = 16;

/// See the module.
pub(super) struct Places {
    link: Mutex<MdsLink>,
    turns: Semaphore,
}

impl Places {
    pub(super) fn new(fabric: Arc<dyn Fabric>, mds: Vec<Endpoint>) -> Places {
        Places { link: Mutex::new(MdsLink::new(fabric, mds)), turns: Semaphore::new(AT_ONCE) }
    }

    /// The path of the file that has a chunk, and the chunk's offset in it. `NoEnt`: no file with a
    /// name has it.
    pub(super) async fn of(&self, map: &MapView, chunk: ChunkId) -> Result<(String, u64)> {
        let many = |_| Error::new(Code::Overloaded, "too many paths are asked for at once");
        let _turn = self.turns.try_acquire().map_err(many)?;
        let late =
            |_| Error::new(Code::TimedOut, format!("no metadata server answered in {PATIENCE:?}"));
        tokio::time::timeout(PATIENCE, self.ask(map, chunk)).await.map_err(late)?
    }

    async fn ask(&self, map: &MapView, chunk: ChunkId) -> Result<(String, u64)> {
        let of = pb::ChunkOf { ino: chunk.ino, data_id: chunk.data, index: chunk.index };
        let body = pb::PlacesRequest { chunks: vec![of] }.encode_to_vec();
        let mut link = self.link.lock().await;
        // A server that is older or cut off from its group is no reason not to ask another.
        let mut last = Error::new(Code::Disconnected, "no metadata server was asked");
        for _ in 0..3 {
            match link.call(map, Message::new(opcode::PLACES, body.clone()), PATIENCE).await {
                Ok(m) => return read(m),
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}

fn read(m: Message) -> Result<(String, u64)> {
    let bad = |e: prost::DecodeError| {
        Error::new(Code::Protocol, format!("answer to a request for a path: {e}"))
    };
    let place =
        pb::PlacesReply::decode(m.body).map_err(bad)?.places.into_iter().next().unwrap_or_default();
    if place.path.is_empty() {
        return Err(Error::new(Code::NoEnt, "no named file has it"));
    }
    Ok((String::from_utf8_lossy(&place.path).into_owned(), place.start))
}
