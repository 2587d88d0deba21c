//! How long a device takes for its operations, measured from the moment this program hands them to
//! it: time in earlier queues does not count.
//!
//! A busy device answers late without being slow. So the time of operations that are in progress
//! together is divided among them: the share of an operation is its cost for the device. And large
//! operations take long on every device. So the time that a device of a modest rate needs for the
//! bytes is subtracted from both the duration and the cost.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::pb;
use tokio::time::Instant;

/// A summary covers so many time slots before now, including the current one.
const SLOTS: usize = 10;
const SLOT: Duration = Duration::from_secs(1);
/// A device with work that ended no operation for longer than this stalls.
const STALL: Duration = Duration::from_millis(200);
/// So does one that did not end some operation for longer than this, whatever others it ends.
const HANG: Duration = Duration::from_secs(5);
/// 100 MB/s, which any device reaches.
const PER_BYTE: Duration = Duration::from_nanos(10);

/// Kinds of operations that are measured separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Read,
    /// A write or a flush.
    Change,
}

/// An operation in progress, to be handed to [`Meter::end`].
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    number: u64,
    class: Class,
    at: Instant,
    /// [`State::shared`] at its start.
    shared: Duration,
    /// The time that any device needs for its bytes.
    bytes: Duration,
}

/// See the module.
pub struct Meter(Mutex<State>);

struct State {
    /// When each operation in progress began, by its number, so the oldest comes first.
    under_way: BTreeMap<u64, Instant>,
    /// The next number.
    next: u64,
    /// The time that any device needs for the bytes in progress.
    bytes: Duration,
    /// Bytes written since the last flush began.
    unflushed: u64,
    /// The share of time that an operation would have so far if it had always been in progress.
    shared: Duration,
    /// Time is accounted for up to here.
    now: Instant,
    /// When an operation ended last, or the device last had nothing to do.
    progress: Instant,
    start: Instant,
    /// With their numbers since `start`, the oldest first.
    slots: VecDeque<(u64, Slot)>,
}

#[derive(Clone, Default)]
struct Slot {
    reads: Times,
    changes: Times,
    stalled: Duration,
}

/// Durations in buckets, four to each power of two of microseconds.
#[derive(Clone, Default)]
struct Times {
    count: u64,
    /// Sum of the operations' shares.
    cost: Duration,
    buckets: Vec<u32>,
}

const BUCKETS: usize = 1 + 4 * 28;

fn bucket(d: Duration) -> usize {
    let us = u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
    match us.checked_ilog2() {
        None => 0,
        Some(exp) => {
            let quarter = ((u128::from(us) << 2) >> exp) as usize & 3;
            (1 + 4 * exp as usize + quarter).min(BUCKETS - 1)
        }
    }
}

/// The lower end of a bucket, in microseconds.
fn least_us(bucket: usize) -> u64 {
    match bucket.checked_sub(1) {
        None => 0,
        Some(n) => ((4 + n as u64 % 4) << (n / 4)).div_ceil(4),
    }
}

impl Times {
    fn add(&mut self, took: Duration, cost: Duration) {
        self.count += 1;
        self.cost += cost;
        self.buckets.resize(BUCKETS, 0);
        self.buckets[bucket(took)] += 1;
    }

    fn sum<'a>(all: impl Iterator<Item = &'a Times>) -> pb::OpTimes {
        let mut sum = Times { buckets: vec![0; BUCKETS], ..Times::default() };
        for t in all {
            (sum.count, sum.cost) = (sum.count + t.count, sum.cost + t.cost);
            sum.buckets.iter_mut().zip(&t.buckets).for_each(|(s, n)| *s += n);
        }
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        pb::OpTimes {
            count: sum.count,
            each_us: us(sum.cost).checked_div(sum.count).unwrap_or(0),
            median_us: sum.quantile(50),
            p99_us: sum.quantile(99),
        }
    }

    /// The time that `percent` percent of the operations did not exceed, about.
    fn quantile(&self, percent: u64) -> u64 {
        let rank = (self.count * percent).div_ceil(100).max(1);
        let mut below = 0;
        let at = self.buckets.iter().position(|n| {
            below += u64::from(*n);
            below >= rank
        });
        at.map_or(0, least_us)
    }
}

