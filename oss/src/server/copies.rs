//! Copies that are not in sync, as sources for data of which no in-sync replica has a good copy.
//! They are on a replica that waits, is being resynced or is out of service, or on a target that
//! has left the chain and still exists. They may be older, so this replica judges what they return:
//! a block with the checksum that this replica's record demands is the right block, whatever else
//! has changed. If that checksum is not known, the copy's chunk must be at this replica's version,
//! because a version names one update.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::{
    ChunkId, Code, Error, Result, TargetId,
    checksum::{self, block_sums, crc32c},
    data::{DataReply, Version},
    map::ChainExt,
    pb::{self, ReplicaState},
};
use tokio::time::Instant;

use super::replica::Replica;
use crate::chain::rows::Copies as Rows;

/// How often a target that has left a chain tells the replicas in sync that it is there, and asks
/// again about the chunks that it keeps.
pub(super) const ANNOUNCE: Duration = Duration::from_secs(30);
const BLOCK: u32 = checksum::BLOCK as u32;
/// Bytes that are asked for at once.
const PIECE: u32 = 64 * BLOCK;
/// A target that has left is asked for so long after its last message.
const REMEMBERED: Duration = Duration::from_secs(5 * ANNOUNCE.as_secs());

/// After a member that is out of service did not answer, none of them is asked for so long. After
/// they could not help with a chunk, they are not asked about that chunk for so long.
const OFFLINE_AGAIN: Duration = Duration::from_millis(500);
/// How long updates of the chunk wait for the answer of such a member, which may be unreachable.
const OFFLINE_PATIENCE: Duration = Duration::from_millis(500);

/// Members of a chain that are out of service. Most are dead, but one that is shut out because of a
/// bad link may still be reachable from here.
#[derive(Default)]
struct OfflineMembers(Mutex<Asked>);

#[derive(Default)]
struct Asked {
    /// When one of them last did not answer.
    silent: Option<Instant>,
    /// When they last could not help with a chunk.
    in_vain: BTreeMap<ChunkId, Instant>,
}

impl OfflineMembers {
    fn may_be_asked(&self, chunk: ChunkId, now: Instant) -> bool {
        let asked = self.0.lock();
        !asked.silent.is_some_and(|at| is_recent(at, now))
            && !asked.in_vain.get(&chunk).is_some_and(|at| is_recent(*at, now))
    }

    fn is_silent(&self, now: Instant) {
        self.0.lock().silent = Some(now);
    }

    fn could_not_help(&self, chunk: ChunkId, now: Instant) {
        let mut asked = self.0.lock();
        asked.in_vain.retain(|_, at| is_recent(*at, now));
        asked.in_vain.insert(chunk, now);
    }
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < OFFLINE_AGAIN
}

/// Targets that have left a chain and still have something of it.
#[derive(Default)]
struct FormerMembers(Mutex<BTreeMap<TargetId, Instant>>);

impl FormerMembers {
    /// Records that a target was heard of. Returns whether that is news.
    fn heard(&self, target: TargetId, now: Instant) -> bool {
        let mut known = self.0.lock();
        known.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
        known.insert(target, now).is_none()
    }

    /// Forgets a target. Returns whether it was known.
    fn is_gone(&self, target: TargetId) -> bool {
        self.0.lock().remove(&target).is_some()
    }

    fn now(&self, now: Instant) -> Vec<TargetId> {
        let known = self.0.lock();
        known
            .iter()
            .filter(|(_, at)| now.saturating_duration_since(**at) < REMEMBERED)
            .map(|(t, _)| *t)
            .collect()
    }
}

/// A part of a chunk with a good copy.
pub(super) struct Part {
    pub at: Range<u32>,
    pub from: TargetId,
    pub data: Vec<Buf>,
    pub sums: Vec<u32>,
}

/// The result of a search in copies that are not in sync.
#[derive(Default)]
pub(super) struct Found {
    pub parts: Vec<Part>,
    /// The ranges for which no copy was found, in order.
    pub left: Vec<Range<u32>>,
    /// A target that may have them did not answer.
    pub unasked: Option<Error>,
}

/// See the module.
pub(super) struct Copies {
    replica: Arc<Replica>,
    formers: FormerMembers,
    offline: OfflineMembers,
}

