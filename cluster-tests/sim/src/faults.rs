//! The faults of a run as data: a list of timed events, drawn from the seed before the run begins.
//! A run can be given any part of its list; [`crate::shrink`] uses this to find a short failing
//! run.

use std::{fmt, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use tokio::{task::JoinHandle, time::sleep};

use crate::{
    cluster::{FIRST_CLIENT, FIRST_OSS, MDS, OSS, Stored, flavour},
    moves::{self, Change},
    net::Network,
    run::{CLIENTS, Scenario},
};

/// Longer than the leader waits for a session's report (docs/leases.md).
const EXILE: Duration = Duration::from_secs(9);
/// A disk error ends when its server is restarted, so long after the error.
const MENDED: Duration = Duration::from_millis(1500);

/// A fault, and when it is made: the time since faults may begin.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    pub at: Duration,
    pub fault: Fault,
}

/// One fault. Nodes have their numbers on the network. A fault that needs a running node does
/// nothing to a node that is down.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// A server dies and is started again after `down`. With `power` its machine loses what was not
    /// synced; `dice` decides what.
    Crash {
        node: u32,
        power: bool,
        dice: u64,
        down: Duration,
    },
    /// A node is cut off from all others.
    Isolate {
        node: u32,
        one_way: bool,
        lasts: Duration,
    },
    /// A link is cut in both directions, or only from `a` to `b`.
    Cut {
        a: u32,
        b: u32,
        one_way: bool,
        lasts: Duration,
    },
    /// A client is cut off from all metadata servers, and from no other node.
    Exile {
        client: u32,
        lasts: Duration,
    },
    /// From now on: the maximum delay of messages, and how many connections break, per thousand
    /// messages.
    Weather {
        max_delay: Duration,
        break_per_mille: u32,
    },
    /// Strikes the next message of an operation from or to a node.
    Message {
        node: u32,
        what: Strike,
    },
    /// Sets the offset of a server's wall clock from now on.
    Jump {
        node: u32,
        seconds: i64,
    },
    /// From now on all boot clocks run at other rates, within the allowed difference.
    Drift {
        dice: u64,
    },
    Disk {
        node: u32,
        what: Harm,
        lasts: Duration,
    },
    /// A stored block of a storage server decays that another one has a good copy of.
    Decay {
        node: u32,
        dice: u64,
    },
    /// Something on a server's disk decays, while it runs or in a crash after which it is started
    /// again once `down` is over. A server whose log decays is replaced.
    Spoil {
        node: u32,
        what: Stored,
        dice: u64,
        down: Option<Duration>,
    },
    /// A storage server with a new target joins.
    Join,
    /// An administrator replaces this metadata server by a new one.
    Replace {
        old: u32,
    },
    /// An administrator drains a target, or keeps it after all.
    Move(Change),
}

/// What is done to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// It does not arrive, and its connection is given up therefore.
    Lose,
    /// It arrives, and once more after this time.
    Repeat(Duration),
    /// It arrives this much later; others overtake it.
    Hold(Duration),
    /// Its connection breaks.
    Break,
}

/// What is done to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Writes and flushes take this long.
    Slow(Duration),
    /// Reads, writes and flushes take this long.
    Crawl(Duration),
    /// The next five writes find no space (for a metadata server: all writes until the disk is
    /// mended).
    Full,
    /// No write finds space until it is mended.
    Filled,
    /// A write fails.
    Error,
    /// A read gives a wrong bit.
    Corrupt,
}

