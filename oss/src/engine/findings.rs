//! Chunks that were found damaged and still are, kept in the chunk table so that a restart does not
//! forget them. If such a record is itself damaged, or an older version did not maintain it, the
//! next look at the chunk corrects it.

use std::ops::Range;

use bytes::{Buf as _, BufMut, Bytes, BytesMut};
use strake_proto::{Code, Error, Result, data::Version};
use strake_store::{Batch, MetaStore};

use super::{
    chunk::Key,
    record::{self, FINDING_PREFIX},
};

const LOST: u8 = 1;
const RECORD: u8 = 2;
/// Most damaged ranges that a record lists. More are stored as one range, first to last.
const MAX_PARTS: usize = 64;
/// Most bytes of the cause that a record keeps.
const MAX_CAUSE: usize = 512;

/// See `docs/formats.md`, "Chunk store".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The last search found no good copy on any in-sync replica.
    pub lost: bool,
    /// The chunk's own record was damaged.
    pub record: bool,
    /// From the first to the last byte that was damaged when it was found; the whole chunk if
    /// empty.
    pub part: Range<u32>,
    /// How many bytes of `part` were damaged.
    pub bytes: u32,
    /// When it was found, milliseconds since 1970.
    pub unix_ms: u64,
    /// Epoch of its chain at the last attempt to repair it.
    pub epoch: u64,
    /// The chunk's version at that attempt.
    pub version: Version,
    /// The ranges that are still damaged.
    pub left: Vec<Range<u32>>,
    /// Why it is not repaired.
    pub cause: String,
}

impl Found {
    /// The record's value. `key`: the record's key, which its checksum covers.
    pub fn encode(&self, key: &[u8]) -> Bytes {
        let whole: Vec<Range<u32>>;
        let left = match &self.left[..] {
            [first, .., last] if self.left.len() > MAX_PARTS => {
                whole = std::iter::once(first.start..last.end).collect();
                &whole[..]
            }
            parts => parts,
        };
        let cause = &self.cause[..self.cause.floor_char_boundary(MAX_CAUSE)];
        let mut b = BytesMut::with_capacity(64 + 8 * left.len() + cause.len());
        b.put_u8(record::FORMAT);
        b.put_u8(if self.lost { LOST } else { 0 } | if self.record { RECORD } else { 0 });
        b.put_u16_le(left.len() as u16);
        [self.part.start, self.part.end, self.bytes].iter().for_each(|n| b.put_u32_le(*n));
        let Version { epoch, number } = self.version;
        [self.unix_ms, self.epoch, epoch, number].iter().for_each(|n| b.put_u64_le(*n));
        left.iter().flat_map(|r| [r.start, r.end]).for_each(|n| b.put_u32_le(n));
        b.put_u16_le(cause.len() as u16);
        b.put_slice(cause.as_bytes());
        record::seal(key, b)
    }

    /// `Corrupt` for anything that [`Found::encode`] could not have made.
    pub fn decode(key: &[u8], value: &[u8]) -> Result<Found> {
        let bad = || Error::new(Code::Corrupt, "the record of a finding is damaged itself");
        let mut b = record::unseal(key, value)?;
        if b.len() < 47 {
            return Err(bad());
        }
        let (flags, parts) = (b.get_u8(), usize::from(b.get_u16_le()));
        let part = b.get_u32_le()..b.get_u32_le();
        let (bytes, unix_ms, epoch) = (b.get_u32_le(), b.get_u64_le(), b.get_u64_le());
        let version = Version { epoch: b.get_u64_le(), number: b.get_u64_le() };
        if parts > MAX_PARTS || b.len() < 8 * parts + 2 {
            return Err(bad());
        }
        let left = (0..parts).map(|_| b.get_u32_le()..b.get_u32_le()).collect();
        let len = usize::from(b.get_u16_le());
        let cause = std::str::from_utf8(b)
            .ok()
            .filter(|c| c.len() == len && len <= MAX_CAUSE)
            .ok_or_else(bad)?
            .into();
        let (lost, record) = (flags & LOST != 0, flags & RECORD != 0);
        let found = Found { lost, record, part, bytes, unix_ms, epoch, version, left, cause };
        let in_order = |r: &Range<u32>| r.start <= r.end;
        if flags & !(LOST | RECORD) != 0
            || !in_order(&found.part)
            || !found.left.iter().all(in_order)
        {
            return Err(bad());
        }
        Ok(found)
    }
}

