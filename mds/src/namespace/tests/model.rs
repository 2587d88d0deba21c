//! The namespace against a model: a tree in memory, written from the manual pages and not from the
//! code.

use super::{random::Dice, *};

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Dir(BTreeMap<String, usize>),
    File(u64),
    Link,
}

#[derive(Clone, Debug)]
struct Node {
    kind: Kind,
    ino: Ino,
}

/// Nodes are never removed from the list, only from the tree.
struct Model {
    nodes: Vec<Node>,
}

impl Model {
    fn dir(&self, n: usize) -> Result<&BTreeMap<String, usize>, Code> {
        match &self.nodes[n].kind {
            // A removed file answers as long as it is an orphan; removed directories and links do
            // not.
            Kind::File(_) => Err(Code::NotDir),
            _ if !self.reachable().contains(&n) => Err(Code::NoEnt),
            Kind::Dir(d) => Ok(d),
            Kind::Link => Err(Code::NotDir),
        }
    }
    fn dir_mut(&mut self, n: usize) -> &mut BTreeMap<String, usize> {
        match &mut self.nodes[n].kind {
            Kind::Dir(d) => d,
            _ => unreachable!("checked by dir()"),
        }
    }
    fn is_dir(&self, n: usize) -> bool {
        matches!(self.nodes[n].kind, Kind::Dir(_))
    }
    fn below(&self, n: usize) -> BTreeSet<usize> {
        let mut all = BTreeSet::from([n]);
        if let Kind::Dir(d) = &self.nodes[n].kind {
            d.values().for_each(|c| all.extend(self.below(*c)));
        }
        all
    }
    fn reachable(&self) -> BTreeSet<usize> {
        self.below(0)
    }
    fn names_of(&self, n: usize) -> usize {
        let dirs = self.reachable().into_iter().filter_map(|d| self.dir(d).ok());
        dirs.map(|d| d.values().filter(|c| **c == n).count()).sum()
    }

    fn make(&mut self, dir: usize, name: &str, kind: Kind, ino: Ino) -> Result<(), Code> {
        if self.dir(dir)?.contains_key(name) {
            return Err(Code::Exist);
        }
        self.nodes.push(Node { kind, ino });
        let n = self.nodes.len() - 1;
        self.dir_mut(dir).insert(name.into(), n);
        Ok(())
    }
    fn link(&mut self, n: usize, dir: usize, name: &str) -> Result<(), Code> {
        let gone = !self.reachable().contains(&n);
        if gone && !matches!(self.nodes[n].kind, Kind::File(_)) {
            return Err(Code::NoEnt);
        }
        if self.dir(dir)?.contains_key(name) {
            return Err(Code::Exist);
        }
        if self.is_dir(n) {
            return Err(Code::Perm);
        }
        if gone {
            return Err(Code::NoEnt);
        }
        self.dir_mut(dir).insert(name.into(), n);
        Ok(())
    }
    fn has(&self, dir: usize, name: &str) -> bool {
        self.dir(dir).is_ok_and(|d| d.contains_key(name))
    }
    fn remove(&mut self, dir: usize, name: &str, rmdir: bool) -> Result<(), Code> {
        let n = *self.dir(dir)?.get(name).ok_or(Code::NoEnt)?;
        match (&self.nodes[n].kind, rmdir) {
            (Kind::Dir(_), false) => return Err(Code::IsDir),
            (Kind::Dir(d), true) if !d.is_empty() => return Err(Code::NotEmpty),
            (Kind::Dir(_), true) | (_, false) => {}
            (_, true) => return Err(Code::NotDir),
        }
        self.dir_mut(dir).remove(name);
        Ok(())
    }
    fn rename(
        &mut self,
        dir: usize,
        name: &str,
        to: usize,
        new: &str,
        flags: u32,
    ) -> Result<(), Code> {
        if matches!(flags, 3 | 6) {
            return Err(Code::Inval);
        }
        let n = *self.dir(dir)?.get(name).ok_or(Code::NoEnt)?;
        let there = self.dir(to)?.get(new).copied();
        match (flags & 3, there) {
            (1, Some(_)) => return Err(Code::Exist),
            (2, None) => return Err(Code::NoEnt),
            _ => {}
        }
        if self.is_dir(n) && self.below(n).contains(&to) {
            return Err(Code::Inval);
        }
        let Some(t) = there else {
            self.dir_mut(dir).remove(name);
            self.dir_mut(to).insert(new.into(), n);
            return Ok(());
        };
        if self.is_dir(t) && self.below(t).contains(&dir) {
            return Err(if flags == 2 { Code::Inval } else { Code::NotEmpty });
        }
        if n == t {
            return Ok(());
        }
        if flags == 2 {
            self.dir_mut(dir).insert(name.into(), t);
            self.dir_mut(to).insert(new.into(), n);
            return Ok(());
        }
        match (self.is_dir(n), &self.nodes[t].kind) {
            (true, Kind::Dir(d)) if !d.is_empty() => return Err(Code::NotEmpty),
            (true, Kind::File(_) | Kind::Link) => return Err(Code::NotDir),
            (false, Kind::Dir(_)) => return Err(Code::IsDir),
            _ => {}
        }
        self.dir_mut(dir).remove(name);
        self.dir_mut(to).insert(new.into(), n);
        Ok(())
    }
    fn resize(&mut self, n: usize, f: impl Fn(u64) -> u64) -> Result<(), Code> {
        let gone = !self.reachable().contains(&n);
        match &mut self.nodes[n].kind {
            Kind::File(size) => *size = f(*size),
            _ if gone => return Err(Code::NoEnt),
            Kind::Dir(_) => return Err(Code::IsDir),
            Kind::Link => return Err(Code::Inval),
        }
        Ok(())
    }
}

