//! The order in which requests for locks of one owner are made.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock},
};

use futures_util::future::{Either, FutureExt, ready};
use strake_proto::Ino;
use tokio::{
    sync::{Mutex, Notify, OwnedMutexGuard, Semaphore},
    task::coop::unconstrained,
};

use super::unlocking::Unlockings;

/// Most concurrent waits of one client; the metadata servers accept no more.
pub const MAX_WAITS: usize = 1024;
const LANES: usize = 64;

/// A component that requests locks on behalf of programs, such as a mount.
pub trait Programs: Send + Sync {
    /// Returns when every release that programs made before this call has reached the client.
    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Serialises the requests of one owner for one file. Owners share lanes.
pub(crate) struct OwnerQueues {
    lanes: [Arc<Mutex<()>>; LANES],
    pub(super) waits: Arc<Semaphore>,
    pub(super) unlockings: Arc<Unlockings>,
    pub(super) programs: OnceLock<Arc<dyn Programs>>,
    pub(super) has_programs: Notify,
}

impl Default for OwnerQueues {
    fn default() -> OwnerQueues {
        OwnerQueues {
            lanes: std::array::from_fn(|_| Arc::default()),
            waits: Arc::new(Semaphore::new(MAX_WAITS)),
            unlockings: Arc::default(),
            programs: OnceLock::new(),
            has_programs: Notify::new(),
        }
    }
}

impl OwnerQueues {
    /// The place in the queue is taken by this call, not by the first poll. Otherwise the owner's
    /// next request, perhaps from another thread, could overtake a task that is to unlock and has
    /// not been polled yet.
    pub(super) fn enter(
        &self,
        ino: Ino,
        owner: u64,
    ) -> impl Future<Output = OwnedMutexGuard<()>> + Send + use<> {
        let mut mix = ino.rotate_left(32) ^ owner;
        let lane = strake_proto::layout::splitmix64(&mut mix) as usize % LANES;
        // `unconstrained`, because a task that has used up its budget would not get into the queue.
        let mut turn = Box::pin(unconstrained(self.lanes[lane].clone().lock_owned()));
        match turn.as_mut().now_or_never() {
            Some(lane) => Either::Left(ready(lane)),
            None => Either::Right(turn),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_taken_in_the_order_in_which_they_were_asked_for() {
        let lanes = OwnerQueues::default();
        let first = lanes.enter(1, 0).await;
        let (second, mut third) = (lanes.enter(1, 0), Box::pin(lanes.enter(1, 0)));
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        // The second one has not been polled yet.
        assert!(third.as_mut().now_or_never().is_none());
        let mut second = second.now_or_never().expect("its turn");
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        drop(third.now_or_never().expect("the last turn"));
        // A dropped request does not block others.
        second = lanes.enter(1, 0).await;
        drop(lanes.enter(1, 0));
        drop(second);
        assert!(lanes.enter(1, 0).now_or_never().is_some());
    }
}
