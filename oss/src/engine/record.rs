//! The chunk table's records: keys that sort by chain and chunk, values that carry their own
//! checksum. Specified in `docs/formats.md`, "Chunk store".

use bytes::{BufMut, Bytes, BytesMut};
use strake_proto::{
    ChunkId, Code, Error, Result,
    checksum::crc32c_both,
    data::{KEPT_WRITERS, Version, Writer},
};

use super::chunk::{ChunkMeta, Key};

/// Blocks one segment record describes: 256 KiB of a chunk.
pub const SEG_BLOCKS: usize = 64;
/// Bytes of a chunk that one segment record describes.
pub const SEG_BYTES: u32 = 256 << 10;
/// Segments of the largest chunk.
pub const MAX_SEGS: u8 = 64;
/// In [`Segment::blocks`]: nothing stored, reads as zeros.
pub const HOLE: u64 = u64::MAX;

pub(super) const FORMAT: u8 = 1;
const FLAG_TOMBSTONE: u8 = 1;
const HEADER_FIXED: usize = 24;
const WRITER: usize = 32;
const MAX_DEVICE_BLOCK: u64 = 1 << 48;

/// First byte of the key of a chunk's header.
pub const HEADER_PREFIX: u8 = b'h';
/// First byte of the key of a segment.
pub const SEGMENT_PREFIX: u8 = b's';
/// The last known state of a chain, see [`chain_views`](super::chain_views).
pub const CHAIN_VIEW_PREFIX: u8 = b'c';
/// The record that ties the table to its device.
pub const TARGET_KEY: &[u8] = b"t";
/// A chunk found damaged, see [`findings`](super::findings).
pub const FINDING_PREFIX: u8 = b'd';
/// How far the scrub got, see [`position`](super::position).
pub const SCRUB_KEY: &[u8] = b"p";
/// The record that sums up all headers and segments, see [`table_digest`](super::table_digest).
pub const TABLE_DIGEST_KEY: &[u8] = b"f";

/// A header record: a chunk's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The chunk's properties.
    pub meta: ChunkMeta,
    /// The stored record could not be read. Only a replacement or removal of the whole chunk is
    /// allowed then.
    pub damaged: bool,
}

/// A segment record: where 64 blocks of a chunk lie and their checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Device block per block of the segment, or [`HOLE`].
    pub blocks: [u64; SEG_BLOCKS],
    /// CRC32C of each 4 KiB block that is no hole, 0 for holes.
    pub sums: [u32; SEG_BLOCKS],
    /// As in [`Header::damaged`].
    pub damaged: bool,
}

fn chunk_key(prefix: u8, key: &Key) -> BytesMut {
    let mut b = BytesMut::with_capacity(30);
    b.put_u8(prefix);
    b.put_u32(key.chain);
    b.put_u64(key.chunk.ino);
    b.put_u64(key.chunk.data);
    b.put_u64(key.chunk.index);
    b
}

/// The key of a chunk's header.
pub fn header_key(key: &Key) -> Bytes {
    chunk_key(HEADER_PREFIX, key).freeze()
}

/// The key of a chunk's segment `seg`.
pub fn segment_key(key: &Key, seg: u8) -> Bytes {
    let mut b = chunk_key(SEGMENT_PREFIX, key);
    b.put_u8(seg);
    b.freeze()
}

fn parse_chunk(bytes: &[u8; 28]) -> Key {
    let u64_at = |i: usize| bytes[i..i + 8].iter().fold(0u64, |v, b| v << 8 | u64::from(*b));
    let chain = bytes[..4].iter().fold(0u32, |v, b| v << 8 | u32::from(*b));
    Key { chain, chunk: ChunkId { ino: u64_at(4), data: u64_at(12), index: u64_at(20) } }
}

/// `None` if these bytes are no header's key.
pub fn parse_header_key(bytes: &[u8]) -> Option<Key> {
    let (prefix, rest) = bytes.split_first()?;
    (*prefix == HEADER_PREFIX).then_some(())?;
    rest.try_into().ok().map(parse_chunk)
}

