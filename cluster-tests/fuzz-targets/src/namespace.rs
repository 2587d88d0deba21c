//! Applies log entries to the namespace. Whatever they contain, it must not panic, and two members
//! that apply them in other batches, with restarts in between, must get the same state and give the
//! same replies.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use bytes::Bytes;
use prost::Message;
use strake_mds::{cluster::chain_table::make_chains, namespace::Namespace};
use strake_proto::{
    FEATURE_LEVEL,
    pb::{self, log_command::Command, op::Op, seal::Step},
};
use strake_store::{Batch, MemStore, MetaStore, Reader};

use crate::input::Input;

const T0: i64 = 1_700_000_000_000_000_000;

/// The first byte chooses between entries only, and a state that has strange records.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    if i.u8().is_multiple_of(4) { strange_state(&mut i) } else { two_members(&mut i) }
}

/// A member: a namespace and its store.
struct Member {
    store: MemStore,
    ns: Namespace,
    index: u64,
}

fn entry(now_ns: i64, command: Command) -> Bytes {
    pb::LogCommand { now_ns, command: Some(command) }.encode_to_vec().into()
}

impl Member {
    /// A formatted file system with two storage servers, their chains and two sessions.
    fn new() -> Member {
        let store = MemStore::new();
        let ns = Namespace::open(Arc::new(store.clone())).expect("an empty store");
        let mut m = Member { store, ns, index: 0 };
        m.good(Command::Format(pb::Format {
            fs_uuid: vec![7; 16].into(),
            fs_name: "fuzz".into(),
            name_hash_key: vec![9; 16].into(),
            default_copies: 1,
            root_mode: 0o1777,
            root_uid: 0,
            root_gid: 0,
            placement: 1,
            level: 0,
        }));
        for n in 0..2u8 {
            let target = pb::RegisterTarget {
                uuid: vec![n + 1; 16].into(),
                capacity: 1 << 40,
                stamp: 1,
                id: u32::MAX,
                ..Default::default()
            };
            m.good(Command::Register(pb::RegisterRequest {
                name: format!("oss{n}"),
                endpoints: vec![format!("tcp:oss{n}:7000")],
                targets: vec![target],
                ..Default::default()
            }));
        }
        let map = m.ns.map();
        let targets =
            map.map.targets.iter().map(|t| pb::Target { alive: true, ..t.clone() }).collect();
        m.good(Command::MapUpdate(pb::MapUpdate {
            expect_version: map.version(),
            targets,
            ..Default::default()
        }));
        let map = m.ns.map();
        let (chains, sets) = make_chains(&map.map, 1).expect("live targets");
        m.good(Command::MapUpdate(pb::MapUpdate {
            expect_version: map.version(),
            chains,
            sets,
            ..Default::default()
        }));
        for n in 0..2 {
            let client_uuid = vec![n; 16].into();
            m.good(Command::SessionOpen(pb::SessionOpenRequest {
                client_uuid,
                ..Default::default()
            }));
        }
        m
    }

    fn good(&mut self, command: Command) {
        let replies = self.apply(&[entry(T0, command)]);
        assert!(replies[0].status.is_none(), "{replies:?}");
    }

    fn apply(&mut self, entries: &[Bytes]) -> Vec<pb::LogReply> {
        let numbered: Vec<_> =
            entries.iter().zip(self.index + 1..).map(|(e, n)| (n, 1, e.clone())).collect();
        self.index += entries.len() as u64;
        self.ns.apply(&numbered, (self.index, 1), None).expect("the store works")
    }

    fn restart(&mut self) {
        self.ns = Namespace::open(Arc::new(self.store.clone())).expect("what it wrote itself");
    }

    fn state(&self) -> BTreeMap<Bytes, Bytes> {
        self.store
            .range(Bound::Unbounded, Bound::Unbounded)
            .collect::<Result<_, _>>()
            .expect("the store works")
    }
}

/// A few names, so that operations meet.
fn name(i: &mut Input) -> Bytes {
    match i.u8() % 16 {
        n @ 0..10 => vec![b'a' + n].into(),
        10 => Bytes::from_static(b".."),
        11 => Bytes::from_static(b"."),
        12 => vec![b'x'; 255].into(),
        _ => Bytes::copy_from_slice(i.bytes()),
    }
}

