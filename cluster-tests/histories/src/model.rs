//! The model: what a namespace does with one operation after another.

use std::{
    collections::BTreeSet,
    hash::{Hash, Hasher},
    sync::Arc,
};

use crate::history::{
    Answer, Attr, Errno, Head, History, How, Ino, NEW_DIR, NEW_FILE, Op, Outcome, Record,
};

/// An inode in the model, named by the operation that made it. Operations with an unknown outcome
/// make inodes, too.
type Key = u32;

/// Keys of the directories that exist at the beginning.
const FIRST_ROOT: Key = Key::MAX - 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Inode {
    key: Key,
    /// 0: not known yet.
    ino: Ino,
    dir: bool,
    /// The number of names of a file; for a directory 1 while it exists.
    names: u32,
    mode: u32,
    /// It has had more than one name at the same time.
    linked: bool,
    /// The name from which it was last renamed (see [`mark`]), and by which operation.
    moved: Option<(u64, Key)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    dir: Key,
    name: Arc<str>,
    to: Key,
}

/// A namespace. Equal states give equal answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// Sorted by key. Inodes without a name stay, because inode numbers are not reused.
    inodes: Vec<Inode>,
    /// Sorted by directory and name.
    names: Vec<Name>,
}

/// What an operation leads to if it runs now.
#[derive(Debug)]
pub enum Step {
    /// Its answer fits, and it changes nothing, now or later.
    Same,
    To(State),
}

/// Why an operation cannot have run now: what the model does instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    Refused(Errno),
    Succeeds,
    /// 0: an inode whose number is not known.
    OtherInode(Ino),
    OtherAttr(Attr),
    OtherNames(Vec<(String, Ino)>),
    /// No operation has made the inode yet.
    NotMade(Ino),
    /// The inode number is in use already.
    Made(Ino),
    /// It would change nothing, and its outcome is unknown, so there is no need to run it.
    Idle,
}

/// A name in a directory, as a number.
fn mark(dir: Key, name: &str) -> u64 {
    let mut h = std::hash::DefaultHasher::new();
    (dir, name).hash(&mut h);
    h.finish()
}

/// Rules that hold for all states of a history.
pub struct Model {
    kernel: bool,
    /// Inodes that are known to have been made by operations of the history, and the roots.
    made: BTreeSet<Ino>,
    /// When each operation was answered.
    replies: Vec<u64>,
}

/// The errors that an operation may get in a state.
#[derive(Default)]
struct Refusals {
    all: Vec<Errno>,
    /// It may also succeed.
    lenient: bool,
}

impl Refusals {
    fn when(mut self, yes: bool, errno: Errno) -> Refusals {
        if yes {
            self.all.push(errno);
        }
        self
    }

    fn lenient(self, yes: bool) -> Refusals {
        Refusals { lenient: yes, ..self }
    }

    /// `Ok(true)`: the error is allowed. `Ok(false)`: it succeeded, or may have.
    fn judge(self, outcome: &Outcome) -> Result<bool, Why> {
        match (outcome, self.all.first()) {
            (Outcome::Failed(e), _) if self.all.contains(e) => Ok(true),
            (Outcome::Failed(_), Some(e)) => Err(Why::Refused(*e)),
            (Outcome::Failed(_), None) => Err(Why::Succeeds),
            (_, Some(e)) if !self.lenient => Err(Why::Refused(*e)),
            _ => Ok(false),
        }
    }
}

fn refuse() -> Refusals {
    Refusals::default()
}

impl State {
    /// The root directories, empty.
    pub fn new(head: &Head) -> State {
        let root = |(i, ino): (usize, &Ino)| {
            let key = FIRST_ROOT + i as Key;
            Inode { key, ino: *ino, dir: true, names: 1, mode: NEW_DIR, linked: false, moved: None }
        };
        State { inodes: head.roots.iter().enumerate().map(root).collect(), names: Vec::new() }
    }

