use std::collections::{BTreeSet, HashSet};

use super::*;

const FILE: u64 = 9;

fn spans_of(all: &[Span]) -> Spans {
    let mut s = Spans::default();
    all.iter().for_each(|one| s.add(one));
    s
}

/// Compares spans with a set of page numbers.
#[test]
fn spans_are_sets_of_pages() {
    let mut random = 1u64;
    let mut next = |below: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..3000 {
        let (mut set, mut plain) = (Spans::default(), BTreeSet::new());
        for _ in 0..12 {
            let start = next(20);
            let s = start..start + next(6);
            if next(3) == 0 {
                set.remove(&s);
                plain.retain(|n| !s.contains(n));
            } else {
                set.add(&s);
                plain.extend(s);
            }
            let start = next(20);
            let look = start..start + 1 + next(6);
            let mut both = plain.range(look.clone());
            assert_eq!(set.meets(&look), both.clone().next().is_some());
            let cover = both.next().map(|first| *first..both.next_back().unwrap_or(first) + 1);
            assert_eq!(set.cover(&look), cover, "{set:?} {look:?}");
            let all: Vec<u64> = set.0.iter().flat_map(|(a, b)| *a..*b).collect();
            assert_eq!(all, plain.iter().copied().collect::<Vec<_>>());
        }
    }
}

#[test]
fn many_spans_become_one() {
    let mut s = Spans::default();
    (0..=MOST_SPANS as u64).for_each(|n| s.add(&(3 * n..3 * n + 1)));
    assert_eq!(s.0, BTreeMap::from([(0, 3 * MOST_SPANS as u64 + 1)]));
}

#[test]
fn a_file_that_nobody_maps_leaves_nothing() {
    let mut t = Pages::default();
    let (id, step) = t.change(FILE, span(100, 5000));
    assert_eq!(step, Step::Apply);
    t.changed(FILE, id);
    assert!(!t.knows(FILE));
    let id = t.page_in(FILE, 0..1);
    assert_eq!(t.verdict(FILE, id, false), Verdict::Read);
    t.answered(FILE, id);
    assert!(t.knows(FILE));
    assert_eq!(t.change(FILE, 1..9).1, Step::Apply, "other pages");
    t.unmapped(FILE);
    t.files.values_mut().for_each(|f| f.changes.clear());
    t.tidy(FILE);
    assert!(!t.knows(FILE));
}

#[test]
fn pages_are_taken_out_once() {
    let mut t = Pages::default();
    for p in [3, 5, 8] {
        let id = t.page_in(FILE, p..p + 1);
        assert_eq!(t.verdict(FILE, id, false), Verdict::Read);
        t.answered(FILE, id);
    }
    let (id, step) = t.change(FILE, 0..7);
    assert_eq!(step, Step::TakeOut(3..6));
    let late = t.page_in(FILE, 5..6);
    assert_eq!(t.verdict(FILE, late, false), Verdict::Hold(0));
    assert_eq!(t.taken_out(FILE, id), Step::Apply);
    assert_eq!(t.verdict(FILE, late, true), Verdict::Wait, "as long as it takes");
    t.changed(FILE, id);
    assert_eq!(t.verdict(FILE, late, false), Verdict::Read);
    t.answered(FILE, late);
    assert_eq!(t.change(FILE, 0..5).1, Step::Apply);
    assert_eq!(t.files[&FILE].out, spans_of(&[5..6, 8..9]));
}

#[test]
fn what_was_handed_out_meanwhile_is_taken_out_again() {
    let mut t = Pages::default();
    let first = t.page_in(FILE, 0..4);
    assert_eq!(t.verdict(FILE, first, false), Verdict::Read);
    let (id, step) = t.change(FILE, 2..3);
    assert_eq!(step, Step::TakeOut(2..3), "it is in work");
    let late = t.page_in(FILE, 2..8);
    assert_eq!(t.verdict(FILE, late, true), Verdict::Read, "the kernel may wait for it");
    t.answered(FILE, first);
    assert_eq!(
        t.taken_out(FILE, id),
        Step::TakeOut(2..3),
        "it is being read: it may be what was before"
    );
    t.answered(FILE, late);
    assert_eq!(t.taken_out(FILE, id), Step::Apply);
    assert_eq!(t.files[&FILE].out, spans_of(&[0..2, 3..8]));
}

