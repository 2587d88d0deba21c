//! What own writes make of a file's size, and what of it the metadata servers know. Pure
//! bookkeeping.

use std::ops::Range;

use strake_proto::{Ino, checksum::BLOCK, layout::MAX_FILE_SIZE, pb};

#[derive(Debug)]
pub(super) struct Report {
    /// The attributes as the metadata servers gave them last.
    attr: pb::Attr,
    /// End of the furthest own write that is not reported yet.
    local_end: u64,
    /// How far writes of this client were begun.
    begun: u64,
    /// Whether an unreported write began beyond the known end, or a punch is unreported.
    holes: bool,
    /// Own writes so far, and how many of them the metadata server knows.
    writes: u64,
    reported: u64,
    /// The user on whose behalf they are reported.
    last_writer: pb::Creds,
}

impl Report {
    pub fn new(attr: pb::Attr) -> Report {
        Report {
            attr,
            local_end: 0,
            begun: 0,
            holes: false,
            writes: 0,
            reported: 0,
            last_writer: pb::Creds::default(),
        }
    }

    /// The attributes as the metadata servers gave them last.
    pub fn attr(&self) -> &pb::Attr {
        &self.attr
    }

    /// The end of the file with own writes.
    pub fn end(&self) -> u64 {
        self.attr.size.max(self.local_end)
    }

    /// Takes attributes unless they are older than the present ones.
    pub fn learn(&mut self, attr: &pb::Attr) {
        if attr.change >= self.attr.change {
            self.attr = *attr;
        }
    }

    /// A write to these bytes begins. If it leaves a whole block free behind the known end, it
    /// makes a hole.
    pub fn begins(&mut self, range: &Range<u64>) {
        let known = self.end().max(self.begun).min(MAX_FILE_SIZE);
        self.holes |= range.start > known.next_multiple_of(BLOCK as u64);
        self.begun = self.begun.max(range.end);
    }

    /// There may be holes.
    pub fn set_holes(&mut self) {
        self.holes = true;
    }

    /// Whether there may be holes, as far as this client knows.
    pub fn may_have_holes(&self) -> bool {
        self.attr.sparse || self.holes
    }

    /// A write up to `end` is on its replicas.
    pub fn wrote(&mut self, end: u64, creds: &pb::Creds) {
        // A report stands for all writes since the last one. A write by a non-root user clears
        // set-id bits and root's does not, so a non-root user stays the reported one.
        let hides = creds.uid == 0 && self.last_writer.uid != 0 && self.is_due();
        self.local_end = self.local_end.max(end);
        self.writes += 1;
        if self.last_writer != *creds && !hides {
            self.last_writer = creds.clone();
        }
    }

    /// Writes that the previous client of the mount did not report; `holes`: they may have left
    /// holes.
    pub fn inherit(&mut self, end: u64, holes: bool, creds: &pb::Creds) {
        self.holes |= holes;
        self.wrote(end, creds);
    }

    /// The end of own writes, whether they may have left holes, and their user and group.
    pub fn unreported(&self) -> (u64, bool, (u32, u32)) {
        (self.local_end, self.holes, (self.last_writer.uid, self.last_writer.gid))
    }

    /// Whether there are own writes that are not reported.
    pub fn is_due(&self) -> bool {
        self.writes != self.reported
    }

    /// The number of writes so far, the report about them, and the user on whose behalf it is made.
    pub fn due(&self, ino: Ino) -> Option<(u64, pb::Extend, pb::Creds)> {
        let extend = pb::Extend { ino, end: self.local_end, holes: self.holes };
        self.is_due().then(|| (self.writes, extend, self.last_writer.clone()))
    }

    /// The metadata servers know of so many writes; `holes`: the report included holes. Returns
    /// whether these are all.
    pub fn done(&mut self, writes: u64, holes: bool, attr: Option<&pb::Attr>) -> bool {
        self.reported = self.reported.max(writes);
        if let Some(a) = attr {
            self.learn(a);
        }
        // If holes were not reported, they belong to a write that was begun meanwhile.
        self.holes &= !holes;
        if !self.is_due() {
            self.local_end = 0;
        }
        !self.is_due()
    }

    /// The size was set, while no write was in progress: earlier own writes no longer count.
    pub fn resized(&mut self, attr: &pb::Attr) {
        self.reported = self.writes;
        (self.local_end, self.begun, self.holes) = (0, 0, false);
        self.attr = *attr;
    }

    /// What was written beyond the end is removed. Returns the part that is lost.
    pub fn forget_end(&mut self) -> Option<Range<u64>> {
        let lost = self.attr.size..self.local_end;
        (self.local_end, self.begun) = (0, 0);
        (!lost.is_empty()).then_some(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> pb::Creds {
        pb::Creds { uid, gid: uid, groups: Vec::new() }
    }

    fn of_size(size: u64, change: u64) -> pb::Attr {
        pb::Attr { ino: 5, size, change, ..Default::default() }
    }

    #[test]
    fn a_report_stands_for_the_writes_before_it() {
        let mut r = Report::new(of_size(100, 1));
        assert!(r.due(5).is_none());
        r.begins(&(100..200));
        r.wrote(200, &user(7));
        r.wrote(150, &user(0));
        assert_eq!(r.unreported(), (200, false, (7, 7)), "root hides no other user");
        let (writes, extend, creds) = r.due(5).unwrap();
        assert_eq!((writes, extend.end, extend.holes, creds.uid), (2, 200, false, 7));
        r.wrote(300, &user(7));
        assert!(!r.done(writes, false, Some(&of_size(200, 2))), "there is another write");
        assert_eq!((r.attr().size, r.end()), (200, 300));
        assert!(r.done(3, false, Some(&of_size(300, 3))) && r.due(5).is_none());
        r.learn(&of_size(1, 2));
        assert_eq!(r.end(), 300, "older attributes");
    }

    #[test]
    fn whole_free_blocks_are_holes_until_they_are_reported() {
        let mut r = Report::new(of_size(0, 1));
        r.begins(&(4000..5000));
        assert!(r.may_have_holes(), "nothing is known to be in front");
        let mut r = Report::new(of_size(1, 1));
        r.begins(&(4096..5000));
        assert!(!r.may_have_holes(), "the rest of the block is padding");
        r.begins(&(8192..9000));
        assert!(!r.may_have_holes(), "behind the write that was begun");
        r.begins(&(20000..20001));
        assert!(r.may_have_holes());
        r.wrote(20001, &user(1));
        r.done(1, false, None);
        assert!(r.may_have_holes(), "they were not in the report");
        r.done(1, true, None);
        assert!(!r.may_have_holes());
    }

    #[test]
    fn what_is_beyond_the_end_is_lost_with_the_session() {
        let mut r = Report::new(of_size(100, 1));
        r.wrote(90, &user(1));
        assert_eq!(r.forget_end(), None);
        r.wrote(130, &user(1));
        assert_eq!(r.forget_end(), Some(100..130));
        assert_eq!(r.end(), 100);
        assert!(r.is_due(), "the change is still to be reported");
        r.wrote(130, &user(1));
        r.resized(&of_size(10, 2));
        assert_eq!((r.end(), r.is_due()), (10, false));
    }
}
