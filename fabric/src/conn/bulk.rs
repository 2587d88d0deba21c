//! Payloads that go from memory to memory beside the stream of frames.
//!
//! The side that makes a request lends memory; the side that serves it reads and writes that memory
//! directly. A plain stream (TCP) cannot do this: there, payloads follow their frames.

use async_trait::async_trait;
use bytes::Bytes;
use strake_proto::{
    Code, Error, Result,
    checksum::{combine, crc32c},
    frame::{MAX_PAYLOAD, Region},
};

use crate::{Buf, BufMut, Lend};

/// Payloads up to this length follow their frame.
pub const INLINE: usize = 4096;
/// Maximum number of regions in which the payload of one request may lie.
pub const MAX_PARTS: usize = 8;
/// Bytes before the entries of encoded [`Regions`].
pub const REGIONS_HEAD: usize = 8;
const ENTRY: usize = 16;

/// Moves payloads of one connection. A key given to the peer opens exactly the memory that was
/// lent, only for the peer of this connection, until it is taken back or the connection ends.
#[async_trait]
pub(crate) trait Bulk: Send + Sync + 'static {
    /// Lends `payload` for reading and `room` for writing. Both are held until [`Bulk::take_back`],
    /// or until the connection can no longer reach any memory. If the future is dropped before it
    /// is ready, nothing is lent. Nothing is lent either after an error for which [`no_memory`] is
    /// true.
    async fn lend(&self, payload: Vec<Buf>, room: Option<BufMut>) -> Result<Loan>;
    /// As [`Bulk::lend`], for memory outside a pool. After an error nothing is lent.
    async fn lend_foreign(&self, what: &Lend) -> Result<Loan>;
    /// Ends a loan and returns the lent room. When this returns, the peer can no longer reach it.
    async fn take_back(&self, loan: u64) -> Result<Option<BufMut>>;
    /// Ends a loan at once. If it was not taken back, this ends the connection as well.
    fn revoke(&self, loan: u64);
    /// Fills `to` from the peer's regions, whose lengths add up to the length of `to`.
    async fn fetch(&self, from: &[Region], to: BufMut) -> Result<BufMut>;
    /// Writes to the start of the peer's region. Frames sent through the stream after this arrive
    /// after it. After an error for which [`no_memory`] is true, nothing was written.
    async fn put(&self, payload: Vec<Buf>, to: Region) -> Result<()>;
}

/// Whether the error means that there was no memory to move a payload from or to. The payload then
/// goes through the stream, which takes longer but needs little memory.
pub(crate) fn no_memory(e: &Error) -> bool {
    matches!(e.code, Code::NoMem | Code::Overloaded)
}

/// What was lent, and the regions by which the peer reaches it.
pub(crate) struct Loan {
    pub id: u64,
    pub regions: Regions,
}

/// Memory of the requester, between body and payload of a request with
/// [`strake_proto::frame::FLAG_REGIONS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Regions {
    /// Where the request's payload lies, in order. Empty: it follows.
    pub payload: Vec<Region>,
    /// Where the payload of the reply may be written.
    pub room: Option<Region>,
}

impl Regions {
    /// As they are sent: head and entries, with a checksum.
    pub fn encode(&self) -> Bytes {
        let all = self.payload.iter().chain(&self.room);
        let mut b = Vec::with_capacity(REGIONS_HEAD + ENTRY * (self.payload.len() + 1));
        b.extend_from_slice(&(self.payload.len() as u16).to_le_bytes());
        b.extend_from_slice(&u16::from(self.room.is_some()).to_le_bytes());
        b.extend_from_slice(&[0; 4]);
        for r in all {
            b.extend_from_slice(&r.addr.to_le_bytes());
            b.extend_from_slice(&r.key.to_le_bytes());
            b.extend_from_slice(&r.len.to_le_bytes());
        }
        let crc = Regions::crc(&b);
        b[4..8].copy_from_slice(&crc.to_le_bytes());
        b.into()
    }

    /// Number of bytes that follow such a head.
    pub fn rest(head: &[u8; REGIONS_HEAD]) -> Result<usize> {
        let (parts, rooms) = counts(head);
        if parts > MAX_PARTS || rooms > 1 {
            let m = format!("a request with {parts} payload regions and {rooms} reply regions");
            return Err(Error::new(Code::Protocol, m));
        }
        Ok((parts + rooms) * ENTRY)
    }

    /// Decodes head and rest together. `Protocol`: damaged, or an impossible region.
    pub fn decode(b: &[u8]) -> Result<Regions> {
        let bad = |m: &str| Error::new(Code::Protocol, m.to_string());
        let head = b.first_chunk::<REGIONS_HEAD>().ok_or_else(|| bad("regions are cut short"))?;
        if b.len() != REGIONS_HEAD + Regions::rest(head)? {
            return Err(bad("the length of the regions is wrong"));
        }
        if u32::from_le_bytes([b[4], b[5], b[6], b[7]]) != Regions::crc(b) {
            return Err(bad("regions checksum mismatch"));
        }
        let (entries, _) = b[REGIONS_HEAD..].as_chunks::<ENTRY>();
        let mut all = entries.iter().map(region).collect::<Result<Vec<_>>>()?;
        let room = if counts(head).1 == 1 { all.pop() } else { None };
        Ok(Regions { payload: all, room })
    }

