//! TRIM: removes a file's data on a chain after the file's end.
//!
//! A late copy of an update is recognized by its session's number. A TRIM is many updates that
//! belong to no session. If a late copy of a TRIM were carried out, it would remove data written
//! since. So a TRIM is carried out only with the number that this head gave last for the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, TryStreamExt, stream, stream::FuturesUnordered};
use parking_lot::Mutex;
use strake_proto::{
    ChunkId, Code, Error, Result,
    data::{BootId, DataReply, DataRequest, FLAG_TOMBSTONE, Kind, Version},
};
use tokio::time::Instant;

use super::{links::Forget, replica::Replica, update_request::UpdateRequest, updates::Updates};
use crate::engine::Update;

/// Most updates that one TRIM keeps in flight.
const PARALLEL: usize = 16;
const PAGE: usize = 1024;
/// Most tombstones that are forgotten between two flushes.
const FORGET_PAGE: u32 = 16_384;
/// In TRIM's `seq`, for data that is gone for good: everything is removed, forget the tombstones.
const FORGETTING: u64 = 1;
/// How long a number may be used.
const GOOD_FOR: Duration = Duration::from_secs(10);
/// Most numbers issued and not used yet.
const MOST: usize = 65_536;

/// Inode and data id.
type File = (u64, u64);

/// The numbers that a replica gave as head in one epoch. Requests of other epochs are refused
/// before they get here.
#[derive(Default)]
struct TrimNumbers(Mutex<Issued>);

#[derive(Default)]
struct Issued {
    epoch: u64,
    /// The newest term of a metadata server that asked in this epoch. A recovered group begins with
    /// a lower term, but in newer epochs.
    term: u64,
    last: u64,
    files: BTreeMap<File, Number>,
    /// Files that are being removed for good.
    removals: BTreeSet<File>,
}

struct Number {
    number: u64,
    at: Instant,
    running: bool,
}

/// A TRIM in progress; its number cannot be used for another one.
struct Running<'a> {
    numbers: &'a TrimNumbers,
    file: File,
    number: u64,
}

/// A removal for good. While it runs, nothing else truncates the file: replicas behind that have
/// forgotten a tombstone would refuse an update that builds on it.
struct Removal<'a> {
    numbers: &'a TrimNumbers,
    file: File,
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.numbers.0.lock().removals.remove(&self.file);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut issued = self.numbers.0.lock();
        if issued.files.get(&self.file).is_some_and(|c| c.number == self.number) {
            issued.files.remove(&self.file);
        }
    }
}

impl TrimNumbers {
    /// Gives a new number for the file and voids earlier ones. `StaleEpoch`: a leader of a newer
    /// term has asked before, or the chain has changed; `Overloaded`: not now.
    fn issue(&self, file: File, epoch: u64, term: u64) -> Result<u64> {
        let issued = &mut *self.0.lock();
        if epoch < issued.epoch || epoch == issued.epoch && term < issued.term {
            let m = format!(
                "term {term} and epoch {epoch} requested, but {} and {} here",
                issued.term, issued.epoch
            );
            return Err(Error::new(Code::StaleEpoch, m));
        }
        if epoch > issued.epoch {
            issued.files.clear();
        }
        (issued.term, issued.epoch) = (term, epoch);
        if issued.files.get(&file).is_some_and(|c| c.running) {
            return Err(Error::new(Code::Overloaded, "this file is being truncated"));
        }
        if issued.files.len() >= MOST && !issued.files.contains_key(&file) {
            issued.files.retain(|_, c| c.running || c.at.elapsed() < GOOD_FOR);
            if issued.files.len() >= MOST {
                return Err(Error::new(Code::Overloaded, "too many files are being truncated"));
            }
        }
        issued.last += 1;
        issued
            .files
            .insert(file, Number { number: issued.last, at: Instant::now(), running: false });
        Ok(issued.last)
    }

    /// Begins removing a file for good. `Overloaded`: it is being truncated or removed.
    fn begin_removal(&self, file: File) -> Result<Removal<'_>> {
        let mut issued = self.0.lock();
        if issued.files.get(&file).is_some_and(|c| c.running) || !issued.removals.insert(file) {
            return Err(Error::new(Code::Overloaded, "this file is being truncated or removed"));
        }
        Ok(Removal { numbers: self, file })
    }

    fn begin(&self, file: File, epoch: u64, number: u64) -> Result<Running<'_>> {
        let mut issued = self.0.lock();
        if issued.removals.contains(&file) {
            return Err(Error::new(Code::Overloaded, "this file is being removed"));
        }
        let same_epoch = issued.epoch == epoch;
        let cut = issued.files.get_mut(&file).filter(|c| {
            let good = c.number == number && !c.running && c.at.elapsed() < GOOD_FOR;
            good && same_epoch
        });
        let Some(cut) = cut else {
            let m = format!(
                "number {number} is not, or no longer, valid for truncating {:x}.{:x}",
                file.0, file.1
            );
            return Err(Error::new(Code::StaleEpoch, m));
        };
        cut.running = true;
        Ok(Running { numbers: self, file, number })
    }
}

