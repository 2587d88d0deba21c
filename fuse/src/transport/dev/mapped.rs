//! Keeps pages of memory mappings and all other changes of a file in order: the stateful layer
//! around [`Pages`]. See `docs/mappings.md`.

use std::{
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use strake_client::Turn;
use tokio::{sync::Notify, sync::Semaphore, task::spawn_blocking, time::Instant};

use super::{
    channel::Channel,
    notify,
    pages::{PAGE, Pages, Span, Step, Verdict, span},
};

/// How long a page-in is held that may block the notice that it waits for. The time grows fourfold
/// with every further notice of the same change: on a busy machine a notice takes its time.
const HOLD: Duration = Duration::from_millis(4);
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// Pause before a further notice: a program that has just lost a page requests it again. That
/// page-in must come before the notice, which then takes the page out, and not between the start of
/// the notice and its access to the page.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// Most notices in progress. Each has a thread, which waits only for write-backs; those need no
/// such thread.
const NOTICES: usize = 128;
/// How long the kernel takes to drop the pages of a copied range after it has the answer.
const DROPS: Duration = Duration::from_millis(10);

/// See the module.
pub struct Mapped {
    pages: Mutex<Pages>,
    /// Notified when something that page-ins may wait for is over.
    news: Notify,
    channel: OnceLock<Weak<Channel>>,
    notices: Arc<Semaphore>,
}

impl Mapped {
    pub fn new() -> Mapped {
        Mapped {
            pages: Mutex::default(),
            news: Notify::new(),
            channel: OnceLock::new(),
            notices: Arc::new(Semaphore::new(NOTICES)),
        }
    }

    /// Sets the channel over which notices are sent.
    pub fn connect(&self, channel: &Arc<Channel>) {
        let _ = self.channel.set(Arc::downgrade(channel));
    }

    /// The kernel requests pages to keep.
    pub fn page_in(self: &Arc<Self>, node: u64, offset: u64, size: u64) -> PageIn {
        let whole = span(offset, offset.saturating_add(size));
        PageIn {
            id: self.pages.lock().page_in(node, whole),
            mapped: self.clone(),
            node,
            came: Instant::now(),
            at_once: AtomicBool::new(false),
        }
    }

    /// A change of the bytes up to `end`, which does not come from a mapping, is to be applied.
    pub fn change(self: &Arc<Self>, node: u64, offset: u64, end: u64) -> Changing {
        let (id, step) = self.pages.lock().change(node, span(offset, end));
        Changing { mapped: self.clone(), node, id, step: Mutex::new(step) }
    }

    /// As [`Mapped::change`], for a change after which the kernel drops the pages without writing
    /// them back. An error if the kernel has any pages.
    pub fn change_that_drops(
        self: &Arc<Self>,
        node: u64,
        offset: u64,
        end: u64,
    ) -> Result<Changing, HasPages> {
        let id = self.pages.lock().drops(node, span(offset, end)).ok_or(HasPages)?;
        Ok(Changing { mapped: self.clone(), node, id, step: Mutex::new(Step::Apply) })
    }

    /// An earlier daemon had the file open.
    pub fn may_be_out(&self, node: u64) {
        self.pages.lock().may_be_out(node);
    }

    /// A handle of the file is closed, and with it its mappings. `is_open`: whether there is
    /// another handle.
    pub fn released(&self, node: u64, is_open: impl FnOnce() -> bool) {
        let mut pages = self.pages.lock();
        // Evaluated within the lock: a file that is opened later gets its pages later.
        if pages.knows(node) && !is_open() {
            pages.unmapped(node);
        }
    }

    /// Whether any page of a file is out, or may be.
    pub fn has_out(&self, node: u64) -> bool {
        self.pages.lock().has_out(node)
    }

    /// Makes the kernel give back all pages that were handed out. Continues if the caller goes
    /// away.
    pub async fn give_back(self: &Arc<Self>, node: u64) {
        let first = self.pages.lock().give_back(node);
        let mapped = self.clone();
        let all = async move {
            if let Some((began, spans)) = first {
                mapped.rounds(node, began, spans).await;
            }
            // As long as another one lasts, pages are handed out at once. It takes those back.
            loop {
                let mut news = std::pin::pin!(mapped.news.notified());
                news.as_mut().enable();
                if !mapped.pages.lock().is_giving(node) {
                    return;
                }
                news.await;
            }
        };
        let _ = tokio::spawn(all).await;
    }

    /// Makes the kernel give back these pages, and those that it gets meanwhile.
    async fn rounds(&self, node: u64, began: u64, spans: Vec<Span>) {
        let mut next = Some((began, spans));
        while let Some((began, spans)) = next {
            for pages in &spans {
                self.take_out(node, pages).await;
            }
            next = self.pages.lock().given_back(node, began);
            self.news.notify_waiters();
        }
    }

    /// Makes the kernel write these pages back and drop them. The kernel waits for page-ins in
    /// progress, and for write-backs.
    async fn take_out(&self, node: u64, pages: &Span) {
        let Some(channel) = self.channel.get().and_then(Weak::upgrade) else { return };
        let Ok(place) = self.notices.clone().acquire_owned().await else { return };
        let at = i64::try_from(pages.start * PAGE).unwrap_or(i64::MAX);
        // A length of 0 means to the end.
        let len = pages
            .end
            .checked_mul(PAGE)
            .and_then(|end| i64::try_from(end - pages.start * PAGE).ok())
            .unwrap_or(0);
        let telling = spawn_blocking(move || {
            let _place = place;
            match channel.notify(&notify::inode_changed(node, at, len)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(node, "the kernel did not give pages back: {e}");
                }
                _ => {}
            }
        });
        let _ = telling.await;
    }
}

