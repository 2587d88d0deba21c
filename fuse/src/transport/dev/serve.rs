//! Answers requests by asking the [VFS core](crate::vfs).
//!
//! A read of cached bytes is answered on the thread that received it; every other request runs as a
//! task on the tokio runtime. When too many tasks run, the threads stop reading requests from the
//! kernel until one ends. Requests that wait for a lock have a limit of their own.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::Ordering::{Acquire, Release},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Handover, Operation};
use strake_fabric::Pool;
use strake_proto::{Code, Ino, Result, pb};
use tokio::{runtime::Handle, sync::Semaphore};

use super::{
    abi::{self, fattr},
    channel::Channel,
    copies::{Copies, Recalls},
    init::Agreed,
    interrupts::{Interrupts, Patience},
    mapped::{HasPages, Mapped},
    moved::Moved,
    order::Order,
    progress::{Progress, TakenSoFar},
    reply::{self, Entries, Reply, Taken, Timeouts},
    request::{self, Body, Head, Init, Request, SetAttr},
    running,
    session::{Answer, Handler},
    shared::Shared,
};
use crate::{
    MountConfig,
    handover::{HandoverMemory, LeftRequest},
    transport::errno,
    vfs::{
        Caller, Change, CopyRange, Leaving, Lock, LockType, Place, Released, Stat, Time, Vfs,
        is_dir,
    },
};

/// Most requests that wait for locks; further ones are answered with ENOLCK.
const MOST_LOCK_WAITERS: usize = 4096;
/// Most requests that were read from the kernel and not answered, without those that wait for
/// locks. Most of them wait for their turn. So many are read because the kernel's INTERRUPT must be
/// read even when every request in progress waits for a dead server.
const MOST_TAKEN: usize = 4096;
/// How long a killed program waits for a change that is in progress, as long as servers answer.
const LAST_CHANGE: Duration = Duration::from_secs(1);
/// After this time, requests of an earlier daemon that did not come again are given up.
const COMES_AGAIN: Duration = Duration::from_secs(2);
/// Words of the handover memory with the result of the negotiation with the kernel.
const KEPT_AGREED: [usize; 2] = [1, 2];

/// The result of an earlier daemon's negotiation with the kernel.
pub(super) fn agreed_before(keep: &HandoverMemory) -> Option<Agreed> {
    Agreed::from_words(KEPT_AGREED.map(|n| keep.mount_word(n).load(Acquire)))
}

/// Answers the requests of a mount.
pub(crate) struct Serve {
    core: Core,
    runtime: Handle,
    taken: Arc<Semaphore>,
    lock_room: Arc<Semaphore>,
    interrupts: Interrupts,
    keep: Option<Arc<HandoverMemory>>,
    /// Requests that an earlier daemon had in progress, by number.
    left: Arc<Mutex<BTreeMap<u64, LeftRequest>>>,
}

/// State that the task of a request needs.
#[derive(Clone)]
struct Core {
    vfs: Arc<Vfs>,
    /// The longest validity times that the kernel is given.
    bounds: Timeouts,
    copies: Arc<Copies>,
    mapped: Arc<Mapped>,
    moved: Arc<Moved>,
    shared: Arc<Shared>,
    agreed: Arc<OnceLock<Agreed>>,
    /// Limits the requests in progress.
    room: Arc<Semaphore>,
    /// The mountpoint without symbolic links.
    mountpoint: Arc<Path>,
    /// See [`MountConfig::old_kernel`].
    old_kernel: bool,
}