/// `None` if these bytes are no segment's key.
pub fn parse_segment_key(bytes: &[u8]) -> Option<(Key, u8)> {
    let (prefix, rest) = bytes.split_first()?;
    (*prefix == SEGMENT_PREFIX).then_some(())?;
    let (seg, chunk) = rest.split_last()?;
    (*seg < MAX_SEGS).then_some(())?;
    Some((parse_chunk(chunk.try_into().ok()?), *seg))
}

/// The key of the note that a chunk is damaged.
pub fn finding_key(key: &Key) -> Bytes {
    chunk_key(FINDING_PREFIX, key).freeze()
}

/// `None` if these bytes are no finding's key.
pub fn parse_finding_key(bytes: &[u8]) -> Option<Key> {
    let (prefix, rest) = bytes.split_first()?;
    (*prefix == FINDING_PREFIX).then_some(())?;
    rest.try_into().ok().map(parse_chunk)
}

/// Appends the checksum over key and value, so that a value under a wrong key is noticed too.
pub(super) fn seal(key: &[u8], mut value: BytesMut) -> Bytes {
    let crc = sum_of(key, &value);
    value.put_u32_le(crc);
    value.freeze()
}

fn sum_of(key: &[u8], value: &[u8]) -> u32 {
    crc32c_both(key, value)
}

fn bad(what: &str) -> Error {
    Error::new(Code::Corrupt, format!("chunk table record damaged: {what}"))
}

/// Checks checksum and format; returns the value without them.
pub(super) fn unseal<'a>(key: &[u8], value: &'a [u8]) -> Result<&'a [u8]> {
    let (body, crc) = value.split_last_chunk::<4>().ok_or_else(|| bad("too short"))?;
    if sum_of(key, body) != u32::from_le_bytes(*crc) {
        return Err(bad("checksum differs"));
    }
    match body.split_first() {
        Some((&FORMAT, rest)) => Ok(rest),
        Some((other, _)) => Err(bad(&format!("format {other} is not known to this version"))),
        None => Err(bad("empty")),
    }
}

struct Take<'a>(&'a [u8]);

impl Take<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(|| bad("cut short"))?;
        self.0 = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8> {
        self.bytes::<1>().map(|b| b[0])
    }
    fn u32(&mut self) -> Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }
    fn version(&mut self) -> Result<Version> {
        Ok(Version { epoch: self.u64()?, number: self.u64()? })
    }
}

impl Header {
    /// The header of an intact chunk.
    pub fn new(meta: ChunkMeta) -> Header {
        Header { meta, damaged: false }
    }

    /// Stands for a record that cannot be read.
    pub fn damaged() -> Header {
        let meta = ChunkMeta {
            version: Version::default(),
            len: 0,
            tombstone: false,
            writers: Vec::new(),
        };
        Header { meta, damaged: true }
    }

    /// Whether the chunk has bytes, or may have some that cannot be read.
    pub fn is_live(&self) -> bool {
        !self.meta.tombstone && !self.damaged
    }

    /// The record's value. `key`: the record's key, which its checksum covers.
    pub fn encode(&self, key: &[u8]) -> Bytes {
        let m = &self.meta;
        let mut b = BytesMut::with_capacity(HEADER_FIXED + m.writers.len() * WRITER + 4);
        b.put_u8(FORMAT);
        b.put_u8(if m.tombstone { FLAG_TOMBSTONE } else { 0 });
        b.put_u8(m.writers.len().min(KEPT_WRITERS) as u8);
        b.put_u8(0);
        b.put_u32_le(m.len);
        b.put_u64_le(m.version.epoch);
        b.put_u64_le(m.version.number);
        for w in m.writers.iter().take(KEPT_WRITERS) {
            b.put_u64_le(w.session);
            b.put_u64_le(w.seq);
            b.put_u64_le(w.version.epoch);
            b.put_u64_le(w.version.number);
        }
        seal(key, b)
    }

    /// `Corrupt` for anything that [`Header::encode`] under this key could not have made.
    pub fn decode(key: &[u8], value: &[u8]) -> Result<Header> {
        let mut t = Take(unseal(key, value)?);
        let (flags, writers, zero) = (t.u8()?, t.u8()? as usize, t.u8()?);
        let (len, version) = (t.u32()?, t.version()?);
        if flags & !FLAG_TOMBSTONE != 0 || writers > KEPT_WRITERS || zero != 0 {
            return Err(bad("unknown flags"));
        }
        if u64::from(len) > strake_proto::layout::MAX_CHUNK || (flags != 0 && len != 0) {
            return Err(bad("impossible length"));
        }
        let writers = (0..writers)
            .map(|_| Ok(Writer { session: t.u64()?, seq: t.u64()?, version: t.version()? }))
            .collect::<Result<_>>()?;
        if !t.0.is_empty() {
            return Err(bad("bytes left over"));
        }
        Ok(Header::new(ChunkMeta { version, len, tombstone: flags != 0, writers }))
    }
}

