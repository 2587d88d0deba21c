//! CRC32C per 4 KiB block: computed once by the writer, carried, stored beside the extent, checked
//! by every reader.

use std::sync::OnceLock;

use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};

/// Bytes one checksum covers. Blocks are aligned to multiples of this in the chunk.
pub const BLOCK: usize = 4096;

/// CRC32C (Castagnoli, reflected, as in RFC 3720) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of `a` followed by `b`; much less work than [`combine`].
pub fn crc32c_both(a: &[u8], b: &[u8]) -> u32 {
    let mut d = Digest::new(CrcAlgorithm::Crc32Iscsi);
    d.update(a);
    d.update(b);
    d.finalize() as u32
}

/// The checksum of `a` followed by `b`, from their checksums.
pub fn combine(a: u32, b: u32, len_b: usize) -> u32 {
    checksum_combine(CrcAlgorithm::Crc32Iscsi, u64::from(a), u64::from(b), len_b as u64) as u32
}

/// Number of pieces a range is cut into at block borders.
pub fn pieces(offset: u64, len: usize) -> usize {
    if len == 0 {
        return 0;
    }
    let first = offset / BLOCK as u64;
    let last = (offset + len as u64 - 1) / BLOCK as u64;
    (last - first + 1) as usize
}

/// Calls `found` with the checksum of each block that a range starting at `offset` in its chunk
/// touches, in order.
fn each_sum<'a>(
    offset: u64,
    bytes: impl IntoIterator<Item = &'a [u8]>,
    mut found: impl FnMut(u32),
) {
    let mut room = BLOCK - (offset % BLOCK as u64) as usize;
    let mut open: Option<u32> = None;
    for mut seg in bytes {
        while !seg.is_empty() {
            let n = room.min(seg.len());
            let crc = crc32c(&seg[..n]);
            open = Some(open.map_or(crc, |o| combine(o, crc, n)));
            seg = &seg[n..];
            room -= n;
            if room == 0 {
                open.take().into_iter().for_each(&mut found);
                room = BLOCK;
            }
        }
    }
    open.into_iter().for_each(found);
}

/// Checksums of a range that starts at `offset` in its chunk: one per block it touches, the first
/// and the last of which may be partial. `bytes` may come in segments of any size.
pub fn block_sums<'a>(offset: u64, bytes: impl IntoIterator<Item = &'a [u8]>) -> Vec<u32> {
    let mut sums = Vec::new();
    each_sum(offset, bytes, |s| sums.push(s));
    sums
}

/// Index of the first piece whose checksum differs, `None` when all match. `Some(0)` if the counts
/// differ.
pub fn verify<'a>(
    offset: u64,
    bytes: impl IntoIterator<Item = &'a [u8]>,
    sums: &[u32],
) -> Option<usize> {
    let (mut n, mut bad) = (0, None);
    each_sum(offset, bytes, |s| {
        if bad.is_none() && sums.get(n) != Some(&s) {
            bad = Some(n);
        }
        n += 1;
    });
    if n == sums.len() { bad } else { Some(0) }
}

/// How a word at the start of a block of zeros changes the block's checksum, as a basis: for each
/// highest bit of the change, the change and the word.
fn effects() -> (u32, [(u32, u32); 32]) {
    let sum_of = |word: u32| {
        let mut block = [0; BLOCK];
        block[..4].copy_from_slice(&word.to_le_bytes());
        crc32c(&block)
    };
    let zero = sum_of(0);
    let mut basis = [(0, 0); 32];
    for bit in 0..32 {
        let (mut effect, mut word) = (sum_of(1 << bit) ^ zero, 1u32 << bit);
        while effect != 0 {
            let top = effect.ilog2() as usize;
            if basis[top] == (0, 0) {
                basis[top] = (effect, word);
                break;
            }
            (effect, word) = (effect ^ basis[top].0, word ^ basis[top].1);
        }
    }
    (zero, basis)
}

/// The first four bytes of a block that is otherwise zeros and has this checksum. They exist for
/// every checksum: a 32-bit CRC is linear, and no two values of four adjacent bytes give the same
/// change.
pub fn block_with_sum(sum: u32) -> [u8; 4] {
    static EFFECTS: OnceLock<(u32, [(u32, u32); 32])> = OnceLock::new();
    let (zero, basis) = EFFECTS.get_or_init(effects);
    let (mut left, mut word) = (sum ^ zero, 0);
    for bit in (0..32).rev().filter(|bit| basis[*bit].0 != 0) {
        if left >> bit & 1 == 1 {
            (left, word) = (left ^ basis[bit].0, word ^ basis[bit].1);
        }
    }
    debug_assert_eq!(left, 0);
    word.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283); // RFC 3720 check value
        for n in 0..=9 {
            let (a, b) = b"123456789".split_at(n);
            assert_eq!(
                (crc32c_both(a, b), combine(crc32c(a), crc32c(b), b.len())),
                (0xe306_9283, 0xe306_9283)
            );
        }
    }

    #[test]
    fn there_is_a_block_for_each_checksum() {
        let mut sum = 1u32;
        for _ in 0..1000 {
            sum = sum.wrapping_mul(0x9e37_79b9).rotate_left(7) ^ 0x5bd1_e995;
            for s in [sum, !sum, 0, u32::MAX] {
                let mut block = [0; BLOCK];
                block[..4].copy_from_slice(&block_with_sum(s));
                assert_eq!(crc32c(&block), s);
            }
        }
        assert_eq!(block_with_sum(crc32c(&[0; BLOCK])), [0; 4]);
    }

    #[test]
    fn segments_do_not_matter_and_any_flip_is_found() {
        let data: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for offset in [0u64, 1, 4095, 4096, 10_000] {
            let whole = block_sums(offset, [&data[..]]);
            assert_eq!(whole.len(), pieces(offset, data.len()));
            let parts: Vec<&[u8]> = data.chunks(777).collect();
            assert_eq!(block_sums(offset, parts), whole);
            let mut bad = data.clone();
            bad[9_999] ^= 4;
            assert!(verify(offset, [&bad[..]], &whole).is_some());
            assert_eq!(verify(offset, [&data[..]], &whole), None);
        }
    }
}
