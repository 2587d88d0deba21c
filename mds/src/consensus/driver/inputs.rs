//! Inputs that the driver gets from outside.

use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use raft::eraftpb::Message;
use strake_fabric::Endpoint;
use strake_proto::{Error, Result, pb};
use strake_runtime::watch;
use tokio::sync::{mpsc, oneshot};

use super::super::{
    leader_lease::PublishedLease, members::Group, reads, transport::Word, types::MemberChange,
};

pub(super) type Reply = oneshot::Sender<Result<()>>;

pub(crate) struct Proposal {
    pub data: Bytes,
    pub reply: oneshot::Sender<Result<Bytes>>,
}

pub(crate) enum RaftInput {
    Batch(Batch, Reply),
    Chunk(pb::SnapshotChunk, Reply),
}

/// Raft messages of one peer, and what it reports about itself.
pub(crate) struct Batch {
    pub from: u64,
    pub stamp: u64,
    pub applied: u64,
    pub disk: u32,
    pub level: u32,
    /// For how long it gives no vote after it has heard from its leader; zero: not said.
    pub vote_wait: Duration,
    pub endpoint: Option<Endpoint>,
    pub messages: Vec<Message>,
}

pub(crate) enum Control {
    /// To 0: to the best successor.
    Transfer(u64, Reply),
    Change(MemberChange, Reply),
    Group(oneshot::Sender<Group>),
    /// The state may be damaged. Asks whether it is given up.
    Damaged(oneshot::Sender<bool>),
    /// The group was begun anew without this member.
    Retire(Error),
    Stop,
}

pub(crate) struct Inputs {
    pub raft: mpsc::Receiver<RaftInput>,
    pub proposals: mpsc::Receiver<Proposal>,
    pub reads: mpsc::Receiver<reads::Reply>,
    pub control: mpsc::Receiver<Control>,
    pub words: mpsc::Receiver<Word>,
}

pub(crate) struct Shared {
    pub status: Mutex<pb::RaftStatus>,
    pub stopped: watch::Sender<Option<Error>>,
    pub(in super::super) lease: PublishedLease,
}
