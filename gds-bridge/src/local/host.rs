//! A stand-in of cuFile for machines without one: reads into a [`HostMem`], counts as the real one
//! does, and fails and lies as it is told.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use strake_fabric::BufMut;

use super::{
    cufile::{Counters, CuFile},
    rounds::Rounds,
};
use crate::{HostMem, mem::Fault};

/// How it fails or lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trick {
    /// Reads nothing and returns a code as if it were bytes, as versions up to 1.15 do.
    Positive(i32),
    /// Reads nothing and returns a negative code, or -1.
    Fails(i32),
    /// Reads nothing and returns -1 with a code in errno: the system's, or one of cuFile's own, as
    /// versions from 1.16 on do.
    Errno(i32),
    /// Reads all of it, and its counters cannot be had from then on.
    NoCounters,
    /// Reads half of it.
    Short,
    /// Reads all of it by way of host memory, and says so in its counters only.
    Posix,
    /// Reads all of it and counts nothing.
    Uncounted,
    /// Changes a bit on the way.
    Flips,
    /// Does not return until it is told something else.
    Hangs,
    /// The same of the first of these reads only.
    HangsOnce,
}

/// What the stand-in of one device does.
#[derive(Default)]
pub struct Tricks {
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
struct State {
    reads: u64,
    counters: Counters,
    /// From this read on.
    trick: Option<(u64, Trick)>,
    patience: Option<Duration>,
    refused: Option<i32>,
}

impl Tricks {
    /// From the read after the next `reads` ones on; `None`: does what it should.
    pub fn play(&self, reads: u64, trick: Option<Trick>) {
        let mut s = self.state.lock();
        let from = s.reads + reads;
        s.trick = trick.map(|t| (from, t));
        self.told.notify_all();
    }

    /// Is waited for so long only.
    pub fn hurry(&self, patience: Duration) {
        self.state.lock().patience = Some(patience);
    }

    /// From now on, or (`None`) no more, takes no file, with this code.
    pub fn refuse_files(&self, code: Option<i32>) {
        self.state.lock().refused = code;
    }

    /// Reads that were asked for.
    pub fn reads(&self) -> u64 {
        self.state.lock().reads
    }

    /// What it counted.
    pub fn counters(&self) -> Counters {
        self.state.lock().counters
    }
}

/// The stand-in.
pub struct HostCuFile(HostMem, Rounds);

impl HostCuFile {
    /// That of a device.
    pub fn new(mem: HostMem) -> HostCuFile {
        HostCuFile(mem, Rounds::default())
    }

    /// What is to be done of the next read.
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

impl CuFile for HostCuFile {
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
        // As the real one, which keeps in place what it was given.
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

    /// It moves memory.
    fn patience(&self) -> Duration {
        self.0.tricks().state.lock().patience.unwrap_or(Duration::from_secs(5))
    }
}
