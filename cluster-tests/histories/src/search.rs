//! Searches for one order that explains a history, with the search of Wing and Gong and Lowe's
//! cache of tried configurations.
//!
//! Three things make it fast. An operation that may be next and changes nothing is placed next at
//! once: any order can be changed to one with this operation here. A configuration that was reached
//! before by another order is not searched again: what is left depends only on the set of finished
//! operations and on the state. And an operation that need not have run is placed as late as
//! possible: just before one whose result differs without it.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use crate::{
    history::{History, Outcome, Record},
    model::{Model, State, Step, Why},
};

/// The result of the search.
#[derive(Debug)]
pub enum Verdict {
    /// The records in an order that explains them. Records of unknown outcome that are left out
    /// never ran.
    Linearizable {
        order: Vec<usize>,
        steps: u64,
    },
    Rejected {
        deepest: Deepest,
        steps: u64,
    },
    /// The search did not end within the limit, so this says nothing.
    Undecided {
        steps: u64,
    },
}

/// The longest order that was found.
#[derive(Debug)]
pub struct Deepest {
    pub order: Vec<usize>,
    pub state: State,
    /// What had to come next, and why each of them could not.
    pub blocked: Vec<(usize, Why)>,
}

impl Verdict {
    pub fn is_linearizable(&self) -> bool {
        matches!(self, Verdict::Linearizable { .. })
    }
    pub fn is_rejected(&self) -> bool {
        matches!(self, Verdict::Rejected { .. })
    }
    /// How many states were entered.
    pub fn steps(&self) -> u64 {
        match self {
            Verdict::Linearizable { steps, .. }
            | Verdict::Rejected { steps, .. }
            | Verdict::Undecided { steps } => *steps,
        }
    }
}

/// Steps after which a search is given up. The hardest histories of the tests need a hundredth of
/// this.
pub const LIMIT: u64 = 2_000_000;

/// Whether there is an order; enters at most `limit` states.
///
/// If many operations have an unknown outcome, it first tries orders in which only few of them
/// follow each other directly.
pub fn check(history: &History, limit: u64) -> Verdict {
    let mut steps = 0;
    for chain in [1, 2] {
        let quick = Search::new(history, chain).run(limit / 4);
        steps += quick.steps();
        if quick.is_linearizable() {
            return quick;
        }
    }
    Search::new(history, usize::MAX).run(limit.saturating_sub(steps))
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
    /// Its index in the history.
    at: usize,
    record: &'h Record,
    /// `u64::MAX`: it need not run.
    reply: u64,
}

impl Item<'_> {
    fn must_run(&self) -> bool {
        self.reply != u64::MAX
    }
}

/// A place in the search: which operations are done, and which may be done next.
struct Node {
    done: Bits,
    state: State,
    /// Length of the order up to here.
    len: usize,
    /// What may come next, and how many of these were tried.
    choices: Vec<(usize, State)>,
    tried: usize,
    /// How many operations at the end of the order need not have run.
    chain: usize,
}

struct Search<'h> {
    model: Model,
    items: Vec<Item<'h>>,
    /// How many operations that need not run may follow each other.
    chain: usize,
    known: usize,
    first: State,
    seen: HashSet<u128>,
    hashers: [RandomState; 2],
    order: Vec<usize>,
    /// The longest order so far, counted in operations that must run.
    best: Option<(usize, Vec<usize>, State, Bits)>,
}

