//! Fixed-layout bodies of data-plane frames. Little-endian; specified in `docs/formats.md`.
//!
//! A request body is a 96-byte [`DataRequest`] head, then (as flagged in it) a 64-byte capability,
//! a round, a time, block checksums, recent-writer records, memory regions and damaged parts. A
//! reply body is a 40-byte [`DataReply`] head, then block checksums and boot ids of replicas.

use std::{ops::Range, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};

use crate::{
    ChainId, ChunkId, Code, Error, Result, SessionId, TargetId, cap::CAP_LEN, frame::Region,
    layout::MAX_CHUNK,
};

/// Bytes of a request before its lists.
pub const REQUEST_HEAD: usize = 96;
/// Bytes of a reply before its lists.
pub const REPLY_HEAD: usize = 40;
const VERSION: u16 = 1;
/// Blocks of a 16 MiB chunk, plus one for an unaligned start.
pub const MAX_SUMS: usize = 4097;
/// Most changes that a chunk's record has.
pub const MAX_WRITERS: usize = 64;
/// Changes that a chunk's record remembers, so that a repeated change is recognized and a replay
/// sees which sessions wrote since. A client flushes a chunk before half as many of its own changes
/// are unstable.
pub const KEPT_WRITERS: usize = MAX_WRITERS;
/// Most parts of memory that one request offers.
pub const MAX_REGIONS: usize = 256;
/// Most replicas that one reply names.
pub const MAX_BOOT_IDS: usize = 16;
/// Parts of a 16 MiB chunk, each at least one block long and one block apart.
pub const MAX_DAMAGED: usize = 2048;

/// What an update does to its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// No update: reads, flushes, lists.
    None = 0,
    /// Puts `len` bytes at `offset`, extending the chunk (a gap reads as zeros).
    Write = 1,
    /// Truncates the chunk to `offset` bytes if it is longer.
    Truncate = 2,
    /// Removes the chunk; its version stays as a tombstone.
    Remove = 3,
    /// Replaces the whole chunk by `len` bytes and takes `version` as given (resync). Absent if
    /// version is a tombstone's.
    Replace = 4,
    /// Makes the `len` bytes at `offset` zeros, without a payload, as far as the chunk extends. A
    /// missing chunk gets a tombstone of this version.
    Punch = 5,
}

impl Kind {
    fn of(number: u8) -> Result<Kind> {
        Ok(match number {
            0 => Kind::None,
            1 => Kind::Write,
            2 => Kind::Truncate,
            3 => Kind::Remove,
            4 => Kind::Replace,
            5 => Kind::Punch,
            k => return Err(bad(&format!("unknown update kind {k}"))),
        })
    }
}

/// Version number of a chunk's last change. Ordered by epoch of the chain first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Chain epoch in which it was assigned.
    pub epoch: u64,
    /// Counts the changes of this chunk, 1 for the first.
    pub number: u64,
}

/// A change already applied to a chunk, kept so that a retry is answered and not applied twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Writer {
    /// Who made the change.
    pub session: SessionId,
    /// Its number in that session.
    pub seq: u64,
    /// The version that it gave the chunk.
    pub version: Version,
}

impl Writer {
    fn read(r: &mut Reader<'_>) -> Result<Writer> {
        Ok(Writer {
            session: r.u64()?,
            seq: r.u64()?,
            version: Version { epoch: r.u64()?, number: r.u64()? },
        })
    }
}

/// A capability follows. Set by the encoder.
pub const FLAG_CAP: u8 = 1;
/// Answer only when the update is flushed on every in-sync replica.
pub const FLAG_STABLE: u8 = 2;
/// A repetition of an unstable write after a replica restarted; `version` is the one that the first
/// attempt was given.
pub const FLAG_REPLAY: u8 = 4;
/// SYNC_PUT: the chunk was removed. TRIM of all chunks, FORWARD_FLUSH: no client writes to this
/// data any more, so its tombstones may be forgotten.
pub const FLAG_TOMBSTONE: u8 = 8;
/// A write of dirty data that was held back: it may use space that the target granted to its
/// session.
pub const FLAG_GRANTED: u8 = 16;
/// A round follows. Set by the encoder.
pub const FLAG_ROUND: u8 = 32;
/// A time follows. Set by the encoder.
pub const FLAG_HEARD: u8 = 64;
/// The flags that the encoder sets.
const FOLLOWS: u8 = FLAG_CAP | FLAG_ROUND | FLAG_HEARD;
/// A request with any other flag is refused, because what the flag asks for would be ignored.
const FLAGS: u8 = FLAG_STABLE | FLAG_REPLAY | FLAG_TOMBSTONE | FLAG_GRANTED | FOLLOWS;

