//! In which order requests for locks of one owner are made.

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

/// Waits of one client at the same time; the metadata servers take no more.
pub const MAX_WAITS: usize = 1024;
const LANES: usize = 64;

/// Whoever asks for locks on behalf of programs, as a mount does.
pub trait Programs: Send + Sync {
    /// Returns when all that programs have given up before this was called is being given up at the
    /// client.
    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Requests of one owner for one file, one after the other. Owners share lanes.
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
    /// The place in the queue is that of this call, not of the first poll: what an owner asks for
    /// next, perhaps in another thread, must not overtake a task that is to unlock and has not
    /// begun.
    pub(super) fn enter(
        &self,
        ino: Ino,
        owner: u64,
    ) -> impl Future<Output = OwnedMutexGuard<()>> + Send + use<> {
        let mut mix = ino.rotate_left(32) ^ owner;
        let lane = strake_proto::layout::splitmix64(&mut mix) as usize % LANES;
        // A task that has done much would not be let into the queue.
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
        // Nobody has looked at the second yet.
        assert!(third.as_mut().now_or_never().is_none());
        let mut second = second.now_or_never().expect("its turn");
        assert!(third.as_mut().now_or_never().is_none());
        drop(second);
        drop(third.now_or_never().expect("the last turn"));
        // Who does not want it any more is in nobody's way.
        second = lanes.enter(1, 0).await;
        drop(lanes.enter(1, 0));
        drop(second);
        assert!(lanes.enter(1, 0).now_or_never().is_some());
    }
}