fn ino(i: &mut Input) -> u64 {
    match i.u8() {
        255 => i.u64(),
        n => u64::from(n % 16),
    }
}

fn spec(i: &mut Input) -> pb::LayoutSpec {
    let raw = i.bytes();
    pb::LayoutSpec::decode(raw).unwrap_or_else(|_| {
        let mut i = Input(raw);
        pb::LayoutSpec {
            stripe_size: u32::from(i.u8()) << 16,
            stripe_count: i32::from(i.u8() as i8),
            overstripe: i32::from(i.u8() as i8),
            start: (i.u8() & 1 == 1).then(|| i.number() as u32),
            targets: i.bytes().iter().map(|b| u32::from(*b)).collect(),
            pool: String::new(),
            copies: u32::from(i.u8()),
        }
    })
}

fn acl_name(i: &mut Input) -> Bytes {
    let name: &[u8] =
        if i.u8() & 1 == 1 { b"system.posix_acl_access" } else { b"system.posix_acl_default" };
    Bytes::from_static(name)
}

/// A list with the right version, made of choices or of arbitrary bytes.
fn acl(i: &mut Input) -> Bytes {
    let mut b = vec![2, 0, 0, 0];
    if i.u8() & 1 == 1 {
        b.extend_from_slice(i.bytes());
        return b.into();
    }
    for tag in [1u8, 2, 4, 8, 16, 32] {
        let (perm, id) = (i.u8(), u32::from(i.u8()));
        b.extend([tag, 0, perm & 7, 0]);
        b.extend(id.to_le_bytes());
    }
    b.into()
}

