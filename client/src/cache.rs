//! What was read ahead of one inode: aligned units of [`UNIT`] bytes, each either on its way or here. Pure bookkeeping.
//!
//! A unit is dropped when a reader reaches its end, when this client writes into it, and when it is older than the
//! cache's time to live: other mounts' writes are not announced, so old bytes must not be served.

use std::{collections::BTreeMap, ops::Range, time::Duration};

use strake_fabric::{Buf, watch};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use crate::segments;

pub(crate) const UNIT: u64 = 1 << 20;

enum State {
    /// Fetched by a task; the receiver hears when it ended, well or not.
    Coming(watch::Receiver<bool>),
    Here(Vec<Buf>),
}

struct Unit {
    id: u64,
    /// When its fetch began: its bytes are at least this new.
    since: Instant,
    state: State,
    /// Its share of the memory limit.
    _room: OwnedSemaphorePermit,
}

#[derive(Default)]
pub(crate) struct ReadCache {
    units: BTreeMap<u64, Unit>,
    next_id: u64,
}

/// Where a part of a read comes from.
pub(crate) enum Part {
    Here(Vec<Buf>),
    Coming(watch::Receiver<bool>, Range<u64>),
    Fetch(Range<u64>),
}

impl ReadCache {
    /// Cuts a read into parts. `expired` tells that a unit was there but too old.
    pub fn plan(&mut self, range: Range<u64>, now: Instant, ttl: Duration, expired: &mut bool) -> Vec<Part> {
        *expired |= self.expire(now, ttl);
        let mut out: Vec<Part> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let unit = at / UNIT;
            let end = ((unit + 1) * UNIT).min(range.end);
            let part = match self.take(unit, at..end) {
                Some(p) => p,
                None => Part::Fetch(at..end),
            };
            match (out.last_mut(), part) {
                (Some(Part::Fetch(last)), Part::Fetch(r)) => last.end = r.end,
                (_, p) => out.push(p),
            }
            at = end;
        }
        out
    }

    /// Whether all of a range is here and fresh: [`ReadCache::plan`] would give it without a wait.
    pub fn is_here(&self, range: &Range<u64>, now: Instant, ttl: Duration) -> bool {
        (range.start / UNIT..range.end.div_ceil(UNIT)).all(|n| {
            self.units.get(&n).is_some_and(|u| match &u.state {
                State::Here(bufs) => {
                    let end = range.end.min((n + 1) * UNIT) - n * UNIT;
                    now.duration_since(u.since) < ttl && segments::total(bufs) as u64 >= end
                }
                State::Coming(_) => false,
            })
        })
    }

    fn take(&mut self, unit: u64, range: Range<u64>) -> Option<Part> {
        let skip = (range.start - unit * UNIT) as usize;
        let len = (range.end - range.start) as usize;
        let part = match &self.units.get(&unit)?.state {
            State::Coming(rx) => return Some(Part::Coming(rx.clone(), range)),
            State::Here(bufs) if segments::total(bufs) >= skip + len => segments::cut(bufs, skip, len),
            // Fetched when the file was shorter.
            State::Here(_) => return None,
        };
        if range.end == (unit + 1) * UNIT {
            self.units.remove(&unit);
        }
        Some(Part::Here(part))
    }

    /// Whether a unit is here or on its way.
    pub fn has(&self, unit: u64) -> bool {
        self.units.contains_key(&unit)
    }

    /// A fetch of a unit begins. Returns what [`ReadCache::arrived`] must be given.
    pub fn begin(&mut self, unit: u64, now: Instant, done: watch::Receiver<bool>, room: OwnedSemaphorePermit) -> u64 {
        self.next_id += 1;
        let u = Unit { id: self.next_id, since: now, state: State::Coming(done), _room: room };
        self.units.insert(unit, u);
        self.next_id
    }

    /// A fetch ended. Its bytes are dropped if the unit was invalidated meanwhile.
    pub fn arrived(&mut self, unit: u64, id: u64, bytes: Option<Vec<Buf>>) {
        match (self.units.get_mut(&unit).filter(|u| u.id == id), bytes) {
            (Some(u), Some(b)) => u.state = State::Here(b),
            (Some(_), None) => drop(self.units.remove(&unit)),
            (None, _) => {}
        }
    }

    /// This client changes these bytes: what is here or on its way may be old.
    pub fn invalidate(&mut self, range: Range<u64>) {
        if range.start < range.end {
            let last = (range.end - 1) / UNIT;
            let gone: Vec<u64> = self.units.range(range.start / UNIT..=last).map(|(u, _)| *u).collect();
            for u in gone {
                self.units.remove(&u);
            }
        }
    }

    /// Drops what is too old; returns whether there was any.
    pub fn expire(&mut self, now: Instant, ttl: Duration) -> bool {
        let before = self.units.len();
        self.units.retain(|_, u| now.duration_since(u.since) < ttl);
        self.units.len() != before
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    fn room() -> OwnedSemaphorePermit {
        Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap()
    }

    fn unit(byte: u8) -> Vec<Buf> {
        vec![Buf::copy_from(&vec![byte; UNIT as usize])]
    }

    fn here(c: &mut ReadCache, r: Range<u64>, now: Instant) -> Vec<&'static str> {
        let name = |p: &Part| match p {
            Part::Here(_) => "here",
            Part::Coming(..) => "coming",
            Part::Fetch(_) => "fetch",
        };
        c.plan(r, now, TTL, &mut false).iter().map(name).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn units_are_served_fresh_once_and_never_after_a_write() {
        let mut c = ReadCache::default();
        let now = Instant::now();
        let (_tx, rx) = watch::channel(false);
        let id = c.begin(1, now, rx.clone(), room());
        assert_eq!(here(&mut c, 0..3 * UNIT, now), ["fetch", "coming", "fetch"]);
        c.arrived(1, id, Some(unit(7)));
        assert!(c.is_here(&(UNIT..2 * UNIT), now, TTL) && !c.is_here(&(UNIT..2 * UNIT), now + TTL, TTL));
        assert!(!c.is_here(&(UNIT - 1..UNIT + 1), now, TTL) && !c.is_here(&(UNIT..2 * UNIT + 1), now, TTL));
        assert_eq!(here(&mut c, UNIT..UNIT + 10, now), ["here"]);
        c.invalidate(UNIT + 5..UNIT + 6);
        assert_eq!(here(&mut c, UNIT..UNIT + 10, now), ["fetch"]);
        // A fetch that was invalidated on its way does not come back.
        let id = c.begin(1, now, rx.clone(), room());
        c.invalidate(0..u64::MAX);
        c.arrived(1, id, Some(unit(7)));
        assert!(!c.has(1));
        // Old bytes go.
        let id = c.begin(1, now, rx.clone(), room());
        c.arrived(1, id, Some(unit(7)));
        assert_eq!(here(&mut c, UNIT..UNIT + 10, now + TTL), ["fetch"]);
        // Bytes read to the end go; short units do not answer for what they lack.
        let id = c.begin(0, now, rx.clone(), room());
        c.arrived(0, id, Some(vec![Buf::copy_from(&[1; 100])]));
        assert!(c.is_here(&(0..100), now, TTL) && !c.is_here(&(0..101), now, TTL));
        assert_eq!(here(&mut c, 0..101, now), ["fetch"]);
        assert_eq!(here(&mut c, 0..100, now), ["here"]);
        let id = c.begin(0, now, rx, room());
        c.arrived(0, id, Some(unit(1)));
        assert_eq!(here(&mut c, 0..UNIT, now), ["here"]);
        assert!(!c.has(0));
    }
}
