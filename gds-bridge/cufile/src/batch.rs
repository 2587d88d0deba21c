//! Batches. Threads of this library run the entries of our files one by one; entries of other files
//! go to the real library.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::{c_int, c_void},
    ptr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::{
    abi::{self, Event, Params},
    driver::{Active, Driver, Handle},
    errors::{CallError, Done, caught, say},
    io::{self, Asked, Order},
    stats::{Access, By},
    vendor::{Range, Vendor},
};

/// Number of threads that run entries.
const THREADS: usize = 8;
/// How often the real library is polled while entries of either kind may end.
const ASK: Duration = Duration::from_millis(1);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
}

/// The threads. They start at the first use and never end.
fn pool() -> Done<&'static Pool> {
    static POOL: OnceLock<(Pool, bool)> = OnceLock::new();
    let start = || {
        let threads = (0..THREADS).map(|_| {
            std::thread::Builder::new().name("strake-cufile".into()).spawn(|| {
                let (pool, _) = POOL.wait();
                loop {
                    let mut jobs = pool.jobs.lock();
                    pool.more.wait_while(&mut jobs, |jobs| jobs.is_empty());
                    let job = jobs.pop_front();
                    drop(jobs);
                    job.into_iter().for_each(|job| job());
                }
            })
        });
        let begun = threads.filter(Result::is_ok).count();
        (Pool::default(), begun > 0)
    };
    match POOL.get_or_init(start) {
        (pool, true) => Ok(pool),
        _ => Err(CallError::Os(libc::EAGAIN)),
    }
}

/// A batch of a program.
pub struct Batch {
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of entries submitted so far. Entries numbered below `cancelled` are not begun any
    /// more.
    given: u64,
    cancelled: u64,
    /// Entries of our files that have not ended.
    waiting: usize,
    ended: VecDeque<Event>,
    /// The real library's batch (0: not made yet; it is made when first needed), and its entries
    /// whose end the program does not know yet.
    vendor: usize,
    others: BTreeMap<usize, Other>,
    next_other: usize,
    destroyed: bool,
}

/// An entry given to the real library, with a number in place of the program's cookie.
struct Other {
    cookie: usize,
    asked: Range,
}

/// A checked entry of one of our files.
struct Entry {
    handle: Arc<Handle>,
    asked: Asked,
    cookie: usize,
}

impl State {
    fn outstanding(&self) -> usize {
        self.waiting + self.ended.len() + self.others.len()
    }
}