    fn inode(&self, key: Key) -> &Inode {
        match self.inodes.binary_search_by_key(&key, |i| i.key) {
            Ok(at) => &self.inodes[at],
            Err(_) => unreachable!("a name without an inode"),
        }
    }

    fn inode_mut(&mut self, key: Key) -> &mut Inode {
        match self.inodes.binary_search_by_key(&key, |i| i.key) {
            Ok(at) => &mut self.inodes[at],
            Err(_) => unreachable!("a name without an inode"),
        }
    }

    fn numbered(&self, ino: Ino) -> Result<Inode, Why> {
        self.inodes.iter().find(|i| i.ino == ino).copied().ok_or(Why::NotMade(ino))
    }

    fn spot(&self, dir: Key, name: &str) -> Result<usize, usize> {
        self.names.binary_search_by(|n| (n.dir, &*n.name).cmp(&(dir, name)))
    }

    fn find(&self, dir: Key, name: &str) -> Option<Inode> {
        self.spot(dir, name).ok().map(|at| *self.inode(self.names[at].to))
    }

    fn entries(&self, dir: Key) -> impl Iterator<Item = &Name> {
        self.names.iter().filter(move |n| n.dir == dir)
    }

    fn is_empty(&self, dir: Key) -> bool {
        self.entries(dir).next().is_none()
    }

    /// Whether `dir` is `other` or lies below it.
    fn is_within(&self, dir: Key, other: Key) -> bool {
        let mut at = Some(dir);
        while let Some(key) = at {
            if key == other {
                return true;
            }
            at = self.names.iter().find(|n| n.to == key).map(|n| n.dir);
        }
        false
    }

    fn attr(&self, i: &Inode) -> Attr {
        let subdirs = || self.entries(i.key).filter(|n| self.inode(n.to).dir).count() as u32;
        let nlink = if i.dir && i.names > 0 { 2 + subdirs() } else { i.names };
        Attr { dir: i.dir, nlink, mode: i.mode }
    }

    fn put(&mut self, dir: Key, name: &str, to: Key) {
        match self.spot(dir, name) {
            Ok(at) => self.names[at].to = to,
            Err(at) => self.names.insert(at, Name { dir, name: name.into(), to }),
        }
    }

    fn take(&mut self, dir: Key, name: &str) {
        if let Ok(at) = self.spot(dir, name) {
            self.names.remove(at);
        }
    }

    /// An inode loses a name.
    fn drop_name(&mut self, key: Key) {
        self.inode_mut(key).names -= 1;
    }

    fn make(&mut self, key: Key, ino: Ino, dir: bool) {
        let inode = Inode {
            key,
            ino,
            dir,
            names: 1,
            mode: if dir { NEW_DIR } else { NEW_FILE },
            linked: false,
            moved: None,
        };
        if let Err(at) = self.inodes.binary_search_by_key(&key, |i| i.key) {
            self.inodes.insert(at, inode);
        }
    }

    /// The tree as text, for explanations.
    pub fn lines(&self) -> Vec<String> {
        let ino = |i: &Inode| if i.ino == 0 { format!("?{}", i.key) } else { format!("{}", i.ino) };
        let about = |i: &Inode| {
            let a = self.attr(i);
            let kind = if i.dir { "dir" } else { "file" };
            format!("{kind} {} (links {}, mode {:o})", ino(i), a.nlink, a.mode)
        };
        let named = self.names.iter().map(|n| {
            format!("{}/{} = {}", ino(self.inode(n.dir)), n.name, about(self.inode(n.to)))
        });
        let gone = self.inodes.iter().filter(|i| i.names == 0).map(ino).collect::<Vec<_>>();
        named
            .chain((!gone.is_empty()).then(|| format!("without a name: {}", gone.join(" "))))
            .collect()
    }
}