impl<'h> Search<'h> {
    fn new(history: &'h History, chain: usize) -> Search<'h> {
        let item = |(at, record): (usize, &'h Record)| match record.outcome {
            Outcome::Unknown(_) if record.op.is_read() => None,
            Outcome::Unknown(_) => Some(Item { at, record, reply: u64::MAX }),
            _ => Some(Item { at, record, reply: record.reply }),
        };
        let mut items: Vec<Item> = history.records.iter().enumerate().filter_map(item).collect();
        items.sort_by_key(|i| (i.record.call, i.at));
        let known = items.iter().filter(|i| i.must_run()).count();
        Search {
            model: Model::new(history),
            known,
            items,
            chain,
            first: State::new(&history.head),
            seen: HashSet::new(),
            hashers: [RandomState::new(), RandomState::new()],
            order: Vec::new(),
            best: None,
        }
    }

    fn run(mut self, limit: u64) -> Verdict {
        let mut steps = 0;
        let mut nodes: Vec<Node> = Vec::new();
        let mut next = Some((Bits::new(self.items.len()), self.first.clone(), None));
        loop {
            if let Some((done, state, last)) = next.take() {
                steps += 1;
                if steps > limit {
                    return Verdict::Undecided { steps };
                }
                let node = self.enter(done, state, last.zip(nodes.last()));
                let known = self.order.iter().filter(|i| self.items[**i].must_run()).count();
                if known == self.known {
                    return Verdict::Linearizable { order: self.places(&self.order), steps };
                }
                if self.best.as_ref().is_none_or(|b| b.0 < known) {
                    self.best =
                        Some((known, self.order.clone(), node.state.clone(), node.done.clone()));
                }
                nodes.push(node);
            }
            let Some(node) = nodes.last_mut() else { break };
            let Some((i, state)) = node.choices.get(node.tried).cloned() else {
                nodes.pop();
                continue;
            };
            node.tried += 1;
            self.order.truncate(node.len);
            let mut done = node.done.clone();
            done.set(i);
            // If this operation need not run, what may follow it depends on what was possible
            // before it.
            let before = (!self.items[i].must_run()).then_some((i, &node.state, node.chain));
            if node.chain + usize::from(before.is_some()) <= self.chain
                && self.is_new(&done, &state, before)
            {
                self.order.push(i);
                next = Some((done, state, Some(i)));
            }
        }
        Verdict::Rejected { deepest: self.deepest(), steps }
    }

    /// Whether the search has not been here before.
    fn is_new(
        &mut self,
        done: &Bits,
        state: &State,
        before: Option<(usize, &State, usize)>,
    ) -> bool {
        let half = |h: &RandomState| u128::from(h.hash_one((done, state, before)));
        let place = half(&self.hashers[0]) << 64 | half(&self.hashers[1]);
        self.seen.insert(place)
    }

    /// The operations that may come next: not done, and called before the answer of every operation
    /// that must still run.
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

    /// Does all operations that change nothing, and finds those that may change something. `last`:
    /// the operation that was done last, and the place before it.
    fn enter(&mut self, mut done: Bits, state: State, last: Option<(usize, &Node)>) -> Node {
        let len = self.order.len();
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
            if more {
                continue;
            }
            let mut chain = 0;
            if let Some((u, parent)) =
                last.filter(|(u, _)| !self.items[*u].must_run() && self.order.len() == len)
            {
                chain = parent.chain + 1;
                choices.retain(|(x, to)| !self.is_as_good_later(parent, u, *x, to));
            }
            // In the order of answers; those that perhaps never ran come last.
            choices.sort_by_key(|(i, _)| (self.items[*i].reply, *i));
            return Node { done, state, len: self.order.len(), choices, tried: 0, chain };
        }
    }

    /// Whether `u`, which need not run, and then `x` lead to the same state as `x` and then `u`.
    /// The latter order is tried, too.
    fn is_as_good_later(&self, parent: &Node, u: usize, x: usize, to: &State) -> bool {
        let later = |from: &State| {
            let item = &self.items[u];
            matches!(self.model.step(from, item.at, item.record), Ok(Step::To(s)) if s == *to)
        };
        let is_first = self.items[x].must_run() || x < u;
        is_first && parent.choices.iter().any(|(y, from)| *y == x && later(from))
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
        let blocked = self.next_ones(done).into_iter().filter(|i| self.items[*i].must_run());
        Deepest {
            order: self.places(order),
            state: state.clone(),
            blocked: blocked.filter_map(why).collect(),
        }
    }
}
