//! Reads of cuFile in rounds. Its counters are for the whole process, so their growth cannot be
//! assigned to one of several concurrent reads. Overlapping reads form a round, which is judged
//! when all of them have ended.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use strake_proto::Code;

use super::cufile::{Counters, CuFile, went};
use crate::fault::Fault;

/// The result of a round, for each of its reads.
#[derive(Clone)]
enum Verdict {
    /// All reads were complete and direct.
    Believed,
    /// It had one read, which failed like this.
    Fault(Fault),
    /// It had several reads, of which one is not trusted: each is repeated alone.
    Doubt,
}

/// Reads that overlap. A thread takes part once, because it waits for the verdict.
struct Round {
    before: Counters,
    alone: bool,
    flying: u64,
    reads: u64,
    bytes: u64,
    failed: bool,
    verdict: Arc<OnceLock<Verdict>>,
}

#[derive(Default)]
struct State {
    round: Option<Round>,
    /// Reads that wait to be alone; no other read joins before them.
    alone: usize,
}

/// The reads of a process.
#[derive(Default)]
pub struct Rounds {
    state: Mutex<State>,
    changed: Condvar,
}

/// The error of a read that waits for one that does not end: that one cannot be stopped, and the
/// results of the others are unknown until it ends.
fn held_up(patience: Duration) -> Fault {
    let name = format!("another read has not ended within {patience:?} and blocks this one");
    Fault::Driver { call: "cuFileRead", code: Code::TimedOut.errno(), name }
}

impl Rounds {
    /// Makes a read of `len` bytes by `once`, which returns whether all of it came. Returns whether
    /// the read is trusted. Waits up to `patience` for other reads, at most three times; then it
    /// fails, whether it has begun or not.
    pub(super) fn read(
        &self,
        cufile: &dyn CuFile,
        patience: Duration,
        len: u64,
        once: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        match self.take_part(cufile, patience, len, false, &once)? {
            Verdict::Doubt => {}
            Verdict::Believed => return Ok(()),
            Verdict::Fault(f) => return Err(f),
        }
        match self.take_part(cufile, patience, len, true, &once)? {
            Verdict::Fault(f) => Err(f),
            Verdict::Believed | Verdict::Doubt => Ok(()),
        }
    }

    fn take_part(
        &self,
        cufile: &dyn CuFile,
        patience: Duration,
        len: u64,
        alone: bool,
        once: impl Fn() -> Result<(), Fault>,
    ) -> Result<Verdict, Fault> {
        let verdict = self.begin(cufile, patience, alone)?;
        let came = once();
        let mut s = self.state.lock();
        let Some(round) = &mut s.round else { return Err(held_up(patience)) };
        round.flying -= 1;
        round.reads += 1;
        round.bytes += len;
        round.failed |= came.is_err();
        if round.flying == 0 {
            let _ = round.verdict.set(round.judge(cufile.counters()));
            s.round = None;
            self.changed.notify_all();
        }
        // A failed read need not wait for the verdict on the others.
        came?;
        let until = Instant::now() + patience;
        loop {
            if let Some(v) = verdict.get() {
                return Ok(v.clone());
            }
            self.wait(&mut s, patience, until)?;
        }
    }

    /// Joins the current round, or begins one.
    fn begin(
        &self,
        cufile: &dyn CuFile,
        patience: Duration,
        alone: bool,
    ) -> Result<Arc<OnceLock<Verdict>>, Fault> {
        let mut s = self.state.lock();
        let until = Instant::now() + patience;
        s.alone += usize::from(alone);
        let begun = loop {
            let others = s.alone > 0 && !alone;
            match &mut s.round {
                None if !others => {
                    let verdict = Arc::default();
                    break cufile.counters().map(|before| Round {
                        before,
                        alone,
                        flying: 0,
                        reads: 0,
                        bytes: 0,
                        failed: false,
                        verdict,
                    });
                }
                Some(r) if !others && !alone && !r.alone => {
                    r.flying += 1;
                    return Ok(r.verdict.clone());
                }
                _ => {}
            }
            if let Err(f) = self.wait(&mut s, patience, until) {
                break Err(f);
            }
        };
        s.alone -= usize::from(alone);
        let verdict = begun.map(|r| s.round.insert(Round { flying: 1, ..r }).verdict.clone());
        if verdict.is_err() {
            // Reads that waited for this one to run alone can continue.
            self.changed.notify_all();
        }
        verdict
    }

    fn wait(
        &self,
        s: &mut MutexGuard<'_, State>,
        patience: Duration,
        until: Instant,
    ) -> Result<(), Fault> {
        if self.changed.wait_until(s, until).timed_out() { Err(held_up(patience)) } else { Ok(()) }
    }
}

