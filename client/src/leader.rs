//! Which metadata server to ask next: a pure list with a cursor and a hint.

use strake_fabric::Endpoint;

/// Finds the leader among known servers: hints first, then round-robin.
#[derive(Debug)]
pub struct LeaderFinder {
    known: Vec<Endpoint>,
    cursor: usize,
    hint: Option<Endpoint>,
}

impl LeaderFinder {
    pub fn new(known: Vec<Endpoint>) -> LeaderFinder {
        LeaderFinder { known, cursor: 0, hint: None }
    }

    /// Servers the cluster map names. Those from the configuration stay: the map may be old.
    pub fn learn(&mut self, endpoints: impl IntoIterator<Item = Endpoint>) {
        for e in endpoints {
            if !self.known.contains(&e) {
                self.known.push(e);
            }
        }
    }

    /// The server to try now; `None` when none is known.
    pub fn next(&mut self) -> Option<Endpoint> {
        if let Some(h) = self.hint.take() {
            return Some(h);
        }
        let e = self.known.get(self.cursor % self.known.len().max(1)).cloned();
        self.cursor = self.cursor.wrapping_add(1);
        e
    }

    /// Somebody says that `at` leads.
    pub fn hint(&mut self, at: Endpoint) {
        self.hint = Some(at);
    }

    /// `at` leads: after a broken connection it is tried first.
    pub fn found(&mut self, at: &Endpoint) {
        if let Some(i) = self.known.iter().position(|k| k == at) {
            self.cursor = i;
        }
    }

    /// `at` did not answer: the ones after it come first.
    pub fn failed(&mut self, at: &Endpoint) {
        if let Some(i) = self.known.iter().position(|k| k == at) {
            self.cursor = i + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e(n: u32) -> Endpoint {
        Endpoint::Sim(n)
    }

    #[test]
    fn hints_come_first_and_nobody_is_forgotten() {
        let mut f = LeaderFinder::new(vec![e(1), e(2)]);
        f.learn([e(2), e(3)]);
        f.hint(e(9));
        assert_eq!(f.next(), Some(e(9)));
        let mut seen: Vec<_> = (0..3).filter_map(|_| f.next()).collect();
        seen.sort();
        assert_eq!(seen, vec![e(1), e(2), e(3)]);
        f.found(&e(2));
        assert_eq!(f.next(), Some(e(2)));
        f.failed(&e(2));
        assert_eq!(f.next(), Some(e(3)));
        assert_eq!(LeaderFinder::new(vec![]).next(), None);
    }
}
