//! Foreign memory on a real device, or soft-RoCE; see `tests.rs`.

use std::{
    cell::UnsafeCell,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use strake_proto::{Code, Result, checksum::crc32c, opcode};
use tokio::{sync::Semaphore, time::timeout};

use super::tests::{here, number, read_of, serve, server, settled, works};
use crate::{
    Connection, Fabric, Foreign, Lend, Listener, Message, Peer, RdmaFabric, Service, Transport,
    conformance,
};

const LONG: Duration = Duration::from_secs(60);
const KIB: usize = 1 << 10;

/// Pages that a peer may write at any time.
pub struct Pages(Box<[UnsafeCell<u8>]>);

// SAFETY: only addresses are shared; the tests look at the bytes when nobody may write them.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub fn new(len: usize, fill: u8) -> Arc<Pages> {
        Arc::new(Pages((0..len).map(|_| UnsafeCell::new(fill)).collect()))
    }

    pub fn lent(self: &Arc<Pages>) -> Foreign {
        // SAFETY: cells may be written while they are shared, and are mapped as long as they are
        // held.
        unsafe {
            Foreign::host(self.0.as_ptr().cast_mut().cast(), self.0.len() as u64, self.clone())
        }
    }

    /// Only to be called when nothing is lent and nothing reads it.
    pub fn fill(&self, with: u8) {
        // SAFETY: as said; cells may be written while they are shared.
        unsafe { self.0.as_ptr().cast::<u8>().cast_mut().write_bytes(with, self.0.len()) }
    }

    pub fn look(&self) -> &[u8] {
        // SAFETY: the tests call it when nothing is lent.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len()) }
    }
}

/// READ answers with a pattern of the length asked for, WRITE with the checksum of what came; each
/// takes a permit and gives it back.
struct Disk(Semaphore, AtomicU64);

impl Disk {
    async fn at(f: &RdmaFabric, open: usize) -> (Arc<Disk>, Listener) {
        let disk = Arc::new(Disk(Semaphore::new(open), AtomicU64::new(0)));
        let guard = f.listen(&here().unwrap(), disk.clone()).await.unwrap();
        (disk, guard)
    }
}

#[async_trait]
impl Service for Disk {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        self.1.fetch_add(1, SeqCst);
        let _open = self.0.acquire().await;
        if m.opcode == opcode::WRITE {
            return Ok(Message::new(opcode::WRITE, crc32c(&m.payload[0]).to_le_bytes().to_vec()));
        }
        let payload = vec![conformance::pattern(number(&m.body), 9)];
        Ok(Message { payload, is_covered: true, ..Message::new(opcode::READ, "") })
    }
}

fn read(into: Foreign) -> Message {
    let len = into.len() as usize;
    Message { lend: Some(Lend::Room(into)), ..read_of(len) }
}

