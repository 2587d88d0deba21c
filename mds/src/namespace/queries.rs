//! Answers from all entries applied so far.

use std::collections::BTreeSet;

use strake_proto::{Code, Error, Ino, Result, SessionId, pb};

use super::{
    away, caller::By, format::RULES, heavy, keys, level, memory::Memory, ops, state::State,
};

/// What a new leader must know about sessions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// All sessions, and whether each may keep dirty data.
    pub sessions: Vec<(SessionId, bool)>,
    /// Which session may write which file.
    pub writers: Vec<(SessionId, Ino)>,
    /// Files that evicted sessions could write, with the number of the last such eviction, until
    /// they are trimmed.
    pub fences: Vec<(Ino, u64)>,
    /// Those of them that others write, until their size is found out.
    pub ends: Vec<(Ino, u64)>,
}

/// An answer, and what it depends on.
pub struct ReadAt {
    pub reply: pb::MetaReply,
    /// The inodes that were read.
    pub looked: BTreeSet<Ino>,
    /// Those of them that other sessions are on record as writing.
    pub written: BTreeSet<Ino>,
    /// Those whose size must still be found out.
    pub endless: BTreeSet<Ino>,
    /// The last entry that it includes.
    pub version: u64,
}

/// Runs a list that changes nothing.
pub(super) fn read_at(
    state: &State,
    session: SessionId,
    creds: &pb::Creds,
    ops: &[pb::Op],
) -> Result<ReadAt> {
    let memory = state.memory.read();
    memory.readable()?;
    if session != 0 && !memory.sessions.contains_key(&session) {
        return Err(Error::new(
            Code::NoSession,
            format!("session {session} has ended; mount again"),
        ));
    }
    let by = By { creds, session, index: 0, ends_matter: false, rules: RULES };
    let (reply, looked, endless, writers) = state.in_txn(&memory, |t| {
        let (reply, _) = ops::run(t, by, ops, false)?;
        Ok((reply, t.notes.looked.take(), t.notes.endless.take(), t.notes.written.take()))
    })?;
    let mut written = BTreeSet::new();
    for (ino, writers) in writers {
        let own = state.store.get(&keys::writer(session, ino))?.is_some();
        if writers > u32::from(own) {
            written.insert(ino);
        }
    }
    Ok(ReadAt { reply, looked, written, endless, version: memory.header.applied_index })
}

/// See [`Namespace::is_heavy`](super::Namespace::is_heavy).
pub(super) fn is_heavy(state: &State, ops: &[pb::Op]) -> Result<bool> {
    if !heavy::is_looked_at(ops) {
        return Ok(false);
    }
    state.looking(|t| heavy::is_heavy(t, ops))
}

/// See [`Namespace::waits_for_targets`](super::Namespace::waits_for_targets).
pub(super) fn waits_for_targets(
    state: &State,
    session: SessionId,
    creds: Option<&pb::Creds>,
    ops: &[pb::Op],
) -> Result<bool> {
    let Some(creds) = creds.filter(|_| away::any_chooses(ops)) else { return Ok(false) };
    let memory = state.memory.read();
    memory.readable()?;
    if !memory.place.any_waits() {
        return Ok(false);
    }
    let index = memory.header.applied_index.saturating_add(1);
    let rules = level::rules(memory.place.view.map.level);
    let by = By { creds, session, index, ends_matter: true, rules };
    state.in_txn(&memory, |t| {
        ops::run(t, by, ops, true)?;
        Ok(t.notes.away.get())
    })
}

/// See [`Namespace::survey`](super::Namespace::survey).
pub(super) fn survey(state: &State, memory: &Memory) -> Result<Survey> {
    let mut s = Survey::default();
    for pair in state.store.prefix(&[keys::WRITER]) {
        let (key, _) = pair?;
        let session = key.get(..9).and_then(keys::last_number);
        s.writers.extend(session.zip(keys::last_number(&key)));
    }
    let cut = state.store.prefix(&[keys::TRIM]).map(|pair| Ok(keys::last_number(&pair?.0)));
    let cut: Vec<Ino> = cut.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let written: BTreeSet<Ino> = s.writers.iter().map(|w| w.1).chain(cut).collect();
    for ino in written {
        let Some(r) = state.inode(ino) else { continue };
        let fence = r.fence.max(r.trim.map_or(0, |t| t.fence));
        s.fences.extend((fence != 0).then_some((ino, fence)));
        s.ends.extend((r.fence != 0).then_some((ino, r.fence)));
    }
    s.sessions = memory.sessions.iter().map(|(id, x)| (*id, x.record.write_back)).collect();
    Ok(s)
}