/// How long a target keeps granted space free, counted from its answer. A session counts from its
/// request, and uses 0.9 of the time.
pub const GRANT_TERM: Duration = Duration::from_secs(10);
/// Unit of grants in bytes: the least that an update takes of a target.
pub const GRANT_UNIT: u64 = 4096;
/// Maximum number of units that one session has of one target: 64 MiB.
pub const MAX_GRANT: u64 = (64 << 20) / GRANT_UNIT;

/// The body of a data-plane request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataRequest {
    /// What it does to its chunk.
    pub kind: Kind,
    /// [`FLAG_STABLE`] | [`FLAG_REPLAY`] | [`FLAG_TOMBSTONE`] | [`FLAG_GRANTED`]; the others are
    /// set by the encoder.
    pub flags: u8,
    /// The chain that the chunk is on.
    pub chain: ChainId,
    /// The chain's epoch as the sender knows it; a replica with another epoch answers `StaleEpoch`.
    pub epoch: u64,
    /// The chunk. TRIM: the first one to be removed.
    pub chunk: ChunkId,
    /// The target addressed on the receiving oss.
    pub target: TargetId,
    /// Bytes from the start of the chunk. TRIM: milliseconds to work, 0 = until done. GRANT: how
    /// many of the session's units it needs in any case.
    pub offset: u32,
    /// Bytes read or written. TRIM: bytes kept of chunk `index - 1`, `u32::MAX` = leave it. Lists:
    /// entries wanted. EXTENTS: extents wanted, 0 = only their sum. GRANT: units wanted.
    pub len: u32,
    /// The session that sends it.
    pub session: SessionId,
    /// Counts the session's requests.
    pub seq: u64,
    /// The version that the update gets or has; the chain's head gives it.
    pub version: Version,
    /// The sender's right to the file, see [`Capability`](crate::Capability).
    pub cap: Option<[u8; CAP_LEN]>,
    /// WRITE, FLUSH: how many updates the session had given up without knowing their result when
    /// this was sent. A head that has seen a newer round refuses updates of older ones: they may be
    /// such abandoned updates, and must not overwrite what was written since. 0, which is not sent:
    /// none, or not given.
    pub round: u64,
    /// WRITE: the value of the receiver's [`Clock`] when the sender last asked for it. The receiver
    /// refuses an update whose time is too long ago. 0, which is not sent: the sender did not ask.
    pub heard: u64,
    /// One CRC32C per 4 KiB block touched, see [`crate::checksum`].
    pub sums: Vec<u32>,
    /// SYNC_PUT: the changes that the chunk's record remembers.
    pub writers: Vec<Writer>,
    /// The sender's memory for the payload.
    pub regions: Vec<Region>,
    /// SYNC_PUT: ranges of the chunk, in order, that have no good copy. Whole blocks, except at the
    /// chunk's end. The payload has zeros there.
    pub damaged: Vec<Range<u32>>,
}

impl DataRequest {
    /// A request with only an address; fill in the rest with struct update syntax.
    pub fn new(chain: ChainId, epoch: u64, target: TargetId, chunk: ChunkId) -> DataRequest {
        DataRequest {
            kind: Kind::None,
            flags: 0,
            chain,
            epoch,
            chunk,
            target,
            offset: 0,
            len: 0,
            session: 0,
            seq: 0,
            version: Version::default(),
            cap: None,
            round: 0,
            heard: 0,
            sums: Vec::new(),
            writers: Vec::new(),
            regions: Vec::new(),
            damaged: Vec::new(),
        }
    }

