//! Extreme numbers and names in every operation and every command. An entry that panics stops all
//! members, and stops them again after each restart, so whatever a log holds is refused or applied,
//! and leaves a valid state.

use std::mem::discriminant;

use strake_proto::layout::MAX_FILE_SIZE;
use strake_store::{Batch, MetaStore as _};

use super::*;
use pb::{repair::What, seal::Step};

const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    255,
    65_000,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 48,
    MAX_FILE_SIZE,
    MAX_FILE_SIZE + 1,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Operations that there are; [`is_known`] does not compile with another one.
const OPS: usize = 31;
/// Commands that there are; [`is_known_command`] does not compile with another one.
const COMMANDS: usize = 19;

fn is_known(op: &Op) {
    use Op::*;
    match op {
        Lookup(_) | Getattr(_) | Open(_) | Close(_) | Readdir(_) | Readlink(_) | Getxattr(_)
        | Listxattr(_) | Statfs(_) | Getlayout(_) | PathOf(_) | Access(_) | GetLock(_)
        | GetSeal(_) | Create(_) | Mkdir(_) | Mknod(_) | Symlink(_) | Link(_) | Unlink(_)
        | Rmdir(_) | Rename(_) | Setattr(_) | Setxattr(_) | Removexattr(_) | Extend(_)
        | Setlayout(_) | Release(_) | SetLock(_) | Tmpfile(_) | Seal(_) => {}
    }
}

fn is_known_command(c: &Command) {
    use Command::*;
    match c {
        Format(_) | Meta(_) | SessionOpen(_) | SessionEnd(_) | Register(_) | MapUpdate(_)
        | GcDone(_) | TrimDone(_) | FreeOrphans(_) | MdsNodes(_) | PoolChange(_) | Recover(_)
        | GiveUp(_) | TargetChange(_) | Repair(_) | EndFound(_) | Settings(_) | ChainsAnew(_)
        | RaiseLevel(_) => {}
    }
}

fn names() -> Vec<Bytes> {
    let long = |n| Bytes::from(vec![b'x'; n]);
    let mut all = vec![long(255), long(256), long(4095), long(4096), long((64 << 10) + 1)];
    all.extend(["", "f", "d", "new", ".", "..", "a/b", "\0"].map(bytes));
    all.extend(["user.", "user.x", "trusted.x", "security.capability"].map(bytes));
    all.extend(["system.posix_acl_access", "system.posix_acl_default"].map(bytes));
    all
}

fn spec(n: u64) -> pb::LayoutSpec {
    pb::LayoutSpec {
        stripe_size: n as u32,
        stripe_count: n as i32,
        overstripe: n as i32,
        start: Some(n as u32),
        targets: if n == 2 { vec![n as u32; 2001] } else { vec![] },
        pool: String::new(),
        copies: n as u32,
    }
}

/// A specification that differs from the default only in one number.
fn specs(n: u64) -> Vec<pb::LayoutSpec> {
    let plain = pb::LayoutSpec::default;
    vec![
        spec(n),
        pb::LayoutSpec { stripe_size: n as u32, ..plain() },
        pb::LayoutSpec { stripe_count: n as i32, ..plain() },
        pb::LayoutSpec { overstripe: n as i32, ..plain() },
        pb::LayoutSpec { start: Some(n as u32), ..plain() },
        pb::LayoutSpec { targets: vec![n as u32; 3], ..plain() },
        pb::LayoutSpec { copies: n as u32, ..plain() },
    ]
}

