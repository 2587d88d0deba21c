//! The arithmetic of sealed files: how a file is divided into extents, and the Merkle tree hash
//! over them. See `docs/seal.md`.

use sha2::{Digest as _, Sha256};

/// Bytes of a digest.
pub const DIGEST: usize = 32;
/// A SHA-256 digest.
pub type Digest = [u8; DIGEST];

/// Extent size in bytes of all files up to 1 TiB.
pub const EXTENT: u64 = 4 << 20;
/// Maximum number of extents of one file, so that a manifest never takes more than 8 MiB.
pub const MAX_EXTENTS: u64 = 1 << 18;
/// Digests in one page of a manifest.
pub const PAGE: usize = 1024;

/// Size of each extent, except the last, of a file of `size` bytes: [`EXTENT`], doubled until
/// [`MAX_EXTENTS`] extents are enough.
pub fn extent_size(size: u64) -> u64 {
    EXTENT * size.div_ceil(EXTENT * MAX_EXTENTS).max(1).next_power_of_two()
}

/// Number of extents of a file of `size` bytes.
pub fn extents(size: u64) -> u64 {
    size.div_ceil(extent_size(size))
}

/// Number of pages of its manifest.
pub fn pages(size: u64) -> u64 {
    extents(size).div_ceil(PAGE as u64)
}

/// How many digests page `number` has; 0 beyond the last.
pub fn digests_in(size: u64, number: u64) -> usize {
    let left = extents(size).saturating_sub(number.saturating_mul(PAGE as u64));
    left.min(PAGE as u64) as usize
}

/// Takes the bytes of one extent: a leaf of the tree of RFC 6962, SHA-256 over a zero byte and the
/// extent.
pub struct Leaf(Sha256);

impl Default for Leaf {
    fn default() -> Leaf {
        Leaf(Sha256::new_with_prefix([0]))
    }
}

impl Leaf {
    /// Takes the next bytes of the extent.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
    /// The digest, after all bytes.
    pub fn finish(self) -> Digest {
        self.0.finalize().into()
    }
}

fn node(left: &Digest, right: &Digest) -> Digest {
    Sha256::new_with_prefix([1]).chain_update(left).chain_update(right).finalize().into()
}

/// The Merkle tree hash of RFC 6962 over the extents of a file; without extents it is the SHA-256
/// of nothing.
pub fn root(leaves: &[Digest]) -> Digest {
    let Some(first) = leaves.first() else { return Sha256::digest([]).into() };
    let mut level = leaves.to_vec();
    while level.len() > 1 {
        // A node without a neighbour moves up unchanged, which is where the RFC puts it.
        level = level
            .chunks(2)
            .map(|pair| if let [l, r] = pair { node(l, r) } else { pair[0] })
            .collect();
    }
    level.first().copied().unwrap_or(*first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::MAX_FILE_SIZE;

    #[test]
    fn roots_are_those_of_certificate_transparency() {
        // Leaves and roots from the tests of RFC 6962 implementations.
        let leaves: [&[u8]; 8] = [
            b"",
            b"\x00",
            b"\x10",
            b"\x20\x21",
            b"\x30\x31",
            b"\x40\x41\x42\x43",
            b"\x50\x51\x52\x53\x54\x55\x56\x57",
            b"\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f",
        ];
        let roots = [
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
            "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
            "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
            "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
            "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
            "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
        ];
        let digests: Vec<Digest> = leaves
            .iter()
            .map(|bytes| {
                let mut leaf = Leaf::default();
                bytes.iter().for_each(|b| leaf.update(&[*b]));
                leaf.finish()
            })
            .collect();
        for (n, want) in roots.iter().enumerate() {
            assert_eq!(hex::encode(root(&digests[..n])), *want, "{n} leaves");
        }
    }

    #[test]
    fn extents_are_of_bounded_number() {
        assert_eq!((extent_size(0), extents(0), pages(0), digests_in(0, 0)), (EXTENT, 0, 0, 0));
        assert_eq!((extent_size(1), extents(1), pages(1), digests_in(1, 0)), (EXTENT, 1, 1, 1));
        let tib = 1 << 40;
        assert_eq!((extent_size(tib), extents(tib), pages(tib)), (EXTENT, MAX_EXTENTS, 256));
        assert_eq!(
            (digests_in(tib, 255), digests_in(tib, 256), digests_in(tib, u64::MAX)),
            (PAGE, 0, 0)
        );
        assert_eq!((extent_size(tib + 1), extents(tib + 1)), (2 * EXTENT, MAX_EXTENTS / 2 + 1));
        assert_eq!((pages(tib + 1), digests_in(tib + 1, 128)), (129, 1));
        for size in [MAX_FILE_SIZE, MAX_FILE_SIZE - 1, MAX_FILE_SIZE / 3] {
            assert!(extents(size) <= MAX_EXTENTS && extents(size) > MAX_EXTENTS / 2, "{size}");
            let all: usize = (0..pages(size)).map(|n| digests_in(size, n)).sum();
            assert_eq!(all as u64, extents(size));
        }
    }
}