    /// Encodes it as a frame's body.
    pub fn encode(&self) -> Bytes {
        let cap = if self.cap.is_some() { CAP_LEN } else { 0 };
        let round = if self.round != 0 { 8 } else { 0 };
        let heard = if self.heard != 0 { 8 } else { 0 };
        let lists = self.sums.len() * 4
            + self.writers.len() * 32
            + self.regions.len() * 16
            + self.damaged.len() * 8;
        let mut b = BytesMut::with_capacity(REQUEST_HEAD + cap + round + heard + lists);
        b.put_u16_le(VERSION);
        b.put_u8(self.kind as u8);
        let follow = [(cap, FLAG_CAP), (round, FLAG_ROUND), (heard, FLAG_HEARD)];
        let follow =
            follow.into_iter().filter(|(len, _)| *len > 0).fold(0, |all, (_, flag)| all | flag);
        b.put_u8(self.flags & !FOLLOWS | follow);
        b.put_u32_le(self.chain);
        b.put_u64_le(self.epoch);
        b.put_u64_le(self.chunk.ino);
        b.put_u64_le(self.chunk.data);
        b.put_u64_le(self.chunk.index);
        b.put_u32_le(self.target);
        b.put_u32_le(self.offset);
        b.put_u32_le(self.len);
        b.put_u32_le(self.sums.len() as u32);
        b.put_u64_le(self.session);
        b.put_u64_le(self.seq);
        b.put_u64_le(self.version.epoch);
        b.put_u64_le(self.version.number);
        b.put_u16_le(self.writers.len() as u16);
        b.put_u16_le(self.regions.len() as u16);
        b.put_u32_le(self.damaged.len() as u32);
        if let Some(c) = &self.cap {
            b.put_slice(c);
        }
        if round > 0 {
            b.put_u64_le(self.round);
        }
        if heard > 0 {
            b.put_u64_le(self.heard);
        }
        for s in &self.sums {
            b.put_u32_le(*s);
        }
        for w in &self.writers {
            b.put_u64_le(w.session);
            b.put_u64_le(w.seq);
            b.put_u64_le(w.version.epoch);
            b.put_u64_le(w.version.number);
        }
        for r in &self.regions {
            b.put_u64_le(r.addr);
            b.put_u32_le(r.key);
            b.put_u32_le(r.len);
        }
        for d in &self.damaged {
            b.put_u32_le(d.start);
            b.put_u32_le(d.end);
        }
        b.freeze()
    }

    /// Reads a body. `Protocol` for anything malformed.
    pub fn decode(body: &[u8]) -> Result<DataRequest> {
        let mut r = Reader(body);
        if r.u16()? != VERSION {
            return Err(bad("data request of another version"));
        }
        let kind = Kind::of(r.u8()?)?;
        let flags = r.u8()?;
        if flags & !FLAGS != 0 {
            return Err(bad(&format!("unknown flags {flags:#x} of a data request")));
        }
        let chain = r.u32()?;
        let epoch = r.u64()?;
        let chunk = ChunkId { ino: r.u64()?, data: r.u64()?, index: r.u64()? };
        let (target, offset, len) = (r.u32()?, r.u32()?, r.u32()?);
        let sums = r.u32()? as usize;
        let (session, seq) = (r.u64()?, r.u64()?);
        let version = Version { epoch: r.u64()?, number: r.u64()? };
        let (writers, regions, damaged) = (r.u16()? as usize, r.u16()? as usize, r.u32()? as usize);
        if sums > MAX_SUMS
            || writers > MAX_WRITERS
            || regions > MAX_REGIONS
            || damaged > MAX_DAMAGED
        {
            return Err(bad("data request lists too long"));
        }
        let cap = if flags & FLAG_CAP != 0 { Some(r.take::<CAP_LEN>()?) } else { None };
        let round = if flags & FLAG_ROUND != 0 { r.u64()? } else { 0 };
        if flags & FLAG_ROUND != 0 && round == 0 {
            return Err(bad("a round of 0 is never sent"));
        }
        let heard = if flags & FLAG_HEARD != 0 { r.u64()? } else { 0 };
        if flags & FLAG_HEARD != 0 && heard == 0 {
            return Err(bad("a time of 0 is never sent"));
        }
        let sums = (0..sums).map(|_| r.u32()).collect::<Result<_>>()?;
        let writers = (0..writers).map(|_| Writer::read(&mut r)).collect::<Result<_>>()?;
        let regions = (0..regions)
            .map(|_| Ok(Region { addr: r.u64()?, key: r.u32()?, len: r.u32()? }))
            .collect::<Result<_>>()?;
        let damaged = (0..damaged).map(|_| Ok(r.u32()?..r.u32()?)).collect::<Result<_>>()?;
        r.end()?;
        Ok(DataRequest {
            kind,
            flags: flags & !FOLLOWS,
            chain,
            epoch,
            chunk,
            target,
            offset,
            len,
            session,
            seq,
            version,
            cap,
            round,
            heard,
            sums,
            writers,
            regions,
            damaged,
        })
    }
}