/// Operations on a name in a directory.
fn on_name(parent: Ino, name: &Bytes, n: u64) -> Vec<Op> {
    let (name, n32) = (name.clone(), n as u32);
    let (mode, umask, flags) = (n32, n32, n32);
    let create =
        pb::Create { parent, name: name.clone(), mode, umask, flags, ..Default::default() };
    let renames = [0, 1, 2, 4, n32].map(|flags| {
        let (new_parent, new_name) = (ROOT, bytes("renamed"));
        Op::Rename(pb::Rename { parent, name: name.clone(), new_parent, new_name, flags })
    });
    let back = pb::Rename {
        parent: ROOT,
        name: bytes("renamed"),
        new_parent: parent,
        new_name: name.clone(),
        flags: 0,
    };
    let mut all = vec![
        Op::Lookup(pb::Lookup { parent, name: name.clone() }),
        Op::Create(pb::Create { exclusive: true, ..create.clone() }),
        Op::Create(create),
        Op::Mkdir(pb::Mkdir { parent, name: name.clone(), mode, umask }),
        Op::Mknod(pb::Mknod { parent, name: name.clone(), mode, rdev: n32, umask }),
        Op::Symlink(pb::Symlink { parent, name: name.clone(), target: name.clone() }),
        Op::Symlink(pb::Symlink { parent, name: bytes("link"), target: name.clone() }),
        Op::Link(pb::Link { ino: n, parent, name: name.clone() }),
        Op::Link(pb::Link { ino: 0, parent, name: name.clone() }),
    ];
    all.extend(renames);
    all.extend([
        Op::Rename(back),
        Op::Unlink(pb::Unlink { parent, name: name.clone() }),
        Op::Rmdir(pb::Rmdir { parent, name }),
    ]);
    all
}

/// Operations on an extended attribute.
fn on_xattr(ino: Ino, name: &Bytes, n: u64) -> Vec<Op> {
    let (name, flags) = (name.clone(), n as u32);
    let value = Bytes::from(vec![2; (n % (70 << 10)) as usize]);
    let set = |flags, value| Op::Setxattr(pb::SetXattr { ino, name: name.clone(), value, flags });
    vec![
        set(0, value.clone()),
        set(flags, value),
        set(0, Bytes::new()),
        Op::Getxattr(pb::GetXattr { ino, name: name.clone() }),
        Op::Removexattr(pb::RemoveXattr { ino, name: name.clone() }),
    ]
}

