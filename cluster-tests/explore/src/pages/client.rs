//! A client, and its kernel.

use std::time::Duration;

use strake_client::pages::{Enter, Leave, Mode, Pages, Use};
use strake_proto::SessionId;

use super::{
    NOW, World,
    kinds::{
        Body, CLIENTS, Cells, FILE, Fault, Job, Message, Opened, Page, PageIn, Step, Why, Writes,
    },
};

/// A time at which no lock is kept any more.
const LATER: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, Hash)]
pub(super) struct Client {
    pub session: SessionId,
    pub connection: u64,
    /// The term of the leader at the other end of the connection.
    pub term: u64,
    pub table: Pages,
    pub opened: Opened,
    pub leased: bool,
    /// A recall came while the file was being opened.
    pub voided: bool,
    /// A former daemon had this session.
    pub former: bool,
    pub page_in: Option<PageIn>,
    pub writes: Option<Writes>,
    pub page: Option<Page>,
    /// The page was handed out and not taken back since. The kernel may have dropped it.
    pub out: bool,
    /// The kernel may wait for the page-in before it gives the page back.
    pub blocks: bool,
    /// A write-back is on the way.
    pub back: bool,
    pub jobs: Vec<Job>,
    /// The lock that it has asked for.
    pub asks: Option<Mode>,
    /// What its programs have stored and written.
    pub made: Cells,
}

impl Client {
    pub fn new(i: usize) -> Client {
        Client {
            session: i as SessionId + 1,
            connection: 1,
            term: 1,
            table: Pages::default(),
            opened: Opened::No,
            leased: false,
            voided: false,
            former: false,
            page_in: None,
            writes: None,
            page: None,
            out: false,
            blocks: false,
            back: false,
            jobs: Vec::new(),
            asks: None,
            made: Cells::default(),
        }
    }

    pub fn add_job(&mut self, job: Job) {
        self.jobs.push(job);
        self.jobs.sort();
        self.jobs.dedup();
    }

    /// Whether giving back pages has to wait for a page-in.
    fn is_read(&self) -> bool {
        matches!(self.page_in, Some(PageIn::Reads(_) | PageIn::Read(..) | PageIn::AtOnce(_)))
    }

    /// A program touches the page.
    pub fn touches(&mut self) {
        self.page_in = Some(PageIn::Wants);
        self.blocks = self.is_giving();
    }

    fn has_page(&mut self, cells: Cells) {
        (self.page_in, self.blocks, self.out) = (None, false, true);
        self.page = Some(Page { cells, dirty: false, session: self.session });
        for job in &mut self.jobs {
            if let Step::UnderLock { waits, covers } | Step::After { waits, covers } = &mut job.step
            {
                (*waits, *covers) = (false, *covers || *waits);
            }
        }
        self.jobs.sort();
    }

    /// Whether the kernel is being told to give the page back.
    fn is_giving(&self) -> bool {
        self.jobs.iter().any(|j| {
            matches!(
                j.step,
                Step::UnderLock { covers: true, .. } | Step::After { covers: true, .. }
            )
        })
    }

    /// Whether the kernel has no page, and none is on its way.
    fn has_none(&self) -> bool {
        self.page.is_none() && !self.back && !self.is_read()
    }

    fn mode(&self, fault: Fault) -> Mode {
        match self.opened {
            Opened::ForBoth if fault != Fault::StoresShared => Mode::Write,
            _ => Mode::Read,
        }
    }

    fn is_ready(&self) -> bool {
        matches!(self.opened, Opened::ForReading | Opened::ForBoth)
    }

    pub fn leaves(&self) -> bool {
        self.jobs.iter().any(|j| j.why == Why::Leave)
    }
}

impl World {
    // --- uses ---