/// [`DataReply::stable`] among the flags of a reply.
pub const REPLY_STABLE: u8 = 1;

/// A replica at the time of its answer. If its number has changed since, the replica restarted or
/// was out of sync, and may have lost unstable bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootId {
    /// The replica's target.
    pub target: TargetId,
    /// Made from the random number of the target's start, which protobuf messages call `stamp`.
    pub number: u64,
}

/// The body of a data-plane reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataReply {
    /// The update is flushed on every in-sync replica.
    pub stable: bool,
    /// The chunk's version after (updates) or at (reads) the request.
    pub version: Version,
    /// The chain's epoch at the time of the answer.
    pub epoch: u64,
    /// Reads: bytes that exist, at most what was asked; missing bytes read as zeros up to the
    /// file's size. GRANT: units granted. SYNC_PUT: not 0 while applications wait for the target.
    pub len: u32,
    /// Reads: the checksums of the blocks.
    pub sums: Vec<u32>,
    /// Of the replicas that have what the reply confirms, the answering one first.
    pub boot_ids: Vec<BootId>,
}

impl DataReply {
    /// Encodes it as a frame's body.
    pub fn encode(&self) -> Bytes {
        let mut b =
            BytesMut::with_capacity(REPLY_HEAD + self.sums.len() * 4 + self.boot_ids.len() * 16);
        b.put_u16_le(VERSION);
        b.put_u8(if self.stable { REPLY_STABLE } else { 0 });
        b.put_u8(0);
        b.put_u32_le(self.len);
        b.put_u64_le(self.version.epoch);
        b.put_u64_le(self.version.number);
        b.put_u64_le(self.epoch);
        b.put_u32_le(self.sums.len() as u32);
        b.put_u16_le(self.boot_ids.len() as u16);
        b.put_u16_le(0);
        for s in &self.sums {
            b.put_u32_le(*s);
        }
        for s in &self.boot_ids {
            b.put_u32_le(s.target);
            b.put_u32_le(0);
            b.put_u64_le(s.number);
        }
        b.freeze()
    }

    /// Reads a body. `Protocol` for anything malformed.
    pub fn decode(body: &[u8]) -> Result<DataReply> {
        let mut r = Reader(body);
        if r.u16()? != VERSION {
            return Err(bad("data reply of another version"));
        }
        let stable = r.u8()? & REPLY_STABLE != 0;
        r.u8()?;
        let len = r.u32()?;
        let version = Version { epoch: r.u64()?, number: r.u64()? };
        let epoch = r.u64()?;
        let (sums, boot_ids) = (r.u32()? as usize, r.u16()? as usize);
        r.u16()?;
        if sums > MAX_SUMS || boot_ids > MAX_BOOT_IDS {
            return Err(bad("data reply lists too long"));
        }
        let sums = (0..sums).map(|_| r.u32()).collect::<Result<_>>()?;
        let boot_ids = (0..boot_ids)
            .map(|_| {
                let target = r.u32()?;
                r.u32()?;
                Ok(BootId { target, number: r.u64()? })
            })
            .collect::<Result<_>>()?;
        r.end()?;
        Ok(DataReply { stable, version, epoch, len, sums, boot_ids })
    }
}

/// The answer to CLOCK, 16 bytes: the time at a storage server, and how long it accepts updates
/// that carry this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Milliseconds since its machine was started, suspend included; not 0.
    pub now: u64,
    /// Milliseconds. An update whose [`DataRequest::heard`] is longer ago is refused.
    pub life: u32,
}

impl Clock {
    /// Encodes it as a frame's body.
    pub fn encode(&self) -> Bytes {
        let mut b = BytesMut::with_capacity(16);
        b.put_u64_le(self.now);
        b.put_u32_le(self.life);
        b.put_u32_le(0);
        b.freeze()
    }