impl Serve {
    /// `keep`: the memory that outlives this daemon. What an earlier daemon left there is taken
    /// over first.
    pub(crate) async fn new(
        vfs: Arc<Vfs>,
        cfg: &MountConfig,
        agreed: Arc<OnceLock<Agreed>>,
        keep: Option<Arc<HandoverMemory>>,
    ) -> Serve {
        let bounds = Timeouts { attr: cfg.attr_timeout, entry: cfg.entry_timeout };
        if !bounds.entry.is_zero() {
            vfs.keeps_names();
        }
        let room = Arc::new(Semaphore::new(cfg.max_requests.max(1)));
        let left = keep.as_ref().map_or_else(Vec::new, |k| k.left_requests());
        // Their RELEASE was answered already, so it does not come again.
        let operations: Vec<Operation> = left.iter().map(|r| r.operation.clone()).collect();
        for closed in vfs.take_over(&operations).await {
            let vfs = vfs.clone();
            tokio::spawn(async move { vfs.finish_release(closed).await });
        }
        if let Some(a) = keep.as_deref().and_then(agreed_before) {
            let _ = agreed.set(a);
        }
        let copies = Arc::new(Copies::new(cfg.root, Handle::current()));
        let mapped = Arc::new(Mapped::new());
        let shared = Arc::new(Shared::new(mapped.clone(), Arc::downgrade(&vfs)));
        let former = keep.as_ref().map_or(0, |k| k.former_session());
        vfs.open_inodes().into_iter().for_each(|ino| shared.may_be_out(ino, former));
        Serve {
            core: Core {
                vfs,
                bounds,
                copies,
                mapped,
                moved: Arc::default(),
                shared,
                agreed,
                room,
                mountpoint: cfg.mountpoint.as_path().into(),
                old_kernel: cfg.old_kernel,
            },
            runtime: Handle::current(),
            taken: Arc::new(Semaphore::new(MOST_TAKEN)),
            lock_room: Arc::new(Semaphore::new(MOST_LOCK_WAITERS)),
            interrupts: Interrupts::default(),
            keep,
            left: Arc::new(Mutex::new(left.into_iter().map(|r| (r.unique, r)).collect())),
        }
    }

    /// The pool into which requests are read: written data must outlive this daemon.
    pub(crate) fn pool(&self) -> Pool {
        self.keep.as_ref().map_or_else(|| self.core.vfs.pool().clone(), |k| k.pool().clone())
    }

    /// Must be called before anything is read: from now on the kernel's copies are revoked through
    /// `channel`.
    pub(super) fn keep_copies(&mut self, channel: &Arc<Channel>) {
        let Core { vfs, copies, mapped, moved, shared, agreed, bounds, .. } = &mut self.core;
        copies.connect(channel);
        moved.connect(channel);
        mapped.connect(channel);
        if !vfs.set_copies(Arc::new(Recalls { copies: copies.clone(), shared: shared.clone() })) {
            tracing::warn!("another mount of this client caches in the kernel; this one does not");
            *bounds = Timeouts { attr: Duration::ZERO, entry: Duration::ZERO };
        }
        // This daemon's client does not know the names that an earlier daemon told the kernel. For
        // inodes, the leader has on record what was told.
        if !bounds.entry.is_zero() && agreed.get().is_some_and(Agreed::forgets_names) {
            copies.has_names();
            copies.forget_names();
        }
    }

    /// Must be called before anything is read: when a lock is in the way, requests that are not
    /// read yet are waited for.
    pub(super) fn set_queue(&self, progress: &Arc<Progress>) {
        self.core.vfs.set_queue(Arc::new(TakenSoFar(progress.clone())));
    }

    /// Whether there was an earlier daemon.
    pub(crate) fn is_next(&self) -> bool {
        self.keep.as_ref().is_some_and(|k| k.former_session() != 0)
    }

    /// Takes the requests of an earlier daemon that the kernel cannot send again: their numbers and
    /// descriptors.
    pub(crate) fn give_up_left(&self) -> Vec<(u64, usize)> {
        let left = std::mem::take(&mut *self.left.lock());
        let one = |r: LeftRequest| {
            self.core.vfs.abandon(&r.operation);
            (r.unique, r.channel)
        };
        left.into_values().map(one).collect()
    }

    /// After a while, gives up the requests of an earlier daemon that did not come again.
    pub(crate) fn expect_left(&self) {
        let (left, vfs) = (self.left.clone(), self.core.vfs.clone());
        self.runtime.spawn(async move {
            tokio::time::sleep(COMES_AGAIN).await;
            let left = std::mem::take(&mut *left.lock());
            left.values().for_each(|r| vfs.abandon(&r.operation));
        });
    }

    /// The operation of a request: the same one if an earlier daemon had the request in progress.
    fn operation(&self, head: &Head, channel: usize) -> Option<Operation> {
        let keep = self.keep.as_ref()?;
        let unique = head.unique & !abi::UNIQUE_RESEND;
        let left = if unique == head.unique { None } else { self.left.lock().remove(&unique) };
        left.map(|r| r.operation).or_else(|| keep.begin(unique, channel as u64, head.node))
    }

