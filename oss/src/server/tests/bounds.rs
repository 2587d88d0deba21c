//! Capabilities that restrict where their file's chunks are.

use strake_proto::Bound;

use super::*;

impl Cluster {
    fn bound(&self, bound: Bound, r: DataRequest) -> DataRequest {
        let all = Rights::READ.and(Rights::WRITE).and(Rights::TRIM);
        let cap = strake_proto::Capability { bound, ..self.cap(all) };
        DataRequest { cap: Some(self.key.seal(&cap)), ..r }
    }

    async fn ask_bound(&self, op: u16, bound: Bound, index: u64, data: &[u8]) -> Option<Code> {
        let head = self.head();
        let r = match op {
            opcode::WRITE => self.write_request(index, 0, data, 100 + index % 1000),
            opcode::GRANT => DataRequest { len: 1, seq: 1, ..self.request(head, index) },
            _ => DataRequest { len: data.len() as u32, ..self.request(head, index) },
        };
        let payload = if op == opcode::WRITE { data } else { &[] };
        self.call(head, op, &self.bound(bound, r), payload).await.err().map(|e| e.code)
    }
}

#[tokio::test(start_paused = true)]
async fn chunks_are_taken_and_shown_only_where_their_file_has_them() {
    let c = Cluster::start(2).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    let own = Bound::One { chain: CHAIN, bits: 28 };
    let foreign = Bound::One { chain: CHAIN + 1, bits: 28 };
    // Even chunks are here, odd ones elsewhere.
    let list = Bound::List { count: 2, chains: [CHAIN, CHAIN + 1, 0, 0] };
    let bad = Some(Code::BadCap);
    for op in [opcode::WRITE, opcode::READ] {
        for index in [0, 1, (1 << 28) - 1] {
            assert_eq!(c.ask_bound(op, own, index, b"bytes").await, None, "{op:#x} of {index}");
            assert_eq!(c.ask_bound(op, foreign, index, b"bytes").await, bad, "{op:#x} of {index}");
        }
        for index in [1 << 28, 1 << 40, u64::MAX] {
            assert_eq!(c.ask_bound(op, own, index, b"bytes").await, bad, "{op:#x} of {index}");
        }
        assert_eq!(c.ask_bound(op, list, 2, b"bytes").await, None);
        assert_eq!(c.ask_bound(op, list, 3, b"bytes").await, bad);
    }
    // These are about everything that a file has on a chain.
    for op in [opcode::FLUSH, opcode::EXTENTS, opcode::GRANT] {
        assert_eq!(c.ask_bound(op, own, 0, &[]).await, None, "{op:#x}");
        assert_eq!(c.ask_bound(op, list, 1, &[]).await, None, "{op:#x}");
        assert_eq!(c.ask_bound(op, foreign, 0, &[]).await, bad, "{op:#x}");
    }
    // A set that this server does not know yet: it may know it when asked again.
    let set = Bound::Set { set: 15, start: 0, count: 1 };
    assert_eq!(c.ask_bound(opcode::READ, set, 0, &[0]).await, Some(Code::NotServing));
}