    /// Reads a body. `Protocol` for anything malformed, and for a time or a life of 0.
    pub fn decode(body: &[u8]) -> Result<Clock> {
        let mut r = Reader(body);
        let (now, life) = (r.u64()?, r.u32()?);
        r.u32()?;
        r.end()?;
        if now == 0 || life == 0 {
            return Err(bad("the clock value is invalid"));
        }
        Ok(Clock { now, life })
    }

    /// Whether an update with that time is too old. A time in the future is from another start of
    /// the machine, and is refused, too.
    pub fn is_over(&self, heard: u64) -> bool {
        heard != 0 && !(self.now.saturating_sub(u64::from(self.life))..=self.now).contains(&heard)
    }
}

/// One chunk in the payload of a SYNC_LIST or LIST_CHUNKS reply, 48 bytes. Sorted by chunk id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its version.
    pub version: Version,
    /// Its bytes.
    pub len: u32,
    /// It was removed; only its version is left.
    pub tombstone: bool,
}

/// Bytes of an encoded entry.
pub const LIST_ENTRY: usize = 48;

impl ListEntry {
    /// Whether a page of a listing is in ascending order and begins after `after`.
    pub fn in_order(page: &[ListEntry], after: Option<ChunkId>) -> bool {
        page.first().is_none_or(|e| after.is_none_or(|a| e.chunk > a))
            && page.is_sorted_by(|a, b| a.chunk < b.chunk)
    }

    /// Encodes a page as a payload.
    pub fn encode_all(entries: &[ListEntry]) -> Bytes {
        let mut b = BytesMut::with_capacity(entries.len() * LIST_ENTRY);
        for e in entries {
            b.put_u64_le(e.chunk.ino);
            b.put_u64_le(e.chunk.data);
            b.put_u64_le(e.chunk.index);
            b.put_u64_le(e.version.epoch);
            b.put_u64_le(e.version.number);
            b.put_u32_le(e.len);
            b.put_u32_le(u32::from(e.tombstone));
        }
        b.freeze()
    }

    /// Reads a payload. `Protocol` for anything malformed.
    pub fn decode_all(payload: &[u8]) -> Result<Vec<ListEntry>> {
        let mut r = Reader(payload);
        let mut out = Vec::with_capacity(payload.len() / LIST_ENTRY);
        while !r.0.is_empty() {
            out.push(ListEntry {
                chunk: ChunkId { ino: r.u64()?, data: r.u64()?, index: r.u64()? },
                version: Version { epoch: r.u64()?, number: r.u64()? },
                len: r.u32()?,
                tombstone: r.u32()? & 1 != 0,
            });
        }
        Ok(out)
    }
}

/// Adjacent blocks of one chunk that hold data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The chunk's index.
    pub index: u64,
    /// Bytes from the start of the chunk, a multiple of 4,096.
    pub offset: u32,
    /// Bytes, a multiple of 4,096: the last one may reach beyond the end of the file.
    pub len: u32,
}

/// Payload of an EXTENTS reply: where the chunks of one file on one chain hold data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    /// In order, and not adjacent within a chunk.
    pub found: Vec<Extent>,
    /// Bytes stored between the start of the request and `next`; to the end if that is `None`.
    pub bytes: u64,
    /// Chunk index and offset at which the search stopped. `None`: it reached the end.
    pub next: Option<(u64, u32)>,
}

/// Maximum number of extents in one reply.
pub const MAX_EXTENTS: usize = 4096;
const EXTENTS_HEAD: usize = 24;
const EXTENT: usize = 16;

impl Extents {
    /// Encodes it as a payload.
    pub fn encode(&self) -> Bytes {
        let mut b = BytesMut::with_capacity(EXTENTS_HEAD + self.found.len() * EXTENT);
        let (index, offset) = self.next.unwrap_or((u64::MAX, 0));
        b.put_u64_le(self.bytes);
        b.put_u64_le(index);
        b.put_u32_le(offset);
        b.put_u32_le(self.found.len() as u32);
        for e in &self.found {
            b.put_u64_le(e.index);
            b.put_u32_le(e.offset);
            b.put_u32_le(e.len);
        }
        b.freeze()
    }