/// A node's name in output.
pub fn called(node: u32) -> String {
    match node {
        n if n >= FIRST_CLIENT => format!("client {}", n - FIRST_CLIENT),
        n if n >= FIRST_OSS => format!("oss {n}"),
        n => format!("mds {n}"),
    }
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8.3} s  {}", self.at.as_secs_f64(), self.fault)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |one_way: &bool| if *one_way { "one way" } else { "both ways" };
        match self {
            Fault::Crash { node, power, down, .. } => {
                let how = if *power { "loses its power" } else { "crashes" };
                write!(f, "{} {how}, down for {down:?}", called(*node))
            }
            Fault::Isolate { node, one_way, lasts } => {
                write!(f, "{} is cut off from all, {}, for {lasts:?}", called(*node), way(one_way))
            }
            Fault::Cut { a, b, one_way, lasts } => {
                write!(
                    f,
                    "{} is cut off from {}, {}, for {lasts:?}",
                    called(*a),
                    called(*b),
                    way(one_way)
                )
            }
            Fault::Exile { client, lasts } => {
                write!(f, "{} is cut off from the metadata servers for {lasts:?}", called(*client))
            }
            Fault::Weather { max_delay, break_per_mille } => {
                write!(
                    f,
                    "messages take up to {max_delay:?}, {break_per_mille} in 1000 break their connection"
                )
            }
            Fault::Message { node, what } => {
                let node = called(*node);
                match what {
                    Strike::Lose => write!(f, "a message of {node} is lost"),
                    Strike::Repeat(late) => {
                        write!(f, "a message of {node} arrives again {late:?} later")
                    }
                    Strike::Hold(late) => write!(f, "a message of {node} arrives {late:?} late"),
                    Strike::Break => write!(f, "a message of {node} breaks its connection"),
                }
            }
            Fault::Jump { node, seconds } => {
                write!(f, "the clock of {} is {seconds} s off", called(*node))
            }
            Fault::Drift { .. } => write!(f, "clocks drift"),
            Fault::Disk { node, what, lasts } => {
                let node = called(*node);
                match what {
                    Harm::Slow(by) => {
                        write!(f, "writes to the disk of {node} take {by:?} for {lasts:?}")
                    }
                    Harm::Crawl(by) => {
                        write!(f, "everything takes the disk of {node} {by:?} for {lasts:?}")
                    }
                    Harm::Full => write!(f, "writes to the disk of {node} find no space"),
                    Harm::Filled => write!(f, "the disk of {node} is full for {lasts:?}"),
                    Harm::Error => write!(f, "a write to the disk of {node} fails"),
                    Harm::Corrupt => write!(f, "a read from the disk of {node} gives a wrong bit"),
                }
            }
            Fault::Spoil { node, what, down, .. } => {
                let what = match what {
                    Stored::Table => "a record of the chunk table",
                    Stored::State => "a record of the state",
                    Stored::Log => "the log",
                };
                match down {
                    Some(down) => {
                        write!(f, "{} crashes and {what} decays, down for {down:?}", called(*node))
                    }
                    None => write!(f, "{what} of {} decays", called(*node)),
                }
            }
            Fault::Replace { old } => write!(f, "{} is to be replaced by a new one", called(*old)),
            Fault::Decay { node, .. } => {
                write!(f, "a block on the disk of {} decays", called(*node))
            }
            Fault::Join => write!(f, "a storage server with a new target joins"),
            Fault::Move(Change::Drain { target, heir: None }) => {
                write!(f, "target {target} is to be emptied")
            }
            Fault::Move(Change::Drain { target, heir: Some(h) }) => {
                write!(f, "target {target} is to be replaced by {h}")
            }
            Fault::Move(Change::Keep { target }) => write!(f, "target {target} is to be kept"),
        }
    }
}

fn millis(rng: &mut StdRng, of: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.random_range(of))
}

/// A message fault of any kind.
pub fn strike(rng: &mut StdRng) -> Strike {
    match rng.random_range(0..40) {
        0..=15 => Strike::Repeat(millis(rng, 1..1500)),
        16..=33 => Strike::Hold(millis(rng, 10..250)),
        34..=37 => Strike::Break,
        38 => Strike::Hold(millis(rng, 400..3000)),
        _ => Strike::Lose,
    }
}

/// All servers that every cluster has.
pub fn servers() -> Vec<u32> {
    (1..=MDS).chain(FIRST_OSS..FIRST_OSS + OSS).collect()
}

fn any(rng: &mut StdRng, of: &[u32]) -> u32 {
    of.choose(rng).copied().unwrap_or(1)
}

fn crash(rng: &mut StdRng, node: u32, power: bool) -> Fault {
    // Mostly as fast as a supervisor restarts a process, sometimes longer than any lease.
    let down = if rng.random_bool(0.8) { millis(rng, 20..800) } else { millis(rng, 800..4000) };
    Fault::Crash { node, power, dice: rng.random(), down }
}

