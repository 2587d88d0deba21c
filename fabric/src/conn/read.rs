//! The reader of a connection: frames from the socket to callers and handlers.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use strake_proto::{
    Code, Error, Result,
    frame::{FLAG_REGIONS, Header, Kind},
    pb,
};
use tokio::time::timeout;

use super::{
    inbox::{Inbox, Incoming, Payload, body_room, checked, damaged, waiting_for_room},
    request::request,
    shared::{Shared, Waiter},
};
use crate::{BufMut, Message, Peer, Service, Transport};

/// How long a connection whose frame has stopped stays open before it is closed.
const LINGER: Duration = Duration::from_secs(2);

/// Reads until the connection ends, and says why it did.
pub(super) async fn run<R: Incoming>(
    s: &Arc<Shared>,
    rd: R,
    peer: &Arc<Peer>,
    service: Option<&Arc<dyn Service>>,
) -> Error {
    let mut inbox = Inbox::new(s, rd);
    loop {
        let done = match inbox.header().await {
            Ok(h) if h.version != s.version => Err(Error::new(
                Code::Protocol,
                format!("frame of wire version {} after agreeing on {}", h.version, s.version),
            )),
            Ok(h) => match h.kind {
                Kind::Request => request(s, &mut inbox, &h, peer, service).await,
                Kind::Response => response(s, &mut inbox, &h).await,
                Kind::GoAway => {
                    s.peer_goes_away();
                    empty(&h)
                }
                Kind::KeepAlive => empty(&h),
                Kind::Hello => {
                    Err(Error::new(Code::Protocol, "handshake frame after the handshake"))
                }
            },
            Err(e) => Err(e),
        };
        if let Err(e) = done {
            if inbox.has_stopped() && service.is_some() {
                // If it were closed at once, the peer would reconnect at once.
                s.go_away();
                let _ = timeout(LINGER, s.closed()).await;
            }
            return e;
        }
    }
}

fn empty(h: &Header) -> Result<()> {
    if h.body_len == 0 && h.payload_len == 0 {
        return Ok(());
    }
    Err(Error::new(Code::Protocol, format!("{:?} frame that should be empty", h.kind)))
}

async fn response<R: Incoming>(
    s: &Arc<Shared>,
    inbox: &mut Inbox<'_, R>,
    h: &Header,
) -> Result<()> {
    let placed = h.flags & FLAG_REGIONS != 0;
    let behind = if placed { 0 } else { h.payload_len };
    let charge = match body_room(s, h, s.passes_on).await {
        Ok(charge) => charge,
        Err(e) => {
            inbox.skip(h.body_len).await?;
            inbox.skip(behind).await?;
            if let Some(waiting) = s.take_waiting(h.request_id) {
                waiting.answer(Err(e));
            }
            return Ok(());
        }
    };
    let body = inbox.body(h, charge.as_ref()).await?;
    let Some(waiting) = s.take_waiting(h.request_id) else {
        // The caller has given up this call.
        return inbox.skip(behind).await;
    };
    let result = if h.status != 0 {
        inbox.skip(behind).await?;
        let e = pb::Status::decode(body).map_or_else(
            |_| {
                Error::new(
                    Code::from_wire(u32::from(h.status)),
                    "the peer's error came without a readable text",
                )
            },
            Error::from,
        );
        Err(e)
    } else if placed {
        Ok(Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() })
    } else {
        match response_buffer(s, h.payload_len as usize).await {
            Ok(buf) => match inbox.payload(h, buf).await? {
                Payload::Whole(payload) => Ok(Message {
                    opcode: h.opcode,
                    trace: h.trace,
                    body,
                    payload,
                    ..Message::default()
                }),
                Payload::Damaged => Err(damaged()),
            },
            Err(e) => {
                inbox.skip(behind).await?;
                Err(e)
            }
        }
    };
    if waiting.loans.is_empty() && !placed {
        waiting.answer(result);
    } else {
        s.env.spawn(settle(s.clone(), *h, waiting, result));
    }
    Ok(())
}

/// Takes back what was lent to the call, and then completes it; with the bytes that the peer wrote
/// to the lent memory if the header says so.
async fn settle(s: Arc<Shared>, h: Header, mut waiting: Waiter, result: Result<Message>) {
    let mut room = None;
    for loan in std::mem::take(&mut waiting.loans) {
        let Some(bulk) = s.bulk() else { return waiting.answer(Err(s.over())) };
        match bulk.take_back(loan).await {
            Ok(r) => room = r.or(room),
            Err(e) => return waiting.answer(Err(e)),
        }
    }
    let placed = h.status == 0 && h.flags & FLAG_REGIONS != 0;
    let foreign = waiting.foreign;
    waiting.answer(match (result, room) {
        (Ok(m), None) if placed && foreign.is_some_and(|room| h.payload_len <= room) => {
            s.counter.received(h.payload_len.into());
            Ok(Message { placed: h.payload_len, ..m })
        }
        (Ok(mut m), Some(mut room)) if placed && room.len() >= h.payload_len as usize => {
            room.truncate(h.payload_len as usize);
            room.came_by(Transport::Rdma);
            s.counter.received(h.payload_len.into());
            match checked(&h, room) {
                Payload::Whole(p) => {
                    m.payload = p;
                    Ok(m)
                }
                Payload::Damaged => Err(damaged()),
            }
        }
        (Ok(_), _) if placed => {
            let e = Error::new(
                Code::Protocol,
                format!("{} wrote a reply outside of the region for it", s.addr),
            );
            s.fail(&e);
            Err(e)
        }
        (result, _) => result,
    });
}

/// Waits for the pool only for a while: the holders of its buffers may be waiting for a response
/// that comes after this one. A response that is passed on to a client stays within the pool's
/// limit: that client may ask for much and read nothing.
async fn response_buffer(s: &Arc<Shared>, len: usize) -> Result<BufMut> {
    if len == 0 {
        return Ok(s.pool.get_now(0));
    }
    match waiting_for_room(s, s.pool.get(len)).await {
        Some(Ok(b)) => Ok(b),
        _ if s.passes_on => {
            let m = "the relaying server has no memory for this answer; try again later";
            Err(Error::new(Code::Overloaded, m))
        }
        _ => Ok(s.pool.get_now(len)),
    }
}
