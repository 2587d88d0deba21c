//! How far the leader has come with trims and deletions that take several requests.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use strake_proto::{
    ChainId, Code, Error, Result,
    data::{BootId, DataReply, DataRequest, FLAG_TOMBSTONE},
};

/// How long a storage server works on one TRIM before it says where to continue.
pub(crate) const TRIM_BUDGET_MS: u32 = 3000;
/// Most steps that are remembered, for all jobs.
const MOST: usize = 1 << 17;

/// How far a job has come when it gives its place back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Did {
    All,
    /// It continues when others have had their turn.
    Part,
}

/// Where the removal of a file's chunks on a chain continues: the first chunk left, and TRIM's
/// `seq` for data that is gone for good.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrimStep {
    index: u64,
    seq: u64,
    /// The chain's epoch at that time.
    epoch: u64,
    /// The boot ids of the replicas that had flushed it then. A replica that reports the same id
    /// later has been in sync ever since.
    boot_ids: Vec<BootId>,
}

/// Everything is done.
const END: u64 = u64::MAX;

impl TrimStep {
    /// Whether certainly nothing is left, without asking.
    pub(crate) fn is_done(&self, epoch: u64) -> bool {
        self.index == END && self.epoch == epoch
    }

    /// The request that continues where earlier ones stopped.
    pub(crate) fn request(&self, first: &DataRequest) -> DataRequest {
        let mut r = DataRequest { offset: TRIM_BUDGET_MS, ..first.clone() };
        if self.index > r.chunk.index || self.seq > 0 {
            // The first request trimmed the chunk before.
            (r.chunk.index, r.len, r.seq) = (self.index, u32::MAX, self.seq);
        }
        r
    }

    /// What is left after the answer to such a request. If none of those replicas is known to have
    /// been in sync all the time, the work may be undone: it starts again. An older version's
    /// answer means that everything is done.
    pub(crate) fn after(&self, request: &DataRequest, reply: &DataReply) -> Result<TrimStep> {
        let same = |s: &BootId| self.boot_ids.contains(s);
        if *self != TrimStep::default()
            && self.epoch != request.epoch
            && !reply.boot_ids.iter().any(same)
        {
            return Ok(TrimStep::default());
        }
        let gone = request.flags & FLAG_TOMBSTONE != 0;
        let step = |index, seq| TrimStep {
            index,
            seq,
            epoch: request.epoch,
            boot_ids: reply.boot_ids.clone(),
        };
        if reply.stable || reply.len == 0 {
            return Ok(step(END, u64::from(gone)));
        }
        let next = step(reply.version.number, u64::from(reply.len - 1));
        let from = (if gone { request.seq } else { 0 }, request.chunk.index);
        if (next.seq, next.index) <= from || next.seq > u64::from(gone) {
            return Err(Error::new(
                Code::Protocol,
                "a storage server makes no progress with a trim",
            ));
        }
        Ok(next)
    }
}

/// By the number of the trim or deletion, and by chain. A job that fails, or makes way, continues
/// there.
#[derive(Default)]
pub(crate) struct TrimProgress(Mutex<BTreeMap<(u64, ChainId), TrimStep>>);

impl TrimProgress {
    /// Whether `chains` more steps can be remembered. A job whose steps cannot be remembered runs
    /// to its end in one turn.
    pub(crate) fn has_room(&self, chains: usize) -> bool {
        self.0.lock().len() + chains <= MOST
    }

    pub(crate) fn of(&self, at: (u64, ChainId)) -> TrimStep {
        self.0.lock().get(&at).cloned().unwrap_or_default()
    }

    pub(crate) fn put(&self, at: (u64, ChainId), step: TrimStep) {
        let mut all = self.0.lock();
        if all.len() < MOST || all.contains_key(&at) {
            all.insert(at, step);
        }
    }

    pub(crate) fn done(&self, number: u64) {
        let mut all = self.0.lock();
        let chains: Vec<_> =
            all.range((number, 0)..=(number, ChainId::MAX)).map(|(at, _)| *at).collect();
        for at in chains {
            all.remove(&at);
        }
    }

