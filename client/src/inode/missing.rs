//! Bytes of a file that are lost although write(2) returned. A handle that was open at that time
//! would find older bytes there, or an earlier end of the file. It gets `EIO` instead, and the size
//! stays, until the bytes are written again, truncated, or all such handles are closed. Handles
//! opened later read what is there. Pure bookkeeping.

use std::ops::Range;

use crate::write::unstable::subtract;

#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// How often bytes were lost. A handle remembers the value at its open.
    losses: u64,
    /// All open handles, and how many of them were open at the last loss.
    open: usize,
    bereft: usize,
    parts: Vec<Range<u64>>,
}

impl Missing {
    /// A handle was opened. The caller passes the returned value to [`Missing::bars`] and
    /// [`Missing::closed`].
    pub fn opened(&mut self) -> u64 {
        self.open += 1;
        self.losses
    }

    /// A handle was closed.
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

    /// These bytes were written.
    pub fn written(&mut self, r: &Range<u64>) {
        if !self.parts.is_empty() {
            self.parts =
                self.parts.drain(..).flat_map(|p| subtract(p, std::slice::from_ref(r))).collect();
        }
    }

    /// The file was truncated to this size on request.
    pub fn cut(&mut self, size: u64) {
        self.written(&(size..u64::MAX));
    }

    /// Whether a handle must not read these bytes.
    pub fn bars(&self, since: u64, r: &Range<u64>) -> bool {
        since < self.losses && self.parts.iter().any(|p| p.start < r.end && r.start < p.end)
    }

    /// The end of the last missing part; 0 if there is none.
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
