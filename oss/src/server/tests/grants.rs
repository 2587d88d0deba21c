//! Space that is kept free for a session: which sessions get it, and which may use it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use strake_proto::{
    SessionId,
    data::{FLAG_GRANTED, GRANT_TERM, MAX_GRANT},
};

use super::*;

const OTHER: SessionId = SESSION + 1;
/// A session without a grant.
const WRITER: SessionId = SESSION + 2;

/// Servers that form one chain and know it.
async fn cluster(n: u32) -> Cluster {
    let c = Cluster::start(n).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    c
}

impl Cluster {
    fn of(&self, session: SessionId, r: DataRequest) -> DataRequest {
        let cap = strake_proto::Capability { session, ..self.cap(Rights::WRITE.and(Rights::TRIM)) };
        DataRequest { cap: Some(self.key.seal(&cap)), session, ..r }
    }

    /// Asks a target for `want` blocks, `keep` of which the session needs if it has them. Returns
    /// the granted blocks.
    async fn grant(&self, session: SessionId, target: u32, keep: u32, want: u32) -> Result<u64> {
        let seq = self.clock.elapsed().as_millis() as u64;
        let r = self
            .of(session, DataRequest { offset: keep, len: want, seq, ..self.request(target, 0) });
        self.call(target, opcode::GRANT, &r, &[]).await.map(|(r, _)| u64::from(r.len))
    }

    /// Writes so many blocks to a chunk of its own.
    async fn put(
        &self,
        session: SessionId,
        index: u64,
        blocks: usize,
        flags: u8,
    ) -> Result<(), Code> {
        static NUMBER: AtomicU64 = AtomicU64::new(1000);
        let (data, seq) = (bytes(index, blocks * 4096), NUMBER.fetch_add(1, Relaxed));
        let make =
            || self.of(session, DataRequest { flags, ..self.write_request(index, 0, &data, seq) });
        self.retry(opcode::WRITE, &data, make).await.map(drop).map_err(|e| e.code)
    }

