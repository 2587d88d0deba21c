//! The frame of every connection after the handshake: a 64-byte header, a control body, an optional
//! payload.
//!
//! All integers are little-endian. The header is covered by its own CRC32C, the body by `body_crc`.
//! The payload is covered end to end by block checksums in the body of data requests. `payload_crc`
//! is the CRC32C of the same bytes (combined from the block checksums where they are known), or 0
//! if [`FLAG_PAYLOAD_SUMMED`] is not set.

use crate::{Code, Error, Result, checksum::crc32c};

/// The first four bytes of each frame.
pub const MAGIC: u32 = u32::from_le_bytes(*b"STRK");
/// Bytes of a header.
pub const HEADER_LEN: usize = 64;
/// Maximum body length that a receiver accepts.
pub const MAX_BODY: u32 = 4 << 20;
/// Maximum payload length that a receiver accepts: one whole chunk.
pub const MAX_PAYLOAD: u32 = 16 << 20;

/// `payload_crc` is set and the receiver checks it (for payloads without block checksums of their
/// own).
pub const FLAG_PAYLOAD_SUMMED: u8 = 1;
/// Requests: regions of the sender's memory follow the body. Responses: the payload does not follow
/// the body, but was written to the requester's memory. Only on transports that support it (RDMA).
pub const FLAG_REGIONS: u8 = 2;

/// A part of the requester's memory that the oss may read or write directly (RDMA). Empty on TCP,
/// where bytes follow the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The address that the transport uses for it.
    pub addr: u64,
    /// The transport's key to it.
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Asks for something.
    Request = 1,
    /// The answer to a request.
    Response = 2,
    /// Reserved.
    Hello = 3,
    /// No more requests on this connection; those in flight are answered.
    GoAway = 4,
    /// A sign of life, sent while the other end waits for an answer. Needs no answer.
    KeepAlive = 5,
}

/// The first bytes of a frame, which say what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The wire version of the connection.
    pub version: u16,
    /// What the frame is.
    pub kind: Kind,
    /// [`FLAG_PAYLOAD_SUMMED`] | [`FLAG_REGIONS`].
    pub flags: u8,
    /// The request, see [`crate::opcode`].
    pub opcode: u16,
    /// Responses: 0 = ok, else a [`Code`]; the body is then a `Status` message.
    pub status: u16,
    /// Requests: how long the sender will wait, in milliseconds; 0 = no limit.
    pub deadline_ms: u32,
    /// Chosen by the requester, and repeated in the response.
    pub request_id: u64,
    /// Bytes of the body.
    pub body_len: u32,
    /// Bytes of the payload.
    pub payload_len: u32,
    /// CRC32C of the body.
    pub body_crc: u32,
    /// CRC32C of the payload, if [`FLAG_PAYLOAD_SUMMED`] is set.
    pub payload_crc: u32,
    /// Copied from a user's operation to every request that it causes.
    pub trace: u64,
}

impl Header {
    /// Encodes it, with a checksum over the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut b = [0u8; HEADER_LEN];
        b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4..6].copy_from_slice(&self.version.to_le_bytes());
        b[6] = self.kind as u8;
        b[7] = self.flags;
        b[8..10].copy_from_slice(&self.opcode.to_le_bytes());
        b[10..12].copy_from_slice(&self.status.to_le_bytes());
        b[12..16].copy_from_slice(&self.deadline_ms.to_le_bytes());
        b[16..24].copy_from_slice(&self.request_id.to_le_bytes());
        b[24..28].copy_from_slice(&self.body_len.to_le_bytes());
        b[28..32].copy_from_slice(&self.payload_len.to_le_bytes());
        b[32..36].copy_from_slice(&self.body_crc.to_le_bytes());
        b[36..40].copy_from_slice(&self.payload_crc.to_le_bytes());
        b[40..48].copy_from_slice(&self.trace.to_le_bytes());
        let crc = crc32c(&b[..60]);
        b[60..64].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Checks magic, checksum, lengths and kind; after an error the byte stream is unusable.
    pub fn decode(b: &[u8; HEADER_LEN]) -> Result<Header> {
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u16_at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        let u64_at = |i: usize| (u64::from(u32_at(i + 4)) << 32) | u64::from(u32_at(i));
        let bad = |m: String| Error::new(Code::Protocol, m);
        if u32_at(0) != MAGIC {
            return Err(bad(format!("not a StrakeFS frame (magic {:#010x})", u32_at(0))));
        }
        if u32_at(60) != crc32c(&b[..60]) {
            return Err(bad("frame header checksum mismatch".into()));
        }
        let kind = match b[6] {
            1 => Kind::Request,
            2 => Kind::Response,
            3 => Kind::Hello,
            4 => Kind::GoAway,
            5 => Kind::KeepAlive,
            k => return Err(bad(format!("unknown frame kind {k}"))),
        };
        let h = Header {
            version: u16_at(4),
            kind,
            flags: b[7],
            opcode: u16_at(8),
            status: u16_at(10),
            deadline_ms: u32_at(12),
            request_id: u64_at(16),
            body_len: u32_at(24),
            payload_len: u32_at(28),
            body_crc: u32_at(32),
            payload_crc: u32_at(36),
            trace: u64_at(40),
        };
        if h.body_len > MAX_BODY || h.payload_len > MAX_PAYLOAD {
            return Err(bad(format!(
                "frame too large (body {}, payload {})",
                h.body_len, h.payload_len
            )));
        }
        Ok(h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            version: 1,
            kind: Kind::Request,
            flags: FLAG_PAYLOAD_SUMMED,
            opcode: 0x102,
            status: 0,
            deadline_ms: 5000,
            request_id: 0x0102_0304_0506_0708,
            body_len: 100,
            payload_len: 1 << 20,
            body_crc: 7,
            payload_crc: 9,
            trace: 42,
        }
    }

    #[test]
    fn round_trip_and_every_bit_flip_is_refused() {
        let bytes = sample().encode();
        assert_eq!(Header::decode(&bytes).unwrap(), sample());
        for bit in 0..HEADER_LEN * 8 {
            let mut b = bytes;
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&b).unwrap_err().code, Code::Protocol, "bit {bit}");
        }
    }

    #[test]
    fn oversize_is_refused() {
        for (body, payload) in [(MAX_BODY + 1, 0), (0, MAX_PAYLOAD + 1), (u32::MAX, u32::MAX)] {
            let h = Header { body_len: body, payload_len: payload, ..sample() };
            assert!(Header::decode(&h.encode()).is_err());
        }
    }
}