/// One round of the faults that every run has.
fn plain(rng: &mut StdRng) -> Vec<Fault> {
    let nodes = servers();
    match rng.random_range(0..20) {
        0..=9 => {
            let (node, power) = (any(rng, &nodes), rng.random_bool(0.5));
            vec![crash(rng, node, power)]
        }
        10 => {
            // Power loss of everything, or of every storage server.
            let (power, from) =
                (rng.random_bool(0.7), if rng.random_bool(0.5) { 0 } else { FIRST_OSS });
            nodes.into_iter().filter(|n| *n >= from).map(|n| crash(rng, n, power)).collect()
        }
        11..=14 => {
            let node = any(rng, &nodes);
            vec![Fault::Isolate {
                node,
                one_way: rng.random_bool(0.3),
                lasts: millis(rng, 50..3000),
            }]
        }
        15..=17 => {
            let break_per_mille = if rng.random_bool(0.5) { 3 } else { 0 };
            vec![Fault::Weather { max_delay: millis(rng, 1..30), break_per_mille }]
        }
        _ => Vec::new(),
    }
}

/// One round in which only messages between clients and servers are disturbed: chains stay as they
/// are, so late messages still carry the current epoch.
fn gentle(rng: &mut StdRng) -> Vec<Fault> {
    if rng.random_bool(0.2) {
        return vec![Fault::Weather { max_delay: millis(rng, 1..30), break_per_mille: 0 }];
    }
    let from = if rng.random_bool(0.7) { MDS as usize } else { 0 };
    let (a, b) = (FIRST_CLIENT + rng.random_range(1..=CLIENTS), any(rng, &servers()[from..]));
    vec![Fault::Cut { a, b, one_way: rng.random_bool(0.5), lasts: millis(rng, 50..2500) }]
}

/// One round of a run in which disks decay: of one storage server and one metadata server. All
/// other storage servers stay up, since each may be the only one with a good copy.
fn tables(rng: &mut StdRng, seed: u64) -> Vec<Fault> {
    let (oss, mds) =
        (FIRST_OSS + (seed % u64::from(OSS)) as u32, 1 + (seed % u64::from(MDS)) as u32);
    let any_mds = rng.random_range(1..=MDS);
    let (dice, down) = (rng.random(), rng.random_bool(0.5).then(|| millis(rng, 20..800)));
    match rng.random_range(0..20) {
        0..=7 => vec![Fault::Spoil { node: oss, what: Stored::Table, dice, down }],
        8..=11 => vec![Fault::Spoil { node: mds, what: Stored::State, dice, down }],
        12..=14 => vec![crash(rng, any_mds, dice & 1 == 0)],
        15 => vec![crash(rng, oss, dice & 1 == 0)],
        16 | 17 => {
            let node = if dice & 1 == 0 { oss } else { any_mds };
            vec![Fault::Isolate {
                node,
                one_way: rng.random_bool(0.3),
                lasts: millis(rng, 50..3000),
            }]
        }
        18 => vec![Fault::Weather { max_delay: millis(rng, 1..30), break_per_mille: 0 }],
        _ => Vec::new(),
    }
}

/// Faults that harsh runs add. `longer`: disks are full for all writes and slow for reads, too.
fn harsher(rng: &mut StdRng, longer: bool) -> Option<Fault> {
    let nodes = servers();
    let all: Vec<u32> =
        nodes.iter().copied().chain((1..=CLIENTS).map(|n| FIRST_CLIENT + n)).collect();
    let (a, b) = (any(rng, &nodes), any(rng, &all));
    let lasts = millis(rng, 50..2500);
    match rng.random_range(0..16) {
        0..=3 if a != b => {
            let (a, b) = if rng.random_bool(0.5) { (a, b) } else { (b, a) };
            Some(Fault::Cut { a, b, one_way: rng.random_bool(0.5), lasts })
        }
        4 | 5 => Some(Fault::Jump { node: a, seconds: rng.random_range(-240..240) }),
        6 => Some(Fault::Disk {
            node: a,
            what: if longer { Harm::Filled } else { Harm::Full },
            lasts,
        }),
        7 => Some(Fault::Disk { node: a, what: Harm::Error, lasts: MENDED }),
        8 | 9 => Some(Fault::Disk { node: a, what: Harm::Corrupt, lasts: MENDED }),
        10..=12 => {
            let by = Duration::from_micros(rng.random_range(500..20_000));
            Some(Fault::Disk {
                node: a,
                what: if longer { Harm::Crawl(by) } else { Harm::Slow(by) },
                lasts,
            })
        }
        13 => Some(Fault::Drift { dice: rng.random() }),
        _ => None,
    }
}