/// The reply to a request that is done in part: `next` is the first chunk that is left.
pub(super) fn goes_on(epoch: u64, next: Option<u64>) -> DataReply {
    let version = next.map_or_else(Version::default, |number| Version { epoch, number });
    DataReply { epoch, version, len: u32::from(next.is_some()), ..DataReply::default() }
}

/// Until when a request may work; `None`: until all is done.
struct Budget(Option<Instant>);

impl Budget {
    fn of(r: &DataRequest) -> Budget {
        Budget((r.offset > 0).then(|| Instant::now() + Duration::from_millis(u64::from(r.offset))))
    }

    fn is_spent(&self) -> bool {
        self.0.is_some_and(|until| Instant::now() >= until)
    }
}

/// See the module.
pub(super) struct Trims {
    replica: Arc<Replica>,
    updates: Arc<Updates>,
    numbers: TrimNumbers,
}

impl Trims {
    pub(super) fn new(replica: Arc<Replica>, updates: Arc<Updates>) -> Trims {
        Trims { replica, updates, numbers: TrimNumbers::default() }
    }

    /// Removes a file's chunks of this chain from `chunk.index` on, and truncates the one before. A
    /// request without a number only gets one. Data that is gone for good needs no number: nothing
    /// writes it again, and late copies of old writes are refused. It is removed in two steps, told
    /// apart by `seq`: first all chunks, then the tombstones.
    pub(super) async fn trim(&self, r: &DataRequest, trace: u64) -> Result<DataReply> {
        self.replica.check_member(r.epoch)?;
        if !self.replica.view().head {
            return Err(Error::new(
                Code::NotServing,
                format!("chain {} is trimmed at its head; this is not its head", r.chain),
            ));
        }
        let file = (r.chunk.ino, r.chunk.data);
        // While a file may be written, its tombstones stay. Replicas do not forget them at the same
        // moment, and where one is left, an update that builds on nothing is refused.
        let gone = r.flags & FLAG_TOMBSTONE != 0;
        if gone && (r.chunk.index != 0 && r.offset == 0 || r.len != u32::MAX) {
            return Err(Error::new(Code::Inval, "a trim of removed data must keep no chunk"));
        }
        let budget = Budget::of(r);
        if gone {
            let _removal = self.numbers.begin_removal(file)?;
            // Before looking at what is in flight.
            self.replica.data_is_gone(r.chunk.data);
            return self.remove_for_good(r, trace, &budget).await;
        }
        if r.seq == 0 {
            if r.version.epoch == 0 {
                return Err(Error::new(Code::Inval, "TRIM has no term"));
            }
            let number = self.numbers.issue(file, r.epoch, r.version.epoch)?;
            let version = Version { epoch: r.epoch, number };
            return Ok(DataReply { version, epoch: r.epoch, ..DataReply::default() });
        }
        let _running = self.numbers.begin(file, r.epoch, r.seq)?;
        tracing::debug!(
            "chain {}: removing chunks of {} except the first {} bytes",
            r.chain,
            r.chunk,
            r.len
        );
        self.cut_before(r, trace).await?;
        let next = self.remove(r, trace, &budget).await?;
        let boot_ids = self.replica.flush_chain(r.epoch).await?;
        Ok(DataReply { stable: next.is_none(), boot_ids, ..goes_on(r.epoch, next) })
    }

    /// Removes all chunks, then has the tombstones forgotten. In the second step nothing makes a chunk
    /// of the data any more, so what a replica behind still has belongs to no file.
    async fn remove_for_good(
        &self,
        r: &DataRequest,
        trace: u64,
        budget: &Budget,
    ) -> Result<DataReply> {
        let mut from = r.chunk;
        if r.seq != FORGETTING {
            tracing::debug!("chain {}: removing all chunks of {}", r.chain, r.chunk);
            if let Some(next) = self.remove(r, trace, budget).await? {
                let boot_ids = self.replica.flush_chain(r.epoch).await?;
                return Ok(DataReply { boot_ids, ..goes_on(r.epoch, Some(next)) });
            }
            from.index = 0;
        }
        loop {
            let (boot_ids, next) =
                self.forget_chain(r.epoch, Forget { from, most: FORGET_PAGE }).await?;
            match next {
                None => return Ok(DataReply { stable: true, boot_ids, ..goes_on(r.epoch, None) }),
                Some(index) => from.index = index,
            }
            if budget.is_spent() {
                // The length tells that this is the second step.
                return Ok(DataReply { boot_ids, len: 2, ..goes_on(r.epoch, next) });
            }
        }
    }

