//! What the requests of StrakeFS mean for the fabric that carries them.

use strake_fabric::Message;
use strake_proto::{data::DataRequest, frame::MAX_PAYLOAD, opcode};

use crate::relay;

/// Whether the bodies of a request of this opcode and of its answer have block checksums of the
/// payload. Then the transport need not read the payload to add one of its own, and the payload may
/// lie in foreign memory.
pub fn is_covered(op: u16) -> bool {
    op >= 0x0100 && !matches!(op, opcode::EXTENTS | opcode::SYNC_LIST | opcode::LIST_CHUNKS)
}

/// Most payload bytes of the answer, where the request tells it; 0 where it does not.
pub fn answer_len(op: u16, body: &[u8]) -> usize {
    match op {
        opcode::READ => DataRequest::decode(body).map_or(0, |r| r.len.min(MAX_PAYLOAD) as usize),
        opcode::RELAY => match relay::inner(body) {
            // No chain of relays.
            Some((op, body)) if op != opcode::RELAY => answer_len(op, body),
            _ => 0,
        },
        _ => 0,
    }
}

/// The request as it is sent: it tells the fabric about its payload and the answer's.
pub fn request(m: Message) -> Message {
    let answer_room = answer_len(m.opcode, &m.body);
    Message { is_covered: is_covered(m.opcode), answer_room, ..m }
}

/// The answer to a request of this opcode as it is sent.
pub fn answer(op: u16, m: Message) -> Message {
    Message { is_covered: is_covered(op), ..m }
}

#[cfg(test)]
mod tests {
    use strake_proto::ChunkId;

    use super::*;

    #[test]
    fn a_read_tells_how_long_its_answer_may_be_also_through_another_server() {
        let chunk = ChunkId { ino: 1, data: 1, index: 0 };
        let read = |len| DataRequest { len, ..DataRequest::new(1, 1, 1, chunk) }.encode();
        assert_eq!(answer_len(opcode::READ, &read(70_000)), 70_000);
        assert_eq!(answer_len(opcode::READ, &read(u32::MAX)), MAX_PAYLOAD as usize);
        assert_eq!(answer_len(opcode::READ, b"no request"), 0);
        assert_eq!(answer_len(opcode::WRITE, &read(70_000)), 0);
        let relayed = |op, body: &[u8]| {
            let head = [&[7, 0, 0, 0][..], &u16::to_le_bytes(op), &[0; 6]].concat();
            answer_len(opcode::RELAY, &[&head[..], body].concat())
        };
        assert_eq!(relayed(opcode::READ, &read(70_000)), 70_000);
        assert_eq!(relayed(opcode::META, &read(70_000)), 0);
        assert_eq!(relayed(opcode::RELAY, &read(70_000)), 0);
        assert_eq!(answer_len(opcode::RELAY, b"short"), 0);
    }

    #[test]
    fn requests_of_blocks_bring_their_checksums_and_no_others() {
        let covered = [opcode::READ, opcode::WRITE, opcode::FORWARD, opcode::SYNC_PUT];
        assert!(covered.into_iter().all(is_covered));
        let summed = [opcode::META, opcode::RELAY, opcode::EXTENTS, opcode::LIST_CHUNKS];
        assert!(!summed.into_iter().any(is_covered));
    }
}