    fn run(
        &self,
        head: Head,
        patience: Patience,
        answer: Answer,
        work: Work,
        operation: Option<Operation>,
    ) {
        let Work { body, leaving, order } = work;
        // Register the request before waiting for anything: otherwise the kernel would send its
        // INTERRUPT again and again meanwhile.
        let waiting = self.interrupts.begin(head.unique, head.pid, patience);
        let of = if patience == Patience::UntilSignal { &self.lock_room } else { &self.taken };
        let place = match of.clone().try_acquire_owned() {
            Ok(p) => p,
            Err(_) if patience == Patience::UntilSignal => {
                answer.send(&Reply::Error(libc::ENOLCK));
                return;
            }
            Err(_) => match self.runtime.block_on(of.clone().acquire_owned()) {
                Ok(p) => p,
                Err(_) => return,
            },
        };
        let operation = match operation {
            None if !body.only_asks() => self.operation(&head, answer.channel()),
            operation => operation,
        };
        let core = self.core.clone();
        let changes = patience == Patience::UntilKilled && !body.only_asks();
        // A wait for a lock must not keep other requests from running. Nothing may delay an append
        // that other clients wait for, or a write-back of pages that other nodes wait for.
        let is_write_back = matches!(body, Body::Write { from_mapping: true, .. });
        let passes = patience == Patience::UntilSignal
            || is_write_back
            || operation.as_ref().is_some_and(Operation::is_awaited);
        self.runtime.spawn(async move {
            let mut place = Some(place);
            let reply = {
                // Pinned in place, because a task reserves memory for each place that a future is
                // moved to.
                let work = std::pin::pin!(async {
                    order.turn(&mut place).await;
                    let _room = if passes { None } else { core.room.acquire().await.ok() };
                    match (body, leaving) {
                        (Body::Flush { handle, .. }, Some(locks)) => {
                            empty(core.vfs.finish_flush(handle, locks).await)
                        }
                        (body, _) => core.answer(head, operation.as_ref(), body, order).await,
                    }
                });
                tokio::select! {
                    biased;
                    reply = work => reply,
                    // Work that must finish continues; only the caller is released. A program that
                    // waits for the end of a killed one finds its change done, unless servers delay
                    // it.
                    () = async {
                        waiting.given_up().await;
                        if changes {
                            core.vfs.while_served(LAST_CHANGE).await;
                        }
                    } => Reply::Error(libc::EINTR),
                }
            };
            core.send(answer, reply);
            drop((waiting, place, operation));
        });
    }
}

/// A request, the locks that it releases if it is a close, and its order relative to mappings.
struct Work {
    body: Body,
    leaving: Option<Leaving>,
    order: Order,
}

/// The locks that a noted close releases.
pub(crate) enum Noted {
    Nothing,
    Flush(Leaving),
    Release(Option<Released>),
}

impl Serve {
    /// Continues with a closed handle, whose RELEASE is answered already.
    fn finish(&self, closed: Released) {
        let place = match self.taken.clone().try_acquire_owned() {
            Ok(p) => p,
            Err(_) => match self.runtime.block_on(self.taken.clone().acquire_owned()) {
                Ok(p) => p,
                Err(_) => return,
            },
        };
        let core = self.core.clone();
        self.runtime.spawn(async move {
            let _room = core.room.acquire().await;
            core.vfs.finish_release(closed).await;
            drop(place);
        });
    }
}

impl Handler for Serve {
    type Noted = Noted;

    fn note(&self, body: &Body) -> Noted {
        match body {
            Body::Flush { handle, owner } => {
                Noted::Flush(self.core.vfs.note_flush(*handle, *owner))
            }
            Body::Release { handle } => Noted::Release(self.core.vfs.note_release(*handle)),
            _ => Noted::Nothing,
        }
    }

