//! What a member must keep durable, and the trait of what stores it.
//!
//! A log is a sequence of atomic batches of [`LogOp`]s; replaying them in order gives a
//! [`LogImage`]. The image is also the in-memory copy that raft-rs reads: it holds all retained
//! entries. Cutting the log limits its memory ([`super::Config::log_bytes`]).

use std::collections::{BTreeMap, VecDeque};

use async_trait::async_trait;
use raft::eraftpb::{Entry, EntryType, HardState};
use strake_proto::{Code, Error, Result};

/// One change of the log.
#[derive(Clone, Debug, PartialEq)]
pub enum LogOp {
    /// Puts an entry at its index and drops all after it.
    Append(Entry),
    HardState(HardState),
    /// Entries up to `index` are no longer needed: the durable state has them applied.
    Cut {
        index: u64,
        term: u64,
    },
    /// A peer's state as of `index` replaces this member's; no entries are left. Ends `Restoring`.
    Reset {
        index: u64,
        term: u64,
    },
    /// The state is about to be overwritten by a peer's as of `index`: it is not usable from here
    /// to `Reset`.
    Restoring {
        index: u64,
        term: u64,
    },
    /// The log of member `id` was seen with this stamp. Another stamp later means that the member
    /// lost its log.
    Peer {
        id: u64,
        stamp: u64,
    },
}

/// The state that a log describes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogImage {
    /// Members of the group at index 0; empty for a member that joins later.
    pub voters: Vec<u64>,
    /// Random, made with the log; distinguishes it from a later log of the same member.
    pub stamp: u64,
    pub hard: HardState,
    /// Index and term of the entry before the first one.
    pub base: (u64, u64),
    pub entries: VecDeque<Entry>,
    pub restoring: Option<(u64, u64)>,
    /// Stamps of the other members' logs.
    pub peers: BTreeMap<u64, u64>,
    bytes: usize,
}

/// No log reaches this index, so adding to an index that was read cannot overflow.
pub const MAX_INDEX: u64 = u64::MAX / 2;

/// Approximate bytes of an entry in memory and in the log.
pub fn entry_cost(e: &Entry) -> usize {
    e.data.len() + e.context.len() + 64
}

impl LogImage {
    pub fn new(voters: Vec<u64>, stamp: u64) -> LogImage {
        LogImage { voters, stamp, ..LogImage::default() }
    }

    pub fn first(&self) -> u64 {
        self.base.0 + 1
    }
    pub fn last(&self) -> u64 {
        self.base.0 + self.entries.len() as u64
    }
    /// Bytes the retained entries take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// Whether nothing was ever written: no vote given, nothing acknowledged.
    pub fn is_pristine(&self) -> bool {
        self.hard == HardState::default()
            && self.base == (0, 0)
            && self.entries.is_empty()
            && self.restoring.is_none()
    }

    pub fn get(&self, index: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(index.checked_sub(self.first())?).ok()?)
    }
    /// The term of an entry or of the one before the first.
    pub fn term(&self, index: u64) -> Option<u64> {
        if index == self.base.0 { Some(self.base.1) } else { self.get(index).map(|e| e.term) }
    }

    /// Replays one change. An error means that no member could have written this sequence.
    pub fn apply(&mut self, op: &LogOp) -> Result<()> {
        match op {
            LogOp::Append(e) => self.append(e),
            LogOp::HardState(h) => {
                if h.term < self.hard.term {
                    return Err(damaged(format!(
                        "term goes back from {} to {}",
                        self.hard.term, h.term
                    )));
                }
                self.hard = h.clone();
                Ok(())
            }
            LogOp::Cut { index, term } => {
                if *index < self.base.0 {
                    return Ok(());
                }
                match self.term(*index) {
                    Some(t) if t == *term => self.drop_to(*index, *term),
                    _ => {
                        return Err(damaged(format!(
                            "cut at index {index} term {term}, which the log does not have"
                        )));
                    }
                }
                Ok(())
            }
            LogOp::Reset { index, .. } if *index > MAX_INDEX => {
                Err(damaged(format!("starts after entry {index}")))
            }
            LogOp::Reset { index, term } => {
                self.entries.clear();
                self.bytes = 0;
                self.base = (*index, *term);
                self.restoring = None;
                Ok(())
            }
            LogOp::Restoring { index, term } => {
                self.restoring = Some((*index, *term));
                Ok(())
            }
            LogOp::Peer { id, stamp } => {
                self.peers.insert(*id, *stamp);
                Ok(())
            }
        }
    }

    fn append(&mut self, e: &Entry) -> Result<()> {
        if e.index <= self.base.0 || e.index > self.last() + 1 {
            let (first, last) = (self.first(), self.last());
            return Err(damaged(format!(
                "entry {} does not fit a log of entries {first} to {last}",
                e.index
            )));
        }
        while self.last() >= e.index {
            if let Some(gone) = self.entries.pop_back() {
                self.bytes -= entry_cost(&gone);
            }
        }
        self.bytes += entry_cost(e);
        self.entries.push_back(e.clone());
        Ok(())
    }

    fn drop_to(&mut self, index: u64, term: u64) {
        while self.base.0 < index {
            if let Some(gone) = self.entries.pop_front() {
                self.bytes -= entry_cost(&gone);
            }
            self.base.0 += 1;
        }
        self.base = (index, term);
    }

    /// Changes that give this image without its entries when replayed after an empty log.
    pub fn checkpoint(&self) -> Vec<LogOp> {
        let mut ops = vec![LogOp::HardState(self.hard.clone())];
        ops.extend(self.restoring.map(|(index, term)| LogOp::Restoring { index, term }));
        ops.extend(self.peers.iter().map(|(id, stamp)| LogOp::Peer { id: *id, stamp: *stamp }));
        ops
    }
}

