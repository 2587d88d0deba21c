//! What a chunk table must contain: a record in the table that sums up all others, and a mark on
//! the device that says how far the table was synced. Together they detect a table that lost synced
//! changes.
//!
//! The store takes a damaged batch in its journal for the journal's end. So a single flipped bit
//! there can drop synced changes without an error. A target with such a table would return zeros
//! for lost chunks, and as the first source of its chain would have the good copies removed. So
//! opening it is refused.
//!
//! The [`TableDigest`] changes in the same batch as the records it sums up: if changes are lost
//! from the middle, it does not match. The [`Mark`] is written after the table's sync, and so is
//! never ahead of it: if changes are lost from the end, the table is behind the mark. Formats are
//! in `docs/formats.md`, "Chunk store".

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt;
use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Error, Result, checksum::crc32c, layout::splitmix64};

use super::record;
use crate::device::{BLOCK, Device};

const UNSURE: u8 = 1;
const MAGIC: &[u8; 8] = b"STRAKEMK";
const FORMAT: u32 = 1;
const LEN: usize = BLOCK as usize;
/// First of the two blocks that marks are written to in turn.
const MARK_BLOCK: u64 = 2;

/// Sums over all header and segment records, each wrapping at 2^64. See `docs/formats.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableDigest {
    /// Batches that changed the table, since it was made or since it first had a digest.
    pub flushes: u64,
    /// Header and segment records.
    pub records: u64,
    /// Over keys alone, so that a damaged value does not hide a lost record.
    pub keys: u64,
    /// Over the checksums of keys with their values.
    pub values: u64,
    /// A record was damaged when the target was opened, or when it was replaced, so `values` may be
    /// wrong.
    pub unsure: bool,
}

/// Scatters checksums, so that sums of similar keys differ.
fn scatter(n: u64) -> u64 {
    splitmix64(&mut { n })
}

/// The checksum at the end of a value; it covers the key too.
fn value_sum(value: &[u8]) -> u64 {
    let crc = value.last_chunk::<4>().map_or_else(|| crc32c(value), |b| u32::from_le_bytes(*b));
    scatter(u64::from(crc))
}

impl TableDigest {
    /// A record is in the table now.
    pub fn add(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_add(1);
        self.keys = self.keys.wrapping_add(scatter(u64::from(crc32c(key))));
        self.values = self.values.wrapping_add(value_sum(value));
    }

    /// A record is in the table no longer.
    pub fn remove(&mut self, key: &[u8], value: &[u8]) {
        self.records = self.records.wrapping_sub(1);
        self.keys = self.keys.wrapping_sub(scatter(u64::from(crc32c(key))));
        self.values = self.values.wrapping_sub(value_sum(value));
    }

    /// Whether a table whose records sum up to `found` matches this digest.
    pub fn fits(&self, found: &TableDigest) -> bool {
        let values = self.values == found.values || self.unsure || found.unsure;
        (self.records, self.keys) == (found.records, found.keys) && values
    }

    /// The record's value.
    pub fn encode(&self) -> Bytes {
        let mut b = BytesMut::with_capacity(40);
        b.put_u8(record::FORMAT);
        b.put_u8(if self.unsure { UNSURE } else { 0 });
        b.put_u16_le(0);
        for n in [self.flushes, self.records, self.keys, self.values] {
            b.put_u64_le(n);
        }
        record::seal(record::TABLE_DIGEST_KEY, b)
    }

    /// `Corrupt` for anything that [`TableDigest::encode`] could not have made.
    pub fn decode(value: &[u8]) -> Result<TableDigest> {
        let bad = || Error::new(Code::Corrupt, "the chunk table's digest is damaged");
        let body: &[u8; 35] =
            record::unseal(record::TABLE_DIGEST_KEY, value)?.try_into().map_err(|_| bad())?;
        if body[0] & !UNSURE != 0 || body[1..3] != [0, 0] {
            return Err(bad());
        }
        let at = |i: usize| body[i..i + 8].iter().rev().fold(0, |v, x| v << 8 | u64::from(*x));
        Ok(TableDigest {
            unsure: body[0] != 0,
            flushes: at(3),
            records: at(11),
            keys: at(19),
            values: at(27),
        })
    }
}

/// A mark on the device: the table of target `uuid` was synced with a digest of `flushes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// UUID of the target.
    pub uuid: [u8; 16],
    /// Batches that changed the table before it was synced.
    pub flushes: u64,
}