    fn handle(&self, request: Request, noted: Noted, answer: Answer) {
        let Request { head, body } = request;
        let leaving = match noted {
            Noted::Release(closed) => {
                // No program waits for it, but the kernel limits how many are in progress.
                answer.send(&Reply::ok());
                let Core { mapped, vfs, .. } = &self.core;
                mapped.released(head.node, || vfs.has_open(head.node));
                return closed.into_iter().for_each(|c| self.finish(c));
            }
            Noted::Flush(leaving) => Some(leaving),
            Noted::Nothing => None,
        };
        // Where the kernel cannot send requests again, the next daemon must know of every request:
        // it answers them with EIO.
        let comes_again = self.core.agreed.get().is_none_or(|a| a.has(abi::init::HAS_RESEND));
        let early = if comes_again { None } else { self.operation(&head, answer.channel()) };
        let order = self.core.order(&head, &body);
        if let Body::Read { handle, offset, size, .. } = body
            && matches!(order, Order::Nothing)
        {
            // A sequential reader finds most bytes read ahead: an answer from this thread wakes no
            // other thread.
            let _tasks_go_there = self.runtime.enter();
            if let Some(parts) = self.core.vfs.read_ready(handle, offset, size as usize) {
                answer.send(&Reply::Data(parts));
                return;
            }
        }
        if let Body::Flush { handle, .. } = body
            && leaving.as_ref().is_none_or(Leaving::is_empty)
            && self.core.vfs.flush_ready(handle)
        {
            answer.send(&Reply::ok());
            return;
        }
        let patience = match &body {
            Body::Setlk { wait: true, .. } => Patience::UntilSignal,
            Body::Flush { .. } => Patience::WhileAlive,
            _ => Patience::UntilKilled,
        };
        self.run(head, patience, answer, Work { body, leaving, order }, early);
    }

    fn forgotten(&self, nodes: &[(u64, u64)]) {
        self.core.copies.forgotten(nodes.iter().copied());
    }

    fn accepted(&self, offer: Init) -> Init {
        let newer = if self.core.old_kernel { abi::init::DIRECT_IO_ALLOW_MMAP } else { 0 };
        Init { flags: offer.flags & !newer, ..offer }
    }

    fn agreed(&self, agreed: Agreed) {
        if let Some(k) = &self.keep {
            for (n, word) in KEPT_AGREED.into_iter().zip(agreed.to_words()) {
                k.mount_word(n).store(word, Release);
            }
        }
    }

    fn interrupt(&self, unique: u64) -> bool {
        self.interrupts.interrupt(unique)
    }
}

/// Whether a write goes to the end of the file. Pages of a mapping are written where they are
/// mapped, whatever the handle's flags say.
fn appends(flags: u32, from_mapping: bool) -> bool {
    flags as i32 & libc::O_APPEND != 0 && !from_mapping
}

fn empty(result: Result<()>) -> Reply {
    match result {
        Ok(()) => Reply::ok(),
        Err(e) => Reply::Error(errno(&e)),
    }
}

/// A reply from a result.
fn with<T>(result: Result<T>, make: impl FnOnce(T) -> Reply) -> Reply {
    result.map_or_else(|e| Reply::Error(errno(&e)), make)
}

/// A reply about an inode that was created at a name.
fn made(result: Result<pb::Attr>, name: (Ino, &[u8])) -> Reply {
    with(result, |a| reply::entry(&a, name, Taken::Blindly))
}

impl Core {
    fn order(&self, head: &Head, body: &Body) -> Order {
        let (mapped, node) = (&self.mapped, head.node);
        let change =
            |node, offset: u64, end| Order::Change(Arc::new(mapped.change(node, offset, end)));
        match body {
            Body::Read { page_in: true, offset, size, .. } => {
                Order::PageIn(mapped.page_in(node, *offset, u64::from(*size)))
            }
            // The kernel keeps these pages locked, so a notice would wait for the write that waits
            // for it. It has them as they will be written.
            Body::Write { through_pages: true, .. } if !self.maps_direct() => Order::Nothing,
            Body::Write { from_mapping: false, handle, offset, flags, data, .. } => {
                match appends(*flags, false) {
                    // The write goes to the end of the file as the servers know it. That may be
                    // beyond the kernel's end, or before it if the kernel's is outdated.
                    true => change(
                        node,
                        self.vfs.known_end(*handle).map_or(0, |end| end.min(*offset)),
                        u64::MAX,
                    ),
                    false => change(node, *offset, offset.saturating_add(data.len() as u64)),
                }
            }
            Body::Fallocate { offset, len, mode, .. } if Vfs::makes_zeros(*mode as i32) => {
                change(node, *offset, offset.saturating_add(*len))
            }
            Body::CopyRange(c) => {
                match mapped.change_that_drops(
                    c.to_node,
                    c.to_offset,
                    c.to_offset.saturating_add(c.len),
                ) {
                    Ok(change) => Order::Change(Arc::new(change)),
                    Err(HasPages) => Order::HasPages,
                }
            }
            _ => Order::Nothing,
        }
    }

