//! What this client may answer from memory, and how it learns and forgets it: the stateful layer
//! around [`Table`], see `docs/leases.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use strake_proto::{Code, Ino, SessionId, pb};
use tokio::sync::Notify;

use crate::{
    leases::{Change, Dropped, Name, Table, Token, Told},
    read::cache::Tenure,
    rows::Holder,
};
use pb::op::Op;

/// Above this many, tenures are no longer kept per file.
const MOST_TENURES: usize = 65_536;

/// Tenures: since when the bytes of a file are unchanged, except by this client. The numbers rise
/// with every end of a tenure.
#[derive(Default)]
struct Tenures {
    last: Tenure,
    /// No tenure is older than this.
    all: Tenure,
    of: BTreeMap<Ino, Tenure>,
}

impl Tenures {
    fn of(&self, ino: Ino) -> Tenure {
        self.of.get(&ino).copied().unwrap_or_default().max(self.all)
    }

    fn end(&mut self, ino: Ino) {
        self.last += 1;
        self.of.insert(ino, self.last);
        if self.of.len() > MOST_TENURES {
            self.end_all();
        }
    }

    fn end_all(&mut self) {
        self.last += 1;
        self.all = self.last;
        self.of.clear();
    }
}

/// What is known, and the tenures of the files.
#[derive(Default)]
struct Leased {
    table: Table<pb::Attr>,
    tenures: Tenures,
}

/// A component that keeps copies of what [`crate::Client`] returned, such as the kernel of a mount.
pub trait Forget: Send + Sync {
    /// Forgets what is known of these inodes, and with `names` the names in all directories. Must
    /// not wait for a request to this client. `None`: done already; else it is done when the future
    /// ends.
    fn forget(&self, inos: &[Ino], names: bool) -> Option<Forgetting>;

    /// Another client needs the state of a file: writes back what was stored through memory
    /// mappings of it, and forgets its pages.
    fn give_back(&self, _: Ino) -> Option<Forgetting> {
        None
    }
}

