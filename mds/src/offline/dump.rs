//! A metadata state as one file: lines of JSON, one for each record, that people can search and
//! [`load`](super::load) can read.
//!
//! Each line begins with the CRC32C of its rest. The first line says what the file is, the last one
//! how many records there are; a line that is cut off, changed, moved or missing is found, with its
//! number. Format: `docs/formats.md`, "Metadata dump".

use std::{io::Write, ops::Bound, path::Path};

use prost::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use strake_proto::{
    Code, Error, Incarnation, Result,
    checksum::{crc32c, crc32c_both},
    pb,
};
use strake_store::Reader;

use super::{inspect, inval};
use crate::{
    data_dir::State,
    namespace::{Namespace, check_lock_index},
};

/// The version of the format.
pub const VERSION: u32 = 1;
/// Records between two progress reports.
const REPORT: u64 = 50_000;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    #[serde(rename = "strake-metadata-dump")]
    pub version: u32,
    pub fs_name: String,
    pub fs_uuid: String,
    /// As a number.
    pub incarnation: u64,
    /// The format version of the state's records.
    pub format: u32,
    /// The last entry of the Raft log that the state includes.
    pub index: u64,
    pub term: u64,
}

/// The last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    #[serde(rename = "end")]
    pub records: u64,
    /// The sum over the checksums of all lines before.
    pub sum: u32,
}

/// A record: its kind, fields that people search for, and its bytes in hexadecimal.
#[derive(Serialize)]
struct Line {
    record: &'static str,
    #[serde(flatten)]
    shown: Map<String, Value>,
    key: String,
    value: String,
}

/// The result of a dump.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub head: Head,
    pub records: u64,
    pub bytes: u64,
    /// Entries of the member's log that its state, and so the dump, lacks.
    pub unapplied: u64,
}

/// Writes the state in a stopped server's folder to `out`. `Busy`: a server runs on it. `EINVAL`:
/// the folder holds no whole state.
pub fn dump(dir: &Path, out: &mut dyn Write, mut progress: impl FnMut(String)) -> Result<Outcome> {
    let folder = inspect::open(dir)?;
    let r = &folder.report;
    let unfinished = matches!(r.identity, State::Recovering { .. })
        .then(|| "a recovery of it was begun; complete that first".to_string());
    if let Some(why) = r.void.clone().or(unfinished) {
        return Err(inval(format!("{}: {why}", dir.display())));
    }
    let view = folder.store.snapshot()?;
    let header = Namespace::open(folder.store.clone())?.header();
    let head = Head {
        version: VERSION,
        fs_name: header.fs_name.clone(),
        fs_uuid: hex::encode(&header.fs_uuid),
        incarnation: r.incarnation.0,
        format: header.format_version,
        index: header.applied_index,
        term: header.applied_term,
    };
    let mut w = Writer::new(out);
    w.line(&head)?;
    let records = write_records(&mut w, &*view, &mut progress)?;
    w.line(&End { records, sum: w.sum })?;
    w.out.flush()?;
    let unapplied = r.log.as_ref().map_or(0, |l| l.unapplied);
    Ok(Outcome { head, records, bytes: w.bytes, unapplied })
}

fn write_records(
    w: &mut Writer<'_>,
    view: &dyn Reader,
    progress: &mut impl FnMut(String),
) -> Result<u64> {
    let mut records = 0;
    for pair in view.range(Bound::Unbounded, Bound::Unbounded) {
        let (key, value) = pair?;
        let (record, shown) = show(&key, &value)?;
        w.line(&Line { record, shown, key: hex::encode(&key), value: hex::encode(&value) })?;
        records += 1;
        if records % REPORT == 0 {
            progress(format!("{records} records"));
        }
    }
    Ok(records)
}

struct Writer<'a> {
    out: &'a mut dyn Write,
    sum: u32,
    bytes: u64,
}

