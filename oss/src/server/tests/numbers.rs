//! Sequence numbers belong to a session: jumps in them harm no other session.

use strake_proto::SessionId;

use super::*;

const OTHER: SessionId = SESSION + 1;

impl Cluster {
    fn by(&self, session: SessionId, r: DataRequest) -> DataRequest {
        let cap = strake_proto::Capability { session, ..self.cap(Rights::READ.and(Rights::WRITE)) };
        DataRequest { cap: Some(self.key.seal(&cap)), session, ..r }
    }

    async fn numbered(
        &self,
        session: SessionId,
        seq: u64,
        round: u64,
        data: &[u8],
    ) -> Result<Version, Code> {
        let r = self.by(session, DataRequest { round, ..self.write_request(0, 0, data, seq) });
        self.call(r.target, opcode::WRITE, &r, data)
            .await
            .map(|(r, _)| r.version)
            .map_err(|e| e.code)
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_jumps_to_the_last_number_harms_itself_alone() {
    let c = Cluster::start(2).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    // Numbers of writes are only compared for equality: the last one blocks no other.
    let last = c.numbered(SESSION, u64::MAX, 0, b"last!").await.unwrap();
    let low = c.numbered(SESSION, 2, 0, b"low..").await.unwrap();
    assert!(low > last);
    let others = c.numbered(OTHER, u64::MAX, 0, b"other").await.unwrap();
    assert!(others > low, "the same number of another session is another write");
    assert_eq!(
        c.numbered(SESSION, u64::MAX, 0, b"again").await,
        Ok(last),
        "it was made, and is not made again"
    );
    for target in [0, 1] {
        assert_eq!(c.read(target, 0, 0, 5).await.unwrap().1, b"other");
    }

    // Older rounds are late: those of the same session, in this epoch of the chain.
    c.numbered(SESSION, 3, u64::MAX, b"round").await.unwrap();
    assert_eq!(c.numbered(SESSION, 4, 7, b"late.").await, Err(Code::Overloaded));
    c.numbered(OTHER, 5, 7, b"round").await.unwrap();
    let flush = c.by(SESSION, DataRequest { round: u64::MAX, ..c.request(c.head(), 0) });
    c.call(c.head(), opcode::FLUSH, &flush, &[]).await.unwrap();
    c.numbered(OTHER, 6, 8, b"goes!").await.unwrap();

    // Older requests for space are late, too.
    let grant = async |session, seq| {
        let r = c.by(session, DataRequest { len: 1, seq, ..c.request(0, 0) });
        c.call(0, opcode::GRANT, &r, &[]).await.map(|(r, _)| r.len).map_err(|e| e.code)
    };
    assert_eq!(grant(SESSION, u64::MAX).await, Ok(1));
    assert!(grant(SESSION, 5).await.is_err());
    assert_eq!(grant(OTHER, 5).await, Ok(1));

    // A capability cannot write, or count, for another session.
    let r = DataRequest { session: OTHER, ..c.by(SESSION, c.write_request(0, 0, b"alien", 9)) };
    assert_eq!(c.call(r.target, opcode::WRITE, &r, b"alien").await.unwrap_err().code, Code::BadCap);
}
