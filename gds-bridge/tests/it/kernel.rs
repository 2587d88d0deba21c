//! Runs the committed kernel text in an interpreter for the part of PTX that it uses, and compares
//! the results with the checksum library that the client uses. This shows that the text computes
//! the right sums; only a GPU can show that drivers accept it.

use crate::ptx::{Kernel, Memory};
use proptest::prelude::*;
use strake_proto::checksum::{combine, crc32c};

const TEXT: &str = include_str!("../../src/cuda/crc32c.ptx");
const DATA: u64 = 0x7f00_0000_0000;
const SUMS: u64 = 0x7f00_8000_0000;

/// Threads that share a block.
const PIECES: usize = 32;

/// The kernel's checksums of the blocks of these bytes, which begin `shift` bytes after an aligned
/// address. Threads of the last group that have no block must not touch memory.
fn sums(kernel: &Kernel, bytes: &[u8], shift: u64, block: u32, threads: u32) -> Vec<u32> {
    let blocks = (bytes.len() as u64).div_ceil(block.into()) as usize;
    let room = vec![0xee; 4 * PIECES * blocks];
    let mut memory = Memory(vec![(DATA + shift, bytes.to_vec()), (SUMS, room)]);
    let grid = ((blocks * PIECES) as u32).div_ceil(threads);
    let grid = (grid, threads);
    kernel.launch(grid, &[DATA + shift, bytes.len() as u64, block.into(), SUMS], &mut memory);
    let (words, []) = memory.0[1].1.as_chunks::<4>() else { unreachable!("whole words") };
    let block = |pieces: &[[u8; 4]]| pieces.iter().fold(0, |sum, w| sum ^ u32::from_le_bytes(*w));
    words.chunks(PIECES).map(block).collect()
}

fn kernel() -> Kernel {
    Kernel::parse(TEXT, "strake_crc32c")
}

#[test]
fn the_known_sums_of_the_standard_come_out() {
    let k = kernel();
    // RFC 3720, B.4.
    let up: Vec<u8> = (0..32).collect();
    let down: Vec<u8> = (0..32).rev().collect();
    for (bytes, want) in [
        (vec![0; 32], 0x8a91_36aa_u32),
        (vec![0xff; 32], 0x62a8_ab43),
        (up, 0x46dd_794e),
        (down, 0x113f_db5c),
    ] {
        assert_eq!(sums(&k, &bytes, 0, 4096, 1), [want]);
    }
}

#[test]
fn blocks_of_a_part_are_summed_each_and_combine_to_the_sum_of_the_part() {
    let (k, bytes) = (
        kernel(),
        (0..70_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<_>>(),
    );
    let found = sums(&k, &bytes, 3, 4096, 7);
    let want: Vec<u32> = bytes.chunks(4096).map(crc32c).collect();
    assert_eq!(found, want);
    let whole =
        found.iter().zip(bytes.chunks(4096)).fold(0, |sum, (s, b)| combine(sum, *s, b.len()));
    assert_eq!(whole, crc32c(&bytes));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_bytes_blocks_and_groups(
        bytes in prop::collection::vec(any::<u8>(), 1..9000),
        shift in 0u64..16,
        block in 1u32..=4096,
        threads in 1u32..40,
    ) {
        let want: Vec<u32> = bytes.chunks(block as usize).map(crc32c).collect();
        prop_assert_eq!(sums(&kernel(), &bytes, shift, block, threads), want);
    }
}
