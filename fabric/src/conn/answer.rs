//! The answer to a request of the peer.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{
    Code, Error, Result,
    frame::{Header, Kind, MAX_PAYLOAD, Region},
    opcode,
};
use tokio::time::{Instant, timeout};

use super::{
    bulk::{AskRoom, INLINE, Regions, no_memory},
    liveness::Owed,
    room::SHORT_BODY,
    shared::{Hold, Outgoing, Phase, Place, Placed, Shared, outgoing, sum},
};
use crate::Message;

/// A request's answer, which is sent exactly once: a handler that panics answers with an error.
pub(super) struct Answer {
    pub shared: Arc<Shared>,
    pub header: Header,
    pub arrived: Instant,
    pub place: Option<Place>,
    /// Where the requester wants the payload to be written.
    pub room: Option<Region>,
    /// The requester has memory lent to this request until it is answered.
    pub lent: bool,
    /// A large payload came through the stream: the requester had no memory to lend, so it is not
    /// asked for more.
    pub streamed: bool,
    /// It is for a client, which may not read it, so the memory it takes is limited.
    pub is_bounded: bool,
    _owed: Owed,
    done: bool,
}

impl Answer {
    /// To a request whose header arrived at that time.
    pub fn new(s: &Arc<Shared>, h: &Header, arrived: Instant, owed: Owed) -> Answer {
        Answer {
            shared: s.clone(),
            header: *h,
            arrived,
            place: None,
            room: None,
            lent: false,
            streamed: false,
            is_bounded: false,
            _owed: owed,
            done: false,
        }
    }

    /// Waits until enough of the payloads that were asked for before is written. False: the caller
    /// no longer waits for the answer.
    pub async fn payload_room(&mut self, len: usize) -> bool {
        let s = &self.shared;
        let Some(place) = self.place.as_mut().filter(|_| len > INLINE) else { return true };
        let bytes = len.min(s.options.max_inflight_bytes) as u32;
        let Ok(own) = s.room.payloads.clone().acquire_many_owned(bytes).await else { return false };
        place.answer = Some((own, s.room.pool.take(len).await));
        !self.is_late() && self.shared.phase() != Phase::Closed
    }

    /// Reserves memory for an answer's long body until it is written.
    async fn body_room(&mut self, len: usize) -> Result<()> {
        let s = &self.shared;
        let Some(place) = self.place.as_mut().filter(|_| len > SHORT_BODY as usize) else {
            return Ok(());
        };
        let Ok(room) = timeout(s.options.room_wait, s.room.answers.take(len)).await else {
            let m = "this server has too many long answers that were not read; try again later";
            return Err(Error::new(Code::Overloaded, m));
        };
        place.answer_body = Some(room);
        Ok(())
    }

    /// The caller's deadline began before the request was sent, so after that time the caller has
    /// certainly given up.
    fn is_late(&self) -> bool {
        let limit = Duration::from_millis(u64::from(self.header.deadline_ms));
        self.header.deadline_ms > 0 && self.arrived.elapsed() > limit && !self.lent
    }

    /// Sends the answer. A large payload is moved to the requester's memory first, where the
    /// transport can.
    pub async fn finish(mut self, mut result: Result<Message>) {
        let mut placed = None;
        if let Ok(len) = result.as_ref().map(|m| m.body.len())
            && self.is_bounded
            && let Err(e) = self.body_room(len).await
        {
            result = Err(e);
        }
        let bulk = self.shared.bulk();
        if let (Some(bulk), Ok(m)) = (bulk, &mut result)
            && m.payload_len() > INLINE
            && !self.streamed
            && m.payload_len() <= MAX_PAYLOAD as usize
        {
            let len = m.payload_len() as u32;
            let crc = (!m.is_covered).then(|| sum(&m.payload));
            let brought = async {
                let room = match self.room.filter(|r| r.len >= len) {
                    Some(r) => r,
                    None => self.ask_room(len).await?,
                };
                bulk.put(m.payload.clone(), room).await
            };
            match brought.await {
                Ok(()) => {
                    self.shared.counter.sent(len.into());
                    m.payload.clear();
                    placed = Some(Placed { len, crc });
                }
                Err(e) if no_memory(&e) => {}
                Err(e) => result = Err(e),
            }
        }
        self.send(result, placed);
    }

    async fn ask_room(&mut self, len: u32) -> Result<Region> {
        let ask = AskRoom { request_id: self.header.request_id, len };
        self.lent = true;
        let s = &self.shared;
        let got = s.call(Message::new(opcode::ROOM, ask.encode()), s.options.silence * 5).await?;
        let room = Regions::decode(&got.body)?.room.filter(|r| r.len >= len);
        room.ok_or_else(|| {
            Error::new(Code::Protocol, format!("{} gave a reply region that is too small", s.addr))
        })
    }

    pub fn send(&mut self, result: Result<Message>, placed: Option<Placed>) {
        self.done = true;
        let late = self.is_late();
        let (s, h) = (&self.shared, &self.header);
        let hold = self.place.take().map_or(Hold::Nothing, Hold::Response);
        if late {
            return;
        }
        let mut hold = Some(hold);
        let framed = result.and_then(|mut m| {
            m.trace = h.trace;
            let held = hold.take().unwrap_or(Hold::Nothing);
            let mut f = outgoing(s, Kind::Response, h.request_id, h.opcode, m, held)?;
            if let Some(p) = &placed {
                f.place(p);
            }
            Ok(f)
        });
        let frame = framed.or_else(|e| failure(s, h, &e, hold.take().unwrap_or(Hold::Nothing)));
        match frame {
            Ok(f) => s.send(f),
            Err(e) => s.fail(&e),
        }
    }
}

fn failure(s: &Shared, h: &Header, e: &Error, hold: Hold) -> Result<Outgoing> {
    let body = Bytes::from(e.to_status().encode_to_vec());
    let m = Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() };
    let mut f = outgoing(s, Kind::Response, h.request_id, h.opcode, m, hold)?;
    f.header.status = e.code as u16;
    Ok(f)
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.done {
            self.send(
                Err(Error::new(
                    Code::Io,
                    "the server failed while it handled this request; see its log",
                )),
                None,
            );
        }
    }
}