impl Batch {
    pub fn new(most: usize) -> Batch {
        Batch { most, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Accepts all entries or none.
    pub fn submit(self: &Arc<Batch>, driver: &'static Driver, all: &[Params]) -> Done<()> {
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for p in all {
            let access = match (p.mode, p.opcode) {
                (abi::BATCH, abi::READ) => Access::Read,
                (abi::BATCH, abi::WRITE) => Access::Write,
                _ => return Err(CallError::Op(abi::INVALID_VALUE)),
            };
            let handle = driver.handle(p.handle)?;
            if let Handle::Vendor(h) = &*handle {
                others.push((Params { handle: h.word(), ..*p }, h.range(p.file_offset, p.size)));
                continue;
            }
            let asked = Asked {
                access,
                by: By::Batch,
                order: Order::Default,
                base: p.base as u64,
                size: p.size,
                offset: p.file_offset,
                base_offset: p.base_offset,
            };
            ours.push(Entry { handle, asked, cookie: p.cookie as usize });
        }
        let pool = pool()?;
        let mut s = self.state.lock();
        if s.destroyed {
            return Err(CallError::Op(abi::INVALID_VALUE));
        }
        if s.outstanding() + all.len() > self.most {
            return Err(CallError::Op(abi::BATCH_FULL));
        }
        if !others.is_empty() {
            self.submit_to_vendor(driver, &mut s, &others)?;
        }
        s.waiting += ours.len();
        let mut jobs = pool.jobs.lock();
        for e in ours {
            let (batch, number) = (self.clone(), s.given);
            s.given += 1;
            // From here on the entry keeps the driver open, whether it has begun or not.
            let active = driver.active();
            jobs.push_back(Box::new(move || batch.carry_out(driver, number, &e, active)));
        }
        pool.more.notify_all();
        Ok(())
    }

    fn submit_to_vendor(
        &self,
        driver: &'static Driver,
        s: &mut State,
        others: &[(Params, Range)],
    ) -> Done<()> {
        let vendor = driver.vendor()?;
        if s.vendor == 0 {
            let mut to = ptr::null_mut();
            // SAFETY: writes one pointer.
            vendor.control(vendor.batch_setup, |f| unsafe { f(&mut to, self.most as u32) })?;
            s.vendor = to as usize;
        }
        let first = s.next_other;
        let number = |(i, (p, _)): (usize, &(Params, Range))| Params {
            cookie: (first + i) as *mut c_void,
            ..*p
        };
        let mut given: Vec<Params> = others.iter().enumerate().map(number).collect();
        let n = given.len() as u32;
        // SAFETY: there are `n` entries, and their handles are the real library's.
        vendor.control(vendor.batch_submit, |f| unsafe {
            f(s.vendor as *mut c_void, n, given.as_mut_ptr(), 0)
        })?;
        s.next_other += others.len();
        for (i, (p, asked)) in others.iter().enumerate() {
            s.others.insert(first + i, Other { cookie: p.cookie as usize, asked: *asked });
        }
        driver.stats.passed_on("batch_entries");
        Ok(())
    }

    fn carry_out(&self, driver: &Driver, number: u64, e: &Entry, active: Active) {
        let cancelled = number < self.state.lock().cancelled;
        let outcome = (!cancelled).then(|| match &*e.handle {
            Handle::Ours(of) => caught(|| io::transfer(driver, of, &e.asked)),
            Handle::Vendor(_) => Err(CallError::Op(abi::INTERNAL_ERROR)),
        });
        let (status, ret) = match outcome {
            None => (abi::CANCELED, 0),
            Some(Ok(n)) => (abi::COMPLETE, n as isize),
            Some(Err(w)) => (abi::FAILED, w.in_event()),
        };
        let mut s = self.state.lock();
        s.waiting -= 1;
        // Release before the end is announced: the program may then close the driver.
        drop(active);
        s.ended.push_back(Event { cookie: e.cookie as *mut c_void, status, ret });
        self.changed.notify_all();
    }

    /// Fills in the entries that have ended. Waits for at least `least` of them, unless fewer are
    /// left or the time limit is over.
    pub fn ended(&self, least: usize, to: &mut [Event], limit: Option<Duration>) -> Done<usize> {
        let deadline = limit.and_then(|l| Instant::now().checked_add(l));
        let mut told = 0;
        let mut s = self.state.lock();
        loop {
            while told < to.len()
                && let Some(e) = s.ended.pop_front()
            {
                to[told] = e;
                told += 1;
            }
            if s.destroyed {
                return if told > 0 { Ok(told) } else { Err(CallError::Op(abi::INVALID_VALUE)) };
            }
            if !s.others.is_empty() && told < to.len() {
                match Batch::ended_at_vendor(&mut s, &mut to[told..]) {
                    Ok(n) => told += n,
                    // Return the entries taken from the queue above now, and the error at the next
                    // call.
                    Err(_) if told > 0 => return Ok(told),
                    Err(w) => return Err(w),
                }
            }
            if told >= least.min(to.len()) || s.outstanding() == 0 {
                return Ok(told);
            }
            let next = if !s.others.is_empty() { Instant::now().checked_add(ASK) } else { None };
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(told);
            }
            match deadline.into_iter().chain(next).min() {
                Some(until) => drop(self.changed.wait_until(&mut s, until)),
                None => self.changed.wait(&mut s),
            }
        }
    }

    fn ended_at_vendor(s: &mut State, to: &mut [Event]) -> Done<usize> {
        let vendor = Vendor::known().ok_or(CallError::Op(abi::INTERNAL_ERROR))?;
        let (room, mut n) = (to.len().min(s.others.len()), 0);
        n += room as u32;
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `to` has space for as many events as are requested.
        vendor.control(vendor.batch_status, |f| unsafe {
            f(s.vendor as *mut c_void, 0, &mut n, to.as_mut_ptr(), &mut now)
        })?;
        let n = (n as usize).min(room);
        let mut told = 0;
        for i in 0..n {
            let mut e = to[i];
            let Some(other) = s.others.remove(&(e.cookie as usize)) else {
                say(|| "the real libcufile reported an entry that it does not have".into());
                continue;
            };
            e.cookie = other.cookie as *mut c_void;
            vendor.event(&mut e, &other.asked);
            to[told] = e;
            told += 1;
        }
        Ok(told)
    }

    /// Cancels all entries that have not begun.
    pub fn cancel(&self) -> Done<()> {
        let mut s = self.state.lock();
        s.cancelled = s.given;
        match Vendor::known() {
            Some(vendor) if !s.others.is_empty() => {
                // SAFETY: a batch of the real library.
                vendor.control(vendor.batch_cancel, |f| unsafe { f(s.vendor as *mut c_void) })
            }
            _ => Ok(()),
        }
    }

    /// Ends the batch. Returns when none of its entries uses the program's memory any more.
    /// `vendor`: whether the real library may be called.
    pub fn destroy(&self, vendor: bool) {
        let mut s = self.state.lock();
        s.cancelled = s.given;
        s.destroyed = true;
        self.changed.wait_while(&mut s, |s| s.waiting > 0);
        if s.vendor != 0
            && vendor
            && let Some(vendor) = Vendor::known()
        {
            // SAFETY: a batch of the real library, which cannot be named any more.
            let _ = vendor.call(vendor.batch_destroy, |f| unsafe { f(s.vendor as *mut c_void) });
            s.vendor = 0;
        }
        s.others.clear();
        // Wake threads that still wait: there is nothing left to wait for.
        self.changed.notify_all();
    }
}

/// The duration of a `struct timespec`; `None` if it is not a valid time.
pub fn duration(seconds: i64, nanos: i64) -> Option<Duration> {
    let nanos = c_int::try_from(nanos).ok().filter(|n| (0..1_000_000_000).contains(n))?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos as u32))
}