    /// Asks the client's table whether the pages may be used. `None`: not now.
    fn enter(&mut self, i: usize, mode: Mode, free: bool) -> Option<Use> {
        let c = &mut self.clients[i];
        match c.table.enter(NOW, FILE, (mode, free), c.session) {
            Enter::Begun(what) => Some(what),
            Enter::Ask => {
                c.table.mark(FILE);
                c.asks = Some(mode);
                self.send(i, Body::Asks(mode));
                None
            }
            Enter::GiveUp => {
                c.add_job(Job { why: Why::Leave, step: Step::Leaving });
                None
            }
            Enter::Wait => None,
        }
    }

    fn ended(&mut self, i: usize, what: Use) {
        self.clients[i].table.ended(NOW, FILE, what);
    }

    /// Continues a page-in. Returns `false` if it cannot continue.
    pub(super) fn page_in_goes_on(&mut self, i: usize) -> Result<bool, String> {
        let Some(now) = self.clients[i].page_in else { return Ok(false) };
        let c = &mut self.clients[i];
        match now {
            PageIn::Wants => {
                if !c.is_ready()
                    || c.page.is_some()
                    || c.back
                    || matches!(c.writes, Some(Writes::Sent(_)))
                    || c.writes == Some(Writes::Ready) && !c.blocks
                {
                    return Ok(false);
                }
                if c.blocks && self.fault != Fault::PageInsWait {
                    c.page_in = Some(PageIn::AtOnce(self.storage.cells));
                    return Ok(true);
                }
                let mode = c.mode(self.fault);
                if self.fault == Fault::PagesUnlocked
                    || self.fault == Fault::PagesEarly && c.asks.is_some()
                {
                    c.page_in = Some(PageIn::Reads(Use::Free));
                    return Ok(true);
                }
                let leased = c.leased && !c.table.is_marked(FILE);
                let before = c.clone();
                let Some(what) = self.enter(i, mode, leased) else {
                    let c = &self.clients[i];
                    return Ok((&c.table, &c.jobs) != (&before.table, &before.jobs));
                };
                let late = self.fault == Fault::AskedLate && what == Use::Free;
                self.clients[i].page_in =
                    Some(if late { PageIn::Late(what) } else { PageIn::Reads(what) });
            }
            PageIn::Late(what) => c.page_in = Some(PageIn::Reads(what)),
            PageIn::Reads(what) => {
                if matches!(c.writes, Some(Writes::Sent(_))) {
                    return Ok(false);
                }
                c.page_in = Some(PageIn::Read(what, self.storage.cells));
            }
            PageIn::Read(what, cells) => {
                let session = c.session;
                c.has_page(cells);
                if !matches!(self.fault, Fault::PagesUnlocked | Fault::PagesEarly)
                    || what != Use::Free
                {
                    self.ended(i, what);
                }
                let taken = self.clients[i].jobs.iter().any(|j| j.step != Step::Leaving);
                if self.is_older(i, &cells) && !taken && !self.log.evicted.contains(&session) {
                    return Err(format!(
                        "client {i} gets a page that is older than what others wrote"
                    ));
                }
            }
            PageIn::AtOnce(cells) => {
                c.has_page(cells);
                c.out = self.fault != Fault::KeptAtOnce;
            }
        }
        Ok(true)
    }

    /// Whether another client has changed bytes at the storage server that `cells` has in an older
    /// version.
    pub(super) fn is_older(&self, i: usize, cells: &Cells) -> bool {
        (0..cells.len()).any(|k| k / 2 != i && cells[k] < self.storage.cells[k])
    }

    /// Continues a write(2). Returns `false` if it cannot continue.
    pub(super) fn write_goes_on(&mut self, i: usize) -> bool {
        let Some(now) = self.clients[i].writes else { return false };
        match now {
            Writes::Wants => {
                let c = &mut self.clients[i];
                if c.opened != Opened::ForBoth || !c.has_none() {
                    return false;
                }
                (c.writes, c.out) = (Some(Writes::Ready), false);
            }
            Writes::Ready => {
                let before = self.clients[i].clone();
                let Some(what) = self.enter(i, Mode::Write, true) else {
                    let c = &self.clients[i];
                    return (&c.table, &c.jobs) != (&before.table, &before.jobs);
                };
                let c = &mut self.clients[i];
                if !c.has_none() && self.fault != Fault::WritesBeside {
                    c.writes = Some(Writes::Wants);
                    self.ended(i, what);
                    return true;
                }
                c.writes = Some(Writes::Sent(what));
                let n = c.made[2 * i + 1];
                self.send_to_storage(i, Body::Write(n));
            }
            Writes::Sent(_) => return false,
        }
        true
    }