impl Copies {
    pub(super) fn new(replica: Arc<Replica>) -> Arc<Copies> {
        let (formers, offline) = (FormerMembers::default(), OfflineMembers::default());
        Arc::new(Copies { replica, formers, offline })
    }

    /// A target that has left the chain asks about its data. Returns whether that is news.
    pub(super) fn heard_former(&self, target: TargetId) -> bool {
        self.formers.heard(target, Instant::now())
    }

    /// Targets that may have a copy but are not in sync.
    fn others_out_of_sync(&self) -> BTreeSet<TargetId> {
        let map = self.replica.ctx.map.load();
        let Some(chain) = map.chain(self.replica.chain) else { return BTreeSet::new() };
        let there = |r: &&pb::Replica| {
            matches!(r.state(), ReplicaState::ReplicaSyncing | ReplicaState::ReplicaWaiting)
        };
        let there = chain.replicas.iter().filter(there).map(|r| r.target);
        let left =
            self.formers.now(Instant::now()).into_iter().filter(|t| chain.state_of(*t).is_none());
        there.chain(left).filter(|t| *t != self.replica.id).collect()
    }

    /// Members of the chain that are out of service, if they may be asked about the chunk now.
    fn offline_members(&self, chunk: ChunkId) -> Vec<TargetId> {
        if !self.offline.may_be_asked(chunk, Instant::now()) {
            return Vec::new();
        }
        let map = self.replica.ctx.map.load();
        let is_offline = |r: &&pb::Replica| {
            r.state() == ReplicaState::ReplicaOffline && r.target != self.replica.id
        };
        map.chain(self.replica.chain).map_or_else(Vec::new, |c| {
            c.replicas.iter().filter(is_offline).map(|r| r.target).collect()
        })
    }

    /// Whether lost data of the chunk may be found now, in the same epoch.
    pub(super) fn may_be_found(&self, chunk: ChunkId) -> bool {
        !self.offline_members(chunk).is_empty()
    }

    /// Looks for good copies of damaged blocks of the committed chunk. The caller holds its slot.
    pub(super) async fn search(
        &self,
        chunk: ChunkId,
        version: Version,
        damaged: &[Range<u32>],
    ) -> Found {
        let mut found = Found { left: damaged.to_vec(), ..Found::default() };
        for to in self.others_out_of_sync() {
            // A target that has left and does not answer will announce itself when it is back.
            if let Err(e) = self.search_in(to, chunk, version, &mut found).await
                && !(e.code == Code::Disconnected && self.formers.is_gone(to))
            {
                found.unasked = Some(e);
            }
        }
        let offline = self.offline_members(chunk);
        for to in &offline {
            if found.left.is_empty() {
                break;
            }
            let search = self.search_in(*to, chunk, version, &mut found);
            if !matches!(tokio::time::timeout(OFFLINE_PATIENCE, search).await, Ok(Ok(()))) {
                self.offline.is_silent(Instant::now());
            }
        }
        if !offline.is_empty() && !found.left.is_empty() {
            self.offline.could_not_help(chunk, Instant::now());
        }
        found.parts.sort_by_key(|p| p.at.start);
        found.left = joined(found.left);
        found
    }

    /// Asks a target for the ranges that are left. An error means that it did not answer and may
    /// have more. If this is dropped, what was found so far stays in `found`.
    async fn search_in(
        &self,
        to: TargetId,
        chunk: ChunkId,
        version: Version,
        found: &mut Found,
    ) -> Result<()> {
        for part in found.left.clone() {
            let (mut good, mut bad) = (Vec::new(), Vec::new());
            match self.search_part(to, chunk, version, part.clone(), &mut good, &mut bad).await {
                Ok(()) => {
                    found.left.retain(|p| *p != part);
                    found.left.append(&mut bad);
                    found.parts.append(&mut good);
                }
                Err(e) => {
                    tracing::debug!(
                        "chunk {chunk} of chain {}: target {to} has no good copy: {e}",
                        self.replica.chain
                    );
                    if e.is_retryable() {
                        return Err(e);
                    }
                }
            }
        }
        Ok(())
    }

