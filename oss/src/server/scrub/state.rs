//! How far the scrub of a target is, and what was asked of it.

use std::time::Duration;

use parking_lot::Mutex;
use strake_proto::{ChainId, ChunkId, Error};
use tokio::{sync::Notify, time::Instant};

use crate::engine::Position;

/// Longest sleep: wall clocks jump, so the time is checked again after so long.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Requests of an administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Start a pass at the first chunk now, without regard to other requests.
    Start,
    /// Stop, until one of the others is requested or the server restarts.
    Stop,
    /// Continue a stopped pass.
    Resume,
}

#[derive(Default)]
pub(super) struct State {
    pub position: Position,
    pub ask: Option<Ask>,
    /// The current pass was requested.
    pub asked: bool,
    pub paused: bool,
    pub running: bool,
    /// When this server began or resumed this pass, and the pass's bytes at that time.
    pub since: Option<(Instant, u64)>,
    /// Chains that were not in sync when their turn came.
    pub skipped: u64,
    /// Why this pass could not look at everything.
    pub trouble: String,
}

/// The scrub of one target.
pub(in crate::server) struct Scrub {
    pub(super) state: Mutex<State>,
    news: Notify,
}

impl Scrub {
    /// Continues where an earlier run of the server stopped.
    pub(in crate::server) fn new(position: Position) -> Scrub {
        Scrub { state: Mutex::new(State { position, ..State::default() }), news: Notify::new() }
    }

    /// Passes an administrator's request on to the task that scrubs.
    pub(in crate::server) fn ask(&self, what: Ask) {
        self.state.lock().ask = Some(what);
        self.news.notify_one();
    }

    /// `None`: a pass continues or begins now. Otherwise how long there is nothing to do.
    pub(super) fn wait(&self, now_ms: u64, every_s: u64) -> Option<Duration> {
        let mut s = self.state.lock();
        match s.ask.take() {
            Some(Ask::Start) => {
                s.begin(now_ms, true);
                return None;
            }
            Some(Ask::Stop) => s.paused = true,
            Some(Ask::Resume) => (s.paused, s.asked) = (false, s.position.at.is_some()),
            None => {}
        }
        if s.position.at.is_some() && !s.paused {
            return None;
        }
        if s.paused || every_s == 0 {
            return Some(LONGEST_WAIT);
        }
        s.position.began_ms = s.position.began_ms.min(now_ms);
        let due = s.position.began_ms.saturating_add(every_s.saturating_mul(1000));
        if s.position.pass > 0 && now_ms < due {
            return Some(Duration::from_millis(due - now_ms).min(LONGEST_WAIT));
        }
        s.begin(now_ms, false);
        None
    }

    /// Whether a request is pending.
    pub(super) fn is_asked(&self) -> bool {
        self.state.lock().ask.is_some()
    }

    pub(super) async fn nap(&self, long: Duration) {
        tokio::select! {
            biased;
            () = self.news.notified() => {}
            () = tokio::time::sleep(long) => {}
        }
    }

    pub(super) fn at(&self) -> Option<(ChainId, Option<ChunkId>)> {
        self.state.lock().position.at
    }

    pub(super) fn go_to(&self, at: Option<(ChainId, Option<ChunkId>)>) {
        self.state.lock().position.at = at;
    }

    pub(super) fn go(&self) {
        let mut s = self.state.lock();
        (s.running, s.since) = (true, Some((Instant::now(), s.position.bytes)));
    }

    /// Ends or interrupts the pass. Returns whether it is complete.
    pub(super) fn rest(&self, now_ms: u64) -> bool {
        let mut s = self.state.lock();
        s.running = false;
        let p = &mut s.position;
        let complete = p.at.is_none();
        if complete {
            (p.ended_ms, p.took_ms) = (now_ms, now_ms.saturating_sub(p.began_ms));
            s.asked = false;
        }
        complete
    }

    pub(super) fn is_in_trouble(&self, what: &Error) {
        tracing::error!("the scrub skips something: {what}");
        self.state.lock().trouble = what.to_string();
    }
}

impl State {
    /// The position comes from the disk, so its numbers may be anything.
    pub(super) fn looked(&mut self, bytes: u64, chunks: u64) {
        let p = &mut self.position;
        p.bytes = p.bytes.saturating_add(bytes);
        p.chunks = p.chunks.saturating_add(chunks);
    }

    fn begin(&mut self, now_ms: u64, asked: bool) {
        let p = &mut self.position;
        (p.pass, p.began_ms, p.chunks, p.bytes, p.at) =
            (p.pass.saturating_add(1), now_ms, 0, 0, Some((0, None)));
        (self.asked, self.paused, self.skipped) = (asked, false, 0);
        self.trouble.clear();
        self.since = None;
    }
}
