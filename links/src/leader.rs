//! Which metadata server to ask next: a pure list with a cursor and a hint. For clients, storage
//! servers and tools alike.

use strake_fabric::Endpoint;

/// After this many rounds without success over the servers of the cluster map, one server that only
/// the configuration names is tried.
const ROUNDS: usize = 3;

/// Finds the leader: first the server that another one named, then the servers of the newest
/// cluster map in turn. Servers that only the configuration names are asked first, before there is
/// a map. Later they are asked seldom: most likely they were removed, and each costs a timeout. But
/// the map may be old, so they are never forgotten.
#[derive(Debug)]
pub struct LeaderFinder {
    configured: Vec<Endpoint>,
    /// Servers of the cluster map; empty before there is a map.
    mapped: Vec<Endpoint>,
    cursor: usize,
    /// Tries since a leader was last found.
    turns: usize,
    hint: Option<Endpoint>,
}

impl LeaderFinder {
    /// `configured`: the servers to ask before a map names them.
    pub fn new(configured: Vec<Endpoint>) -> LeaderFinder {
        LeaderFinder { configured, mapped: Vec::new(), cursor: 0, turns: 0, hint: None }
    }

    fn list(&self) -> &[Endpoint] {
        if self.mapped.is_empty() { &self.configured } else { &self.mapped }
    }

    /// Replaces the map's servers by those of the newest cluster map.
    pub fn learn(&mut self, endpoints: impl IntoIterator<Item = Endpoint>) {
        let mapped: Vec<Endpoint> = endpoints.into_iter().collect();
        if mapped.is_empty() || mapped == self.mapped {
            return;
        }
        let next = self.list().get(self.cursor % self.list().len().max(1)).cloned();
        self.mapped = mapped;
        self.cursor = self.mapped.iter().position(|e| Some(e) == next.as_ref()).unwrap_or(0);
    }

    /// The server to try now; `None` when none is known.
    pub fn whom(&mut self) -> Option<Endpoint> {
        if let Some(h) = self.hint.take() {
            return Some(h);
        }
        self.turns += 1;
        let round = ROUNDS * self.mapped.len() + 1;
        if !self.mapped.is_empty() && self.turns.is_multiple_of(round) {
            let spare: Vec<&Endpoint> =
                self.configured.iter().filter(|e| !self.mapped.contains(e)).collect();
            if !spare.is_empty() {
                return Some(spare[(self.turns / round - 1) % spare.len()].clone());
            }
        }
        let list = self.list();
        let e = list.get(self.cursor % list.len().max(1)).cloned();
        self.cursor = self.cursor.wrapping_add(1);
        e
    }

    /// Another server has named `at` as the leader.
    pub fn hint(&mut self, at: Endpoint) {
        self.hint = Some(at);
    }

    /// `at` leads: after a broken connection it is tried first.
    pub fn found(&mut self, at: &Endpoint) {
        self.turns = 0;
        if let Some(i) = self.list().iter().position(|k| k == at) {
            self.cursor = i;
        }
    }

    /// `at` did not answer: the servers after it are tried first.
    pub fn failed(&mut self, at: &Endpoint) {
        if let Some(i) = self.list().iter().position(|k| k == at) {
            self.cursor = i + 1;
        }
    }

    /// All servers that may answer, the map's servers first.
    pub fn all(&self) -> Vec<Endpoint> {
        let spare = self.configured.iter().filter(|e| !self.mapped.contains(e));
        self.mapped.iter().chain(spare).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e(n: u32) -> Endpoint {
        Endpoint::Sim(n)
    }

    fn take(f: &mut LeaderFinder, n: usize) -> Vec<Endpoint> {
        (0..n).filter_map(|_| f.whom()).collect()
    }

    #[test]
    fn hints_come_first_then_all_in_turn() {
        let mut f = LeaderFinder::new(vec![e(1), e(2)]);
        assert_eq!(take(&mut f, 3), [e(1), e(2), e(1)]);
        f.learn([e(1), e(2), e(3)]);
        f.hint(e(9));
        assert_eq!(take(&mut f, 4), [e(9), e(2), e(3), e(1)], "goes on where it was");
        f.found(&e(2));
        assert_eq!(f.whom(), Some(e(2)));
        f.failed(&e(2));
        assert_eq!(f.whom(), Some(e(3)));
        assert_eq!(LeaderFinder::new(vec![]).whom(), None);
    }

    #[test]
    fn who_left_the_group_is_asked_seldom_and_never_forgotten() {
        let mut f = LeaderFinder::new(vec![e(1), e(2)]);
        f.learn([e(3), e(4)]);
        f.found(&e(4));
        let asked = take(&mut f, 14);
        assert_eq!(asked[..7], [e(4), e(3), e(4), e(3), e(4), e(3), e(1)]);
        assert_eq!(asked[13], e(2));
        f.learn([e(4), e(5)]);
        f.found(&e(5));
        assert!(!take(&mut f, 4).contains(&e(3)), "no more than the newest map names");
        assert_eq!(f.all(), [e(4), e(5), e(1), e(2)]);
        f.learn([]);
        assert_eq!(f.all().len(), 4, "a map without servers says nothing");
    }
}
