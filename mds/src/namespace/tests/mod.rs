//! Tests of the namespace: a file system in memory to drive, and a check of the whole state that
//! every test ends with.

mod acls;
mod attrs;
mod away;
mod effects;
mod endings;
mod extremes;
mod golden;
mod layouts;
mod levels;
mod locks;
mod model;
mod names;
mod random;

mod repair;
mod replay;
mod seals;
mod work;
mod writers;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use prost::Message;
use sha2::{Digest, Sha256};
use strake_proto::{Code, FEATURE_LEVEL, Ino, pb};
use strake_store::{MemStore, Reader};

use super::{FORMAT_VERSION, Namespace, PLACEMENT, RULES, effects::Effect, inode, keys};
use pb::{log_command::Command, op::Op};

pub(super) const ROOT: Ino = 1;
pub(super) const T0: i64 = 1_700_000_000_000_000_000;

pub(super) fn creds(uid: u32) -> pb::Creds {
    pb::Creds { uid, gid: uid, groups: vec![] }
}

pub(super) fn op(op: Op) -> pb::Op {
    pb::Op { op: Some(op) }
}

pub(super) fn bytes(s: &str) -> Bytes {
    Bytes::copy_from_slice(s.as_bytes())
}

pub(super) fn entry(now_ns: i64, command: Command) -> Bytes {
    pb::LogCommand { now_ns, command: Some(command) }.encode_to_vec().into()
}

pub(super) fn format() -> Command {
    Command::Format(pb::Format {
        fs_uuid: vec![7; 16].into(),
        fs_name: "test".into(),
        name_hash_key: (0..16).collect::<Vec<u8>>().into(),
        default_copies: 1,
        root_mode: 0o1777,
        ..Default::default()
    })
}

pub(super) fn code_of(s: Option<&pb::Status>) -> Option<Code> {
    s.map(|s| Code::from_wire(s.code))
}

/// A namespace with one session, and commands as functions. Time goes on by a second per command.
pub(super) struct Fs {
    pub store: MemStore,
    pub ns: Namespace,
    pub index: u64,
    pub now: i64,
    pub seq: u64,
    pub session: u64,
    pub creds: pb::Creds,
    /// The rules by which lists are applied.
    pub rules: u32,
    /// The effects of the last command.
    pub effects: Vec<Effect>,
}

impl Fs {
    pub(super) fn new() -> Fs {
        Fs::with_mask(u64::MAX)
    }

    /// With few hash bits, so that names collide.
    pub(super) fn with_mask(mask: u64) -> Fs {
        Fs::with(mask, 1, format())
    }

    /// Formatted as this program does, with so many chains headed by each target.
    pub(super) fn with_chains(per: usize) -> Fs {
        let Command::Format(f) = format() else { unreachable!() };
        Fs::with(u64::MAX, per, Command::Format(pb::Format { placement: PLACEMENT, ..f }))
    }

    fn with(mask: u64, per: usize, format: Command) -> Fs {
        let store = MemStore::new();
        let ns =
            Namespace::open_with(std::sync::Arc::new(store.clone()), mask, FEATURE_LEVEL).unwrap();
        let mut fs = Fs {
            store,
            ns,
            index: 0,
            now: T0,
            seq: 0,
            session: 0,
            creds: creds(0),
            rules: RULES,
            effects: vec![],
        };
        assert_eq!(fs.log(format).status, None);
        fs.session = fs.open_session(1);
        fs.cluster(3, 2, per);
        fs
    }

