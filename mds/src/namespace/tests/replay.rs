//! Sessions, request deduplication, hostile log entries, failing stores, formats.

use std::sync::Arc;

use super::*;
use crate::namespace::apply::{MAX_EVICTED, MAX_REPLIES};
use strake_store::{MetaStore, mem::Fault};

fn request(fs: &Fs, session: u64, seq: u64, lowest: u64, name: &str) -> Command {
    let ops = vec![op(mk_create(ROOT, name))];
    let creds = Some(fs.creds.clone());
    Command::Meta(pb::MetaRequest {
        session,
        seq,
        lowest_unanswered: lowest,
        creds,
        ops,
        ..Default::default()
    })
}

/// Errors by their codes: the text of an error is not kept.
fn codes(r: &pb::LogReply) -> Vec<Option<Code>> {
    match &r.reply {
        Some(pb::log_reply::Reply::Meta(m)) => {
            m.results.iter().map(|r| code_of(r.status.as_ref())).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn refused(r: &pb::LogReply) -> Option<Code> {
    code_of(r.status.as_ref())
}

#[test]
fn a_repeated_request_gets_the_same_reply_and_runs_once() {
    let mut fs = Fs::new();
    let (s, other) = (fs.session, fs.open_session(2));
    let first = fs.log(request(&fs, s, 10, 1, "a"));
    let before = fs.ns.header();
    assert_eq!(fs.log(request(&fs, s, 10, 1, "a")), first);
    assert_eq!(fs.ns.header().next_ino, before.next_ino);
    // A failure is an answer too.
    let failed = codes(&fs.log(request(&fs, s, 11, 1, "a")));
    assert_eq!(failed, [Some(Code::Exist)]);
    fs.one(mk_unlink(ROOT, "a"));
    assert_eq!(codes(&fs.log(request(&fs, s, 11, 1, "a"))), failed);
    assert_eq!(fs.lookup(ROOT, "a"), Err(Code::NoEnt));
    // Sequence numbers are a session's own, and need not come in order.
    assert_eq!(refused(&fs.log(request(&fs, other, 10, 1, "b"))), None);
    assert_eq!(refused(&fs.log(request(&fs, s, 9, 1, "c"))), None);
    // What the client has seen answered is dropped, and refused when it comes again.
    assert_eq!(refused(&fs.log(request(&fs, s, 12, 11, "d"))), None);
    assert_eq!(refused(&fs.log(request(&fs, s, 10, 1, "a"))), Some(Code::ReplyGone));
    assert_eq!(codes(&fs.log(request(&fs, s, 11, 1, "a"))), failed);
    // The same after a restart.
    fs.ns = Namespace::open(Arc::new(fs.store.clone())).unwrap();
    assert_eq!(codes(&fs.log(request(&fs, s, 11, 1, "a"))), failed);
    assert_eq!(refused(&fs.log(request(&fs, s, 10, 1, "a"))), Some(Code::ReplyGone));
}

#[test]
fn who_may_not_run_anything() {
    let mut fs = Fs::new();
    let s = fs.session;
    assert_eq!(refused(&fs.log(request(&fs, 99, 1, 0, "a"))), Some(Code::NoSession));
    assert_eq!(refused(&fs.log(request(&fs, s, 0, 0, "a"))), Some(Code::Inval));
    assert_eq!(refused(&fs.log(request(&fs, s, u64::MAX, 0, "a"))), Some(Code::Inval));
    let nobody = pb::MetaRequest {
        session: s,
        seq: 5,
        ops: vec![op(mk_create(ROOT, "a"))],
        ..Default::default()
    };
    assert_eq!(
        refused(&fs.log(Command::Meta(nobody))),
        Some(Code::Inval),
        "no credentials is not root"
    );
    assert_eq!(
        refused(&fs.log(Command::SessionOpen(pb::SessionOpenRequest::default()))),
        Some(Code::Inval)
    );
    let evict = |evict| Command::SessionEnd(pb::SessionEnd { sessions: vec![s, 77], evict });
    fs.log(request(&fs, s, 1, 0, "a"));
    fs.log(evict(true));
    assert_eq!(refused(&fs.log(request(&fs, s, 1, 0, "a"))), Some(Code::NoSession));
    let r = fs.ns.read(s, &creds(0), &[op(Op::Getattr(pb::GetAttr { ino: ROOT }))]);
    assert_eq!(code_of(r.results[0].status.as_ref()), Some(Code::NoSession));
    let evicted = fs.ns.backlog().evicted_after(0);
    assert_eq!(evicted.iter().map(|e| (e.session, e.min_epoch)).collect::<Vec<_>>(), [(s, 2)]);
    assert!(fs.ns.backlog().evicted_after(evicted[0].number).is_empty());
    assert!(fs.ns.session(s).is_none());
    let again = fs.open_session(1);
    assert!(again > s, "session ids are never reused");
    fs.session = again;
}

#[test]
fn a_client_that_opens_again_resumes_its_session() {
    let mut fs = Fs::new();
    let s = fs.open_session(9);
    fs.log(request(&fs, s, 5, 5, "a"));
    assert_eq!(fs.open_session(9), s);
    assert_eq!(fs.ns.session(s).unwrap().answered_below, 5);
    assert_eq!(fs.ns.sessions().len(), 2);
    fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![s], evict: false }));
    assert!(fs.ns.backlog().evicted_after(0).is_empty());
}

