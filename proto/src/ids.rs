//! Ids and the names built from them.

use std::{fmt, str::FromStr};

use crate::{Code, Error};

/// Inode id. Bits 63..48 are the shard in which the inode was created (always 0 today), the rest a
/// counter of the namespace state.
pub type Ino = u64;
/// Identifies the bytes of one layout instance of a file; never reused.
pub type DataId = u64;
/// Identifies a chain; never reused.
pub type ChainId = u32;
/// The OST index that `lfs` shows as `obdidx`.
pub type TargetId = u32;
/// Identifies a server: the Raft id of a metadata server, from 1,001 on a storage server.
pub type NodeId = u32;
/// 0 is "no session".
pub type SessionId = u64;

/// The root directory.
pub const ROOT_INO: Ino = 1;
/// A target that has no id yet.
pub const TARGET_UNASSIGNED: TargetId = u32::MAX;

/// The shard that owns an inode.
pub const fn shard_of(ino: Ino) -> u16 {
    (ino >> 48) as u16
}

/// One chunk of a file: `index` counts chunks from the start of the file (see [`crate::layout`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// The file.
    pub ino: Ino,
    /// Its data.
    pub data: DataId,
    /// Its place in the file.
    pub index: u64,
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{:x}.{}", self.ino, self.data, self.index)
    }
}

/// Lustre-style file identifier, `[seq:oid:ver]`, a bijection of the inode id: `seq = 0x200000400 +
/// (ino >> 32)`, `oid = ino & 0xffffffff`, `ver = 0`; the root is `[0x200000007:0x1:0x0]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fid {
    /// The sequence.
    pub seq: u64,
    /// The object within the sequence.
    pub oid: u32,
    /// The version, always 0.
    pub ver: u32,
}

const FID_SEQ_ROOT: u64 = 0x2_0000_0007;
const FID_SEQ_NORMAL: u64 = 0x2_0000_0400;

impl Fid {
    /// The FID of an inode.
    pub const fn from_ino(ino: Ino) -> Fid {
        if ino == ROOT_INO {
            return Fid { seq: FID_SEQ_ROOT, oid: 1, ver: 0 };
        }
        Fid { seq: FID_SEQ_NORMAL + (ino >> 32), oid: ino as u32, ver: 0 }
    }

    /// The inode id, or `EINVAL` for a FID that no inode here can have.
    pub fn to_ino(self) -> Result<Ino, Error> {
        let bad = || Error::new(Code::Inval, format!("{self} is not a FID of this file system"));
        if self.ver != 0 {
            return Err(bad());
        }
        if self.seq == FID_SEQ_ROOT {
            return if self.oid == 1 { Ok(ROOT_INO) } else { Err(bad()) };
        }
        let high = self
            .seq
            .checked_sub(FID_SEQ_NORMAL)
            .filter(|h| *h <= u64::from(u32::MAX))
            .ok_or_else(bad)?;
        match (high << 32) | u64::from(self.oid) {
            0 | ROOT_INO => Err(bad()),
            ino => Ok(ino),
        }
    }
}

impl fmt::Display for Fid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}:{:#x}:{:#x}]", self.seq, self.oid, self.ver)
    }
}

impl FromStr for Fid {
    type Err = Error;

    /// Accepts `[0x200000403:0x11f:0x0]` with or without brackets, hexadecimal with or without
    /// `0x`.
    fn from_str(s: &str) -> Result<Fid, Error> {
        let bad = || {
            Error::new(
                Code::Inval,
                format!("'{s}' is not a FID; expected [seq:oid:ver] in hexadecimal"),
            )
        };
        let inner = match (s.strip_prefix('['), s.ends_with(']')) {
            (Some(rest), true) => &rest[..rest.len() - 1],
            (None, false) => s,
            _ => return Err(bad()),
        };
        let mut parts =
            inner.split(':').map(|p| u64::from_str_radix(p.trim_start_matches("0x"), 16));
        let mut next = || parts.next().and_then(Result::ok).ok_or_else(bad);
        let (seq, oid, ver) = (next()?, next()?, next()?);
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Fid {
            seq,
            oid: u32::try_from(oid).map_err(|_| bad())?,
            ver: u32::try_from(ver).map_err(|_| bad())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fid_is_a_bijection() {
        for ino in [1, 2, 0xffff_ffff, 0x1_0000_0000, 0x0001_0000_0000_0005, u64::MAX] {
            let fid = Fid::from_ino(ino);
            assert_eq!(fid.to_ino().unwrap(), ino);
            assert_eq!(fid.to_string().parse::<Fid>().unwrap(), fid);
        }
        assert_eq!(Fid::from_ino(1).to_string(), "[0x200000007:0x1:0x0]");
    }

    #[test]
    fn foreign_fids_are_refused() {
        for s in [
            "[0x200000007:0x2:0x0]",
            "[0x1:0x1:0x0]",
            "[0x200000400:0x5:0x1]",
            "[0x200000400:0x1:0x0]",
        ] {
            assert_eq!(s.parse::<Fid>().unwrap().to_ino().unwrap_err().code, Code::Inval, "{s}");
        }
        for s in ["", "[1:2]", "[1:2:3:4]", "1:2:3]", "[x:1:2]", "[1:100000000:0]"] {
            assert!(s.parse::<Fid>().is_err(), "{s}");
        }
    }
}