impl Mark {
    /// The block as it is on the device.
    pub fn encode(&self) -> [u8; LEN] {
        let mut b = [0; LEN];
        b[0..8].copy_from_slice(MAGIC);
        b[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        b[16..32].copy_from_slice(&self.uuid);
        b[32..40].copy_from_slice(&self.flushes.to_le_bytes());
        let crc = crc32c(&b[..LEN - 4]);
        b[LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// `None` for a block that is no mark, or a damaged or torn one.
    pub fn decode(b: &[u8]) -> Option<Mark> {
        let b: &[u8; LEN] = b.try_into().ok()?;
        let crc = u32::from_le_bytes(*b.last_chunk()?);
        if &b[..8] != MAGIC || b[8..12] != FORMAT.to_le_bytes() || crc32c(&b[..LEN - 4]) != crc {
            return None;
        }
        Some(Mark {
            uuid: *b[16..].first_chunk()?,
            flushes: u64::from_le_bytes(*b[32..].first_chunk()?),
        })
    }

    fn block(&self, pool: &Pool) -> (u64, Vec<Buf>) {
        let mut b = pool.get_now(LEN);
        b.copy_from_slice(&self.encode());
        ((MARK_BLOCK + self.flushes % 2) * BLOCK, vec![b.freeze()])
    }

    /// Writes both blocks of a new target.
    pub async fn format(device: &dyn Device, pool: &Pool, uuid: [u8; 16]) -> Result<()> {
        let (at, block) = Mark { uuid, flushes: 0 }.block(pool);
        device.write(at, block.clone()).await?;
        device.write(at + BLOCK, block).await
    }

    /// Hands the mark to the device and does not wait. The next flush of the device makes it
    /// durable, and only the flush after that writes this block again. A lost mark only makes the
    /// check weaker by one flush.
    pub fn send(&self, device: &dyn Device, pool: &Pool) {
        let (at, block) = self.block(pool);
        if let Some(Err(e)) = device.write(at, block).now_or_never() {
            tracing::warn!("{}: mark of a flush: {e}", device.name());
        }
    }

    /// How many flushes the table of this target must have at least; 0 if no mark can be read.
    pub async fn read(device: &dyn Device, pool: &Pool, uuid: [u8; 16]) -> u64 {
        let mut flushes = 0;
        for block in MARK_BLOCK..MARK_BLOCK + 2 {
            match device.read(block * BLOCK, pool.get_now(LEN)).await {
                Ok(b) => {
                    flushes = Mark::decode(&b)
                        .filter(|m| m.uuid == uuid)
                        .map_or(flushes, |m| m.flushes.max(flushes))
                }
                Err(e) => tracing::warn!("{}: mark in block {block}: {e}", device.name()),
            }
        }
        flushes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest() -> TableDigest {
        TableDigest {
            flushes: 0x0102,
            records: 3,
            keys: 0xa1a2_a3a4_a5a6_a7a8,
            values: u64::MAX,
            unsure: true,
        }
    }

    #[test]
    fn bytes_are_fixed_for_ever() {
        let t = digest().encode();
        assert_eq!(
            hex::encode(&t),
            "0101000002010000000000000300000000000000a8a7a6a5a4a3a2a1ffffffffffffffffc2f1a985"
        );
        assert_eq!(TableDigest::decode(&t).unwrap(), digest());
        let m = Mark { uuid: [0xee; 16], flushes: 0x0203 }.encode();
        assert_eq!(
            hex::encode(&m[..40]),
            "535452414b454d4b0100000000000000eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee0302000000000000"
        );
        assert!(m[40..LEN - 4].iter().all(|b| *b == 0));
        assert_eq!(hex::encode(&m[LEN - 4..]), "3b50a577");
        let mut one = TableDigest::default();
        one.add(b"key", b"value and its checksum");
        assert_eq!(
            (one.records, one.keys, one.values),
            (1, 0xc54484d75e32448e, 0xc8937ddb6611fb8a)
        );
    }

    #[test]
    fn every_flip_and_cut_is_found() {
        let (t, m) = (digest().encode(), Mark { uuid: [7; 16], flushes: 9 }.encode());
        for bit in 0..t.len() * 8 {
            let mut b = t.to_vec();
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(TableDigest::decode(&b).unwrap_err().code, Code::Corrupt, "bit {bit}");
        }
        (0..t.len()).for_each(|n| assert!(TableDigest::decode(&t[..n]).is_err(), "cut at {n}"));
        for bit in 0..m.len() * 8 {
            let mut b = m;
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Mark::decode(&b), None, "bit {bit}");
        }
    }

    #[test]
    fn a_sum_does_not_depend_on_the_order_and_notices_what_is_missing_or_stale() {
        let pairs: Vec<_> = (0..50u8).map(|n| ([b'h', n], [n, 0, 1, 2, n ^ 5, 3])).collect();
        let of = |list: &mut dyn Iterator<Item = &([u8; 2], [u8; 6])>| {
            let mut t = TableDigest::default();
            list.for_each(|(k, v)| t.add(k, v));
            t
        };
        let all = of(&mut pairs.iter());
        assert_eq!(all, of(&mut pairs.iter().rev()));
        for (n, (k, v)) in pairs.iter().enumerate() {
            let mut without =
                of(&mut pairs.iter().enumerate().filter(|(i, _)| *i != n).map(|(_, p)| p));
            assert!(!all.fits(&without));
            without.add(k, &[9; 6]);
            assert!(!all.fits(&without));
            assert!(
                all.fits(&TableDigest { unsure: true, ..without }),
                "a damaged record costs its chunk only"
            );
            without.remove(k, &[9; 6]);
            without.add(k, v);
            assert_eq!(without, all);
        }
    }
}
