//! Private data of the connection request, its acceptance and its rejection: both ends state what
//! they support before anything is set up. Specified in `docs/formats.md`.

use strake_proto::{Code, Error, Result};

/// First bytes of a greeting.
pub const MAGIC: [u8; 8] = *b"STRAKERD";
/// Length of a greeting, bytes.
pub const GREETING_LEN: usize = 24;
/// Version of the layer below the frames; the frames have their own version.
const VERSION: u16 = 1;

/// What one end accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Maximum message length that it accepts.
    pub message: u32,
    /// Number of messages that the other end may send before it is told that they were received.
    pub credits: u16,
    /// 0, or the [`Code`] of a rejection.
    pub status: u16,
}

impl Greeting {
    /// As it is sent.
    pub fn encode(&self) -> [u8; GREETING_LEN] {
        let mut b = [0; GREETING_LEN];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&VERSION.to_le_bytes());
        b[10..12].copy_from_slice(&self.status.to_le_bytes());
        b[12..14].copy_from_slice(&self.credits.to_le_bytes());
        b[16..20].copy_from_slice(&self.message.to_le_bytes());
        b
    }

    /// Whether the private data are empty: a kernel sends this for a process that ended before it
    /// answered.
    pub fn is_none(b: &[u8]) -> bool {
        b.iter().all(|b| *b == 0)
    }

    /// Reads what [`Greeting::encode`] made. Private data arrive padded with zeros to the length
    /// that the network reserves for them. `Protocol`: another protocol or version, or limits with
    /// which no frame can be sent.
    pub fn decode(b: &[u8]) -> Result<Greeting> {
        let other =
            || Error::new(Code::Protocol, "the other end does not speak StrakeFS over RDMA");
        let b = b.first_chunk::<GREETING_LEN>().ok_or_else(other)?;
        if !b.starts_with(&MAGIC) {
            return Err(other());
        }
        let at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        if at(8) != VERSION {
            let m = format!(
                "the other end speaks version {} of the RDMA greeting, this one {VERSION}",
                at(8)
            );
            return Err(Error::new(Code::Protocol, m));
        }
        let g = Greeting {
            message: u32::from_le_bytes([b[16], b[17], b[18], b[19]]),
            credits: at(12),
            status: at(10),
        };
        if g.status == 0 && (g.credits < 2 || g.message < 64) {
            let m = format!("the other end accepts {} messages of {} bytes", g.credits, g.message);
            return Err(Error::new(Code::Protocol, m));
        }
        Ok(g)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_come_back_padded_or_not() {
        let g = Greeting { message: 4096, credits: 32, status: 0 };
        assert_eq!(Greeting::decode(&g.encode()).unwrap(), g);
        assert_eq!(Greeting::decode(&[&g.encode()[..], &[0; 32]].concat()).unwrap(), g);
        let no = Greeting { status: Code::Overloaded as u16, credits: 0, message: 0 };
        assert_eq!(Greeting::decode(&no.encode()).unwrap(), no);
    }

    #[test]
    fn what_is_none_is_refused() {
        let good = Greeting { message: 4096, credits: 32, status: 0 };
        for cut in 0..GREETING_LEN {
            assert_eq!(Greeting::decode(&good.encode()[..cut]).unwrap_err().code, Code::Protocol);
        }
        for bit in 0..10 * 8 {
            let mut b = good.encode();
            b[bit / 8] ^= 1 << (bit % 8);
            assert!(Greeting::decode(&b).is_err(), "bit {bit}");
        }
        for g in [Greeting { credits: 1, ..good }, Greeting { message: 63, ..good }] {
            assert!(Greeting::decode(&g.encode()).is_err());
        }
        assert!(Greeting::decode(&[0xff; 56]).is_err());
        assert!(
            Greeting::is_none(&[])
                && Greeting::is_none(&[0; 148])
                && !Greeting::is_none(&good.encode())
        );
    }
}
