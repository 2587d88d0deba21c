//! What opens memory to a peer, and for how long: keys that are wrong, of another connection or
//! expired, a key that cannot be invalidated, memory that is freed. On a real device, or soft-RoCE,
//! as [`tests`](super::tests).

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use strake_proto::{checksum::crc32c, frame::Region};
use tokio::io::AsyncWriteExt;

use super::{
    foreign_tests::Pages,
    tests::{
        LONG, client_identity, fabric_of, frame, here, is_refusal, raw, read_of, serve, server,
        works,
    },
    *,
};
use crate::{Buf, Lend, Message, conformance, conn::bulk::Regions};

#[tokio::test]
async fn what_was_not_lent_is_not_read() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    let data = f.pool().get_now(1 << 20).freeze();
    let other = raw(&f, guard.endpoint()).await;
    let foreign = other.q.lend(vec![data.clone()], None).await.unwrap().regions.payload[0];
    let len = data.len() as u32;
    for case in 0..7 {
        let mut peer = raw(&f, guard.endpoint()).await;
        let loan = peer.q.lend(vec![data.clone()], None).await.unwrap();
        let good = loan.regions.payload[0];
        if case == 2 {
            peer.q.take_back(loan.id).await.unwrap();
        }
        let bad = match case {
            // Ends a byte, a page beyond what was lent; begins before it.
            0 => Region { len: len + 1, ..good },
            1 => Region { addr: good.addr + 4096, ..good },
            // Taken back.
            2 => good,
            // Lent to the same process over another connection.
            3 => foreign,
            // Made up.
            4 => Region { key: good.key ^ 1, ..good },
            // Lent to be written.
            5 => peer
                .q
                .lend(Vec::new(), Some(f.pool().get_now(1 << 20)))
                .await
                .unwrap()
                .regions
                .room
                .unwrap(),
            _ => Region { addr: good.addr - 1, ..good },
        };
        let regions = Regions { payload: vec![bad], room: None };
        let ask = frame(&regions, conformance::GATED, b"", bad.len as usize, 0);
        peer.wr.write_all(&ask).await.unwrap();
        let e = peer.ends().await;
        println!("said: {case} {e}");
        assert!(is_refusal(&e), "{case}: {e}");
        service.until(|s| s.disconnected.load(SeqCst) == case + 1).await;
        works(&*friend).await;
    }
    assert_eq!(service.running.load(SeqCst), 0, "none of them reached the service");
    // Regions that do not add up to the payload end the connection before anything is read.
    let mut peer = raw(&f, guard.endpoint()).await;
    let loan = peer.q.lend(vec![data.clone()], None).await.unwrap();
    peer.wr.write_all(&frame(&loan.regions, conformance::GATED, b"", 4096, 0)).await.unwrap();
    service.until(|s| s.disconnected.load(SeqCst) == 8).await;
    // Each is a valid request: it is answered once the gate is open; if it is damaged, it must be
    // sent again.
    let mut peer = raw(&f, guard.endpoint()).await;
    let loan = peer.q.lend(vec![data.clone()], None).await.unwrap();
    service.open(1);
    // The other end's device answers the probe that a silent connection sends.
    peer.q.probe();
    for (crc, code) in [(crc32c(&data), 0), (crc32c(&data) ^ 1, Code::Resend as u16)] {
        peer.wr
            .write_all(&frame(&loan.regions, conformance::GATED, b"", data.len(), crc))
            .await
            .unwrap();
        let answer = peer.answer().await;
        assert_eq!((answer.request_id, answer.status), (9, code));
    }
    works(&*friend).await;
}