/// A storage server is away long enough that others take its place. Blocks decay on all storage
/// servers before, during and after that.
fn decay(rng: &mut StdRng, s: &Scenario) -> Vec<Timed> {
    let oss = |rng: &mut StdRng| FIRST_OSS + rng.random_range(0..OSS);
    let (mut all, mut at) = (Vec::new(), Duration::ZERO);
    loop {
        at += s.fault_every.mul_f64(rng.random_range(0.3..1.5));
        if at >= s.length {
            return all;
        }
        let (node, down) = (oss(rng), millis(rng, 1000..12_000));
        if rng.random_bool(0.7) {
            let fault =
                Fault::Crash { node, power: rng.random_bool(0.2), dice: rng.random(), down };
            all.push(Timed { at, fault });
        }
        for _ in 0..rng.random_range(1..6) {
            let at = at + down.mul_f64(rng.random_range(0.0..1.3));
            all.push(Timed { at, fault: Fault::Decay { node: oss(rng), dice: rng.random() } });
        }
        at += down.mul_f64(rng.random_range(0.3..1.2));
    }
}

/// All faults of a seed, in order of time.
pub fn draw(s: &Scenario) -> Vec<Timed> {
    let mut rng = StdRng::seed_from_u64(s.seed ^ 0x0fau64);
    let mut all = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += s.fault_every.mul_f64(rng.random_range(0.2..1.8));
        if at >= s.length {
            break;
        }
        if s.decays {
            all.extend(decay(&mut rng, s));
            break;
        }
        let mut faults = match (s.tables, s.gentle) {
            (true, _) => tables(&mut rng, s.seed),
            (_, true) => gentle(&mut rng),
            _ => plain(&mut rng),
        };
        if s.harsh && !s.gentle {
            faults.extend(harsher(&mut rng, flavour(s.seed) >= 2));
        }
        if s.wide {
            faults.push(Fault::Drift { dice: rng.random() });
            if rng.random_bool(0.3) {
                let lasts = if rng.random_bool(0.8) { EXILE } else { s.fault_every };
                faults.push(Fault::Exile {
                    client: FIRST_CLIENT + rng.random_range(1..=CLIENTS),
                    lasts,
                });
            }
        }
        all.extend(faults.into_iter().map(|fault| Timed { at, fault }));
    }
    if s.joins {
        all.push(Timed { at: s.length.mul_f64(rng.random_range(0.05..0.8)), fault: Fault::Join });
    }
    if s.replaces {
        let at = s.length.mul_f64(rng.random_range(0.05..0.6));
        all.push(Timed { at, fault: Fault::Replace { old: rng.random_range(1..=MDS) } });
    }
    if s.tables && rng.random_bool(0.5) {
        let (at, node) =
            (s.length.mul_f64(rng.random_range(0.1..0.5)), 1 + (s.seed % u64::from(MDS)) as u32);
        all.push(Timed {
            at,
            fault: Fault::Spoil { node, what: Stored::Log, dice: rng.random(), down: None },
        });
    }
    if s.moves {
        all.extend(moves::draw(&mut rng, s.length));
    }
    let mut at = Duration::ZERO;
    let nodes = servers();
    while !s.message_every.is_zero() {
        at += s.message_every.mul_f64(rng.random_range(0.2..1.8));
        if at >= s.length {
            break;
        }
        all.push(Timed {
            at,
            fault: Fault::Message { node: any(&mut rng, &nodes), what: strike(&mut rng) },
        });
    }
    all.sort_by_key(|t| t.at);
    all
}

/// Faults of single messages of these nodes at random times, until the task is aborted. For runs
/// that have no list of faults.
pub fn storm(net: Network, seed: u64, nodes: Vec<u32>, every: Duration) -> JoinHandle<()> {
    storm_of(net, seed, nodes, every, strike)
}

/// The same with faults drawn by `choose`.
pub fn storm_of(
    net: Network,
    seed: u64,
    nodes: Vec<u32>,
    every: Duration,
    strike: impl Fn(&mut StdRng) -> Strike + Send + 'static,
) -> JoinHandle<()> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x5702);
    tokio::spawn(async move {
        loop {
            sleep(every.mul_f64(rng.random_range(0.2..1.8))).await;
            let node = any(&mut rng, &nodes);
            net.strike(node, strike(&mut rng));
        }
    })
}