#[test]
fn after_a_former_daemon_all_is_taken_out_once() {
    let mut t = Pages::default();
    t.may_be_out(FILE);
    let (id, step) = t.change(FILE, 7..8);
    let Step::TakeOut(all) = step else { panic!() };
    assert_eq!((all.start, all.end), (0, u64::MAX.div_ceil(PAGE)));
    let elsewhere = t.page_in(FILE, 100..101);
    assert_eq!(t.verdict(FILE, elsewhere, false), Verdict::Read);
    t.answered(FILE, elsewhere);
    assert_eq!(t.taken_out(FILE, id), Step::Apply);
    t.changed(FILE, id);
    assert_eq!(t.files[&FILE].out, spans_of(&[Span::from(100..101)]), "handed out since");
}

#[test]
fn pages_that_the_kernel_drops_must_not_be_out() {
    let mut t = Pages::default();
    let id = t.drops(FILE, 4..6).unwrap();
    assert!(!t.is_waited_for(FILE, id));
    let away = t.page_in(FILE, 6..7);
    assert!(!t.is_waited_for(FILE, id));
    assert_eq!(t.verdict(FILE, away, false), Verdict::Read);
    let waits = t.page_in(FILE, 5..6);
    assert_eq!((t.verdict(FILE, waits, true), t.is_waited_for(FILE, id)), (Verdict::Wait, true));
    assert!(t.drops(FILE, 90..91).is_none());
}

#[test]
fn what_was_handed_out_before_is_given_back() {
    let mut t = Pages::default();
    assert!(t.give_back(FILE).is_none());
    let out = t.page_in(FILE, 0..4);
    t.answered(FILE, out);
    let (asks, reads) = (t.page_in(FILE, 4..6), t.page_in(FILE, 8..9));
    t.asked(FILE, reads);
    let (began, spans) = t.give_back(FILE).unwrap();
    assert_eq!(spans, [0..4, 8..9], "the kernel does not have what is still asked for");
    t.answered(FILE, reads);
    let late = t.page_in(FILE, 1..2);
    t.asked(FILE, late);
    t.answered(FILE, late);
    assert!(t.given_back(FILE, began).is_none());
    assert_eq!(t.files[&FILE].out, spans_of(&[Span::from(1..2)]), "handed out since");
    t.answered(FILE, asks);
    assert_eq!(t.files[&FILE].out, spans_of(&[1..2, 4..6]));
    t.may_be_out(FILE);
    let (began, _) = t.give_back(FILE).unwrap();
    assert!(t.given_back(FILE, began).is_none());
    assert!(!t.knows(FILE));
}

/// The kernel had dropped a page by itself, and a program touches it again.
#[test]
fn a_page_in_that_a_give_back_may_wait_for_asks_nobody() {
    let mut t = Pages::default();
    let out = t.page_in(FILE, 0..4);
    t.answered(FILE, out);
    let before = t.page_in(FILE, 6..7);
    assert_eq!(t.verdict(FILE, before, false), Verdict::Read);
    let (began, spans) = t.give_back(FILE).unwrap();
    assert_eq!(spans, [Span::from(0..4)]);
    let [away, here] = [4..6, 3..4].map(|span| t.page_in(FILE, span));
    assert_eq!(t.verdict(FILE, away, false), Verdict::Read);
    assert_eq!(t.verdict(FILE, here, false), Verdict::Hold(0));
    assert_eq!(t.verdict(FILE, here, true), Verdict::ReadAtOnce);
    t.answered(FILE, here);
    let again = t.page_in(FILE, 2..3);
    let (second, spans) = t.given_back(FILE, began).unwrap();
    assert_eq!(spans, [Span::from(3..4)], "it was handed out meanwhile");
    assert_eq!(t.verdict(FILE, again, false), Verdict::Read, "the kernel has passed it");
    assert!(t.given_back(FILE, second).is_none());
    assert!(t.files[&FILE].out.0.is_empty());
}

/// While one is in progress, pages are handed out at once, under the lock that the other would
/// release.
#[test]
fn a_give_back_lasts_as_long_as_others() {
    let mut t = Pages::default();
    let out = t.page_in(FILE, 0..1);
    t.answered(FILE, out);
    let (first, _) = t.give_back(FILE).unwrap();
    let (second, _) = t.give_back(FILE).unwrap();
    let at_once = t.page_in(FILE, 0..1);
    assert_eq!(t.verdict(FILE, at_once, true), Verdict::ReadAtOnce);
    t.answered(FILE, at_once);
    let (again, _) = t.given_back(FILE, first).unwrap();
    let (third, _) = t.given_back(FILE, second).unwrap();
    assert!(t.given_back(FILE, third).is_none());
    assert!(t.give_back(FILE).is_none(), "the kernel has given back what was out");
    assert!(t.is_giving(FILE) && t.has_out(FILE));
    let late = t.page_in(FILE, 0..1);
    assert_eq!(t.verdict(FILE, late, true), Verdict::ReadAtOnce);
    t.answered(FILE, late);
    let (last, _) = t.given_back(FILE, again).unwrap();
    assert!(t.given_back(FILE, last).is_none());
    assert!(!t.is_giving(FILE) && !t.knows(FILE));
}

