//! The place of chunks in files, for the storage servers' log, which names files by path. Read from
//! what this member has applied, without a promise about later changes.

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{Result, layout::StripeMap, pb};

use super::member::Member;
use pb::op::Op;

pub(super) fn places(member: &Member, request: &pb::PlacesRequest) -> Result<Bytes> {
    let places = request.chunks.iter().map(|c| place(member, c)).collect::<Result<_>>()?;
    Ok(pb::PlacesReply { places }.encode_to_vec().into())
}

fn place(member: &Member, c: &pb::ChunkOf) -> Result<pb::Place> {
    let ops = [Op::PathOf(pb::PathOf { ino: c.ino }), Op::Getlayout(pb::GetLayout { ino: c.ino })];
    let ops = ops.map(|op| pb::Op { op: Some(op) });
    let reply = member.machine.namespace.read_at(0, &pb::Creds::default(), &ops)?.reply;
    // Results end at the first failure: a file without a name has no place.
    let [path, layout] = &reply.results[..] else { return Ok(pb::Place::default()) };
    let map = layout.layout.as_ref().and_then(|l| StripeMap::resolve(c.ino, l, &member.map()).ok());
    // Another data id means bytes that the file had before.
    let start = map.filter(|m| m.data == c.data_id).and_then(|m| m.place_of(c.index));
    Ok(start
        .map_or_else(pb::Place::default, |(start, _)| pb::Place { path: path.data.clone(), start }))
}
