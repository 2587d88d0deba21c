//! Runs the requests of a mount.
//!
//! A read of cached bytes is answered on the thread that received it; every other request runs as a
//! task on the tokio runtime. When too many tasks run, the threads stop reading requests from the
//! kernel until one ends. Requests that wait for a lock have a limit of their own.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Handover, Operation};
use strake_fabric::Pool;
use tokio::{runtime::Handle, sync::Semaphore};

use super::{
    abi,
    answer::{Core, empty},
    channel::Channel,
    copies::{Copies, Recalls},
    init::Agreed,
    interrupts::{Interrupts, Patience},
    kept::{agreed_before, keep_agreed},
    mapped::Mapped,
    order::Order,
    progress::{Progress, TakenSoFar},
    reply::{Reply, Timeouts},
    request::{Body, Head, Init, Request},
    session::{Answer, Handler},
    shared::Shared,
};
use crate::{
    config::MountConfig,
    handover::{HandoverMemory, LeftRequest},
    vfs::{Leaving, Released, Vfs},
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
            tokio::spawn(async move { vfs.files.finish_release(closed).await });
        }
        if let Some(a) = keep.as_deref().and_then(agreed_before) {
            let _ = agreed.set(a);
        }
        let copies = Arc::new(Copies::new(cfg.root, Handle::current()));
        let mapped = Arc::new(Mapped::new());
        let shared = Arc::new(Shared::new(mapped.clone(), Arc::downgrade(&vfs)));
        let former = keep.as_ref().map_or(0, |k| k.former_session());
        vfs.files.open_inodes().into_iter().for_each(|ino| shared.may_be_out(ino, former));
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
        self.core.vfs.locks.set_queue(Arc::new(TakenSoFar(progress.clone())));
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
        // A wait for a lock must not keep other requests from running.
        let passes = patience == Patience::UntilSignal || is_awaited(&body, operation.as_ref());
        self.runtime.spawn(async move {
            let mut place = Some(place);
            let reply = {
                // Pinned in place, because a task reserves memory for each place that a future is
                // moved to.
                let work = std::pin::pin!(async {
                    order.turn(&mut place).await;
                    let passes = passes || order.is_at_once();
                    let _room = if passes { None } else { core.room.acquire().await.ok() };
                    match (body, leaving) {
                        (Body::Flush { handle, .. }, Some(locks)) => {
                            empty(core.vfs.files.finish_flush(handle, locks).await)
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

/// Whether other clients may wait for a request, so that nothing may delay it: an append that they
/// wait for, a write-back of pages that they want, and a truncation, before which the kernel writes
/// nothing back.
fn is_awaited(body: &Body, operation: Option<&Operation>) -> bool {
    match body {
        Body::Write { from_mapping: true, .. } => true,
        Body::Setattr(set) if set.valid & abi::fattr::SIZE != 0 => true,
        Body::Open { flags } if flags & libc::O_TRUNC as u32 != 0 => true,
        _ => operation.is_some_and(Operation::is_awaited),
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
            core.vfs.files.finish_release(closed).await;
            drop(place);
        });
    }
}

impl Handler for Serve {
    type Noted = Noted;

    fn note(&self, body: &Body) -> Noted {
        match body {
            Body::Flush { handle, owner } => {
                Noted::Flush(self.core.vfs.files.note_flush(*handle, *owner))
            }
            Body::Release { handle } => Noted::Release(self.core.vfs.files.note_release(*handle)),
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
                mapped.released(head.node, || vfs.files.has_open(head.node));
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
            if let Some(parts) = self.core.vfs.files.read_ready(handle, offset, size as usize) {
                answer.send(&Reply::Data(parts));
                return;
            }
        }
        if let Body::Flush { handle, .. } = body
            && leaving.as_ref().is_none_or(Leaving::is_empty)
            && self.core.vfs.files.flush_ready(handle)
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
            keep_agreed(k, agreed);
        }
    }

    fn interrupt(&self, unique: u64) -> bool {
        self.interrupts.interrupt(unique)
    }
}
