//! Random logs: the same log gives the same bytes, however it is cut into batches, wherever a crash
//! falls and in every version of this program; and every state on the way is whole.

use std::sync::Arc;

use super::*;
use strake_proto::layout::splitmix64;

/// Random numbers that never change.
pub(super) struct Dice(pub u64);

impl Dice {
    pub(super) fn below(&mut self, n: u64) -> u64 {
        splitmix64(&mut self.0) % n
    }
    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub(super) fn name(&mut self) -> Bytes {
        let names =
            ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "some longer name", ".", "..", ""];
        let n = if self.one_in(30) { names.len() } else { 11 };
        bytes(names[self.below(n as u64) as usize])
    }
    fn ino(&mut self, next: u64) -> Ino {
        if self.one_in(10) { 0 } else { 1 + self.below(next + 2) }
    }
    /// Mostly a directory.
    fn dir(&mut self, s: &Seen) -> Ino {
        if self.one_in(10) {
            self.ino(s.next)
        } else {
            s.dirs[self.below(s.dirs.len() as u64) as usize]
        }
    }
    fn size(&mut self) -> u64 {
        let shift = self.below(52);
        splitmix64(&mut self.0) >> 12 >> (51 - shift)
    }
}

/// What there is to choose from.
struct Seen {
    next: Ino,
    index: u64,
    dirs: Vec<Ino>,
    newer: bool,
}

impl Seen {
    fn new(fs: &Fs, newer: bool) -> Seen {
        let inodes =
            fs.store.prefix(&[keys::INODE]).map(|p| pb::InodeRecord::decode(p.unwrap().1).unwrap());
        let attrs = inodes.map(|r| r.attr.unwrap());
        let dirs = attrs.filter(inode::is_dir).map(|a| a.ino).collect();
        Seen { next: fs.ns.header().next_ino, index: fs.index, dirs, newer }
    }
}

fn spec(d: &mut Dice) -> pb::LayoutSpec {
    pb::LayoutSpec {
        stripe_size: [0, 65_536, 1 << 20, 0, 0, 0, 0, 4_096][d.below(8) as usize],
        stripe_count: d.below(5) as i32 - 1,
        overstripe: if d.one_in(5) { d.below(40) as i32 - 3 } else { 0 },
        start: d.one_in(5).then(|| d.below(7) as u32),
        targets: if d.one_in(6) { vec![1, 3] } else { vec![] },
        pool: if d.one_in(6) { "flash".into() } else { String::new() },
        copies: d.below(4) as u32,
    }
}

/// An ACL that need not be valid.
fn acl(d: &mut Dice) -> Bytes {
    let mut b = vec![2, 0, 0, 0];
    for tag in [1u8, 2, 4, 8, 16, 32] {
        if !d.one_in(12) {
            b.extend([tag, 0, d.below(8) as u8, 0]);
            b.extend((d.below(4) as u32).to_le_bytes());
        }
    }
    b.into()
}

/// Changes that the log whose state is fixed does not have.
fn newer_change(d: &mut Dice, seen: &Seen) -> Op {
    let (parent, ino, umask) = (d.dir(seen), d.ino(seen.next), d.below(0o1000) as u32);
    let name = [bytes("system.posix_acl_access"), bytes("system.posix_acl_default")]
        [d.below(2) as usize]
        .clone();
    match d.below(10) {
        0..=2 => Op::Setxattr(pb::SetXattr { ino: parent, name, value: acl(d), flags: 0 }),
        3 => Op::Setxattr(pb::SetXattr { ino, name, value: acl(d), flags: 0 }),
        4 => Op::Removexattr(pb::RemoveXattr { ino, name }),
        5 => Op::Tmpfile(pb::Tmpfile {
            parent,
            mode: d.below(0o10000) as u32,
            umask,
            flags: d.below(3) as u32,
            linkable: d.one_in(2),
            layout: None,
        }),
        6 => Op::Mkdir(pb::Mkdir { parent, name: d.name(), mode: 0o777, umask }),
        8 => seals::begin(ino),
        9 => seals::undo(ino),
        _ => Op::Setattr(pb::SetAttr { ino, drop_privileges: true, ..Default::default() }),
    }
}

