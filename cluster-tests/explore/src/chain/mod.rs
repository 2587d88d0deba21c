//! The world of `docs/replication.md`: a chain of up to three replicas, their metadata server, two
//! clients and one chunk. The replicas' state machines and the rules of membership are the
//! product's code; the rest is a model of the product's shell code.
//!
//! The promises: whatever replica is read, a read has every write that was answered, and never goes
//! back; only the loss of all replicas in sync loses what is not stable. Stable data are durable on
//! all replicas in sync. Replicas in sync are equal when nothing is in flight. When faults end, the
//! chain becomes whole and every write is answered and stable.

mod checks;
mod clients;
mod kinds;
mod mds;
mod replica;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Deref,
};

use kinds::{Asker, Awaits, CHAIN, CLIENTS, Chunk, Client, Kind, N, Pass, Replica, Write};
pub use kinds::{Bounds, Fault, Message};
use strake_oss::chain::{ChainCore, OpId};
use strake_proto::{
    data::BootId,
    pb::{self, ReplicaState},
};

use crate::Model;

/// The chain as it is in the newest map.
#[derive(Clone, Debug)]
struct Newest(pb::Chain);

impl Hash for Newest {
    fn hash<H: Hasher>(&self, h: &mut H) {
        let replicas: Vec<(u32, i32)> =
            self.0.replicas.iter().map(|r| (r.target, r.state)).collect();
        (self.0.epoch, replicas, &self.0.preferred).hash(h);
    }
}

impl Deref for Newest {
    type Target = pb::Chain;
    fn deref(&self) -> &pb::Chain {
        &self.0
    }
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    /// At the beginning: space may run out.
    full: bool,
    /// At the beginning: writes may be given up.
    checks_given_up: bool,
    /// The chain in the newest map.
    chain: Newest,
    /// Targets whose leases have not run out, by the metadata server.
    alive: [bool; N],
    /// The content of each replica's last heartbeat: the epoch it acted on, and whether its
    /// successor was filled.
    seen: [(u64, bool); N],
    /// How often all replicas in sync were lost at once.
    losses: u8,
    replicas: [Replica; N],
    clients: [Client; CLIENTS],
    messages: Vec<Message>,
    /// Replicas that may be told that their predecessor acts on this epoch.
    greets: Vec<(usize, u64)>,
    next_value: u8,
    /// The longest list that could be read, and the number of losses then.
    read: (u8, Vec<u8>),
    /// A promise that a step broke.
    broken: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// The connection breaks under a message.
    Break(Message),
    /// A message will arrive a second time.
    Repeat(Message),
    Staged {
        at: usize,
        op: OpId,
        full: bool,
    },
    Retry {
        at: usize,
        op: OpId,
    },
    /// The tail compares its SYNCING successor's chunk with its own.
    Compare(usize),
    /// The tail has its successor flush.
    FlushFilled(usize),
    /// A replica that has left the chain removes its data.
    Forget(usize),
    Write {
        client: usize,
        to: usize,
    },
    /// A request that was not answered with success is sent again.
    Send {
        client: usize,
        to: usize,
    },
    /// An older request arrives a second time.
    Twice {
        client: usize,
        to: usize,
    },
    /// A write is given up without an answer; it has not arrived yet.
    GiveUp {
        client: usize,
        to: usize,
    },
    /// A write that was given up arrives.
    Late {
        client: usize,
        to: usize,
        write: Write,
    },
    /// The head learns that its client gave something up; the client's program is told that it
    /// failed.
    Fence {
        client: usize,
        to: usize,
    },
    /// No server takes what a client gave up any more: its program is told.
    TimeOver(usize),
    Flush {
        client: usize,
        to: usize,
    },
    /// The client's connection breaks.
    HangUp(usize),
    /// The metadata server evaluates the chain.
    Evaluate,
    /// The chain is to have these targets.
    Plan(Vec<u32>),
    Beat(usize),
    LeaseEnds(usize),
    /// A server dies; with `keeps` it keeps all that it had applied.
    Crash {
        at: usize,
        keeps: bool,
    },
    Register(usize),
}