#[test]
fn kept_replies_and_evictions_are_bounded() {
    let mut fs = Fs::new();
    let (s, base) = (fs.session, fs.index);
    let n = MAX_REPLIES as u64 + 10;
    let all: Vec<_> =
        (1..=n).map(|i| (base + i, 1, entry(T0, request(&fs, s, i, 1, &i.to_string())))).collect();
    fs.ns.apply(&all, (base + n, 1), None).unwrap();
    fs.index = base + n;
    assert_eq!(fs.store.prefix(&[keys::REPLY]).count(), MAX_REPLIES);
    assert_eq!(refused(&fs.log(request(&fs, s, 10, 1, "10"))), Some(Code::ReplyGone));
    assert_eq!(refused(&fs.log(request(&fs, s, 11, 1, "11"))), None);
    for round in 0..11u64 {
        let ids: Vec<u64> = (0..1000)
            .map(|i| {
                let client_uuid = [round.to_be_bytes(), u64::to_be_bytes(i)].concat().into();
                let o = pb::SessionOpenRequest { client_uuid, ..Default::default() };
                match fs.log(Command::SessionOpen(o)).reply {
                    Some(pb::log_reply::Reply::SessionOpen(r)) => r.session,
                    other => panic!("{other:?}"),
                }
            })
            .collect();
        fs.log(Command::SessionEnd(pb::SessionEnd { sessions: ids, evict: true }));
    }
    let kept = fs.ns.backlog().evicted_after(0);
    assert_eq!(kept.len(), MAX_EVICTED);
    assert_eq!(kept.last().unwrap().number + 1, fs.ns.header().next_number, "the newest are kept");
}

#[test]
fn garbage_in_the_log_is_answered_and_changes_nothing() {
    let mut fs = Fs::new();
    let before = dump(&fs.store);
    let unknown = pb::LogCommand { now_ns: i64::MAX, command: None }.encode_to_vec();
    let bad: [&[u8]; 4] = [b"", b"\xff\xff\xff", &[0x12, 0xff, 0xff, 0xff, 0xff, 0x0f], &unknown];
    for data in bad {
        fs.index += 1;
        let e = (fs.index, 1, Bytes::copy_from_slice(data));
        let r = fs.ns.apply(&[e], (fs.index, 1), None).unwrap();
        assert_eq!(refused(&r[0]), Some(Code::Protocol));
    }
    let after = dump(&fs.store);
    assert_eq!(before[1..], after[1..], "only the header's applied index moved");
    assert_eq!(refused(&fs.log(format())), Some(Code::Exist));
    // An entry that was applied before does not run again.
    let old = (fs.index, 1, entry(T0, request(&fs, fs.session, 77, 1, "x")));
    assert_eq!(
        refused(&fs.ns.apply(&[old], (fs.index, 1), None).unwrap()[0]),
        Some(Code::ReplyGone)
    );
    assert!(fs.ns.apply(&[], (fs.index - 1, 1), None).is_err(), "the log never runs backwards");
}