impl Default for Meter {
    fn default() -> Meter {
        let now = Instant::now();
        Meter(Mutex::new(State {
            under_way: BTreeMap::new(),
            next: 0,
            bytes: Duration::ZERO,
            unflushed: 0,
            shared: Duration::ZERO,
            now,
            progress: now,
            start: now,
            slots: VecDeque::new(),
        }))
    }
}

fn per_bytes(n: u64) -> Duration {
    Duration::from_nanos(n.saturating_mul(PER_BYTE.as_nanos() as u64))
}

impl State {
    fn slot(&mut self) -> &mut Slot {
        let number = (self.now - self.start).as_secs() / SLOT.as_secs();
        if self.slots.back().is_none_or(|(n, _)| *n != number) {
            self.slots.push_back((number, Slot::default()));
        }
        let oldest = number.saturating_sub(SLOTS as u64 - 1);
        while self.slots.len() > 1 && self.slots.front().is_some_and(|(n, _)| *n < oldest) {
            self.slots.pop_front();
        }
        let last = self.slots.len() - 1;
        &mut self.slots[last].1
    }

    /// Accounts for the time up to now.
    fn advance(&mut self) {
        let (before, now) = (self.now, Instant::now().max(self.now));
        self.now = now;
        if let Some(oldest) = self.under_way.values().next() {
            let stalls_from = (self.progress + STALL).min(*oldest + HANG) + self.bytes;
            let stalled = now.saturating_duration_since(before.max(stalls_from));
            self.shared += (now - before) / self.under_way.len() as u32;
            self.slot().stalled += stalled.min(SLOT * SLOTS as u32);
        } else {
            self.progress = now;
        }
    }
}

impl Meter {
    /// Call when a read or write of so many bytes is handed to the device.
    pub fn begin(&self, class: Class, bytes: u64) -> Begun {
        let mut s = self.0.lock();
        if class == Class::Change {
            s.unflushed = s.unflushed.saturating_add(bytes);
        }
        s.begin(class, bytes)
    }

    /// Call when a flush is handed to the device. It counts all bytes written since the last flush.
    pub fn begin_flush(&self) -> Begun {
        let mut s = self.0.lock();
        let bytes = std::mem::take(&mut s.unflushed);
        s.begin(Class::Change, bytes)
    }

    /// Call when the operation has ended, with success or not.
    pub fn end(&self, op: Begun) {
        let mut s = self.0.lock();
        s.advance();
        s.under_way.remove(&op.number);
        s.bytes = s.bytes.saturating_sub(op.bytes);
        s.progress = s.now;
        let took = (s.now - op.at).saturating_sub(op.bytes);
        let cost = (s.shared - op.shared).saturating_sub(op.bytes);
        let slot = s.slot();
        match op.class {
            Class::Read => slot.reads.add(took, cost),
            Class::Change => slot.changes.add(took, cost),
        }
    }

    /// The last ten seconds.
    pub fn summary(&self) -> pb::DeviceTimes {
        let mut s = self.0.lock();
        s.advance();
        s.slot();
        let slots = || s.slots.iter().map(|(_, slot)| slot);
        pb::DeviceTimes {
            reads: Some(Times::sum(slots().map(|s| &s.reads))),
            changes: Some(Times::sum(slots().map(|s| &s.changes))),
            stalled_ms: slots().map(|s| s.stalled).sum::<Duration>().as_millis() as u64,
            rotates: false,
        }
    }
}