/// The change waits for the lock of the file's pages, which is released when they are given back.
#[test]
fn a_change_that_is_not_applied_yet_does_not_hold_up_a_give_back() {
    let mut t = Pages::default();
    let out = t.page_in(FILE, 0..2);
    t.answered(FILE, out);
    let (change, step) = t.change(FILE, 0..1);
    assert_eq!(step, Step::TakeOut(0..1));
    let (began, _) = t.give_back(FILE).unwrap();
    assert_eq!(t.taken_out(FILE, change), Step::Apply);
    let late = t.page_in(FILE, 0..2);
    assert_eq!(t.verdict(FILE, late, false), Verdict::Hold(0));
    assert_eq!(t.verdict(FILE, late, true), Verdict::ReadAtOnce);
    t.answered(FILE, late);
    let (second, _) = t.given_back(FILE, began).unwrap();
    assert_eq!(t.begin(FILE, change), Step::TakeOut(0..1), "handed out before its time");
    assert!(t.given_back(FILE, second).is_none());
    assert_eq!(t.taken_out(FILE, change), Step::Apply);
    assert_eq!(t.begin(FILE, change), Step::Apply);
    let later = t.page_in(FILE, 0..1);
    assert_eq!(t.verdict(FILE, later, true), Verdict::Wait);
    t.pause(FILE, change);
    assert_eq!(t.begin(FILE, change), Step::Apply, "nothing was handed out");
}