    fn send_to_storage(&mut self, client: usize, body: Body) {
        let session = self.clients[client].session;
        self.messages.push(Message { client, session, connection: 0, body });
        self.messages.sort();
    }

    /// The storage server has taken what was sent.
    pub(super) fn written(&mut self, m: &Message) {
        let c = &mut self.clients[m.client];
        match m.body {
            Body::WriteBack(_) => c.back = false,
            Body::Write(_) => {
                if let Some(Writes::Sent(what)) = c.writes.take() {
                    self.ended(m.client, what);
                }
            }
            _ => {}
        }
    }

    /// The storage server refused it: the session is evicted, and the client learns it from this.
    pub(super) fn not_written(&mut self, m: &Message) -> Result<(), String> {
        let c = &mut self.clients[m.client];
        if matches!(m.body, Body::WriteBack(_)) {
            c.back = false;
        }
        if c.session == m.session {
            self.learn(m.client);
        }
        Ok(())
    }

    // --- the kernel ---

    /// The kernel begins to write the page back.
    pub(super) fn write_back(&mut self, i: usize) {
        let c = &mut self.clients[i];
        let Some(page) = c.page.as_mut().filter(|p| p.dirty) else { return };
        page.dirty = false;
        let page = *page;
        if page.session == c.session || self.fault == Fault::WritesLost {
            c.back = true;
            self.send_to_storage(i, Body::WriteBack(page.cells));
        }
        // Otherwise the write-back fails with EIO, and what was stored is lost with its session.
    }

    /// Whether the kernel is to take the page out, and can do it.
    pub(super) fn can_take_out(&self, i: usize) -> bool {
        let c = &self.clients[i];
        let notice = |j: &Job| {
            let keeps = self.fault == Fault::NotTakenBack && matches!(j.why, Why::Wanted(_))
                || self.fault == Fault::RecallKeepsPages && j.why == Why::Recall;
            let goes = matches!(
                j.step,
                Step::UnderLock { waits: false, .. } | Step::After { waits: false, .. }
            );
            goes && !keeps
        };
        let is_wanted = c.jobs.iter().any(notice) || c.writes == Some(Writes::Wants);
        // There is only one write-back at a time; a clean page goes at once.
        is_wanted && c.page.is_some_and(|p| !p.dirty || !c.back)
    }

    pub(super) fn take_out(&mut self, i: usize) {
        self.write_back(i);
        self.clients[i].page = None;
    }

    // --- giving back ---

    fn is_out(&self, i: usize, why: Why) -> bool {
        let c = &self.clients[i];
        if c.blocks && c.page_in.is_some() {
            return false;
        }
        match self.fault {
            Fault::KeptAtOnce if c.page.is_some() && !c.out => true,
            Fault::AnswersEarly => c.page.is_none(),
            Fault::NotTakenBack => matches!(why, Why::Wanted(_)) || c.page.is_none() && !c.back,
            Fault::RecallKeepsPages => why == Why::Recall || c.page.is_none() && !c.back,
            _ => c.page.is_none() && !c.back,
        }
    }

    pub(super) fn begin_job(&mut self, i: usize, why: Why) {
        let silent = self.fault == Fault::AskerSilent && self.clients[i].asks.is_some();
        let c = &mut self.clients[i];
        let (waits, covers) = (c.is_read(), c.out);
        let step = match why {
            Why::Wanted(_) | Why::WantedBefore | Why::Leave => Step::Leaving,
            Why::Recall | Why::Hello | Why::Check => Step::After { waits, covers },
        };
        if matches!(why, Why::Wanted(_)) {
            if silent {
                return;
            }
            c.table.wanted(FILE);
        }
        c.add_job(Job { why, step });
    }

