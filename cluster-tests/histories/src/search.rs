//! Looks for one order that explains a history: the search of Wing and Gong, with Lowe's memory of what was tried.
//!
//! Two things make it fast. An operation that may be next and changes nothing is put next at once: whatever order there is,
//! one with this operation here is as good. And what was reached in another order is not gone into twice: what is left depends on the
//! operations that are done and the state alone.

use std::{
    collections::HashSet,
    hash::{BuildHasher, Hash, Hasher, RandomState},
};

use crate::{
    history::{History, Outcome, Record},
    model::{Model, State, Step, Why},
};

/// What the search found.
#[derive(Debug)]
pub enum Verdict {
    /// With the records in an order that explains it; those of unknown outcome that it leaves out never ran.
    Linearizable { order: Vec<usize>, steps: u64 },
    Rejected { deepest: Deepest, steps: u64 },
    /// The search had no end within the limit. This says nothing.
    Undecided { steps: u64 },
}

/// The longest beginning of an order that was found.
#[derive(Debug)]
pub struct Deepest {
    pub order: Vec<usize>,
    pub state: State,
    /// What had to come next, and why none of it could.
    pub blocked: Vec<(usize, Why)>,
}

impl Verdict {
    pub fn is_linearizable(&self) -> bool {
        matches!(self, Verdict::Linearizable { .. })
    }
    pub fn is_rejected(&self) -> bool {
        matches!(self, Verdict::Rejected { .. })
    }
    /// States gone into.
    pub fn steps(&self) -> u64 {
        match self {
            Verdict::Linearizable { steps, .. } | Verdict::Rejected { steps, .. } | Verdict::Undecided { steps } => *steps,
        }
    }
}

/// Steps after which a search is given up. The hardest histories of the tests take a hundredth.
pub const LIMIT: u64 = 2_000_000;

/// Whether there is an order, by at most `limit` states gone into.
pub fn check(history: &History, limit: u64) -> Verdict {
    Search::new(history).run(limit)
}

/// A set of operations.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(n: usize) -> Bits {
        Bits(vec![0; n.div_ceil(64)])
    }
    fn has(&self, i: usize) -> bool {
        self.0[i / 64] & 1 << (i % 64) != 0
    }
    fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
}

/// One operation as the search sees it.
struct Item<'h> {
    /// Its place in the history.
    at: usize,
    record: &'h Record,
    /// `u64::MAX`: it need not run.
    reply: u64,
}

/// A place in the search: what is done, and what may be done next.
struct Node {
    done: Bits,
    state: State,
    /// Length of the order up to here.
    len: usize,
    /// The next choice comes last.
    choices: Vec<(usize, State)>,
}

struct Search<'h> {
    model: Model,
    items: Vec<Item<'h>>,
    known: usize,
    first: State,
    seen: HashSet<u128>,
    hashers: [RandomState; 2],
    order: Vec<usize>,
    /// Of the order so far, those that must run.
    best: Option<(usize, Vec<usize>, State, Bits)>,
}

impl<'h> Search<'h> {
    fn new(history: &'h History) -> Search<'h> {
        let item = |(at, record): (usize, &'h Record)| match record.outcome {
            Outcome::Unknown(_) if record.op.is_read() => None,
            Outcome::Unknown(_) => Some(Item { at, record, reply: u64::MAX }),
            _ => Some(Item { at, record, reply: record.reply }),
        };
        let mut items: Vec<Item> = history.records.iter().enumerate().filter_map(item).collect();
        items.sort_by_key(|i| (i.record.call, i.at));
        let known = items.iter().filter(|i| i.reply != u64::MAX).count();
        Search {
            model: Model::new(history),
            known,
            items,
            first: State::new(&history.head),
            seen: HashSet::new(),
            hashers: [RandomState::new(), RandomState::new()],
            order: Vec::new(),
            best: None,
        }
    }

    fn run(mut self, limit: u64) -> Verdict {
        let mut steps = 0;
        let mut nodes = Vec::new();
        let mut next = Some((Bits::new(self.items.len()), self.first.clone()));
        loop {
            if let Some((done, state)) = next.take() {
                steps += 1;
                if steps > limit {
                    return Verdict::Undecided { steps };
                }
                let node = self.enter(done, state);
                let known = self.order.iter().filter(|i| self.items[**i].reply != u64::MAX).count();
                if known == self.known {
                    return Verdict::Linearizable { order: self.places(&self.order), steps };
                }
                if self.best.as_ref().is_none_or(|b| b.0 < known) {
                    self.best = Some((known, self.order.clone(), node.state.clone(), node.done.clone()));
                }
                nodes.push(node);
            }
            let Some(node) = nodes.last_mut() else { break };
            let Some((i, state)) = node.choices.pop() else {
                nodes.pop();
                continue;
            };
            self.order.truncate(node.len);
            let mut done = node.done.clone();
            done.set(i);
            if self.seen.insert(self.fingerprint(&done, &state)) {
                self.order.push(i);
                next = Some((done, state));
            }
        }
        Verdict::Rejected { deepest: self.deepest(), steps }
    }

    fn fingerprint(&self, done: &Bits, state: &State) -> u128 {
        let half = |h: &RandomState| {
            let mut h = h.build_hasher();
            (done, state).hash(&mut h);
            u128::from(h.finish())
        };
        half(&self.hashers[0]) << 64 | half(&self.hashers[1])
    }

    /// Those that may come next: not done, and called before every answer to one that must still run.
    fn next_ones(&self, done: &Bits) -> Vec<usize> {
        let mut horizon = u64::MAX;
        let mut open = Vec::new();
        for (i, item) in self.items.iter().enumerate() {
            if item.record.call > horizon {
                break;
            }
            if !done.has(i) {
                horizon = horizon.min(item.reply);
                open.push(i);
            }
        }
        open.retain(|i| self.items[*i].record.call <= horizon);
        open
    }

    /// Does all that changes nothing, and finds what may change something.
    fn enter(&mut self, mut done: Bits, state: State) -> Node {
        loop {
            let mut choices = Vec::new();
            let mut more = false;
            for i in self.next_ones(&done) {
                let item = &self.items[i];
                match self.model.step(&state, item.at, item.record) {
                    Ok(Step::Same) => {
                        done.set(i);
                        self.order.push(i);
                        more = true;
                    }
                    Ok(Step::To(next)) => choices.push((i, next)),
                    Err(_) => {}
                }
                if self.model.may_idle(&state, item.record) {
                    choices.push((i, state.clone()));
                }
            }
            if !more {
                // What was answered first is tried first, what perhaps never ran last.
                choices.sort_by_key(|(i, _)| std::cmp::Reverse((self.items[*i].reply, *i)));
                return Node { done, state, len: self.order.len(), choices };
            }
        }
    }

    fn places(&self, order: &[usize]) -> Vec<usize> {
        order.iter().map(|i| self.items[*i].at).collect()
    }

    fn deepest(&self) -> Deepest {
        let Some((_, order, state, done)) = &self.best else {
            return Deepest { order: Vec::new(), state: self.first.clone(), blocked: Vec::new() };
        };
        let why = |i: usize| {
            let item = &self.items[i];
            Some((item.at, self.model.step(state, item.at, item.record).err()?))
        };
        let blocked = self.next_ones(done).into_iter().filter(|i| self.items[*i].reply != u64::MAX);
        Deepest { order: self.places(order), state: state.clone(), blocked: blocked.filter_map(why).collect() }
    }
}
