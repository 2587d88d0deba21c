//! Loads and saves that follow the order of a stream of the program, while the program continues.

use std::{
    process,
    sync::Arc,
    thread::{self, JoinHandle},
};

use strake_proto::{Code, Error, Result};

use super::Session;
use crate::{Direction, Failed, Policy, Report, Transfer, mem::Before};

/// A load or save in the background. Dropping it waits for its end, because the memory is the
/// caller's.
pub struct Started {
    thread: Option<JoinHandle<Result<Report, Failed>>>,
    /// Used as the report of a thread that panicked.
    nothing: Report,
    pid: u32,
}

impl Session {
    /// As [`Session::load`] or [`Session::save`], but returns at once. The transfer begins when the
    /// work that the program has given to this stream (a `CUstream`; 0: the default one) by now is
    /// done. It overlaps with work given to the stream afterwards, which may use the ranges only
    /// once [`Started::finish`] returned.
    ///
    /// `EINVAL` in a child after fork(2), `ENODEV` when the context is gone; all other errors are
    /// returned by [`Started::finish`].
    ///
    /// # Safety
    /// The stream is one of the device's primary context, and is not destroyed before this
    /// returned.
    pub unsafe fn start(
        self: &Arc<Session>,
        direction: Direction,
        all: Vec<Transfer>,
        policy: Policy,
        stream: u64,
    ) -> Result<Started> {
        let device = &self.inner()?.device;
        // SAFETY: the caller's promise.
        let before = unsafe { device.before(stream) }?;
        let nothing = nothing(direction, policy, &all);
        let session = self.clone();
        let run = move || session.after(before, direction, &all, policy);
        let thread = thread::Builder::new().name("strake-gds-call".into()).spawn(run)?;
        Ok(Started { thread: Some(thread), nothing, pid: process::id() })
    }

    fn after(
        &self,
        before: Box<dyn Before>,
        direction: Direction,
        all: &[Transfer],
        policy: Policy,
    ) -> Result<Report, Failed> {
        before.wait().map_err(|fault| {
            let error = Error::from(fault).context("waiting for the stream before the call");
            Failed { error, report: Box::new(nothing(direction, policy, all)) }
        })?;
        self.call(direction, all, policy)
    }
}

/// The report of a call that moved nothing.
pub(super) fn nothing(direction: Direction, policy: Policy, all: &[Transfer]) -> Report {
    let asked = all.iter().fold(0u64, |sum, t| sum.saturating_add(t.len));
    Report::nothing(direction, policy, asked, all.len())
}

impl Started {
    /// Whether [`Started::finish`] would return at once.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end. Then the bytes are in place, and any stream may use them.
    pub fn finish(mut self) -> Result<Report, Failed> {
        let failed = |error, report| Failed { error, report: Box::new(report) };
        match self.thread.take().filter(|_| self.pid == process::id()) {
            None => {
                let e = Error::new(
                    Code::Inval,
                    "the call was started before a fork, by the parent process",
                );
                Err(failed(e, self.nothing.clone()))
            }
            Some(thread) => thread.join().unwrap_or_else(|_| {
                let e = Error::new(Code::Io, "a bug in this library ended the call");
                Err(failed(e, self.nothing.clone()))
            }),
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // In a child process, a thread of the parent never ends.
        if let Some(thread) = self.thread.take().filter(|_| self.pid == process::id()) {
            let _ = thread.join();
        }
    }
}
