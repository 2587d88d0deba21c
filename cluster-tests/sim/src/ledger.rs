//! Counts of faults by kind: how many were made, and how many count. A fault counts only if it hit
//! a node that was up, or its link, disk or clock, while an operation was under way there (see
//! [`crate::net::Network::is_busy`]).

/// Declares the kinds with their names.
macro_rules! kinds {
    ($($(#[$meta:meta])* $kind:ident = $name:literal,)*) => {
        /// The kind of a fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$meta])* $kind,)* }

        impl Kind {
            pub const ALL: &'static [Kind] = &[$(Kind::$kind,)*];

            pub fn name(self) -> &'static str {
                match self { $(Kind::$kind => $name,)* }
            }
        }
    };
}

kinds! {
    /// A process ends from one instruction to the next.
    Crash = "crash",
    /// A machine loses power, with all disk writes flushed.
    Power = "power",
    /// The same, and some writes that were not flushed are lost, torn or reordered.
    Torn = "power-torn",
    /// A client ends from one instruction to the next.
    ClientDeath = "client-death",
    /// Nothing passes between some nodes in either direction.
    Partition = "partition",
    /// Nothing passes in one direction.
    OneWay = "one-way",
    /// A message arrives much later.
    Delayed = "delayed",
    /// The same, and others overtake it.
    Reordered = "reordered",
    /// A message does not arrive although its connection lives; the connection is then given up.
    Lost = "lost",
    /// A client's request arrives seconds after its connection was given up.
    Late = "late",
    /// A request arrives once more, later.
    Repeated = "repeated",
    /// A connection breaks at a message.
    Broken = "broken",
    /// A wall clock jumps.
    ClockJump = "clock-jump",
    /// All clocks since boot run at other rates.
    ClockDrift = "clock-drift",
    /// A disk is slow.
    DiskSlow = "disk-slow",
    /// A disk is full for a while.
    DiskFull = "disk-full",
    /// A write fails.
    DiskError = "disk-error",
    /// A read gives a wrong bit.
    DiskCorrupt = "disk-corrupt",
    /// A stored block decays that another target has a good copy of.
    Decay = "decay",
    /// A record of a chunk table is damaged permanently.
    TableDecay = "table-decay",
    /// A record of a metadata server's state is damaged.
    StateDecay = "state-decay",
    /// A metadata server's log is damaged, and the server has to be replaced.
    LogDecay = "log-decay",
    /// A storage server with a new target joins.
    Joined = "target-joins",
    /// A target is drained, or kept after all.
    Moved = "target-moves",
    /// A metadata server replaces another.
    Replaced = "mds-replaced",
}

const KINDS: usize = Kind::ALL.len();

/// The faults of one run, or the sum of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    made: [u64; KINDS],
    counted: [u64; KINDS],
}

impl Ledger {
    pub fn made(&mut self, kind: Kind) {
        self.made[kind as usize] += 1;
    }
    /// Notes that a fault that was made counts.
    pub fn counts(&mut self, kind: Kind) {
        self.counted[kind as usize] += 1;
    }
    /// Changes the kind of a fault that was noted as `from`, counted or not.
    pub fn was(&mut self, from: Kind, to: Kind) {
        for of in [&mut self.made, &mut self.counted] {
            of[from as usize] -= 1;
            of[to as usize] += 1;
        }
    }
    pub fn add(&mut self, other: &Ledger) {
        for i in 0..KINDS {
            self.made[i] += other.made[i];
            self.counted[i] += other.counted[i];
        }
    }
    /// How many faults count.
    pub fn counted(&self) -> u64 {
        self.counted.iter().sum()
    }
    /// Of each kind: its name, how many were made, how many count.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        Kind::ALL.iter().map(|k| (k.name(), self.made[*k as usize], self.counted[*k as usize]))
    }
    /// A table to print.
    pub fn text(&self) -> String {
        self.rows()
            .map(|(name, made, counted)| {
                format!("fault    {name:22} {counted:>9} of {made} made\n")
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_corrections() {
        let (mut a, mut b) = (Ledger::default(), Ledger::default());
        a.made(Kind::Delayed);
        a.counts(Kind::Delayed);
        a.was(Kind::Delayed, Kind::Reordered);
        b.made(Kind::Crash);
        a.add(&b);
        assert_eq!(a.counted(), 1);
        let rows: Vec<_> = a.rows().filter(|r| r.1 > 0).collect();
        assert_eq!(rows, [("crash", 1, 0), ("reordered", 1, 1)]);
    }
}