impl Round {
    fn judge(&self, after: Result<Counters, Fault>) -> Verdict {
        let went = after.and_then(|after| went(self.reads, self.bytes, self.before, after));
        match went {
            Ok(()) if !self.failed => Verdict::Believed,
            _ if self.reads > 1 => Verdict::Doubt,
            Err(f) => Verdict::Fault(f),
            // Its only read, whose own error is reported.
            Ok(()) => Verdict::Doubt,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::BorrowedFd, sync::Barrier, thread};

    use super::*;

    /// Reads of 4096 bytes; those of the named handle are not counted.
    struct Fake {
        rounds: Rounds,
        counters: Mutex<Counters>,
        uncounted: u64,
        patience: Duration,
    }

    impl Fake {
        fn new(uncounted: u64) -> Fake {
            let patience = Duration::from_secs(60);
            Fake { rounds: Rounds::default(), counters: Mutex::default(), uncounted, patience }
        }

        /// A read that ends when `meet` has returned.
        fn one(&self, handle: u64, meet: impl Fn()) -> Result<(), Fault> {
            self.rounds.read(self, self.patience, 4096, || {
                meet();
                let n = self.read(handle, 0, 4096, 0);
                if n == 4096 { Ok(()) } else { Err(Fault::NoMemory { bytes: 7 }) }
            })
        }
    }

    impl CuFile for Fake {
        fn register(&self, _file: BorrowedFd<'_>) -> Result<u64, Fault> {
            Ok(0)
        }
        fn deregister(&self, _handle: u64) {}
        fn read(&self, handle: u64, _to: u64, len: usize, _offset: u64) -> isize {
            if handle == 9 {
                return 5006;
            }
            if handle != self.uncounted {
                let mut c = self.counters.lock();
                (c.straight, c.bytes) = (c.straight + 1, c.bytes + len as u64);
            }
            len as isize
        }
        fn counters(&self) -> Result<Counters, Fault> {
            Ok(*self.counters.lock())
        }
        fn rounds(&self) -> &Rounds {
            &self.rounds
        }
    }

    /// Three reads that overlap when they are made for the first time.
    fn three(cufile: &Fake, handles: [u64; 3]) -> ([Result<(), Fault>; 3], u64) {
        let (meeting, reads) = (Barrier::new(3), Mutex::new(0));
        let outcomes = thread::scope(|s| {
            let threads = handles.map(|h| {
                let first = Mutex::new(true);
                let (meeting, reads) = (&meeting, &reads);
                s.spawn(move || {
                    cufile.one(h, || {
                        *reads.lock() += 1;
                        if std::mem::take(&mut *first.lock()) {
                            meeting.wait();
                        }
                    })
                })
            });
            threads.map(|t| t.join().unwrap())
        });
        let reads = *reads.lock();
        (outcomes, reads)
    }

    #[test]
    fn several_reads_are_under_way_and_believed_together() {
        let cufile = Fake::new(8);
        let (outcomes, reads) = three(&cufile, [1, 2, 3]);
        assert_eq!((outcomes, reads), ([Ok(()), Ok(()), Ok(())], 3));
    }

    #[test]
    fn what_is_wrong_with_one_is_no_other_ones_fault_and_nothing_of_the_round_is_believed() {
        let cufile = Fake::new(8);
        let (outcomes, reads) = three(&cufile, [1, 8, 3]);
        let detour = Err(Fault::Detour { len: 4096, posix: 0, straight: 0, bytes: 0 });
        assert_eq!((outcomes, reads), ([Ok(()), detour, Ok(())], 6), "each was made again");
        let (outcomes, reads) = three(&cufile, [1, 9, 3]);
        assert_eq!((outcomes, reads), ([Ok(()), Err(Fault::NoMemory { bytes: 7 }), Ok(())], 5));
        assert_eq!(cufile.one(1, || {}), Ok(()));
        assert_eq!(cufile.one(9, || {}), Err(Fault::NoMemory { bytes: 7 }));
    }

    #[test]
    fn one_that_does_not_end_holds_the_others_only_for_a_while() {
        let cufile = Fake { patience: Duration::from_millis(20), ..Fake::new(8) };
        let (begun, end) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|s| {
            let hangs = s.spawn(|| {
                cufile.one(1, || {
                    begun.wait();
                    end.wait();
                })
            });
            begun.wait();
            let held = cufile.one(2, || {}).unwrap_err();
            assert!(held.to_string().contains("another read has not ended"), "{held}");
            end.wait();
            // The read that shared the round with it was direct, too.
            assert_eq!(hangs.join().unwrap(), Ok(()));
        });
        assert_eq!(cufile.one(2, || {}), Ok(()));
    }
}