/// As above, for what the server writes. All lent memory lies in the middle of memory that is
/// checked afterwards.
#[tokio::test]
async fn what_was_not_lent_is_not_written() {
    const LEN: usize = 300_000;
    const MIDDLE: std::ops::Range<u64> = 8192..8192 + LEN as u64;
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    let memory = Pages::new(LEN + 3 * 8192, 7);
    let room = || Lend::Room(memory.lent().slice(MIDDLE));
    let other = raw(&f, guard.endpoint()).await;
    let foreign = other.q.lend_foreign(&room()).await.unwrap();
    for case in 0..7 {
        let mut peer = raw(&f, guard.endpoint()).await;
        let loan = peer.q.lend_foreign(&room()).await.unwrap();
        let good = loan.regions.room.unwrap();
        let mut len = LEN;
        let bad = match case {
            // Ends a byte, a page beyond what was lent; begins before it.
            0 => {
                len += 1;
                Region { len: len as u32, ..good }
            }
            1 => Region { addr: good.addr + 4096, ..good },
            // Taken back.
            2 => {
                peer.q.take_back(loan.id).await.unwrap();
                good
            }
            // Lent to the same process over another connection.
            3 => foreign.regions.room.unwrap(),
            // Made up.
            4 => Region { key: good.key ^ 1, ..good },
            // Lent to be read.
            5 => {
                peer.q
                    .lend_foreign(&Lend::Payload(memory.lent().slice(MIDDLE)))
                    .await
                    .unwrap()
                    .regions
                    .payload[0]
            }
            _ => Region { addr: good.addr - 1, ..good },
        };
        peer.ask(len, bad).await;
        let e = peer.ends().await;
        println!("said: {case} {e}");
        assert!(is_refusal(&e), "{case}: {e}");
        service.until(|s| s.disconnected.load(SeqCst) == case + 1).await;
        works(&*friend).await;
    }
    other.q.take_back(foreign.id).await.unwrap();
    drop(other);
    assert!(memory.look().iter().all(|b| *b == 7), "something was written");
    // Lent memory is written, and nothing beside it.
    let mut peer = raw(&f, guard.endpoint()).await;
    let loan = peer.q.lend_foreign(&room()).await.unwrap();
    peer.ask(LEN, loan.regions.room.unwrap()).await;
    assert_eq!(peer.answer().await.payload_len as usize, LEN);
    peer.q.take_back(loan.id).await.unwrap();
    let (before, rest) = memory.look().split_at(MIDDLE.start as usize);
    let (middle, after) = rest.split_at(LEN);
    assert!(
        middle == &conformance::pattern(LEN, 3)[..] && before.iter().chain(after).all(|b| *b == 7)
    );
    works(&*friend).await;
}

/// Simulates a kernel that cannot remove registrations.
static STUCK: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn dereg_or_not(mr: *mut verbs::Mr) -> std::ffi::c_int {
    if STUCK.load(SeqCst) {
        libc::EBUSY
    } else {
        // SAFETY: as of the one in its place.
        unsafe { (verbs::lib().unwrap().ibv_dereg_mr)(mr) }
    }
}

/// Memory of this process in place of a dma-buf, which soft-RoCE cannot register; the registration
/// has a key of its own, too.
unsafe extern "C" fn reg_host(
    pd: *mut verbs::Pd,
    _offset: u64,
    len: usize,
    addr: u64,
    _fd: std::ffi::c_int,
    access: std::ffi::c_int,
) -> *mut verbs::Mr {
    let start = std::ptr::with_exposed_provenance_mut(addr as usize);
    // SAFETY: a valid domain, and memory that its test holds.
    unsafe { (verbs::lib().unwrap().ibv_reg_mr)(pd, start, len, access) }
}

