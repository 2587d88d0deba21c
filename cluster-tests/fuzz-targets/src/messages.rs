//! Bodies of messages: the fixed layouts of the data path, capabilities, control messages, cluster
//! map and layouts.

use prost::Message;
use strake_fabric::{
    conn::bulk::{AskRoom, MAX_PARTS, REGIONS_HEAD, Regions},
    rdma::greeting::Greeting,
};
use strake_proto::{
    cap::{CAP_LEN, CapKey, peek},
    data::{Clock, DataReply, DataRequest, Extents, LIST_ENTRY, ListEntry},
    frame::{HEADER_LEN, Header, MAX_BODY, MAX_PAYLOAD},
    layout::{MAX_CHUNK, MAX_FILE_SIZE, StripeMap},
    map::{ChainExt, MapView},
    pb,
};

/// The first byte chooses the format of the rest.
pub fn run(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 8 {
        0 => frame_header(data),
        1 => {
            data_request(data);
            lent_memory(data);
        }
        2 => data_reply(data),
        3 => list_entries(data),
        4 => capability(data),
        5 => cluster_map(data),
        6 => control(data),
        _ => raft(data),
    }
}

/// A header that decodes must encode to the same bytes (except reserved ones), within its limits.
fn frame_header(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<HEADER_LEN>() else { return };
    // Once as it is, and once with correct magic and checksum, so that the other fields are
    // reached.
    let mut right = *bytes;
    right[0..4].copy_from_slice(b"STRK");
    let crc = strake_proto::checksum::crc32c(&right[..60]);
    right[60..].copy_from_slice(&crc.to_le_bytes());
    for b in [bytes, &right] {
        if let Ok(h) = Header::decode(b) {
            assert!(h.body_len <= MAX_BODY && h.payload_len <= MAX_PAYLOAD);
            assert_eq!(h.encode()[..48], b[..48]);
        }
    }
}

/// A data request or clock that decodes must encode to the same bytes, except reserved ones.
fn data_request(data: &[u8]) {
    if let Ok(c) = Clock::decode(data) {
        assert_eq!(c.encode()[..12], data[..12]);
    }
    let Ok(r) = DataRequest::decode(data) else { return };
    let again = r.encode();
    assert_eq!(again.len(), data.len());
    assert_eq!(again[..92], data[..92]);
    assert_eq!(again[96..], data[96..]);
    assert_eq!(DataRequest::decode(&again).unwrap(), r);
}

/// What an RDMA peer says about its memory and itself. Regions are decoded once as they are, and
/// once with a correct checksum.
fn lent_memory(data: &[u8]) {
    let mut right = data.to_vec();
    if let Some((head, rest)) = data.split_first_chunk::<REGIONS_HEAD>() {
        let crc = strake_proto::checksum::crc32c(&[&head[..4], rest].concat());
        right[4..8].copy_from_slice(&crc.to_le_bytes());
    }
    for b in [data, &right[..]] {
        if let Ok(r) = Regions::decode(b) {
            assert_eq!(r.encode(), b);
            assert!(r.payload.len() <= MAX_PARTS);
            assert!(
                r.payload
                    .iter()
                    .chain(&r.room)
                    .all(|r| r.len > 0 && r.addr.checked_add(r.len.into()).is_some())
            );
        }
    }
    if let Ok(a) = AskRoom::decode(data) {
        assert_eq!(AskRoom::decode(&a.encode()).unwrap(), a);
    }
    if let Ok(g) = Greeting::decode(data) {
        assert_eq!(Greeting::decode(&g.encode()).unwrap(), g);
    }
}

fn data_reply(data: &[u8]) {
    let Ok(r) = DataReply::decode(data) else { return };
    let again = r.encode();
    assert_eq!(again.len(), data.len());
    assert_eq!(DataReply::decode(&again).unwrap(), r);
}

/// A chunk list that decodes consists of whole entries and must survive another round; so must
/// extents.
fn list_entries(data: &[u8]) {
    for from in [(0, 0), (1, 4096)] {
        if let Ok(e) = Extents::decode(data, from) {
            assert_eq!(Extents::decode(&e.encode(), from).unwrap(), e);
            assert!(e.found.iter().all(|x| (x.index, x.offset) >= from && x.len > 0));
            assert!(e.next.is_none_or(|n| n > from));
        }
    }
    let list = ListEntry::decode_all(data);
    assert_eq!(list.is_ok(), data.len().is_multiple_of(LIST_ENTRY));
    if let Ok(list) = list {
        assert_eq!(list.len(), data.len() / LIST_ENTRY);
        assert_eq!(ListEntry::decode_all(&ListEntry::encode_all(&list)).unwrap(), list);
    }
}

