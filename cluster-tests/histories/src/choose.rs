//! Chooses a client's next operation: random operations on a few names and on inodes that it knows.

use rand::{Rng, RngExt, seq::IndexedRandom};

use crate::history::{Answer, How, Ino, Op, Outcome};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Names of directories, with [`Mix::Kernel`] of all directories.
const DIR_NAMES: [&str; 2] = ["s", "t"];
/// Values of the dice in [`Chooser::next`] for operations that only read: attributes, a listing,
/// names.
const LOOKS: [i32; 5] = [20, 20, 76, 90, 90];
/// Inodes a client remembers.
const REMEMBERED: usize = 6;

/// Which operations a history has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// All operations with all names.
    All,
    /// The same, but most operations only read.
    Looks,
    /// Only operations that are one step through Linux, too: files and directories have different
    /// names, and directories are renamed only within the root directories. When a rename replaces
    /// a file by a directory or the reverse, Linux compares the results of lookups that it made at
    /// two moments.
    Kernel,
}

/// The next operations of one client.
pub struct Chooser {
    mix: Mix,
    roots: Vec<Ino>,
    /// Inodes it knows, the newest last, and whether each is a directory.
    known: Vec<(Ino, bool)>,
    modes: u32,
}

impl Chooser {
    /// `client` makes the modes that it sets differ from those of other clients.
    pub fn new(mix: Mix, roots: &[Ino], client: u32) -> Chooser {
        Chooser { mix, roots: roots.to_vec(), known: Vec::new(), modes: client * 11 }
    }

    fn dir(&self, rng: &mut impl Rng) -> Ino {
        let made: Vec<Ino> = self.known.iter().filter(|k| k.1).map(|k| k.0).collect();
        match made.choose(rng) {
            Some(dir) if rng.random_bool(0.25) => *dir,
            _ => self.root(rng),
        }
    }

    fn root(&self, rng: &mut impl Rng) -> Ino {
        // Mostly the first root, so that clients meet.
        self.roots
            .choose(rng)
            .filter(|_| rng.random_bool(0.4))
            .or(self.roots.first())
            .copied()
            .unwrap_or_default()
    }

    fn ino(&self, rng: &mut impl Rng, files: bool) -> Option<Ino> {
        let all: Vec<Ino> = self.known.iter().filter(|k| !files || !k.1).map(|k| k.0).collect();
        all.choose(rng).copied()
    }

    fn name(&self, rng: &mut impl Rng, dir: bool) -> String {
        let of = match self.mix {
            Mix::All | Mix::Looks if rng.random_bool(0.2) => !dir,
            _ => dir,
        };
        let name = if of { DIR_NAMES.choose(rng) } else { NAMES.choose(rng) };
        name.copied().unwrap_or("a").into()
    }

    /// The next operation.
    pub fn next(&mut self, rng: &mut impl Rng) -> Op {
        loop {
            if let Some(op) = self.try_next(rng) {
                return op;
            }
        }
    }

    fn try_next(&mut self, rng: &mut impl Rng) -> Option<Op> {
        let mut dice = rng.random_range(0..100);
        if self.mix == Mix::Looks && rng.random_bool(0.7) {
            dice = *LOOKS.choose(rng)?;
        }
        // With [`Mix::Kernel`] names of directories are only in the root directories.
        let dirs = matches!(dice, 12..20 | 56..62) || dice >= 62 && rng.random_bool(0.2);
        let place = |s: &Chooser, rng: &mut _| {
            if dirs && s.mix == Mix::Kernel { s.root(rng) } else { s.dir(rng) }
        };
        let (dir, name) = (place(self, rng), self.name(rng, dirs));
        Some(match dice {
            0..12 => Op::Create { dir, name, exclusive: rng.random_bool(0.5) },
            12..20 => Op::Mkdir { dir, name },
            20..28 => Op::Getattr { ino: self.ino(rng, false)? },
            28..33 => Op::Open { ino: self.ino(rng, true)? },
            33..38 => {
                self.modes += 1;
                Op::Chmod { ino: self.ino(rng, true)?, mode: 0o700 + self.modes % 0o100 }
            }
            38..46 => {
                // Rarely a directory, which must be refused.
                let file = self.mix == Mix::Kernel || rng.random_bool(0.9);
                Op::Link { ino: self.ino(rng, file)?, dir, name }
            }
            46..56 => Op::Unlink { dir, name },
            56..62 => Op::Rmdir { dir, name },
            62..76 => {
                let how = match rng.random_range(0..6) {
                    0 => How::NoReplace,
                    1 => How::Exchange,
                    _ => How::Replace,
                };
                let (to_dir, to_name) = (place(self, rng), self.name(rng, dirs));
                Op::Rename { dir, name, to_dir, to_name, how }
            }
            76..84 => Op::Readdir { dir },
            _ => Op::Lookup { dir, name },
        })
    }

    /// Remembers what an operation returned.
    pub fn learn(&mut self, op: &Op, outcome: &Outcome) {
        let Outcome::Done(answer) = outcome else { return };
        match (op, answer) {
            (Op::Create { .. }, Answer::Inode { ino, .. }) => self.remember(*ino, false),
            (Op::Mkdir { .. }, Answer::Inode { ino, .. }) => self.remember(*ino, true),
            (Op::Lookup { name, .. }, Answer::Inode { ino, attr }) => {
                let by_name = DIR_NAMES.contains(&name.as_str());
                self.remember(*ino, attr.map_or(by_name, |a| a.dir));
            }
            _ => {}
        }
    }

    fn remember(&mut self, ino: Ino, dir: bool) {
        self.known.retain(|k| k.0 != ino);
        self.known.push((ino, dir));
        if self.known.len() > REMEMBERED {
            self.known.remove(0);
        }
    }
}