impl Model {
    pub fn new(history: &History) -> Model {
        let makes = |op: &Op| matches!(op, Op::Mkdir { .. } | Op::Create { exclusive: true, .. });
        let made = |r: &Record| match &r.outcome {
            Outcome::Done(Answer::Inode { ino, .. }) if makes(&r.op) => Some(*ino),
            _ => None,
        };
        let made = history
            .records
            .iter()
            .filter_map(made)
            .chain(history.head.roots.iter().copied())
            .collect();
        let reply =
            |r: &Record| if matches!(r.outcome, Outcome::Unknown(_)) { u64::MAX } else { r.reply };
        Model {
            kernel: history.head.kernel,
            made,
            replies: history.records.iter().map(reply).collect(),
        }
    }

    /// Whether the operation may also have done nothing, as [`Head::kernel`] says.
    pub fn may_idle(&self, s: &State, r: &Record) -> bool {
        let Op::Rename { dir, name, to_dir, to_name, how } = &r.op else { return false };
        let (Ok(d), Ok(to_d)) = (s.numbered(*dir), s.numbered(*to_dir)) else { return false };
        let meanwhile = |(from, by): (u64, Key)| {
            from == mark(d.key, name)
                && self.replies.get(by as usize).is_some_and(|reply| *reply > r.call)
        };
        self.kernel
            && *how != How::NoReplace
            && r.outcome == Outcome::Done(Answer::Done)
            && s.find(to_d.key, to_name).is_some_and(|t| t.linked || t.moved.is_some_and(meanwhile))
    }

    /// Runs an operation, the `key`th of its history; its result must be the recorded one.
    pub fn step(&self, s: &State, key: usize, r: &Record) -> Result<Step, Why> {
        let key = key as Key;
        let by_number = matches!(
            r.op,
            Op::Getattr { .. } | Op::Open { .. } | Op::Chmod { .. } | Op::Readdir { .. }
        );
        let o = match &r.outcome {
            Outcome::Failed(Errno::Stale) if self.kernel && !by_number => return Ok(Step::Same),
            Outcome::Failed(Errno::Stale) => &Outcome::Failed(Errno::NoEnt),
            o => o,
        };
        match &r.op {
            Op::Create { dir, name, exclusive } => self.create(s, key, (*dir, name), *exclusive, o),
            Op::Mkdir { dir, name } => self.mkdir(s, key, (*dir, name), o),
            Op::Lookup { dir, name } => {
                let d = s.numbered(*dir)?;
                let found = s.find(d.key, name);
                match (refuse().when(found.is_none(), Errno::NoEnt).judge(o)?, found) {
                    (false, Some(i)) => self.told(s, &i, o),
                    _ => Ok(Step::Same),
                }
            }
            Op::Getattr { ino } | Op::Open { ino } => {
                let i = s.numbered(*ino)?;
                match refuse().when(i.names == 0, Errno::NoEnt).lenient(true).judge(o)? {
                    true => Ok(Step::Same),
                    false => self.told(s, &i, o),
                }
            }
            Op::Chmod { ino, mode } => {
                let i = s.numbered(*ino)?;
                if refuse().when(i.names == 0, Errno::NoEnt).lenient(true).judge(o)? {
                    return Ok(Step::Same);
                }
                let mut next = s.clone();
                next.inode_mut(i.key).mode = *mode;
                self.changed(next, i.key, o)
            }
            Op::Link { ino, dir, name } => self.link(s, *ino, (*dir, name), o),
            Op::Unlink { dir, name } | Op::Rmdir { dir, name } => {
                self.remove(s, (*dir, name), matches!(r.op, Op::Rmdir { .. }), o)
            }
            Op::Rename { dir, name, to_dir, to_name, how } => {
                self.rename(s, key, [(*dir, name), (*to_dir, to_name)], *how, o)
            }
            Op::Readdir { dir } => self.readdir(s, *dir, o),
        }
    }