/// Where a run of a segment's blocks lies.
struct Run {
    at: usize,
    count: usize,
    block: u64,
}

impl Segment {
    /// A segment of holes.
    pub fn empty() -> Segment {
        Segment { blocks: [HOLE; SEG_BLOCKS], sums: [0; SEG_BLOCKS], damaged: false }
    }

    /// Stands for a record that cannot be read.
    pub fn damaged() -> Segment {
        Segment { damaged: true, ..Segment::empty() }
    }

    /// Whether all of it is holes.
    pub fn is_empty(&self) -> bool {
        self.blocks.iter().all(|b| *b == HOLE)
    }

    fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (at, block) in self.blocks.iter().copied().enumerate().filter(|(_, b)| *b != HOLE) {
            match runs.last_mut() {
                Some(r) if r.at + r.count == at && r.block + r.count as u64 == block => {
                    r.count += 1
                }
                _ => runs.push(Run { at, count: 1, block }),
            }
        }
        runs
    }

    /// The record's value. `key`: the record's key, which its checksum covers.
    pub fn encode(&self, key: &[u8]) -> Bytes {
        let runs = self.runs();
        let mut b = BytesMut::with_capacity(4 + runs.len() * 8 + SEG_BLOCKS * 4 + 4);
        b.put_u8(FORMAT);
        b.put_u8(runs.len() as u8);
        b.put_u16_le(0);
        for r in &runs {
            b.put_u8(r.at as u8);
            b.put_u8(r.count as u8);
            b.put_uint_le(r.block, 6);
        }
        for (block, sum) in self.blocks.iter().zip(&self.sums) {
            if *block != HOLE {
                b.put_u32_le(*sum);
            }
        }
        seal(key, b)
    }

    /// `Corrupt` for anything that [`Segment::encode`] under this key could not have made.
    pub fn decode(key: &[u8], value: &[u8]) -> Result<Segment> {
        let mut t = Take(unseal(key, value)?);
        let (runs, zero) = (t.u8()?, t.bytes::<2>()?);
        if zero != [0, 0] || runs == 0 {
            return Err(bad("unknown flags"));
        }
        let mut s = Segment::empty();
        let mut next = 0;
        for _ in 0..runs {
            let (at, count) = (usize::from(t.u8()?), usize::from(t.u8()?));
            let low = t.bytes::<6>()?;
            let block = low.iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
            if at < next
                || count == 0
                || at + count > SEG_BLOCKS
                || block + count as u64 > MAX_DEVICE_BLOCK
            {
                return Err(bad("impossible run"));
            }
            for i in 0..count {
                s.blocks[at + i] = block + i as u64;
            }
            next = at + count;
        }
        for i in 0..SEG_BLOCKS {
            if s.blocks[i] != HOLE {
                s.sums[i] = t.u32()?;
            }
        }
        if !t.0.is_empty() {
            return Err(bad("bytes left over"));
        }
        Ok(s)
    }
}

/// The value of [`TARGET_KEY`]: format, target uuid, checksum.
pub fn encode_target(uuid: &[u8; 16]) -> Bytes {
    let mut b = BytesMut::with_capacity(21);
    b.put_u8(FORMAT);
    b.put_slice(uuid);
    seal(TARGET_KEY, b)
}

