//! Capabilities whose right has ended.

use strake_proto::cap::as_of;
use tokio::time::sleep;

use super::*;

const TO_WRITE: Rights = Rights::WRITE.and(Rights::TRIM);

impl Cluster {
    /// A request with a capability issued at a log index.
    fn dated(&self, index: u64, r: DataRequest) -> DataRequest {
        let cap = strake_proto::Capability { as_of: as_of(index), ..self.cap(Rights::ALL) };
        DataRequest { cap: Some(self.key.seal(&cap)), ..r }
    }

    async fn ask_dated(&self, op: u16, index: u64) -> Option<Code> {
        let data: &[u8] = if op == opcode::WRITE { b"bytes" } else { &[] };
        let head = self.head();
        let r = match op {
            opcode::WRITE => self.write_request(0, 0, data, 100 + index),
            opcode::GRANT => DataRequest { len: 1, seq: 1, ..self.request(head, 0) },
            _ => DataRequest { len: 5, ..self.request(head, 0) },
        };
        self.call(head, op, &self.dated(index, r), data).await.err().map(|e| e.code)
    }
}

const ALL: [u16; 5] = [opcode::WRITE, opcode::READ, opcode::FLUSH, opcode::EXTENTS, opcode::GRANT];

#[tokio::test(start_paused = true)]
async fn what_has_ended_is_refused_within_a_second_and_what_was_given_since_is_not() {
    let c = Cluster::start_with(2, |cfg| cfg.end_capabilities = true).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    for op in ALL {
        assert_eq!(c.ask_dated(op, 1).await, None, "{op:#x}");
    }
    let (begun, end) = (Instant::now(), c.authority.end(SESSION, 4, TO_WRITE));
    while c.ask_dated(opcode::WRITE, 1).await.is_none() {
        sleep(Duration::from_millis(20)).await;
    }
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    for op in ALL {
        let reads = [opcode::READ, opcode::EXTENTS].contains(&op);
        assert_eq!(c.ask_dated(op, end).await, (!reads).then_some(Code::BadCap), "{op:#x}");
        assert_eq!(c.ask_dated(op, end + 1).await, None, "{op:#x}");
        // A capability without an index is valid until it expires.
        let r = c.write_request(0, 0, b"bytes", 90);
        assert_eq!(c.call(c.head(), opcode::WRITE, &r, b"bytes").await.err(), None);
    }
    // The file's mode is changed; another file's is; another session ends; this session ends.
    let mode = c.authority.end(0, 4, Rights::ALL);
    c.authority.end(0, 5, Rights::ALL);
    c.authority.end(SESSION + 1, 0, Rights::ALL);
    sleep(Duration::from_secs(1)).await;
    for op in ALL {
        assert_eq!(c.ask_dated(op, mode).await, Some(Code::BadCap), "{op:#x}");
        assert_eq!(c.ask_dated(op, mode + 1).await, None, "{op:#x}");
    }
    let last = c.authority.end(SESSION, 0, Rights::ALL);
    sleep(Duration::from_secs(1)).await;
    for op in ALL {
        assert_eq!(c.ask_dated(op, last).await, Some(Code::BadCap), "{op:#x}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_restarted_server_has_no_lease_before_it_knows_all_that_ended() {
    let mut c = Cluster::start_with(1, |cfg| cfg.end_capabilities = true).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    for _ in 0..50 {
        c.authority.end(SESSION, 9, Rights::ALL);
    }
    let end = c.authority.end(SESSION, 4, TO_WRITE);
    // One ending per answer, some ten of them for each lease.
    *c.authority.page.lock() = 1;
    c.kill(0);
    c.boot(0).await;
    let (mut served, mut waits) = (false, 0);
    for _ in 0..400 {
        match c.ask_dated(opcode::WRITE, end).await {
            Some(Code::BadCap) => served = true,
            other => {
                assert!(other.is_some(), "what has ended is let in");
                assert!(!served || other != Some(Code::LeaseExpired), "it had a lease too early");
                waits += 1;
            }
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert!(served && waits > 10, "{waits}");
    assert_eq!(c.ask_dated(opcode::WRITE, end + 1).await, None);
    // Endings that are not known any more count as ended.
    let mut endings = c.authority.endings.lock().take().unwrap();
    (endings.all, endings.floor) = (Vec::new(), end);
    *c.authority.endings.lock() = Some(endings);
    c.kill(0);
    c.boot(0).await;
    sleep(Duration::from_secs(4)).await;
    assert_eq!(c.ask_dated(opcode::READ, end).await, Some(Code::BadCap));
    assert_eq!(c.ask_dated(opcode::READ, end + 1).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_cut_off_ends_with_its_lease() {
    let c = Cluster::start_with(1, |cfg| cfg.end_capabilities = true).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    c.net.cut.lock().insert(900);
    let end = c.authority.end(SESSION, 4, Rights::ALL);
    let begun = Instant::now();
    while c.ask_dated(opcode::WRITE, end).await.is_none() {
        sleep(Duration::from_millis(20)).await;
    }
    assert!(begun.elapsed() < Duration::from_millis(2100), "{:?}", begun.elapsed());
    c.net.cut.lock().clear();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(c.ask_dated(opcode::WRITE, end).await, Some(Code::BadCap));
    assert_eq!(c.ask_dated(opcode::WRITE, end + 1).await, None);
}

#[tokio::test(start_paused = true)]
async fn switched_off_capabilities_are_good_until_they_expire() {
    let c = Cluster::start_with(1, |cfg| cfg.end_capabilities = false).await;
    c.write(0, 0, b"first", 1).await.unwrap();
    let end = c.authority.end(SESSION, 4, Rights::ALL);
    sleep(Duration::from_secs(3)).await;
    for op in ALL {
        assert_eq!(c.ask_dated(op, end).await, None, "{op:#x}");
    }
}
