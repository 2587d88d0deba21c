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
    /// It is answered with what is there now: the kernel may wait for it before it gives pages back
    /// to other clients.
    at_once: bool,
    /// The metadata servers are not asked any more for it: its answer waits for no client that may
    /// wait for this mount.
    asked: bool,
}

/// A change that does not come from a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Change {
    span: Span,
    phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// The kernel is giving back the pages of its span.
    Taking(Round),
    /// No page of its span is out. It waits for what it needs from elsewhere, as for the lock of
    /// the file's pages. Other clients may wait for this mount meanwhile.
    Ready(Round),
    /// It is being applied, and waits for no client that may wait for this mount.
    Applied,
}

impl Change {
    fn round(&self) -> Option<&Round> {
        match &self.phase {
            Phase::Taking(round) | Phase::Ready(round) => Some(round),
            Phase::Applied => None,
        }
    }

    fn round_mut(&mut self) -> Option<&mut Round> {
        match &mut self.phase {
            Phase::Taking(round) | Phase::Ready(round) => Some(round),
            Phase::Applied => None,
        }
    }
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

impl Round {
    fn new(began: Event, tries: u32, whole: bool) -> Round {
        Round { began, tries, whole, answered: Spans::default() }
    }
}

/// Pages are being given back to other clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Given {
    spans: Spans,
    tries: u32,
    /// Pages that were handed out since it began.
    since: Spans,
    /// Those of them that must be given back, too.
    again: Spans,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    /// Pages that were handed out and not taken out since.
    out: Spans,
    /// An earlier daemon may have handed out any page.
    unknown: bool,
    page_ins: BTreeMap<Event, PageIn>,
    changes: BTreeMap<Event, Change>,
    /// Give-backs to other clients in progress, by their start.
    given: BTreeMap<Event, Given>,
}

/// What a page-in must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Be answered now.
    Read,
    /// Be answered now, without asking the metadata servers: other clients may wait for this
    /// answer.
    ReadAtOnce,
    /// Wait until a change is over.
    Wait,
    /// Wait until pages are given back, but not for long: the page may block the notice. The number
    /// says how many notices were sent before for the same purpose.
    Hold(u32),
}