/// Owner, kind and range of a lock: only a few, so that locks meet.
pub fn lock(i: &mut Input) -> (u64, i32, Option<pb::LockSpan>) {
    let how = i.u8();
    let (start, len) = (i.number(), i.number());
    let end = if how & 8 == 0 { u64::MAX } else { start.wrapping_add(len) };
    let span = pb::LockSpan { start, end, r#type: i32::from(how & 3), pid: 1 };
    (u64::from(i.u8() % 3), i32::from(how >> 4 & 1), (how != 255).then_some(span))
}

/// A step of sealing, with small files and small seal ids, so that steps may fit together.
fn seal(i: &mut Input) -> pb::Seal {
    let how = i.u8();
    let digests = || Bytes::from(vec![how; 32 * usize::from(how >> 4 & 3)]);
    let step = match how % 5 {
        0 => None,
        1 => Some(Step::Begin(pb::SealBegin {})),
        2 => Some(Step::Page(pb::SealPage { number: u64::from(how >> 6), digests: digests() })),
        3 => {
            let sum = Bytes::from(vec![how; 32]);
            let (size, extent_size) = (i.number(), 4 << 20);
            Some(Step::Finish(pb::Manifest {
                size,
                extent_size,
                sha256: sum.clone(),
                root: sum,
                time_ns: 0,
            }))
        }
        _ => Some(Step::Undo(pb::SealUndo {})),
    };
    pb::Seal { ino: ino(i), id: u64::from(i.u8()), step }
}

fn op(i: &mut Input) -> pb::Op {
    let op = match i.u8() % 32 {
        0 => Op::Create(pb::Create {
            parent: ino(i),
            name: name(i),
            mode: u32::from(i.u16()),
            exclusive: i.u8() & 1 == 1,
            layout: (i.u8() & 1 == 1).then(|| spec(i)),
            flags: u32::from(i.u8()),
            umask: 0,
        }),
        1 => Op::Mkdir(pb::Mkdir {
            parent: ino(i),
            name: name(i),
            mode: u32::from(i.u16()),
            umask: 0,
        }),
        2 => Op::Mknod(pb::Mknod {
            parent: ino(i),
            name: name(i),
            mode: u32::from(i.u16()),
            rdev: i.u32(),
            umask: 0,
        }),
        3 => Op::Symlink(pb::Symlink {
            parent: ino(i),
            name: name(i),
            target: Bytes::copy_from_slice(i.bytes()),
        }),
        4 => Op::Link(pb::Link { ino: ino(i), parent: ino(i), name: name(i) }),
        5 => Op::Unlink(pb::Unlink { parent: ino(i), name: name(i) }),
        6 => Op::Rmdir(pb::Rmdir { parent: ino(i), name: name(i) }),
        7 | 8 => Op::Rename(pb::Rename {
            parent: ino(i),
            name: name(i),
            new_parent: ino(i),
            new_name: name(i),
            flags: u32::from(i.u8() % 4),
        }),
        9 => Op::Setattr(pb::SetAttr {
            ino: ino(i),
            mode: (i.u8() & 1 == 1).then(|| u32::from(i.u16())),
            uid: (i.u8() & 1 == 1).then(|| i.number() as u32),
            gid: (i.u8() & 1 == 1).then(|| i.number() as u32),
            size: (i.u8() & 1 == 1).then(|| i.number()),
            mtime_ns: (i.u8() & 1 == 1).then(|| i.number() as i64),
            ..Default::default()
        }),
        10 => Op::Setxattr(pb::SetXattr {
            ino: ino(i),
            name: Bytes::from([b"user.", &name(i)[..]].concat()),
            value: Bytes::copy_from_slice(i.bytes()),
            flags: u32::from(i.u8() % 4),
        }),
        11 => Op::Removexattr(pb::RemoveXattr {
            ino: ino(i),
            name: Bytes::from([b"user.", &name(i)[..]].concat()),
        }),
        12 => Op::Extend(pb::Extend { ino: ino(i), end: i.number(), holes: i.u8() & 1 == 1 }),
        13 => {
            Op::Setlayout(pb::SetLayout { ino: ino(i), layout: (i.u8() & 1 == 1).then(|| spec(i)) })
        }
        14 => Op::Lookup(pb::Lookup { parent: ino(i), name: name(i) }),
        15 => Op::Getattr(pb::GetAttr { ino: ino(i) }),
        16 => Op::Open(pb::Open { ino: ino(i), flags: u32::from(i.u8()) }),
        17 => Op::Readdir(pb::Readdir {
            dir: ino(i),
            cookie: i.number(),
            limit: u32::from(i.u8()),
            attrs: i.u8() & 1 == 1,
        }),
        18 => Op::Readlink(pb::Readlink { ino: ino(i) }),
        19 => Op::Getxattr(pb::GetXattr {
            ino: ino(i),
            name: Bytes::from([b"user.", &name(i)[..]].concat()),
        }),
        20 => Op::Listxattr(pb::ListXattr { ino: ino(i) }),
        21 => Op::Statfs(pb::Statfs::default()),
        22 => Op::Getlayout(pb::GetLayout { ino: ino(i) }),
        23 => Op::PathOf(pb::PathOf { ino: ino(i) }),
        24 => Op::Access(pb::Access { ino: ino(i), mask: u32::from(i.u8()) }),
        28 | 29 => {
            let (owner, kind, span) = lock(i);
            Op::SetLock(pb::SetLock {
                ino: ino(i),
                owner,
                kind,
                span,
                undo: i.u8() & 1 == 1,
                ..Default::default()
            })
        }
        30 => {
            let (owner, kind, span) = lock(i);
            Op::GetLock(pb::GetLock { ino: ino(i), owner, kind, span })
        }
        25 => Op::Tmpfile(pb::Tmpfile {
            parent: ino(i),
            mode: u32::from(i.u16()),
            umask: u32::from(i.u16()),
            flags: u32::from(i.u8()),
            linkable: i.u8() & 1 == 1,
            layout: None,
        }),
        26 => {
            Op::Setxattr(pb::SetXattr { ino: ino(i), name: acl_name(i), value: acl(i), flags: 0 })
        }
        27 => Op::Removexattr(pb::RemoveXattr { ino: ino(i), name: acl_name(i) }),
        31 => Op::Seal(seal(i)),
        _ => return pb::Op::decode(i.bytes()).unwrap_or_default(),
    };
    pb::Op { op: Some(op) }
}

/// Root and other users, with or without groups.
fn creds(i: &mut Input) -> pb::Creds {
    match i.u8() % 4 {
        0 => pb::Creds { uid: 5, gid: 5, groups: vec![6] },
        1 => pb::Creds { uid: i.number() as u32, gid: i.number() as u32, groups: vec![] },
        _ => pb::Creds::default(),
    }
}

fn ops(i: &mut Input) -> Vec<pb::Op> {
    (0..1 + i.u8() % 4).map(|_| op(i)).collect()
}

fn repair(i: &mut Input) -> pb::Repair {
    use pb::repair::What;
    let what = match i.u8() % 3 {
        0 => What::Chunks(pb::RepairChunks {
            ino: ino(i),
            data_id: u64::from(i.u8() % 8),
            chains: vec![i.number() as u32 % 4],
            misplaced: i.u8() % 2 == 1,
        }),
        1 => What::End(pb::RepairEnd {
            ino: ino(i),
            data_id: u64::from(i.u8() % 8),
            size: i.number(),
        }),
        _ => What::Name(pb::RepairName {
            parent: ino(i),
            name: Bytes::copy_from_slice(i.bytes()),
            ino: ino(i),
        }),
    };
    pb::Repair { what: Some(what) }
}

/// Whether a member must stop at the entry, because it needs a feature level that is not known here.
fn is_of_later_program(raw: &Bytes) -> bool {
    let level = match pb::LogCommand::decode(raw.clone()).ok().and_then(|c| c.command) {
        Some(Command::RaiseLevel(r)) => r.to,
        Some(Command::Format(f)) => f.level,
        _ => 0,
    };
    level > FEATURE_LEVEL
}

/// A command made of choices or of arbitrary bytes.
pub fn command(i: &mut Input) -> Bytes {
    let now = T0 + i64::from(i.u8());
    let c = match i.u8() % 24 {
        0 => {
            let raw = Bytes::copy_from_slice(i.bytes());
            return if is_of_later_program(&raw) { Bytes::new() } else { raw };
        }
        1 => Command::SessionOpen(pb::SessionOpenRequest {
            client_uuid: vec![i.u8() % 4; 16].into(),
            ..Default::default()
        }),
        2 => Command::SessionEnd(pb::SessionEnd {
            sessions: vec![i.number(), i.number()],
            evict: i.u8() & 1 == 1,
        }),
        3 => Command::GcDone(pb::GcDone { numbers: vec![i.number(), i.number()] }),
        4 => Command::TrimDone(pb::TrimDone { ino: ino(i), number: i.number() }),
        5 => Command::FreeOrphans(pb::FreeOrphans { inos: vec![ino(i), ino(i)] }),
        6 => Command::PoolChange(pb::PoolChange {
            pool: "p".into(),
            action: u32::from(i.u8() % 6),
            targets: vec![i.number() as u32],
        }),
        7 => Command::Register(pb::RegisterRequest::decode(i.bytes()).unwrap_or_default()),
        8 => Command::MapUpdate(map_update(i)),
        9 => Command::MdsNodes(pb::MdsNodes::decode(i.bytes()).unwrap_or_default()),
        10 => {
            let (target, action, flags) = (u32::from(i.u8() % 4), u32::from(i.u8() % 5), i.u8());
            let heir = (flags & 1 == 1).then(|| i.number() as u32 % 4);
            let slow = (flags & 2 == 2).then(pb::Slow::default);
            Command::TargetChange(pb::TargetChange { target, action, heir, slow })
        }
        11 => Command::Repair(repair(i)),
        12 => {
            let (ino, fence, change, end) =
                (ino(i), u64::from(i.u8() % 16), u64::from(i.u8() % 8), i.number());
            Command::EndFound(pb::EndFound { ino, fence, change, end })
        }
        14 => Command::ChainsAnew(pb::ChainsAnew { chains: map_update(i).chains }),
        15 => Command::RaiseLevel(pb::RaiseLevel { to: u32::from(i.u8()) % (FEATURE_LEVEL + 1) }),
        13 => Command::Settings(pb::Settings { min_copies: u32::from(i.u8() % 5) }),
        _ => Command::Meta(pb::MetaRequest {
            session: u64::from(i.u8() % 4),
            seq: i.number(),
            lowest_unanswered: i.number(),
            creds: Some(creds(i)),
            ops: ops(i),
            connection: u64::from(i.u8() % 4),
            dropped: vec![ino(i)],
            follower: false,
            ends_matter: i.u8().is_multiple_of(2),
            rules: u32::from(i.u8() % 5),
        }),
    };
    entry(now, c)
}

fn map_update(i: &mut Input) -> pb::MapUpdate {
    let decoded = pb::MapUpdate::decode(i.bytes()).unwrap_or_default();
    let (id, states) = (1 + u32::from(i.u8() % 4), i.u8());
    let state = |shift: u8| i32::from(states >> shift & 7);
    let chain = pb::Chain {
        id,
        epoch: i.number(),
        replicas: (0..2).map(|t| pb::Replica { target: t, state: state(3 * t as u8) }).collect(),
        preferred: vec![0, 1],
        lost: false,
    };
    let mut chains = decoded.chains;
    chains.push(chain);
    pb::MapUpdate { expect_version: u64::from(i.u8() % 16), chains, ..decoded }
}

fn two_members(i: &mut Input) {
    let (mut one, mut other) = (Member::new(), Member::new());
    let (mut waiting, mut replies) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        if i.is_empty() {
            break;
        }
        match i.u8() % 8 {
            0 => {
                let (creds, ops, session) = (creds(i), ops(i), u64::from(i.u8() % 4));
                let reply = one.ns.read(session, &creds, &ops);
                assert!(reply.results.len() <= ops.len().max(1));
            }
            1 => {
                one.restart();
                let got = other.apply(&std::mem::take(&mut waiting));
                assert_eq!(got, std::mem::take(&mut replies));
            }
            _ => {
                let c = command(i);
                replies.extend(one.apply(std::slice::from_ref(&c)));
                waiting.push(c);
            }
        }
    }
    assert_eq!(other.apply(&waiting), replies);
    assert_eq!(one.state(), other.state());
    let _ = (
        one.ns.backlog().gc_queue(100),
        one.ns.backlog().trims(100),
        one.ns.backlog().orphans(100),
        one.ns.backlog().evicted_after(0),
    );
}