impl State {
    fn begin(&mut self, class: Class, bytes: u64) -> Begun {
        self.advance();
        let bytes = per_bytes(bytes);
        let number = self.next;
        self.next += 1;
        self.under_way.insert(number, self.now);
        self.bytes += bytes;
        Begun { number, class, at: self.now, shared: self.shared, bytes }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    async fn one(m: &Meter, class: Class, bytes: u64, took: Duration) {
        let op = m.begin(class, bytes);
        advance(took).await;
        m.end(op);
    }

    #[test]
    fn buckets_are_in_order_and_a_fifth_apart_at_most() {
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|us| bucket(Duration::from_micros(us))),
            [0, 1, 5, 7, 9, 10]
        );
        let mut last = 0;
        for us in (1..5_000_000).step_by(7) {
            let b = bucket(Duration::from_micros(us));
            assert!(
                b >= last && least_us(b) <= us && us * 4 < (least_us(b) + 1) * 5 + 4,
                "{us}: {b}, {}",
                least_us(b)
            );
            last = b;
        }
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_operations_took_is_told_for_ten_seconds() {
        let m = Meter::default();
        for n in 0..100 {
            one(&m, Class::Change, 4096, if n < 98 { ms(1) } else { ms(60) }).await;
        }
        one(&m, Class::Read, 4096, ms(5)).await;
        let s = m.summary();
        let (c, r) = (s.changes.unwrap(), s.reads.unwrap());
        assert_eq!((c.count, r.count, s.stalled_ms), (100, 1, 0));
        assert!(
            (700..=1000).contains(&c.median_us) && (45_000..=60_000).contains(&c.p99_us),
            "{c:?}"
        );
        assert!((2000..2300).contains(&c.each_us), "{c:?}");
        advance(SLOT * 11).await;
        let s = m.summary();
        assert_eq!((s.changes.unwrap(), s.stalled_ms), (pb::OpTimes::default(), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_and_large_operations_are_not_slowness() {
        let m = Meter::default();
        // 64 at a time, each answered when the device gets to it, 1 ms each.
        let ops: Vec<Begun> = (0..64).map(|_| m.begin(Class::Read, 0)).collect();
        for op in ops {
            advance(ms(1)).await;
            m.end(op);
        }
        let r = m.summary().reads.unwrap();
        assert!(r.median_us > 25_000 && (900..1100).contains(&r.each_us), "{r:?}");
        // 16 MiB in 160 ms, and a flush of all of it.
        let m = Meter::default();
        one(&m, Class::Change, 16 << 20, ms(160)).await;
        let flush = m.begin_flush();
        advance(ms(160)).await;
        m.end(flush);
        assert_eq!(m.summary().changes.unwrap(), pb::OpTimes { count: 2, ..Default::default() });
        // The same time is slow for a flush with nothing to write.
        let flush = m.begin_flush();
        advance(ms(160)).await;
        m.end(flush);
        assert_eq!(m.summary().changes.unwrap().each_us, 160_000 / 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_hangs_is_seen_before_it_ends() {
        let m = Meter::default();
        advance(ms(5000)).await;
        assert_eq!(m.summary().stalled_ms, 0, "nothing to do");
        let op = m.begin(Class::Change, 0);
        for _ in 0..40 {
            advance(ms(50)).await;
            m.summary();
        }
        assert_eq!(m.summary().stalled_ms, 1800);
        // Others end, and it does not: for a while that counts as progress.
        for _ in 0..40 {
            one(&m, Class::Read, 0, ms(50)).await;
        }
        assert_eq!(m.summary().stalled_ms, 1850);
        for _ in 0..60 {
            one(&m, Class::Read, 0, ms(50)).await;
        }
        assert_eq!(m.summary().stalled_ms, 3850, "two seconds beyond five");
        m.end(op);
        one(&m, Class::Read, 0, ms(150)).await;
        assert_eq!(m.summary().stalled_ms, 3850);
        advance(ms(60_000)).await;
        let s = m.summary();
        assert_eq!((s.stalled_ms, s.changes.unwrap().count), (0, 0));
    }
}