    fn crc(b: &[u8]) -> u32 {
        let rest = &b[REGIONS_HEAD..];
        combine(crc32c(&b[..4]), crc32c(rest), rest.len())
    }

    /// Length of the payload in bytes.
    pub fn payload_len(&self) -> u64 {
        self.payload.iter().map(|r| u64::from(r.len)).sum()
    }
}

fn counts(head: &[u8; REGIONS_HEAD]) -> (usize, usize) {
    let at = |i: usize| usize::from(u16::from_le_bytes([head[i], head[i + 1]]));
    (at(0), at(2))
}

fn region(b: &[u8; ENTRY]) -> Result<Region> {
    let at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
    let addr = u64::from(at(4)) << 32 | u64::from(at(0));
    let (key, len) = (at(8), at(12));
    if len == 0 || len > MAX_PAYLOAD || addr.checked_add(u64::from(len)).is_none() {
        return Err(Error::new(Code::Protocol, format!("a region of {len} bytes at {addr:#x}")));
    }
    Ok(Region { addr, key, len })
}

/// Body of a ROOM request: the call whose reply needs memory, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskRoom {
    /// Id of the call.
    pub request_id: u64,
    /// Length of the payload, bytes.
    pub len: u32,
}

impl AskRoom {
    /// As it is sent.
    pub fn encode(&self) -> Bytes {
        [&self.request_id.to_le_bytes()[..], &self.len.to_le_bytes()].concat().into()
    }

    /// Reads what [`AskRoom::encode`] made. `Protocol`: of another length, or of no bytes.
    pub fn decode(b: &[u8]) -> Result<AskRoom> {
        let bad = || Error::new(Code::Protocol, "a request with an empty reply region");
        let (id, len) = b.split_at_checked(8).ok_or_else(bad)?;
        let request_id = u64::from_le_bytes(id.try_into().map_err(|_| bad())?);
        let len = u32::from_le_bytes(len.try_into().map_err(|_| bad())?);
        if len == 0 || len > MAX_PAYLOAD {
            return Err(bad());
        }
        Ok(AskRoom { request_id, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(parts: u32, room: bool) -> Regions {
        let at =
            |i: u32| Region { addr: 0x7f00_0000_0000 + u64::from(i), key: 77 + i, len: 4096 + i };
        Regions { payload: (0..parts).map(at).collect(), room: room.then(|| at(99)) }
    }

    #[test]
    fn regions_come_back_and_every_bit_flip_is_refused() {
        for (parts, room) in [(0, true), (1, false), (3, true), (8, true)] {
            let r = sample(parts, room);
            let b = r.encode();
            assert_eq!(Regions::decode(&b).unwrap(), r);
            for bit in 0..b.len() * 8 {
                let mut b = b.to_vec();
                b[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Regions::decode(&b).unwrap_err().code, Code::Protocol, "bit {bit}");
            }
            for cut in 0..b.len() {
                assert!(Regions::decode(&b[..cut]).is_err());
            }
            assert!(Regions::decode(&[&b[..], &[0]].concat()).is_err());
        }
    }

    #[test]
    fn impossible_regions_are_refused() {
        let one = |r: Region| Regions::decode(&Regions { payload: vec![r], room: None }.encode());
        let ok = Region { addr: 4096, key: 1, len: 4096 };
        assert!(one(ok).is_ok());
        for r in [
            Region { len: 0, ..ok },
            Region { len: MAX_PAYLOAD + 1, ..ok },
            Region { addr: u64::MAX - 4095, ..ok },
            Region { addr: u64::MAX, ..ok },
        ] {
            assert_eq!(one(r).unwrap_err().code, Code::Protocol);
        }
        assert!(Regions::decode(&sample(9, false).encode()).is_err());
        let head = |parts: u16, rooms: u16| {
            let mut h = [0; REGIONS_HEAD];
            h[0..2].copy_from_slice(&parts.to_le_bytes());
            h[2..4].copy_from_slice(&rooms.to_le_bytes());
            Regions::rest(&h)
        };
        assert_eq!(head(8, 1).unwrap(), 9 * ENTRY);
        assert!(head(9, 0).is_err() && head(0, 2).is_err() && head(u16::MAX, u16::MAX).is_err());
    }

    #[test]
    fn room_is_asked_for_in_twelve_bytes() {
        let ask = AskRoom { request_id: 1 << 40, len: MAX_PAYLOAD };
        assert_eq!(AskRoom::decode(&ask.encode()).unwrap(), ask);
        let none = AskRoom { len: 0, ..ask };
        let much = AskRoom { len: MAX_PAYLOAD + 1, ..ask };
        for b in [&none.encode()[..], &much.encode(), &ask.encode()[..11], &[0; 13], b""] {
            assert_eq!(AskRoom::decode(b).unwrap_err().code, Code::Protocol);
        }
    }
}
