//! The files and directories of a disk that can lose power, without FUSE: what programs see, and
//! what is durable.
//!
//! fsync of a file makes its bytes and size durable, but no name. fsync of a directory makes the
//! operations on its entries durable. A power cut may lose any other operation, but only as a
//! whole: a rename is done or not. An operation that depends on a lost one (on the same name or the
//! same file) is lost with it. Owners, modes and times are always durable.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::SystemTime,
};

use rand::{Rng, RngExt};

use super::content::{Content, how_much_survives};

pub type Ino = u64;
/// An errno.
pub type Result<T> = std::result::Result<T, i32>;
type Name = Vec<u8>;

pub const ROOT: Ino = 1;

/// What a sync makes durable of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// As in POSIX: names are durable only after an fsync of their directory.
    Posix,
    /// As with ext4's journal: any fsync makes all names durable.
    Journal,
}

/// What a power cut lost of the changes that were not synced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    pub sectors: u64,
    pub sectors_unsynced: u64,
    /// Operations on directories.
    pub names: u64,
    pub names_unsynced: u64,
}

pub enum Node {
    File(Content),
    Dir(Dir),
    Symlink(Vec<u8>),
}

#[derive(Default)]
pub struct Dir {
    entries: BTreeMap<Name, Ino>,
    durable: BTreeMap<Name, Ino>,
}

pub struct Inode {
    pub node: Node,
    /// Permission bits.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// The number of names of a file or link; a directory has only one name.
    pub nlink: u32,
    /// The time of the last change.
    pub time: SystemTime,
}

impl Inode {
    pub fn new(node: Node, mode: u16, uid: u32, gid: u32) -> Inode {
        Inode { node, mode, uid, gid, nlink: 1, time: SystemTime::now() }
    }
}

/// One operation on directories that is not durable yet.
struct Op {
    /// (directory, name, what it names afterwards)
    changes: Vec<(Ino, Name, Option<Ino>)>,
    /// Inodes that gained or lost a name.
    moved: Vec<Ino>,
}

/// Names and inodes of some operations, to find others that depend on them.
#[derive(Default)]
struct Touched {
    names: HashSet<(Ino, Name)>,
    inodes: HashSet<Ino>,
}

impl Touched {
    fn has(&self, op: &Op) -> bool {
        op.moved.iter().any(|i| self.inodes.contains(i))
            || op.changes.iter().any(|(dir, name, _)| self.names.contains(&(*dir, name.clone())))
    }

    fn add(&mut self, op: &Op) {
        self.names.extend(op.changes.iter().map(|(dir, name, _)| (*dir, name.clone())));
        self.inodes.extend(&op.moved);
    }
}

pub struct Tree {
    rule: Rule,
    inodes: HashMap<Ino, Inode>,
    /// Inode numbers are never reused.
    next: Ino,
    /// In the order in which the operations were made.
    ops: Vec<Op>,
    /// Inodes on a disk without power.
    dark: HashSet<Ino>,
}

impl Tree {
    pub fn new(rule: Rule) -> Tree {
        let root = Inode::new(Node::Dir(Dir::default()), 0o755, 0, 0);
        Tree {
            rule,
            inodes: HashMap::from([(ROOT, root)]),
            next: ROOT + 1,
            ops: vec![],
            dark: HashSet::new(),
        }
    }

    pub fn inode(&self, ino: Ino) -> Result<&Inode> {
        if self.dark.contains(&ino) {
            return Err(libc::EIO);
        }
        self.inodes.get(&ino).ok_or(libc::ESTALE)
    }

    /// For changes of anything but names and bytes.
    pub fn inode_mut(&mut self, ino: Ino) -> Result<&mut Inode> {
        self.inode(ino)?;
        let inode = self.inodes.get_mut(&ino).ok_or(libc::ESTALE)?;
        inode.time = SystemTime::now();
        Ok(inode)
    }

    pub fn content(&self, ino: Ino) -> Result<&Content> {
        match &self.inode(ino)?.node {
            Node::File(c) => Ok(c),
            Node::Dir(_) => Err(libc::EISDIR),
            Node::Symlink(_) => Err(libc::EINVAL),
        }
    }

    pub fn content_mut(&mut self, ino: Ino) -> Result<&mut Content> {
        match &mut self.inode_mut(ino)?.node {
            Node::File(c) => Ok(c),
            Node::Dir(_) => Err(libc::EISDIR),
            Node::Symlink(_) => Err(libc::EINVAL),
        }
    }