/// The error when the kernel has pages of the file.
#[derive(Debug)]
pub struct HasPages;

/// A page-in. Must be dropped before the kernel has the answer.
pub struct PageIn {
    mapped: Arc<Mapped>,
    node: u64,
    id: u64,
    came: Instant,
    at_once: AtomicBool,
}

impl PageIn {
    /// Whether the page-in may read. If not: how long it has to wait at most.
    fn verdict(&self, overdue: bool) -> Result<(), Option<Duration>> {
        match self.mapped.pages.lock().verdict(self.node, self.id, overdue) {
            Verdict::Read => Ok(()),
            Verdict::ReadAtOnce => {
                self.at_once.store(true, Relaxed);
                Ok(())
            }
            Verdict::Wait => Err(None),
            Verdict::Hold(tries) => {
                Err(Some(HOLD.saturating_mul(4u32.saturating_pow(tries)).min(LONGEST_HOLD)))
            }
        }
    }

    /// Whether the page-in must be answered without asking the metadata servers.
    pub fn is_at_once(&self) -> bool {
        self.at_once.load(Relaxed)
    }

    /// The metadata servers have sent everything that the answer needs.
    pub fn asked(&self) {
        self.mapped.pages.lock().asked(self.node, self.id);
    }

    /// Returns when the page-in may read.
    pub async fn turn(&self) {
        loop {
            let mut news = std::pin::pin!(self.mapped.news.notified());
            news.as_mut().enable();
            match self.verdict(false) {
                Ok(()) => return,
                Err(None) => news.await,
                Err(Some(hold)) => {
                    if tokio::time::timeout_at(self.came + hold, news).await.is_err()
                        && self.verdict(true).is_ok()
                    {
                        return;
                    }
                }
            }
        }
    }
}

impl Drop for PageIn {
    fn drop(&mut self) {
        self.mapped.pages.lock().answered(self.node, self.id);
    }
}

/// A change that is to be applied, or is being applied. Drop it when that is done.
pub struct Changing {
    mapped: Arc<Mapped>,
    node: u64,
    id: u64,
    step: Mutex<Step>,
}

impl Changing {
    /// Whether the change must wait until pages are taken out.
    pub fn waits(&self) -> bool {
        *self.step.lock() != Step::Apply
    }

    /// Returns when no page of the change is out.
    pub async fn alone(&self) {
        loop {
            let step = self.step.lock().clone();
            let Step::TakeOut(pages) = step else { return };
            self.mapped.take_out(self.node, &pages).await;
            let spoilt = self.mapped.pages.lock().is_spoilt(self.node, self.id);
            if let Some(tries) = spoilt {
                tokio::time::sleep(
                    PAUSE.saturating_mul(2u32.saturating_pow(tries)).min(LONGEST_PAUSE),
                )
                .await;
            }
            *self.step.lock() = self.mapped.pages.lock().taken_out(self.node, self.id);
            self.mapped.news.notify_waiters();
        }
    }

    /// Whether a page-in waits for the change.
    pub fn is_waited_for(&self) -> bool {
        self.mapped.pages.lock().is_waited_for(self.node, self.id)
    }

    /// Keeps the change alive until the kernel has dropped the pages.
    pub fn until_dropped(self: Arc<Self>) {
        tokio::spawn(async move {
            tokio::time::sleep(DROPS).await;
            drop(self);
        });
    }
}

impl Turn for Changing {
    fn begin(&self) -> bool {
        let step = self.mapped.pages.lock().begin(self.node, self.id);
        let begins = step == Step::Apply;
        *self.step.lock() = step;
        if !begins {
            // Page-ins do not wait for it any more.
            self.mapped.news.notify_waiters();
        }
        begins
    }

    fn wait(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.alone())
    }

    fn pause(&self) {
        self.mapped.pages.lock().pause(self.node, self.id);
        self.mapped.news.notify_waiters();
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.mapped.pages.lock().changed(self.node, self.id);
        self.mapped.news.notify_waiters();
    }
}