    async fn answer(
        &self,
        head: Head,
        operation: Option<&Operation>,
        body: Body,
        order: Order,
    ) -> Reply {
        let who = Caller { uid: head.uid, gid: head.gid, pid: head.pid, operation };
        match body {
            Body::Open { .. }
            | Body::Create { .. }
            | Body::Tmpfile { .. }
            | Body::Read { .. }
            | Body::Write { .. }
            | Body::Flush { .. }
            | Body::Release { .. }
            | Body::Fsync { .. }
            | Body::Fallocate { .. }
            | Body::Lseek { .. }
            | Body::Getlk { .. }
            | Body::Setlk { .. }
            | Body::Ioctl { .. }
            | Body::CopyRange(_) => self.file(who, head.node, body, order).await,
            Body::Opendir | Body::Readdir { .. } | Body::Releasedir { .. } | Body::Fsyncdir => {
                self.directory(who, head.node, body).await
            }
            Body::Getxattr { .. }
            | Body::Setxattr { .. }
            | Body::Listxattr { .. }
            | Body::Removexattr { .. } => self.xattr(who, head.node, body).await,
            body => self.name(who, head.node, body).await,
        }
    }

    /// Sends a reply. What the kernel may cache is decided at this moment: a recall happens
    /// completely before or after it.
    fn send(&self, answer: Answer, reply: Reply) {
        let Reply::Told(told) = reply else {
            answer.send(&reply);
            return;
        };
        let (v, taken) = (&self.vfs, told.taken());
        let keeps_names = self.agreed.get().is_some_and(Agreed::forgets_names);
        let _now = v.telling();
        let attr = |s: &Stat| {
            if taken == Taken::Blindly {
                return Duration::ZERO; // the kernel asks when it needs them
            }
            s.timeout(self.bounds.attr.min(v.attr_valid(&s.attr)))
        };
        let name = |dir, name: &[u8], to| {
            // Names of a listing would be valid from when the kernel processes them, not from its
            // request.
            if !keeps_names || taken == Taken::Listed {
                return Duration::ZERO;
            }
            let valid = self.bounds.entry.min(v.name_valid(dir, name, to));
            if !valid.is_zero() {
                self.copies.has_names();
            }
            valid
        };
        let nodes: Vec<u64> = told.nodes().collect();
        self.copies.brings(&nodes);
        if !answer.send(&told.finish(attr, name)) {
            self.copies.forgotten(nodes.into_iter().map(|n| (n, 1)));
        }
    }

