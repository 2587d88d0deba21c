//! Planted faults, to check that a checker finds them: what faulty servers or clients might do,
//! done by the network.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::Message;
use strake_mds::namespace::Namespace;
use strake_proto::{data::DataRequest, opcode, pb};

/// Added to the request number of a repetition: no client counts that far.
const ANOTHER: u64 = 1 << 40;

/// A fault that a run must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Plant {
    /// Clients go on answering recalled things from memory: they are told to forget something else,
    /// and acknowledge that.
    StaleRead,
    /// No fault: recalls reach clients late. Everything must hold all the same.
    LateRecall,
    /// Likewise, and followers answer with what they have applied although other clients may still
    /// see the old state: the notice that it is not settled does not reach them.
    Unsettled,
    /// Clients report a file without having sent its dirty data.
    EmptyReport,
    /// Some changes run twice: they arrive again, under a number that the servers do not know.
    Repeat,
    /// Clients do not say that they have given an update up.
    Roundless,
    /// Updates do not say since when they may be in flight.
    Timeless,
}

/// How late replies to recalls are.
const LATE: Duration = Duration::from_millis(300);

impl Plant {
    /// How much later the reply to a request of this kind arrives.
    pub fn delay(self, opcode: u16) -> Duration {
        let late = matches!(self, Plant::LateRecall | Plant::Unsettled) && opcode == opcode::RECALL;
        if late { LATE } else { Duration::ZERO }
    }

    /// Changes the reply to a request of this kind.
    pub fn tamper(self, opcode: u16, reply: &mut Message) {
        match (self, opcode) {
            (Plant::StaleRead, opcode::RECALL) => {
                let Ok(mut r) = pb::RecallReply::decode(reply.body.clone()) else { return };
                r.recalls.iter_mut().for_each(|r| r.ino = u64::MAX);
                reply.body = r.encode_to_vec().into();
            }
            (Plant::EmptyReport, opcode::RECALL) => {
                let Ok(mut r) = pb::RecallReply::decode(reply.body.clone()) else { return };
                r.reports.iter_mut().for_each(|r| r.ino = u64::MAX);
                reply.body = r.encode_to_vec().into();
            }
            (Plant::Unsettled, opcode::FRONTIER) => {
                let Ok(r) = pb::FrontierReply::decode(reply.body.clone()) else { return };
                reply.body =
                    pb::FrontierReply { unsettled: Vec::new(), ..r }.encode_to_vec().into();
            }
            _ => {}
        }
    }

    /// Changes a request.
    pub fn tamper_request(self, request: &mut Message) {
        if self == Plant::Roundless && matches!(request.opcode, opcode::WRITE | opcode::FLUSH) {
            let Ok(r) = DataRequest::decode(&request.body) else { return };
            request.body = DataRequest { round: 0, ..r }.encode();
        }
        if self == Plant::Timeless && request.opcode == opcode::WRITE {
            let Ok(r) = DataRequest::decode(&request.body) else { return };
            request.body = DataRequest { heard: 0, ..r }.encode();
        }
    }

    /// The repetition of a request, if requests of this kind are repeated.
    pub fn repetition(self, request: &Message) -> Option<Message> {
        if self != Plant::Repeat || request.opcode != opcode::META {
            return None;
        }
        let mut meta = pb::MetaRequest::decode(request.body.clone()).ok()?;
        if !Namespace::is_mutation(&meta.ops) {
            return None;
        }
        meta.seq += ANOTHER;
        Some(Message::new(opcode::META, Bytes::from(meta.encode_to_vec())))
    }
}
