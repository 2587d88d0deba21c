//! Ends of rights to files' data, for storage servers. A pure table, see
//! `docs/ending-capabilities.md`.

use std::collections::VecDeque;

use strake_proto::pb;

use crate::namespace::effects::Ending;

/// Most endings that are remembered.
const MOST: usize = 65_536;
/// Most endings in one answer, rounded up to whole log entries.
const PAGE: usize = 8_192;

/// See the module. Filled only from applied entries, so that it is the same on all members, as far
/// back as each one goes.
pub(crate) struct Endings {
    /// In order of the log, with the index of their entry.
    all: VecDeque<(u64, Ending)>,
    /// The endings of all entries after this one are here.
    floor: u64,
    /// The endings of entries from the floor up to this one are here.
    through: u64,
}

impl Endings {
    /// A table that does not know the endings of entries up to `applied`.
    pub(crate) fn new(applied: u64) -> Endings {
        Endings { all: VecDeque::new(), floor: applied, through: applied }
    }

    /// Entries after the last call's, up to `through`, were applied; these are their endings.
    pub(crate) fn note(&mut self, through: u64, ended: impl IntoIterator<Item = (u64, Ending)>) {
        self.all.extend(ended);
        self.through = through;
        while self.all.len() > MOST
            && let Some((index, _)) = self.all.pop_front()
        {
            self.floor = index;
        }
        // The rest of the same entry is dropped, too: the floor counts whole entries.
        while self.all.front().is_some_and(|(index, _)| *index <= self.floor) {
            self.all.pop_front();
        }
    }

    /// The next endings for a server that knows those up to entry `known`.
    pub(crate) fn after(&self, known: u64) -> pb::Endings {
        // Then the server knows of a longer log than this one: it gets everything from the
        // beginning and notices that.
        let known = if known > self.through { 0 } else { known };
        let floor = if known < self.floor { self.floor } else { 0 };
        let first = self.all.partition_point(|(index, _)| *index <= known);
        let rest = || self.all.range(first..);
        let last = rest().nth(PAGE - 1).map_or(self.through, |(index, _)| *index);
        let more = self.all.back().is_some_and(|(index, _)| *index > last);
        let told = rest().take_while(|(index, _)| *index <= last);
        let all = told.map(|(index, e)| pb::Ending {
            index: *index,
            session: e.session,
            ino: e.ino,
            rights: e.rights.0,
        });
        pb::Endings {
            floor,
            all: all.collect(),
            through: if more { last } else { self.through },
            more,
        }
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::Rights;

    use super::*;

    fn ending(session: u64, ino: u64) -> Ending {
        Ending { session, ino, rights: Rights::WRITE }
    }

    #[test]
    fn whoever_lags_is_told_all_of_it_or_that_it_is_not_known() {
        let mut e = Endings::new(100);
        assert_eq!(e.after(100), pb::Endings { through: 100, ..Default::default() });
        assert_eq!(e.after(99), pb::Endings { through: 100, floor: 100, ..Default::default() });
        e.note(103, [(101, ending(1, 7)), (103, ending(2, 7)), (103, ending(0, 8))]);
        e.note(109, []);
        let told = |known| {
            let r = e.after(known);
            assert!(!r.more && r.through == 109);
            (
                r.floor,
                r.all.iter().map(|e| (e.index, e.session, e.ino, e.rights)).collect::<Vec<_>>(),
            )
        };
        let (one, two, three) = ((101, 1, 7, 2), (103, 2, 7, 2), (103, 0, 8, 2));
        assert_eq!(told(0), (100, vec![one, two, three]));
        assert_eq!(told(100), (0, vec![one, two, three]));
        assert_eq!(told(101), (0, vec![two, three]));
        assert_eq!(told(103), (0, vec![]));
        assert_eq!(told(110), (100, vec![one, two, three]), "of another log");
    }

    #[test]
    fn the_table_is_bounded_and_pages_have_whole_entries() {
        let mut e = Endings::new(0);
        let n = MOST as u64;
        e.note(n, (1..=n).map(|i| (i, ending(i, 1))));
        assert_eq!((e.floor, e.all.len()), (0, MOST));
        let many = (0..PAGE as u64 * 2).map(|i| (n + 1, ending(i, 2)));
        e.note(n + 9, many);
        assert_eq!((e.floor, e.all.len()), (PAGE as u64 * 2, MOST));
        let (mut known, mut seen, mut pages) = (0, 0, 0);
        loop {
            let r = e.after(known);
            assert!(r.all.iter().all(|e| e.index > known && e.index <= r.through));
            assert_eq!(r.floor != 0, known < e.floor);
            (known, seen, pages) = (r.through, seen + r.all.len(), pages + 1);
            if !r.more {
                break;
            }
            assert!(r.all.len() >= PAGE);
        }
        assert_eq!((known, seen), (n + 9, MOST));
        assert!(pages <= MOST / PAGE);
        // An entry that does not fit as a whole is not known at all.
        e.note(n + 10, (0..2 * n).map(|i| (n + 10, ending(i, 3))));
        assert_eq!((e.floor, e.all.len(), e.after(n + 9).floor), (n + 10, 0, n + 10));
    }
}
