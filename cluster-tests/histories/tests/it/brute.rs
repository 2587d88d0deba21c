//! Compares the search with one that tries every order.

use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use strake_histories::{
    Answer, Errno, Head, History, Ino, Op, Outcome, Record, check,
    choose::{Chooser, Mix},
    model::{Model, State, Step, Why},
    search::LIMIT,
};

const ROOT: Ino = 1;
const ERRORS: [Errno; 7] = [
    Errno::Perm,
    Errno::NoEnt,
    Errno::Exist,
    Errno::NotDir,
    Errno::IsDir,
    Errno::Inval,
    Errno::NotEmpty,
];

/// Whether any order explains the operations that are left. Tries all.
fn any_order(model: &Model, state: &State, all: &[Record], left: &[usize]) -> bool {
    let is_known = |i: &&usize| !matches!(all[**i].outcome, Outcome::Unknown(_));
    let Some(horizon) = left.iter().filter(is_known).map(|i| all[*i].reply).min() else {
        return true;
    };
    left.iter().filter(|i| all[**i].call <= horizon).any(|i| {
        let rest: Vec<usize> = left.iter().copied().filter(|j| j != i).collect();
        match model.step(state, *i, &all[*i]) {
            Ok(Step::Same) => any_order(model, state, all, &rest),
            Ok(Step::To(next)) => any_order(model, &next, all, &rest),
            Err(_) => false,
        }
    })
}

/// The answer to an operation in this state, and the state after it.
fn run(model: &Model, state: &State, key: usize, op: &Op, next_ino: &mut Ino) -> (Outcome, State) {
    let record = |outcome| Record { client: 0, call: 0, reply: 0, op: op.clone(), outcome };
    let inodes = (1..=*next_ino).map(|ino| Outcome::Done(Answer::Inode { ino, attr: None }));
    let names = Outcome::Done(Answer::Names(vec![("?".into(), 0)]));
    let names = match model.step(state, key, &record(names)) {
        Err(Why::OtherNames(all)) => Answer::Names(all),
        _ => Answer::Names(Vec::new()),
    };
    let simple = match op {
        Op::Readdir { .. } => vec![Outcome::Done(names)],
        Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } => {
            vec![Outcome::Done(Answer::Done)]
        }
        _ => inodes.collect(),
    };
    for outcome in ERRORS.map(Outcome::Failed).into_iter().chain(simple) {
        let next = match model.step(state, key, &record(outcome.clone())) {
            Ok(Step::Same) => state.clone(),
            Ok(Step::To(next)) => next,
            Err(_) => continue,
        };
        *next_ino +=
            u64::from(outcome == Outcome::Done(Answer::Inode { ino: *next_ino, attr: None }));
        return (outcome, next);
    }
    panic!("the model has no answer to {op:?} in {state:?}");
}

/// A linearizable history of a few clients, in which some answers may then be made wrong.
fn some_history(seed: u64) -> History {
    let mut rng = StdRng::seed_from_u64(seed);
    let head = Head { source: format!("seed {seed}"), roots: vec![ROOT], kernel: false };
    let model = Model::new(&History { head: head.clone(), records: Vec::new() });
    let (mut state, mut next_ino) = (State::new(&head), ROOT + 1);
    let clients = rng.random_range(2..=3);
    let mut choosers: Vec<Chooser> =
        (0..clients).map(|c| Chooser::new(Mix::All, &head.roots, c)).collect();
    let mut free = vec![0u64; clients as usize];
    let mut records = Vec::new();
    for key in 0..rng.random_range(3..=8usize) {
        // It takes effect at its own moment, later than all before.
        let moment = key as u64 * 10 + 10;
        let idle: Vec<usize> = (0..free.len()).filter(|c| free[*c] <= moment).collect();
        let Some(client) = idle.choose(&mut rng).copied() else { continue };
        let op = choosers[client].next(&mut rng);
        let (outcome, next) = run(&model, &state, key, &op, &mut next_ino);
        state = next;
        choosers[client].learn(&op, &outcome);
        let call = moment - rng.random_range(0..20).min(moment - free[client]);
        let reply = moment + rng.random_range(0..20);
        free[client] = reply + 1;
        records.push(Record { client: client as u32, call, reply, op, outcome });
    }
    let wrong = rng.random_range(0..=2);
    for _ in 0..wrong {
        let at = rng.random_range(0..records.len());
        let r: &mut Record = &mut records[at];
        r.outcome = match rng.random_range(0..4) {
            0 => Outcome::Unknown("wrong".into()),
            1 => Outcome::Failed(*ERRORS.choose(&mut rng).unwrap()),
            _ => match r.outcome {
                Outcome::Done(Answer::Inode { .. }) => {
                    Outcome::Done(Answer::Inode { ino: rng.random_range(1..=next_ino), attr: None })
                }
                Outcome::Failed(_)
                    if matches!(r.op, Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. }) =>
                {
                    Outcome::Done(Answer::Done)
                }
                _ => r.outcome.clone(),
            },
        };
    }
    History { head, records }
}

fn brute(history: &History) -> bool {
    let is_asked = |r: &Record| !(r.op.is_read() && matches!(r.outcome, Outcome::Unknown(_)));
    let all: Vec<usize> =
        (0..history.records.len()).filter(|i| is_asked(&history.records[*i])).collect();
    any_order(&Model::new(history), &State::new(&history.head), &history.records, &all)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn it_finds_an_order_where_there_is_one(seed: u64) {
        let history = some_history(seed);
        prop_assert_eq!(check(&history, LIMIT).is_linearizable(), brute(&history), "{:#?}", history);
    }
}

#[test]
fn both_verdicts_are_frequent() {
    let good =
        (0..1000).filter(|seed| check(&some_history(*seed), LIMIT).is_linearizable()).count();
    assert!((200..900).contains(&good), "{good} of 1000");
}