impl World {
    /// All replicas serve and act on the first epoch, and nothing is written yet.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let targets: Vec<u32> = (0..N as u32).take(usize::from(left.copies)).collect();
        let serving =
            |t: &u32| pb::Replica { target: *t, state: ReplicaState::ReplicaServing as i32 };
        let replicas = targets.iter().map(serving).collect();
        let mut w = World {
            fault,
            left,
            full: left.full > 0,
            checks_given_up: left.given_up > 0,
            chain: Newest(pb::Chain {
                id: CHAIN,
                epoch: 1,
                replicas,
                preferred: targets,
                lost: false,
            }),
            alive: [true; N],
            seen: [(0, false); N],
            losses: 0,
            replicas: [0, 1, 2].map(|i| Replica::new(i, 1, Chunk::default())),
            clients: Default::default(),
            messages: Vec::new(),
            greets: Vec::new(),
            next_value: 0,
            read: (0, Vec::new()),
            broken: None,
        };
        for i in [0, 1, 2, 0, 1, 2] {
            w.beat(i);
        }
        w.tidy();
        w
    }

    fn actions_of_messages(&self, out: &mut Vec<Action>) {
        for (k, m) in self.messages.iter().enumerate() {
            if self.messages[..k].contains(m) {
                continue;
            }
            let (arrives, breaks) = match m {
                Message::Answer { result, .. } => (true, result.is_ok()),
                Message::Forward { to, epoch, asker, .. }
                | Message::Put { to, epoch, asker, .. } => {
                    let r = &self.replicas[*to];
                    let refused = self.left.refusals || r.epoch() > *epoch;
                    (
                        !r.down && (refused || r.leased && r.epoch() == *epoch),
                        *asker != Asker::Nobody,
                    )
                }
            };
            if arrives {
                out.push(Action::Deliver(m.clone()));
            }
            if breaks && self.left.breaks > 0 {
                out.push(Action::Break(m.clone()));
            }
            if self.left.repeats > 0 && !matches!(m, Message::Answer { .. }) {
                out.push(Action::Repeat(m.clone()));
            }
        }
    }

    fn take(&mut self, m: &Message) {
        if let Some(k) = self.messages.iter().position(|o| o == m) {
            self.messages.remove(k);
        }
    }

    /// The sender is told that there is no answer. A request may still arrive later.
    fn breaks(&mut self, m: &Message) {
        self.left.breaks -= 1;
        self.take(m);
        match m.clone() {
            Message::Answer { to, op, attempt, .. } => {
                self.broken_off(Asker::Replica { at: to, op, attempt }, None);
            }
            Message::Forward { to, epoch, version, prev, write, asker } => {
                self.messages.push(Message::Forward {
                    to,
                    epoch,
                    version,
                    prev,
                    write,
                    asker: Asker::Nobody,
                });
                self.broken_off(asker, None);
            }
            Message::Put { to, epoch, body, expected, asker } => {
                self.messages.push(Message::Put {
                    to,
                    epoch,
                    body,
                    expected,
                    asker: Asker::Nobody,
                });
                self.broken_off(asker, None);
            }
        }
    }

    /// Adds a copy of a request, whose answer is dropped.
    fn repeat(&mut self, m: &Message) {
        self.left.repeats -= 1;
        let mut copy = m.clone();
        if let Message::Forward { asker, .. } | Message::Put { asker, .. } = &mut copy {
            *asker = Asker::Nobody;
        }
        self.messages.push(copy);
    }

    /// Merges worlds that behave alike: drops what has no effect any more, and the order of
    /// messages.
    fn tidy(&mut self) {
        let World { replicas, messages, greets, left, .. } = self;
        let epoch = self.chain.epoch;
        self.seen.iter_mut().filter(|s| s.0 < epoch).for_each(|s| *s = (0, false));
        let waits: Vec<(usize, OpId, u32)> = replicas
            .iter()
            .enumerate()
            .flat_map(|(at, r)| r.work.iter().map(move |(op, w)| (at, *op, w.awaits)))
            .filter_map(|(at, op, awaits)| match awaits {
                Awaits::Forward(attempt) | Awaits::Push(attempt) => Some((at, op, attempt)),
                _ => None,
            })
            .collect();
        let forget = |asker: &mut Asker| match asker {
            Asker::Replica { at, op, attempt } if !waits.contains(&(*at, *op, *attempt)) => {
                *asker = Asker::Nobody
            }
            _ => {}
        };
        replicas.iter_mut().flat_map(|r| r.work.values_mut()).for_each(|w| forget(&mut w.asker));
        messages.retain_mut(|m| match m {
            Message::Answer { to, op, attempt, .. } => waits.contains(&(*to, *op, *attempt)),
            Message::Forward { to, epoch, asker, .. } => {
                forget(asker);
                // Its sender learns of the newer epoch, too, and sends it again.
                let over = replicas[*to].epoch() > *epoch;
                !(over && (!left.refusals || *asker == Asker::Nobody))
            }
            Message::Put { to, epoch, asker, .. } => {
                forget(asker);
                *asker != Asker::Nobody || replicas[*to].epoch() <= *epoch
            }
        });
        if messages.len() > 1 {
            messages.sort_by_cached_key(|m| {
                let mut h = DefaultHasher::new();
                m.hash(&mut h);
                h.finish()
            });
        }
        greets.retain(|(to, epoch)| {
            let r = &mut replicas[*to];
            let arrives = r.leased && r.epoch() == *epoch;
            if arrives {
                r.core.heard_predecessor(*epoch);
            }
            !arrives && r.epoch() <= *epoch
        });
        greets.sort_unstable();
    }

    fn go(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Deliver(m) => {
                self.take(m);
                self.receive(m.clone());
            }
            Action::Break(m) => self.breaks(m),
            Action::Repeat(m) => self.repeat(m),
            Action::Staged { at, op, full } => self.staged(*at, *op, *full),
            Action::Retry { at, op } => self.retry(*at, *op),
            Action::Compare(i) => self.compare(*i),
            Action::FlushFilled(i) => self.flush_filled(*i),
            Action::Forget(i) => self.replicas[*i].chunk = Chunk::default(),
            Action::Write { client, to } => self.write(*client, *to),
            Action::Send { client, to } => self.send(*client, *to),
            Action::Twice { client, to } => self.twice(*client, *to),
            Action::GiveUp { client, to } => self.give_up(*client, *to),
            Action::Late { client, to, write } => self.late(*client, *to, *write),
            Action::Fence { client, to } => self.fence(*client, *to),
            Action::TimeOver(c) => self.time_over(*c),
            Action::Flush { client, to } => self.flush(*client, *to),
            Action::HangUp(c) => self.hang_up(*c),
            Action::Evaluate => self.evaluate(),
            Action::Plan(targets) => self.plan(targets),
            Action::Beat(i) => self.beat(*i),
            Action::LeaseEnds(i) => self.lease_ends(*i),
            Action::Crash { at, keeps } => {
                self.left.crashes -= 1;
                self.crash(*at, *keeps);
            }
            Action::Register(i) => self.register(*i),
        }
        self.tidy();
        self.promises()
    }
}

/// A core without a map. `stale_through`: see [`ChainCore::new`].
fn new_core(at: usize, life: u64, stale_through: u64) -> ChainCore {
    ChainCore::new(CHAIN, BootId { target: at as u32, number: life }, stale_through)
}

impl Model for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut out = Vec::new();
        self.actions_of_messages(&mut out);
        (0..N).for_each(|i| self.actions_of_replica(i, &mut out));
        self.actions_of_clients(&mut out);
        self.actions_of_mds(&mut out);
        out
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        self.go(action)?;
        let one_of = self.left.settle;
        let tried = one_of > 0 && crate::fingerprint(self).is_multiple_of(one_of);
        if tried || self.actions().is_empty() { self.clone().settles() } else { Ok(()) }
    }
}
