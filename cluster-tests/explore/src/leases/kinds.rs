//! The types of the world of leases.

use bytes::Bytes;
use strake_client::leases::Change;
use strake_proto::Ino;

pub const DIR: Ino = 1;
pub const FILE: Ino = 2;
pub const NAME: Bytes = Bytes::from_static(b"n");

/// The state, by versions: the attributes of the directory and of the file, the name, which exists
/// in even versions, and how much was written to the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Versions {
    pub dir: u8,
    pub file: u8,
    pub name: u8,
    pub size: u8,
}

impl Versions {
    pub fn max(self, o: Versions) -> Versions {
        Versions {
            dir: self.dir.max(o.dir),
            file: self.file.max(o.file),
            name: self.name.max(o.name),
            size: self.size.max(o.size),
        }
    }

    pub fn is_there(&self) -> bool {
        self.name.is_multiple_of(2)
    }

    /// The part of this state that `alter` changes; the rest is 0.
    fn changed_by(self, alter: Alter) -> Versions {
        match alter {
            Alter::File => Versions { file: self.file, ..Default::default() },
            Alter::Name => Versions { size: 0, ..self },
            Alter::Extend { .. } => {
                Versions { file: self.file, size: self.size, ..Default::default() }
            }
        }
    }

    /// Whether a part of `o`, or something newer, is known here. The size does not count: a writer
    /// knows it from itself.
    fn tells_of(self, o: Versions) -> bool {
        let reached = |mine: u8, its: u8| its > 0 && mine >= its;
        reached(self.dir, o.dir) || reached(self.file, o.file) || reached(self.name, o.name)
    }
}

/// The entries of the log in order, each with the state after it.
pub type History = Vec<(Alter, Versions)>;

/// All that follows from what was told: if a part of a log entry was told, the entry counts as told
/// as a whole. This is why the inodes that one entry changes are entangled.
pub fn implied(mut told: Versions, history: &History) -> Versions {
    loop {
        let parts = history.iter().map(|(alter, after)| after.changed_by(*alter));
        let all = parts.filter(|entry| told.tells_of(*entry)).fold(told, Versions::max);
        if all == told {
            return told;
        }
        told = all;
    }
}

/// What a program asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ask {
    Dir,
    File,
    /// The name, and the attributes of its inode.
    Lookup,
}

impl Ask {
    /// The inodes that an answer depends on.
    pub fn depends(self, values: Versions) -> Vec<Ino> {
        match self {
            Ask::Dir => vec![DIR],
            Ask::File => vec![FILE],
            Ask::Lookup if values.is_there() => vec![DIR, FILE],
            Ask::Lookup => vec![DIR],
        }
    }

    /// The versions that an answer contains.
    pub fn told(self, values: Versions) -> Versions {
        match self {
            Ask::Dir => Versions { dir: values.dir, ..Default::default() },
            Ask::File => Versions { file: values.file, size: values.size, ..Default::default() },
            Ask::Lookup if values.is_there() => Versions { dir: 0, ..values },
            Ask::Lookup => Versions { name: values.name, ..Default::default() },
        }
    }
}

/// What a program changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Alter {
    /// The file's attributes change.
    File,
    /// The name is made or removed, and with it a link of the file.
    Name,
    /// A writer reports how much it has written.
    Extend { size: u8 },
}

impl Alter {
    pub fn change(self) -> Change {
        match self {
            Alter::File | Alter::Extend { .. } => Change { inodes: vec![FILE], names: vec![] },
            Alter::Name => Change { inodes: vec![], names: vec![(DIR, NAME)] },
        }
    }

    pub fn changes(self) -> &'static [Ino] {
        match self {
            Alter::File | Alter::Extend { .. } => &[FILE],
            Alter::Name => &[DIR, FILE],
        }
    }

    /// The inode that a request for it names.
    pub fn named(self) -> Ino {
        if self == Alter::Name { DIR } else { FILE }
    }

    pub fn names(self, ino: Ino) -> bool {
        self.named() == ino
    }

    /// The versions that its answer contains.
    pub fn told(self, values: Versions) -> Versions {
        match self {
            Alter::File | Alter::Extend { .. } => {
                Versions { file: values.file, ..Default::default() }
            }
            Alter::Name => Versions { size: 0, ..values },
        }
    }
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// Answers leave before others have forgotten.
    Unsettled,
    /// The ticket is taken before the state is read.
    EarlyTicket,
    /// Leases are noted after the state was read, and it is not checked whether it changed
    /// meanwhile.
    LateGrant,
    /// An answer is kept whatever was voided since the request began.
    KeepsLate,
    /// Hello is said without having forgotten everything.
    HelloRemembers,
    /// A new leader answers at once.
    NoGrace,
    /// The sender's own copy is spared also when it is of a later connection.
    SparesLater,
    /// Own changes that were given up count as complete.
    ForgetsGivenUp,
    /// The answer to an own change is kept whatever was voided since the request began.
    KeepsOwnLate,
    /// Renewals count from when they are answered.
    CountsFromAnswer,
    /// What one entry did to several inodes is not entangled.
    Unentangled,
    /// Leases that a full session must forget count as forgotten at once.
    RoomAtOnce,
    /// A copy of a request gives leases back again.
    DropsAgain,
    /// A read of a file does not wait for what its writer has to report.
    NotAsked,
    /// A read shares a report that is already in flight.
    SharesSent,
    /// The answer is the state from before the report.
    NotReread,
    /// Reports count as made before they are.
    ReportsEarly,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_told_a_part_of_an_entry_was_told_all_of_it() {
        let after = |dir, file, name| Versions { dir, file, name, size: 0 };
        let history = vec![
            (Alter::File, after(0, 1, 0)),
            (Alter::Name, after(1, 2, 1)),
            (Alter::File, after(1, 3, 1)),
        ];
        let dir = |dir| Versions { dir, ..Default::default() };
        assert_eq!(
            implied(dir(0), &history),
            dir(0),
            "what was before the first entry tells of none"
        );
        assert_eq!(
            implied(dir(1), &history),
            after(1, 2, 1),
            "the name and the file too, and what was before on the file"
        );
        let file = |file| Versions { file, ..Default::default() };
        assert_eq!(implied(file(1), &history), file(1));
        assert_eq!(implied(file(3), &history), after(1, 3, 1));
    }
}
