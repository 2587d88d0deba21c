//! One member of a Raft group, and peers that send it anything. It must keep its own rules: entries
//! are handed out once and in order, what it asks to be written can be replayed, and it can restart
//! from that.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use protobuf::Message as _;
use raft::eraftpb::{
    ConfChangeSingle, ConfChangeType, ConfChangeV2, Entry, EntryType, Message, MessageType,
};
use strake_mds::consensus::{Config, LogImage, LogOp, core::Core};

use crate::input::Input;

struct Member {
    core: Core,
    durable: LogImage,
    writes: VecDeque<(u64, Vec<LogOp>)>,
    applied: (u64, u64),
    conf: Vec<u8>,
    /// A copy of a peer's state that has arrived: peer, index, term.
    incoming: Option<(u64, u64, u64)>,
    /// It refused to restart.
    ended: bool,
}

fn config() -> Config {
    Config::new(1, [1; 16], BTreeMap::new())
}

/// See the module's documentation.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let durable = LogImage::new(vec![1, 2, 3], 7);
    let core = Core::new(&config(), durable.clone(), (0, 0), &[], 42).expect("an empty log");
    let mut m = Member {
        core,
        durable,
        writes: VecDeque::new(),
        applied: (0, 0),
        conf: Vec::new(),
        incoming: None,
        ended: false,
    };
    for _ in 0..200 {
        if i.is_empty() || m.ended {
            break;
        }
        m.act(&mut i);
        m.drain();
    }
    m.restart();
}

/// A message from a peer, made of choices or of arbitrary bytes.
pub fn message(i: &mut Input) -> Message {
    let raw = i.u8();
    if raw == 255 {
        return Message::parse_from_bytes(i.bytes()).unwrap_or_default();
    }
    let kinds = [
        MessageType::MsgAppend,
        MessageType::MsgAppend,
        MessageType::MsgHeartbeat,
        MessageType::MsgAppendResponse,
        MessageType::MsgAppendResponse,
        MessageType::MsgHeartbeatResponse,
        MessageType::MsgRequestVote,
        MessageType::MsgRequestVoteResponse,
        MessageType::MsgRequestPreVote,
        MessageType::MsgRequestPreVoteResponse,
        MessageType::MsgSnapshot,
        MessageType::MsgTimeoutNow,
        MessageType::MsgReadIndex,
        MessageType::MsgReadIndexResp,
        MessageType::MsgTransferLeader,
        MessageType::MsgPropose,
        MessageType::MsgHup,
        MessageType::MsgUnreachable,
        MessageType::MsgSnapStatus,
    ];
    let mut m = Message { from: 2 + u64::from(raw & 1), to: 1, ..Default::default() };
    m.set_msg_type(kinds[usize::from(i.u8()) % kinds.len()]);
    m.term = i.number();
    m.index = i.number();
    m.log_term = i.number();
    m.commit = i.number();
    let flags = i.u8();
    m.reject = flags & 1 == 1;
    if flags & 2 != 0 {
        (m.reject_hint, m.commit_term, m.request_snapshot) = (i.number(), i.number(), i.number());
    }
    if flags & 4 != 0 {
        m.context = i.bytes().to_vec().into();
    }
    let (mut index, mut entries) = (m.index, Vec::new());
    for _ in 0..flags >> 3 & 3 {
        index = index.wrapping_add(1);
        let mut e = Entry { index, term: i.number(), ..Default::default() };
        match i.u8() {
            0 => {
                e.set_entry_type(EntryType::EntryConfChangeV2);
                e.data = conf_change(i).into();
            }
            1 => {
                e.set_entry_type(EntryType::EntryConfChange);
                e.data = i.bytes().to_vec().into();
            }
            2 => e.index = i.number(),
            n => e.data = vec![n; usize::from(n)].into(),
        }
        entries.push(e);
    }
    m.set_entries(entries.into());
    if m.get_msg_type() == MessageType::MsgSnapshot {
        let s = m.mut_snapshot();
        s.data = 1u64.to_le_bytes().to_vec().into();
        let meta = s.mut_metadata();
        (meta.index, meta.term) = (i.number(), i.number());
        let voters = (0..i.u8() % 4).map(|_| i.number()).collect();
        meta.mut_conf_state().set_voters(voters);
        if flags & 32 != 0 {
            meta.mut_conf_state().set_learners(vec![i.number()]);
            meta.mut_conf_state().set_voters_outgoing(vec![i.number()]);
        }
    }
    m
}

