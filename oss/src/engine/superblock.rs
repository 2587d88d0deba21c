//! The first blocks of a device: the target's identity. There are two copies, written in turn, so
//! that one is intact at any time. Specified in `docs/formats.md`, "Chunk store".

use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Error, Result, checksum::crc32c};

use crate::device::{BLOCK, Device};

const MAGIC: &[u8; 8] = b"STRAKEOS";
const FORMAT: u32 = 1;
const LEN: usize = BLOCK as usize;
const NAME_AT: usize = 72;
const NAME_MAX: usize = 255;
const INCARNATION_AT: usize = LEN - 12;
/// First block that holds chunk data. The blocks below are the superblock's or reserved.
pub const DATA_START: u64 = 256;

/// Which cluster and node a target belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetIdentity {
    /// All zeros until the target has joined a cluster.
    pub fs_uuid: [u8; 16],
    /// Chosen when the target was made; never changes.
    pub target_uuid: [u8; 16],
    /// [`strake_proto::ids::TARGET_UNASSIGNED`] until the mds has assigned one.
    pub target_id: u32,
    /// Name of the node it belongs to, at most 255 bytes.
    pub node: String,
    /// Incarnation of the metadata group that it last registered with. Only this group, or one of a
    /// later incarnation, may use the target.
    pub incarnation: u64,
}

/// What the first blocks of a target say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Counts writes; the copy with the higher one is current, and lies in block `sequence % 2`.
    pub sequence: u64,
    /// Blocks of the device this target uses, from block 0.
    pub blocks: u64,
    /// Which cluster and node the target belongs to.
    pub identity: TargetIdentity,
}

fn bad(m: impl Into<String>) -> Error {
    Error::new(Code::Corrupt, m)
}