    fn entries(&self, dir: Ino) -> Result<&BTreeMap<Name, Ino>> {
        match &self.inode(dir)?.node {
            Node::Dir(d) => Ok(&d.entries),
            _ => Err(libc::ENOTDIR),
        }
    }

    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Ino> {
        let ino = self.entries(dir)?.get(name).copied().ok_or(libc::ENOENT)?;
        self.inode(ino).map(|_| ino)
    }

    pub fn list(&self, dir: Ino) -> Result<Vec<(Name, Ino)>> {
        Ok(self.entries(dir)?.iter().map(|(n, i)| (n.clone(), *i)).collect())
    }

    fn is_dir(&self, ino: Ino) -> bool {
        self.inodes.get(&ino).is_some_and(|i| matches!(i.node, Node::Dir(_)))
    }

    /// Bytes held by all files.
    pub fn allocated(&self) -> u64 {
        let held = |i: &Inode| if let Node::File(c) = &i.node { c.allocated() } else { 0 };
        self.inodes.values().map(held).sum()
    }

    pub fn make(&mut self, dir: Ino, name: &[u8], inode: Inode) -> Result<Ino> {
        if self.entries(dir)?.contains_key(name) {
            return Err(libc::EEXIST);
        }
        let ino = self.next;
        self.next += 1;
        self.inodes.insert(ino, inode);
        self.operate(vec![(dir, name.into(), Some(ino))], vec![ino]);
        Ok(ino)
    }

