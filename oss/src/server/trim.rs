//! TRIM: what a file has on a chain behind its end is removed.
//!
//! An update is known by its session's number when a copy of it comes late; a TRIM is many updates that belong to no session. Were a
//! copy of one carried out late it would remove what has been written since. So it is carried out only with a number that this
//! head gave for the file as the last one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use strake_proto::{
    ChunkId, Code, Error, Result,
    data::{DataReply, DataRequest, FLAG_TOMBSTONE, Kind, Version},
};
use tokio::time::Instant;

use super::replica::{Carried, Replica};

/// Updates that one TRIM keeps in flight.
const PARALLEL: usize = 16;
const PAGE: usize = 256;
/// A number is to be used within this time.
const GOOD_FOR: Duration = Duration::from_secs(10);
/// Numbers given and not used yet.
const MOST: usize = 65_536;

/// Inode and data id.
type File = (u64, u64);

/// The numbers that a replica gave as head, in one epoch: requests of another one are refused before they come here.
#[derive(Default)]
pub struct Cuts(Mutex<Given>);

#[derive(Default)]
struct Given {
    epoch: u64,
    /// The newest term of a metadata server that asked in this epoch. A recovered group begins with a lower one, and newer epochs.
    term: u64,
    last: u64,
    files: BTreeMap<File, Cut>,
    /// Those that are being removed for good.
    going: BTreeSet<File>,
}

struct Cut {
    number: u64,
    at: Instant,
    running: bool,
}

/// A TRIM that is being carried out; its number is not good for another one.
struct Running<'a> {
    cuts: &'a Cuts,
    file: File,
    number: u64,
}

/// A removal for good. While it is at work nothing else cuts the file: once it has made those behind it forget the tombstones, they would refuse
/// an update that builds on one.
struct Removal<'a> {
    cuts: &'a Cuts,
    file: File,
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.cuts.0.lock().going.remove(&self.file);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut given = self.cuts.0.lock();
        if given.files.get(&self.file).is_some_and(|c| c.number == self.number) {
            given.files.remove(&self.file);
        }
    }
}

impl Cuts {
    /// A new number, after which no former one of the file is good. `StaleEpoch`: a leader of a newer term has asked before,
    /// or the chain has changed; `Overloaded`: not now.
    fn give(&self, file: File, epoch: u64, term: u64) -> Result<u64> {
        let given = &mut *self.0.lock();
        if epoch < given.epoch || epoch == given.epoch && term < given.term {
            let m = format!("term {term} and epoch {epoch} asked, {} and {} here", given.term, given.epoch);
            return Err(Error::new(Code::StaleEpoch, m));
        }
        if epoch > given.epoch {
            given.files.clear();
        }
        (given.term, given.epoch) = (term, epoch);
        if given.files.get(&file).is_some_and(|c| c.running) {
            return Err(Error::new(Code::Overloaded, "this file is being cut"));
        }
        if given.files.len() >= MOST && !given.files.contains_key(&file) {
            given.files.retain(|_, c| c.running || c.at.elapsed() < GOOD_FOR);
            if given.files.len() >= MOST {
                return Err(Error::new(Code::Overloaded, "too many files are being cut"));
            }
        }
        given.last += 1;
        given.files.insert(file, Cut { number: given.last, at: Instant::now(), running: false });
        Ok(given.last)
    }

    /// For removing a file for good. `Overloaded`: it is being cut or removed.
    fn alone(&self, file: File) -> Result<Removal<'_>> {
        let mut given = self.0.lock();
        if given.files.get(&file).is_some_and(|c| c.running) || !given.going.insert(file) {
            return Err(Error::new(Code::Overloaded, "this file is being cut or removed"));
        }
        Ok(Removal { cuts: self, file })
    }

    fn begin(&self, file: File, epoch: u64, number: u64) -> Result<Running<'_>> {
        let mut given = self.0.lock();
        if given.going.contains(&file) {
            return Err(Error::new(Code::Overloaded, "this file is being removed"));
        }
        let same_epoch = given.epoch == epoch;
        let cut = given.files.get_mut(&file).filter(|c| {
            let good = c.number == number && !c.running && c.at.elapsed() < GOOD_FOR;
            good && same_epoch
        });
        let Some(cut) = cut else {
            let m = format!("number {number} is not, or not any more, good for cutting {:x}.{:x}", file.0, file.1);
            return Err(Error::new(Code::StaleEpoch, m));
        };
        cut.running = true;
        Ok(Running { cuts: self, file, number })
    }
}