    /// Registers `nodes` storage servers of `each` targets of 1 TiB and makes their chains.
    fn cluster(&mut self, nodes: u32, each: u32, per: usize) {
        for n in 0..nodes {
            let target = |t: u32| pb::RegisterTarget {
                uuid: vec![(n * each + t + 1) as u8; 16].into(),
                capacity: 1 << 40,
                stamp: 1,
                id: u32::MAX,
                sights: Vec::new(),
                follows: None,
            };
            let r = pb::RegisterRequest {
                name: format!("oss{n}"),
                endpoints: vec![format!("tcp:oss{n}:7000")],
                targets: (0..each).map(target).collect(),
                version: "1".into(),
                fs_uuid: Bytes::new(),
                incarnation: 0,
                rack: String::new(),
                level: 0,
            };
            assert_eq!(self.log(Command::Register(r)).status, None);
        }
        self.targets(|t| t.alive = true);
        let map = self.ns.map();
        let (chains, sets) = crate::cluster::chain_table::make_chains(&map.map, per).unwrap();
        let u = pb::MapUpdate { expect_version: map.version(), chains, sets, ..Default::default() };
        assert_eq!(self.log(Command::MapUpdate(u)).status, None);
    }

    /// Changes all targets of the map.
    pub(super) fn targets(&mut self, change: impl FnMut(&mut pb::Target)) {
        let map = self.ns.map();
        let mut targets = map.map.targets.clone();
        targets.iter_mut().for_each(change);
        let u = pb::MapUpdate { expect_version: map.version(), targets, ..Default::default() };
        assert_eq!(self.log(Command::MapUpdate(u)).status, None);
    }

    pub(super) fn open_session(&mut self, client: u8) -> u64 {
        let o = pb::SessionOpenRequest {
            client_uuid: vec![client; 16].into(),
            hostname: "h".into(),
            ..Default::default()
        };
        match self.log(Command::SessionOpen(o)).reply {
            Some(pb::log_reply::Reply::SessionOpen(r)) => r.session,
            other => panic!("{other:?}"),
        }
    }

    /// Applies one command.
    pub(super) fn log(&mut self, command: Command) -> pb::LogReply {
        self.index += 1;
        self.now += 1_000_000_000;
        let e = (self.index, 1, entry(self.now, command));
        let before = effects::visible(&self.store);
        let mut told = Vec::new();
        let tell = |effects: &[Effect]| told.extend_from_slice(effects);
        let reply = self.ns.apply_and_tell(&[e], (self.index, 1), None, tell).unwrap().remove(0);
        effects::check(before, &self.store, &told);
        self.effects = told;
        reply
    }