    /// Operations on names and attributes.
    async fn name(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Lookup { name } => match v.lookup(who, node, &name).await {
                Err(e) if e.code == Code::NoEnt => {
                    self.moved.left((node, &name));
                    reply::missing((node, &name))
                }
                Err(e) => Reply::Error(errno(&e)),
                Ok(a) => {
                    match is_dir(&a) && !matches!(&name[..], b"." | b"..") {
                        true => Box::pin(self.moved.found(a.ino, (node, &name))).await,
                        false => self.moved.left((node, &name)),
                    }
                    reply::entry(&a, (node, &name), Taken::Found)
                }
            },
            Body::Getattr => with(v.getattr(node).await, |a| reply::attr(&a, Taken::InOrder)),
            Body::Statx => with(v.getattr(node).await, |a| reply::statx(&a)),
            Body::Setattr(set) => with(v.setattr(who, node, change(&set)).await, |a| {
                reply::attr(&a.into(), Taken::Blindly)
            }),
            Body::Readlink => with(v.readlink(who, node).await, Reply::Bytes),
            Body::Symlink { name, target } => {
                made(v.symlink(who, node, &name, &target).await, (node, &name))
            }
            Body::Mknod { name, mode, rdev, umask } => {
                made(v.mknod(who, node, &name, mode, umask, rdev).await, (node, &name))
            }
            Body::Mkdir { name, mode, umask } => {
                let dir = v.mkdir(who, node, &name, mode, umask).await;
                made(dir.inspect(|a| self.moved.made(a.ino, (node, &name))), (node, &name))
            }
            Body::Unlink { name } => empty(v.unlink(who, node, &name).await),
            Body::Rmdir { name } => {
                empty(v.rmdir(who, node, &name).await.inspect(|()| self.moved.left((node, &name))))
            }
            Body::Rename { name, to, to_name, flags } => {
                with(v.rename(who, (node, &name), (to, &to_name), flags).await, |()| {
                    self.moved.renamed((node, &name), (to, &to_name), Vfs::exchanges(flags));
                    // The kernel uses the new name for as long as the old one, but the client may
                    // not know it.
                    self.copies.forget_names();
                    Reply::ok()
                })
            }
            Body::Link { ino, name } => made(v.link(who, ino, node, &name).await, (node, &name)),
            Body::Access { mask } => empty(v.access(who, node, mask).await),
            Body::Statfs => with(v.statfs().await, |s| reply::statfs(&s)),
            Body::Syncfs => empty(v.sync_all().await),
            Body::Destroy => Reply::ok(),
            _ => Reply::Error(libc::ENOSYS),
        }
    }

    fn open_flags(&self, flags: u32) -> u32 {
        self.agreed.get().map_or(0, |a| a.open_flags(flags))
    }

    fn maps_direct(&self) -> bool {
        self.agreed.get().is_some_and(Agreed::maps_direct)
    }

    /// Operations on open files.
    async fn file(&self, who: Caller<'_>, node: u64, body: Body, order: Order) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Open { flags }
                if running::cuts_unseen(flags) && running::runs(&self.mountpoint, node).await =>
            {
                Reply::Error(libc::ETXTBSY)
            }
            Body::Open { flags } => with(v.open(who, node, flags as i32).await, |o| {
                reply::opened(o.handle, self.open_flags(flags))
            }),
            Body::Create { name, flags, mode, umask } => {
                with(v.create(who, node, &name, mode, umask, flags as i32).await, |(a, o)| {
                    reply::created(&a, (node, &name), o.handle, self.open_flags(flags))
                })
            }
            Body::Tmpfile { flags, mode, umask } => {
                with(v.tmpfile(who, node, mode, umask, flags as i32).await, |(a, o)| {
                    reply::created(&a, (node, b""), o.handle, self.open_flags(flags))
                })
            }
            Body::Read { handle, offset, size, .. } => {
                self.read((node, handle), offset, size as usize, order).await
            }
            Body::Write { handle, offset, flags, from_mapping, strips, data, .. } => {
                let place = if appends(flags, from_mapping) {
                    Place::End { at: offset, tid: who.pid }
                } else {
                    Place::At(offset)
                };
                if strips && let Err(e) = v.strip(who, handle).await {
                    return Reply::Error(errno(&e));
                }
                let len = data.len();
                match from_mapping {
                    true => with(
                        v.write_mapped(who, handle, offset, data, self.shared.writes_in(node))
                            .await,
                        |()| reply::written(len),
                    ),
                    false => with(v.write(who, handle, place, data, order).await, reply::written),
                }
            }
            Body::Getlk { handle, lock } => {
                with(v.getlk(handle, &lock).await, |found| reply::lock(&lock, found))
            }
            Body::Setlk { handle, lock, wait } => {
                empty(self.lock((node, handle), &lock, wait).await)
            }
            Body::Fsync { handle, .. } => empty(v.fsync(handle).await),
            Body::Fallocate { handle, offset, len, mode } => {
                empty(v.fallocate(who, handle, (offset, len), mode as i32, order).await)
            }
            Body::Lseek { handle, offset, whence } => {
                with(v.seek(handle, offset, whence as i32).await, reply::number)
            }
            Body::Ioctl { handle, command, room } => v
                .ioctl(handle, command, room as usize)
                .map_or(Reply::Error(libc::ENOTTY), |a| reply::answer(&a)),
            Body::CopyRange(c) => self.copy(who, c, order).await,
            _ => Reply::Error(libc::ENOSYS),
        }
    }

    /// The `order` of a page-in ends before the kernel has the answer.
    async fn read(
        &self,
        (node, handle): (u64, u64),
        offset: u64,
        len: usize,
        order: Order,
    ) -> Reply {
        let Order::PageIn(page_in) = &order else {
            return with(self.vfs.read(handle, offset, len).await, Reply::Data);
        };
        let read = self.vfs.read_to_keep(handle, offset, len, || page_in.asked()).await;
        with(read, |(parts, as_of, using)| {
            self.shared.hands_out(node, as_of);
            // Drop this first: a task that waits for the end of the use then takes out all pages
            // that are out.
            drop(order);
            drop(using);
            Reply::Data(parts)
        })
    }

    async fn lock(&self, (node, handle): (u64, u64), lock: &Lock, wait: bool) -> Result<()> {
        let unlocks = lock.mode == LockType::LockUnlock;
        if unlocks {
            self.shared.synchronize(node).await;
        }
        let done = self.vfs.setlk(handle, lock, wait).await;
        if !unlocks && done.is_ok() {
            self.shared.synchronize(node).await;
        }
        done
    }

    async fn copy(&self, who: Caller<'_>, c: request::CopyRange, order: Order) -> Reply {
        let range = CopyRange {
            from: c.from,
            from_offset: c.from_offset,
            to: c.to,
            to_offset: c.to_offset,
        };
        let made = |n| if c.wide { reply::number(n as u64) } else { reply::written(n) };
        match order {
            Order::Nothing => with(self.vfs.copy_range(who, range, c.len, ()).await, made),
            Order::Change(change) => {
                let copied = self.vfs.copy_range(who, range, c.len, change.clone()).await;
                // The kernel would drop what programs store to pages that it gets now. With this
                // error it copies again, by reading and writing.
                if copied.is_ok() && change.is_waited_for() {
                    return Reply::Error(libc::EXDEV);
                }
                change.until_dropped();
                with(copied, made)
            }
            Order::PageIn(_) | Order::HasPages => Reply::Error(libc::EXDEV),
        }
    }

    async fn directory(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Opendir => reply::opened(v.opendir(who, node), 0),
            Body::Readdir { handle, offset, size, plus } => {
                let room = size.min(super::MAX_REQUEST) as usize;
                let mut entries = Entries::new(room, plus.then_some(node));
                let read = v.readdir(handle, offset, plus, |e| entries.take(e)).await;
                with(read, |()| entries.reply())
            }
            Body::Releasedir { handle } => {
                v.releasedir(handle);
                Reply::ok()
            }
            // Every change of a directory is in the Raft log before it is answered.
            _ => Reply::ok(),
        }
    }

    async fn xattr(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Getxattr { name, size } => {
                with(v.getxattr(who, node, &name).await, |x| reply::xattr(&x, size))
            }
            Body::Listxattr { size } => {
                with(v.listxattr(who, node).await, |x| reply::xattr(&x, size))
            }
            Body::Setxattr { name, value, flags } => {
                empty(v.setxattr(who, node, &name, &value, flags).await)
            }
            Body::Removexattr { name } => empty(v.removexattr(who, node, &name).await),
            _ => Reply::Error(libc::ENOSYS),
        }
    }
}