    /// `Protocol` for a reply that no server sends to a request that began at (`index`, `offset`):
    /// extents that are empty, leave their chunk, are out of order or lie outside the searched
    /// range, and a `next` that does not advance.
    pub fn decode(payload: &[u8], from: (u64, u32)) -> Result<Extents> {
        let mut r = Reader(payload);
        let (bytes, next) = (r.u64()?, (r.u64()?, r.u32()?));
        let count = r.u32()? as usize;
        if count > MAX_EXTENTS {
            return Err(bad("too many extents"));
        }
        let next = (next.0 != u64::MAX).then_some(next);
        let mut found: Vec<Extent> = Vec::with_capacity(count);
        let (mut at, mut sum) = (from, 0u64);
        for _ in 0..count {
            let e = Extent { index: r.u64()?, offset: r.u32()?, len: r.u32()? };
            let end = u64::from(e.offset) + u64::from(e.len);
            let is_whole =
                u64::from(e.offset).is_multiple_of(4096) && end.is_multiple_of(4096) && e.len > 0;
            if !is_whole || end > MAX_CHUNK || (e.index, e.offset) < at {
                return Err(bad("an extent is out of place"));
            }
            (at, sum) = ((e.index, end as u32), sum + u64::from(e.len));
            found.push(e);
        }
        r.end()?;
        if next.is_some_and(|n| n < at || n <= from) || (count > 0 && sum > bytes) {
            return Err(bad("the extents do not fit together"));
        }
        Ok(Extents { found, bytes, next })
    }
}

