//! Every enumerated choice on the wire (enum, oneof, flag), and how an unknown value is read. The
//! lists are compared with the schema and the source, so that a new choice cannot be forgotten.

use std::{collections::BTreeSet, fs, path::Path};

use prost::Message as _;
use prost_types::DescriptorProto;
use strake_proto::{
    Code,
    data::{DataRequest, Kind},
    frame::{HEADER_LEN, Header},
    pb,
};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const FILES: [&str; 5] =
    ["common.proto", "meta.proto", "cluster.proto", "admin.proto", "log.proto"];

/// Each choice, and a function that checks how an unknown value is read.
const CHOICES: [(&str, fn()); 13] = [
    ("enum ReplicaState", replica_state),
    ("enum LockKind", lock_kind),
    ("enum LockType", lock_type),
    ("oneof Op.op", op),
    ("oneof Seal.step", seal_step),
    ("oneof MembersRequest.change", members_request),
    ("oneof Repair.what", repair_what),
    ("oneof LogCommand.command", log_command),
    ("oneof LogReply.reply", log_reply),
    ("repr Code in proto/src/error.rs", code),
    ("repr Kind in proto/src/data.rs", update_kind),
    ("repr Kind in proto/src/frame.rs", frame_kind),
    ("flags in proto/src/data.rs", data_flags),
];

fn replica_state() {
    let r = pb::Replica { target: 1, state: 77 };
    let again = pb::Replica::decode(&r.encode_to_vec()[..]).unwrap();
    assert_eq!(
        (again.state, again.state()),
        (77, pb::ReplicaState::ReplicaUnknown),
        "it serves nothing"
    );
}

fn lock_kind() {
    assert!(
        pb::LockKind::try_from(77).is_err(),
        "what `LockKind::default()` says must not be taken for it"
    );
}

fn lock_type() {
    assert!(pb::LockType::try_from(77).is_err());
}

/// A message with one field of an unassigned number.
fn foreign<M: prost::Message + Default>() -> M {
    let mut bytes = Vec::new();
    prost::encoding::encode_key(9_999, prost::encoding::WireType::LengthDelimited, &mut bytes);
    bytes.extend([2, 8, 1]);
    M::decode(&bytes[..]).unwrap()
}

fn op() {
    assert_eq!(foreign::<pb::Op>().op, None);
}
fn seal_step() {
    assert_eq!(foreign::<pb::Seal>().step, None);
}
fn members_request() {
    assert_eq!(foreign::<pb::MembersRequest>().change, None);
}
fn repair_what() {
    assert_eq!(foreign::<pb::Repair>().what, None);
}
fn log_command() {
    assert_eq!(foreign::<pb::LogCommand>().command, None);
}
fn log_reply() {
    assert_eq!(foreign::<pb::LogReply>().reply, None);
}

fn code() {
    assert_eq!(Code::from_wire(60_000), Code::Io);
}

fn update_kind() {
    let mut body = request().to_vec();
    for kind in 6..=255 {
        body[2] = kind;
        assert_eq!(DataRequest::decode(&body).unwrap_err().code, Code::Protocol, "{kind}");
    }
}

fn data_flags() {
    let mut body = request().to_vec();
    for bit in [32, 64, 128] {
        body[3] = bit;
        assert_eq!(DataRequest::decode(&body).unwrap_err().code, Code::Protocol, "{bit}");
    }
}

fn request() -> bytes::Bytes {
    let chunk = strake_proto::ChunkId { ino: 1, data: 2, index: 3 };
    DataRequest { kind: Kind::Write, ..DataRequest::new(1, 1, 1, chunk) }.encode()
}

fn frame_kind() {
    let h = Header {
        version: 1,
        kind: strake_proto::frame::Kind::Request,
        flags: 0,
        opcode: 4,
        status: 0,
        deadline_ms: 0,
        request_id: 1,
        body_len: 0,
        payload_len: 0,
        body_crc: 0,
        payload_crc: 0,
        trace: 0,
    };
    let good = h.encode();
    for kind in (0..=255).filter(|k| !(1..=5).contains(k)) {
        let mut b: [u8; HEADER_LEN] = good;
        b[6] = kind;
        let crc = strake_proto::checksum::crc32c(&b[..60]);
        b[60..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::decode(&b).unwrap_err().code, Code::Protocol, "{kind}");
    }
}

