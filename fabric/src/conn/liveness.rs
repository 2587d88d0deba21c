//! **Liveness.** An end that owes an answer sends something at least every fifth of
//! `Options::silence`; an end that waits for an answer and hears nothing for that long gives the
//! connection up. Idle connections send nothing.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
};

use tokio::sync::Notify;

/// What the pulse of a connection goes by.
#[derive(Default)]
pub(crate) struct Liveness {
    /// Calls waiting for an answer, and answers owed (handlers, a half-read frame, a reader waiting
    /// for memory).
    awaited: AtomicU32,
    owed: AtomicU32,
    /// The reader waits for memory on this side, so silence says nothing about the peer.
    pub stalled: AtomicBool,
    /// Bytes that went through the stream: signs of life.
    received: AtomicU64,
    sent: AtomicU64,
    pulse_sleeps: AtomicBool,
    pulse: Notify,
}

impl Liveness {
    pub fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }

    pub fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Relaxed);
    }

    /// Bytes received and sent so far.
    pub fn moved(&self) -> (u64, u64) {
        (self.received.load(Relaxed), self.sent.load(Relaxed))
    }

    /// A call waits for an answer. [`Liveness::wake`] must follow.
    pub fn awaits(&self) {
        self.awaited.fetch_add(1, SeqCst);
    }

    pub fn awaits_no_more(&self) {
        self.awaited.fetch_sub(1, SeqCst);
    }

    /// While the result lives, this end owes the peer an answer and sends signs of life.
    pub fn owe(self: &Arc<Self>) -> Owed {
        self.owed.fetch_add(1, SeqCst);
        self.wake();
        Owed(self.clone())
    }

    pub fn owes(&self) -> bool {
        self.owed.load(Relaxed) > 0
    }

    /// Whether silence of the peer says something about it.
    pub fn is_awaited(&self) -> bool {
        self.awaited.load(Relaxed) > 0 && !self.stalled.load(Relaxed)
    }

    fn is_busy(&self) -> bool {
        self.awaited.load(SeqCst) > 0 || self.owed.load(SeqCst) > 0
    }

    /// Lets the pulse begin if it waits for something to do.
    pub fn wake(&self) {
        if self.pulse_sleeps.load(SeqCst) {
            self.pulse.notify_one();
        }
    }

    /// Waits until an answer is awaited or owed. Returns whether it had to wait.
    pub async fn busy(&self) -> bool {
        if self.is_busy() {
            return false;
        }
        self.pulse_sleeps.store(true, SeqCst);
        if !self.is_busy() {
            self.pulse.notified().await;
        }
        self.pulse_sleeps.store(false, SeqCst);
        true
    }
}

/// See [`Liveness::owe`].
pub(crate) struct Owed(Arc<Liveness>);

impl Drop for Owed {
    fn drop(&mut self) {
        self.0.owed.fetch_sub(1, SeqCst);
    }
}