#[test]
fn nothing_runs_before_format_but_the_group_is_recorded() {
    let store = MemStore::new();
    let ns = Namespace::open(Arc::new(store.clone())).unwrap();
    let end = Command::SessionEnd(pb::SessionEnd::default());
    let r = ns.apply(&[(5, 2, entry(1, end))], (5, 2), Some(b"conf")).unwrap();
    assert_eq!(refused(&r[0]), Some(Code::NoDev));
    let short = pb::Format { fs_uuid: bytes("short"), ..Default::default() };
    let r = ns.apply(&[(6, 2, entry(1, Command::Format(short)))], (6, 2), None).unwrap();
    assert_eq!(refused(&r[0]), Some(Code::Inval));
    let h = Namespace::open(Arc::new(store)).unwrap().header();
    assert_eq!((h.applied_index, h.applied_term, &h.conf_state[..]), (6, 2, &b"conf"[..]));
    assert!(h.fs_uuid.is_empty());
    let r = ns.read(0, &creds(0), &[op(Op::Getattr(pb::GetAttr { ino: ROOT }))]);
    assert_eq!(code_of(r.results[0].status.as_ref()), Some(Code::NoEnt));
}

#[test]
fn a_store_that_fails_leaves_memory_and_disk_as_they_were() {
    let mut fs = Fs::new();
    fs.create(ROOT, "a");
    for (fault, code) in [(Fault::Commit, Code::NoSpc), (Fault::Read, Code::Io)] {
        let (before, header, sessions) = (dump(&fs.store), fs.ns.header(), fs.ns.sessions());
        let e = [
            (fs.index + 1, 1, entry(T0 * 2, request(&fs, fs.session, 90, 1, "b"))),
            (
                fs.index + 2,
                1,
                entry(
                    T0 * 2,
                    Command::SessionEnd(pb::SessionEnd { sessions: vec![1], evict: true }),
                ),
            ),
        ];
        fs.store.fail_next(fault, 1, code);
        assert_eq!(fs.ns.apply(&e, (fs.index + 2, 1), Some(b"new")).unwrap_err().code, code);
        assert_eq!((dump(&fs.store), fs.ns.header(), fs.ns.sessions()), (before, header, sessions));
        fsck(&fs);
    }
    // The same entry succeeds later.
    let r = fs.log(request(&fs, fs.session, 90, 1, "b"));
    assert_eq!(refused(&r), None);
    fs.store.fail_next(Fault::Read, 1, Code::Io);
    assert_eq!(fs.lookup(ROOT, "b"), Err(Code::Io));
    assert!(fs.lookup(ROOT, "b").is_ok());
}