fn bad(m: &str) -> Error {
    Error::new(Code::Protocol, m)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) =
            self.0.split_first_chunk::<N>().ok_or_else(|| bad("data body cut short"))?;
        self.0 = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8> {
        self.take::<1>().map(|b| b[0])
    }
    fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(bad("data body has bytes left over")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_listing_only_go_forward() {
        let chunk = |index| ChunkId { ino: 1, data: 1, index };
        let page = |of: &[u64]| -> Vec<ListEntry> {
            let entry = |i: &u64| ListEntry {
                chunk: chunk(*i),
                version: Version::default(),
                len: 0,
                tombstone: false,
            };
            of.iter().map(entry).collect()
        };
        let ok = |of: &[u64], after: Option<u64>| ListEntry::in_order(&page(of), after.map(chunk));
        assert!(ok(&[], None) && ok(&[], Some(3)) && ok(&[1, 2, 9], None) && ok(&[4, 5], Some(3)));
        assert!(
            !ok(&[3, 4], Some(3))
                && !ok(&[1], Some(3))
                && !ok(&[5, 4], Some(3))
                && !ok(&[4, 4], None)
        );
    }

    #[test]
    fn extents_round_trip_and_lies_about_them_are_refused() {
        let e = |index, offset, len| Extent { index, offset, len };
        let good = Extents {
            found: vec![e(2, 8192, 4096), e(2, 16384, 8192), e(5, 0, 16 << 20)],
            bytes: 1 << 40,
            next: Some((5, 16 << 20)),
        };
        assert_eq!(Extents::decode(&good.encode(), (2, 4096)).unwrap(), good);
        let none = Extents::default();
        assert_eq!(Extents::decode(&none.encode(), (7, 7)).unwrap(), none);
        assert!(
            Extents::decode(&good.encode(), (2, 8193)).is_err(),
            "before where it was asked from"
        );
        for n in 0..good.encode().len() {
            assert!(Extents::decode(&good.encode()[..n], (0, 0)).is_err(), "cut at {n}");
        }
        let with = |found: &[Extent], bytes, next| Extents { found: found.to_vec(), bytes, next };
        for lie in [
            with(&[e(2, 1, 4096)], 1 << 40, None),
            with(&[e(2, 0, 0)], 1 << 40, None),
            with(&[e(2, 4096, 16 << 20)], 1 << 40, None),
            with(&[e(2, u32::MAX - 4095, 4096)], 1 << 40, None),
            with(&[e(2, 4096, 4096), e(2, 0, 4096)], 1 << 40, None),
            with(&[e(2, 0, 8192), e(2, 4096, 4096)], 1 << 40, None),
            with(&[e(2, 0, 8192)], 4096, None),
            with(&[e(2, 0, 8192)], 8192, Some((2, 0))),
            with(&[], 0, Some((0, 0))),
        ] {
            assert!(Extents::decode(&lie.encode(), (0, 0)).is_err(), "{lie:?}");
        }
        let many = with(&vec![e(1, 0, 4096); MAX_EXTENTS + 1], 1 << 40, None);
        assert!(Extents::decode(&many.encode(), (0, 0)).is_err());
    }

    fn request() -> DataRequest {
        DataRequest {
            kind: Kind::Write,
            flags: FLAG_STABLE,
            offset: 5,
            len: 9,
            session: 77,
            seq: 3,
            version: Version { epoch: 2, number: 8 },
            cap: Some([9; CAP_LEN]),
            round: 1 << 40,
            heard: 77_000,
            sums: vec![1, 2, 3],
            writers: vec![Writer { session: 1, seq: 2, version: Version { epoch: 3, number: 4 } }],
            regions: vec![Region { addr: 1 << 40, key: 5, len: 6 }],
            damaged: vec![4096..8192, 12_288..12_300],
            ..DataRequest::new(4, 11, 2, ChunkId { ino: 1, data: 2, index: 3 })
        }
    }

    #[test]
    fn requests_and_replies_round_trip() {
        let r = request();
        assert_eq!(DataRequest::decode(&r.encode()).unwrap(), r);
        let bare = DataRequest {
            cap: None,
            round: 0,
            heard: 0,
            sums: vec![],
            writers: vec![],
            regions: vec![],
            damaged: vec![],
            ..r
        };
        assert_eq!(bare.encode().len(), REQUEST_HEAD);
        assert_eq!(DataRequest::decode(&bare.encode()).unwrap(), bare);
        let p = DataReply {
            stable: true,
            version: Version { epoch: 1, number: 2 },
            epoch: 3,
            len: 4,
            sums: vec![5],
            boot_ids: vec![BootId { target: 1, number: 2 }],
        };
        assert_eq!(DataReply::decode(&p.encode()).unwrap(), p);
        assert_eq!(DataReply::default().encode().len(), REPLY_HEAD);
    }

    #[test]
    fn truncated_overlong_and_lying_bodies_are_errors() {
        let good = request().encode();
        for n in 0..good.len() {
            assert!(DataRequest::decode(&good[..n]).is_err(), "cut at {n}");
        }
        let mut long = good.to_vec();
        long.push(0);
        assert!(DataRequest::decode(&long).is_err());
        let mut lying = good.to_vec();
        lying[52..56].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(DataRequest::decode(&lying).is_err());
        lying.copy_from_slice(&good);
        lying[92..96].copy_from_slice(&(MAX_DAMAGED as u32 + 1).to_le_bytes());
        assert!(DataRequest::decode(&lying).is_err());
        for (at, unknown) in [(2, 200), (3, 128)] {
            let mut other = good.to_vec();
            other[at] |= unknown;
            assert!(DataRequest::decode(&other).is_err(), "kind or flag {unknown}");
        }
        let granted = DataRequest { flags: FLAG_GRANTED, ..request() };
        assert_eq!(DataRequest::decode(&granted.encode()).unwrap(), granted);
    }

    #[test]
    fn clocks_round_trip_and_updates_live_as_long_as_they_say() {
        let c = Clock { now: 20_000, life: 15_000 };
        assert_eq!(Clock::decode(&c.encode()).unwrap(), c);
        assert!(Clock::decode(&c.encode()[..15]).is_err() && Clock::decode(&[0; 16]).is_err());
        let over: Vec<bool> =
            [0, 4_999, 5_000, 20_000, 20_001].iter().map(|heard| c.is_over(*heard)).collect();
        assert_eq!(over, [false, true, false, false, true]);
        assert!(!Clock { now: 10_000, ..c }.is_over(1), "soon after a start");
    }

    #[test]
    fn lists_round_trip() {
        let e = ListEntry {
            chunk: ChunkId { ino: 1, data: 2, index: 3 },
            version: Version { epoch: 4, number: 5 },
            len: 6,
            tombstone: true,
        };
        let b = ListEntry::encode_all(&[e, e]);
        assert_eq!(b.len(), 2 * LIST_ENTRY);
        assert_eq!(ListEntry::decode_all(&b).unwrap(), vec![e, e]);
        assert!(ListEntry::decode_all(&b[..50]).is_err());
    }
}
