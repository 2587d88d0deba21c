//! Memory that clients' bodies and answers take. What all connections share is also limited for
//! each machine, so that one machine leaves memory to the others.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::frame::MAX_BODY;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::options::Options;
use crate::endpoint::machine;

/// Bodies up to this length are limited by the number of connections only.
pub(super) const SHORT_BODY: u32 = 16 << 10;
/// At least this many machines are remembered before those without a connection are forgotten.
const REMEMBERED: usize = 64;

/// Bytes that all connections share. One machine takes at most half of them.
pub(super) struct Shares {
    all: Arc<Semaphore>,
    each: usize,
    machines: Mutex<BTreeMap<String, Weak<Machine>>>,
}

/// What is left of one machine's half, and how many callers wait for it.
struct Machine {
    left: Arc<Semaphore>,
    waiting: AtomicUsize,
}

/// Counts one caller that waits.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(count: &'a AtomicUsize) -> Waits<'a> {
        count.fetch_add(1, Relaxed);
        Waits(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Shares {
    pub fn new(bytes: usize) -> Shares {
        let each = (bytes / 2).max(bytes.min(MAX_BODY as usize));
        Shares { all: Arc::new(Semaphore::new(bytes)), each, machines: Mutex::default() }
    }

    /// The share of a connection from this address.
    pub fn of(&self, addr: &str) -> Share {
        let mut machines = self.machines.lock();
        let name = machine(addr);
        let known = machines.get(name).and_then(Weak::upgrade);
        let own = known.unwrap_or_else(|| {
            if machines.len() >= REMEMBERED && machines.len().is_power_of_two() {
                machines.retain(|_, m| m.strong_count() > 0);
            }
            let new = Arc::new(Machine {
                left: Arc::new(Semaphore::new(self.each)),
                waiting: AtomicUsize::new(0),
            });
            machines.insert(name.to_owned(), Arc::downgrade(&new));
            new
        });
        Share { all: self.all.clone(), own, each: self.each }
    }
}

/// What a connection may take of [`Shares`].
pub(crate) struct Share {
    all: Arc<Semaphore>,
    own: Arc<Machine>,
    each: usize,
}

impl Share {
    /// Waits for memory. A request above a machine's share takes all of that share.
    pub async fn take(&self, bytes: usize) -> Taken {
        let bytes = bytes.min(self.each) as u32;
        let of = self.own.clone();
        let _waits = (self.own.left.available_permits() < bytes as usize)
            .then(|| Waits::new(&self.own.waiting));
        let own = self.own.left.clone().acquire_many_owned(bytes).await;
        let all = self.all.clone().acquire_many_owned(bytes).await;
        Taken { _own: own.ok(), _all: all.ok(), _of: of }
    }

    /// Whether another caller of the same machine waits for memory.
    pub fn is_waited_for(&self) -> bool {
        self.own.waiting.load(Relaxed) > 0
    }

    /// Whether the next long body may find no memory.
    pub fn is_short(&self) -> bool {
        let least = self.own.left.available_permits().min(self.all.available_permits());
        least < self.each.min(MAX_BODY as usize)
    }
}

/// Memory that is reserved until this is dropped. The semaphores are never closed.
pub(crate) struct Taken {
    _own: Option<OwnedSemaphorePermit>,
    _all: Option<OwnedSemaphorePermit>,
    /// The machine stays known.
    _of: Arc<Machine>,
}

/// The reservation of a long body. It is given back when the last part of the body is dropped, or
/// when the request it belongs to is over. A request that waits for long after it has read its body
/// keeps none.
#[derive(Clone)]
pub(crate) struct Charge(Arc<Mutex<Option<Taken>>>);

impl Charge {
    pub fn new(room: Taken) -> Charge {
        Charge(Arc::new(Mutex::new(Some(room))))
    }

    /// Wraps a body: the reservation is given back when its last part is dropped.
    pub fn on(&self, body: Vec<u8>) -> Bytes {
        Bytes::from_owner(Charged { body, _charge: Until(self.clone()) })
    }

    /// A guard that gives the reservation back when it is dropped.
    pub fn until(self) -> Until {
        Until(self)
    }
}

/// See [`Charge::until`].
pub(crate) struct Until(Charge);

impl Drop for Until {
    fn drop(&mut self) {
        drop(self.0.0.lock().take());
    }
}

struct Charged {
    body: Vec<u8>,
    _charge: Until,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// The shares of one connection.
pub(crate) struct Room {
    /// Long bodies that come in.
    pub bodies: Share,
    /// Long bodies of answers that are not written yet.
    pub answers: Share,
    /// Payloads of answers whose length is known in advance, from when they are made until they are
    /// written: the limit of this connection, and the share of the pool below.
    pub payloads: Arc<Semaphore>,
    pub pool: Share,
    /// Payloads of requests in the pool, from before they are read until the request is answered.
    pub uploads: Share,
}

impl Room {
    pub fn new(o: &Options, bodies: Share, answers: Share, pool: Share, uploads: Share) -> Room {
        Room {
            bodies,
            answers,
            payloads: Arc::new(Semaphore::new(o.max_inflight_bytes)),
            pool,
            uploads,
        }
    }

    pub fn is_short(&self) -> bool {
        self.bodies.is_short() || self.answers.is_short() || self.uploads.is_waited_for()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn now(share: &Share, bytes: usize) -> Option<Taken> {
        share.take(bytes).now_or_never()
    }

    #[test]
    fn one_machine_leaves_half_of_it_to_others() {
        let all = Shares::new(64 << 20);
        let (a, b, c) = (all.of("tcp:a:1"), all.of("tcp:a:2"), all.of("tcp:c:1"));
        let first = now(&a, 32 << 20).unwrap();
        assert!(now(&b, 1).is_none() && b.is_short(), "it is of the same machine");
        assert!(!c.is_short());
        let other = now(&c, 100 << 20).expect("what is larger than the share has all of it");
        assert!(now(&all.of("tcp:d:1"), 1).is_none(), "all of it is taken");
        drop((first, other));
        assert!(now(&b, 1).is_some());
    }

    #[test]
    fn machines_without_connections_are_forgotten() {
        let all = Shares::new(1 << 20);
        let kept = all.of("tcp:kept:1");
        let taken = now(&kept, 1 << 20).unwrap();
        for n in 0..10 * REMEMBERED {
            drop(all.of(&format!("tcp:h{n}:1")));
        }
        assert!(all.machines.lock().len() <= REMEMBERED);
        assert!(all.of("tcp:kept:2").is_short());
        drop(taken);
    }

    #[test]
    fn a_body_keeps_its_room_no_longer_than_it_is_there_or_its_request_runs() {
        let share = Shares::new(1 << 20).of("tcp:a:1");
        let charge = || Charge::new(now(&share, 1 << 20).expect("it was given back"));
        let first = charge();
        let (body, running) = (first.on(vec![7; 1 << 20]), first.until());
        let part = body.slice(5..9);
        drop(body);
        assert!(now(&share, 1).is_none(), "a part of it is there");
        assert_eq!(&part[..], [7; 4]);
        drop(part);
        assert!(now(&share, 1 << 20).is_some());
        drop(running);
        let next = charge();
        let (body, running) = (next.on(vec![0; 1 << 20]), next.until());
        drop(running);
        assert!(now(&share, 1 << 20).is_some(), "the answer was sent");
        drop(body);
        assert!(now(&share, 1 << 20).is_some());
    }
}