fn conf_change(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let mut c = ConfChangeV2::default();
    let changes: Vec<_> = (0..i.u8() % 3)
        .map(|_| {
            let mut s = ConfChangeSingle { node_id: i.number(), ..Default::default() };
            s.set_change_type(match i.u8() % 3 {
                0 => ConfChangeType::AddNode,
                1 => ConfChangeType::RemoveNode,
                _ => ConfChangeType::AddLearnerNode,
            });
            s
        })
        .collect();
    c.set_changes(changes.into());
    c.write_to_bytes().unwrap_or_default()
}

impl Member {
    fn act(&mut self, i: &mut Input) {
        match i.u8() % 32 {
            0..3 => (0..=i.u8() % 32).for_each(|_| {
                self.core.tick();
                self.drain();
            }),
            3..8 => self.persist(),
            8 => drop(self.core.propose([Bytes::copy_from_slice(i.bytes())])),
            9 => {
                if self.core.can_read() {
                    self.core.read_index(i.number(), std::time::Duration::ZERO);
                }
            }
            10 => {
                let index = i.number().min(self.applied.0);
                let op = self.core.cut(index);
                self.write(op.into_iter().collect());
            }
            11 => self.core.transfer(i.number()),
            12 => self.core.step_down(),
            13 => self.core.set_stalled(i.u8() & 1 == 1),
            14 => self.core.report_snapshot(2 + u64::from(i.u8() & 1), i.u8() & 1 == 1),
            15 => self.core.report_unreachable(2 + u64::from(i.u8() & 1)),
            16 => {
                let (from, index, term) = (2 + u64::from(i.u8() & 1), i.number(), i.number());
                self.copy(from, index, term);
            }
            17 => {
                if let Ok(c) = ConfChangeV2::parse_from_bytes(&conf_change(i)) {
                    let _ = self.core.propose_change(&c);
                }
            }
            18 if i.u8() == 0 => self.restart(),
            _ => self.step(message(i)),
        }
    }

    /// As the driver does when the first part of a state copy arrives and the log must record it.
    fn copy(&mut self, from: u64, index: u64, term: u64) {
        if self.core.leader() == from && self.core.needs_no_copy(index, term)
            || !self.core.wants_snapshot(from, index, term)
        {
            return;
        }
        let op = self.core.begin_restore(index, term);
        while !self.writes.is_empty() {
            self.persist();
        }
        self.write(vec![op]);
        (self.applied, self.conf, self.incoming) = ((0, 0), Vec::new(), Some((from, index, term)));
    }

    fn step(&mut self, m: Message) {
        if m.get_msg_type() == MessageType::MsgSnapshot {
            let meta = m.get_snapshot().get_metadata();
            let there = self.incoming == Some((m.from, meta.index, meta.term));
            if !there && !self.core.needs_no_copy(meta.index, meta.term) {
                return;
            }
        }
        self.core.step(m);
    }

    fn write(&mut self, ops: Vec<LogOp>) {
        if self.writes.is_empty() {
            ops.iter().for_each(|op| self.durable.apply(op).expect("what the member wrote itself"));
        } else if let Some((_, last)) = self.writes.back_mut() {
            last.extend(ops);
        }
    }

    fn persist(&mut self) {
        if let Some((number, ops)) = self.writes.pop_front() {
            ops.iter().for_each(|op| self.durable.apply(op).expect("what the member wrote itself"));
            self.core.persisted(number);
        }
    }

    fn drain(&mut self) {
        while let Some(out) = self.core.ready() {
            if let Some((index, term, conf)) = out.restore {
                (self.applied, self.incoming) = ((index, term), None);
                self.conf = conf.write_to_bytes().expect("in memory");
            }
            if let Some(ops) = out.persist {
                self.writes.push_back((out.number, ops));
            }
            for e in &out.committed {
                assert_eq!(e.index, self.applied.0 + 1, "an entry out of order");
                self.applied = (e.index, e.term);
            }
            if let Some(conf) = out.conf_state {
                self.conf = conf.write_to_bytes().expect("in memory");
            }
            if !out.committed.is_empty() {
                self.core.applied(self.applied.0, self.applied.1);
            }
        }
    }

    /// Power loss: the state keeps all that was applied, the log all that was persisted.
    fn restart(&mut self) {
        self.writes.clear();
        self.incoming = None;
        match Core::new(&config(), self.durable.clone(), self.applied, &self.conf, 43) {
            Ok(core) => self.core = core,
            Err(e) => {
                assert!(e.message.contains("state is lost"), "{e}");
                self.ended = true;
                return;
            }
        }
        self.drain();
    }
}
