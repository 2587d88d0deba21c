//! Draws the faults of a run from its seed.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    faults::{Fault, Harm, Stored, Strike, Timed},
    moves,
    net::Network,
    nodes::{CLIENTS, FIRST_CLIENT, FIRST_OSS, MDS, OSS, servers},
    scenario::{Scenario, flavour},
};

/// Longer than the leader waits for a session's report (docs/leases.md).
const EXILE: Duration = Duration::from_secs(9);
/// A disk error ends when its server is restarted, so long after the error.
const MENDED: Duration = Duration::from_millis(1500);

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