/// Choices in plain number fields, and the test (file, function) that sends an unknown value.
const NUMBERS: [(&str, &str, &str); 10] = [
    (
        "PendingRequest.kind",
        "mds/src/server/tests/hostile.rs",
        "numbers_that_mean_nothing_are_refused",
    ),
    (
        "RaftBatch.disk",
        "mds/src/server/tests/hostile.rs",
        "a_member_that_says_what_nobody_knows_is_harmless",
    ),
    (
        "Member.disk",
        "mds/src/server/tests/hostile.rs",
        "a_member_that_says_what_nobody_knows_is_harmless",
    ),
    ("Component.pattern", "proto/src/layout.rs", "layouts_that_cannot_be_served_are_refused"),
    ("Node.role", "mds/src/cluster/state_tests.rs", "a_node_of_an_unknown_role_is_refused"),
    ("Open.flags", "mds/src/server/tests/hostile.rs", "numbers_that_mean_nothing_are_refused"),
    ("Create.flags", "mds/src/server/tests/hostile.rs", "numbers_that_mean_nothing_are_refused"),
    ("Tmpfile.flags", "mds/src/server/tests/hostile.rs", "numbers_that_mean_nothing_are_refused"),
    ("Rename.flags", "mds/src/server/tests/hostile.rs", "numbers_that_mean_nothing_are_refused"),
    ("SetXattr.flags", "mds/src/server/tests/hostile.rs", "numbers_that_mean_nothing_are_refused"),
];

fn collect(m: &DescriptorProto, choices: &mut BTreeSet<String>, numbers: &mut BTreeSet<String>) {
    let names = ["kind", "role", "flags", "pattern", "disk", "state"];
    for f in m.field.iter().filter(|f| names.contains(&f.name()) && f.type_name.is_none()) {
        if f.r#type() != prost_types::field_descriptor_proto::Type::String {
            numbers.insert(format!("{}.{}", m.name(), f.name()));
        }
    }
    for (i, o) in m.oneof_decl.iter().enumerate() {
        // The compiler makes a oneof for each optional field; those do not count.
        if m.field.iter().any(|f| f.oneof_index == Some(i as i32) && !f.proto3_optional()) {
            choices.insert(format!("oneof {}.{}", m.name(), o.name()));
        }
    }
    choices.extend(m.enum_type.iter().map(|e| format!("enum {}", e.name())));
    m.nested_type.iter().for_each(|n| collect(n, choices, numbers));
}

/// Enums with a fixed representation, and sets of flags, in the source of the wire's fixed layouts.
fn in_source(choices: &mut BTreeSet<String>) {
    for file in fs::read_dir(Path::new(ROOT).join("proto/src")).unwrap() {
        let path = file.unwrap().path();
        let name = path
            .strip_prefix(ROOT)
            .unwrap_or(&path)
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let text = fs::read_to_string(&path).unwrap();
        for part in text.split("#[repr(u").skip(1) {
            let word = part.split("enum ").nth(1).and_then(|r| r.split([' ', '{']).next()).unwrap();
            choices.insert(format!("repr {word} in proto/src/{name}"));
        }
        if text.contains("const FLAGS: u8") {
            choices.insert(format!("flags in proto/src/{name}"));
        }
    }
}

#[test]
fn every_choice_of_the_wire_has_an_answer_to_an_unknown_one() {
    let set = protox::compile(FILES, [Path::new(ROOT).join("proto/schema")]).unwrap();
    let (mut choices, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for file in &set.file {
        choices.extend(file.enum_type.iter().map(|e| format!("enum {}", e.name())));
        file.message_type.iter().for_each(|m| collect(m, &mut choices, &mut numbers));
    }
    in_source(&mut choices);
    assert_eq!(choices, CHOICES.iter().map(|c| c.0.to_string()).collect());
    CHOICES.iter().for_each(|(_, shows)| shows());
    assert_eq!(numbers, NUMBERS.iter().map(|n| n.0.to_string()).collect());
    for (number, file, test) in NUMBERS {
        let text = fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_default();
        assert!(text.contains(&format!("fn {test}(")), "{number}: {file} has no {test}");
    }
}