impl<'a> Writer<'a> {
    fn new(out: &'a mut dyn Write) -> Writer<'a> {
        Writer { out, sum: 0, bytes: 0 }
    }

    fn line(&mut self, what: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(what).map_err(|e| inval(e.to_string()))?;
        let line = frame(&text);
        self.sum = chain(self.sum, crc32c(&text.as_bytes()[1..]));
        self.bytes += line.len() as u64;
        self.out.write_all(line.as_bytes()).map_err(Error::from)
    }
}

/// Puts the checksum of the rest in front: `{"crc":"01234567",REST` and a line feed, for an object
/// `{REST`.
pub(super) fn frame(object: &str) -> String {
    let rest = &object[1..];
    format!("{{\"crc\":\"{:08x}\",{rest}\n", crc32c(rest.as_bytes()))
}

/// The opposite of [`frame`], without the line feed: the object and its checksum. `None`: damaged.
pub(super) fn unframe(line: &str) -> Option<(String, u32)> {
    let rest = line.strip_prefix("{\"crc\":\"")?;
    let (crc, rest) = rest.split_at_checked(8)?;
    let rest = rest.strip_prefix("\",")?;
    let crc = u32::from_str_radix(crc, 16).ok()?;
    (crc32c(rest.as_bytes()) == crc).then(|| (format!("{{{rest}"), crc))
}

/// The sum over lines: CRC32C of the sum so far and the next line's checksum, both little-endian.
pub(super) fn chain(sum: u32, next: u32) -> u32 {
    crc32c_both(&sum.to_le_bytes(), &next.to_le_bytes())
}

fn damaged(what: &str) -> Error {
    Error::new(Code::Corrupt, format!("metadata state: {what} is damaged"))
}

fn decode<M: Message + Default>(what: &'static str, value: &[u8]) -> Result<M> {
    M::decode(value).map_err(|_| damaged(what))
}

/// The number at a byte offset of a key.
fn number(key: &[u8], at: usize) -> Option<u64> {
    key.get(at..at + 8)?.first_chunk::<8>().map(|b| u64::from_be_bytes(*b))
}

fn text(bytes: &[u8]) -> Value {
    String::from_utf8_lossy(bytes).into_owned().into()
}

/// The kind of record of a pair, and fields that people may search for. `Corrupt` if it is not a
/// record of a state: a dump that is loaded is checked by this, too.
pub(super) fn show(key: &[u8], value: &[u8]) -> Result<(&'static str, Map<String, Value>)> {
    let bad = || damaged("a key");
    let first = || number(key, 1).filter(|_| key.len() == 9).ok_or_else(bad);
    let two = || number(key, 1).zip(number(key, 9)).filter(|_| key.len() == 17).ok_or_else(bad);
    let (record, shown) = match key.first() {
        Some(b'H') if key.len() == 1 => {
            let h: pb::StateHeader = decode("header", value)?;
            ("header", json!({ "fs_name": h.fs_name, "inodes": h.inodes, "next_ino": h.next_ino }))
        }
        Some(b'M') if key.len() == 1 => {
            let m: pb::ClusterMap = decode("map", value)?;
            let nodes: Vec<_> = m.nodes.iter().map(|n| n.name.clone()).collect();
            let incarnation = Incarnation(m.incarnation).to_string();
            let counts = (m.targets.len(), m.chains.len());
            (
                "map",
                json!({ "version": m.version, "incarnation": incarnation, "nodes": nodes, "targets": counts.0, "chains": counts.1 }),
            )
        }
        Some(b'd') if key.len() == 19 => {
            let d: pb::DentryRecord = decode("name", value)?;
            let (dir, cookie) = number(key, 1).zip(number(key, 11)).ok_or_else(bad)?;
            (
                "name",
                json!({ "dir": dir, "cookie": cookie, "name": text(&d.name), "ino": d.ino, "type": d.r#type }),
            )
        }
        Some(b'i') => ("inode", show_inode(first()?, &decode("inode", value)?)?),
        Some(b'x') => {
            let ino = number(key, 1).ok_or_else(bad)?;
            ("xattr", json!({ "ino": ino, "name": text(&key[9..]), "bytes": value.len() }))
        }
        Some(b'o') => ("orphan", json!({ "ino": first()? })),
        Some(b'g') => {
            let g: pb::GcRecord = decode("deletion", value)?;
            ("deletion", json!({ "number": first()?, "ino": g.ino, "size": g.size }))
        }
        Some(b't') => {
            let t: pb::Trim = decode("cut", value)?;
            ("cut", json!({ "ino": first()?, "size": t.size }))
        }
        Some(b'e') => {
            let e: pb::EvictedRecord = decode("eviction", value)?;
            ("eviction", json!({ "number": first()?, "session": e.session, "below": e.below }))
        }
        Some(b'm') => {
            let (ino, page) = two()?;
            ("manifest", json!({ "ino": ino, "page": page, "extents": value.len() / 32 }))
        }
        _ => show_of_session(key, value)?,
    };
    match shown {
        Value::Object(m) => Ok((record, m)),
        _ => Ok((record, Map::new())),
    }
}

/// The same for what sessions have and hold.
fn show_of_session(key: &[u8], value: &[u8]) -> Result<(&'static str, Value)> {
    let bad = || damaged("a key");
    let first = || number(key, 1).filter(|_| key.len() == 9).ok_or_else(bad);
    let two = || number(key, 1).zip(number(key, 9)).filter(|_| key.len() == 17).ok_or_else(bad);
    Ok(match key.first() {
        Some(b's') => {
            let s: pb::SessionRecord = decode("session", value)?;
            (
                "session",
                json!({ "session": first()?, "hostname": s.hostname, "pid": s.pid, "version": s.version }),
            )
        }
        Some(b'r') => {
            decode::<pb::LogReply>("reply", value)?;
            let (session, seq) = two()?;
            ("reply", json!({ "session": session, "seq": seq }))
        }
        Some(b'w') => {
            let (session, ino) = two()?;
            ("writer", json!({ "session": session, "ino": ino }))
        }
        Some(b'l') if matches!(key.len(), 26 | 34) => {
            let l: pb::LockRecord = decode("lock", value)?;
            let (ino, session) = number(key, 1).zip(number(key, 9)).ok_or_else(bad)?;
            ("lock", json!({ "ino": ino, "session": session, "ranges": l.spans.len() }))
        }
        Some(b'j') => {
            check_lock_index(key, value)?;
            ("lock index", json!({ "ino": number(key, 1).ok_or_else(bad)? }))
        }
        Some(b'k') => {
            let t: pb::LockTotal = decode("lock total", value)?;
            let (session, ino) = two()?;
            ("lock total", json!({ "session": session, "ino": ino, "ranges": t.ranges }))
        }
        _ => return Err(bad()),
    })
}

fn show_inode(ino: u64, r: &pb::InodeRecord) -> Result<Value> {
    let a = r.attr.filter(|a| a.ino == ino).ok_or_else(|| damaged("inode"))?;
    let component = r.layout.as_ref().and_then(|l| l.components.first());
    let mut shown = json!({
        "ino": ino, "mode": format!("{:o}", a.mode), "uid": a.uid, "gid": a.gid, "nlink": a.nlink, "size": a.size,
        "mtime_ns": a.mtime_ns,
        "names": r.links.iter().map(|l| json!({ "dir": l.parent, "name": text(&l.name) })).collect::<Vec<_>>(),
    });
    if let Some(c) = component {
        shown["data"] = c.data_id.into();
        shown["chains"] = c.chains.clone().into();
    }
    if let Some(s) = &r.seal {
        shown["sealed"] = true.into();
        shown["sha256"] = s.manifest.as_ref().map(|m| hex::encode(&m.sha256)).into();
    }
    if !r.symlink.is_empty() {
        shown["symlink"] = text(&r.symlink);
    }
    Ok(shown)
}