    fn create(
        &self,
        s: &State,
        key: Key,
        at: (Ino, &str),
        exclusive: bool,
        o: &Outcome,
    ) -> Result<Step, Why> {
        let d = s.numbered(at.0)?;
        let there = s.find(d.key, at.1);
        let refused = refuse()
            .when(d.names == 0, Errno::NoEnt)
            .when(there.is_some() && exclusive, Errno::Exist)
            .when(there.is_some_and(|t| t.dir), Errno::IsDir)
            .judge(o)?;
        match there {
            _ if refused => Ok(Step::Same),
            Some(_) if matches!(o, Outcome::Unknown(_)) => Err(Why::Idle),
            Some(t) => self.told(s, &t, o),
            None => self.made(s, key, (d.key, at.1), false, o),
        }
    }

    fn mkdir(&self, s: &State, key: Key, at: (Ino, &str), o: &Outcome) -> Result<Step, Why> {
        let d = s.numbered(at.0)?;
        let taken = s.find(d.key, at.1).is_some();
        match refuse().when(d.names == 0, Errno::NoEnt).when(taken, Errno::Exist).judge(o)? {
            true => Ok(Step::Same),
            false => self.made(s, key, (d.key, at.1), true, o),
        }
    }

    fn made(
        &self,
        s: &State,
        key: Key,
        at: (Key, &str),
        dir: bool,
        o: &Outcome,
    ) -> Result<Step, Why> {
        let ino = match o {
            Outcome::Done(Answer::Inode { ino, .. }) => *ino,
            _ => 0,
        };
        if ino != 0 && s.numbered(ino).is_ok() {
            return Err(Why::Made(ino));
        }
        let mut next = s.clone();
        next.make(key, ino, dir);
        next.put(at.0, at.1, key);
        self.changed(next, key, o)
    }

    fn link(&self, s: &State, ino: Ino, at: (Ino, &str), o: &Outcome) -> Result<Step, Why> {
        let (i, d) = (s.numbered(ino)?, s.numbered(at.0)?);
        let refused = refuse()
            .when(i.names == 0 || d.names == 0, Errno::NoEnt)
            .when(s.find(d.key, at.1).is_some(), Errno::Exist)
            .when(i.dir, Errno::Perm)
            .judge(o)?;
        if refused {
            return Ok(Step::Same);
        }
        let mut next = s.clone();
        next.put(d.key, at.1, i.key);
        let i = next.inode_mut(i.key);
        (i.names, i.linked) = (i.names + 1, true);
        let key = i.key;
        self.changed(next, key, o)
    }

    fn remove(&self, s: &State, at: (Ino, &str), rmdir: bool, o: &Outcome) -> Result<Step, Why> {
        let d = s.numbered(at.0)?;
        let found = s.find(d.key, at.1);
        let is = |what: &dyn Fn(Inode) -> bool| found.is_some_and(what);
        let refused = refuse()
            .when(found.is_none(), Errno::NoEnt)
            .when(is(&|t| t.dir && !rmdir), Errno::IsDir)
            .when(is(&|t| !t.dir && rmdir), Errno::NotDir)
            .when(is(&|t| rmdir && !s.is_empty(t.key)), Errno::NotEmpty)
            .judge(o)?;
        let (false, Some(t)) = (refused, found) else { return Ok(Step::Same) };
        let mut next = s.clone();
        next.take(d.key, at.1);
        next.drop_name(t.key);
        Ok(Step::To(next))
    }