    /// Whether the client can use the lock that it asked for: it does so before it gives the lock
    /// up.
    fn is_about_to_use(&self, i: usize) -> bool {
        let c = &self.clients[i];
        c.page_in == Some(PageIn::Wants) && self.clone().page_in_goes_on(i) == Ok(true)
            || c.writes == Some(Writes::Ready) && self.clone().write_goes_on(i)
    }

    /// Continues this job, if it can. Returns whether it did.
    pub(super) fn job_goes_on(&mut self, i: usize, job: Job) -> bool {
        let until = if job.step == Step::Leaving && self.is_about_to_use(i) { NOW } else { LATER };
        let c = &mut self.clients[i];
        let (waits, covers, session) = (c.is_read(), c.out, c.session);
        let next = match job.step {
            Step::Leaving => match c.table.leave(until, FILE, job.why == Why::Leave) {
                Leave::Wait(_) if self.fault != Fault::FreeNotWaited || c.table.is_mine(FILE) => {
                    return false;
                }
                Leave::Go(_) if self.fault == Fault::UnlocksFirst => Some(Step::Unlock),
                Leave::Go(_) => Some(Step::UnderLock { waits, covers }),
                _ if matches!(job.why, Why::Leave | Why::WantedBefore) => None,
                _ => Some(Step::After { waits, covers }),
            },
            Step::UnderLock { waits: true, .. } | Step::After { waits: true, .. } => return false,
            Step::UnderLock { covers: true, .. } | Step::After { covers: true, .. } => {
                if !self.is_out(i, job.why) {
                    return false;
                }
                self.clients[i].out = false;
                Some(job.step.given_back())
            }
            // While another job lasts, pages are handed out at once. It takes those back.
            Step::UnderLock { .. } | Step::After { .. }
                if c.is_giving() && self.fault != Fault::OthersNotWaited =>
            {
                return false;
            }
            Step::UnderLock { .. } => Some(Step::Unlock),
            Step::After { .. } => {
                let wanted = matches!(job.why, Why::Wanted(_));
                let former = wanted && c.former && self.fault != Fault::FormerForgotten;
                (former && c.table.leave_former(NOW, FILE, session)).then_some(Step::UnlockFormer)
            }
            Step::Unlock | Step::UnlockFormer => return false,
        };
        let c = &mut self.clients[i];
        c.jobs.retain(|j| *j != job);
        match next {
            Some(step) => {
                c.add_job(Job { step, ..job });
                if matches!(step, Step::Unlock | Step::UnlockFormer) {
                    self.send(i, Body::Unlocks);
                }
            }
            None => self.job_done(i, job.why),
        }
        true
    }

    pub(super) fn unlocked(&mut self, i: usize) {
        let c = &mut self.clients[i];
        let (waits, covers) = (c.is_read(), c.out);
        let Some(at) =
            c.jobs.iter().position(|j| matches!(j.step, Step::Unlock | Step::UnlockFormer))
        else {
            return;
        };
        let job = c.jobs.remove(at);
        c.table.left(FILE);
        if job.step == Step::Unlock && matches!(job.why, Why::Wanted(_)) {
            c.add_job(Job { step: Step::After { waits, covers }, ..job });
        } else {
            self.job_done(i, job.why);
        }
    }

    fn job_done(&mut self, i: usize, why: Why) {
        match why {
            Why::Wanted(number) => self.send(i, Body::Gave(number)),
            Why::Recall => self.send(i, Body::Acknowledges),
            Why::Hello => {
                self.send(i, Body::Hello);
                self.send_again(i);
            }
            Why::Leave | Why::WantedBefore | Why::Check => {}
        }
    }

