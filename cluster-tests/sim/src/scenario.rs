//! The kinds of run: what of the faults and tasks a run has.

use std::time::Duration;

/// A sync that a build might forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sync {
    /// Of the Raft log.
    Log,
    /// Of a storage server's device.
    Device,
    /// Of a storage server's chunk table.
    Table,
}

/// The kind of run: how long, and which faults.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub seed: u64,
    /// Simulated time under faults.
    pub length: Duration,
    /// Mean simulated time between faults.
    pub fault_every: Duration,
    /// Also: single links cut, clocks that jump, disks that are full, slow or fail.
    pub harsh: bool,
    /// The servers leave out this sync, so the run must end with violations.
    pub skip: Option<Sync>,
    /// Also: clocks that drift, scarce leases, clients that only look, and one that breaks the
    /// rules of the protocol ([`crate::wide`]).
    pub wide: bool,
    /// Mean simulated time between faults of single messages; zero for none.
    pub message_every: Duration,
    /// A storage server with a new target joins during the run.
    pub joins: bool,
    /// A metadata server is replaced by a new one during the run.
    pub replaces: bool,
    /// The cluster is made at feature level 0, which is raised during the run.
    pub upgrades: bool,
    /// Targets are drained, and later kept after all.
    pub moves: bool,
    /// Blocks decay on disks while servers are away; after a second and a half their replicas are
    /// rebuilt on other servers.
    pub decays: bool,
    /// The disks of one storage server and of one metadata server decay.
    pub tables: bool,
    /// Servers are not killed and reach each other; only clients are cut off from some.
    pub gentle: bool,
    /// A bit for each task that is left out: writers 0 to 2, lockers 3 to 5, truths 6 to 8, clients
    /// that die 9 and 10, what wide runs add 11.
    pub without: u32,
}

/// Tasks whose checks do not allow for lost bytes: truths, and clients that die.
const LOOKERS: u32 = 0b111 << 6 | 0b11 << 9;

/// How many tasks [`Scenario::without`] can name.
pub const TASKS: u32 = 12;

impl Scenario {
    pub fn new(seed: u64) -> Scenario {
        let (ms, gentle) = (Duration::from_millis, seed.is_multiple_of(5));
        Scenario {
            seed,
            length: ms(10_000),
            fault_every: ms(1000),
            harsh: false,
            skip: None,
            wide: false,
            message_every: ms(35),
            joins: seed.is_multiple_of(4) && !gentle,
            replaces: seed % 6 == 1 && !gentle,
            upgrades: seed % 7 == 3,
            moves: seed.is_multiple_of(3) && !gentle,
            decays: false,
            tables: false,
            gentle,
            without: 0,
        }
    }

    /// Faults twice as often and of more kinds.
    pub fn harsh(seed: u64) -> Scenario {
        let (fault_every, message_every) = (Duration::from_millis(500), Duration::from_millis(25));
        Scenario { fault_every, message_every, harsh: true, ..Scenario::new(seed) }
    }

    /// Blocks decay while servers are away and others take their place.
    pub fn decay(seed: u64) -> Scenario {
        let (length, fault_every) = (Duration::from_secs(30), Duration::from_secs(3));
        Scenario {
            decays: true,
            gentle: false,
            replaces: false,
            length,
            fault_every,
            without: LOOKERS,
            ..Scenario::new(seed)
        }
    }

    /// Disks decay, and no other fault touches the servers with the good copies.
    pub fn tables(seed: u64) -> Scenario {
        let (length, fault_every) = (Duration::from_secs(15), Duration::from_millis(700));
        let s = Scenario { length, fault_every, tables: true, ..Scenario::new(seed) };
        Scenario { gentle: false, joins: false, replaces: false, moves: false, ..s }
    }

    /// The additions that take every row of the lease tables; faults about as often as in
    /// [`Scenario::new`].
    pub fn wide(seed: u64) -> Scenario {
        let (length, fault_every) = (Duration::from_secs(15), Duration::from_millis(1500));
        Scenario { wide: true, gentle: false, length, fault_every, ..Scenario::new(seed) }
    }
}

/// A variant, 0 to 3, by which runs differ beside their faults. Kinds of run repeat every 20 seeds,
/// so all of 20 seeds in a row get the same variant.
pub fn flavour(seed: u64) -> u64 {
    seed / 20 % 4
}