    /// Writes until there is no space left for a block.
    async fn fill(&self, session: SessionId, from: u64) -> u64 {
        let (mut index, mut blocks) = (from, 256);
        while blocks > 0 {
            match self.put(session, index, blocks, 0).await {
                Ok(()) => index += 1,
                Err(e) => {
                    assert_eq!(e, Code::NoSpc);
                    blocks /= 4;
                }
            }
        }
        index
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_granted_is_there_for_its_session_alone() {
    let c = cluster(3).await;
    for t in 0..3 {
        assert_eq!(c.grant(SESSION, t, 0, 400).await.unwrap(), 400);
        assert_eq!(c.grant(OTHER, t, 0, 30).await.unwrap(), 30);
    }
    let next = c.fill(WRITER, 1).await;
    // Without the flag a session cannot use its own grant, and with it not another's.
    assert_eq!(c.put(SESSION, next, 1, 0).await, Err(Code::NoSpc));
    assert_eq!(c.put(WRITER, next, 1, FLAG_GRANTED).await, Err(Code::NoSpc));
    assert_eq!(c.put(OTHER, next, 31, FLAG_GRANTED).await, Err(Code::NoSpc));
    assert_eq!(c.put(OTHER, next, 30, FLAG_GRANTED).await, Ok(()));
    for i in 1..=20 {
        assert_eq!(c.put(SESSION, next + i, 20, FLAG_GRANTED).await, Ok(()), "{i}");
    }
    assert_eq!(c.put(SESSION, next + 21, 1, FLAG_GRANTED).await, Err(Code::NoSpc), "used up");
    assert_eq!(c.grant(SESSION, 0, 400, 400).await.unwrap(), 0, "the target is full");
    // An update that gives space back needs no grant.
    let cut = || DataRequest {
        kind: Kind::Truncate,
        sums: vec![],
        len: 0,
        ..c.write_request(1, 100, &[], 5)
    };
    c.retry(opcode::WRITE, &[], cut).await.unwrap();
    c.flush().await.unwrap();
    assert_eq!(c.put(WRITER, next + 30, 100, 0).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn it_runs_out_unless_it_is_asked_for_again() {
    let c = cluster(1).await;
    assert_eq!(c.grant(SESSION, 0, 0, 100).await.unwrap(), 100);
    assert_eq!(c.grant(OTHER, 0, 0, 100).await.unwrap(), 100);
    let next = c.fill(WRITER, 1).await;
    tokio::time::sleep(GRANT_TERM * 6 / 10).await;
    assert_eq!(c.grant(SESSION, 0, 60, 100).await.unwrap(), 60, "and no more than it needs");
    tokio::time::sleep(GRANT_TERM * 6 / 10).await;
    assert_eq!(c.put(WRITER, next, 150, 0).await, Err(Code::NoSpc));
    assert_eq!(c.put(WRITER, next, 100, 0).await, Ok(()), "what the other had");
    assert_eq!(c.put(SESSION, next + 1, 60, FLAG_GRANTED).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn grants_are_bounded_and_only_for_who_may_write() {
    let c = cluster(2).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let free = (64 << 20) / 4096;
    let first = c.grant(SESSION, 0, u32::MAX, u32::MAX).await.unwrap();
    assert!(first > 1000 && first <= MAX_GRANT.min(free / 4));
    assert!(c.grant(OTHER, 0, u32::MAX, u32::MAX).await.unwrap() <= free / 4 - first);
    assert!(c.grant(OTHER, 1, 0, 10).await.unwrap() == 10, "each target by itself");
    let all = DataRequest { len: 10, seq: u64::MAX, ..c.request(0, 0) };
    let seal = |rights, session| {
        let cap = strake_proto::Capability { rights, session, ..c.cap(rights) };
        Some(c.key.seal(&cap))
    };
    let mut forged = c.key.seal(&c.cap(Rights::WRITE));
    forged[20] ^= 1;
    for (r, want) in [
        (DataRequest { cap: None, ..all.clone() }, Code::BadCap),
        (DataRequest { cap: Some(forged), ..all.clone() }, Code::BadCap),
        (DataRequest { cap: seal(Rights::READ, SESSION), ..all.clone() }, Code::BadCap),
        (DataRequest { session: OTHER, ..all.clone() }, Code::BadCap),
        (DataRequest { session: 0, cap: seal(Rights::WRITE, 0), ..all.clone() }, Code::BadCap),
        (DataRequest { epoch: 9, ..all.clone() }, Code::StaleEpoch),
        (DataRequest { seq: 0, ..all.clone() }, Code::Stale),
        (DataRequest { target: 1, ..all.clone() }, Code::NotServing),
        (DataRequest { chain: 99, ..all.clone() }, Code::NotServing),
    ] {
        assert_eq!(c.call(0, opcode::GRANT, &r, &[]).await.unwrap_err().code, want, "{r:?}");
    }
    assert_eq!(c.call(0, opcode::GRANT, &all, b"bytes").await.unwrap_err().code, Code::Inval);
    // Servers get no grants, because they are no sessions.
    assert_eq!(
        c.call_as(Role::Server, 0, opcode::GRANT, &all, &[]).await.unwrap_err().code,
        Code::BadCap
    );
    let w = DataRequest { flags: FLAG_GRANTED, ..c.write_request(0, 0, b"data", 2) };
    for (r, data) in [
        (DataRequest { kind: Kind::Punch, sums: vec![], ..w.clone() }, &b""[..]),
        (DataRequest { kind: Kind::Truncate, sums: vec![], len: 0, ..w.clone() }, b""),
    ] {
        assert_eq!(
            c.call(0, opcode::WRITE, &r, data).await.unwrap_err().code,
            Code::Inval,
            "{r:?}"
        );
    }
    let forward = DataRequest { session: 0, target: 1, ..w.clone() };
    assert_eq!(
        c.call_as(Role::Server, 1, opcode::FORWARD, &forward, b"data").await.unwrap_err().code,
        Code::Inval
    );
    c.authority.evicted.lock().push(pb::Evicted {
        number: 1,
        session: SESSION,
        min_epoch: 2,
        below: false,
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(c.grant(SESSION, 0, 0, 1).await.unwrap_err().code, Code::NoSession);
}