fn change(d: &mut Dice, seen: &Seen) -> Op {
    if seen.newer && d.one_in(5) {
        return newer_change(d, seen);
    }
    let (parent, name) = (d.dir(seen), d.name());
    let ino = d.ino(seen.next);
    match d.below(22) {
        0..=4 => Op::Create(pb::Create {
            parent,
            name,
            mode: d.below(0o10000) as u32 | 0o600,
            exclusive: d.one_in(2),
            layout: d.one_in(3).then(|| spec(d)),
            flags: d.below(4) as u32,
            umask: 0,
        }),
        5 | 6 => Op::Mkdir(pb::Mkdir {
            parent,
            name,
            mode: if d.one_in(4) { 0o3777 } else { 0o777 },
            umask: 0,
        }),
        7 => {
            let mode = (d.below(16) as u32) << 12 | 0o666;
            Op::Mknod(pb::Mknod { parent, name, mode, rdev: d.below(3) as u32, umask: 0 })
        }
        8 => Op::Symlink(pb::Symlink { parent, name, target: bytes("to/somewhere") }),
        9 => Op::Link(pb::Link { ino, parent, name }),
        10 | 11 => Op::Unlink(pb::Unlink { parent, name }),
        12 => Op::Rmdir(pb::Rmdir { parent, name }),
        13..=15 => {
            let mut flags = [0, 0, 1, 2, 2, 3][d.below(6) as usize];
            if seen.newer && d.one_in(3) {
                flags |= 4;
            }
            Op::Rename(pb::Rename {
                parent,
                name,
                new_parent: d.dir(seen),
                new_name: d.name(),
                flags,
            })
        }
        16 => Op::Setattr(pb::SetAttr {
            ino,
            mode: d.one_in(3).then(|| d.below(0o10000) as u32 | 0o700),
            uid: d.one_in(5).then(|| d.below(4) as u32),
            gid: d.one_in(5).then(|| d.below(4) as u32),
            size: d.one_in(2).then(|| d.size()),
            atime_ns: d.one_in(4).then_some(5),
            mtime_ns: d.one_in(4).then_some(-6),
            atime_now: d.one_in(4),
            mtime_now: d.one_in(4),
            drop_privileges: false,
            holes: false,
        }),
        17 => {
            let name =
                [bytes("user.x"), bytes("trusted.y"), bytes("user.z")][d.below(3) as usize].clone();
            match d.below(3) {
                0 => Op::Removexattr(pb::RemoveXattr { ino, name }),
                _ => Op::Setxattr(pb::SetXattr {
                    ino,
                    name,
                    value: bytes("value"),
                    flags: d.below(3) as u32,
                }),
            }
        }
        20 => Op::Open(pb::Open { ino, flags: 1 + d.below(2) as u32 }),
        21 => {
            Op::Release(pb::Release { ino, writer: d.below(seen.index + 1), surplus: d.one_in(3) })
        }
        18 => Op::Extend(pb::Extend { ino, end: d.size(), holes: false }),
        _ => Op::Setlayout(pb::SetLayout { ino, layout: d.one_in(4).then(|| spec(d)) }),
    }
}

fn look(d: &mut Dice, seen: &Seen) -> Op {
    let ino = d.ino(seen.next);
    match d.below(8) {
        0 => Op::Lookup(pb::Lookup { parent: ino, name: d.name() }),
        1 => Op::Getattr(pb::GetAttr { ino }),
        2 => Op::Readdir(pb::Readdir {
            dir: ino,
            cookie: 0,
            limit: d.below(9) as u32,
            attrs: d.one_in(2),
        }),
        3 => Op::PathOf(pb::PathOf { ino }),
        4 => Op::Open(pb::Open { ino, flags: d.below(4) as u32 }),
        5 => Op::Getlayout(pb::GetLayout { ino }),
        6 => Op::Listxattr(pb::ListXattr { ino }),
        _ => Op::Access(pb::Access { ino, mask: d.below(9) as u32 }),
    }
}

