//! Which written bytes are not yet known to be stable, and what to send again when a replica has
//! restarted: pure bookkeeping.
//!
//! A write that is answered *unstable* is kept with the boot ids ([`BootId`]) of the replicas that
//! have it. The answer to a flush of its chain has the boot ids of replicas that flushed
//! (`flush.rs` uses only the head's). If one of them matches, the bytes were there and are now on
//! disk, and the chain's other members agree with it. If none matches, the bytes may be lost and
//! are sent again.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use strake_proto::{
    ChainId, ChunkId, Ino,
    data::{BootId, Version},
};

use crate::{
    data::buffers::{self, Content},
    handover::{KeptWrite, WriteKind, WriteRecord},
};

/// One unstable write: a part of one chunk. `T` is what the caller needs to send it again (the
/// inode, its share of the memory limit).
pub(crate) struct Entry<T> {
    pub chunk: ChunkId,
    /// From the start of the chunk.
    pub offset: u32,
    pub file_offset: u64,
    pub data: Content,
    pub session: u64,
    pub seq: u64,
    pub version: Version,
    pub boot_ids: Vec<BootId>,
    /// Milliseconds on the caller's clock.
    pub at_ms: u64,
    pub tag: Arc<T>,
    /// The record that outlives the process; it lives as long as the entry.
    pub kept: Option<Box<dyn WriteRecord>>,
}

impl<T> Entry<T> {
    /// The record of the entry for the next process.
    pub fn kept_as(&self, chain: ChainId) -> KeptWrite {
        let e = self;
        KeptWrite {
            chain,
            chunk: e.chunk,
            offset: e.offset,
            file_offset: e.file_offset,
            session: e.session,
            seq: e.seq,
            version: e.version,
            boot_ids: e.boot_ids.clone(),
            len: e.data.span() as usize,
            kind: if matches!(e.data, Content::Hole(_)) {
                WriteKind::Punch
            } else {
                WriteKind::Unstable
            },
        }
    }
}

impl<T> Entry<T> {
    /// Bytes of memory that it uses.
    fn held(&self) -> u64 {
        buffers::total(self.data.bytes()) as u64
    }
    fn range(&self) -> Range<u64> {
        u64::from(self.offset)..u64::from(self.offset) + self.data.span()
    }
    fn survives(&self, flushed: &[BootId]) -> bool {
        self.boot_ids.iter().any(|s| flushed.contains(s))
    }
}

/// A lost part to send again.
pub(crate) struct Replay<T> {
    /// Position of the entry that it comes from; it keeps this position.
    pub order: u64,
    pub chunk: ChunkId,
    pub offset: u32,
    pub file_offset: u64,
    pub data: Content,
    /// The number of the first attempt if the entry is whole; a part needs its own number.
    pub seq: Option<u64>,
    pub session: u64,
    pub version: Version,
    pub tag: Arc<T>,
}

/// Position in the order of answers, and a number that distinguishes the parts of one entry.
type Key = (u64, u64);

/// The unstable writes of one client, by chain, in the order they were answered.
pub(crate) struct Unstable<T> {
    chains: BTreeMap<ChainId, BTreeMap<Key, Entry<T>>>,
    next: u64,
    part: u64,
    bytes: u64,
}

impl<T> Default for Unstable<T> {
    fn default() -> Unstable<T> {
        Unstable { chains: BTreeMap::new(), next: 1, part: 0, bytes: 0 }
    }
}

impl<T> Unstable<T> {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn add(&mut self, chain: ChainId, entry: Entry<T>) {
        let order = self.next;
        self.next += 1;
        self.put(chain, order, entry);
    }

    /// Continues after the writes that an earlier client left.
    pub fn resume_after(&mut self, order: u64) {
        self.next = self.next.max(order.saturating_add(1));
    }

    /// A part that was replayed and is unstable again, at its old position: a flush that a caller
    /// waits for must cover it.
    pub fn add_again(&mut self, chain: ChainId, order: u64, entry: Entry<T>) {
        self.put(chain, order, entry);
    }