/// Everything both sides know, by path.
fn compare(fs: &mut Fs, m: &Model) {
    for n in m.reachable() {
        let ino = m.nodes[n].ino;
        let a = fs.attr(ino);
        let subdirs = |d: &BTreeMap<String, usize>| d.values().filter(|c| m.is_dir(**c)).count();
        match &m.nodes[n].kind {
            Kind::Dir(d) => {
                let mut names = fs.names(ino, 3);
                names.sort();
                assert_eq!(names, d.keys().cloned().collect::<Vec<_>>(), "names in {ino}");
                assert_eq!(a.nlink as usize, 2 + subdirs(d));
                for (name, child) in d {
                    assert_eq!(fs.lookup(ino, name), Ok(m.nodes[*child].ino));
                }
            }
            Kind::File(size) => assert_eq!((a.size, a.nlink as usize), (*size, m.names_of(n))),
            Kind::Link => assert_eq!(a.nlink as usize, m.names_of(n)),
        }
        // Its path leads back to it.
        let path = fs.path(ino).unwrap();
        let parts = path.split('/').filter(|p| !p.is_empty());
        let end = parts.fold(ROOT, |at, name| fs.lookup(at, name).unwrap());
        assert_eq!(end, ino, "{path}");
    }
}

fn step(fs: &mut Fs, m: &mut Model, d: &mut Dice) {
    let node = |d: &mut Dice, m: &Model| {
        if d.one_in(3) { 0 } else { d.below(m.nodes.len() as u64) as usize }
    };
    let text = |d: &mut Dice| ["a", "b", "c", "d"][d.below(4) as usize];
    let (dir, to, n) = (node(d, m), node(d, m), node(d, m));
    let (name, new) = (text(d), text(d));
    let (parent, new_parent, ino) = (m.nodes[dir].ino, m.nodes[to].ino, m.nodes[n].ino);
    let size = d.below(1000);
    let flags = [0, 0, 0, 1, 2, 3, 4, 4, 5, 6][d.below(10) as usize];
    let what = d.below(13);
    let o = match what {
        0 | 1 => mk_create(parent, name),
        2..=4 => Op::Mkdir(pb::Mkdir { parent, name: bytes(name), mode: 0o755, umask: 0 }),
        5 => Op::Symlink(pb::Symlink { parent, name: bytes(name), target: bytes("x") }),
        6 => mk_link(ino, parent, name),
        7 => mk_unlink(parent, name),
        8 => mk_rmdir(parent, name),
        9 | 10 => mk_rename(parent, name, new_parent, new, flags),
        11 => mk_size(ino, size),
        _ => Op::Extend(pb::Extend { ino, end: size, holes: false }),
    };
    let got = fs.try_one(o.clone());
    let made = got.as_ref().map_or(0, |r| r.ino);
    let want = match what {
        0 | 1 => m.make(dir, name, Kind::File(0), made),
        2..=4 => m.make(dir, name, Kind::Dir(BTreeMap::new()), made),
        5 => m.make(dir, name, Kind::Link, made),
        6 => m.link(n, dir, name),
        7 => m.remove(dir, name, false),
        8 => m.remove(dir, name, true),
        9 | 10 => m.rename(dir, name, to, new, flags).and_then(|()| {
            match flags & 4 != 0 && !m.has(dir, name) {
                // What is left there is not a directory and has no size.
                true => fs
                    .lookup(parent, name)
                    .and_then(|whiteout| m.make(dir, name, Kind::Link, whiteout)),
                false => Ok(()),
            }
        }),
        11 => m.resize(n, |_| size),
        _ => m.resize(n, |s| s.max(size)),
    };
    assert_eq!(got.map(|_| ()), want, "{o:?}");
}

#[test]
fn random_operations_do_what_the_model_does() {
    for seed in 0..30 {
        let mut fs = Fs::with_mask([u64::MAX, 1, 0][seed as usize % 3]);
        let mut m = Model { nodes: vec![Node { kind: Kind::Dir(BTreeMap::new()), ino: ROOT }] };
        let mut d = Dice(seed);
        for i in 0..300 {
            step(&mut fs, &mut m, &mut d);
            if i % 60 == 59 {
                compare(&mut fs, &m);
                fsck(&fs);
            }
        }
    }
}