    /// Runs a list as `self.creds`, through the log if it changes anything.
    pub(super) fn list(&mut self, ops: Vec<pb::Op>) -> Vec<pb::OpResult> {
        if !Namespace::is_mutation(&ops) {
            return self.ns.read(self.session, &self.creds, &ops).results;
        }
        self.seq += 1;
        let m = pb::MetaRequest {
            session: self.session,
            seq: self.seq,
            lowest_unanswered: self.seq,
            creds: Some(self.creds.clone()),
            ops,
            rules: self.rules,
            ..Default::default()
        };
        match self.log(Command::Meta(m)) {
            pb::LogReply { status: None, reply: Some(pb::log_reply::Reply::Meta(m)) } => m.results,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn try_one(&mut self, o: Op) -> Result<pb::OpResult, Code> {
        let r = self.list(vec![op(o)]).remove(0);
        match code_of(r.status.as_ref()) {
            Some(code) => Err(code),
            None => Ok(r),
        }
    }

    #[track_caller]
    pub(super) fn one(&mut self, o: Op) -> pb::OpResult {
        self.try_one(o.clone()).unwrap_or_else(|e| panic!("{o:?}: {e:?}"))
    }

    #[track_caller]
    pub(super) fn fails(&mut self, o: Op, code: Code) {
        assert_eq!(self.try_one(o.clone()).map(|r| r.ino), Err(code), "{o:?}");
    }

    /// The same as another user.
    pub(super) fn as_user<T>(&mut self, uid: u32, f: impl FnOnce(&mut Fs) -> T) -> T {
        let before = std::mem::replace(&mut self.creds, creds(uid));
        let out = f(self);
        self.creds = before;
        out
    }

    #[track_caller]
    pub(super) fn mkdir(&mut self, parent: Ino, name: &str) -> Ino {
        self.one(Op::Mkdir(pb::Mkdir { parent, name: bytes(name), mode: 0o755, umask: 0 })).ino
    }
    #[track_caller]
    pub(super) fn create(&mut self, parent: Ino, name: &str) -> Ino {
        self.one(mk_create(parent, name)).ino
    }
    #[track_caller]
    pub(super) fn attr(&mut self, ino: Ino) -> pb::Attr {
        self.one(Op::Getattr(pb::GetAttr { ino })).attr.unwrap()
    }
    pub(super) fn record(&self, ino: Ino) -> Option<pb::InodeRecord> {
        self.ns.state.inode(ino)
    }
    pub(super) fn lookup(&mut self, parent: Ino, name: &str) -> Result<Ino, Code> {
        self.try_one(Op::Lookup(pb::Lookup { parent, name: bytes(name) })).map(|r| r.ino)
    }
    pub(super) fn path(&mut self, ino: Ino) -> Result<String, Code> {
        let r = self.try_one(Op::PathOf(pb::PathOf { ino }))?;
        Ok(String::from_utf8(r.data.to_vec()).unwrap())
    }
    /// All names of a directory, read `limit` at a time.
    pub(super) fn names(&mut self, dir: Ino, limit: u32) -> Vec<String> {
        let (mut cookie, mut names) = (0, Vec::new());
        loop {
            let r = self.one(Op::Readdir(pb::Readdir { dir, cookie, limit, attrs: true }));
            for e in &r.entries {
                assert!(e.cookie > cookie && e.cookie > 2 && e.cookie < 1 << 63);
                assert_eq!(e.attr.as_ref().map(|a| (a.ino, a.mode >> 12)), Some((e.ino, e.r#type)));
                cookie = e.cookie;
                names.push(String::from_utf8(e.name.to_vec()).unwrap());
            }
            if r.end {
                return names;
            }
            assert!(!r.entries.is_empty());
        }
    }
}

pub(super) fn mk_create(parent: Ino, name: &str) -> Op {
    Op::Create(pb::Create {
        parent,
        name: bytes(name),
        mode: 0o644,
        exclusive: true,
        layout: None,
        flags: 2,
        umask: 0,
    })
}
pub(super) fn mk_unlink(parent: Ino, name: &str) -> Op {
    Op::Unlink(pb::Unlink { parent, name: bytes(name) })
}
pub(super) fn mk_rmdir(parent: Ino, name: &str) -> Op {
    Op::Rmdir(pb::Rmdir { parent, name: bytes(name) })
}
pub(super) fn mk_link(ino: Ino, parent: Ino, name: &str) -> Op {
    Op::Link(pb::Link { ino, parent, name: bytes(name) })
}
pub(super) fn mk_rename(
    parent: Ino,
    name: &str,
    new_parent: Ino,
    new_name: &str,
    flags: u32,
) -> Op {
    Op::Rename(pb::Rename {
        parent,
        name: bytes(name),
        new_parent,
        new_name: bytes(new_name),
        flags,
    })
}
pub(super) fn mk_size(ino: Ino, size: u64) -> Op {
    Op::Setattr(pb::SetAttr { ino, size: Some(size), ..Default::default() })
}

pub(super) fn dump(store: &dyn Reader) -> Vec<(Bytes, Bytes)> {
    store.prefix(b"").map(Result::unwrap).collect()
}

/// SHA-256 over all pairs, each with its lengths.
pub(super) fn digest(store: &dyn Reader) -> String {
    let mut h = Sha256::new();
    for (k, v) in dump(store) {
        for part in [&k, &v] {
            h.update((part.len() as u64).to_le_bytes());
            h.update(part);
        }
    }
    hex::encode(h.finalize())
}

/// Everything that must be true of a state, whatever happened before.
pub(super) fn fsck(fs: &Fs) {
    let mut inodes: BTreeMap<Ino, pb::InodeRecord> = BTreeMap::new();
    let mut names: BTreeMap<Ino, Vec<(Ino, Bytes)>> = BTreeMap::new();
    let mut in_dir: BTreeMap<Ino, u64> = BTreeMap::new();
    let mut subdirs: BTreeMap<Ino, u32> = BTreeMap::new();
    let mut xattrs: BTreeMap<Ino, u32> = BTreeMap::new();
    let mut writers: BTreeMap<Ino, u32> = BTreeMap::new();
    let mut pages: BTreeMap<Ino, Vec<u64>> = BTreeMap::new();
    let (mut orphans, mut trims, mut replies) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
    let (mut locked, mut totals) = (BTreeMap::new(), BTreeMap::new());
    let (mut ranges, mut index) = (BTreeMap::new(), BTreeMap::new());
    let mut kinds = Vec::new();
    let mut header = pb::StateHeader::default();
    for (k, v) in dump(&fs.store) {
        let n = keys::last_number(&k).unwrap_or_default();
        let at = k.get(1..9).and_then(keys::last_number).unwrap_or_default();
        match k[0] {
            b'H' => header = pb::StateHeader::decode(v).unwrap(),
            b'M' => {}
            b'd' => {
                let d = pb::DentryRecord::decode(v).unwrap();
                if d.ino != 0 {
                    *in_dir.entry(at).or_default() += 1;
                    if d.r#type == inode::S_IFDIR >> 12 {
                        *subdirs.entry(at).or_default() += 1;
                    }
                    kinds.push((d.ino, d.r#type));
                    names.entry(d.ino).or_default().push((at, d.name));
                }
            }
            b'i' => drop(inodes.insert(at, pb::InodeRecord::decode(v).unwrap())),
            b'x' => *xattrs.entry(at).or_default() += 1,
            b'm' => {
                pages.entry(at).or_default().push(n);
                assert!(
                    !v.is_empty() && v.len() <= 1024 * 32 && v.len().is_multiple_of(32),
                    "digests"
                );
            }
            b's' => assert!(fs.ns.session(at).is_some()),
            b'r' => drop(replies.insert((at, n))),
            b'o' => drop(orphans.insert(at)),
            b't' => drop(trims.insert(at, pb::Trim::decode(v).unwrap())),
            b'g' => {
                assert!(n < header.next_number && pb::GcRecord::decode(v).unwrap().layout.is_some())
            }
            b'e' => drop(pb::EvictedRecord::decode(v).unwrap()),
            b'w' => {
                assert!(fs.ns.session(at).is_some(), "a writer without a session");
                assert!(u64::from_be_bytes(v[..].try_into().unwrap()) <= header.applied_index);
                *writers.entry(n).or_default() += 1;
            }
            b'l' => {
                let (ino, session, owner, kind) = keys::parse_lock(&k).unwrap();
                assert!(fs.ns.session(session).is_some(), "a lock without a session");
                let spans = pb::LockRecord::decode(v).unwrap().spans;
                assert!(!spans.is_empty());
                if k.len() > keys::LOCK_OWNER {
                    assert_eq!((spans.len(), spans[0].end), (1, n));
                    let write = spans[0].r#type == pb::LockType::LockWrite as i32;
                    ranges.insert(
                        (ino, kind as u8, write, n, session, owner),
                        (spans[0].start, spans[0].pid),
                    );
                }
                for (session, ino) in [(session, ino), (session, 0), (0, ino), (0, 0)] {
                    *locked.entry((session, ino)).or_default() += spans.len() as u64;
                }
            }
            b'j' => {
                super::check_lock_index(&k, &v).unwrap();
                let (kind, write, end, session, owner) = keys::parse_lock_index(&k).unwrap();
                let value = (
                    u64::from_be_bytes(v[..8].try_into().unwrap()),
                    u32::from_be_bytes(v[8..].try_into().unwrap()),
                );
                assert_eq!(
                    index.insert((at, kind as u8, write, end, session, owner), value),
                    None,
                    "in two classes"
                );
            }
            b'k' => {
                let total = pb::LockTotal::decode(v).unwrap();
                assert!(total.ranges > 0 || total.fence > 0);
                assert!(
                    total.ranges > 0
                        || !total.ranged && total.read_classes | total.write_classes == 0
                );
                totals.insert((at, n), total.ranges);
            }
            other => panic!("unknown key prefix {other}"),
        }
    }
    let sparse = inodes.values().any(|r| r.attr.unwrap().sparse);
    let sealed = inodes.values().any(|r| r.seal.is_some());
    let format = if sealed {
        4
    } else if sparse {
        3
    } else {
        1 + u32::from(!locked.is_empty())
    };
    assert!(
        (format..=FORMAT_VERSION).contains(&header.format_version),
        "format {}",
        header.format_version
    );
    assert_eq!(header.inodes, inodes.len() as u64);
    assert!(
        totals.keys().all(|(_, ino)| *ino == 0 || inodes.contains_key(ino)),
        "locks of a file that is gone"
    );
    totals.retain(|_, ranges| *ranges > 0);
    assert_eq!(locked, totals);
    assert_eq!(ranges, index, "the index of locks");
    assert_eq!(header, fs.ns.header());
    for (ino, kind) in kinds {
        assert_eq!(inodes[&ino].attr.unwrap().mode >> 12, kind, "type in the name of {ino}");
    }
    for (ino, r) in &inodes {
        let a = r.attr.unwrap();
        let mut known: Vec<_> = r.links.iter().map(|l| (l.parent, l.name.clone())).collect();
        let mut real = names.remove(ino).unwrap_or_default();
        let nlink = real.len() as u32;
        known.sort();
        real.sort();
        assert_eq!(a.ino, *ino);
        assert!(*ino < header.next_ino && a.change > 0);
        assert_eq!(a.acls, super::acl::kinds(r), "acls of {ino}");
        if nlink <= 32 && known.len() == real.len() {
            assert_eq!(known, real, "links of {ino}");
        } else {
            assert!(known.iter().all(|l| real.contains(l)) && nlink > 0, "links of {ino}");
        }
        if a.mode & inode::S_IFMT == inode::S_IFDIR {
            assert_eq!(a.nlink, 2 + subdirs.get(ino).unwrap_or(&0), "nlink of directory {ino}");
            assert_eq!(r.entries, in_dir.remove(ino).unwrap_or(0), "entries of {ino}");
            assert_eq!(nlink, u32::from(*ino != ROOT), "names of directory {ino}");
        } else {
            assert_eq!(a.nlink, nlink, "nlink of {ino}");
        }
        assert_eq!(a.nlink == 0, orphans.remove(ino), "orphan {ino}");
        assert_eq!(r.trim, trims.remove(ino), "trim of {ino}");
        assert_eq!(r.writers, writers.remove(ino).unwrap_or(0), "writers of {ino}");
        assert!(!r.surplus || r.writers > 0, "surplus of {ino} that nobody keeps from being cut");
        assert_eq!(r.xattrs, xattrs.remove(ino).unwrap_or(0), "xattrs of {ino}");
        let seal = r.seal.clone().unwrap_or_default();
        let digests = pages.remove(ino).unwrap_or_default();
        assert_eq!(digests, (0..seal.pages).collect::<Vec<_>>(), "pages of {ino}");
        assert!(seal.manifest.is_none_or(|m| m.size == a.size && seal.pages == strake_proto::seal::pages(a.size)));
        assert!(
            r.seal.is_none() || r.writers == 0 && r.trim.is_none() && a.nlink > 0,
            "{ino} is sealed"
        );
        assert_eq!(r.layout.is_some(), a.mode & inode::S_IFMT == inode::S_IFREG);
    }
    assert!(
        names.is_empty() && in_dir.is_empty() && xattrs.is_empty(),
        "{names:?} {in_dir:?} {xattrs:?}"
    );
    assert!(pages.is_empty(), "pages of no file: {pages:?}");
    assert!(orphans.is_empty() && trims.is_empty(), "{orphans:?} {trims:?}");
    let memory = fs.ns.state.memory.read();
    let kept = memory.sessions.iter().flat_map(|(id, s)| s.seqs.iter().map(move |n| (*id, *n)));
    assert_eq!(kept.collect::<BTreeSet<_>>(), replies);
    assert_eq!(memory.uuids.len(), memory.sessions.len());
}

impl Drop for Fs {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            fsck(self);
        }
    }
}
