//! Which pages of files the kernel has for memory mappings, and which page-ins and changes may
//! proceed when: the table of "On one mount" in `docs/mappings.md`. Pure.
//!
//! The kernel writes a page back as a whole. So a page that is older than a write(2) to its file
//! must never be written back after that write. A write first has the pages in its range taken out,
//! and what was stored to them is applied. Then no page of the range is handed out until the write
//! is applied.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// Bytes of a page. A larger page of the kernel counts as several.
pub const PAGE: u64 = 4096;
/// Above this many spans of a file, they are merged into one.
const MOST_SPANS: usize = 1024;

/// Pages by number.
pub type Span = Range<u64>;

/// Numbers events in their order.
type Event = u64;

/// The pages that a range of bytes touches; an `end` of `u64::MAX` means the end of any file.
pub fn span(offset: u64, end: u64) -> Span {
    offset / PAGE..end.div_ceil(PAGE)
}

fn meet(a: &Span, b: &Span) -> bool {
    a.start < b.end && b.start < a.end
}

/// A set of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Spans(BTreeMap<u64, u64>);

impl Spans {
    fn meets(&self, s: &Span) -> bool {
        self.0.range(..s.end).next_back().is_some_and(|(_, end)| *end > s.start)
    }

    fn add(&mut self, s: &Span) {
        if s.is_empty() {
            return;
        }
        let (mut start, mut end) = (s.start, s.end);
        while let Some((at, to)) =
            self.0.range(..=end).next_back().map(|(a, t)| (*a, *t)).filter(|(_, t)| *t >= start)
        {
            self.0.remove(&at);
            (start, end) = (start.min(at), end.max(to));
        }
        self.0.insert(start, end);
        if self.0.len() > MOST_SPANS
            && let (Some((first, _)), Some((_, last))) =
                (self.0.first_key_value(), self.0.last_key_value())
        {
            // Taking out pages that the kernel does not have does no harm.
            self.0 = BTreeMap::from([(*first, *last)]);
        }
    }

    fn remove(&mut self, s: &Span) {
        while let Some((at, to)) =
            self.0.range(..s.end).next_back().map(|(a, t)| (*a, *t)).filter(|(_, t)| *t > s.start)
        {
            self.0.remove(&at);
            for left in [at..s.start.min(to), s.end.max(at)..to] {
                if !left.is_empty() {
                    self.0.insert(left.start, left.end);
                }
            }
        }
    }

    /// The shortest span that contains all of these pages that are in `s`.
    fn cover(&self, s: &Span) -> Option<Span> {
        let (_, last) = self.0.range(..s.end).next_back().filter(|(_, end)| **end > s.start)?;
        let before = self.0.range(..=s.start).next_back().filter(|(_, end)| **end > s.start);
        let first = before.or_else(|| self.0.range(s.start..s.end).next())?.0;
        Some(s.start.max(*first)..s.end.min(*last))
    }
}

/// A page-in that is not answered yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PageIn {
    span: Span,
    /// The bytes for its answer are being read.
    reads: bool,
    /// The metadata servers are not asked any more for it: its answer waits for no client that may
    /// wait for this mount.
    asked: bool,
}

/// A change that does not come from a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Change {
    span: Span,
    /// `None`: no page of its span is out, and it is being applied.
    taking: Option<Round>,
}

/// The kernel was told to give pages back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Round {
    began: Event,
    tries: u32,
    /// All pages of the file are taken out, because it is not known which are out.
    whole: bool,
    /// Pages that were handed out since it began.
    answered: Spans,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    /// Pages that were handed out and not taken out since.
    out: Spans,
    /// An earlier daemon may have handed out any page.
    unknown: bool,
    page_ins: BTreeMap<Event, PageIn>,
    changes: BTreeMap<Event, Change>,
    /// Give-backs to other clients in progress, by their start, with the pages that were handed out
    /// since.
    given: BTreeMap<Event, Spans>,
}

/// What a page-in must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Be answered now.
    Read,
    /// Wait until a change is over.
    Wait,
    /// Wait for that as well, but not for long: the page may block a notice. The number says how
    /// many notices were sent for this change.
    Hold(u32),
}

/// What a change must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the kernel give these pages back, then ask again.
    TakeOut(Span),
    Apply,
}

impl File {
    fn is_idle(&self) -> bool {
        self.out.0.is_empty()
            && !self.unknown
            && self.page_ins.is_empty()
            && self.changes.is_empty()
            && self.given.is_empty()
    }