    /// Asks a target for a part. `left` gets what it does not have. After an error nothing is
    /// known.
    async fn search_part(
        &self,
        to: TargetId,
        chunk: ChunkId,
        version: Version,
        part: Range<u32>,
        parts: &mut Vec<Part>,
        left: &mut Vec<Range<u32>>,
    ) -> Result<()> {
        let sums = self.replica.engine().sums(&self.replica.key(chunk), part.clone())?;
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for start in (part.start..part.end).step_by(PIECE as usize) {
            let piece = start..part.end.min(start + PIECE);
            let of_piece = &sums[((start - part.start) / BLOCK) as usize..];
            match self
                .replica
                .links
                .copy_of(to, self.replica.view().epoch, chunk, piece.clone())
                .await
            {
                Ok(copy) => judge(to, &copy, version, piece, of_piece, &mut good, &mut bad),
                // Some of it is damaged there, too: ask block by block.
                Err(e) if e.code == Code::Corrupt && piece.end - piece.start > BLOCK => {
                    for (i, at) in (piece.start..piece.end).step_by(BLOCK as usize).enumerate() {
                        let block = at..piece.end.min(at + BLOCK);
                        match self
                            .replica
                            .links
                            .copy_of(to, self.replica.view().epoch, chunk, block.clone())
                            .await
                        {
                            Ok(copy) => judge(
                                to,
                                &copy,
                                version,
                                block,
                                &of_piece[i..],
                                &mut good,
                                &mut bad,
                            ),
                            Err(e) if e.is_retryable() => return Err(e),
                            Err(_) => bad.push(block),
                        }
                    }
                }
                Err(e) if e.is_retryable() => return Err(e),
                Err(_) => bad.push(piece),
            }
        }
        parts.append(&mut good);
        left.append(&mut bad);
        Ok(())
    }
}

/// Sorts the blocks of a part read from another copy into `good` (the lost blocks) and `bad`.
/// `sums` are the checksums that the blocks must have.
fn judge(
    from: TargetId,
    (reply, data): &(DataReply, Vec<Buf>),
    version: Version,
    part: Range<u32>,
    sums: &[Option<u32>],
    good: &mut Vec<Part>,
    bad: &mut Vec<Range<u32>>,
) {
    let mut bytes: Vec<u8> = data.iter().flat_map(|b| b.iter().copied()).collect();
    let whole = bytes.len() == (part.end - part.start) as usize;
    bytes.resize((part.end - part.start).next_multiple_of(BLOCK) as usize, 0);
    for ((at, sum), block) in
        (part.start..part.end).step_by(BLOCK as usize).zip(sums).zip(bytes.chunks(BLOCK as usize))
    {
        let at = at..part.end.min(at + BLOCK);
        let row = match sum {
            Some(sum) if crc32c(block) == *sum => Rows::Same,
            None if whole && reply.version == version => Rows::Version,
            _ => {
                Rows::Other.taken();
                bad.push(at);
                continue;
            }
        };
        row.taken();
        let data = vec![Buf::copy_from(&block[..(at.end - at.start) as usize])];
        let sums = block_sums(u64::from(at.start), data.iter().map(|b| &b[..]));
        good.push(Part { at, from, data, sums });
    }
}

/// Joins ranges that touch.
fn joined(mut parts: Vec<Range<u32>>) -> Vec<Range<u32>> {
    parts.sort_by_key(|p| p.start);
    let mut out: Vec<Range<u32>> = Vec::new();
    for p in parts {
        match out.last_mut() {
            Some(last) if last.end >= p.start => last.end = last.end.max(p.end),
            _ => out.push(p),
        }
    }
    out
}

/// The bytes that stand in for damaged blocks in a resync. If a block's checksum is known, its
/// stand-in is a word followed by zeros whose checksum is the complement of it. Otherwise it is all
/// zeros.
pub(super) fn stand_in(part: &Range<u32>, sums: &[Option<u32>]) -> Vec<u8> {
    let mut bytes = vec![0; (part.end - part.start) as usize];
    for (block, sum) in bytes.chunks_mut(BLOCK as usize).zip(sums) {
        if let (Some(sum), Some(word)) = (sum, block.first_chunk_mut::<4>()) {
            *word = checksum::block_with_sum(!sum);
        }
    }
    bytes
}

