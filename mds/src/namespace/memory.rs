//! Decoded records in memory: header, cluster map and sessions.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use prost::Message;
use strake_proto::{Code, Error, Result, SessionId, map::MapView, pb};
use strake_store::MetaStore;

use super::{
    format::{FORMAT_FIRST, FORMAT_VERSION},
    keys, level,
    placement::Placement,
};

/// A session and the sequence numbers whose replies are kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Session {
    pub record: pb::SessionRecord,
    pub seqs: BTreeSet<u64>,
}

/// Decoded records in memory; always equal to the store.
#[derive(Default)]
pub(super) struct Memory {
    pub header: pb::StateHeader,
    pub place: Arc<Placement>,
    pub sessions: BTreeMap<SessionId, Session>,
    pub uuids: BTreeMap<Bytes, SessionId>,
    /// The newest feature level that this program knows.
    pub knows: u32,
    /// The store is being replaced, or is not whole: nothing may be read from it.
    pub void: bool,
}

impl Memory {
    pub(super) fn readable(&self) -> Result<()> {
        if self.void { Err(Error::not_leader(0)) } else { Ok(()) }
    }
}

pub(super) fn damaged(what: &str, e: impl std::fmt::Display) -> Error {
    Error::new(Code::Corrupt, format!("metadata state: {what} is damaged ({e})"))
}

/// Reads header, map and sessions from a store, for a program that knows feature levels up to
/// `knows`.
pub(super) fn load(store: &dyn MetaStore, knows: u32) -> Result<Memory> {
    let mut m = Memory { knows, ..Memory::default() };
    m.header.format_version = FORMAT_FIRST;
    if let Some(h) = store.get(keys::HEADER)? {
        m.header = pb::StateHeader::decode(h).map_err(|e| damaged("the header", e))?;
    }
    if m.header.format_version > FORMAT_VERSION {
        let v = m.header.format_version;
        let text = format!(
            "metadata state has format {v}, this program knows {FORMAT_VERSION}: run a newer strake"
        );
        return Err(Error::new(Code::Protocol, text));
    }
    if let Some(map) = store.get(keys::MAP)? {
        let map = pb::ClusterMap::decode(map).map_err(|e| damaged("the cluster map", e))?;
        level::check_known(map.level, knows)?;
        m.place = Arc::new(Placement::new(Arc::new(MapView::new(map)?)));
    }
    for pair in store.prefix(&[keys::SESSION]) {
        let (key, value) = pair?;
        let id = keys::last_number(&key).ok_or_else(|| damaged("a session's key", "too short"))?;
        let record = pb::SessionRecord::decode(value).map_err(|e| damaged("a session", e))?;
        m.uuids.insert(record.client_uuid.clone(), id);
        m.sessions.insert(id, Session { record, ..Default::default() });
    }
    for pair in store.prefix(&[keys::REPLY]) {
        let (key, _) = pair?;
        let id = key.get(1..9).and_then(keys::last_number);
        let session = id.and_then(|id| m.sessions.get_mut(&id));
        let seq = keys::last_number(&key);
        match (session, seq) {
            (Some(s), Some(seq)) => s.seqs.insert(seq),
            _ => return Err(damaged("a kept reply", "it belongs to no session")),
        };
    }
    Ok(m)
}

/// Puts changes into a table; `None` = gone.
pub(super) fn merge<K: Ord, V>(into: &mut BTreeMap<K, V>, changes: BTreeMap<K, Option<V>>) {
    for (k, v) in changes {
        match v {
            Some(v) => into.insert(k, v),
            None => into.remove(&k),
        };
    }
}
