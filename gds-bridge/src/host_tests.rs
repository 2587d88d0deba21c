use strake_fabric::Pool;

use super::*;
use crate::{
    Bridge, Options,
    fake::{Copied, FakeGpu},
    plan::Standing,
    reason,
};

fn tells_pointers_apart(m: &dyn GpuMem) {
    let a = m.alloc(1000).unwrap();
    let b = m.alloc(10).unwrap();
    m.check(a, 1000).unwrap();
    m.check(a + 999, 1).unwrap();
    assert_eq!(m.check(a + 1, 1000), Err(Fault::Beyond { addr: a + 1, len: 1000, end: a + 1000 }));
    assert_eq!(m.check(a, u64::MAX), Err(Fault::Beyond { addr: a, len: u64::MAX, end: a + 1000 }));
    for foreign in [0, 4096, a - 1, a + 1000, u64::MAX] {
        assert_eq!(m.check(foreign, 1), Err(Fault::Foreign { addr: foreign }));
    }
    assert_eq!(m.free(a + 1), Err(Fault::Foreign { addr: a + 1 }));
    m.free(a).unwrap();
    assert_eq!(m.check(a + 5, 1), Err(Fault::Freed { addr: a + 5 }));
    assert_eq!(m.free(a), Err(Fault::Freed { addr: a }));
    m.check(b, 10).unwrap();
    assert_eq!(m.check(b + ALIGN, 1), Err(Fault::Foreign { addr: b + ALIGN }));
}

#[test]
fn pointers_are_told_apart() {
    tells_pointers_apart(&HostMem::new());
    let m = FakeGpu::new();
    tells_pointers_apart(&m);
    m.limit_room(20);
    assert_eq!(m.alloc(11), Err(Fault::NoMemory { bytes: 11 }));
    m.alloc(10).unwrap();
}

#[test]
fn memory_that_is_lent_is_the_devices_until_it_is_taken_back() {
    let (m, mut mine) = (FakeGpu::new(), vec![1u8; 100]);
    let (start, addr) = (mine.as_mut_ptr(), mine.as_mut_ptr().addr() as u64);
    assert_eq!(m.check(addr, 1), Err(Fault::Foreign { addr }));
    // SAFETY: `mine` lives to the end of the test and is used by nobody else meanwhile.
    unsafe { m.lend(start, 100) };
    m.poke(addr + 90, &[7; 10]).unwrap();
    assert_eq!(m.peek(addr + 89, 11).unwrap(), [1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
    assert!(m.check(addr + 90, 11).is_err() && m.check(addr + 100, 0).is_err());
    m.take_back(start, 100);
    assert_eq!(m.check(addr, 1), Err(Fault::Foreign { addr }));
    assert_eq!(mine[99], 7);
}

#[test]
fn host_memory_is_copied_and_pinned_at_once() {
    let m = HostMem::new();
    let (a, data) = (m.alloc(8).unwrap(), *b"a buffer");
    let (mut s, mut back) = (m.stream().unwrap(), [0; 8]);
    // SAFETY: both arrays outlive the stream, which copies at once.
    unsafe {
        s.load(a, data.as_ptr(), 8).unwrap();
        s.save(back.as_mut_ptr(), a, 8).unwrap();
        assert_eq!(s.load(a + 1, data.as_ptr(), 8), m.check(a + 1, 8));
    }
    let mark = s.mark().unwrap();
    s.wait(mark).unwrap();
    assert_eq!((back, s.sum(a, 8).is_err(), m.sums().is_err()), (data, true, true));
    let held = m.export(a, 8).unwrap();
    m.free(a).unwrap();
    assert_eq!((held.len(), m.export(a, 8).err()), (8, Some(Fault::Freed { addr: a })));

    let mut page = strake_fabric::BufMut::unpooled(8192);
    let start = page.as_mut_ptr();
    // SAFETY: the pages live to the end of the test.
    if unsafe { m.pin(start, 8192) }.is_err() {
        return println!("skipped: no memory can be locked here");
    }
    // SAFETY: as above.
    assert!(unsafe { m.pin(start.wrapping_add(4096), 4096) }.is_err(), "a part of it is pinned");
    m.unpin(start);
    // SAFETY: as above.
    unsafe { m.pin(start.wrapping_add(4096), 4096) }.unwrap();
    m.unpin(start.wrapping_add(4096));
}

#[test]
fn a_stream_copies_when_it_is_waited_for_and_not_before() {
    let m = FakeGpu::new();
    let a = m.alloc(8).unwrap();
    let (mut s, host) = (m.stream().unwrap(), *b"a buffer");
    // SAFETY: `host` lives until the mark is waited for.
    unsafe { s.load(a, host.as_ptr(), 8).unwrap() };
    let mark = s.mark().unwrap();
    assert_eq!(m.peek(a, 8).unwrap(), [0xee; 8]);
    s.wait(mark).unwrap();
    assert_eq!(m.peek(a, 8).unwrap(), host);
    assert_eq!(m.copied(), Copied { load_pageable: 8, ..Copied::default() });
}

#[test]
fn faults_come_when_they_were_ordered() {
    let m = FakeGpu::new();
    let a = m.alloc(64).unwrap();
    let host = [7u8; 64];
    let load = |n: u64| -> Vec<Result<(), Fault>> {
        let mut s = m.stream().unwrap();
        (0..n)
            .map(|_| {
                // SAFETY: `host` outlives the stream.
                unsafe { s.load(a, host.as_ptr(), 64)? };
                let mark = s.mark()?;
                s.wait(mark)
            })
            .collect()
    };
    m.corrupt_after(1);
    assert_eq!(load(2), [Ok(()), Ok(())]);
    assert_eq!(m.peek(a, 64).unwrap().iter().filter(|b| **b != 7).count(), 1);
    let fault =
        Fault::Driver { call: "cuMemcpyHtoDAsync", code: 719, name: "launch failed".into() };
    m.fail_after(1, fault.clone());
    assert_eq!(load(3), [Ok(()), Err(fault.clone()), Err(fault.clone())]);
    m.fail_pinned_after(0, fault);
    assert_eq!(load(1), [Ok(())], "it is not pinned");
    m.mend();
    m.destroy_after(1);
    assert_eq!(load(3), [Ok(()), Err(Fault::ContextGone), Err(Fault::ContextGone)]);
    assert!(m.stream().is_err() && m.alloc(1).is_err());
    assert_eq!(m.check(a, 1), Err(Fault::ContextGone));
    assert_eq!(m.refuses(Tier::Pageable), Some(Unavailable::Device(Fault::ContextGone)));
}

/// Every reason that can make a tier unavailable can be simulated on each tier, and a bridge
/// detects it.
#[tokio::test]
async fn every_reason_can_be_forced_on_every_tier() {
    let mem = FakeGpu::new();
    let bridge = Bridge::open(Arc::new(mem.clone()), Arc::new(Pool::default()), Options::default())
        .await
        .unwrap();
    for why in reason::tests::all() {
        Tier::ALL.iter().for_each(|t| mem.refuse(*t, Some(why.clone())));
        let (found, before) = (bridge.self_test().await, mem.copied());
        for tier in Tier::ALL {
            assert_eq!(found[tier], Standing::Unavailable(why.clone()), "{tier}");
        }
        assert_eq!(bridge.standings(), found);
        // Nothing was copied.
        bridge.self_test().await;
        assert_eq!(mem.copied(), before);
        Tier::ALL.iter().for_each(|t| mem.refuse(*t, None));
        assert!(
            matches!(bridge.self_test().await[Tier::Pageable], Standing::Available(_)),
            "{why}"
        );
    }
}
