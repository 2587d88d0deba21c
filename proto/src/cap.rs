//! Capabilities: a token that a data request must carry, so that a hand-written client reaches only
//! what it was given. The mds makes them, an oss checks them; both know the key, clients do not.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{Code, DataId, Error, Ino, Result, SessionId, bound::Bound};

/// Bytes of an encoded capability.
pub const CAP_LEN: usize = 64;

/// Bits of [`Capability::rights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(pub u32);

impl Rights {
    /// To read data.
    pub const READ: Rights = Rights(1);
    /// To write data.
    pub const WRITE: Rights = Rights(2);
    /// To truncate, and to remove chunks.
    pub const TRIM: Rights = Rights(4);
    /// All rights that there are.
    pub const ALL: Rights = Rights(RIGHTS);

    /// Whether these rights include all of the others.
    pub const fn has(self, other: Rights) -> bool {
        self.0 & other.0 == other.0
    }
    /// Both together.
    #[must_use]
    pub const fn and(self, other: Rights) -> Rights {
        Rights(self.0 | other.0)
    }
}

/// What a client shows to a storage server: which rights to which file a session has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The file.
    pub ino: Ino,
    /// Its data.
    pub data: DataId,
    /// Whose capability it is.
    pub session: SessionId,
    /// Refused when below the session's minimum epoch at the oss (eviction).
    pub session_epoch: u64,
    /// Milliseconds since 1970-01-01 UTC after which it is refused.
    pub expiry_ms: u64,
    /// What it allows.
    pub rights: Rights,
    /// The chains on which the file's chunks may be.
    pub bound: Bound,
    /// The first log entry that was not considered when the right was checked, see [`as_of`]. 0:
    /// not given, by a metadata server of an older version. If this entry or a later one ends the
    /// right, it ends the capability.
    pub as_of: u32,
}

impl Capability {
    /// `BadCap` if it has expired. `now_ms`: milliseconds since 1970-01-01 UTC.
    pub fn check_expiry(&self, now_ms: u64) -> Result<()> {
        if now_ms > self.expiry_ms {
            return Err(Error::new(Code::BadCap, "capability expired; open the file again"));
        }
        Ok(())
    }
}

/// A log index as capabilities store it: modulo 2^32. Where that is 0, the index before it is used,
/// which is the safe direction.
pub const fn as_of(index: u64) -> u32 {
    match index as u32 {
        0 => u32::MAX,
        n => n,
    }
}

/// An index before that of every capability that is still valid, for a result whose own index is
/// unknown: a right of this index counts as ended by any ending.
pub const fn long_ago(applied: u64) -> u64 {
    applied.wrapping_sub(1 << 30)
}

/// The log index from which [`as_of`] was made, given a known index that is less than 2^31 entries
/// away. 0 for an index before the beginning of the log.
pub const fn index_near(as_of: u32, known: u64) -> u64 {
    let ahead = as_of.wrapping_sub(known as u32).cast_signed() as i64;
    let near = known.wrapping_add_signed(ahead);
    if ahead < 0 && near > known { 0 } else { near }
}

/// The rights are in the lowest bits of their word, the bound in the others.
const RIGHTS_BITS: u32 = 3;
const RIGHTS: u32 = (1 << RIGHTS_BITS) - 1;

/// Key for making and checking capabilities, derived from the cluster key.
#[derive(Clone)]
pub struct CapKey([u8; 32]);

fn mac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    // HMAC pads a short key with zeros to the hash's block of 64 bytes; doing it here makes the
    // length fit by type.
    let mut block = [0u8; 64];
    block[..32].copy_from_slice(key);
    let mut m = Hmac::<Sha256>::new(&block.into());
    for p in parts {
        m.update(p);
    }
    m.finalize().into_bytes().into()
}

/// Derives a key for one purpose from another key: HMAC-SHA256 over the purpose's name (RFC 2104,
/// NIST SP 800-108 style).
pub fn derive_key(key: &[u8; 32], purpose: &str) -> [u8; 32] {
    mac(key, &[purpose.as_bytes()])
}

/// HMAC-SHA256 of the concatenated parts.
pub fn hmac_sha256(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    mac(key, parts)
}