/// Ends when copies that were taken back can no longer be used. Until then the client must not tell
/// any server that they are forgotten.
pub type Forgetting = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Waits until the copies are forgotten.
pub(crate) async fn forgotten(copies: Option<Forgetting>) {
    if let Some(f) = copies {
        f.await;
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct LeaseCache {
    leased: Mutex<Leased>,
    /// Held for reading while a caller learns how long it may keep a copy; taken for writing before
    /// copies are taken back.
    telling: RwLock<()>,
    copies: OnceLock<Arc<dyn Forget>>,
    has_copies: Notify,
    searchers: RandomState,
    /// The session that last said hello, and the number of the connection.
    greeted: Mutex<(SessionId, u64)>,
}

/// A request in progress. If it is dropped before the answer, it may still run.
pub(crate) struct Asking<'a> {
    memory: &'a LeaseCache,
    token: Token,
    change: Option<Change>,
    /// Files of which it may remove bytes.
    cuts: Vec<Ino>,
    /// Inodes whose leases it gives back.
    pub dropped: Vec<Ino>,
    /// Wait for this before the request is sent.
    pub forgetting: Option<Forgetting>,
}

impl LeaseCache {
    // --- leases ---

    /// Whether the session has leases of the leader at the end of this connection.
    pub fn is_greeted(&self, session: SessionId, connection: u64) -> bool {
        *self.greeted.lock() == (session, connection)
    }

    pub fn greeted(&self, session: SessionId, connection: u64) {
        *self.greeted.lock() = (session, connection);
    }

    /// Before hello is said: forgets everything, and takes copies back.
    pub fn connected(&self) -> Option<Forgetting> {
        let known = {
            let Leased { table, tenures } = &mut *self.leased.lock();
            let known = table.known();
            table.connected();
            tenures.end_all();
            known
        };
        self.take_back(&known, true)
    }

    /// A renewal that was sent at `sent` was answered. Returns whether there were no leases before:
    /// what was known without leases is void.
    pub fn renewed(&self, now: Duration, sent: Duration, term: Duration) -> bool {
        let known = {
            let Leased { table, tenures } = &mut *self.leased.lock();
            let known = (!table.lives(now)).then(|| table.known());
            if known.is_some() {
                tenures.end_all();
            }
            table.renewed(now, sent, term);
            known
        };
        // Copies have expired, but the kernel would keep ACLs.
        known.inspect(|known| drop(self.take_back(known, true))).is_some()
    }

    /// Forgets what was recalled, and takes copies back.
    pub fn recalled(&self, inos: &[Ino]) -> Option<Forgetting> {
        let names = {
            let (mut leased, mut names) = (self.leased.lock(), false);
            for ino in inos {
                names |= leased.table.void(*ino);
                leased.tenures.end(*ino);
            }
            if !inos.is_empty() {
                Holder::Recalled.taken();
            }
            names
        };
        self.take_back(inos, names)
    }

    fn take_back(&self, inos: &[Ino], names: bool) -> Option<Forgetting> {
        let copies = self.copies.get().filter(|_| !inos.is_empty())?;
        // After this, calls that are just giving out a copy are done, and later ones find it
        // forgotten.
        drop(self.telling.write());
        copies.forget(inos, names)
    }

    /// Writes back stores through memory mappings that no other client sees yet.
    pub fn give_back(&self, ino: Ino) -> Option<Forgetting> {
        self.copies.get()?.give_back(ino)
    }

    // --- copies ---

    /// Returns `false` if copies are kept already.
    pub fn set_copies(&self, copies: Arc<dyn Forget>) -> bool {
        let first = self.copies.set(copies).is_ok();
        self.has_copies.notify_one();
        first
    }

    /// Returns when [`LeaseCache::set_copies`] was called.
    pub async fn copies_known(&self) {
        if self.copies.get().is_none() {
            self.has_copies.notified().await;
        }
    }

    pub fn telling(&self) -> RwLockReadGuard<'_, ()> {
        self.telling.read_recursive()
    }

    /// For how long a copy of exactly these attributes may be kept.
    pub fn attr_valid(&self, now: Duration, attr: &pb::Attr) -> Duration {
        let table = &self.leased.lock().table;
        let is_known = table.attr(now, attr.ino) == Some(attr);
        table.until().filter(|_| is_known).map_or(Duration::ZERO, |until| until.saturating_sub(now))
    }

    /// For how long a caller may assume that the name refers to this inode.
    pub fn name_valid(&self, now: Duration, dir: Ino, name: &[u8], to: Option<Ino>) -> Duration {
        let table = &self.leased.lock().table;
        let is_known = table.name_for_all(now, dir, name) == Some(to);
        table.until().filter(|_| is_known).map_or(Duration::ZERO, |until| until.saturating_sub(now))
    }

    // --- answers from memory ---

    pub fn attr(&self, now: Duration, ino: Ino) -> Option<pb::Attr> {
        self.leased.lock().table.attr(now, ino).copied().inspect(|_| Holder::Remembered.taken())
    }

    /// The attributes of a file whose bytes no other client can change now, and its tenure. While
    /// the tenure is the same, no other client has changed them.
    pub fn data(&self, now: Duration, ino: Ino) -> Option<(pb::Attr, Tenure)> {
        let leased = self.leased.lock();
        Some((*leased.table.attr(now, ino)?, leased.tenures.of(ino)))
    }

    /// The tenure of a file, if leases are alive. It does not say whether this file is leased.
    pub fn tenure(&self, now: Duration, ino: Ino) -> Option<Tenure> {
        let leased = self.leased.lock();
        leased.table.lives(now).then(|| leased.tenures.of(ino))
    }

    /// The result of a lookup, if known. `Some(None)`: there is no such name.
    pub fn lookup(
        &self,
        now: Duration,
        creds: &pb::Creds,
        dir: Ino,
        name: &[u8],
    ) -> Option<Option<pb::Attr>> {
        let searcher = self.searcher(creds);
        let table = &self.leased.lock().table;
        match table.name(now, dir, name, searcher)? {
            Some(ino) => Some(Some(*table.attr(now, ino)?)),
            None => Some(None),
        }
    }

    /// The attributes of a file that a user opens for reading who has opened it before.
    pub fn open(&self, now: Duration, creds: &pb::Creds, ino: Ino) -> Option<pb::Attr> {
        let opener = self.searcher(creds);
        self.leased.lock().table.open(now, ino, opener).copied()
    }

    /// Those of the files that some user is known to be allowed to open. `None` unless something
    /// was forgotten since `forgotten`, which is updated.
    pub fn openable<'a>(
        &self,
        forgotten: &mut u64,
        files: impl Iterator<Item = &'a Ino>,
    ) -> Option<BTreeSet<Ino>> {
        let table = &self.leased.lock().table;
        if std::mem::replace(forgotten, table.forgot_openers()) == *forgotten {
            return None;
        }
        Some(files.copied().filter(|ino| table.has_openers(*ino)).collect())
    }

    fn searcher(&self, creds: &pb::Creds) -> u64 {
        let groups: BTreeSet<u32> = creds.groups.iter().copied().collect();
        self.searchers.hash_one((creds.uid, creds.gid, groups))
    }

    // --- requests ---

    /// A list of operations is about to be sent. When [`Asking::forgetting`] has ended, no copies
    /// exist of what is not leased from then on.
    pub fn begin(&self, ops: &[pb::Op]) -> Asking<'_> {
        let mut leased = self.leased.lock();
        let Leased { table, tenures } = &mut *leased;
        let cuts = cuts_of(ops);
        cuts.iter().for_each(|ino| tenures.end(*ino));
        let change = change_of(ops);
        let (change, dropped) = match change == Change::default() {
            true => (None, Dropped::default()),
            false => {
                let (change, dropped) = table.change_begins(change);
                dropped.inos.iter().for_each(|ino| tenures.end(*ino));
                (Some(change), dropped)
            }
        };
        let token = table.begin();
        drop(leased);
        let forgetting = self.take_back(&dropped.inos, dropped.names);
        Asking { memory: self, token, change, cuts, dropped: dropped.inos, forgetting }
    }
}