fn write(from: Foreign) -> Message {
    let lend = Some(Lend::Payload(from));
    Message { lend, is_covered: true, ..Message::new(opcode::WRITE, "") }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_memory_is_read_and_written_where_it_lies_over_several_queue_pairs() {
    if here().is_none() {
        return;
    }
    let f = server();
    let (_disk, guard) = Disk::at(&f, 4).await;
    // One after the other: four concurrent handshakes are too much for an emulated machine.
    let mut lanes: Vec<Arc<dyn Connection>> = Vec::new();
    for _ in 0..4 {
        lanes.push(f.connect(guard.endpoint(), None).await.unwrap());
    }
    let memory = Pages::new(512 * KIB + 4097, 0);
    let used = f.pool().stats().used;
    // Each lane has its own part, and no part begins or ends at a page border.
    let borders = [1, 100 * KIB, 200 * KIB + 1, 512 * KIB, 512 * KIB + 4097].map(|at| at as u64);
    let parts = [0, 1, 2, 3].map(|i| borders[i]..borders[i + 1]);
    let reads =
        lanes.iter().zip(parts.clone()).map(|(c, p)| c.call(read(memory.lent().slice(p)), LONG));
    for (got, p) in futures_util::future::join_all(reads).await.into_iter().zip(parts.clone()) {
        let got = got.unwrap();
        assert!(
            u64::from(got.placed) == p.end - p.start && got.payload.is_empty(),
            "{p:?}: {}",
            got.placed
        );
    }
    assert_eq!(Arc::strong_count(&memory), 1, "nothing is lent");
    for p in parts.clone() {
        let want = conformance::pattern((p.end - p.start) as usize, 9);
        assert!(memory.look()[p.start as usize..p.end as usize] == want[..], "{p:?}");
    }
    assert_eq!(memory.look()[0], 0);
    let writes =
        lanes.iter().zip(parts.clone()).map(|(c, p)| c.call(write(memory.lent().slice(p)), LONG));
    for (got, p) in futures_util::future::join_all(writes).await.into_iter().zip(parts) {
        let got = got.unwrap();
        let want = crc32c(&memory.look()[p.start as usize..p.end as usize]);
        assert_eq!((&got.body[..], got.went), (&want.to_le_bytes()[..], Transport::Rdma));
    }
    for c in &lanes {
        assert!(c.traffic().sent > 4000 && c.traffic().received > 4000, "{:?}", c.traffic());
    }
    drop(lanes);
    settled(&f).await;
    assert!(f.pool().stats().used <= used);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_memory_is_out_of_reach_the_moment_a_call_is_given_up() {
    let Some(at) = here() else { return };
    let f = server();
    let (_service, friends) = serve(&f, &at).await;
    let friend = f.connect(friends.endpoint(), None).await.unwrap();
    let (disk, guard) = Disk::at(&f, 0).await;
    let memory = Pages::new(64 * KIB, 7);
    for round in 0..4 {
        let conn = f.connect(guard.endpoint(), None).await.unwrap();
        let m = if round % 2 == 0 { read(memory.lent()) } else { write(memory.lent()) };
        {
            let call = conn.call(m, if round < 2 { Duration::from_millis(300) } else { LONG });
            tokio::pin!(call);
            let ended =
                timeout(Duration::from_millis(if round < 2 { 5000 } else { 300 }), &mut call).await;
            assert_eq!(
                ended.map(|r| r.unwrap_err().code).ok(),
                (round < 2).then_some(Code::TimedOut)
            );
        }
        assert_eq!(Arc::strong_count(&memory), 1, "round {round}: lent still");
        // This ended its connection, but no others.
        timeout(LONG, async {
            while !conn.is_closed() {
                tokio::time::sleep(Duration::from_millis(5)).await
            }
        })
        .await
        .unwrap();
        works(&*friend).await;
    }
    assert!(disk.1.load(SeqCst) >= 2, "none of them was handled");
    disk.0.add_permits(4);
    settled_of(&f, 2).await;
    assert!(memory.look().iter().all(|b| *b == 7), "written by a late answer");
    works(&*friend).await;
}

/// Waits until only this many ends of connections are left.
async fn settled_of(f: &RdmaFabric, ends: u64) {
    let left = async {
        while f.transports()[0].1.connections > ends {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, left).await.expect("connections end");
}

#[tokio::test]
async fn a_device_that_registers_no_dma_bufs_is_named_and_the_connection_goes_on() {
    let Some(at) = here() else { return };
    let f = server();
    let (_service, guard) = serve(&f, &at).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let e = conn.call(read(Foreign::dma_buf(fd, 0, 1 << 40, 8192)), LONG).await.unwrap_err();
    println!("{e}");
    // A device that can register dma-bufs reports that this is not one.
    let soft = std::env::var("STRAKE_RDMA_SOFT").is_ok();
    assert!(
        !soft
            || e.code == Code::OpNotSupp
                && e.message.contains("cannot register memory of other devices"),
        "{e}"
    );
    assert!(e.message.contains("device ") && !conn.is_closed(), "{e}");
    works(&*conn).await;
}
