//! What is read into foreign memory, such as a GPU's, and its checksums. See `foreign_reads.rs`.

use std::ops::Range;

use strake_fabric::{Buf, Message};
use strake_proto::{
    checksum::{BLOCK, combine, pieces, verify},
    data::DataReply,
    frame::MAX_PAYLOAD,
    layout::Piece,
};

use super::buffers;

/// A piece of a range that was read. Its first bytes are in foreign memory or came with the answer;
/// the rest is a hole and reads as zeros.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The bytes of the piece, counted from the beginning of the range.
    pub range: Range<u64>,
    /// Number of bytes from its start that the storage server wrote into the lent memory.
    pub placed: u64,
    /// The CRC32C of those bytes, by the block sums that are stored with them. It was not compared
    /// with the content of the memory.
    pub sum: u32,
    /// Bytes from its start that came with the answer, because they were few. They are verified.
    pub here: Vec<Buf>,
}

/// What an answer says, or what is wrong with it. The caller fills in the place in the range.
pub(super) fn arrived(p: Piece, r: &DataReply, m: Message) -> std::result::Result<Arrived, String> {
    let here = buffers::total(&m.payload);
    if r.len > p.len || m.placed as usize + here != r.len as usize || (here > 0 && m.placed > 0) {
        return Err("the reply's length is wrong".into());
    }
    if here > 0
        && let Some(i) = verify(u64::from(p.offset), m.payload.iter().map(|b| &b[..]), &r.sums)
    {
        return Err(format!("block {i} does not match its checksum"));
    }
    if r.sums.len() != pieces(u64::from(p.offset), r.len as usize) {
        return Err("the reply has too many checksums, or too few".into());
    }
    let sum = if m.placed > 0 { whole_sum(p.offset, r.len, &r.sums) } else { 0 };
    Ok(Arrived { range: 0..0, placed: m.placed.into(), sum, here: m.payload })
}

/// The CRC32C of a range, combined from those of the blocks that it touches.
fn whole_sum(offset: u32, len: u32, sums: &[u32]) -> u32 {
    let (mut sum, mut left, mut room) = (0, len as usize, BLOCK - offset as usize % BLOCK);
    for s in sums {
        let n = room.min(left);
        sum = combine(sum, *s, n);
        (left, room) = (left - n, BLOCK);
    }
    sum
}

/// Most bytes of a range, so that each of its pieces is one request.
pub(crate) const MOST: u64 = MAX_PAYLOAD as u64;

#[cfg(test)]
mod tests {
    use strake_proto::{
        ChunkId,
        checksum::{block_sums, crc32c},
    };

    use super::*;

    #[test]
    fn sums_of_blocks_make_the_sum_of_the_range() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 / 3) as u8).collect();
        for (offset, len) in
            [(0, 20_000), (4096, 8192), (1, 4095), (4095, 2), (100, 19_000), (0, 1)]
        {
            let part = &bytes[..len];
            let sums = block_sums(offset, [part]);
            assert_eq!(whole_sum(offset as u32, len as u32, &sums), crc32c(part), "{offset} {len}");
        }
    }

    #[test]
    fn an_answer_that_does_not_add_up_is_damage() {
        let chunk = ChunkId { ino: 1, data: 2, index: 3 };
        let p = Piece { chunk, chain: 4, offset: 0, len: 10_000, file_offset: 0 };
        let reply =
            |len, sums: usize| DataReply { len, sums: vec![7; sums], ..DataReply::default() };
        let placed = |placed| Message { placed, ..Message::default() };
        let ok = arrived(p, &reply(9000, 3), placed(9000)).unwrap();
        assert_eq!((ok.placed, ok.here.len()), (9000, 0));
        assert_eq!(arrived(p, &reply(0, 0), placed(0)).unwrap().placed, 0, "all of it is a hole");
        for (r, m) in [
            (reply(9000, 3), placed(8999)),
            (reply(9000, 2), placed(9000)),
            (reply(9000, 4), placed(9000)),
            (reply(10_001, 3), placed(10_001)),
            (reply(0, 0), placed(1)),
            (reply(100, 1), Message::new(0, "").with_payload(vec![Buf::copy_from(&[1; 100])])),
        ] {
            arrived(p, &r, m).unwrap_err();
        }
    }
}