/// The checksum of the lost block, from the block that stands in for it; `None` if not known.
pub(super) fn stands_for(block: &[u8]) -> Option<u32> {
    let mut whole = [0; BLOCK as usize];
    whole[..block.len()].copy_from_slice(block);
    (whole != [0; BLOCK as usize]).then(|| !crc32c(&whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()
    }

    fn padded(bytes: &[u8]) -> u32 {
        let mut b = bytes.to_vec();
        b.resize(BLOCK as usize, 0);
        crc32c(&b)
    }

    #[test]
    fn what_stands_for_a_block_says_which() {
        for len in [4, 5, 904, 4096] {
            let sum = padded(&block(7, len));
            let bytes = stand_in(&(8192..8192 + len as u32), &[Some(sum)]);
            assert_eq!((bytes.len(), stands_for(&bytes), padded(&bytes)), (len, Some(sum), !sum));
        }
        assert_eq!(stands_for(&stand_in(&(0..4096), &[None])), None);
        // Too short for the word.
        assert_eq!(stands_for(&stand_in(&(4096..4099), &[Some(5)])), None);
        let two = stand_in(&(0..8192), &[Some(1), Some(2)]);
        assert_eq!((stands_for(&two[..4096]), stands_for(&two[4096..])), (Some(1), Some(2)));
    }

    #[test]
    fn an_older_copy_gives_what_is_unchanged_and_nothing_else() {
        let v = |number| Version { epoch: 1, number };
        let (a, b, c) = (block(1, 4096), block(2, 4096), block(3, 904));
        let copy = |version| {
            let data = vec![Buf::copy_from(&[&a[..], &b[..], &c[..]].concat())];
            (DataReply { version, ..DataReply::default() }, data)
        };
        let part = 4096..4096 + 2 * 4096 + 904;
        let sums = [Some(crc32c(&a)), Some(crc32c(&block(9, 4096))), Some(padded(&c))];
        let starts = |parts: Vec<Range<u32>>| parts.iter().map(|p| p.start).collect::<Vec<_>>();
        let of = |copy: &(DataReply, Vec<Buf>), sums: &[Option<u32>]| {
            let (mut good, mut bad) = (Vec::new(), Vec::new());
            judge(5, copy, v(8), part.clone(), sums, &mut good, &mut bad);
            (starts(good.iter().map(|p| p.at.clone()).collect()), starts(bad))
        };
        assert_eq!(of(&copy(v(3)), &sums), (vec![4096, 12_288], vec![8192]));
        // Without a checksum only the same version will do, and only if all of it is there.
        assert_eq!(of(&copy(v(3)), &[None, None, None]).0, []);
        assert_eq!(of(&copy(v(8)), &[None, None, None]).1, []);
        let short = (DataReply { version: v(8), ..DataReply::default() }, vec![Buf::copy_from(&a)]);
        assert_eq!(of(&short, &[None, None, None]).0, []);
        assert_eq!(of(&short, &sums).0, [4096]);
    }

    #[test]
    fn offline_members_are_left_alone_for_a_while() {
        let (offline, t) = (OfflineMembers::default(), Instant::now());
        let chunk = |index| ChunkId { ino: 7, data: 7, index };
        let (a, b) = (chunk(0), chunk(1));
        assert!(offline.may_be_asked(a, t));
        offline.could_not_help(a, t);
        assert!(
            !offline.may_be_asked(a, t)
                && offline.may_be_asked(b, t)
                && offline.may_be_asked(a, t + OFFLINE_AGAIN)
        );
        offline.could_not_help(b, t + OFFLINE_AGAIN);
        assert_eq!(offline.0.lock().in_vain.len(), 1);
        offline.is_silent(t + OFFLINE_AGAIN);
        assert!(
            !offline.may_be_asked(a, t + OFFLINE_AGAIN)
                && offline.may_be_asked(a, t + 2 * OFFLINE_AGAIN)
        );
    }

    #[test]
    fn one_that_has_left_is_remembered_for_a_while() {
        let (f, t) = (FormerMembers::default(), Instant::now());
        assert!(f.heard(3, t) && !f.heard(3, t + ANNOUNCE) && f.heard(4, t));
        assert_eq!(f.now(t + REMEMBERED), [3]);
        assert!(f.heard(4, t + REMEMBERED));
    }
}
