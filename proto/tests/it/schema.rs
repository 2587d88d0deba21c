//! Compares the messages of the wire and of stored data, field by field, with a saved list: a field
//! that changes its number, type or meaning in place would be read wrongly from an older peer or
//! disk, and every other test would still pass.

use std::{collections::BTreeSet, fs};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, field_descriptor_proto::Label,
};

const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema");
const FILES: [&str; 5] =
    ["common.proto", "meta.proto", "cluster.proto", "admin.proto", "log.proto"];

fn field(message: &str, f: &FieldDescriptorProto) -> String {
    let kind = match f.type_name.as_deref() {
        Some(name) => name.trim_start_matches('.').into(),
        None => format!("{:?}", f.r#type()).to_lowercase(),
    };
    let label = match f.label() {
        Label::Repeated => "repeated ",
        _ if f.proto3_optional() => "optional ",
        _ => "",
    };
    format!("{message} {} = {label}{kind} {}", f.number(), f.name())
}

fn values(e: &EnumDescriptorProto, out: &mut BTreeSet<String>) {
    out.extend(e.value.iter().map(|v| format!("{} {} = {}", e.name(), v.number(), v.name())));
}

fn message(outer: &str, m: &DescriptorProto, out: &mut BTreeSet<String>) {
    let name = format!("{outer}{}", m.name());
    out.extend(m.field.iter().map(|f| field(&name, f)));
    m.enum_type.iter().for_each(|e| values(e, out));
    m.nested_type.iter().for_each(|n| message(&format!("{name}."), n, out));
}

#[test]
fn no_field_changes_its_number_or_type() {
    let set = protox::compile(FILES, [SCHEMA]).unwrap();
    let mut now = BTreeSet::new();
    for file in &set.file {
        file.message_type.iter().for_each(|m| message("", m, &mut now));
        file.enum_type.iter().for_each(|e| values(e, &mut now));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/schema.txt");
    if std::env::var_os("STRAKE_WRITE_GOLDEN").is_some() {
        fs::write(path, now.iter().fold(String::new(), |s, l| s + l + "\n")).unwrap();
    }
    let kept: BTreeSet<String> =
        fs::read_to_string(path).unwrap().lines().map(Into::into).collect();
    let gone: Vec<_> = kept.difference(&now).collect();
    assert!(
        gone.is_empty(),
        "changed or removed, which older peers and disks do not survive: {gone:#?}"
    );
    let new: Vec<_> = now.difference(&kept).collect();
    assert!(new.is_empty(), "new; add them to tests/schema.txt (STRAKE_WRITE_GOLDEN=1): {new:#?}");
}
