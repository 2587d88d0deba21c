//! Bodies of requests and replies, and what they have in common.

use bytes::Bytes;
use prost::encoding::{self, WireType};
use strake_proto::{Code, Error, Result, pb};

/// Field numbers of the cluster map in answers.
pub(super) mod tag {
    pub(crate) const SESSION_OPEN: u32 = 6;
    pub(crate) const SESSION_RENEW: u32 = 1;
    pub(crate) const MAP: u32 = 1;
    pub(crate) const REGISTER: u32 = 4;
    pub(crate) const HEARTBEAT: u32 = 2;
}

pub(super) fn decode<M: prost::Message + Default>(body: Bytes) -> Result<M> {
    M::decode(body).map_err(unreadable)
}

fn unreadable(e: prost::DecodeError) -> Error {
    Error::new(Code::Protocol, format!("the request's body cannot be read: {e}"))
}

/// Returns a body if a list in it has at most this many items: empty items are 2 bytes there, and
/// many once decoded.
pub(super) fn at_most(limit: usize, list: u32, body: Bytes) -> Result<Bytes> {
    count(limit, list, body, |_, _| 1)
}

/// The same for a list of numbers, many of which are packed into a field; each ends with a byte
/// below 128.
pub(super) fn few_numbers(limit: usize, list: u32, body: Bytes) -> Result<Bytes> {
    count(limit, list, body, |wire_type, field| match wire_type {
        // The field includes its length, which is one more number.
        WireType::LengthDelimited => field.iter().filter(|b| **b < 128).count().saturating_sub(1),
        _ => 1,
    })
}

fn count(
    limit: usize,
    list: u32,
    body: Bytes,
    items_in: impl Fn(WireType, &[u8]) -> usize,
) -> Result<Bytes> {
    let (mut rest, mut items) = (&body[..], 0);
    while !rest.is_empty() {
        let (tag, wire_type) = encoding::decode_key(&mut rest).map_err(unreadable)?;
        let field = rest;
        encoding::skip_field(wire_type, tag, &mut rest, encoding::DecodeContext::default())
            .map_err(unreadable)?;
        if tag == list {
            items += items_in(wire_type, &field[..field.len() - rest.len()]);
        }
        if items > limit {
            return Err(Error::new(Code::TooBig, format!("a list of more than {limit} items")));
        }
    }
    Ok(body)
}

pub(super) fn encode(m: &impl prost::Message) -> Bytes {
    m.encode_to_vec().into()
}

pub(super) fn ok(r: &pb::OpResult) -> bool {
    r.status.as_ref().is_none_or(|s| s.code == 0)
}

pub(super) fn misread() -> Error {
    Error::new(Code::Io, "the log answered something other than what was asked")
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use strake_proto::map::MapView;

    use super::*;

    #[test]
    fn the_map_in_answers_is_in_the_field_that_is_meant() {
        let node = pb::Node { id: 7, name: "a".into(), ..Default::default() };
        let map = pb::ClusterMap {
            version: 3,
            nodes: vec![node],
            fs_name: "x".repeat(300),
            ..Default::default()
        };
        let view = MapView::new(map.clone()).unwrap();
        for _ in 0..2 {
            let open = pb::SessionOpenReply { session: 9, ..Default::default() };
            let is =
                pb::SessionOpenReply::decode(&view.encode_behind(&open, tag::SESSION_OPEN)[..])
                    .unwrap();
            assert_eq!(is, pb::SessionOpenReply { map: Some(map.clone()), ..open });
            let renew = pb::SessionRenewReply { map: None, lease_ms: 1500 };
            let is =
                pb::SessionRenewReply::decode(&view.encode_behind(&renew, tag::SESSION_RENEW)[..])
                    .unwrap();
            assert_eq!(is, pb::SessionRenewReply { map: Some(map.clone()), ..renew });
            let is = pb::MapReply::decode(
                &view.encode_behind(&pb::MapReply { map: None }, tag::MAP)[..],
            )
            .unwrap();
            assert_eq!(is.map.as_ref(), Some(&map));
            let register =
                pb::RegisterReply { node: 4, target_ids: vec![1, 2], ..Default::default() };
            let is = pb::RegisterReply::decode(&view.encode_behind(&register, tag::REGISTER)[..])
                .unwrap();
            assert_eq!(is, pb::RegisterReply { map: Some(map.clone()), ..register });
            let endings = Some(pb::Endings { through: 7, ..Default::default() });
            let evicted = vec![pb::Evicted::default()];
            let beat =
                pb::HeartbeatReply { lease_ms: 5, map: None, evicted, endings, step_out: vec![7] };
            let is =
                pb::HeartbeatReply::decode(&view.encode_behind(&beat, tag::HEARTBEAT)[..]).unwrap();
            assert_eq!(is, pb::HeartbeatReply { map: Some(map.clone()), ..beat });
        }
    }
}
