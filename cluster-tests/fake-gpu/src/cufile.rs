//! cuFile for tests: reads into a [`FakeGpu`], counts as the real one does, and fails or reports
//! wrong results as a test requests.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use strake_fabric::BufMut;
use strake_gds::{
    Fault,
    local::{Counters, CuFile, Rounds},
};

use super::FakeGpu;

/// How it fails or reports wrong results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trick {
    /// Reads nothing and returns a code like a number of bytes, as versions up to 1.15 do.
    Positive(i32),
    /// Reads nothing and returns a negative code, or -1.
    Fails(i32),
    /// Reads nothing and returns -1 with a code in errno: the system's, or one of cuFile's own, as
    /// versions from 1.16 on do.
    Errno(i32),
    /// Reads all of it, and its counters are unavailable from then on.
    NoCounters,
    /// Reads half of it.
    Short,
    /// Reads all of it through host memory, and only its counters show that.
    Posix,
    /// Reads all of it and counts nothing.
    Uncounted,
    /// Changes a bit on the way.
    Flips,
    /// Does not return until another trick is set.
    Hangs,
    /// As `Hangs`, for the first of these reads only.
    HangsOnce,
}

/// Controls of one device's cuFile.
#[derive(Default)]
pub struct Tricks {
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
struct State {
    reads: u64,
    counters: Counters,
    /// The trick, and the first read that it applies to.
    trick: Option<(u64, Trick)>,
    patience: Option<Duration>,
    refused: Option<i32>,
}

impl Tricks {
    /// Applies a trick from the read after the next `reads` ones on; `None`: works normally.
    pub fn play(&self, reads: u64, trick: Option<Trick>) {
        let mut s = self.state.lock();
        let from = s.reads + reads;
        s.trick = trick.map(|t| (from, t));
        self.told.notify_all();
    }

    /// Sets how long others wait for its reads.
    pub fn hurry(&self, patience: Duration) {
        self.state.lock().patience = Some(patience);
    }

    /// Refuses to register files from now on, with this code; `None`: no longer.
    pub fn refuse_files(&self, code: Option<i32>) {
        self.state.lock().refused = code;
    }

    /// Number of reads requested.
    pub fn reads(&self) -> u64 {
        self.state.lock().reads
    }

    /// Its counters.
    pub fn counters(&self) -> Counters {
        self.state.lock().counters
    }
}

/// The cuFile of a device.
pub struct FakeCuFile(FakeGpu, Rounds);

impl FakeCuFile {
    pub fn new(mem: FakeGpu) -> FakeCuFile {
        FakeCuFile(mem, Rounds::default())
    }

    /// The trick for the next read.
    fn next(&self) -> Option<Trick> {
        let tricks = self.0.tricks();
        let mut s = tricks.state.lock();
        let number = s.reads;
        s.reads += 1;
        let now = |s: &State| s.trick.filter(|(from, _)| number >= *from).map(|(_, t)| t);
        let hangs = |s: &State| match s.trick {
            Some((from, Trick::HangsOnce)) => number == from,
            _ => now(s) == Some(Trick::Hangs),
        };
        tricks.told.wait_while(&mut s, |s| hangs(s));
        now(&s)
    }

    fn count(&self, posix: u64, straight: u64, bytes: usize) {
        let tricks = self.0.tricks();
        let c = &mut tricks.state.lock().counters;
        (c.posix, c.straight, c.bytes) =
            (c.posix + posix, c.straight + straight, c.bytes + bytes as u64);
    }
}

impl CuFile for FakeCuFile {
    fn register(&self, file: BorrowedFd<'_>) -> Result<u64, Fault> {
        if let Some(code) = self.0.tricks().state.lock().refused {
            return Err(Fault::Driver {
                call: "cuFileHandleRegister",
                code,
                name: "a code of cuFile's".into(),
            });
        }
        Ok(file.as_raw_fd() as u64)
    }

    fn deregister(&self, _handle: u64) {}

    fn read(&self, handle: u64, to: u64, len: usize, offset: u64) -> isize {
        // As the real one, which keeps the given memory in place.
        let memory = self.0.hold(to, len as u64);
        let trick = self.next();
        let Ok(memory) = memory else { return -5012 };
        if let Some(Trick::Positive(code)) = trick {
            return code as isize;
        }
        if let Some(Trick::Fails(code)) = trick {
            return -(code.abs() as isize);
        }
        if let Some(Trick::Errno(code)) = trick {
            // SAFETY: the errno of this thread.
            unsafe { *libc::__errno_location() = code };
            return -1;
        }
        let wanted = if trick == Some(Trick::Short) { len / 2 } else { len };
        let mut bytes = BufMut::unpooled(wanted);
        // SAFETY: the file is open as long as it is registered.
        let file = unsafe { BorrowedFd::borrow_raw(handle as i32) };
        let n = match rustix::io::pread(file, &mut bytes[..], offset) {
            Ok(n) => n,
            Err(_) => return -1,
        };
        if trick == Some(Trick::Flips) {
            bytes[n / 2] ^= 0x10;
        }
        if self.0.fill(&memory, &bytes[..n]).is_err() {
            return -5011;
        }
        match trick {
            Some(Trick::Posix) => self.count(1, 0, n),
            Some(Trick::Uncounted) => {}
            _ => self.count(0, 1, n),
        }
        n as isize
    }

    fn rounds(&self) -> &Rounds {
        &self.1
    }

    fn counters(&self) -> Result<Counters, Fault> {
        let tricks = self.0.tricks();
        let s = tricks.state.lock();
        match s.trick {
            Some((from, Trick::NoCounters)) if s.reads > from => {
                let name = "a code of cuFile's".into();
                Err(Fault::Driver { call: "cuFileGetStatsL3", code: 5030, name })
            }
            _ => Ok(s.counters),
        }
    }

    /// A self-test moves memory, so this is short.
    fn patience(&self) -> Duration {
        self.0.tricks().state.lock().patience.unwrap_or(Duration::from_secs(5))
    }
}
