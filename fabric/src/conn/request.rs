//! A request of the peer: its memory is reserved, its payload brought, and its handler run.

use std::sync::Arc;

use bytes::Bytes;
use strake_proto::{
    Code, Error, Result,
    frame::{Header, Region},
    opcode,
};
use tokio::time::{Instant, timeout};

use super::{
    answer::Answer,
    bulk::{AskRoom, INLINE, Regions},
    inbox::{Inbox, Incoming, Payload, body_room, checked, damaged, waiting_for_room},
    room::Charge,
    shared::{Phase, Place, Shared},
};
use crate::{BufMut, Message, Peer, Role, Service, Transport};

pub(super) async fn request<R: Incoming>(
    s: &Arc<Shared>,
    inbox: &mut Inbox<'_, R>,
    h: &Header,
    peer: &Arc<Peer>,
    service: Option<&Arc<dyn Service>>,
) -> Result<()> {
    let (arrived, owed) = (Instant::now(), s.liveness.owe());
    let body_room = body_room(s, h, peer.role == Role::Client).await;
    let charge = match body_room {
        Ok(charge) => charge,
        Err(e) => {
            // To read and discard the body would cost as much as to take it.
            inbox.stop();
            Answer::new(s, h, arrived, owed).send(Err(e.clone()), None);
            return Err(e);
        }
    };
    let body = inbox.body(h, charge.as_ref()).await?;
    let regions = inbox.regions(h).await?;
    let mut answer = Answer::new(s, h, arrived, owed);
    answer.lent = regions.is_some();
    let Regions { payload: parts, room } = regions.unwrap_or_default();
    let behind = if parts.is_empty() { h.payload_len } else { 0 };
    (answer.room, answer.streamed) = (room, behind as usize > INLINE);
    let refusal = match service {
        _ if is_for_room(s, h) => {
            inbox.skip(behind).await?;
            let asked = lend_room(s.clone(), body);
            s.env.spawn(async move { answer.send(asked.await, None) });
            return Ok(());
        }
        _ if s.phase() != Phase::Open => {
            Error::new(Code::Disconnected, "this server is shutting down")
        }
        None => crate::unknown_opcode(h.opcode),
        Some(service) => {
            let m = Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() };
            let asked = Asked { m, parts, peer: peer.clone(), service: service.clone() };
            return take(s, inbox, h, charge, asked, answer).await;
        }
    };
    inbox.skip(behind).await?;
    answer.send(Err(refusal), None);
    Ok(())
}

fn is_for_room(s: &Shared, h: &Header) -> bool {
    h.opcode == opcode::ROOM && s.bulk().is_some() && s.phase() != Phase::Closed
}

/// A request without its payload, and who handles it.
struct Asked {
    m: Message,
    /// Where the payload lies; empty: it follows.
    parts: Vec<Region>,
    peer: Arc<Peer>,
    service: Arc<dyn Service>,
}

/// Reserves a handler's place and memory for the payload, brings the payload, and starts the
/// handler. `charge`: the reservation of the body.
async fn take<R: Incoming>(
    s: &Arc<Shared>,
    inbox: &mut Inbox<'_, R>,
    h: &Header,
    charge: Option<Charge>,
    asked: Asked,
    mut answer: Answer,
) -> Result<()> {
    let Asked { m, parts, peer, service } = asked;
    let len = h.payload_len as usize;
    let behind = if parts.is_empty() { h.payload_len } else { 0 };
    let room = async {
        let mut place = Place {
            _body: charge.map(Charge::until),
            ..place(s, h.body_len as usize + len).await?
        };
        if peer.role == Role::Client && len > INLINE {
            place._upload = Some(s.room.uploads.take(len).await);
        }
        Ok((place, request_buffer(s, len, peer.role).await?))
    };
    let refusal = match waiting_for_room(s, room).await {
        Some(Ok((place, buf))) => {
            answer.place = Some(place);
            if !parts.is_empty() {
                s.env.spawn(fetch_and_handle(answer, parts, buf, m, peer, service));
                return Ok(());
            }
            match inbox.payload(h, buf).await? {
                Payload::Whole(payload) => {
                    s.env.spawn(handle(answer, Message { payload, ..m }, peer, service));
                    return Ok(());
                }
                Payload::Damaged => damaged(),
            }
        }
        Some(Err(e)) => {
            inbox.skip(behind).await?;
            e
        }
        None => {
            inbox.skip(behind).await?;
            Error::new(
                Code::Overloaded,
                "this server has too many requests running; try again later",
            )
        }
    };
    answer.send(Err(refusal), None);
    Ok(())
}

