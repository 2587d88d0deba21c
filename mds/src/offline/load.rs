//! Makes the folder of a group's first member from a dump. The group is a new incarnation: changes
//! after the dump are lost, and clients and servers that know of them must not take this group for
//! the former one.

use std::{
    fs::{self, File},
    io::BufRead,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use serde::Deserialize;
use strake_proto::{Code, Error, Incarnation, Result};
use strake_store::{Batch, MetaStore};

use super::{
    CACHE, begin_anew,
    dump::{self, End, Head},
    finish, membership, new_id, next_incarnation, spent_ids,
};
use crate::{
    data_dir::{self, LOG, Record, STATE, Sizes, State},
    namespace::{FORMAT_VERSION, Namespace},
};

/// The longest line: the map of the largest cluster, twice in hexadecimal, takes a few MiB.
const MAX_LINE: u64 = 64 << 20;
/// Bytes of pairs in one commit.
const BATCH: usize = 1 << 20;
const REPORT: u64 = 50_000;

pub struct Options {
    pub cluster_key: [u8; 32],
    /// The member's id; `None`: the lowest that no member ever had.
    pub id: Option<u64>,
    /// The new incarnation's era must be higher than this.
    pub beyond: u64,
    /// Random numbers that make the incarnation and the log unique.
    pub random: (u64, u64),
}

/// The result of a load.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub member: u64,
    pub incarnation: Incarnation,
    pub fs_name: String,
    pub records: u64,
    pub inodes: u64,
}

/// Loads `from` into the folder `dir`, which must be absent, empty, or left by an interrupted load.
/// On failure nothing is left there. `Corrupt`: the dump is damaged, the message says where.
/// `Protocol`: it is of a newer version.
pub fn load(
    dir: &Path,
    from: &mut dyn BufRead,
    o: &Options,
    progress: impl FnMut(String),
) -> Result<Outcome> {
    let existed = dir.exists();
    strake_store::make_folder(dir)?;
    let lock = data_dir::lock(dir)?;
    match Record::read(dir)? {
        None => data_dir::refuse_foreign(dir)?,
        Some(Record { state: State::Loading, .. }) => {}
        Some(r) => {
            let m = format!(
                "{} is the folder of metadata server {}; give an empty one",
                dir.display(),
                r.member
            );
            return Err(Error::new(Code::Exist, m));
        }
    }
    let loaded = wipe(dir).and_then(|()| load_locked(dir, from, o, progress));
    if loaded.is_err() {
        // Leaves the folder as it was found.
        let _ = wipe(dir);
        for name in ["identity", "identity.tmp", "lock"] {
            let _ = fs::remove_file(dir.join(name));
        }
        if !existed {
            let _ = fs::remove_dir(dir);
        }
    }
    drop(lock);
    loaded
}

fn wipe(dir: &Path) -> Result<()> {
    for name in [STATE, LOG] {
        match fs::remove_dir_all(dir.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(data_dir::at(&dir.join(name), e));
            }
            _ => {}
        }
    }
    Ok(())
}

fn load_locked(
    dir: &Path,
    from: &mut dyn BufRead,
    o: &Options,
    progress: impl FnMut(String),
) -> Result<Outcome> {
    let mut lines = Lines { from, number: 0, offset: 0, sum: 0 };
    let head = read_head(&mut lines)?;
    let cluster = data_dir::cluster_id(&o.cluster_key, &head.fs_name);
    Record { member: o.id.unwrap_or(0), cluster, state: State::Loading }.write(dir)?;
    let store: Arc<dyn MetaStore> = Arc::new(Sizes::of(dir)?.store(dir, CACHE)?);
    let records = read_records(&mut lines, &*store, progress)?;
    let state = Namespace::open(store.clone())?;
    let (header, map) = (state.header(), state.map());
    let same = (
        header.applied_index,
        header.applied_term,
        hex::encode(&header.fs_uuid),
        map.map.incarnation,
    ) == (head.index, head.term, head.fs_uuid.clone(), head.incarnation);
    if !same || header.fs_uuid.is_empty() {
        return Err(Error::new(
            Code::Corrupt,
            "the dump's first line does not describe the state that follows it",
        ));
    }
    drop(state);
    let mut spent = spent_ids(&map.map, &membership(&header.conf_state)?);
    let member = new_id(o.id, &spent)?;
    spent.remove(&member);
    let incarnation = next_incarnation(Incarnation(head.incarnation), o.beyond, o.random.0)?;
    begin_anew(&store, member, incarnation, &spent)?;
    finish(dir, &store, cluster, member, o.random.1)?;
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| data_dir::at(dir, e))?;
    Ok(Outcome { member, incarnation, fs_name: head.fs_name, records, inodes: header.inodes })
}