impl Asking<'_> {
    /// The request was answered: keeps what the answer says about granted inodes.
    pub fn answered(
        mut self,
        now: Duration,
        creds: &pb::Creds,
        ops: &[pb::Op],
        reply: &pb::MetaReply,
    ) {
        let granted: BTreeSet<Ino> = reply.granted.iter().copied().collect();
        let searcher = self.memory.searcher(creds);
        let told = if granted.is_empty() {
            nothing()
        } else {
            told(ops, &reply.results, &granted, searcher)
        };
        let table = &mut self.memory.leased.lock().table;
        match self.change.take() {
            Some(change) => table.change_answered(now, self.token, &change, told),
            None => {
                for n in told.names {
                    table.keep_name(now, self.token, n);
                }
                for (ino, attr) in told.attrs {
                    table.keep_attr(now, self.token, ino, attr);
                }
                for (ino, opener) in told.openers {
                    table.keep_opener(now, self.token, ino, opener);
                }
            }
        }
    }

    /// The request certainly did not run and will not.
    pub fn never_ran(mut self) {
        if let Some(change) = self.change.take() {
            self.memory.leased.lock().table.change_ends(&change, true);
        }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let Leased { table, tenures } = &mut *self.memory.leased.lock();
        if let Some(change) = self.change.take() {
            table.change_ends(&change, false);
        }
        // End the tenures again: what was read meanwhile may be from before the change.
        self.cuts.iter().for_each(|ino| tenures.end(*ino));
        table.end(self.token);
    }
}

fn nothing() -> Told<pb::Attr> {
    Told { attrs: Vec::new(), names: Vec::new(), openers: Vec::new() }
}

/// Files of which a list may remove bytes. A file that the list opens by a name is not among them:
/// it is recalled as for any other client.
fn cuts_of(ops: &[pb::Op]) -> Vec<Ino> {
    let cut = |o: &pb::Op| match &o.op {
        Some(Op::Setattr(s)) if s.size.is_some() => Some(s.ino),
        Some(Op::Setlayout(s)) => Some(s.ino),
        _ => None,
    };
    ops.iter().filter_map(cut).collect()
}

