//! Bytes that were written and are lost, and the errors that say so. Pure bookkeeping.

use std::ops::Range;

use strake_proto::{Code, Error, Result, SessionId};

use super::missing::Missing;

#[derive(Debug, Default)]
pub(super) struct Losses {
    /// How many errors there were so far. Each handle reports those that happened while it was
    /// open, once.
    count: u64,
    last: Option<Error>,
    /// Number of the last error that each kind of call reports.
    loud: u64,
    missing: Missing,
    /// The last session that was lost. The servers removed what it wrote beyond the end.
    lost: SessionId,
    /// The last session with which written bytes were lost.
    bereft: SessionId,
    /// A write failed: it may still take effect.
    doubtful: bool,
}

impl Losses {
    /// See [`Missing::opened`].
    pub fn opened(&mut self) -> u64 {
        self.missing.opened()
    }

    pub fn closed(&mut self, since: u64) {
        self.missing.closed(since);
    }

    /// An error that the next fsync or close of every handle reports.
    pub fn fail(&mut self, e: Error) {
        self.count += 1;
        self.last = Some(e);
    }

    /// Each kind of call reports the last error.
    pub fn report_loudly(&mut self) {
        self.loud = self.count;
    }

    pub fn errors(&self) -> u64 {
        self.count
    }

    /// The last error if there were any since `seen`, and whether each kind of call must report it.
    pub fn since(&self, seen: u64) -> Option<(u64, Error, bool)> {
        let error = || self.last.clone().unwrap_or(Error::new(Code::Io, "a write was lost"));
        (self.count > seen).then(|| (self.count, error(), self.loud > seen))
    }

    /// The session is lost. Nothing that it wrote counts any more.
    pub fn session_lost(&mut self, session: SessionId) {
        self.lost = session;
    }

    pub fn is_lost(&self, session: SessionId) -> bool {
        self.lost == session
    }

    /// Written bytes are lost with a session. The error to report, the first time.
    pub fn lost_with(&mut self, session: SessionId) -> Option<Error> {
        let m = "the session was evicted; bytes written since the last fsync may be lost";
        let first = std::mem::replace(&mut self.bereft, session) != session;
        first.then(|| Error::new(Code::Io, m))
    }

    /// Handles that are open now must not read older bytes there.
    pub fn misses(&mut self, part: Range<u64>) {
        self.missing.lost(part);
    }

    pub fn written(&mut self, range: &Range<u64>) {
        self.missing.written(range);
    }

    /// The file was truncated to this size on request.
    pub fn cut(&mut self, size: u64) {
        self.missing.cut(size);
    }

    /// The end of the last missing part; 0 if there is none.
    pub fn missing_end(&self) -> u64 {
        self.missing.end()
    }

    /// `EIO` for a handle that would read other bytes in place of lost ones.
    pub fn check_missing(&self, since: u64, range: &Range<u64>) -> Result<()> {
        if self.missing.bars(since, range) {
            let m = "these written bytes are lost, because the metadata servers evicted this \
                     client; open the file again";
            return Err(Error::new(Code::Io, m));
        }
        Ok(())
    }

    /// A write failed.
    pub fn doubt(&mut self) {
        self.doubtful = true;
    }

    /// Whether a write failed: it may still take effect.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_numbered_and_may_be_loud() {
        let mut l = Losses::default();
        assert!(l.since(0).is_none());
        l.fail(Error::new(Code::Io, "one"));
        l.fail(Error::new(Code::NoSpc, "two"));
        let (number, e, loud) = l.since(0).unwrap();
        assert_eq!((number, e.code, loud), (2, Code::NoSpc, false));
        assert!(l.since(2).is_none());
        l.report_loudly();
        assert!(l.since(1).unwrap().2);
        l.fail(Error::new(Code::Io, "three"));
        assert!(!l.since(2).unwrap().2, "only the second one is loud");
    }

    #[test]
    fn a_lost_session_is_reported_once() {
        let mut l = Losses::default();
        assert!(l.lost_with(4).is_some() && l.lost_with(4).is_none() && l.lost_with(5).is_some());
        l.session_lost(5);
        assert!(l.is_lost(5) && !l.is_lost(4));
        let since = l.opened();
        l.misses(10..20);
        assert_eq!(l.check_missing(since, &(0..15)).unwrap_err().code, Code::Io);
        assert_eq!(l.missing_end(), 20);
        l.cut(12);
        assert_eq!(l.missing_end(), 12);
        l.written(&(0..12));
        assert!(l.check_missing(since, &(0..15)).is_ok());
    }
}