    pub fn link(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Result<()> {
        if self.entries(dir)?.contains_key(name) {
            return Err(libc::EEXIST);
        }
        if self.is_dir(ino) {
            return Err(libc::EPERM);
        }
        self.inode_mut(ino)?.nlink += 1;
        self.operate(vec![(dir, name.into(), Some(ino))], vec![ino]);
        Ok(())
    }

    /// unlink, or rmdir with `is_dir`.
    pub fn remove(&mut self, dir: Ino, name: &[u8], is_dir: bool) -> Result<()> {
        let ino = self.lookup(dir, name)?;
        self.check_replaced(ino, is_dir)?;
        self.unlinked(ino)?;
        self.operate(vec![(dir, name.into(), None)], vec![ino]);
        Ok(())
    }

    /// Whether this name may be removed or replaced.
    fn check_replaced(&self, ino: Ino, is_dir: bool) -> Result<()> {
        match (self.is_dir(ino), is_dir) {
            (true, false) => Err(libc::EISDIR),
            (false, true) => Err(libc::ENOTDIR),
            (true, true) if !self.entries(ino)?.is_empty() => Err(libc::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    fn unlinked(&mut self, ino: Ino) -> Result<()> {
        let inode = self.inode_mut(ino)?;
        inode.nlink = inode.nlink.saturating_sub(1);
        Ok(())
    }

    /// `flags` as of renameat2(2).
    pub fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<()> {
        let ino = self.lookup(from.0, from.1)?;
        let old = match self.lookup(to.0, to.1) {
            Ok(old) => Some(old),
            Err(libc::ENOENT) => None,
            Err(e) => return Err(e),
        };
        let (here, there) = ((from.0, from.1.to_vec()), (to.0, to.1.to_vec()));
        match (flags, old) {
            (libc::RENAME_NOREPLACE, Some(_)) => Err(libc::EEXIST),
            (libc::RENAME_EXCHANGE, None) => Err(libc::ENOENT),
            (libc::RENAME_EXCHANGE, Some(old)) => {
                self.operate(
                    vec![(here.0, here.1, Some(old)), (there.0, there.1, Some(ino))],
                    vec![ino, old],
                );
                Ok(())
            }
            (0 | libc::RENAME_NOREPLACE, old) if old != Some(ino) => {
                let mut moved = vec![ino];
                if let Some(old) = old {
                    self.check_replaced(old, self.is_dir(ino))?;
                    self.unlinked(old)?;
                    moved.push(old);
                }
                self.operate(vec![(here.0, here.1, None), (there.0, there.1, Some(ino))], moved);
                Ok(())
            }
            (0, _) => Ok(()),
            _ => Err(libc::EINVAL),
        }
    }

    fn operate(&mut self, changes: Vec<(Ino, Name, Option<Ino>)>, moved: Vec<Ino>) {
        let op = Op { changes, moved };
        self.apply(&op, |d| &mut d.entries);
        self.ops.push(op);
    }

    fn apply(&mut self, op: &Op, side: impl Fn(&mut Dir) -> &mut BTreeMap<Name, Ino>) {
        for (dir, name, ino) in &op.changes {
            let Some(Inode { node: Node::Dir(d), time, .. }) = self.inodes.get_mut(dir) else {
                continue;
            };
            *time = SystemTime::now();
            match ino {
                Some(ino) => side(d).insert(name.clone(), *ino),
                None => side(d).remove(name),
            };
        }
    }

    pub fn sync_file(&mut self, ino: Ino) -> Result<()> {
        self.inode(ino)?;
        if let Some(Inode { node: Node::File(c), .. }) = self.inodes.get_mut(&ino) {
            c.sync();
        }
        if self.rule == Rule::Journal {
            self.settle(|_| true);
        }
        Ok(())
    }

    pub fn sync_dir(&mut self, dir: Ino) -> Result<()> {
        self.entries(dir)?;
        let all = self.rule == Rule::Journal;
        self.settle(|op| all || op.changes.iter().any(|c| c.0 == dir));
        Ok(())
    }

    /// Makes these operations durable, and the earlier ones that they depend on.
    fn settle(&mut self, wanted: impl Fn(&Op) -> bool) {
        let mut needed = Touched::default();
        let (mut done, mut open) = (vec![], vec![]);
        for op in std::mem::take(&mut self.ops).into_iter().rev() {
            if wanted(&op) || needed.has(&op) {
                needed.add(&op);
                done.push(op);
            } else {
                open.push(op);
            }
        }
        done.iter().rev().for_each(|op| self.apply(op, |d| &mut d.durable));
        open.reverse();
        self.ops = open;
    }

    /// Cuts the power of everything below these directories: decides what is left, and from here on
    /// every access there fails with `EIO`.
    pub fn cut_power(&mut self, roots: &[Ino], rng: &mut impl Rng) -> Lost {
        let below = self.below(roots.to_vec());
        let mut lost = Lost::default();
        let survives = how_much_survives(rng);
        let mut gone = Touched::default();
        for op in std::mem::take(&mut self.ops) {
            if !op.changes.iter().any(|c| below.contains(&c.0)) {
                self.ops.push(op);
                continue;
            }
            lost.names_unsynced += 1;
            if gone.has(&op) || !rng.random_bool(survives) {
                lost.names += 1;
                gone.add(&op);
            } else {
                self.apply(&op, |d| &mut d.durable);
            }
        }
        // In a fixed order, so that a seed always gives the same result.
        let mut order: Vec<Ino> = below.iter().copied().collect();
        order.sort_unstable();
        for ino in order {
            match self.inodes.get_mut(&ino).map(|i| &mut i.node) {
                Some(Node::Dir(d)) => d.entries.clone_from(&d.durable),
                Some(Node::File(c)) => c.cut(rng, &mut lost),
                _ => (),
            }
        }
        self.count_names(&below);
        self.dark = below;
        lost
    }

    pub fn is_dark(&self, ino: Ino) -> bool {
        self.dark.contains(&ino)
    }

    /// Makes what is left usable again.
    pub fn power_up(&mut self) {
        self.dark.clear();
    }

    fn count_names(&mut self, of: &HashSet<Ino>) {
        let mut names: HashMap<Ino, u32> = HashMap::new();
        for inode in self.inodes.values() {
            let Node::Dir(d) = &inode.node else { continue };
            d.entries.values().for_each(|ino| *names.entry(*ino).or_default() += 1);
        }
        for ino in of {
            if let Some(inode) = self.inodes.get_mut(ino) {
                inode.nlink = names.get(ino).copied().unwrap_or(0);
            }
        }
    }

    /// These inodes, and all that can be reached from them by current or durable names.
    fn below(&self, mut todo: Vec<Ino>) -> HashSet<Ino> {
        let mut found = HashSet::new();
        while let Some(ino) = todo.pop() {
            if found.insert(ino)
                && let Some(Inode { node: Node::Dir(d), .. }) = self.inodes.get(&ino)
            {
                todo.extend(d.entries.values().chain(d.durable.values()));
            }
        }
        found
    }

    /// Drops files that are not open and cannot be reached any more, neither now nor after a power
    /// cut.
    pub fn sweep(&mut self, open: &HashSet<Ino>) {
        let mut from: Vec<Ino> = open.iter().copied().collect();
        from.push(ROOT);
        for op in &self.ops {
            from.extend(op.changes.iter().flat_map(|(dir, _, ino)| [*dir, ino.unwrap_or(*dir)]));
            from.extend(&op.moved);
        }
        let reached = self.below(from);
        self.inodes.retain(|ino, _| reached.contains(ino));
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