/// What a list may change.
fn change_of(ops: &[pb::Op]) -> Change {
    let mut c = Change::default();
    for op in ops.iter().filter_map(|o| o.op.as_ref()) {
        match op {
            Op::Create(o) => c.names.push((o.parent, o.name.clone())),
            Op::Mkdir(o) => c.names.push((o.parent, o.name.clone())),
            Op::Mknod(o) => c.names.push((o.parent, o.name.clone())),
            Op::Symlink(o) => c.names.push((o.parent, o.name.clone())),
            Op::Unlink(o) => c.names.push((o.parent, o.name.clone())),
            Op::Rmdir(o) => c.names.push((o.parent, o.name.clone())),
            Op::Link(o) => {
                c.inodes.push(o.ino);
                c.names.push((o.parent, o.name.clone()));
            }
            Op::Rename(o) => {
                c.names.push((o.parent, o.name.clone()));
                c.names.push((o.new_parent, o.new_name.clone()));
            }
            Op::Setattr(o) => c.inodes.push(o.ino),
            Op::Setxattr(o) => c.inodes.push(o.ino),
            Op::Removexattr(o) => c.inodes.push(o.ino),
            Op::Extend(o) => c.inodes.push(o.ino),
            Op::Setlayout(o) => c.inodes.push(o.ino),
            Op::Seal(o) => c.inodes.push(o.ino),
            _ => {}
        }
    }
    c.inodes.sort_unstable();
    c.inodes.dedup();
    c.names.sort_unstable();
    c.names.dedup();
    c
}

/// What the results say about inodes that were granted.
fn told(
    ops: &[pb::Op],
    results: &[pb::OpResult],
    granted: &BTreeSet<Ino>,
    searcher: u64,
) -> Told<pb::Attr> {
    let mut told = nothing();
    let mut prev = 0;
    for (op, r) in ops.iter().zip(results) {
        let here = |ino: Ino| if ino == 0 { prev } else { ino };
        let failure = r.status.as_ref().map_or(0, |s| s.code);
        let mut name = |dir: Ino, name: &Bytes, to: Option<Ino>| {
            let plain = !matches!(&name[..], b"." | b"..");
            if plain && granted.contains(&dir) {
                told.names.push(Name { dir, name: name.clone(), to, searcher: Some(searcher) });
            }
        };
        match (&op.op, failure) {
            (Some(Op::Lookup(o)), n) if Code::from_wire(n) == Code::NoEnt => {
                name(here(o.parent), &o.name, None)
            }
            (_, n) if n != 0 => break,
            (Some(Op::Lookup(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Create(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Mkdir(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Mknod(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Symlink(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Link(o)), _) => name(here(o.parent), &o.name, Some(r.ino)),
            (Some(Op::Unlink(o)), _) => name(here(o.parent), &o.name, None),
            (Some(Op::Rmdir(o)), _) => name(here(o.parent), &o.name, None),
            _ => {}
        }
        told.attrs.extend(r.attr.filter(|a| granted.contains(&a.ino)).map(|a| (a.ino, a)));
        match &op.op {
            Some(Op::Open(o)) if o.flags == 0 && granted.contains(&here(o.ino)) => {
                told.openers.push((here(o.ino), searcher));
            }
            _ => {}
        }
        if let Some(Op::Readdir(o)) = &op.op {
            let dir = here(o.dir);
            for e in &r.entries {
                if granted.contains(&dir) {
                    // Permission to read a directory does not include permission to search it.
                    told.names.push(Name {
                        dir,
                        name: e.name.clone(),
                        to: Some(e.ino),
                        searcher: None,
                    });
                }
                told.attrs.extend(e.attr.filter(|a| granted.contains(&a.ino)).map(|a| (a.ino, a)));
            }
        }
        prev = r.ino;
    }
    told
}