/// Findings of earlier runs of the server, at most `most`, in key order. Unreadable records are
/// left out.
pub(super) fn load(table: &dyn MetaStore, device: &str, most: usize) -> Vec<(Key, Found)> {
    let mut all = Vec::new();
    for pair in table.prefix(&[FINDING_PREFIX]).take(most) {
        let found = pair.and_then(|(k, v)| {
            let key = record::parse_finding_key(&k);
            let key = key.ok_or_else(|| {
                Error::new(Code::Corrupt, format!("{k:02x?} is not a key of a finding"))
            })?;
            Found::decode(&k, &v).map(|found| (key, found)).map_err(|e| e.context(key))
        });
        match found {
            Ok(one) => all.push(one),
            Err(e) => tracing::warn!("{device}: {e}; the scrub will find it again"),
        }
    }
    all
}

/// Records that a chunk is damaged, or (`None`) no longer is. Durable with the next sync of the
/// table.
pub(super) fn store(table: &dyn MetaStore, key: &Key, found: Option<&Found>) -> Result<()> {
    let k = record::finding_key(key);
    let mut batch = Batch::default();
    match found {
        Some(found) => {
            let value = found.encode(&k);
            batch.put(k, value);
        }
        None => batch.delete(k),
    }
    table.commit(batch)
}

#[cfg(test)]
mod tests {
    use strake_proto::ChunkId;

    use super::*;

    fn found() -> Found {
        let version = Version { epoch: 7, number: 8 };
        let (part, left) = (4096..12_288, vec![4096..8192, 9000..9001]);
        let cause = "no other copy is in sync".into();
        Found {
            lost: true,
            record: false,
            part,
            bytes: 4097,
            unix_ms: 5,
            epoch: 6,
            version,
            left,
            cause,
        }
    }

    #[test]
    fn bytes_are_fixed_and_every_flip_is_found() {
        let k = record::finding_key(&Key {
            chain: 3,
            chunk: ChunkId { ino: 0x11, data: 0x22, index: 0x33 },
        });
        assert_eq!(&k[..13], b"d\0\0\0\x03\0\0\0\0\0\0\0\x11");
        let v = found().encode(&k);
        let text = hex::encode(&v);
        assert_eq!(&text[..32], "01010200001000000030000001100000");
        assert_eq!(&text[96..128], "00100000002000002823000029230000");
        let others = [
            Found { lost: false, record: true, left: Vec::new(), cause: String::new(), ..found() },
            Found::default(),
            found(),
        ];
        for f in others {
            assert_eq!(Found::decode(&k, &f.encode(&k)).unwrap(), f);
        }
        for bit in 0..v.len() * 8 {
            let mut b = v.to_vec();
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Found::decode(&k, &b).unwrap_err().code, Code::Corrupt, "bit {bit}");
        }
        for n in 0..v.len() {
            assert!(Found::decode(&k, &v[..n]).is_err(), "cut at {n}");
        }
    }

    #[test]
    fn what_is_long_is_cut() {
        let k =
            record::finding_key(&Key { chain: 3, chunk: ChunkId { ino: 1, data: 2, index: 3 } });
        let left: Vec<Range<u32>> = (0..1000).map(|i| i * 8192..i * 8192 + 4096).collect();
        let f = Found { left, cause: "é".repeat(400), ..found() };
        let got = Found::decode(&k, &f.encode(&k)).unwrap();
        assert_eq!(
            (got.left.len(), got.left.first(), got.cause),
            (1, Some(&(0..999 * 8192 + 4096)), "é".repeat(256))
        );
    }
}