    /// Whether pages were handed out since a round began, or may be handed out with what is being
    /// read.
    fn spoils(&self, round: &Round, span: &Span) -> bool {
        round.answered.meets(span) || self.page_ins.values().any(|p| p.reads && meet(&p.span, span))
    }

    /// Begins a round for a change, if there is anything to take out.
    fn round(&self, now: Event, span: &Span, tries: u32) -> Option<(Round, Span)> {
        let whole = self.unknown;
        let cover = if whole {
            0..u64::MAX.div_ceil(PAGE)
        } else {
            // The kernel waits for page-ins in progress, so those must be answered: they are older
            // than the round.
            let in_work = self.page_ins.values().filter(|p| meet(&p.span, span));
            let in_work = in_work.map(|p| p.span.start.max(span.start)..p.span.end.min(span.end));
            let all = in_work.chain(self.out.cover(span));
            all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?
        };
        Some((Round { began: now, tries, whole, answered: Spans::default() }, cover))
    }
}

/// The files of a mount that have pages out, or page-ins or changes in progress.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    files: HashMap<u64, File>,
    now: Event,
}

impl Pages {
    fn next(&mut self) -> Event {
        self.now += 1;
        self.now
    }

    fn tidy(&mut self, node: u64) {
        if self.files.get(&node).is_some_and(File::is_idle) {
            self.files.remove(&node);
        }
    }

    // --- page-ins ---

    /// The kernel requests pages to keep.
    pub fn page_in(&mut self, node: u64, span: Span) -> Event {
        let id = self.next();
        self.files
            .entry(node)
            .or_default()
            .page_ins
            .insert(id, PageIn { span, reads: false, asked: false });
        id
    }

    /// `overdue`: the page-in has been held long enough. Once the verdict is `Read` it stays so.
    pub fn verdict(&mut self, node: u64, id: Event, overdue: bool) -> Verdict {
        let Some(file) = self.files.get_mut(&node) else { return Verdict::Read };
        let Some(page_in) = file.page_ins.get_mut(&id) else { return Verdict::Read };
        let here = || file.changes.iter().filter(|(_, c)| meet(&c.span, &page_in.span));
        if here().any(|(of, c)| *of < id && c.taking.is_none()) {
            return Verdict::Wait;
        }
        // The kernel waits for a page-in that is older than the round, and then takes the page out.
        let rounds = here().filter_map(|(_, c)| c.taking.as_ref()).filter(|r| r.began < id);
        if let Some(tries) = rounds.map(|r| r.tries).max().filter(|_| !overdue) {
            return Verdict::Hold(tries);
        }
        page_in.reads = true;
        Verdict::Read
    }

    /// The metadata servers have sent everything that the answer needs.
    pub fn asked(&mut self, node: u64, id: Event) {
        if let Some(page_in) = self.files.get_mut(&node).and_then(|f| f.page_ins.get_mut(&id)) {
            page_in.asked = true;
        }
    }

    /// The page-in is answered with what was read, or was given up. Must be called before the
    /// kernel has the answer.
    pub fn answered(&mut self, node: u64, id: Event) {
        let Some(file) = self.files.get_mut(&node) else { return };
        let Some(page_in) = file.page_ins.remove(&id) else { return };
        file.out.add(&page_in.span);
        let rounds = file.changes.values_mut().filter_map(|c| c.taking.as_mut());
        rounds.filter(|r| r.began < id).for_each(|r| r.answered.add(&page_in.span));
        file.given.range_mut(..id).for_each(|(_, since)| since.add(&page_in.span));
        self.tidy(node);
    }

    // --- changes ---

    /// A change that is not from a mapping is to be applied.
    pub fn change(&mut self, node: u64, span: Span) -> (Event, Step) {
        let id = self.next();
        let file = self.files.entry(node).or_default();
        let (taking, step) = match file.round(id, &span, 0) {
            Some((round, cover)) => (Some(round), Step::TakeOut(cover)),
            None => (None, Step::Apply),
        };
        file.changes.insert(id, Change { span, taking });
        (id, step)
    }

    /// Whether pages of a change were handed out while the kernel gave them back, so that it must
    /// do so once more. Returns how often it has done so.
    pub fn is_spoilt(&self, node: u64, id: Event) -> Option<u32> {
        let file = self.files.get(&node)?;
        let change = file.changes.get(&id)?;
        let round = change.taking.as_ref()?;
        file.spoils(round, &change.span).then_some(round.tries)
    }