async fn handle(mut answer: Answer, m: Message, peer: Arc<Peer>, service: Arc<dyn Service>) {
    if peer.role == Role::Client {
        answer.is_bounded = true;
        if !answer.payload_room(service.answer_len(&m)).await {
            return answer.send(Err(answer.shared.over()), None);
        }
    }
    let r = service.handle(&peer, m).await;
    answer.finish(r).await;
}

/// Fetches the payload from the requester's memory, and handles the request.
async fn fetch_and_handle(
    mut answer: Answer,
    parts: Vec<Region>,
    to: BufMut,
    m: Message,
    peer: Arc<Peer>,
    service: Arc<dyn Service>,
) {
    let Some(bulk) = answer.shared.bulk() else { return };
    let got = match bulk.fetch(&parts, to).await {
        Ok(mut got) => {
            got.came_by(Transport::Rdma);
            answer.shared.counter.received(got.len() as u64);
            checked(&answer.header, got)
        }
        Err(e) => return answer.send(Err(e), None),
    };
    match got {
        Payload::Whole(payload) => handle(answer, Message { payload, ..m }, peer, service).await,
        Payload::Damaged => answer.send(Err(damaged()), None),
    }
}

async fn place(s: &Shared, bytes: usize) -> Result<Place> {
    let closed = |_| Error::new(Code::Disconnected, "connection closed");
    let handler = s.handlers.clone().acquire_owned().await.map_err(closed)?;
    let bytes = bytes.min(s.options.max_inflight_bytes) as u32;
    let bytes = s.handler_bytes.clone().acquire_many_owned(bytes).await.map_err(closed)?;
    Ok(Place {
        _handler: handler,
        _bytes: bytes,
        _body: None,
        _upload: None,
        answer: None,
        answer_body: None,
    })
}

/// Answers a ROOM request: lends a buffer to the call that it names.
async fn lend_room(s: Arc<Shared>, body: Bytes) -> Result<Message> {
    let ask = AskRoom::decode(&body)?;
    let over = || Error::new(Code::NoEnt, "nobody waits for that reply");
    let bulk = s.bulk().ok_or_else(over)?;
    if !s.may_have_room(ask.request_id) {
        return Err(over());
    }
    let room = s.pool_buffer(ask.len as usize).await;
    let loan = bulk.lend(Vec::new(), Some(room)).await?;
    if !s.add_loan(ask.request_id, loan.id) {
        bulk.take_back(loan.id).await?;
        return Err(over());
    }
    Ok(Message::new(opcode::ROOM, loan.regions.encode()))
}

/// A buffer for a request's payload. A payload larger than the whole pool, which may be small where
/// little memory may be locked, takes all of the pool. A request of another server waits only
/// briefly and then goes beyond the limit: what that server forwards lies in its own pool
/// meanwhile, and our pool may be full of requests that wait for memory in its pool.
async fn request_buffer(s: &Shared, len: usize, from: Role) -> Result<BufMut> {
    if len == 0 {
        return Ok(s.pool.get_now(0));
    }
    let lens = [len];
    let room = s.pool.get_all(&lens);
    let room = match from {
        Role::Server => match timeout(s.options.room_wait / 4, room).await {
            Ok(room) => room,
            Err(_) => return Ok(s.pool.get_now(len)),
        },
        _ => room.await,
    };
    Ok(room?.swap_remove(0))
}