/// All others.
fn on_inode(ino: Ino, n: u64) -> Vec<Op> {
    let (n32, time) = (n as u32, n as i64);
    let span = |start, end, kind| pb::LockSpan { start, end, r#type: kind, pid: n32 };
    let set = pb::SetAttr { ino, ..Default::default() };
    let manifest = pb::Manifest {
        size: n,
        extent_size: n,
        sha256: vec![1; 32].into(),
        root: vec![1; 32].into(),
        time_ns: time,
    };
    let page = |digests: usize| pb::SealPage { number: n, digests: vec![1; digests].into() };
    let seal = |id, step| Op::Seal(pb::Seal { ino, id, step: Some(step) });
    let mut all = vec![
        Op::Getattr(pb::GetAttr { ino }),
        Op::Open(pb::Open { ino, flags: n32 }),
        Op::Close(pb::Close { ino }),
        Op::Readdir(pb::Readdir { dir: ino, cookie: n, limit: n32, attrs: true }),
        Op::Readlink(pb::Readlink { ino }),
        Op::Listxattr(pb::ListXattr { ino }),
        Op::Statfs(pb::Statfs { dir: ino, pool: "none".into() }),
        Op::Statfs(pb::Statfs { dir: ino, pool: String::new() }),
        Op::Getlayout(pb::GetLayout { ino }),
        Op::PathOf(pb::PathOf { ino }),
        Op::Access(pb::Access { ino, mask: n32 }),
        Op::Tmpfile(pb::Tmpfile {
            parent: ino,
            mode: n32,
            umask: n32,
            flags: n32,
            linkable: true,
            layout: None,
        }),
        Op::Setattr(pb::SetAttr { size: Some(n), holes: true, ..set }),
        Op::Setattr(pb::SetAttr { mode: Some(n32), ..set }),
        Op::Setattr(pb::SetAttr { uid: Some(n32), gid: Some(n32), ..set }),
        Op::Setattr(pb::SetAttr { atime_ns: Some(time), mtime_ns: Some(time), ..set }),
        Op::Setattr(pb::SetAttr { drop_privileges: true, size: Some(1), ..set }),
        Op::Extend(pb::Extend { ino, end: n, holes: true }),
        Op::Release(pb::Release { ino, writer: n, surplus: true }),
        Op::GetSeal(pb::GetSeal { ino, page: Some(n) }),
        seal(0, Step::Begin(pb::SealBegin {})),
        seal(n, Step::Page(page(32))),
        seal(n, Step::Page(page(0))),
        seal(n, Step::Finish(manifest)),
        seal(n, Step::Undo(pb::SealUndo {})),
        seal(0, Step::Undo(pb::SealUndo {})),
    ];
    for layout in specs(n) {
        all.push(Op::Setlayout(pb::SetLayout { ino, layout: Some(layout) }));
    }
    for kind in [0, 1, n as i32] {
        for (start, end) in [(n, u64::MAX), (0, n), (n, 0), (0, u64::MAX)] {
            for r#type in [2, 0] {
                let span = Some(span(start, end, r#type));
                all.push(Op::GetLock(pb::GetLock { ino, owner: n, kind, span }));
                all.push(Op::SetLock(pb::SetLock {
                    ino,
                    owner: n,
                    kind,
                    span,
                    undo: true,
                    patient: true,
                    wait: n,
                }));
            }
        }
    }
    all
}

/// Every command but those that run operations or end the session.
fn commands(fs: &Fs, n: u64) -> Vec<Command> {
    let (map, n32) = (fs.ns.map(), n as u32);
    let (target, chain) = (map.map.targets[0].clone(), map.map.chains[0].clone());
    let set = map.map.sets[0].clone();
    let node = pb::Node { id: n32, role: 1, name: "m".into(), ..Default::default() };
    let update = pb::MapUpdate { expect_version: map.version(), ..Default::default() };
    let targets = |t: pb::Target| pb::MapUpdate { targets: vec![t], ..update.clone() };
    let chains = |c: pb::Chain| pb::MapUpdate { chains: vec![c], ..update.clone() };
    let sight =
        pb::ChainSight { chain: chain.id, epoch: n, replicas: chain.replicas.clone(), lived: true };
    let register = |uuid: u8, id, stamp| pb::RegisterRequest {
        name: "oss0".into(),
        endpoints: vec!["tcp:oss0:7000".into()],
        targets: vec![pb::RegisterTarget {
            uuid: vec![uuid; 16].into(),
            capacity: n,
            stamp,
            id,
            sights: vec![sight.clone()],
            follows: Some(n),
        }],
        version: "1".into(),
        incarnation: n,
        ..Default::default()
    };
    let slow =
        pb::Slow { since_ms: n, what: n32, each_us: n, peers_us: n, median_us: n, p99_us: n };
    let repair = |what| Command::Repair(pb::Repair { what: Some(what) });
    let mut all = vec![
        format(),
        Command::Register(register(1, u32::MAX, n)),
        Command::Register(register(1, n32, 1)),
        Command::Register(register(99, u32::MAX, 1)),
        Command::Register(register(98, n32, n)),
        Command::MapUpdate(pb::MapUpdate { expect_version: n, ..Default::default() }),
        Command::MapUpdate(targets(pb::Target {
            capacity: n,
            used: n,
            alive: true,
            ..target.clone()
        })),
        Command::MapUpdate(targets(pb::Target {
            capacity: n,
            used: 0,
            stamp: n,
            ..target.clone()
        })),
        Command::MapUpdate(targets(pb::Target { id: n32, node: n32, ..target })),
        Command::MapUpdate(chains(pb::Chain { epoch: n, ..chain.clone() })),
        Command::MapUpdate(chains(pb::Chain { id: n32, epoch: 1, ..chain.clone() })),
        Command::MapUpdate(chains(pb::Chain { preferred: vec![n32; 17], ..chain.clone() })),
        Command::MapUpdate(pb::MapUpdate { nodes: vec![node.clone()], ..update.clone() }),
        Command::MapUpdate(pb::MapUpdate {
            sets: vec![pb::ChainSet { id: n32, copies: n32, ..set }],
            ..update.clone()
        }),
        Command::MdsNodes(pb::MdsNodes { nodes: vec![node], gone: vec![n32] }),
        Command::GcDone(pb::GcDone { numbers: vec![n, n] }),
        Command::TrimDone(pb::TrimDone { ino: n, number: n }),
        Command::FreeOrphans(pb::FreeOrphans { inos: vec![n, n] }),
        Command::GiveUp(pb::GiveUp { targets: vec![n32] }),
        Command::EndFound(pb::EndFound { ino: n, fence: n, change: n, end: n }),
        Command::Settings(pb::Settings { min_copies: n32 }),
        // An unknown level stops a member, as it must.
        Command::RaiseLevel(pb::RaiseLevel { to: n32.min(1) }),
        Command::ChainsAnew(pb::ChainsAnew { chains: vec![pb::Chain { epoch: n, ..chain }] }),
        repair(What::Chunks(pb::RepairChunks {
            ino: n,
            data_id: n,
            chains: vec![n32],
            misplaced: true,
        })),
        repair(What::End(pb::RepairEnd { ino: n, data_id: n, size: n })),
        repair(What::Name(pb::RepairName { parent: n, name: bytes("f"), ino: n })),
        repair(What::Name(pb::RepairName { parent: ROOT, name: bytes("f"), ino: n })),
    ];
    for action in [0, 1, 2, 3, 4, n32] {
        let targets = vec![n32, 1];
        all.push(Command::PoolChange(pb::PoolChange { pool: "p".into(), action, targets }));
        for target in [0, n32] {
            let heir = (action == 1).then_some(n32);
            let change = pb::TargetChange { target, action, heir, slow: None };
            all.push(Command::TargetChange(change));
        }
    }
    let target = 1;
    let drain = pb::TargetChange { target, action: 1, heir: None, slow: Some(slow) };
    all.push(Command::TargetChange(drain));
    all.push(Command::TargetChange(pb::TargetChange { target, action: 2, heir: None, slow: None }));
    all
}

/// Ends sessions; the last one begins the group anew.
fn endings(session: u64, n: u64) -> Vec<Command> {
    let end = |sessions, evict| Command::SessionEnd(pb::SessionEnd { sessions, evict });
    let open = pb::SessionOpenRequest {
        client_uuid: vec![9; 16].into(),
        hostname: "h".repeat((n % 300) as usize),
        pid: n,
        dead: vec![vec![1; 16].into()],
        write_back: true,
        ..Default::default()
    };
    let recover = |incarnation| Command::Recover(pb::Recover { incarnation, gone: vec![n as u32] });
    vec![
        end(vec![n, n], true),
        end(vec![n], false),
        Command::SessionOpen(open.clone()),
        Command::SessionOpen(pb::SessionOpenRequest { dead: vec![], hostname: "h".into(), ..open }),
        end(vec![session], true),
        recover(n),
        recover(1 << 48),
    ]
}

/// Applies entries and counts what there was.
struct Log {
    fs: Fs,
    ops: Vec<std::mem::Discriminant<Op>>,
    commands: Vec<std::mem::Discriminant<Command>>,
}

impl Log {
    fn apply(&mut self, now: i64, command: Command) -> pb::LogReply {
        is_known_command(&command);
        if !self.commands.contains(&discriminant(&command)) {
            self.commands.push(discriminant(&command));
        }
        self.fs.index += 1;
        let e = (self.fs.index, 1, entry(now, command));
        self.fs.ns.apply(&[e], (self.fs.index, 1), None).unwrap().remove(0)
    }

    /// As a list of its own, and behind a lookup that leads to the file.
    fn op(&mut self, session: u64, rules: u32, one: Op) {
        is_known(&one);
        if !self.ops.contains(&discriminant(&one)) {
            self.ops.push(discriminant(&one));
        }
        self.fs.seq += 1;
        let m = pb::MetaRequest {
            session,
            seq: self.fs.seq,
            lowest_unanswered: self.fs.seq,
            creds: Some(creds(0)),
            ops: vec![op(one)],
            rules,
            ..Default::default()
        };
        let reply = self.apply(0, Command::Meta(m));
        assert_eq!(reply.status, None, "an operation is answered, whatever it is");
    }
}

/// Every kind of file, one of them written, locked and open.
fn fixture() -> (Log, Vec<Ino>) {
    let mut fs = Fs::with_chains(2);
    let dir = fs.mkdir(ROOT, "d");
    let files = ["f", "g", "s"].map(|name| fs.create(ROOT, name));
    let written = fs.index;
    fs.one(mk_size(files[0], 1 << 20));
    fs.one(Op::Open(pb::Open { ino: files[0], flags: 2 }));
    // Nobody writes the last one: it can be sealed.
    fs.one(Op::Release(pb::Release { ino: files[2], writer: written, surplus: false }));
    let link = pb::Symlink { parent: dir, name: bytes("l"), target: bytes("to") };
    let link = fs.one(Op::Symlink(link)).ino;
    let held = fs.create(dir, "held");
    fs.one(mk_unlink(dir, "held"));
    let inos = vec![ROOT, dir, files[0], files[1], files[2], link, held, 0];
    (Log { fs, ops: vec![], commands: vec![] }, inos)
}

/// An update of the map at `before` becomes one of the present map.
fn at_version(command: Command, before: u64, now: u64) -> Command {
    match command {
        Command::MapUpdate(u) if u.expect_version == before => {
            Command::MapUpdate(pb::MapUpdate { expect_version: now, ..u })
        }
        other => other,
    }
}

#[test]
fn no_entry_panics_and_every_state_is_valid() {
    let (mut ops, mut kinds) = (BTreeSet::new(), BTreeSet::new());
    for n in NUMBERS {
        for rules in [0, RULES, u32::MAX] {
            let (mut log, inos) = fixture();
            let session = log.fs.session;
            let version = log.fs.ns.map().version();
            for command in commands(&log.fs, n) {
                let now = log.fs.ns.map().version();
                log.apply(n as i64, at_version(command, version, now));
                fsck(&log.fs);
            }
            for name in names() {
                for parent in [ROOT, inos[1], n] {
                    on_name(parent, &name, n).into_iter().for_each(|o| log.op(session, rules, o));
                }
                for ino in [inos[1], inos[2], n] {
                    on_xattr(ino, &name, n).into_iter().for_each(|o| log.op(session, rules, o));
                }
            }
            fsck(&log.fs);
            for ino in inos.into_iter().chain([n]) {
                on_inode(ino, n).into_iter().for_each(|o| log.op(session, rules, o));
                fsck(&log.fs);
            }
            for command in endings(session, n) {
                log.apply(n as i64, command);
                fsck(&log.fs);
            }
            ops.extend(log.ops.iter().map(|d| format!("{d:?}")));
            kinds.extend(log.commands.iter().map(|d| format!("{d:?}")));
        }
    }
    assert_eq!((ops.len(), kinds.len()), (OPS, COMMANDS), "each has its place in the tables");
}

#[test]
fn requests_with_extreme_numbers_leave_a_valid_state() {
    for n in NUMBERS {
        let (mut log, _) = fixture();
        let session = log.fs.session;
        let request = pb::MetaRequest {
            session,
            seq: 1 << 40,
            creds: Some(creds(0)),
            ops: vec![op(mk_create(ROOT, "new"))],
            rules: RULES,
            ..Default::default()
        };
        for m in [
            pb::MetaRequest { session: n, ..request.clone() },
            pb::MetaRequest { seq: n, ..request.clone() },
            pb::MetaRequest { connection: n, ..request.clone() },
            pb::MetaRequest { lowest_unanswered: n, ..request.clone() },
            pb::MetaRequest { creds: None, ..request.clone() },
            pb::MetaRequest {
                creds: Some(pb::Creds { uid: n as u32, gid: n as u32, groups: vec![n as u32; 99] }),
                seq: 1 << 41,
                ..request
            },
        ] {
            log.apply(n as i64, Command::Meta(m));
        }
    }
}

/// Changes a stored record as if the state had become so by itself.
fn edit<M: Message + Default>(fs: &mut Fs, key: Bytes, change: impl FnOnce(&mut M)) {
    let mut m = M::decode(fs.store.get(&key).unwrap().unwrap()).unwrap();
    change(&mut m);
    fs.store.commit(Batch { ops: vec![(key, Some(m.encode_to_vec().into()))] }).unwrap();
    fs.ns.reload().unwrap();
}

#[test]
fn counters_that_are_used_up_refuse_what_needs_one() {
    let mut fs = Fs::new();
    let (d, f) = (fs.mkdir(ROOT, "d"), fs.create(ROOT, "f"));
    fs.one(mk_size(f, 100));
    fs.as_user(0, |fs| {
        let ino = fs.create(d, "g");
        fs.one(mk_unlink(d, "g"));
        let header = Bytes::from_static(keys::HEADER);
        edit(fs, header, |h: &mut pb::StateHeader| {
            (h.next_ino, h.next_data_id) = (1 << 48, u64::MAX);
            (h.next_session, h.next_number) = (u64::MAX, u64::MAX);
        });
        fs.fails(mk_create(ROOT, "new"), Code::NoSpc);
        fs.fails(mk_size(f, 1), Code::NoSpc);
        let session = fs.session;
        let no_space = |reply: pb::LogReply| {
            assert_eq!(code_of(reply.status.as_ref()), Some(Code::NoSpc));
        };
        no_space(fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![ino] })));
        for evict in [true, false] {
            let end = pb::SessionEnd { sessions: vec![session], evict };
            no_space(fs.log(Command::SessionEnd(end)));
        }
        let client_uuid = vec![77; 16].into();
        let open = pb::SessionOpenRequest { client_uuid, ..Default::default() };
        no_space(fs.log(Command::SessionOpen(open)));
        no_space(fs.log(Command::Recover(pb::Recover { incarnation: 1 << 48, gone: vec![] })));
    });
    assert!(fs.ns.session(fs.session).is_some(), "no session has ended");
}

