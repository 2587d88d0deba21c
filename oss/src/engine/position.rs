//! How far the scrub of this target got, kept in the chunk table so that it continues after a
//! restart.

use bytes::{BufMut, Bytes, BytesMut};
use strake_proto::{ChainId, ChunkId, Code, Error, Result};
use strake_store::{Batch, MetaStore};

use super::record::{self, SCRUB_KEY};

const UNDER_WAY: u8 = 1;
const BEHIND_CHUNK: u8 = 2;

/// The position of a scrub pass. See `docs/formats.md`, "Chunk store".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Counts passes, from 1; 0 before the first.
    pub pass: u64,
    /// When it began, milliseconds since 1970.
    pub began_ms: u64,
    /// When the last complete pass ended, milliseconds since 1970.
    pub ended_ms: u64,
    /// How long the last complete pass took, in milliseconds.
    pub took_ms: u64,
    /// Chunks looked at in the current or last pass.
    pub chunks: u64,
    /// Bytes read in the current or last pass.
    pub bytes: u64,
    /// Where to continue: in this chain, after this chunk. `None`: the pass is complete.
    pub at: Option<(ChainId, Option<ChunkId>)>,
}

impl Position {
    /// The record's value.
    pub fn encode(&self) -> Bytes {
        let (chain, chunk) = self.at.unwrap_or_default();
        let under_way = if self.at.is_some() { UNDER_WAY } else { 0 };
        let behind = if chunk.is_some() { BEHIND_CHUNK } else { 0 };
        let chunk = chunk.unwrap_or(ChunkId { ino: 0, data: 0, index: 0 });
        let mut b = BytesMut::with_capacity(82);
        b.put_u8(record::FORMAT);
        b.put_u8(under_way | behind);
        b.put_u32_le(chain);
        let times = [self.pass, self.began_ms, self.ended_ms, self.took_ms];
        for n in
            times.into_iter().chain([self.chunks, self.bytes, chunk.ino, chunk.data, chunk.index])
        {
            b.put_u64_le(n);
        }
        record::seal(SCRUB_KEY, b)
    }

    /// `Corrupt` for anything that [`Position::encode`] could not have made.
    pub fn decode(value: &[u8]) -> Result<Position> {
        let bad = || Error::new(Code::Corrupt, "the chunk table's record of the scrub is damaged");
        let body: &[u8; 77] = record::unseal(SCRUB_KEY, value)?.try_into().map_err(|_| bad())?;
        let at = |i: usize| body[i..i + 8].iter().rev().fold(0, |v, x| v << 8 | u64::from(*x));
        let chain = u32::from_le_bytes([body[1], body[2], body[3], body[4]]);
        let chunk = ChunkId { ino: at(53), data: at(61), index: at(69) };
        let place = match body[0] {
            0 => None,
            UNDER_WAY => Some((chain, None)),
            flags if flags == UNDER_WAY | BEHIND_CHUNK => Some((chain, Some(chunk))),
            _ => return Err(bad()),
        };
        let (pass, began_ms, ended_ms, took_ms) = (at(5), at(13), at(21), at(29));
        let p = Position {
            pass,
            began_ms,
            ended_ms,
            took_ms,
            chunks: at(37),
            bytes: at(45),
            at: place,
        };
        // Unused fields must be zeros.
        if p.encode() == value { Ok(p) } else { Err(bad()) }
    }
}

/// The position that was last recorded. An unreadable one counts as none: the scrub begins anew.
pub(super) fn load(table: &dyn MetaStore, device: &str) -> Result<Position> {
    match table.get(SCRUB_KEY)?.map(|v| Position::decode(&v)) {
        Some(Ok(p)) => Ok(p),
        Some(Err(e)) => {
            tracing::warn!("{device}: {e}");
            Ok(Position::default())
        }
        None => Ok(Position::default()),
    }
}

/// Records the position; durable with the next sync of the table.
pub(super) fn store(table: &dyn MetaStore, p: &Position) -> Result<()> {
    let mut batch = Batch::default();
    batch.put(SCRUB_KEY, p.encode());
    table.commit(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_fixed_and_every_flip_is_found() {
        let chunk = ChunkId { ino: 0x11, data: 0x22, index: 0x33 };
        let at = Some((0x0102_0304, Some(chunk)));
        let p =
            Position { pass: 5, began_ms: 6, ended_ms: 7, took_ms: 8, chunks: 9, bytes: 10, at };
        let v = p.encode();
        let text = hex::encode(&v);
        assert_eq!(&text[..28], "0103040302010500000000000000");
        assert_eq!((text.len(), &text[108..124]), (2 * 82, "1100000000000000"));
        for p in [
            p,
            Position { at: Some((9, None)), ..p },
            Position { at: None, ..p },
            Position::default(),
        ] {
            assert_eq!(Position::decode(&p.encode()).unwrap(), p);
        }
        for bit in 0..v.len() * 8 {
            let mut b = v.to_vec();
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Position::decode(&b).unwrap_err().code, Code::Corrupt, "bit {bit}");
        }
    }
}
