//! The fixed formats of `docs/formats.md`, byte for byte. A change here changes a format that other
//! versions use.

use strake_proto::{
    Bound, CapKey, Capability, ChunkId, Fid, Rights,
    cap::{CAP_LEN, derive_key},
    data::{
        BootId, Clock, DataReply, DataRequest, Extent, Extents, FLAG_REPLAY, FLAG_STABLE, Kind,
        ListEntry, Version, Writer,
    },
    frame::{self, Header, Region},
    layout::{Cut, StripeMap, set_members},
};

#[track_caller]
fn same(bytes: &[u8], want: &[&str]) {
    assert_eq!(hex::encode(bytes), want.concat());
}

#[test]
fn frame_header() {
    let h = Header {
        version: 1,
        kind: frame::Kind::Response,
        flags: frame::FLAG_PAYLOAD_SUMMED,
        opcode: 0x0102,
        status: 28,
        deadline_ms: 5000,
        request_id: 0x1122_3344_5566_7788,
        body_len: 0x40,
        payload_len: 0x10_0000,
        body_crc: 0xa1a2_a3a4,
        payload_crc: 0xb1b2_b3b4,
        trace: 0x0102_0304_0506_0708,
    };
    let want = [
        "5354524b",
        "0100",
        "02",
        "01",
        "0201",
        "1c00",
        "88130000",
        "8877665544332211",
        "40000000",
        "00001000",
        "a4a3a2a1",
        "b4b3b2b1",
        "0807060504030201",
        "000000000000000000000000",
        FRAME_CRC,
    ];
    same(&h.encode(), &want);
}

#[test]
fn frame_kinds_have_their_numbers() {
    use frame::Kind::*;
    assert_eq!([Request, Response, Hello, GoAway, KeepAlive].map(|k| k as u8), [1, 2, 3, 4, 5]);
}

#[test]
fn data_request() {
    let r = DataRequest {
        kind: Kind::Write,
        flags: FLAG_STABLE | FLAG_REPLAY,
        offset: 0x100,
        len: 0x200,
        session: 0x71,
        seq: 0x72,
        version: Version { epoch: 0x73, number: 0x74 },
        cap: Some([0xca; CAP_LEN]),
        sums: vec![0xd1, 0xd2],
        writers: vec![Writer {
            session: 0xe1,
            seq: 0xe2,
            version: Version { epoch: 0xe3, number: 0xe4 },
        }],
        regions: vec![Region { addr: 0xf1, key: 0xf2, len: 0xf3 }],
        damaged: vec![std::ops::Range { start: 0xb1, end: 0xb2 }],
        ..DataRequest::new(0x11, 0x12, 0x16, ChunkId { ino: 0x13, data: 0x14, index: 0x15 })
    };
    let cap = "ca".repeat(CAP_LEN);
    let want = [
        "0100",
        "01",
        "07",
        "11000000",
        "1200000000000000",
        "1300000000000000",
        "1400000000000000",
        "1500000000000000",
        "16000000",
        "00010000",
        "00020000",
        "02000000",
        "7100000000000000",
        "7200000000000000",
        "7300000000000000",
        "7400000000000000",
        "0100",
        "0100",
        "01000000",
        &cap,
        "d1000000",
        "d2000000",
        "e100000000000000",
        "e200000000000000",
        "e300000000000000",
        "e400000000000000",
        "f100000000000000",
        "f2000000",
        "f3000000",
        "b1000000",
        "b2000000",
    ];
    same(&r.encode(), &want);
    let with = DataRequest { round: 0xa1, heard: 0xa2, ..r.clone() }.encode();
    let at = r.encode().len() - (2 * 4 + 32 + 16 + 8);
    assert_eq!(with[3], 0x67);
    same(&with[at..at + 16], &["a100000000000000", "a200000000000000"]);
    same(&Clock { now: 0xa3, life: 0xa4 }.encode(), &["a300000000000000", "a4000000", "00000000"]);
    assert_eq!(
        [Kind::None, Kind::Write, Kind::Truncate, Kind::Remove, Kind::Replace, Kind::Punch]
            .map(|k| k as u8),
        [0, 1, 2, 3, 4, 5]
    );
}