    /// Forgets steps of jobs that others have ended.
    pub(crate) fn retain(&self, wanted: impl Fn(u64) -> bool) {
        self.0.lock().retain(|(number, _), _| wanted(*number));
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::{ChunkId, data::Version};

    use super::*;

    const CHUNK: ChunkId = ChunkId { ino: 4, data: 9, index: 3 };

    fn boot_ids(all: &[u64]) -> Vec<BootId> {
        all.iter().map(|s| BootId { target: *s as u32, number: *s }).collect()
    }

    fn left(index: u64, len: u32) -> DataReply {
        let version = Version { epoch: 1, number: index };
        DataReply { len, version, boot_ids: boot_ids(&[1, 2]), ..DataReply::default() }
    }

    fn all_done(by: &[u64]) -> DataReply {
        DataReply { stable: true, boot_ids: boot_ids(by), ..DataReply::default() }
    }

    #[test]
    fn a_trim_goes_on_where_its_answer_says() {
        let first = DataRequest { len: 100, ..DataRequest::new(7, 1, 1, CHUNK) };
        let none = TrimStep::default();
        let begun = none.request(&first);
        assert_eq!((begun.chunk.index, begun.len, begun.offset), (3, 100, TRIM_BUDGET_MS));
        let step = none.after(&begun, &left(500, 1)).unwrap();
        let next = step.request(&first);
        assert_eq!((next.chunk.index, next.len), (500, u32::MAX), "the chunk before is cut once");
        // All done; answered by a server that knows no steps; and one that makes no progress.
        assert!(step.after(&next, &all_done(&[1])).unwrap().is_done(1));
        assert!(none.after(&begun, &DataReply::default()).unwrap().is_done(1));
        assert!(
            step.after(&next, &left(500, 1)).is_err() && step.after(&next, &left(1, 2)).is_err()
        );
        // For good: all are removed first, then the tombstones are forgotten.
        let gone = DataRequest {
            len: u32::MAX,
            flags: FLAG_TOMBSTONE,
            chunk: ChunkId { index: 0, ..CHUNK },
            ..first
        };
        let removing = none.after(&gone, &left(500, 1)).unwrap();
        let removed = removing.request(&gone);
        let step = removing.after(&removed, &left(20, 2)).unwrap();
        let forgets = step.request(&gone);
        assert_eq!((forgets.chunk.index, forgets.seq, forgets.len), (20, 1, u32::MAX));
        assert!(step.after(&forgets, &left(600, 1)).is_err(), "no step back");
        let done = step.after(&forgets, &all_done(&[1])).unwrap();
        let asks = done.request(&gone);
        assert_eq!(
            (asks.chunk.index, asks.seq),
            (u64::MAX, 1),
            "nothing is left to do, and the data stays gone"
        );
    }

    #[test]
    fn what_was_done_counts_in_another_epoch_if_a_replica_was_in_sync_all_the_time() {
        let first = |epoch| DataRequest { len: 100, ..DataRequest::new(7, epoch, 1, CHUNK) };
        let step = TrimStep::default().after(&first(1), &left(500, 1)).unwrap();
        let done = step.after(&step.request(&first(1)), &all_done(&[1, 2])).unwrap();
        assert!(done.is_done(1) && !done.is_done(2), "in another epoch it is asked");
        for step in [step, done] {
            let again = step.request(&first(2));
            assert!(step.after(&again, &all_done(&[7, 2])).unwrap().is_done(2));
            // All replicas of that time are gone, or were out of sync: chunks they had removed may
            // be back.
            for by in [&[7, 8][..], &[]] {
                assert_eq!(step.after(&again, &all_done(by)).unwrap(), TrimStep::default());
            }
        }
    }

    #[test]
    fn how_far_a_job_came_is_kept_until_it_is_done() {
        let progress = TrimProgress::default();
        let step = |index| TrimStep { index, ..TrimStep::default() };
        for at in [(5, 1), (5, 2), (6, 1)] {
            progress.put(at, step(9));
        }
        progress.done(5);
        assert_eq!((progress.of((5, 2)).index, progress.of((6, 1)).index), (0, 9));
        progress.retain(|number| number == 7);
        assert_eq!(progress.of((6, 1)).index, 0);
        for chain in 0..MOST as u32 {
            progress.put((8, chain), step(1));
        }
        assert!(!progress.has_room(1));
        progress.put((9, 1), step(1));
        progress.put((8, 5), step(2));
        assert_eq!(
            (progress.of((9, 1)).index, progress.of((8, 5)).index),
            (0, 2),
            "a bounded number of them"
        );
    }
}