/// Whichever read meets damage, the entries are given up, not answered, and nothing has changed. An
/// answer could differ from the other members' answers.
#[test]
fn damage_is_no_result_of_an_entry() {
    let mut fs = Fs::new();
    let (d, f) = (fs.mkdir(ROOT, "d"), fs.create(ROOT, "f"));
    fs.one(Op::Setxattr(pb::SetXattr {
        ino: f,
        name: bytes("user.a"),
        value: bytes("1"),
        flags: 0,
    }));
    fs.create(d, "inner");
    fs.log(request(&fs, fs.session, 80, 1, "kept"));
    let meta = |seq: u64, ops: Vec<Op>| {
        let ops = ops.into_iter().map(op).collect();
        let creds = Some(fs.creds.clone());
        let m = pb::MetaRequest {
            session: fs.session,
            seq,
            lowest_unanswered: 1,
            creds,
            ops,
            ..Default::default()
        };
        entry(T0 * 2, Command::Meta(m))
    };
    let rename = |parent, name: &str, new_name: &str| {
        Op::Rename(pb::Rename {
            parent,
            name: bytes(name),
            new_parent: ROOT,
            new_name: bytes(new_name),
            flags: 0,
        })
    };
    let entries: Vec<Bytes> = vec![
        meta(90, vec![rename(d, "inner", "f")]),
        meta(91, vec![mk_create(ROOT, "g"), mk_unlink(ROOT, "kept")]),
        meta(
            92,
            vec![Op::Setxattr(pb::SetXattr {
                ino: d,
                name: bytes("user.b"),
                value: bytes("2"),
                flags: 0,
            })],
        ),
        meta(93, vec![mk_unlink(ROOT, "no such name")]),
        entry(T0 * 2, request(&fs, fs.session, 80, 1, "kept")),
        entry(
            T0 * 2,
            Command::SessionEnd(pb::SessionEnd { sessions: vec![fs.session], evict: true }),
        ),
    ];
    let entries: Vec<_> = (fs.index + 1..).zip(entries).map(|(index, e)| (index, 1, e)).collect();
    let last = (fs.index + entries.len() as u64, 1);
    let before = dump(&fs.store);
    let mut reads = 0;
    loop {
        let store = Arc::new(FailsAt { store: fs.store.clone(), left: 0.into() });
        let ns = Namespace::open(store.clone()).unwrap();
        store.left.store(reads + 1, std::sync::atomic::Ordering::Relaxed);
        match ns.apply(&entries, last, None) {
            Ok(replies) => {
                assert!(ns.damage().is_none(), "read {reads} met damage, and was answered");
                let codes: Vec<_> =
                    replies.iter().map(|r| r.reply.as_ref().and_then(|_| codes_of(r))).collect();
                assert_eq!(
                    codes[3],
                    Some(vec![Some(Code::NoEnt)]),
                    "its answers are those of the entries"
                );
                break;
            }
            Err(e) => {
                assert_eq!(
                    (e.code, ns.damage().map(|e| e.code)),
                    (Code::Corrupt, Some(Code::Corrupt)),
                    "read {reads}"
                );
                assert_eq!(dump(&fs.store), before, "read {reads}");
            }
        }
        reads += 1;
    }
    assert!(reads > 20, "{reads} reads");
    fs.ns = Namespace::open(Arc::new(fs.store.clone())).unwrap();
}

fn codes_of(r: &pb::LogReply) -> Option<Vec<Option<Code>>> {
    match &r.reply {
        Some(pb::log_reply::Reply::Meta(m)) => {
            Some(m.results.iter().map(|r| code_of(r.status.as_ref())).collect())
        }
        _ => None,
    }
}

/// A real store, one read of which meets damage: the one at which `left` has run out.
struct FailsAt {
    store: MemStore,
    left: std::sync::atomic::AtomicI64,
}

impl FailsAt {
    fn meets(&self) -> strake_proto::Result<()> {
        match self.left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) {
            1 => Err(strake_proto::Error::new(Code::Corrupt, "a flipped bit")),
            _ => Ok(()),
        }
    }
}

impl Reader for FailsAt {
    fn get(&self, key: &[u8]) -> strake_proto::Result<Option<Bytes>> {
        self.meets()?;
        self.store.get(key)
    }
    fn range(
        &self,
        from: std::ops::Bound<&[u8]>,
        to: std::ops::Bound<&[u8]>,
    ) -> strake_store::PairIter<'_> {
        Box::new(self.store.range(from, to).map(|pair| self.meets().and(pair)))
    }
}

impl MetaStore for FailsAt {
    fn commit(&self, batch: strake_store::Batch) -> strake_proto::Result<()> {
        self.store.commit(batch)
    }
    fn sync(&self) -> strake_proto::Result<()> {
        self.store.sync()
    }
    fn snapshot(&self) -> strake_proto::Result<Box<dyn Reader>> {
        self.store.snapshot()
    }
    fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }
    fn clear(&self) -> strake_proto::Result<()> {
        self.store.clear()
    }
}

