//! Text from people and from the kernel: configurations, command lines, addresses, key and identity
//! files, SPDK devices, `/proc`, and what `lfs` reads from a mount and prints. Also what an NVMe
//! controller reports about a namespace.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

use prost::Message;
use strake_fabric::Endpoint;
use strake_fuse::{
    fuzzing::{map_part, read_caller, read_groups},
    table::Mounted,
};
use strake_mds::server::{parse_peer, read_identity};
use strake_oss::device::{
    nvme::{Format, IDENTIFY},
    spdk::TransportId,
};
use strake_proto::{Fid, map::MapView, pb};
use strake_tools::fuzzing::{decode_hex, read_arguments, read_mount_words, read_text, show};

use crate::input::Input;

/// The first byte chooses the format.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let kind = i.u8() % 8;
    match kind {
        0..4 => {
            let text = String::from_utf8_lossy(i.0);
            let _ = read_text(kind, &text);
        }
        4 => small(i.0),
        5 | 6 => arguments(&mut i),
        _ => layouts(&mut i),
    }
}

fn small(bytes: &[u8]) {
    let text = &*String::from_utf8_lossy(bytes);
    if let Ok(e) = text.parse::<Endpoint>() {
        assert_eq!(e.to_string().parse::<Endpoint>().expect("its own text"), e);
    }
    let _ = (
        parse_peer(text),
        read_groups(text),
        read_caller(text),
        Mounted::parse(bytes),
        read_mount_words(text, text),
    );
    if let Some(key) = decode_hex(text) {
        let again = hex::encode(key);
        assert_eq!(decode_hex(&again), Some(key));
    }
    if let Ok(id) = TransportId::parse(text) {
        assert_eq!(
            TransportId::parse(&id.to_string()).expect("its own text").transport,
            id.transport
        );
    }
    let mut identify = [0; IDENTIFY];
    let n = bytes.len().min(IDENTIFY);
    identify[..n].copy_from_slice(&bytes[..n]);
    if let Ok(f) = Format::parse(&identify) {
        assert!(f.capacity() <= f.blocks << f.shift && f.capacity().is_multiple_of(4096));
    }
    if let Ok(policy) = text.parse::<strake_gds::Policy>() {
        assert_eq!(policy.to_string().parse::<strake_gds::Policy>().expect("its own text"), policy);
    }
    if let Ok(fid) = text.parse::<Fid>() {
        assert_eq!(fid.to_string().parse::<Fid>().expect("its own text"), fid);
        if let Ok(ino) = fid.to_ino() {
            assert_eq!(Fid::from_ino(ino), fid);
        }
    }
    for identity in [text.to_string(), format!("strake mds 1\n{text}")] {
        if let Ok(own) = read_identity(&identity) {
            assert_eq!(read_identity(&own).expect("its own text"), own);
        }
    }
}

fn map(i: &mut Input) -> MapView {
    let target = |id| pb::Target { id, alive: id != 1, ..Default::default() };
    let plain = pb::ClusterMap {
        fs_name: "f".into(),
        targets: (0..3).map(target).collect(),
        ..Default::default()
    };
    let decoded = pb::ClusterMap::decode(i.bytes()).ok().and_then(|m| MapView::new(m).ok());
    decoded.unwrap_or_else(|| MapView::new(plain).expect("a small map"))
}

/// A command's arguments, separated by NUL, with a map and a space report.
fn arguments(i: &mut Input) {
    let (command, map) = (i.u8(), map(i));
    let space = pb::StatfsReply::decode(i.bytes()).unwrap_or_default();
    let args = i.0.split(|b| *b == 0).map(|a| OsString::from_vec(a.to_vec())).collect();
    read_arguments(command, args, &map, &space);
}

/// A mount's answer to `lfs getstripe`, and the parts of a map.
fn layouts(i: &mut Input) {
    let (flags, ino, map) = (i.u32(), i.number(), map(i));
    let layout = pb::Layout::decode(i.bytes()).unwrap_or_default();
    let spec = pb::LayoutSpec::decode(i.bytes()).unwrap_or_default();
    show(flags, ino, &layout, &spec, &map);
    let _ = map_part(i.number(), i.bytes(), i.number() as usize);
}