    /// The kernel has given back the requested pages.
    pub fn taken_out(&mut self, node: u64, id: Event) -> Step {
        let now = self.next();
        let Some(file) = self.files.get_mut(&node) else { return Step::Apply };
        let Some(mut change) = file.changes.remove(&id) else { return Step::Apply };
        if let Some(round) = change.taking.take() {
            let spoilt = file.spoils(&round, &change.span);
            if round.whole {
                (file.out, file.unknown) = (Spans::default(), false);
            }
            file.out.remove(&change.span);
            round.answered.0.iter().for_each(|(start, end)| file.out.add(&(*start..*end)));
            if spoilt {
                let next = file.round(now, &change.span, round.tries + 1);
                if let Some((round, cover)) = next {
                    change.taking = Some(round);
                    file.changes.insert(id, change);
                    return Step::TakeOut(cover);
                }
            }
        }
        file.changes.insert(id, change);
        Step::Apply
    }

    /// The change is applied, or will not be.
    pub fn changed(&mut self, node: u64, id: Event) {
        if let Some(file) = self.files.get_mut(&node) {
            file.changes.remove(&id);
        }
        self.tidy(node);
    }

    /// As [`Pages::change`], for a change after which the kernel drops the pages without writing
    /// them back: `None` if the kernel has any pages of the file.
    pub fn drops(&mut self, node: u64, span: Span) -> Option<Event> {
        if self
            .files
            .get(&node)
            .is_some_and(|f| !f.out.0.is_empty() || f.unknown || !f.page_ins.is_empty())
        {
            return None;
        }
        Some(self.change(node, span).0)
    }

    /// Whether a page-in waits for a change.
    pub fn is_waited_for(&self, node: u64, id: Event) -> bool {
        let file = self.files.get(&node);
        file.and_then(|f| f.changes.get(&id).map(|c| (f, c)))
            .is_some_and(|(f, c)| f.page_ins.range(id..).any(|(_, p)| meet(&p.span, &c.span)))
    }

    // --- other nodes ---

    /// All pages must be given back. Returns their spans, and the number for [`Pages::given_back`].
    /// Page-ins that the metadata servers have not answered are left out: the kernel has none of
    /// their pages, and those servers may wait for the client that waits for this.
    pub fn give_back(&mut self, node: u64) -> Option<(Event, Vec<Span>)> {
        let now = self.next();
        let file = self.files.get_mut(&node)?;
        let mut out = if file.unknown {
            Spans(BTreeMap::from([(0, u64::MAX.div_ceil(PAGE))]))
        } else {
            file.out.clone()
        };
        file.page_ins.values().filter(|p| p.asked).for_each(|p| out.add(&p.span));
        file.page_ins.values().filter(|p| !p.asked).for_each(|p| out.remove(&p.span));
        if out.0.is_empty() {
            return None;
        }
        file.given.insert(now, Spans::default());
        Some((now, out.0.into_iter().map(|(start, end)| start..end).collect()))
    }

    /// The kernel has given these pages back.
    pub fn given_back(&mut self, node: u64, began: Event, spans: &[Span]) {
        let Some(file) = self.files.get_mut(&node) else { return };
        let Some(since) = file.given.remove(&began) else { return };
        spans.iter().for_each(|s| file.out.remove(s));
        since.0.iter().for_each(|(start, end)| file.out.add(&(*start..*end)));
        if spans.first().is_some_and(|s| s.start == 0)
            && spans.last().is_some_and(|s| s.end == u64::MAX.div_ceil(PAGE))
        {
            file.unknown = false;
        }
        self.tidy(node);
    }

    // --- files ---

    /// An earlier daemon had the file open: any page may be out.
    pub fn may_be_out(&mut self, node: u64) {
        self.files.entry(node).or_default().unknown = true;
    }

    /// The file has no mapping left.
    pub fn unmapped(&mut self, node: u64) {
        if let Some(file) = self.files.get_mut(&node) {
            (file.out, file.unknown) = (Spans::default(), false);
        }
        self.tidy(node);
    }

    /// Whether any page of a file is out, or may be.
    pub fn has_out(&self, node: u64) -> bool {
        self.files
            .get(&node)
            .is_some_and(|f| f.unknown || !f.out.0.is_empty() || !f.page_ins.is_empty())
    }

    /// Whether anything is known of a file.
    pub fn knows(&self, node: u64) -> bool {
        self.files.contains_key(&node)
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
