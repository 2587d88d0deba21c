//! A value with notification of changes: the part of `tokio::sync::watch` that the simulated code
//! needs.
//!
//! tokio's version wakes its receivers in an order drawn from the runtime's random numbers, which
//! no seed controls. This one wakes them in the order in which they began to wait, so that the
//! simulator can replay a run.

use std::{
    fmt,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::Notify;

struct Shared<T> {
    value: RwLock<T>,
    /// Twice the number of changes; odd when the sender is gone. Changed only after the value.
    version: AtomicU64,
    news: Notify,
}

const GONE: u64 = 1;

/// Sets the value. Receivers are told when it is dropped.
pub struct Sender<T>(Arc<Shared<T>>);

/// Sees the newest value; it may miss values in between.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

/// The sender is gone: there will be no other value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody sets this value any more")
    }
}

impl std::error::Error for Closed {}

/// A sender of values, the first of which is `value`, and a receiver that has seen that one.
pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let sender = Sender::new(value);
    let receiver = sender.subscribe();
    (sender, receiver)
}

impl<T> Sender<T> {
    /// A sender without receivers.
    pub fn new(value: T) -> Sender<T> {
        Sender(Arc::new(Shared {
            value: RwLock::new(value),
            version: AtomicU64::new(0),
            news: Notify::new(),
        }))
    }

    /// A receiver that has seen the current value.
    pub fn subscribe(&self) -> Receiver<T> {
        Receiver { seen: self.0.version.load(Ordering::SeqCst), shared: self.0.clone() }
    }

    /// The current value. Must not be held across an await.
    pub fn borrow(&self) -> RwLockReadGuard<'_, T> {
        self.0.value.read()
    }

    /// Sets the value and returns the previous one.
    pub fn send_replace(&self, value: T) -> T {
        let mut before = value;
        self.send_if_modified(|v| {
            std::mem::swap(v, &mut before);
            true
        });
        before
    }

    /// Changes the value in place; `change` returns whether receivers are notified.
    pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        {
            let mut value = self.0.value.write();
            if !change(&mut value) {
                return false;
            }
            self.0.version.fetch_add(2, Ordering::SeqCst);
        }
        self.0.news.notify_waiters();
        true
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.version.fetch_or(GONE, Ordering::SeqCst);
        self.0.news.notify_waiters();
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        Receiver { shared: self.shared.clone(), seen: self.seen }
    }
}

impl<T> Receiver<T> {
    /// The newest value. Must not be held across an await.
    pub fn borrow(&self) -> RwLockReadGuard<'_, T> {
        self.shared.value.read()
    }

    /// The newest value, which then counts as seen.
    pub fn borrow_and_update(&mut self) -> RwLockReadGuard<'_, T> {
        let value = self.shared.value.read();
        self.seen = self.shared.version.load(Ordering::SeqCst) & !GONE;
        value
    }

    /// Waits for a value that this receiver has not seen, and marks it as seen. `Closed`: the
    /// sender is gone and its last value was seen.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        loop {
            let mut news = pin!(self.shared.news.notified());
            // From here on no notification is missed.
            news.as_mut().enable();
            let version = self.shared.version.load(Ordering::SeqCst);
            if version & !GONE != self.seen & !GONE {
                self.seen = version & !GONE;
                return Ok(());
            }
            if version & GONE != 0 {
                return Err(Closed);
            }
            news.await;
        }
    }

    /// Waits for a value that `good` accepts; the current one counts, too. `Closed`: the sender is
    /// gone, and `good` accepts none of its values.
    pub async fn wait_for(&mut self, mut good: impl FnMut(&T) -> bool) -> Result<T, Closed>
    where
        T: Clone,
    {
        loop {
            {
                let value = self.borrow_and_update();
                if good(&value) {
                    return Ok(value.clone());
                }
            }
            self.changed().await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::Mutex;
    use tokio::{
        task::yield_now,
        time::{sleep, timeout},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn receivers_wake_in_the_order_in_which_they_wait() {
        for _ in 0..20 {
            let sender = Sender::new(0u32);
            let order = Arc::new(Mutex::new(Vec::new()));
            let tasks: Vec<_> = (0..20)
                .map(|n| {
                    let (mut rx, order) = (sender.subscribe(), order.clone());
                    tokio::spawn(async move {
                        rx.changed().await.unwrap();
                        order.lock().push(n);
                    })
                })
                .collect();
            yield_now().await;
            assert!(order.lock().is_empty());
            sender.send_replace(1);
            for t in tasks {
                t.await.unwrap();
            }
            assert_eq!(*order.lock(), (0..20).collect::<Vec<_>>());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_between_looking_and_waiting_is_not_missed() {
        let (tx, mut rx) = channel(1);
        assert!(
            timeout(Duration::from_secs(1), rx.changed()).await.is_err(),
            "the first value is no news"
        );
        assert_eq!(tx.send_replace(2), 1);
        rx.changed().await.unwrap();
        assert_eq!(*rx.borrow(), 2);
        assert!(!tx.send_if_modified(|_| false));
        assert!(timeout(Duration::from_secs(1), rx.changed()).await.is_err());
        tx.send_replace(3);
        assert_eq!(*rx.borrow_and_update(), 3);
        assert!(
            timeout(Duration::from_secs(1), rx.changed()).await.is_err(),
            "seen by borrow_and_update"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_value_is_seen_before_the_end() {
        let (tx, mut rx) = channel(1);
        let late = tokio::spawn({
            let mut rx = rx.clone();
            async move { rx.wait_for(|v| *v == 7).await }
        });
        sleep(Duration::from_millis(1)).await;
        tx.send_replace(2);
        drop(tx);
        assert_eq!(late.await.unwrap(), Err(Closed));
        assert_eq!(rx.changed().await, Ok(()));
        assert_eq!(rx.changed().await, Err(Closed));
        assert_eq!(rx.wait_for(|v| *v == 2).await, Ok(2), "the present value counts");
    }
}