    fn put(&mut self, chain: ChainId, order: u64, entry: Entry<T>) {
        self.bytes += entry.held();
        self.part += 1;
        self.chains.entry(chain).or_default().insert((order, self.part), entry);
    }

    /// Take the mark before a flush is sent: the flush covers what was answered before.
    pub fn mark(&self) -> u64 {
        self.next
    }

    /// Whether the chain has entries from before `mark` (of one inode, or of any).
    pub fn pending(&self, chain: ChainId, mark: u64, ino: Option<Ino>) -> bool {
        self.chains.get(&chain).is_some_and(|c| {
            c.range(..(mark, 0)).any(|(_, e)| ino.is_none_or(|i| e.chunk.ino == i))
        })
    }

    /// Chains with unstable bytes of an inode.
    pub fn chains_of(&self, ino: Ino) -> Vec<ChainId> {
        self.chains
            .iter()
            .filter(|(_, c)| c.values().any(|e| e.chunk.ino == ino))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Any write of the chain: its chunk names a file whose capability permits the flush.
    pub fn sample(&self, chain: ChainId) -> Option<&Entry<T>> {
        self.chains.get(&chain)?.values().next()
    }

    /// Chains whose oldest write is from `before_ms` or earlier, and those with more than `bytes`
    /// or with more than `per_chunk` writes to one chunk.
    pub fn due(&self, before_ms: u64, bytes: u64, per_chunk: usize) -> Vec<ChainId> {
        let is_due = |c: &BTreeMap<Key, Entry<T>>| {
            let mut counts: BTreeMap<ChunkId, usize> = BTreeMap::new();
            c.values().next().is_some_and(|e| e.at_ms <= before_ms)
                || c.values().map(Entry::held).sum::<u64>() > bytes
                || c.values().any(|e| {
                    let n = counts.entry(e.chunk).or_default();
                    *n += 1;
                    *n > per_chunk
                })
        };
        self.chains.iter().filter(|(_, c)| is_due(c)).map(|(id, _)| *id).collect()
    }

    /// A flush was answered with these boot ids: drops what is stable now. Returns, by inode, the
    /// tags of writes that may be lost. Nothing of such an inode is dropped yet: a later write that
    /// survived says what must not be replayed.
    pub fn flushed(
        &mut self,
        chain: ChainId,
        mark: u64,
        boot_ids: &[BootId],
    ) -> BTreeMap<Ino, Arc<T>> {
        let Some(c) = self.chains.get(&chain) else { return BTreeMap::new() };
        let lost: BTreeMap<Ino, Arc<T>> = c
            .range(..(mark, 0))
            .filter(|(_, e)| !e.survives(boot_ids))
            .map(|(_, e)| (e.chunk.ino, e.tag.clone()))
            .collect();
        self.retain(chain, |order, e| order >= mark || lost.contains_key(&e.chunk.ino));
        lost
    }

    /// The lost bytes of one inode on one chain, without those that a later write covers: disjoint,
    /// so that they can be sent in any order. Bytes that survived are not replayed, since they may
    /// be newer. Neither are writes that were answered after the flush was sent: its answer says
    /// nothing about them, because the replica may have restarted since.
    pub fn plan(&self, chain: ChainId, ino: Ino, mark: u64, boot_ids: &[BootId]) -> Vec<Replay<T>> {
        let mut covered: BTreeMap<ChunkId, Vec<Range<u64>>> = BTreeMap::new();
        let mut out = Vec::new();
        let Some(c) = self.chains.get(&chain) else { return out };
        for ((order, _), e) in c.iter().rev().filter(|(_, e)| e.chunk.ino == ino) {
            let above = covered.entry(e.chunk).or_default();
            if *order < mark && !e.survives(boot_ids) {
                for r in subtract(e.range(), above) {
                    let skip = (r.start - u64::from(e.offset)) as usize;
                    out.push(Replay {
                        order: *order,
                        chunk: e.chunk,
                        offset: r.start as u32,
                        file_offset: e.file_offset + skip as u64,
                        data: e.data.cut(skip, (r.end - r.start) as usize),
                        seq: (r == e.range()).then_some(e.seq),
                        session: e.session,
                        version: e.version,
                        tag: e.tag.clone(),
                    });
                }
            }
            above.push(e.range());
        }
        out
    }

    /// Whether lost bytes of an inode on a chain exist nowhere any more: an earlier client had them
    /// outside of kept memory.
    pub fn is_bereft(&self, chain: ChainId, ino: Ino, mark: u64, boot_ids: &[BootId]) -> bool {
        let lost = |e: &Entry<T>| e.chunk.ino == ino && e.data.span() == 0 && !e.survives(boot_ids);
        self.chains.get(&chain).is_some_and(|c| c.range(..(mark, 0)).any(|(_, e)| lost(e)))
    }

    /// The plan for an inode on a chain was carried out: forgets what was stable at `mark`, and
    /// what was lost (parts that are still unstable were added again). Writes that were answered
    /// later stay, stable or not: older remaining bytes must not be replayed over them.
    pub fn replayed(&mut self, chain: ChainId, ino: Ino, mark: u64) {
        self.retain(chain, |order, e| e.chunk.ino != ino || order >= mark);
    }

    /// Whether unstable bytes of a chunk overlap these. Then a stable write is kept too, so that
    /// they are not replayed over it.
    pub fn overlaps(&self, chain: ChainId, chunk: ChunkId, offset: u32, len: u64) -> bool {
        let r = u64::from(offset)..u64::from(offset) + len;
        self.chains.get(&chain).is_some_and(|c| {
            c.values()
                .any(|e| e.chunk == chunk && e.range().start < r.end && r.start < e.range().end)
        })
    }

    /// Forgets everything of an inode on all chains.
    pub fn forget_inode(&mut self, ino: Ino) {
        for chain in self.chains.keys().copied().collect::<Vec<_>>() {
            self.retain(chain, |_, e| e.chunk.ino != ino);
        }
    }

    /// Indexes of the chunks of an inode on a chain that have unstable bytes.
    pub fn chunks_of(&self, chain: ChainId, ino: Ino) -> BTreeSet<u64> {
        let all = self.chains.get(&chain).into_iter().flat_map(BTreeMap::values);
        all.filter(|e| e.chunk.ino == ino).map(|e| e.chunk.index).collect()
    }

    /// Forgets the writes of a lost session; returns the inodes that they belong to.
    pub fn forget_session(&mut self, session: u64) -> BTreeMap<Ino, Arc<T>> {
        let mut owners = BTreeMap::new();
        for chain in self.chains.keys().copied().collect::<Vec<_>>() {
            self.retain(chain, |_, e| {
                if e.session == session {
                    owners.insert(e.chunk.ino, e.tag.clone());
                }
                e.session != session
            });
        }
        owners
    }

    /// The file was truncated to `size`: nothing beyond it may ever be replayed.
    pub fn clip(&mut self, ino: Ino, size: u64) {
        let mut freed = 0;
        for c in self.chains.values_mut() {
            c.retain(|_, e| {
                if e.chunk.ino != ino || e.file_offset + e.data.span() <= size {
                    return true;
                }
                freed += e.held();
                if e.file_offset >= size {
                    return false;
                }
                e.data = e.data.cut(0, (size - e.file_offset) as usize);
                if let Some(k) = &e.kept {
                    k.cut(e.data.span());
                }
                freed -= e.held();
                true
            });
        }
        self.chains.retain(|_, c| !c.is_empty());
        self.bytes -= freed;
    }

    fn retain(&mut self, chain: ChainId, mut keep: impl FnMut(u64, &Entry<T>) -> bool) {
        let Some(c) = self.chains.get_mut(&chain) else { return };
        let mut freed = 0;
        c.retain(|(order, _), e| {
            let k = keep(*order, e);
            if !k {
                freed += e.held();
            }
            k
        });
        self.bytes -= freed;
        if c.is_empty() {
            self.chains.remove(&chain);
        }
    }
}

/// The parts of `r` outside of all `holes`.
pub(crate) fn subtract(r: Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts = vec![r];
    for h in holes {
        parts = parts
            .into_iter()
            .flat_map(|p| [p.start..p.end.min(h.start), p.start.max(h.end)..p.end])
            .filter(|p| p.start < p.end)
            .collect();
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use strake_fabric::Buf;

    use super::*;

    const CHUNK: ChunkId = ChunkId { ino: 1, data: 1, index: 0 };

    fn entry(offset: u32, byte: u8, len: usize, boot_ids: &[(u32, u64)]) -> Entry<()> {
        Entry {
            chunk: CHUNK,
            offset,
            file_offset: u64::from(offset),
            data: if byte == 0 {
                Content::Hole(len as u32)
            } else {
                Content::Bytes(vec![Buf::copy_from(&vec![byte; len])])
            },
            session: 1,
            seq: u64::from(byte),
            version: Version::default(),
            boot_ids: boot_ids
                .iter()
                .map(|(target, number)| BootId { target: *target, number: *number })
                .collect(),
            at_ms: 0,
            tag: Arc::new(()),
            kept: None,
        }
    }

    fn boot_ids(s: &[(u32, u64)]) -> Vec<BootId> {
        s.iter().map(|(target, number)| BootId { target: *target, number: *number }).collect()
    }

    #[test]
    fn one_unchanged_replica_is_enough_and_none_means_lost() {
        let mut u = Unstable::default();
        u.add(7, entry(0, 1, 10, &[(1, 100), (2, 200)]));
        let mark = u.mark();
        u.add(7, entry(0, 2, 10, &[(1, 100), (2, 200)]));
        assert!(u.flushed(7, mark, &boot_ids(&[(2, 200), (3, 300)])).is_empty());
        assert_eq!(u.bytes(), 10, "what came after the mark is not covered");
        let mark = u.mark();
        assert!(u.flushed(7, mark, &boot_ids(&[(1, 101), (2, 201)])).contains_key(&1));
        assert!(u.pending(7, mark, Some(1)) && !u.pending(7, mark, Some(2)));
        let plan = u.plan(7, 1, mark, &boot_ids(&[(1, 101)]));
        assert_eq!((plan.len(), plan[0].seq), (1, Some(2)));
        u.replayed(7, 1, mark);
        assert_eq!((u.bytes(), u.pending(7, u64::MAX, None)), (0, false));
    }

    /// A flush is answered by the second boot of the replica, which has lost the first bytes and
    /// has the second ones. Before the replay the replica restarts once more, and its third boot
    /// receives bytes over the second ones. The second ones must not be replayed over those later.
    #[test]
    fn what_was_written_since_a_flush_was_sent_is_left_to_the_next_one() {
        let mut u = Unstable::default();
        u.add(7, entry(0, 1, 10, &[(1, 1)]));
        let mark = u.mark();
        u.add(7, entry(20, 2, 10, &[(1, 2)]));
        assert!(u.flushed(7, mark, &boot_ids(&[(1, 2)])).contains_key(&1));
        u.add(7, entry(25, 3, 10, &[(1, 3)]));
        let planned = |u: &Unstable<()>, mark, boot_ids: &[BootId]| -> Vec<(u32, u64)> {
            u.plan(7, 1, mark, boot_ids).iter().map(|p| (p.offset, p.data.span())).collect()
        };
        assert_eq!(planned(&u, mark, &boot_ids(&[(1, 2)])), [(0, 10)]);
        u.replayed(7, 1, mark);
        let mark = u.mark();
        assert!(u.flushed(7, mark, &boot_ids(&[(1, 3)])).contains_key(&1));
        assert_eq!(
            planned(&u, mark, &boot_ids(&[(1, 3)])),
            [(20, 5)],
            "without what was written over it"
        );
    }

    #[test]
    fn a_cut_file_is_never_replayed_beyond_its_end() {
        let mut u = Unstable::default();
        u.add(7, entry(0, 1, 10, &[(1, 1)]));
        u.add(8, entry(10, 2, 10, &[(1, 1)]));
        u.clip(1, 4);
        assert_eq!(u.bytes(), 4);
        assert_eq!(u.chains_of(1), vec![7]);
        assert_eq!(u.plan(7, 1, u.mark(), &[])[0].data.span(), 4);
        assert_eq!(u.forget_session(1).len(), 1);
        assert_eq!(u.bytes(), 0);
    }

    #[test]
    fn a_punch_is_kept_like_a_write_but_for_its_bytes() {
        let mut u = Unstable::default();
        u.add(7, entry(0, 1, 10, &[(1, 1)]));
        u.add(7, entry(4, 0, 10, &[(1, 1)]));
        assert_eq!(
            (u.bytes(), u.chunks_of(7, 1), u.chunks_of(7, 2)),
            (10, BTreeSet::from([0]), BTreeSet::new())
        );
        assert!(u.overlaps(7, CHUNK, 13, 1) && !u.overlaps(7, CHUNK, 14, 1));
        u.clip(1, 8);
        let plan = u.plan(7, 1, u.mark(), &[]);
        assert!(matches!(plan[0].data, Content::Hole(4)));
        assert!(
            matches!(&plan[1].data, Content::Bytes(b) if b[0].len() == 4),
            "what was punched is not written again"
        );
        assert!(!u.is_bereft(7, 1, u.mark(), &[]));
        u.forget_inode(1);
        assert_eq!((u.bytes(), u.chains_of(1)), (0, vec![]));
    }

    #[test]
    fn what_is_due_is_old_big_or_crowded() {
        let mut u = Unstable::default();
        for i in 0..3 {
            u.add(7, entry(i * 10, 1, 10, &[(1, 1)]));
        }
        assert_eq!(u.due(0, u64::MAX, 99), vec![7]);
        u.chains.get_mut(&7).unwrap().values_mut().for_each(|e| e.at_ms = 5);
        assert!(u.due(4, 30, 3).is_empty());
        assert_eq!(u.due(4, 29, 3), vec![7]);
        assert_eq!(u.due(4, 30, 2), vec![7]);
    }

    /// One chunk of a server that forgets unflushed writes when it restarts.
    struct Server {
        life: u64,
        bytes: Vec<u8>,
        seqs: BTreeSet<u64>,
        durable: (Vec<u8>, BTreeSet<u64>),
    }

    impl Default for Server {
        fn default() -> Server {
            let bytes = vec![0; 72];
            Server {
                life: 1,
                bytes: bytes.clone(),
                seqs: BTreeSet::new(),
                durable: (bytes, BTreeSet::new()),
            }
        }
    }

    impl Server {
        fn boot_id(&self) -> BootId {
            BootId { target: 1, number: self.life }
        }
        fn flush(&mut self) {
            self.durable = (self.bytes.clone(), self.seqs.clone());
        }
        fn restart(&mut self) {
            self.life += 1;
            (self.bytes, self.seqs) = self.durable.clone();
        }
        /// Returns whether the update is stable: a known number is flushed.
        fn update(&mut self, seq: u64, offset: u32, data: &Content) -> bool {
            let known = !self.seqs.insert(seq);
            if known {
                self.flush();
            } else {
                let bytes: Vec<u8> = data.bytes().iter().flat_map(|b| b.to_vec()).collect();
                self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
            }
            known
        }
        /// Replays as `flush.rs` does, with numbers from `seq` on for parts.
        fn replay(&mut self, u: &mut Unstable<()>, mark: u64, boot_id: BootId, mut seq: u64) {
            let mut again = Vec::new();
            for p in u.plan(3, 1, mark, &[boot_id]) {
                seq += 1;
                let number = p.seq.unwrap_or(seq);
                if !self.update(number, p.offset, &p.data) {
                    let e = entry(p.offset, 1, 0, &[]);
                    again.push((
                        p.order,
                        Entry { data: p.data, seq: number, boot_ids: vec![self.boot_id()], ..e },
                    ));
                }
            }
            u.replayed(3, 1, mark);
            again.into_iter().for_each(|(order, e)| u.add_again(3, order, e));
        }
    }

    proptest! {
        /// Writes and punches on a server that loses some suffix of its first boot's writes; then
        /// its second boot receives more. After the replay the chunk has the content that it would
        /// have without the loss.
        #[test]
        fn a_replay_restores_the_last_writer_of_every_byte(
            first in prop::collection::vec((0u32..64, 1usize..32, prop::bool::weighted(0.3)), 0..12),
            second in prop::collection::vec((0u32..64, 1usize..32, prop::bool::weighted(0.3)), 0..6),
            kept in 0usize..12,
        ) {
            let mut u = Unstable::default();
            let (mut want, mut have) = (vec![0u8; 128], vec![0u8; 128]);
            let put = |m: &mut Vec<u8>, o: u32, b: u8, n: usize| m[o as usize..o as usize + n].fill(b);
            for (i, (o, n, punch)) in first.iter().enumerate() {
                let byte = if *punch { 0 } else { i as u8 + 1 };
                put(&mut want, *o, byte, *n);
                if i < kept {
                    put(&mut have, *o, byte, *n);
                }
                u.add(3, entry(*o, byte, *n, &[(1, 1)]));
            }
            for (i, (o, n, punch)) in second.iter().enumerate() {
                let byte = if *punch { 0 } else { i as u8 + 101 };
                put(&mut want, *o, byte, *n);
                put(&mut have, *o, byte, *n);
                u.add(3, entry(*o, byte, *n, &[(1, 2)]));
            }
            let all: usize = first.iter().chain(&second).filter(|(.., punch)| !punch).map(|(_, n, _)| n).sum();
            prop_assert_eq!(u.bytes(), all as u64);
            let now = boot_ids(&[(1, 2)]);
            let mark = u.mark();
            u.flushed(3, mark, &now);
            for p in u.plan(3, 1, mark, &now) {
                let bytes = match &p.data {
                    Content::Bytes(b) => b.iter().flat_map(|b| b.to_vec()).collect(),
                    Content::Hole(n) => vec![0; *n as usize],
                };
                have[p.offset as usize..p.offset as usize + bytes.len()].copy_from_slice(&bytes);
            }
            prop_assert_eq!(have, want);
            u.replayed(3, 1, mark);
            prop_assert_eq!(u.bytes(), 0);
            prop_assert!(!u.pending(3, u64::MAX, None));
        }

        /// A server that restarts at any time, between a flush, its answer and the following
        /// replay, while writes continue.
        #[test]
        fn whatever_restarts_when_the_last_writer_of_every_byte_stays(
            steps in prop::collection::vec((0u8..9, 0u32..48, 1usize..24), 1..60),
        ) {
            let mut s = Server::default();
            let (mut u, mut want) = (Unstable::default(), vec![0u8; 72]);
            let (mut asked, mut lost): (Option<u64>, Option<(u64, BootId)>) = (None, None);
            for (i, (what, at, n)) in steps.iter().enumerate() {
                let byte = i as u8 + 1;
                match what {
                    0..=3 => {
                        want[*at as usize..*at as usize + n].fill(byte);
                        let mut e = entry(*at, byte, *n, &[]);
                        s.update(e.seq, e.offset, &e.data);
                        e.boot_ids = vec![s.boot_id()];
                        u.add(3, e);
                    }
                    4 => s.restart(),
                    5 if lost.is_none() => asked = asked.or(Some(u.mark())),
                    6 => {
                        if let Some(mark) = asked.take() {
                            s.flush();
                            lost = (!u.flushed(3, mark, &[s.boot_id()]).is_empty()).then_some((mark, s.boot_id()));
                        }
                    }
                    7 => {
                        if let Some((mark, boot_id)) = lost.take() {
                            s.replay(&mut u, mark, boot_id, 1000 * (i as u64 + 1));
                        }
                    }
                    _ => {}
                }
            }
            if let Some((mark, boot_id)) = lost {
                s.replay(&mut u, mark, boot_id, 1_000_000);
            }
            while u.pending(3, u64::MAX, None) {
                let mark = u.mark();
                s.flush();
                if !u.flushed(3, mark, &[s.boot_id()]).is_empty() {
                    s.replay(&mut u, mark, s.boot_id(), 2_000_000);
                }
            }
            s.restart();
            prop_assert_eq!(s.bytes, want);
            prop_assert_eq!(u.bytes(), 0);
        }
    }
}