/// Only bytes that were sealed with the key may open as a capability.
fn capability(data: &[u8]) {
    let key = CapKey::from_cluster_key(&[7; 32]);
    assert!(key.open(data, 0).is_err(), "forged");
    if let Some(bytes) = data.first_chunk::<CAP_LEN>() {
        let c = peek(bytes);
        let sealed = key.seal(&c);
        assert_eq!(key.open(&sealed, c.expiry_ms).unwrap(), c);
        assert!(c.expiry_ms == u64::MAX || key.open(&sealed, c.expiry_ms + 1).is_err());
    }
}

/// Any cluster map and layout must be refused, or be safe to compute with.
fn cluster_map(data: &[u8]) {
    // First the map, then the layout; the first byte says where the layout begins.
    let Some((cut, rest)) = data.split_first() else { return };
    let (a, b) = rest.split_at(rest.len() * usize::from(*cut) / 255);
    let Ok(map) = pb::ClusterMap::decode(a) else { return };
    let Ok(map) = MapView::new(map) else { return };
    for c in &map.map.chains {
        let (_, _, _) = (c.head(), c.tail(), c.ost_index());
        for r in &c.replicas {
            let _ = (c.successor(r.target), c.state_of(r.target), map.node_of(r.target));
        }
    }
    let Ok(layout) = pb::Layout::decode(b) else { return };
    let Ok(m) = StripeMap::resolve(5, &layout, &map) else { return };
    for at in [0, 1, 65_535, u64::from(u32::MAX), MAX_FILE_SIZE - 1, MAX_FILE_SIZE, u64::MAX] {
        let mut end = at;
        for p in m.split(at, 5 * MAX_CHUNK).take(100) {
            assert_eq!(p.file_offset, end);
            assert!(p.len > 0 && u64::from(p.offset) + u64::from(p.len) <= MAX_CHUNK);
            assert_eq!(m.chain_of(p.chunk.index), p.chain);
            end += u64::from(p.len);
        }
        if at <= MAX_FILE_SIZE {
            let cut = m.cut(at);
            assert!(cut.kept == u32::MAX || cut.first_gone > 0);
        }
    }
}

fn round<M: Message + Default>(data: &[u8]) {
    if let Ok(m) = M::decode(data) {
        let bytes = m.encode_to_vec();
        assert_eq!(bytes.len(), m.encoded_len());
        // Compared as bytes, because a NaN differs from itself.
        assert_eq!(M::decode(&bytes[..]).expect("what was encoded").encode_to_vec(), bytes);
    }
}

macro_rules! rounds {
    ($kind:expr, $data:expr, $($message:ident)*) => {{
        let all: &[fn(&[u8])] = &[$(round::<pb::$message>),*];
        all[usize::from($kind) % all.len()]($data);
    }};
}

/// Control messages, administration and stored records must decode or fail, and what decodes must
/// survive another round.
fn control(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    rounds!(*kind, data,
        MetaRequest MetaReply LogCommand LogReply Status SessionOpenRequest SessionOpenReply SessionRenewRequest
        SessionRenewReply RecallRequest RecallReply SessionCloseRequest SessionCloseReply RegisterRequest RegisterReply HeartbeatRequest
        HeartbeatReply MapRequest MapReply RaftBatch RaftAck SnapshotChunk StatusRequest StatusReply
        PoolChangeRequest PoolChangeReply MembersRequest MembersReply MemberProbe MemberInfo ClusterMap LayoutSpec Layout StatfsReply InodeRecord DentryRecord SessionRecord GcRecord
        EvictedRecord StateHeader Trim FrontierRequest FrontierReply ScrubRequest ScrubReply ScrubStatus DamageFinding Seal SealInfo Manifest Repair
    );
}

/// Compares the bytes of the second round: in the first one unknown fields may move.
fn raft_round<M: protobuf::Message>(data: &[u8]) {
    let again = |bytes: &[u8]| M::parse_from_bytes(bytes).and_then(|m| m.write_to_bytes());
    if let Ok(first) = again(data) {
        let second = again(&first).expect("what was encoded");
        assert_eq!(again(&second).expect("what was encoded").len(), second.len());
    }
}

/// Messages of raft-rs, as members exchange them and as they are in the log.
fn raft(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 3 {
        0 => raft_round::<raft::eraftpb::Message>(data),
        1 => raft_round::<raft::eraftpb::ConfChangeV2>(data),
        _ => raft_round::<raft::eraftpb::ConfState>(data),
    }
}
