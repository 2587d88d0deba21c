//! Bytes of a file that write(2) had returned from and that are lost. Whoever had the file open
//! then would find older bytes there, or the file ending before them: it gets `EIO` instead, and
//! the size stays, until the bytes are written anew, cut off, or all such handles are closed.
//! Whoever opens the file later sees what there is. Pure bookkeeping.

use std::ops::Range;

use crate::write::unstable::subtract;

#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// How often something was lost. A handle knows how often it was when it was opened.
    losses: u64,
    /// Handles, and those of them that were there at the last loss.
    open: usize,
    bereft: usize,
    parts: Vec<Range<u64>>,
}

impl Missing {
    /// A handle is there; what is returned says what it must not read.
    pub fn opened(&mut self) -> u64 {
        self.open += 1;
        self.losses
    }

    /// It is there no more.
    pub fn closed(&mut self, since: u64) {
        self.open -= 1;
        if since < self.losses {
            self.bereft -= 1;
        }
        if self.bereft == 0 {
            self.parts.clear();
        }
    }

    pub fn lost(&mut self, part: Range<u64>) {
        if self.open == 0 || part.is_empty() {
            return;
        }
        self.losses += 1;
        self.bereft = self.open;
        self.parts.push(part);
    }

    /// These bytes are there.
    pub fn written(&mut self, r: &Range<u64>) {
        if !self.parts.is_empty() {
            self.parts =
                self.parts.drain(..).flat_map(|p| subtract(p, std::slice::from_ref(r))).collect();
        }
    }

    /// The file ends here, as a program wanted.
    pub fn cut(&mut self, size: u64) {
        self.written(&(size..u64::MAX));
    }

    /// Whether a handle must not read these bytes.
    pub fn bars(&self, since: u64, r: &Range<u64>) -> bool {
        since < self.losses && self.parts.iter().any(|p| p.start < r.end && r.start < p.end)
    }

    /// Where the last of them ends; 0: there are none.
    pub fn end(&self) -> u64 {
        self.parts.iter().map(|p| p.end).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_were_there_do_not_read_what_is_lost() {
        let mut m = Missing::default();
        m.lost(0..10);
        assert_eq!(m.end(), 0, "nobody was there");
        let (a, b) = (m.opened(), m.opened());
        m.lost(100..200);
        m.lost(300..300);
        let c = m.opened();
        assert!(
            m.bars(a, &(150..151))
                && m.bars(b, &(0..101))
                && !m.bars(a, &(0..100))
                && !m.bars(a, &(200..300))
        );
        assert!(!m.bars(c, &(150..151)), "it sees what there is");
        assert_eq!(m.end(), 200);
        m.written(&(120..130));
        assert!(!m.bars(a, &(120..130)) && m.bars(a, &(119..120)) && m.bars(a, &(130..131)));
        m.cut(125);
        assert!(m.bars(a, &(0..400)) && !m.bars(a, &(120..400)));
        assert_eq!(m.end(), 120);
        m.closed(a);
        m.closed(c);
        assert!(m.bars(b, &(100..101)));
        m.closed(b);
        assert_eq!(m.end(), 0);
    }
}