    /// Removes chunks. Returns where to continue if the time is over before all is done.
    async fn remove(&self, r: &DataRequest, trace: u64, budget: &Budget) -> Result<Option<u64>> {
        // Writes in flight may make chunks that no list has yet. Those are removed after the write, in
        // their slot.
        let mut busy: BTreeSet<u64> = self.replica.busy_from(r.chunk).into_iter().collect();
        let mut from = r.chunk.index;
        loop {
            let page =
                self.replica.engine().chunks_of(r.chain, r.chunk.ino, r.chunk.data, from, PAGE)?;
            let next = page
                .last()
                .filter(|_| page.len() == PAGE)
                .and_then(|e| e.chunk.index.checked_add(1));
            let later = next.map(|next| busy.split_off(&next)).unwrap_or_default();
            let mut due = std::mem::replace(&mut busy, later);
            due.extend(page.iter().filter(|e| !e.tombstone).map(|e| e.chunk.index));
            if let Some(left) = self.remove_all(r, trace, due, budget).await? {
                return Ok(Some(left));
            }
            match next {
                Some(next) if budget.is_spent() => return Ok(Some(next)),
                Some(next) => from = next,
                None => return Ok(None),
            }
            // A page of tombstones has nothing to wait for.
            tokio::task::yield_now().await;
        }
    }

    /// Returns the first chunk that is left when the time is over. Removes at least one.
    async fn remove_all(
        &self,
        r: &DataRequest,
        trace: u64,
        due: BTreeSet<u64>,
        budget: &Budget,
    ) -> Result<Option<u64>> {
        let gone = r.flags & FLAG_TOMBSTONE != 0;
        let (mut due, mut begun) = (due.into_iter(), 0);
        let mut removals = FuturesUnordered::new();
        loop {
            while removals.len() < PARALLEL
                && (begun == 0 || !budget.is_spent())
                && let Some(index) = due.next()
            {
                begun += 1;
                removals.push(self.update(r, trace, Kind::Remove, index, 0));
            }
            match removals.next().await {
                None => return Ok(due.next()),
                // Its version is not known, here or on a replica behind. The second step removes it
                // there.
                Some(Err(e)) if gone && e.code == Code::Corrupt => {}
                Some(other) => drop(other?),
            }
        }
    }

    async fn cut_before(&self, r: &DataRequest, trace: u64) -> Result<()> {
        let Some(index) = r.chunk.index.checked_sub(1).filter(|_| r.len != u32::MAX) else {
            return Ok(());
        };
        let key = self.replica.key(ChunkId { index, ..r.chunk });
        let cut = match self.replica.engine().meta(&key) {
            _ if self.replica.busy_from(key.chunk).first() == Some(&index) => true,
            Err(e) if e.code == Code::Corrupt => true,
            other => other?.is_some_and(|m| !m.tombstone && m.len > r.len),
        };
        if cut {
            self.update(r, trace, Kind::Truncate, index, r.len).await?;
        }
        Ok(())
    }

    /// An update of one chunk of the file, without a session.
    async fn update(
        &self,
        r: &DataRequest,
        trace: u64,
        kind: Kind,
        index: u64,
        offset: u32,
    ) -> Result<DataReply> {
        let flags = if kind == Kind::Remove { r.flags & FLAG_TOMBSTONE } else { 0 };
        let chunk = ChunkId { index, ..r.chunk };
        let request = DataRequest {
            kind,
            flags,
            offset,
            ..DataRequest::new(r.chain, r.epoch, r.target, chunk)
        };
        let update = UpdateRequest { request, payload: Vec::new(), trace, _in_work: None };
        self.updates.update(update, false).await
    }

    /// Flushes the chain, then has every replica forget tombstones, those behind before this one.
    /// Returns their boot_ids, and where one of them has to continue.
    pub(super) async fn forget_chain(
        &self,
        epoch: u64,
        f: Forget,
    ) -> Result<(Vec<BootId>, Option<u64>)> {
        let (boot_ids, behind) = self.replica.flush_all(epoch, Some(f)).await?;
        // After this, no chunk is left that recognizes a late copy of a FORWARD.
        self.replica.data_is_gone(f.from.data);
        let (file, mut from) = ((f.from.ino, f.from.data), f.from.index);
        let most = if f.most == 0 { FORGET_PAGE } else { f.most.min(FORGET_PAGE) } as usize;
        loop {
            let forgot =
                self.replica.engine().forget_tombstones(self.replica.chain, file, from, most)?;
            self.drop_leftovers(epoch, f.from, forgot.left).await?;
            match forgot.next {
                // A caller that wants all of it does not ask again.
                Some(next) if f.most == 0 => from = next,
                next => return Ok((boot_ids, [next, behind].into_iter().flatten().min())),
            }
            self.replica.flush().await?;
        }
    }

