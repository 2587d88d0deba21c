//! Faults by kind: how many were made, and how many count. One counts only if it hit a node that
//! was alive, or its link, disk or clock, while an operation was under way there (see
//! [`crate::net::Network::is_busy`]).

/// Declares the kinds with their names.
macro_rules! kinds {
    ($($(#[$meta:meta])* $kind:ident = $name:literal,)*) => {
        /// What a fault is.
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
    /// The machine of one loses its power, with all disk writes flushed.
    Power = "power",
    /// The same, and of writes that were not flushed some were lost, torn or put out of order.
    Torn = "power-torn",
    /// A client ends.
    ClientDeath = "client-death",
    /// Nothing passes between some nodes, either way.
    Partition = "partition",
    /// Nothing passes one way.
    OneWay = "one-way",
    /// A message arrives much later.
    Delayed = "delayed",
    /// The same, and others overtook it.
    Reordered = "reordered",
    /// A message does not arrive while its connection lives, which is given up for that.
    Lost = "lost",
    /// A client's request arrives though its connection was given up, seconds after that.
    Late = "late",
    /// A request arrives once more, later.
    Repeated = "repeated",
    /// A connection breaks at a message.
    Broken = "broken",
    /// A wall clock jumps.
    ClockJump = "clock-jump",
    /// All clocks since boot run at other rates.
    ClockDrift = "clock-drift",
    /// A disk takes long.
    DiskSlow = "disk-slow",
    /// A disk is full for a while.
    DiskFull = "disk-full",
    /// A write fails.
    DiskError = "disk-error",
    /// A read gives a wrong bit.
    DiskCorrupt = "disk-corrupt",
    /// A stored block decays, and another target has it good.
    Decay = "decay",
    /// A record of a chunk table is damaged, for good.
    TableDecay = "table-decay",
    /// A record of a metadata server's state is.
    StateDecay = "state-decay",
    /// A metadata server's log is, and it has to be replaced.
    LogDecay = "log-decay",
    /// A storage server with a new target joins.
    Joined = "target-joins",
    /// A target is to be emptied, or to stay after all.
    Moved = "target-moves",
    /// A metadata server has taken the place of another.
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
    /// One that was made turned out to count.
    pub fn counts(&mut self, kind: Kind) {
        self.counted[kind as usize] += 1;
    }
    /// One that was noted as `from` was a `to`, counted or not.
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
    /// How many count.
    pub fn counted(&self) -> u64 {
        self.counted.iter().sum()
    }
    /// Of each kind: its name, how many were made, how many count.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        Kind::ALL.iter().map(|k| (k.name(), self.made[*k as usize], self.counted[*k as usize]))
    }
    /// As a table for people.
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