impl Superblock {
    /// `Inval` for a node name of more than 255 bytes.
    pub fn encode(&self) -> Result<[u8; LEN]> {
        let (id, mut b) = (&self.identity, [0u8; LEN]);
        if id.node.len() > NAME_MAX {
            return Err(Error::new(
                Code::Inval,
                format!("node name {:?} is longer than {NAME_MAX} bytes", id.node),
            ));
        }
        b[0..8].copy_from_slice(MAGIC);
        b[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        b[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
        b[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        b[24..32].copy_from_slice(&self.blocks.to_le_bytes());
        b[32..48].copy_from_slice(&id.fs_uuid);
        b[48..64].copy_from_slice(&id.target_uuid);
        b[64..68].copy_from_slice(&id.target_id.to_le_bytes());
        b[68..70].copy_from_slice(&(id.node.len() as u16).to_le_bytes());
        b[NAME_AT..NAME_AT + id.node.len()].copy_from_slice(id.node.as_bytes());
        b[INCARNATION_AT..LEN - 4].copy_from_slice(&id.incarnation.to_le_bytes());
        let crc = crc32c(&b[..LEN - 4]);
        b[LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        Ok(b)
    }

    /// `Corrupt` for bytes that are no superblock, `OpNotSupp` for one of a newer format.
    pub fn decode(b: &[u8]) -> Result<Superblock> {
        let b: &[u8; LEN] = b.try_into().map_err(|_| bad("a superblock has 4096 bytes"))?;
        let u32_at = |i: usize| b[i..i + 4].iter().rev().fold(0u32, |v, x| v << 8 | u32::from(*x));
        let u64_at = |i: usize| b[i..i + 8].iter().rev().fold(0u64, |v, x| v << 8 | u64::from(*x));
        let uuid_at = |i: usize| std::array::from_fn(|n| b[i + n]);
        if &b[..8] != MAGIC {
            return Err(bad("no StrakeFS target is on this device"));
        }
        if crc32c(&b[..LEN - 4]) != u32_at(LEN - 4) {
            return Err(bad("superblock damaged (checksum differs)"));
        }
        if u32_at(8) != FORMAT || u32_at(12) != BLOCK as u32 {
            let m = format!(
                "target has format {} with {}-byte blocks, this version knows format {FORMAT}; use a newer strake",
                u32_at(8),
                u32_at(12)
            );
            return Err(Error::new(Code::OpNotSupp, m));
        }
        let name = usize::from(u32_at(68) as u16);
        let node = b
            .get(NAME_AT..NAME_AT + name)
            .filter(|_| name <= NAME_MAX)
            .ok_or_else(|| bad("node name too long"))?;
        Ok(Superblock {
            sequence: u64_at(16),
            blocks: u64_at(24),
            identity: TargetIdentity {
                fs_uuid: uuid_at(32),
                target_uuid: uuid_at(48),
                target_id: u32_at(64),
                node: String::from_utf8(node.to_vec())
                    .map_err(|_| bad("node name is not UTF-8"))?,
                incarnation: u64_at(INCARNATION_AT),
            },
        })
    }

    /// The newer of the two copies that can be read.
    pub async fn read(device: &dyn Device, pool: &Pool) -> Result<Superblock> {
        let mut best: Result<Superblock> = Err(bad("no superblock"));
        for copy in 0..2 {
            let read = device.read(copy * BLOCK, pool.get_now(LEN)).await;
            match (read.and_then(|b| Superblock::decode(&b)), &best) {
                (Ok(s), Ok(b)) if s.sequence <= b.sequence => {}
                (Ok(s), _) => best = Ok(s),
                // A newer format decides even if the other copy has our format.
                (Err(e), _) if e.code == Code::OpNotSupp => return Err(e.context(device.name())),
                (Err(e), Ok(_)) => tracing::warn!("{}: superblock copy {copy}: {e}", device.name()),
                (Err(e), Err(_)) => best = Err(e),
            }
        }
        let s = best.map_err(|e| e.context(device.name()))?;
        if s.blocks <= DATA_START || s.blocks > device.capacity() / BLOCK {
            let m = format!(
                "{}: formatted with {} bytes but the device has {}; was it truncated or swapped?",
                device.name(),
                s.blocks.saturating_mul(BLOCK),
                device.capacity()
            );
            return Err(bad(m));
        }
        Ok(s)
    }

    /// Writes the copy that is not current, durably.
    pub async fn write(&self, device: &dyn Device, pool: &Pool) -> Result<()> {
        let mut b = pool.get_now(LEN);
        b.copy_from_slice(&self.encode()?);
        let buf: Buf = b.freeze();
        device.write(self.sequence % 2 * BLOCK, vec![buf]).await?;
        device.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        MemDevice,
        mem::{Op, Tear},
    };

    fn sample(sequence: u64) -> Superblock {
        let identity = TargetIdentity {
            fs_uuid: [0xf5; 16],
            target_uuid: [0x7a; 16],
            target_id: 3,
            node: "oss-é1".into(),
            incarnation: 0,
        };
        Superblock { sequence, blocks: 1024, identity }
    }

    #[test]
    fn bytes_are_fixed_for_ever() {
        let b = sample(2).encode().unwrap();
        let text = hex::encode(&b[..80]);
        assert_eq!(&text[..64], "535452414b454f53010000000010000002000000000000000004000000000000");
        assert_eq!(
            &text[64..128],
            "f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f57a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7a"
        );
        assert_eq!(&text[128..], "03000000070000006f73732dc3a93100");
        assert!(b[80..LEN - 4].iter().all(|x| *x == 0));
        assert_eq!(u32::from_le_bytes(b[LEN - 4..].try_into().unwrap()), 0x7e92_54ed);
        assert_eq!(Superblock::decode(&b).unwrap(), sample(2));
        let mut later = sample(2);
        later.identity.incarnation = 0x0102_0304_0506_0708;
        let b = later.encode().unwrap();
        assert_eq!(b[LEN - 12..LEN - 4], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(Superblock::decode(&b).unwrap(), later);
    }

    #[test]
    fn every_flip_is_found_and_a_newer_format_is_refused() {
        let b = sample(1).encode().unwrap();
        for bit in 0..LEN * 8 {
            let mut c = b;
            c[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Superblock::decode(&c).unwrap_err().code, Code::Corrupt, "bit {bit}");
        }
        let mut newer = b;
        newer[8] = 2;
        let crc = crc32c(&newer[..LEN - 4]);
        newer[LEN - 4..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Superblock::decode(&newer).unwrap_err().code, Code::OpNotSupp);
        let mut long = sample(1);
        long.identity.node = "x".repeat(256);
        assert_eq!(long.encode().unwrap_err().code, Code::Inval);
    }

    #[tokio::test]
    async fn one_copy_is_whole_at_any_time() {
        let pool = Pool::default();
        for seed in 0..50 {
            let d = MemDevice::new(1024 * BLOCK);
            sample(1).write(&d, &pool).await.unwrap();
            d.fail(Op::Flush, 0, Code::Io);
            sample(2).write(&d, &pool).await.unwrap_err();
            d.crash(seed, Tear::Sector);
            let s = Superblock::read(&d, &pool).await.unwrap();
            assert!(s == sample(1) || s == sample(2));
            sample(3).write(&d, &pool).await.unwrap();
            assert_eq!(Superblock::read(&d, &pool).await.unwrap(), sample(3));
        }
        let blank = MemDevice::new(1024 * BLOCK);
        assert_eq!(Superblock::read(&blank, &pool).await.unwrap_err().code, Code::Corrupt);
    }
}