/// Removes a file's chunks of this chain from `chunk.index` on, and cuts the one before. Without a number it only gives one,
/// except for data that is gone for good: nobody writes it again, and late copies of what was written are refused.
pub(super) async fn trim(replica: &Arc<Replica>, r: &DataRequest, trace: u64) -> Result<DataReply> {
    replica.check_member(r.epoch)?;
    if !replica.view().head {
        return Err(Error::new(Code::NotServing, format!("chain {} is trimmed at its head, not here", r.chain)));
    }
    let file = (r.chunk.ino, r.chunk.data);
    // While a file may be written its tombstones stay: replicas do not forget them at one moment, and an update that builds on
    // nothing is refused where there is one.
    let gone = r.flags & FLAG_TOMBSTONE != 0;
    if gone && (r.chunk.index != 0 || r.len != u32::MAX) {
        return Err(Error::new(Code::Inval, "data that is gone for good keeps no chunk"));
    }
    if r.seq == 0 && !gone {
        if r.version.epoch == 0 {
            return Err(Error::new(Code::Inval, "TRIM does not say of which term it is"));
        }
        let number = replica.cuts.give(file, r.epoch, r.version.epoch)?;
        let version = Version { epoch: r.epoch, number };
        return Ok(DataReply { version, epoch: r.epoch, ..DataReply::default() });
    }
    let _removal = gone.then(|| replica.cuts.alone(file)).transpose()?;
    if gone {
        // Before it is looked for what is in flight.
        replica.data_is_gone(r.chunk.data);
    }
    let _running = if gone { None } else { Some(replica.cuts.begin(file, r.epoch, r.seq)?) };
    tracing::debug!("chain {}: chunks of {} go, {} bytes stay before", r.chain, r.chunk, r.len);
    remove(replica, r, trace).await?;
    let stamps = replica.flush_chain(r.epoch, gone.then_some(r.chunk)).await?;
    Ok(DataReply { stable: true, epoch: r.epoch, stamps, ..DataReply::default() })
}