/// Records that our programs never write: the state must refuse to open, or answer with errors.
fn strange_state(i: &mut Input) {
    let mut m = Member::new();
    for _ in 0..i.u8() % 8 {
        m.apply(&[command(i)]);
    }
    let keys: Vec<Bytes> = m.state().into_keys().collect();
    for _ in 0..1 + i.u8() % 4 {
        let key = match i.u8() {
            255 => Bytes::copy_from_slice(i.bytes()),
            n => keys[usize::from(n) % keys.len()].clone(),
        };
        let value = match i.u8() % 4 {
            0 => None,
            // Fields that are appended to a record replace earlier ones.
            1 => m
                .store
                .get(&key)
                .expect("the store works")
                .map(|v| Bytes::from([&v[..], i.bytes()].concat())),
            _ => Some(Bytes::copy_from_slice(i.bytes())),
        };
        let _ = m.store.commit(Batch { ops: vec![(key, value)] });
    }
    let Ok(ns) = Namespace::open(Arc::new(m.store.clone())) else { return };
    m.index = ns.header().applied_index;
    m.ns = ns;
    for _ in 0..16 {
        if i.is_empty() {
            break;
        }
        if i.u8() & 1 == 0 {
            let (creds, ops) = (creds(i), ops(i));
            m.ns.read(0, &creds, &ops);
        } else {
            let Some(next) = m.index.checked_add(1) else { break };
            if m.ns.apply(&[(next, 1, command(i))], (next, 1), None).is_ok() {
                m.index = next;
            }
        }
    }
    let _ = (
        m.ns.backlog().gc_queue(100),
        m.ns.backlog().trims(100),
        m.ns.backlog().orphans(100),
        m.ns.backlog().evicted_after(0),
    );
}