#[test]
fn a_newer_format_and_damage_are_refused() {
    let mut fs = Fs::new();
    let put = |store: &MemStore, key: &[u8], value: Vec<u8>| {
        let mut b = strake_store::Batch::default();
        b.put(Bytes::copy_from_slice(key), value);
        store.commit(b).unwrap();
    };
    let good = fs.store.get(keys::HEADER).unwrap().unwrap();
    let newer = pb::StateHeader { format_version: FORMAT_VERSION + 1, ..fs.ns.header() };
    put(&fs.store, keys::HEADER, newer.encode_to_vec());
    let e = Namespace::open(Arc::new(fs.store.clone())).err().unwrap();
    assert!(e.code == Code::Protocol && e.message.contains("newer strake"), "{e}");
    put(&fs.store, keys::HEADER, vec![0xff]);
    assert_eq!(Namespace::open(Arc::new(fs.store.clone())).err().unwrap().code, Code::Corrupt);
    put(&fs.store, keys::HEADER, good.to_vec());
    // A damaged record stops the member that meets it; it is no answer.
    let d = fs.mkdir(ROOT, "d");
    let key = keys::numbered(keys::INODE, d);
    let whole = fs.store.get(&key).unwrap().unwrap();
    let other = fs.store.get(&keys::numbered(keys::INODE, ROOT)).unwrap().unwrap();
    let e = (fs.index + 1, 1, entry(T0, request(&fs, fs.session, 500, 1, "x")));
    let into_damage = pb::MetaRequest {
        session: fs.session,
        seq: 501,
        creds: Some(creds(0)),
        ops: vec![op(mk_create(d, "x"))],
        ..Default::default()
    };
    let bad = (fs.index + 2, 1, entry(T0, Command::Meta(into_damage)));
    for damage in [vec![0xff], vec![], other.to_vec()] {
        put(&fs.store, &key, damage);
        let r = fs.ns.apply(&[e.clone(), bad.clone()], (fs.index + 2, 1), None);
        assert_eq!(r.unwrap_err().code, Code::Corrupt);
        assert_eq!(fs.lookup(ROOT, "x"), Err(Code::NoEnt));
    }
    put(&fs.store, &key, whole.to_vec());
}

#[test]
fn readers_see_whole_commits_only() {
    let mut fs = Fs::new();
    fs.create(ROOT, "a");
    let ns = &fs.ns;
    let (session, first) = (fs.session, fs.index + 1);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            // The file is always there under exactly one of its names.
            for _ in 0..10_000_000 {
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
                let r = ns.read(
                    session,
                    &creds(0),
                    &[op(Op::Readdir(pb::Readdir { dir: ROOT, ..Default::default() }))],
                );
                assert_eq!(r.results[0].entries.len(), 1);
            }
        });
        for i in 0..2_000 {
            let names = if i % 2 == 0 { ("a", "b") } else { ("b", "a") };
            let ops = vec![op(mk_rename(ROOT, names.0, ROOT, names.1, 0))];
            let m = pb::MetaRequest {
                session,
                seq: 1_000 + i,
                creds: Some(creds(0)),
                ops,
                lowest_unanswered: i,
                ..Default::default()
            };
            let e = (first + i, 1, entry(T0, Command::Meta(m)));
            ns.apply(&[e], (first + i, 1), None).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn reload_reads_what_a_snapshot_put_there() {
    let mut a = Fs::new();
    a.create(ROOT, "f");
    let empty = MemStore::new();
    let b = Namespace::open(Arc::new(empty.clone())).unwrap();
    let mut batch = strake_store::Batch::default();
    dump(&a.store).into_iter().for_each(|(k, v)| batch.put(k, v));
    empty.commit(batch).unwrap();
    b.reload().unwrap();
    assert_eq!(
        (b.header(), b.sessions(), b.map().map.clone()),
        (a.ns.header(), a.ns.sessions(), a.ns.map().map.clone())
    );
    let r = b.read(
        a.session,
        &creds(0),
        &[op(Op::Lookup(pb::Lookup { parent: ROOT, name: bytes("f") }))],
    );
    assert_eq!(r.results[0].status, None);
}