fn lock(d: &mut Dice, seen: &Seen) -> Op {
    let (kind, start, len) = (d.below(3) as i32 / 2, d.below(8) * 10, d.below(4) * 10);
    let (start, end) = if kind == 1 || d.one_in(4) { (0, u64::MAX) } else { (start, start + len) };
    let span = Some(pb::LockSpan { start, end, r#type: d.below(3) as i32, pid: 1 });
    let ino = 2 + d.below(seen.next.min(12));
    Op::SetLock(pb::SetLock {
        ino,
        owner: d.below(3),
        kind,
        span,
        undo: d.one_in(2),
        ..Default::default()
    })
}

/// A command that may or may not make sense in the present state. `newer`: also what the log whose
/// state is fixed does not have.
fn command(d: &mut Dice, fs: &Fs, seqs: &mut [u64; 3], newer: bool) -> Command {
    let seen = Seen::new(fs, newer);
    match d.below(40) {
        0 => {
            let client_uuid = vec![d.below(3) as u8; 16].into();
            Command::SessionOpen(pb::SessionOpenRequest { client_uuid, ..Default::default() })
        }
        1 => {
            // Session 1 stays, so that most requests have a session.
            Command::SessionEnd(pb::SessionEnd {
                sessions: vec![2 + d.below(5)],
                evict: d.one_in(2),
            })
        }
        2 => Command::GcDone(pb::GcDone {
            numbers: fs.ns.backlog().gc_queue(2).into_iter().map(|g| g.0).collect(),
        }),
        3 => {
            let (ino, number) =
                fs.ns.backlog().trims(1).first().map_or((9, 9), |t| (t.0, t.1.number));
            Command::TrimDone(pb::TrimDone { ino, number: number - d.below(2) })
        }
        4 => Command::FreeOrphans(pb::FreeOrphans { inos: fs.ns.backlog().orphans(2) }),
        5 => {
            let action = 1 + d.below(3) as u32;
            Command::PoolChange(pb::PoolChange {
                pool: "flash".into(),
                action,
                targets: vec![1, 2],
            })
        }
        6 => {
            let map = fs.ns.map();
            let mut t = map.map.targets[d.below(6) as usize].clone();
            t.used = d.below(1 << 40);
            t.alive = !d.one_in(4);
            let expect_version = map.version() - u64::from(d.one_in(4));
            Command::MapUpdate(pb::MapUpdate {
                expect_version,
                targets: vec![t],
                ..Default::default()
            })
        }
        7 if newer && d.one_in(8) => Command::RaiseLevel(pb::RaiseLevel { to: 1 }),
        7 if newer && d.one_in(8) => {
            Command::Settings(pb::Settings { min_copies: d.below(5) as u32 })
        }
        7 if newer => {
            let known = fs.ns.survey(|s| s.ends).unwrap().first().copied();
            let (ino, fence) = known.unwrap_or((d.ino(seen.next), d.below(9)));
            let change = fs.record(ino).and_then(|r| r.attr).map_or(0, |a| a.change)
                + u64::from(d.one_in(4));
            Command::EndFound(pb::EndFound { ino, fence, change, end: d.size() })
        }
        _ => {
            let session = if d.one_in(8) { 1 + d.below(5) } else { 1 };
            let s = &mut seqs[(session % 3) as usize];
            *s += 1;
            let seq = if d.one_in(10) { s.saturating_sub(d.below(20)) } else { *s };
            let n = if d.one_in(3) { 1 + d.below(4) } else { 1 };
            let one = |d: &mut Dice| match () {
                () if newer && d.one_in(3) => lock(d, &seen),
                () if d.one_in(8) => look(d, &seen),
                () => change(d, &seen),
            };
            let ops = (0..n).map(|_| op(one(d))).collect();
            let uid = if d.one_in(3) { d.below(4) as u32 } else { 0 };
            let creds = Some(pb::Creds { uid, gid: uid, groups: vec![2] });
            let rules = if newer { d.below(u64::from(RULES) + 1) as u32 } else { 0 };
            Command::Meta(pb::MetaRequest {
                session,
                seq,
                lowest_unanswered: s.saturating_sub(15),
                creds,
                ops,
                rules,
                ..Default::default()
            })
        }
    }
}

type Log = Vec<(u64, u64, Bytes)>;

/// Runs `n` random commands one by one; returns the whole log with the replies.
fn make_log(seed: u64, n: usize, mask: u64, newer: bool) -> (Fs, Log, Vec<pb::LogReply>) {
    let mut fs = Fs::with_mask(mask);
    let mut d = Dice(seed);
    let mut seqs = [fs.seq; 3];
    let (mut log, mut replies) = (Log::new(), Vec::new());
    for i in 0..n {
        let data =
            entry(fs.now + d.below(2_000) as i64 - 500, command(&mut d, &fs, &mut seqs, newer));
        fs.now += 1_000;
        fs.index += 1;
        let e = (fs.index, 1 + i as u64 / 100, data);
        replies.extend(fs.ns.apply(std::slice::from_ref(&e), (e.0, e.1), None).unwrap());
        log.push(e);
        if i % 50 == 0 {
            fsck(&fs);
        }
    }
    (fs, log, replies)
}

/// Applies the log again in other batches, and with crashes. Returns what is stored in the end.
fn replayed(
    log: &Log,
    want: &[pb::LogReply],
    mask: u64,
    dice: &mut Dice,
    crashes: bool,
) -> MemStore {
    let mut start = Fs::with_mask(mask);
    strake_store::MetaStore::sync(&start.store).unwrap();
    let first = start.index + 1;
    let mut at = 0;
    while at < log.len() {
        let n = (1 + dice.below(40) as usize).min(log.len() - at);
        let batch = &log[at..at + n];
        let last = (batch[n - 1].0, batch[n - 1].1);
        let got = start.ns.apply(batch, last, None).unwrap();
        assert_eq!(got, want[at..at + n], "replies to entries {}..", batch[0].0);
        at += n;
        if dice.one_in(5) {
            strake_store::MetaStore::sync(&start.store).unwrap();
        }
        if crashes && dice.one_in(3) {
            start.store.crash(|unsynced| dice.below(unsynced as u64 + 1) as usize);
            start.ns =
                Namespace::open_with(Arc::new(start.store.clone()), mask, FEATURE_LEVEL).unwrap();
            let applied = start.ns.header().applied_index;
            // The log is cut only below what is synced, so a real one starts here too.
            at = (applied + 1 - first) as usize;
            fsck(&start);
        }
    }
    start.store.clone()
}

#[test]
fn the_same_log_gives_the_same_bytes() {
    for seed in 0..12 {
        let mask = [u64::MAX, 1][seed as usize % 2];
        let (fs, log, replies) = make_log(seed, 600, mask, true);
        let want = dump(&fs.store);
        for crashes in [false, true] {
            let mut dice = Dice(seed ^ 0xabcd);
            let store = replayed(&log, &replies, mask, &mut dice, crashes);
            assert!(dump(&store) == want, "seed {seed}, crashes {crashes}: the bytes differ");
        }
    }
}

#[test]
fn random_logs_do_real_work() {
    let (fs, _, replies) = make_log(99, 3_000, u64::MAX, true);
    let ok = |r: &&pb::LogReply| match &r.reply {
        Some(pb::log_reply::Reply::Meta(m)) => m.results.iter().all(|r| r.status.is_none()),
        _ => r.status.is_none(),
    };
    let done = replies.iter().filter(ok).count();
    assert!(done > 600 && done < 2_900, "{done} of {} commands succeeded", replies.len());
    let h = fs.ns.header();
    // Sealed files keep their names, so fewer are made.
    assert!(h.inodes > 50 && h.next_ino > 150 && h.format_version == FORMAT_VERSION, "{h:?}");
    assert!(fs.ns.locked_by(0) > 3, "{}", fs.ns.locked_by(0));
}

/// What this log leaves is part of the format: members of different versions apply the same log and
/// must agree. If this fails, either the change was not meant, or it needs a new `FORMAT_VERSION`
/// and a rule for mixed versions.
#[test]
fn the_state_after_a_fixed_log_is_fixed() {
    let (fs, log, _) = make_log(2026, 2_000, u64::MAX, false);
    let log_digest = {
        let mut h = Sha256::new();
        log.iter().for_each(|e| h.update(&e.2));
        hex::encode(&h.finalize()[..8])
    };
    let state = "4e10b94ee6b3d4c9bbd3db3f0591bfb80c7358500d039c879a2c7d644819f119";
    assert_eq!((log_digest.as_str(), digest(&fs.store).as_str()), ("02bb811970b0d36a", state));
}

/// `cargo test --release -p strake-mds -- --ignored --nocapture creates_per_second`
#[test]
#[ignore = "a measurement"]
fn creates_per_second() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let (batch, batches) = (100u64, 500u64);
    let mut log = Vec::new();
    for i in 1..=batch * batches {
        let ops = vec![op(mk_create(d, &format!("file{i}")))];
        let seq = fs.seq + i;
        let creds = Some(fs.creds.clone());
        let m = pb::MetaRequest {
            session: fs.session,
            seq,
            lowest_unanswered: seq.saturating_sub(64),
            creds,
            ops,
            ..Default::default()
        };
        log.push((fs.index + i, 1, entry(fs.now, Command::Meta(m))));
    }
    #[allow(clippy::disallowed_methods, reason = "the test measures")]
    let start = std::time::Instant::now();
    for chunk in log.chunks(batch as usize) {
        let last = chunk[chunk.len() - 1].0;
        fs.ns.apply(chunk, (last, 1), None).unwrap();
        strake_store::MetaStore::sync(&fs.store).unwrap();
    }
    let t = start.elapsed();
    println!("{:.0} creates/s", log.len() as f64 / t.as_secs_f64());
}