    /// Removes chunks of data that is gone for good, which the chain's head does not have. Late
    /// FORWARDs made them.
    async fn drop_leftovers(&self, epoch: u64, of: ChunkId, left: Vec<u64>) -> Result<()> {
        let Some(first) = left.first() else { return Ok(()) };
        let (chain, count, first) =
            (self.replica.chain, left.len(), ChunkId { index: *first, ..of });
        tracing::info!(
            "chain {chain}: removing {count} chunks that are left of removed data, {first} first"
        );
        let removals =
            left.into_iter().map(|index| self.drop_leftover(epoch, ChunkId { index, ..of }));
        stream::iter(removals).buffer_unordered(PARALLEL).try_collect().await
    }

    async fn drop_leftover(&self, epoch: u64, chunk: ChunkId) -> Result<()> {
        let _hold = self.replica.hold(chunk, epoch).await?;
        self.replica.check_member(epoch)?;
        let staged = self.replica.engine().stage(self.replica.key(chunk), Update::Remove).await?;
        self.replica.engine().forget(staged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: File = (4, 9);

    #[tokio::test(start_paused = true)]
    async fn a_number_is_good_once_as_the_last_one_and_soon() {
        let numbers = TrimNumbers::default();
        let refused = |r: Result<Running<'_>>| assert_eq!(r.err().unwrap().code, Code::StaleEpoch);
        refused(numbers.begin(A, 5, 0));
        let first = numbers.issue(A, 5, 1).unwrap();
        let second = numbers.issue(A, 5, 1).unwrap();
        let other = numbers.issue((5, 9), 5, 1).unwrap();
        refused(numbers.begin(A, 5, first));
        refused(numbers.begin((5, 9), 5, second));
        refused(numbers.begin(A, 6, second));
        let running = numbers.begin(A, 5, second).unwrap();
        refused(numbers.begin(A, 5, second));
        assert_eq!(numbers.issue(A, 5, 1).unwrap_err().code, Code::Overloaded, "one at a time");
        drop(running);
        refused(numbers.begin(A, 5, second));
        drop(numbers.begin((5, 9), 5, other).unwrap());
        let late = numbers.issue(A, 5, 1).unwrap();
        tokio::time::advance(GOOD_FOR).await;
        refused(numbers.begin(A, 5, late));
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_is_removed_by_one_at_a_time_and_not_while_it_is_cut() {
        let numbers = TrimNumbers::default();
        let overloaded = |code: Option<Code>| assert_eq!(code, Some(Code::Overloaded));
        let number = numbers.issue(A, 5, 1).unwrap();
        let running = numbers.begin(A, 5, number).unwrap();
        overloaded(numbers.begin_removal(A).err().map(|e| e.code));
        drop(running);
        let number = numbers.issue(A, 5, 1).unwrap();
        let removal = numbers.begin_removal(A).unwrap();
        overloaded(numbers.begin_removal(A).err().map(|e| e.code));
        overloaded(numbers.begin(A, 5, number).err().map(|e| e.code));
        drop(numbers.begin_removal((5, 9)).unwrap());
        drop(removal);
        drop(numbers.begin_removal(A).unwrap());
        drop(numbers.begin(A, 5, number).unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn leaders_of_former_terms_and_numbers_of_former_epochs_are_refused() {
        let numbers = TrimNumbers::default();
        let old = numbers.issue(A, 5, 7).unwrap();
        assert_eq!(numbers.issue(A, 5, 6).unwrap_err().code, Code::StaleEpoch);
        let new = numbers.issue((5, 9), 6, 7).unwrap();
        assert!(numbers.begin(A, 6, old).is_err() && numbers.begin(A, 5, old).is_err());
        assert_eq!(numbers.issue(A, 5, 8).unwrap_err().code, Code::StaleEpoch);
        drop(numbers.begin((5, 9), 6, new).unwrap());
        numbers.issue(A, 7, 2).unwrap(); // a recovered group
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_that_nobody_uses_make_way() {
        let numbers = TrimNumbers::default();
        for n in 0..MOST as u64 {
            numbers.issue((n, 1), 5, 1).unwrap();
        }
        assert_eq!(
            numbers.issue((4, 1), 5, 1).unwrap(),
            MOST as u64 + 1,
            "another one for a file that has one"
        );
        assert_eq!(numbers.issue((MOST as u64, 1), 5, 1).unwrap_err().code, Code::Overloaded);
        tokio::time::advance(GOOD_FOR).await;
        numbers.issue((MOST as u64, 1), 5, 1).unwrap();
        assert_eq!(numbers.0.lock().files.len(), 1);
    }
}