/// Comparison whose time does not depend on where the first difference is.
pub fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0u8, |d, (x, y)| d | (x ^ y)) == 0
}

impl CapKey {
    /// The key of a cluster.
    pub fn from_cluster_key(cluster_key: &[u8; 32]) -> CapKey {
        CapKey(derive_key(cluster_key, "strake capability v1"))
    }

    /// Encodes a capability and signs it.
    pub fn seal(&self, c: &Capability) -> [u8; CAP_LEN] {
        let mut b = [0u8; CAP_LEN];
        b[0..8].copy_from_slice(&c.ino.to_le_bytes());
        b[8..16].copy_from_slice(&c.data.to_le_bytes());
        b[16..24].copy_from_slice(&c.session.to_le_bytes());
        b[24..32].copy_from_slice(&c.session_epoch.to_le_bytes());
        b[32..40].copy_from_slice(&c.expiry_ms.to_le_bytes());
        let word = c.rights.0 & RIGHTS | c.bound.encode() << RIGHTS_BITS;
        b[40..44].copy_from_slice(&word.to_le_bytes());
        b[44..48].copy_from_slice(&c.as_of.to_le_bytes());
        let tag = mac(&self.0, &[&b[..48]]);
        b[48..64].copy_from_slice(&tag[..16]);
        b
    }

    /// Checks the MAC and the expiry. The result says which rights hold for which file.
    pub fn open(&self, b: &[u8], now_ms: u64) -> Result<Capability> {
        let bad = |m: &str| Error::new(Code::BadCap, m);
        let b: &[u8; CAP_LEN] = b.try_into().map_err(|_| bad("capability is not 64 bytes"))?;
        let tag = mac(&self.0, &[&b[..48]]);
        if !same_bytes(&tag[..16], &b[48..]) {
            return Err(bad("capability was not signed by this cluster's metadata servers"));
        }
        let c = peek(b);
        c.check_expiry(now_ms)?;
        Ok(c)
    }
}

/// The fields without any check, for the client that was given it.
pub fn peek(b: &[u8; CAP_LEN]) -> Capability {
    let u64_at = |i: usize| u64::from_le_bytes(b[i..i + 8].try_into().unwrap_or_default());
    let word = u64_at(40) as u32;
    Capability {
        ino: u64_at(0),
        data: u64_at(8),
        session: u64_at(16),
        session_epoch: u64_at(24),
        expiry_ms: u64_at(32),
        rights: Rights(word & RIGHTS),
        bound: Bound::decode(word >> RIGHTS_BITS),
        as_of: (u64_at(40) >> 32) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forged_changed_and_expired_capabilities_are_refused() {
        let key = CapKey::from_cluster_key(&[7; 32]);
        let cap = Capability {
            ino: 5,
            data: 9,
            session: 3,
            session_epoch: 1,
            expiry_ms: 1000,
            rights: Rights::READ.and(Rights::WRITE),
            bound: Bound::One { chain: 77, bits: 30 },
            as_of: 0x8000_0001,
        };
        let sealed = key.seal(&cap);
        assert_eq!(key.open(&sealed, 1000).unwrap(), cap);
        assert_eq!(peek(&sealed), cap);
        assert!(key.open(&sealed, 1001).is_err());
        assert!(CapKey::from_cluster_key(&[8; 32]).open(&sealed, 0).is_err());
        assert!(key.open(&sealed[..63], 0).is_err());
        for bit in 0..CAP_LEN * 8 {
            let mut b = sealed;
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(key.open(&b, 0).unwrap_err().code, Code::BadCap, "bit {bit}");
        }
    }

    #[test]
    fn indices_are_told_from_those_around_them_across_the_end_of_32_bits() {
        let end = 1u64 << 32;
        for known in [0, 5, end - 3, end, end + 3, 7 * end + (1 << 31)] {
            for index in [known.saturating_sub(2000), known, known + 1, known + 100_000] {
                let near = index_near(as_of(index), known);
                assert_eq!(
                    near,
                    if index % end == 0 { index.saturating_sub(1) } else { index },
                    "{index} at {known}"
                );
                assert_ne!(as_of(index), 0);
            }
            assert!(index_near(as_of(long_ago(known)), known) < known.max(1));
        }
    }
}