#[tokio::test]
async fn a_key_that_cannot_be_taken_back_opens_nothing_when_its_call_has_ended() {
    const LEN: usize = 100_000;
    let Some(at) = here() else { return };
    let server = server();
    let (_service, guard) = serve(&server, &at).await;
    let friend = server.connect(guard.endpoint(), None).await.unwrap();
    let mut f = fabric_of(client_identity(), None, Options::default());
    let lib = verbs::lib().unwrap().clone();
    f.lib = Box::leak(Box::new(verbs::Lib {
        ibv_dereg_mr: dereg_or_not,
        reg_dmabuf: || Ok(reg_host),
        ..lib
    }));
    let memory = Pages::new(LEN, 7);
    let exposed = memory.lent().addr();
    let lend = || {
        let fd = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        Lend::Room(crate::Foreign::dma_buf(fd, exposed % 4096, exposed, LEN as u64))
    };
    // Its call ends well; it is abandoned; it has ended with its connection.
    for round in 0..3 {
        let (lender, mut second) =
            (raw(&f, guard.endpoint()).await, raw(&f, guard.endpoint()).await);
        let device = lender.q.device.clone();
        let loan = lender.q.lend_foreign(&lend()).await.unwrap();
        let room = loan.regions.room.unwrap();
        // Until then a server can reach it, over any connection.
        second.ask(LEN, room).await;
        second.answer().await;
        assert!(memory.look() == &conformance::pattern(LEN, 3)[..]);
        memory.fill(7);
        STUCK.store(true, SeqCst);
        match round {
            0 => assert_eq!(
                lender.q.take_back(loan.id).await.err().map(|e| e.code),
                Some(Code::Disconnected)
            ),
            1 => lender.q.revoke(loan.id),
            _ => lender.q.end(),
        }
        STUCK.store(false, SeqCst);
        for q in [&lender.q, &second.q] {
            assert!(q.state.lock().destroyed(), "{round}: a queue pair of the same domain is left");
        }
        let mut later = raw(&f, guard.endpoint()).await;
        assert!(!Arc::ptr_eq(&later.q.device, &device));
        later.ask(LEN, room).await;
        let e = later.ends().await;
        assert!(is_refusal(&e), "{round}: {e}");
        assert!(memory.look().iter().all(|b| *b == 7), "{round}: written after its call had ended");
    }
    // Others are served, and so is a client that lends anew.
    works(&*friend).await;
    let lender = raw(&f, guard.endpoint()).await;
    let loan = lender.q.lend_foreign(&lend()).await.unwrap();
    lender.q.take_back(loan.id).await.unwrap();
    assert!(!lender.q.state.lock().destroyed());
}

/// Answers READ with what lies in its kept memory.
struct FromKept(parking_lot::Mutex<Buf>);

#[async_trait]
impl Service for FromKept {
    async fn handle(&self, _: &crate::Peer, _: Message) -> Result<Message> {
        let payload = vec![self.0.lock().clone()];
        Ok(Message { payload, is_covered: true, ..Message::default() })
    }
}

#[tokio::test]
async fn memory_that_is_gone_is_not_registered_and_what_comes_to_its_addresses_is_registered_anew()
{
    const LEN: usize = 1 << 20;
    let Some(at) = here() else { return };
    let f = server();
    let filled = |n: usize| {
        let mut b =
            Pool::kept(strake_runtime::SharedMemory::create(4 << 20).unwrap(), 0).get_now(LEN);
        b.copy_from_slice(&conformance::pattern(LEN, n));
        b.freeze()
    };
    let service = Arc::new(FromKept(parking_lot::Mutex::new(filled(0))));
    let guard = f.listen(&at, service.clone()).await.unwrap();
    let client = fabric_of(client_identity(), None, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let device = f.devices.lock().values().find_map(Weak::upgrade).unwrap();
    let (mut known, mut again) = (Vec::new(), 0);
    for n in 1..=8 {
        let got = conn.call(read_of(LEN), LONG).await.unwrap();
        assert!(
            got.payload[0][..] == conformance::pattern(LEN, n - 1)[..],
            "{n}: what lay there before"
        );
        let addr = service.0.lock().as_ptr().addr();
        again += usize::from(known.contains(&addr));
        known.push(addr);
        // The buffer of the last round is gone and another one takes its place, perhaps at the same
        // addresses.
        assert_eq!(device.kept_regions(), [addr as u64], "{n}");
        *service.0.lock() = filled(n);
    }
    assert!(again > 0, "no address came twice, so that nothing is shown: {known:x?}");
}