fn damaged(m: String) -> Error {
    Error::new(Code::Corrupt, format!("raft log: {m}"))
}

/// Keeps a member's log. One writer; `load` is called once, before the first `write`.
#[async_trait]
pub trait LogStore: Send + Sync + 'static {
    /// Reads the log. Refuses (`Corrupt`) a log that may have lost something this member
    /// acknowledged.
    async fn load(&self) -> Result<LogImage>;
    /// Appends a batch; the whole batch is durable when this returns. `NoSpc` means that the log is
    /// unchanged and the same batch may be tried again. After any other error nothing more can be
    /// written and the process must end.
    async fn write(&self, ops: &[LogOp]) -> Result<()>;
}

const APPEND: u8 = 1;
const HARD_STATE: u8 = 2;
const CUT: u8 = 3;
const RESET: u8 = 4;
const RESTORING: u8 = 5;
const PEER: u8 = 6;

/// Appends the stored form of `op`, see `docs/formats.md`, "Raft log".
pub fn encode_op(op: &LogOp, out: &mut Vec<u8>) {
    let mut fixed = |kind: u8, words: &[u64]| {
        out.push(kind);
        out.extend_from_slice(&((words.len() * 8) as u32).to_le_bytes());
        words.iter().for_each(|w| out.extend_from_slice(&w.to_le_bytes()));
    };
    match op {
        LogOp::Append(e) => {
            let kind = match e.get_entry_type() {
                EntryType::EntryNormal => 0u8,
                EntryType::EntryConfChange => 1,
                EntryType::EntryConfChangeV2 => 2,
            };
            out.push(APPEND);
            out.extend_from_slice(&((21 + e.context.len() + e.data.len()) as u32).to_le_bytes());
            out.extend_from_slice(&e.index.to_le_bytes());
            out.extend_from_slice(&e.term.to_le_bytes());
            out.push(kind);
            out.extend_from_slice(&(e.context.len() as u32).to_le_bytes());
            out.extend_from_slice(&e.context);
            out.extend_from_slice(&e.data);
        }
        LogOp::HardState(h) => fixed(HARD_STATE, &[h.term, h.vote, h.commit]),
        LogOp::Cut { index, term } => fixed(CUT, &[*index, *term]),
        LogOp::Reset { index, term } => fixed(RESET, &[*index, *term]),
        LogOp::Restoring { index, term } => fixed(RESTORING, &[*index, *term]),
        LogOp::Peer { id, stamp } => fixed(PEER, &[*id, *stamp]),
    }
}

/// Reads a batch of stored changes.
pub fn decode_ops(mut bytes: &[u8]) -> Result<Vec<LogOp>> {
    let mut ops = Vec::new();
    while let Some((kind, rest)) = bytes.split_first() {
        let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
        let (body, rest) =
            rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(short)?;
        bytes = rest;
        ops.push(decode_op(*kind, body)?);
    }
    Ok(ops)
}

fn short() -> Error {
    damaged("a change is incomplete".into())
}

fn words<const N: usize>(body: &[u8]) -> Result<[u64; N]> {
    let mut out = [0; N];
    if body.len() != N * 8 {
        return Err(short());
    }
    for (w, chunk) in out.iter_mut().zip(body.as_chunks::<8>().0) {
        *w = u64::from_le_bytes(*chunk);
    }
    Ok(out)
}

fn decode_op(kind: u8, body: &[u8]) -> Result<LogOp> {
    let index_term = || words::<2>(body);
    Ok(match kind {
        APPEND => {
            let (head, rest) = body.split_at_checked(21).ok_or_else(short)?;
            let [index, term] = words::<2>(&head[..16])?;
            let context_len = u32::from_le_bytes([head[17], head[18], head[19], head[20]]) as usize;
            let (context, data) = rest.split_at_checked(context_len).ok_or_else(short)?;
            let mut e = Entry::default();
            e.set_entry_type(match head[16] {
                0 => EntryType::EntryNormal,
                1 => EntryType::EntryConfChange,
                2 => EntryType::EntryConfChangeV2,
                t => return Err(damaged(format!("entry {index} is of unknown type {t}"))),
            });
            (e.index, e.term) = (index, term);
            e.context = context.to_vec().into();
            e.data = data.to_vec().into();
            LogOp::Append(e)
        }
        HARD_STATE => {
            let [term, vote, commit] = words::<3>(body)?;
            let mut h = HardState::default();
            (h.term, h.vote, h.commit) = (term, vote, commit);
            LogOp::HardState(h)
        }
        CUT => index_term().map(|[index, term]| LogOp::Cut { index, term })?,
        RESET => index_term().map(|[index, term]| LogOp::Reset { index, term })?,
        RESTORING => index_term().map(|[index, term]| LogOp::Restoring { index, term })?,
        PEER => index_term().map(|[id, stamp]| LogOp::Peer { id, stamp })?,
        k => return Err(damaged(format!("a change is of unknown kind {k}"))),
    })
}