    /// Sends the unanswered requests again.
    fn send_again(&mut self, i: usize) {
        let c = &self.clients[i];
        let unlocks = c.jobs.iter().any(|j| matches!(j.step, Step::Unlock | Step::UnlockFormer));
        let (asks, opens) = (c.asks, c.opened == Opened::Asked);
        if opens {
            self.clients[i].voided = false;
            self.send(i, Body::Opens);
        }
        if let Some(mode) = asks {
            self.send(i, Body::Asks(mode));
        }
        if unlocks {
            self.send(i, Body::Unlocks);
        }
    }

    // --- the leader ---

    pub(super) fn client_takes(&mut self, m: Message) {
        let i = m.client;
        let c = &mut self.clients[i];
        match m.body {
            Body::Recall => {
                (c.leased, c.voided) = (false, true);
                self.begin_job(i, Why::Recall);
            }
            Body::Wanted(number) => self.begin_job(i, Why::Wanted(number)),
            Body::Got(mode) => {
                if c.asks.take().is_some() && c.table.granted(NOW, FILE, mode, c.session) {
                    c.add_job(Job { why: Why::WantedBefore, step: Step::Leaving });
                }
            }
            Body::Unlocked => self.unlocked(i),
            Body::Opened { pages, leased } => {
                if c.opened == Opened::Asked {
                    if pages {
                        c.table.mark(FILE);
                    }
                    c.leased = leased && !c.voided;
                    let shared =
                        c.table.has(FILE, Some(Mode::Read)) && self.fault != Fault::OpenKeepsShared;
                    c.opened = Opened::Answered;
                    if shared {
                        c.add_job(Job { why: Why::Leave, step: Step::Leaving });
                    }
                }
            }
            _ => {}
        }
    }

    /// The client has found the new leader, or its daemon was replaced.
    pub(super) fn reconnect(&mut self, i: usize) {
        let c = &mut self.clients[i];
        (c.connection, c.term, c.leased, c.voided) =
            (c.connection + 1, self.leader.term, false, true);
        self.messages.retain(|m| m.client != i || m.connection == 0);
        // Answers on the former connection would not arrive.
        c.jobs.retain(|j| !matches!(j.why, Why::Recall | Why::Hello));
        self.begin_job(i, Why::Hello);
    }

    /// The client learns that its session has ended.
    pub(super) fn learn(&mut self, i: usize) {
        let c = &mut self.clients[i];
        let page_in = c.page_in.take().and_then(|p| match p {
            PageIn::Late(what) | PageIn::Reads(what) | PageIn::Read(what, _) => Some(what),
            PageIn::Wants | PageIn::AtOnce(_) => None,
        });
        let writes = c.writes.take().and_then(|w| match w {
            Writes::Sent(what) => Some(what),
            Writes::Wants | Writes::Ready => None,
        });
        c.blocks = false;
        c.session += CLIENTS as SessionId;
        (c.leased, c.former) = (false, false);
        if c.asks.take().is_some() {
            c.table.refused(FILE);
        }
        if matches!(c.opened, Opened::Asked | Opened::Answered | Opened::ForBoth) {
            c.opened = Opened::Asked;
        }
        page_in.into_iter().chain(writes).for_each(|what| self.ended(i, what));
        self.reconnect(i);
    }

    /// The client's daemon is replaced.
    pub(super) fn restart(&mut self, i: usize) {
        let c = &mut self.clients[i];
        (c.table, c.jobs, c.asks, c.former) = (Pages::default(), Vec::new(), None, true);
        (c.out, c.blocks) = (true, false);
        c.page_in = c.page_in.map(|_| PageIn::Wants);
        c.writes = c.writes.map(|_| Writes::Wants);
        if c.opened != Opened::No && c.opened != Opened::ForReading {
            c.opened = Opened::Asked;
        }
        // What was on the way is lost or was taken over.
        self.messages.retain(|m| m.client != i || matches!(m.body, Body::WriteBack(_)));
        self.reconnect(i);
    }
}