#[test]
fn counts_that_are_used_up_refuse_one_more() {
    let mut fs = Fs::new();
    let (d, f) = (fs.mkdir(ROOT, "d"), fs.create(ROOT, "f"));
    fs.one(Op::Release(pb::Release { ino: f, writer: fs.index, surplus: false }));
    let inode = |ino| keys::numbered(keys::INODE, ino);
    let before = (fs.record(d).unwrap(), fs.record(f).unwrap());
    edit(&mut fs, inode(d), |r: &mut pb::InodeRecord| r.attr.as_mut().unwrap().nlink = u32::MAX);
    edit(&mut fs, inode(f), |r: &mut pb::InodeRecord| {
        r.attr.as_mut().unwrap().change = u64::MAX;
        (r.layout.as_mut().unwrap().generation, r.writers) = (u32::MAX, u32::MAX);
    });
    let sub = Op::Mkdir(pb::Mkdir { parent: d, name: bytes("sub"), mode: 0o755, umask: 0 });
    fs.fails(sub, Code::MLink);
    fs.fails(Op::Open(pb::Open { ino: f, flags: 2 }), Code::Overloaded);
    edit(&mut fs, inode(f), |r: &mut pb::InodeRecord| r.writers = 0);
    fs.fails(
        Op::Setlayout(pb::SetLayout { ino: f, layout: Some(Default::default()) }),
        Code::Overflow,
    );
    fs.one(mk_size(f, 5));
    assert_eq!(fs.attr(f).change, u64::MAX);
    // What the records say of each other is wrong: refused, and nothing is changed.
    edit(&mut fs, inode(d), |r: &mut pb::InodeRecord| r.links[0].parent = f);
    fs.fails(mk_rmdir(ROOT, "d"), Code::Corrupt);
    fs.fails(mk_rename(ROOT, "d", ROOT, "e", 0), Code::Corrupt);
    edit(&mut fs, inode(f), |r: &mut pb::InodeRecord| r.attr.as_mut().unwrap().nlink = 0);
    fs.fails(mk_unlink(ROOT, "f"), Code::Corrupt);
    edit(&mut fs, inode(f), |r: &mut pb::InodeRecord| *r = before.1.clone());
    edit(&mut fs, inode(d), |r: &mut pb::InodeRecord| *r = before.0.clone());
    edit(&mut fs, inode(ROOT), |r: &mut pb::InodeRecord| r.entries = 0);
    fs.fails(mk_unlink(ROOT, "f"), Code::Corrupt);
    edit(&mut fs, inode(ROOT), |r: &mut pb::InodeRecord| r.entries = 2);
    let mut damaged = fs.record(ROOT).unwrap();
    damaged.attr.as_mut().unwrap().nlink = 2;
    edit(&mut fs, inode(ROOT), |r: &mut pb::InodeRecord| *r = damaged);
    fs.fails(mk_rmdir(ROOT, "d"), Code::Corrupt);
    edit(&mut fs, inode(ROOT), |r: &mut pb::InodeRecord| r.attr.as_mut().unwrap().nlink = 3);
    fs.one(mk_rmdir(ROOT, "d"));
}