/// The lines of a dump, whose checksums are verified.
struct Lines<'a> {
    from: &'a mut dyn BufRead,
    /// Number of the line read last, from 1 on, and its byte offset.
    number: u64,
    offset: u64,
    /// The sum over the lines before it.
    sum: u32,
}

struct Line {
    object: String,
    crc: u32,
    bytes: u64,
}

impl Lines<'_> {
    /// The error with the place in the file.
    fn bad(&self, code: Code, what: &str) -> Error {
        Error::new(code, format!("line {} (byte {}): {what}", self.number, self.offset))
    }

    fn next(&mut self) -> Result<Line> {
        self.number += 1;
        let mut line = Vec::new();
        let mut limited = std::io::Read::take(&mut *self.from, MAX_LINE);
        limited
            .read_until(b'\n', &mut line)
            .map_err(|e| Error::from(e).context("reading the dump"))?;
        if line.is_empty() {
            return Err(self
                .bad(Code::Corrupt, "the dump ends here without its last line: it was cut short"));
        }
        if line.pop() != Some(b'\n') {
            return Err(self.bad(
                Code::Corrupt,
                "the line is incomplete: the dump was cut short, or this is not a dump",
            ));
        }
        let text = std::str::from_utf8(&line).ok();
        let Some((object, crc)) = text.and_then(dump::unframe) else {
            return Err(self.bad(Code::Corrupt, "the line does not match its checksum"));
        };
        Ok(Line { object, crc, bytes: line.len() as u64 + 1 })
    }

    /// Adds a processed line to the sum.
    fn pass(&mut self, line: &Line) {
        self.sum = dump::chain(self.sum, line.crc);
        self.offset += line.bytes;
    }

    fn parse<'l, T: Deserialize<'l>>(&self, line: &'l Line, what: &str) -> Result<T> {
        serde_json::from_str(&line.object)
            .map_err(|e| self.bad(Code::Corrupt, &format!("not {what}: {e}")))
    }
}

#[derive(Deserialize)]
struct AnyVersion {
    #[serde(rename = "strake-metadata-dump")]
    version: u32,
}

fn read_head(lines: &mut Lines<'_>) -> Result<Head> {
    let line =
        lines.next().map_err(|e| e.context("this is not a dump of metadata, or it is damaged"))?;
    let AnyVersion { version } = lines.parse(&line, "the first line of a dump of metadata")?;
    let newer = |what: &str| lines.bad(Code::Protocol, &format!("{what}: run a newer strake"));
    if version != dump::VERSION {
        return Err(newer(&format!(
            "the dump is of version {version}, this program knows {}",
            dump::VERSION
        )));
    }
    let head: Head = lines.parse(&line, "the first line of a dump of metadata")?;
    if head.format > FORMAT_VERSION {
        let m =
            format!("the state is of format {}, this program knows {FORMAT_VERSION}", head.format);
        return Err(newer(&m));
    }
    lines.pass(&line);
    Ok(head)
}

#[derive(Deserialize)]
struct Pair {
    key: String,
    value: String,
}

/// Reads everything up to the last line, and checks that nothing follows. Returns the number of
/// records.
fn read_records(
    lines: &mut Lines<'_>,
    store: &dyn MetaStore,
    mut progress: impl FnMut(String),
) -> Result<u64> {
    let (mut records, mut last, mut batch, mut size) = (0, Bytes::new(), Batch::default(), 0);
    loop {
        let line = lines.next()?;
        if let Ok(end) = serde_json::from_str::<End>(&line.object) {
            if (end.records, end.sum) != (records, lines.sum) {
                let m = format!(
                    "the dump has {records} of {} records, or others than it was made with",
                    end.records
                );
                return Err(lines.bad(Code::Corrupt, &m));
            }
            store.commit(batch)?;
            lines.pass(&line);
            break;
        }
        let Pair { key, value } = lines.parse(&line, "a record")?;
        let bytes = |digits: &str| hex::decode(digits).ok().map(Bytes::from);
        let (key, value) = bytes(&key)
            .zip(bytes(&value))
            .ok_or_else(|| lines.bad(Code::Corrupt, "key and value are not hexadecimal"))?;
        dump::show(&key, &value).map_err(|e| lines.bad(Code::Corrupt, &e.message))?;
        if key <= last {
            return Err(lines.bad(Code::Corrupt, "the record is out of place"));
        }
        size += key.len() + value.len();
        batch.put(key.clone(), value);
        last = key;
        records += 1;
        if size > BATCH {
            store.commit(std::mem::take(&mut batch))?;
            size = 0;
        }
        if records % REPORT == 0 {
            progress(format!("{records} records"));
        }
        lines.pass(&line);
    }
    if lines.from.fill_buf().map_err(|e| Error::from(e).context("reading the dump"))?.is_empty() {
        return Ok(records);
    }
    lines.number += 1;
    Err(lines.bad(Code::Corrupt, "there is data after the last line"))
}