fn change(set: &SetAttr) -> Change {
    let has = |bit| set.valid & bit != 0;
    let time = |bit, now, (seconds, nanos): (i64, u32)| match (has(now), has(bit)) {
        (true, _) => Some(Time::Now),
        (false, true) => {
            Some(Time::At(seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(nanos))))
        }
        (false, false) => None,
    };
    Change {
        mode: has(fattr::MODE).then_some(set.mode),
        uid: has(fattr::UID).then_some(set.uid),
        gid: has(fattr::GID).then_some(set.gid),
        size: has(fattr::SIZE).then_some(set.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, set.atime),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, set.mtime),
        handle: has(fattr::FH).then_some(set.handle),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_fields_change() {
        assert_eq!(
            change(&SetAttr { mode: 7, uid: 7, size: 7, ..Default::default() }),
            Change::default()
        );
        let set = SetAttr {
            valid: fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW,
            atime: (-1, 5),
            ..Default::default()
        };
        let want = Change {
            atime: Some(Time::At(-999_999_995)),
            mtime: Some(Time::Now),
            ..Default::default()
        };
        assert_eq!(change(&set), want);
        let far =
            SetAttr { valid: fattr::ATIME, atime: (i64::MAX, 999_999_999), ..Default::default() };
        assert_eq!(change(&far).atime, Some(Time::At(i64::MAX)));
    }
}