/// The UUID of the target that the table belongs to. `Corrupt` for another record.
pub fn decode_target(value: &[u8]) -> Result<[u8; 16]> {
    unseal(TARGET_KEY, value)?.try_into().map_err(|_| bad("target record of a wrong length"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key { chain: 0x0102_0304, chunk: ChunkId { ino: 0x11, data: 0x22, index: 0x33 } }
    }

    fn header() -> Header {
        let version = Version { epoch: 5, number: 6 };
        let writers = vec![Writer { session: 7, seq: 8, version }];
        Header::new(ChunkMeta { version, len: 4097, tombstone: false, writers })
    }

    fn segment() -> Segment {
        let mut s = Segment::empty();
        for i in 0..3 {
            s.blocks[i] = 0x0605_0403_0201 + i as u64;
            s.sums[i] = 0xa0 + i as u32;
        }
        (s.blocks[63], s.sums[63]) = (9, 0xb0);
        s
    }

    #[test]
    fn bytes_are_fixed_for_ever() {
        let hk = header_key(&key());
        assert_eq!(hex::encode(&hk), "6801020304000000000000001100000000000000220000000000000033");
        let h = hex::encode(header().encode(&hk));
        assert_eq!(&h[..48], "010001000110000005000000000000000600000000000000");
        assert_eq!(&h[48..112], "0700000000000000080000000000000005000000000000000600000000000000");
        assert_eq!(h.len(), 120);
        let sk = segment_key(&key(), 2);
        assert_eq!(
            hex::encode(&sk),
            "730102030400000000000000110000000000000022000000000000003302"
        );
        let s = hex::encode(segment().encode(&sk));
        assert_eq!(&s[..40], "0102000000030102030405063f01090000000000");
        assert_eq!(&s[40..72], "a0000000a1000000a2000000b0000000");
        assert_eq!(s.len(), 80);
        let t = hex::encode(encode_target(&[0xee; 16]));
        assert_eq!(&t[..34], "01eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee");
        // The checksums are fixed too, and with them their input (key, then value).
        assert_eq!((&h[112..], &s[72..], &t[34..]), ("e8cecc62", "bbdf4350", "77f838b5"));
    }

    #[test]
    fn all_kept_writers_fit_and_one_more_is_refused() {
        let k = header_key(&key());
        let writer = |n| Writer { session: n, seq: n, version: Version { epoch: 1, number: n } };
        let mut h = header();
        h.meta.writers = (0..64).map(writer).collect();
        let v = h.encode(&k);
        assert_eq!((v.len(), v[2], KEPT_WRITERS), (24 + 64 * 32 + 4, 64, 64));
        assert_eq!(Header::decode(&k, &v).unwrap(), h);
        let mut more = v[..v.len() - 4].to_vec();
        more[2] = 65;
        more.extend_from_slice(&[0; 32]);
        assert_eq!(Header::decode(&k, &seal(&k, more[..].into())).unwrap_err().code, Code::Corrupt);
    }

    #[test]
    fn round_trips() {
        let (hk, sk) = (header_key(&key()), segment_key(&key(), 63));
        assert_eq!(parse_header_key(&hk), Some(key()));
        assert_eq!(parse_segment_key(&sk), Some((key(), 63)));
        assert_eq!(parse_header_key(&sk), None);
        assert_eq!(parse_segment_key(&hk), None);
        assert_eq!(parse_segment_key(&segment_key(&key(), 64)), None);
        assert_eq!(Header::decode(&hk, &header().encode(&hk)).unwrap(), header());
        assert_eq!(Segment::decode(&sk, &segment().encode(&sk)).unwrap(), segment());
        assert_eq!(decode_target(&encode_target(&[3; 16])).unwrap(), [3; 16]);
    }

    #[test]
    fn every_flip_cut_and_misplacement_is_found() {
        let (hk, sk) = (header_key(&key()), segment_key(&key(), 1));
        let (h, s) = (header().encode(&hk), segment().encode(&sk));
        for (k, v) in [(&hk, &h), (&sk, &s)] {
            let fails = |k: &[u8], v: &[u8]| {
                let header = k[0] == HEADER_PREFIX;
                let e =
                    if header { Header::decode(k, v).err() } else { Segment::decode(k, v).err() };
                e.is_some_and(|e| e.code == Code::Corrupt)
            };
            assert!(!fails(k, v));
            for bit in 0..v.len() * 8 {
                let mut b = v.to_vec();
                b[bit / 8] ^= 1 << (bit % 8);
                assert!(fails(k, &b), "bit {bit}");
            }
            for n in 0..v.len() {
                assert!(fails(k, &v[..n]), "cut at {n}");
            }
            let mut other = k.to_vec();
            *other.last_mut().unwrap() ^= 1;
            assert!(fails(&other, v), "value under another chunk's key");
        }
    }
}