/// The content of one page: the last pwrite(2) to one half, and the last store of a program to the
/// other half.
type Bytes = (u8, u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Page {
    Absent,
    /// Locked until a page-in is answered.
    Coming,
    Here {
        has: Bytes,
        dirty: bool,
    },
    /// Being written back; no program stores meanwhile. It may be dropped afterwards.
    Back {
        has: Bytes,
        drops: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Reading {
    /// Sent, and not read by the daemon yet.
    Sent,
    Asks(Event),
    /// Waits for the metadata servers.
    Reads(Event),
    ReadsAtOnce(Event),
    Has(Event, Vec<Bytes>),
    /// The daemon has written the answer.
    Answered(Vec<Bytes>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Writing {
    Sent,
    /// The kernel goes through these pages.
    Takes(Event, Span),
    /// Waits for the lock of the file's pages.
    Ready(Event),
    Applies(Event, Span),
    /// Not a write: all pages are given back. `stored`: what had been stored when that began.
    /// `left`: the pages that are still to be done.
    Gives {
        began: Event,
        stored: Vec<u8>,
        left: Vec<u64>,
    },
}

/// A kernel with one file of two pages, programs that use it, and a server.
#[derive(Clone, Debug)]
struct Model {
    table: Pages,
    pages: Vec<Page>,
    server: Vec<Bytes>,
    /// The expected content when everything is written back.
    want: Vec<Bytes>,
    page_ins: Vec<(Span, Reading)>,
    /// The writes: the value, the place, and the progress.
    writes: Vec<(u8, Span, Writing)>,
    faults: u8,
    stores: u8,
    to_write: Vec<(u8, Span)>,
}

const PAGES: u64 = 2;
/// In place of a value to be written.
const GIVES_BACK: u8 = 0;

impl Model {
    fn new(to_write: Vec<(u8, Span)>, faults: u8, stores: u8) -> Model {
        let n = PAGES as usize;
        Model {
            table: Pages::default(),
            pages: vec![Page::Absent; n],
            server: vec![(0, 0); n],
            want: vec![(0, 0); n],
            page_ins: vec![],
            writes: vec![],
            faults,
            stores,
            to_write,
        }
    }

    fn key(&self) -> impl std::hash::Hash + Eq + use<> {
        let files: Vec<File> = self.table.files.values().cloned().collect();
        let kernel = (self.pages.clone(), self.server.clone(), self.want.clone());
        (
            files,
            kernel,
            self.page_ins.clone(),
            self.writes.clone(),
            self.faults,
            self.stores,
            self.to_write.clone(),
        )
    }

    /// All states that may follow.
    fn next(&self) -> Vec<Model> {
        let mut all = Vec::new();
        let mut to = |f: &mut dyn FnMut(&mut Model)| {
            let mut m = self.clone();
            f(&mut m);
            all.push(m);
        };
        for p in 0..self.pages.len() {
            match self.pages[p] {
                Page::Absent if self.faults > 0 => {
                    for end in p + 1..=self.pages.len() {
                        if self.pages[p..end].iter().all(|p| *p == Page::Absent) {
                            to(&mut |m| {
                                m.faults -= 1;
                                m.pages[p..end].fill(Page::Coming);
                                m.page_ins.push((p as u64..end as u64, Reading::Sent));
                            });
                        }
                    }
                }
                Page::Here { has, dirty } => {
                    if self.stores > 0 {
                        to(&mut |m| {
                            m.stores -= 1;
                            m.want[p].1 = 10 + m.stores;
                            m.pages[p] = Page::Here { has: (has.0, 10 + m.stores), dirty: true };
                        });
                    }
                    match dirty {
                        true => to(&mut |m| m.pages[p] = Page::Back { has, drops: false }),
                        // An open, or want of memory.
                        false => to(&mut |m| m.pages[p] = Page::Absent),
                    }
                }
                Page::Back { has, drops } => to(&mut |m| {
                    m.server[p] = has;
                    m.pages[p] =
                        if drops { Page::Absent } else { Page::Here { has, dirty: false } };
                }),
                _ => {}
            }
        }
        for (i, (_, r)) in self.page_ins.iter().enumerate() {
            match r {
                Reading::Asks(_) => {
                    [false, true].into_iter().for_each(|late| to(&mut |m| m.page_in(i, late)))
                }
                _ => to(&mut |m| m.page_in(i, false)),
            }
        }
        (0..self.writes.len()).for_each(|i| to(&mut |m| m.write(i)));
        for i in 0..self.to_write.len() {
            to(&mut |m| {
                let (value, span) = m.to_write.remove(i);
                m.writes.push((value, span, Writing::Sent));
            });
        }
        all
    }

    fn page_in(&mut self, i: usize, late: bool) {
        let (span, reading) = self.page_ins[i].clone();
        let here = span.start as usize..span.end as usize;
        self.page_ins[i].1 = match reading {
            Reading::Sent => Reading::Asks(self.table.page_in(FILE, span)),
            Reading::Asks(id) => match self.table.verdict(FILE, id, late) {
                Verdict::Read => Reading::Reads(id),
                Verdict::ReadAtOnce => Reading::ReadsAtOnce(id),
                _ => Reading::Asks(id),
            },
            // The answer waits for a client that waits for pages.
            Reading::Reads(id) if self.gives_back() => Reading::Reads(id),
            Reading::Reads(id) => {
                self.table.asked(FILE, id);
                Reading::Has(id, self.server[here].to_vec())
            }
            Reading::ReadsAtOnce(id) => Reading::Has(id, self.server[here].to_vec()),
            Reading::Has(id, bytes) => {
                self.table.answered(FILE, id);
                Reading::Answered(bytes)
            }
            Reading::Answered(bytes) => {
                for (p, has) in here.zip(bytes) {
                    self.pages[p] = Page::Here { has, dirty: false };
                }
                self.page_ins.remove(i);
                return;
            }
        };
    }

    fn write(&mut self, i: usize) {
        let (value, span, writing) = self.writes[i].clone();
        let goes_on = |id, step| match step {
            Step::TakeOut(s) => Writing::Takes(id, s.start..s.end.min(PAGES)),
            Step::Apply => Writing::Ready(id),
        };
        self.writes[i].2 = match writing {
            Writing::Sent if value == GIVES_BACK => match self.table.give_back(FILE) {
                Some((began, spans)) => {
                    let left = spans.iter().cloned().flatten().filter(|p| *p < PAGES).collect();
                    Writing::Gives { began, stored: self.want.iter().map(|w| w.1).collect(), left }
                }
                None => {
                    self.writes.remove(i);
                    return;
                }
            },
            Writing::Gives { began, stored, mut left } => match left.first().copied() {
                Some(p) => {
                    if self.take_out(p as usize) {
                        left.remove(0);
                    }
                    Writing::Gives { began, stored, left }
                }
                None => {
                    if let Some((began, spans)) = self.table.given_back(FILE, began) {
                        let left = spans.into_iter().flatten().filter(|p| *p < PAGES).collect();
                        self.writes[i].2 = Writing::Gives { began, stored, left };
                        return;
                    }
                    self.writes.remove(i);
                    // Stores are numbered in descending order.
                    for (p, stored) in stored.into_iter().enumerate().filter(|(_, s)| *s != 0) {
                        let has = self.server[p].1;
                        assert!(
                            (1..=stored).contains(&has),
                            "{stored} was stored to page {p} before: {self:?}"
                        );
                    }
                    return;
                }
            },
            Writing::Sent => {
                let (id, step) = self.table.change(FILE, span.clone());
                goes_on(id, step)
            }
            Writing::Takes(id, left) if left.is_empty() => {
                let step = self.table.taken_out(FILE, id);
                goes_on(id, step)
            }
            Writing::Takes(id, left) => match self.take_out(left.start as usize) {
                true => Writing::Takes(id, left.start + 1..left.end),
                false => Writing::Takes(id, left),
            },
            Writing::Ready(id) if self.gives_back() => Writing::Ready(id),
            Writing::Ready(id) => match self.table.begin(FILE, id) {
                Step::Apply => Writing::Applies(id, span.clone()),
                step => goes_on(id, step),
            },
            Writing::Applies(id, left) => {
                for p in left.start as usize..left.end as usize {
                    let out = matches!(self.pages[p], Page::Here { .. } | Page::Back { .. });
                    assert!(!out, "a page is out that is being written to: {self:?}");
                }
                match left.start < left.end {
                    true => {
                        let p = left.start as usize;
                        (self.server[p].0, self.want[p].0) = (value, value);
                        Writing::Applies(id, left.start + 1..left.end)
                    }
                    false => {
                        self.table.changed(FILE, id);
                        self.writes.remove(i);
                        return;
                    }
                }
            }
        };
    }

    fn gives_back(&self) -> bool {
        self.writes.iter().any(|(_, _, w)| matches!(w, Writing::Gives { .. }))
    }

    /// The kernel must give a page back. Returns whether it has.
    fn take_out(&mut self, p: usize) -> bool {
        match self.pages[p] {
            Page::Absent => return true,
            Page::Here { has, dirty: true } => self.pages[p] = Page::Back { has, drops: true },
            Page::Here { .. } => {
                self.pages[p] = Page::Absent;
                return true;
            }
            // The kernel waits.
            Page::Coming | Page::Back { .. } => {}
        }
        false
    }

    /// If nothing is in progress: all that was written and stored is there once it is written back.
    fn check_at_rest(&self) {
        if !self.page_ins.is_empty() || !self.writes.is_empty() {
            return;
        }
        for (p, page) in self.pages.iter().enumerate() {
            let has = match page {
                Page::Here { has, .. } | Page::Back { has, .. } => *has,
                _ => self.server[p],
            };
            assert_eq!(has, self.want[p], "page {p}: {self:?}");
        }
    }
}

fn explore(to_write: Vec<(u8, Span)>, faults: u8, stores: u8) -> usize {
    let mut todo = vec![Model::new(to_write, faults, stores)];
    let mut seen = HashSet::new();
    let mut ends = 0;
    while let Some(m) = todo.pop() {
        m.check_at_rest();
        let next = m.next();
        let done = m.writes.is_empty() && m.page_ins.is_empty();
        assert!(done || next.iter().any(|n| n.key() != m.key()), "nothing goes on: {m:?}");
        if m.to_write.is_empty() && m.writes.is_empty() && m.page_ins.is_empty() {
            ends += 1;
        }
        todo.extend(next.into_iter().filter(|n| seen.insert(n.key())));
    }
    assert!(ends > 0, "nothing comes to an end");
    seen.len()
}

/// Tests every order of page-ins, stores, write-backs and writes.
#[test]
fn no_byte_is_lost_in_any_order() {
    let mut seen = 0;
    let writes = [
        vec![(1, 0..1)],
        vec![(1, 0..2)],
        vec![(GIVES_BACK, 0..2)],
        vec![(1, 0..1), (2, 0..1)],
        vec![(1, 0..1), (2, 0..2)],
        vec![(1, 0..2), (GIVES_BACK, 0..2)],
        vec![(1, 0..1), (GIVES_BACK, 0..2)],
    ];
    for to_write in writes {
        let (faults, stores) = if to_write.len() == 1 { (3, 2) } else { (2, 1) };
        seen += explore(to_write, faults, stores);
    }
    println!("{seen} states");
    assert!(seen > 10_000, "{seen} states");
}