async fn remove(replica: &Arc<Replica>, r: &DataRequest, trace: u64) -> Result<()> {
    let update = |kind, index, offset| {
        let request =
            DataRequest { kind, offset, ..DataRequest::new(r.chain, r.epoch, r.target, ChunkId { index, ..r.chunk }) };
        replica.update(Carried { request, payload: Vec::new(), trace, _in_work: None }, false)
    };
    // What is being written right now may make chunks that no list has yet: those are removed after it, in their slot.
    let mut busy = replica.busy_from(r.chunk);
    let mut from = r.chunk.index;
    loop {
        let page = replica.engine().chunks_of(r.chain, r.chunk.ino, r.chunk.data, from, PAGE)?;
        let mut live: Vec<u64> = page.iter().filter(|e| !e.tombstone).map(|e| e.chunk.index).collect();
        live.extend(std::mem::take(&mut busy).into_iter().filter(|i| !live.contains(i)).collect::<Vec<_>>());
        let mut removals = stream::iter(live).map(|i| update(Kind::Remove, i, 0)).buffer_unordered(PARALLEL);
        while let Some(done) = removals.next().await {
            done?;
        }
        match page.last().and_then(|e| e.chunk.index.checked_add(1)) {
            Some(next) if page.len() == PAGE => from = next,
            _ => break,
        }
    }
    if let Some(index) = r.chunk.index.checked_sub(1)
        && r.len != u32::MAX
    {
        let key = replica.key(ChunkId { index, ..r.chunk });
        let cut = match replica.engine().meta(&key) {
            _ if replica.busy_from(key.chunk).first() == Some(&index) => true,
            Err(e) if e.code == Code::Corrupt => true,
            other => other?.is_some_and(|m| !m.tombstone && m.len > r.len),
        };
        if cut {
            update(Kind::Truncate, index, r.len).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: File = (4, 9);

    #[tokio::test(start_paused = true)]
    async fn a_number_is_good_once_as_the_last_one_and_soon() {
        let cuts = Cuts::default();
        let refused = |r: Result<Running<'_>>| assert_eq!(r.err().unwrap().code, Code::StaleEpoch);
        refused(cuts.begin(A, 5, 0));
        let first = cuts.give(A, 5, 1).unwrap();
        let second = cuts.give(A, 5, 1).unwrap();
        let other = cuts.give((5, 9), 5, 1).unwrap();
        refused(cuts.begin(A, 5, first));
        refused(cuts.begin((5, 9), 5, second));
        refused(cuts.begin(A, 6, second));
        let running = cuts.begin(A, 5, second).unwrap();
        refused(cuts.begin(A, 5, second));
        assert_eq!(cuts.give(A, 5, 1).unwrap_err().code, Code::Overloaded, "one at a time");
        drop(running);
        refused(cuts.begin(A, 5, second));
        drop(cuts.begin((5, 9), 5, other).unwrap());
        let late = cuts.give(A, 5, 1).unwrap();
        tokio::time::advance(GOOD_FOR).await;
        refused(cuts.begin(A, 5, late));
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_is_removed_by_one_at_a_time_and_not_while_it_is_cut() {
        let cuts = Cuts::default();
        let overloaded = |code: Option<Code>| assert_eq!(code, Some(Code::Overloaded));
        let number = cuts.give(A, 5, 1).unwrap();
        let running = cuts.begin(A, 5, number).unwrap();
        overloaded(cuts.alone(A).err().map(|e| e.code));
        drop(running);
        let number = cuts.give(A, 5, 1).unwrap();
        let removal = cuts.alone(A).unwrap();
        overloaded(cuts.alone(A).err().map(|e| e.code));
        overloaded(cuts.begin(A, 5, number).err().map(|e| e.code));
        drop(cuts.alone((5, 9)).unwrap());
        drop(removal);
        drop(cuts.alone(A).unwrap());
        drop(cuts.begin(A, 5, number).unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn leaders_of_former_terms_and_numbers_of_former_epochs_are_refused() {
        let cuts = Cuts::default();
        let old = cuts.give(A, 5, 7).unwrap();
        assert_eq!(cuts.give(A, 5, 6).unwrap_err().code, Code::StaleEpoch);
        let new = cuts.give((5, 9), 6, 7).unwrap();
        assert!(cuts.begin(A, 6, old).is_err() && cuts.begin(A, 5, old).is_err());
        assert_eq!(cuts.give(A, 5, 8).unwrap_err().code, Code::StaleEpoch);
        drop(cuts.begin((5, 9), 6, new).unwrap());
        cuts.give(A, 7, 2).unwrap(); // of a group that was recovered
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_that_nobody_uses_make_way() {
        let cuts = Cuts::default();
        for n in 0..MOST as u64 {
            cuts.give((n, 1), 5, 1).unwrap();
        }
        assert_eq!(cuts.give((4, 1), 5, 1).unwrap(), MOST as u64 + 1, "another one for a file that has one");
        assert_eq!(cuts.give((MOST as u64, 1), 5, 1).unwrap_err().code, Code::Overloaded);
        tokio::time::advance(GOOD_FOR).await;
        cuts.give((MOST as u64, 1), 5, 1).unwrap();
        assert_eq!(cuts.0.lock().files.len(), 1);
    }
}