/// What a change must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the kernel give these pages back, then ask again.
    TakeOut(Span),
    /// Call [`Pages::begin`] when there is nothing else to wait for.
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
        Some((Round::new(now, tries, whole), cover))
    }

    /// Removes pages of page-ins for which the metadata servers are still asked.
    fn leave_out_asking(&self, spans: &mut Spans) {
        let asking = self.page_ins.values().filter(|p| !p.asked && !p.at_once);
        asking.for_each(|p| spans.remove(&p.span));
    }

    /// Begins a round of giving back, if there is anything to give back.
    fn give(&mut self, now: Event, spans: Spans, tries: u32) -> Option<(Event, Vec<Span>)> {
        if spans.0.is_empty() {
            return None;
        }
        let all = spans.0.iter().map(|(start, end)| *start..*end).collect();
        self.given.insert(now, Given { spans, tries, ..Given::default() });
        Some((now, all))
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
            .insert(id, PageIn { span, reads: false, at_once: false, asked: false });
        id
    }

    /// `overdue`: the page-in has been held long enough. Once it may read, that stays so.
    pub fn verdict(&mut self, node: u64, id: Event, overdue: bool) -> Verdict {
        let Some(file) = self.files.get_mut(&node) else { return Verdict::Read };
        let Some(page_in) = file.page_ins.get_mut(&id) else { return Verdict::Read };
        // The kernel may wait for this page-in before it gives pages back to another client. A
        // change that is not applied yet may wait for that client.
        let given = file.given.range(..id).filter(|(_, g)| g.spans.meets(&page_in.span));
        let given = given.map(|(_, g)| g.tries).max();
        let here = || file.changes.iter().filter(|(_, c)| meet(&c.span, &page_in.span));
        let waits = |c: &Change| match c.phase {
            Phase::Taking(_) => false,
            Phase::Ready(_) => given.is_none(),
            Phase::Applied => true,
        };
        if here().any(|(of, c)| *of < id && waits(c)) {
            return Verdict::Wait;
        }
        // The kernel waits for a page-in that is older than the round, and then takes the page out.
        let taking = here().filter_map(|(_, c)| match &c.phase {
            Phase::Taking(round) if round.began < id => Some(round.tries),
            _ => None,
        });
        if let Some(tries) = taking.chain(given).max().filter(|_| !overdue) {
            return Verdict::Hold(tries);
        }
        page_in.reads = true;
        page_in.at_once = given.is_some();
        if page_in.at_once { Verdict::ReadAtOnce } else { Verdict::Read }
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
        let rounds = file.changes.values_mut().filter_map(Change::round_mut);
        rounds.filter(|r| r.began < id).for_each(|r| r.answered.add(&page_in.span));
        for given in file.given.range_mut(..id).map(|(_, g)| g) {
            given.since.add(&page_in.span);
            if page_in.at_once {
                given.again.add(&page_in.span);
            }
        }
        self.tidy(node);
    }

    // --- changes ---

    /// A change that is not from a mapping is to be applied.
    pub fn change(&mut self, node: u64, span: Span) -> (Event, Step) {
        let id = self.next();
        let file = self.files.entry(node).or_default();
        let (phase, step) = match file.round(id, &span, 0) {
            Some((round, cover)) => (Phase::Taking(round), Step::TakeOut(cover)),
            None => (Phase::Ready(Round::new(id, 0, false)), Step::Apply),
        };
        file.changes.insert(id, Change { span, phase });
        (id, step)
    }

    /// Whether pages of a change were handed out while the kernel gave them back, so that it must
    /// do so once more. Returns how often it has done so.
    pub fn is_spoilt(&self, node: u64, id: Event) -> Option<u32> {
        let file = self.files.get(&node)?;
        let change = file.changes.get(&id)?;
        let round = change.round()?;
        file.spoils(round, &change.span).then_some(round.tries)
    }

    /// The kernel has given back the requested pages.
    pub fn taken_out(&mut self, node: u64, id: Event) -> Step {
        let now = self.next();
        let Some(file) = self.files.get_mut(&node) else { return Step::Apply };
        let Some(change) = file.changes.get(&id) else { return Step::Apply };
        let (span, Phase::Taking(round)) = (change.span.clone(), change.phase.clone()) else {
            return Step::Apply;
        };
        let spoilt = file.spoils(&round, &span);
        if round.whole {
            (file.out, file.unknown) = (Spans::default(), false);
        }
        file.out.remove(&span);
        round.answered.0.iter().for_each(|(start, end)| file.out.add(&(*start..*end)));
        let next = spoilt.then(|| file.round(now, &span, round.tries + 1)).flatten();
        let (phase, step) = match next {
            Some((round, cover)) => (Phase::Taking(round), Step::TakeOut(cover)),
            None => (Phase::Ready(Round::new(round.began, round.tries, false)), Step::Apply),
        };
        file.changes.insert(id, Change { span, phase });
        step
    }

    /// The change has everything else that it waits for. `Apply`: it is applied now, and no page of
    /// its span is handed out until that is done.
    pub fn begin(&mut self, node: u64, id: Event) -> Step {
        let now = self.next();
        let Some(file) = self.files.get_mut(&node) else { return Step::Apply };
        let Some(change) = file.changes.get(&id) else { return Step::Apply };
        let (span, Phase::Ready(round)) = (change.span.clone(), change.phase.clone()) else {
            return Step::Apply;
        };
        let next = file.spoils(&round, &span).then(|| file.round(now, &span, round.tries + 1));
        let (phase, step) = match next.flatten() {
            Some((round, cover)) => (Phase::Taking(round), Step::TakeOut(cover)),
            None => (Phase::Applied, Step::Apply),
        };
        file.changes.insert(id, Change { span, phase });
        step
    }

    /// The change could not be applied, and waits again for what it needs from elsewhere.
    pub fn pause(&mut self, node: u64, id: Event) {
        let now = self.next();
        if let Some(change) = self.files.get_mut(&node).and_then(|f| f.changes.get_mut(&id))
            && change.phase == Phase::Applied
        {
            change.phase = Phase::Ready(Round::new(now, 0, false));
        }
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
        if self.files.get(&node).is_some_and(|f| {
            !f.out.0.is_empty() || f.unknown || !f.page_ins.is_empty() || !f.given.is_empty()
        }) {
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
        let comes = file.page_ins.values().filter(|p| p.asked || p.at_once);
        comes.for_each(|p| out.add(&p.span));
        file.leave_out_asking(&mut out);
        file.give(now, out, 0)
    }

    /// Whether the kernel is giving pages back to other clients. Until that is over, pages may be
    /// handed out at once.
    pub fn is_giving(&self, node: u64) -> bool {
        self.files.get(&node).is_some_and(|f| !f.given.is_empty())
    }

    /// The kernel has given these pages back. Returns pages that were handed out meanwhile and must
    /// be given back, too, as [`Pages::give_back`] does.
    pub fn given_back(&mut self, node: u64, began: Event) -> Option<(Event, Vec<Span>)> {
        let now = self.next();
        let file = self.files.get_mut(&node)?;
        let Given { spans, tries, since, mut again } = file.given.remove(&began)?;
        spans.0.iter().for_each(|(start, end)| file.out.remove(&(*start..*end)));
        since.0.iter().for_each(|(start, end)| file.out.add(&(*start..*end)));
        if spans.0.contains_key(&0)
            && spans.0.last_key_value().is_some_and(|(_, end)| *end == u64::MAX.div_ceil(PAGE))
        {
            file.unknown = false;
        }
        let reads = file.page_ins.range(began..).filter(|(_, p)| p.at_once);
        reads.for_each(|(_, p)| again.add(&p.span));
        file.leave_out_asking(&mut again);
        let next = file.give(now, again, tries + 1);
        self.tidy(node);
        next
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
        self.files.get(&node).is_some_and(|f| {
            f.unknown || !f.out.0.is_empty() || !f.page_ins.is_empty() || !f.given.is_empty()
        })
    }

    /// Whether anything is known of a file.
    pub fn knows(&self, node: u64) -> bool {
        self.files.contains_key(&node)
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