    fn rename(
        &self,
        s: &State,
        key: Key,
        [from, to]: [(Ino, &str); 2],
        how: How,
        o: &Outcome,
    ) -> Result<Step, Why> {
        let (d, to_d) = (s.numbered(from.0)?, s.numbered(to.0)?);
        let (a, b) = (s.find(d.key, from.1), s.find(to_d.key, to.1));
        let exchange = how == How::Exchange;
        let mut r = refuse()
            .when(a.is_none() || d.names == 0 || to_d.names == 0, Errno::NoEnt)
            .when(b.is_none() && exchange, Errno::NoEnt)
            .when(b.is_some() && how == How::NoReplace, Errno::Exist)
            .when(a.is_some_and(|a| a.dir && s.is_within(to_d.key, a.key)), Errno::Inval);
        if let Some(b) = b.filter(|b| b.dir && s.is_within(d.key, b.key)) {
            debug_assert!(b.dir);
            r = r.when(true, if exchange { Errno::Inval } else { Errno::NotEmpty });
        }
        let same = matches!((a, b), (Some(a), Some(b)) if a.key == b.key);
        if let (Some(a), Some(b), How::Replace, false) = (a, b, how, same) {
            r = r
                .when(a.dir && !b.dir, Errno::NotDir)
                .when(!a.dir && b.dir, Errno::IsDir)
                .when(a.dir && b.dir && !s.is_empty(b.key), Errno::NotEmpty);
        }
        let (false, Some(a)) = (r.judge(o)?, a) else { return Ok(Step::Same) };
        let mut next = s.clone();
        if !same {
            next.inode_mut(a.key).moved = Some((mark(d.key, from.1), key));
        }
        match b {
            _ if same => {}
            Some(b) if exchange => {
                next.inode_mut(b.key).moved = Some((mark(to_d.key, to.1), key));
                next.put(d.key, from.1, b.key);
                next.put(to_d.key, to.1, a.key);
            }
            _ => {
                next.take(d.key, from.1);
                next.put(to_d.key, to.1, a.key);
                b.iter().for_each(|b| next.drop_name(b.key));
            }
        }
        Ok(Step::To(next))
    }

    fn readdir(&self, s: &State, dir: Ino, o: &Outcome) -> Result<Step, Why> {
        let d = s.numbered(dir)?;
        if refuse().when(d.names == 0, Errno::NoEnt).lenient(true).judge(o)? {
            return Ok(Step::Same);
        }
        let Outcome::Done(Answer::Names(told)) = o else { return Ok(Step::Same) };
        let other = || {
            let all = s.entries(d.key).map(|n| (n.name.to_string(), s.inode(n.to).ino));
            Why::OtherNames(all.collect())
        };
        if s.entries(d.key).count() != told.len() {
            return Err(other());
        }
        let mut next = None;
        for (name, ino) in told {
            let i = s.find(d.key, name).ok_or_else(other)?;
            if i.ino == 0 && self.may_be(next.as_ref().unwrap_or(s), *ino) {
                next.get_or_insert_with(|| s.clone()).inode_mut(i.key).ino = *ino;
            } else if i.ino != *ino {
                return Err(other());
            }
        }
        Ok(next.map_or(Step::Same, Step::To))
    }

    /// Whether an inode of unknown number may have this one.
    fn may_be(&self, s: &State, ino: Ino) -> bool {
        !self.made.contains(&ino) && s.numbered(ino).is_err()
    }

    /// Compares the answer with an inode that the operation did not change.
    fn told(&self, s: &State, i: &Inode, o: &Outcome) -> Result<Step, Why> {
        let Outcome::Done(Answer::Inode { ino, attr }) = o else { return Ok(Step::Same) };
        let is = s.attr(i);
        if attr.is_some_and(|a| a != is) {
            return Err(Why::OtherAttr(is));
        }
        match i.ino {
            n if n == *ino => Ok(Step::Same),
            0 if self.may_be(s, *ino) => {
                let mut next = s.clone();
                next.inode_mut(i.key).ino = *ino;
                Ok(Step::To(next))
            }
            n => Err(Why::OtherInode(n)),
        }
    }

    /// Compares the answer with an inode that the operation changed.
    fn changed(&self, next: State, key: Key, o: &Outcome) -> Result<Step, Why> {
        match self.told(&next, next.inode(key), o)? {
            Step::Same => Ok(Step::To(next)),
            bound => Ok(bound),
        }
    }
}