#[test]
fn data_reply_and_list() {
    let r = DataReply {
        stable: true,
        version: Version { epoch: 0x21, number: 0x22 },
        epoch: 0x23,
        len: 0x24,
        sums: vec![0x25],
        boot_ids: vec![BootId { target: 0x26, number: 0x27 }],
    };
    let want = [
        "0100",
        "01",
        "00",
        "24000000",
        "2100000000000000",
        "2200000000000000",
        "2300000000000000",
        "01000000",
        "0100",
        "0000",
        "25000000",
        "26000000",
        "00000000",
        "2700000000000000",
    ];
    same(&r.encode(), &want);
    let e = ListEntry {
        chunk: ChunkId { ino: 1, data: 2, index: 3 },
        version: Version { epoch: 4, number: 5 },
        len: 6,
        tombstone: true,
    };
    let want = [
        "0100000000000000",
        "0200000000000000",
        "0300000000000000",
        "0400000000000000",
        "0500000000000000",
        "06000000",
        "01000000",
    ];
    same(&ListEntry::encode_all(&[e]), &want);
    let found = vec![Extent { index: 3, offset: 0x1000, len: 0x2000 }];
    let e = Extents { found, bytes: 0x41, next: Some((0x42, 0x43)) };
    let head = ["4100000000000000", "4200000000000000", "43000000", "01000000"];
    same(&e.encode(), &[&head[..], &["0300000000000000", "00100000", "00200000"]].concat());
    same(
        &Extents::default().encode(),
        &["0000000000000000", "ffffffffffffffff", "00000000", "00000000"],
    );
}

#[test]
fn capability_and_keys() {
    let c = Capability {
        ino: 0x31,
        data: 0x32,
        session: 0x33,
        session_epoch: 0x34,
        expiry_ms: 0x35,
        rights: Rights::READ.and(Rights::TRIM),
        bound: Bound::Any,
        as_of: 0,
    };
    let want = [
        "3100000000000000",
        "3200000000000000",
        "3300000000000000",
        "3400000000000000",
        "3500000000000000",
        "05000000",
        "00000000",
        CAP_TAG,
    ];
    let key = CapKey::from_cluster_key(&[7; 32]);
    same(&key.seal(&c), &want);
    let dated = key.seal(&Capability { as_of: 0x1234_5678, ..c });
    same(&dated[..48], &[&want[..6], &["78563412"]].concat());
    assert_ne!(dated[48..], key.seal(&c)[48..], "the MAC covers it");
    let bounds = [
        (Bound::One { chain: 0x12345, bits: 34 }, 0x1109_1a29),
        (Bound::Set { set: 3, start: 5, count: 17 }, 0x0044_029a),
        (Bound::List { count: 3, chains: [1, 2, 3, 0] }, 0x0018_100c),
        (Bound::Mask(0x21), 0x10e),
    ];
    for (bound, word) in bounds {
        assert_eq!(bound.encode(), word, "{bound:?}");
    }
    same(&derive_key(&[7; 32], "strake server v1"), &[SERVER_KEY]);
    same(&derive_key(&[7; 32], "strake client v1"), &[CLIENT_KEY]);
}

#[test]
fn fids() {
    for (ino, text) in [
        (1, "[0x200000007:0x1:0x0]"),
        (2, "[0x200000400:0x2:0x0]"),
        (0x0001_0002_0003_0004, "[0x200010402:0x30004:0x0]"),
        (u64::MAX, "[0x3000003ff:0xffffffff:0x0]"),
    ] {
        assert_eq!(Fid::from_ino(ino).to_string(), text);
    }
}

#[test]
fn layout() {
    let m = StripeMap { ino: 1, data: 2, stripe_size: 40 << 20, chains: vec![7, 8, 9] };
    for (offset, index, chain, within) in [
        (0u64, 0, 7, 0u32),
        ((40 << 20) - 1, 2, 7, (8 << 20) - 1),
        (40 << 20, 3, 8, 0),
        ((120 << 20) + (17 << 20), 10, 7, 1 << 20),
    ] {
        let (p, _) = m.locate(offset);
        assert_eq!((p.chunk.index, p.chain, p.offset), (index, chain, within), "{offset}");
    }
    assert_eq!(m.cut(40 << 20), Cut { first_gone: 3, kept: u32::MAX });
    assert_eq!(m.cut((40 << 20) + 5), Cut { first_gone: 4, kept: 5 });
    let chains: Vec<u32> = (0..8).collect();
    assert_eq!(set_members(&chains, 1, 0, 8), SHUFFLE_1);
    assert_eq!(set_members(&chains, 0xdead_beef, 5, 4), SHUFFLE_2);
}

// Computed by an independent implementation (Python's hmac and a table-driven CRC32C).
const FRAME_CRC: &str = "d646fc00";
const CAP_TAG: &str = "56de38c0b345389db972b2c77e9b3962";
const SERVER_KEY: &str = "d59d0cd85ec1c9072b4dfd69712cdd7990ca398f9d3c78b1f15d3992308a108c";
const CLIENT_KEY: &str = "2c028ea387a543f8b6bbef78e53c15f8e105c205714a5f0679a3dd330cb51cf8";
const SHUFFLE_1: [u32; 8] = [4, 3, 2, 7, 5, 6, 0, 1];
const SHUFFLE_2: [u32; 4] = [5, 0, 3, 7];
