//! A cluster map and a layout from anyone: refused, or safe to compute with.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use strake_proto::{
    layout::{MAX_CHUNK, MAX_FILE_SIZE, StripeMap},
    map::{ChainExt, MapView},
    pb,
};

fuzz_target!(|data: &[u8]| {
    // First half a map, second half a layout; the first byte says where to cut.
    let Some((cut, rest)) = data.split_first() else { return };
    let (a, b) = rest.split_at(rest.len() * usize::from(*cut) / 255);
    let Ok(map) = pb::ClusterMap::decode(a) else { return };
    let Ok(map) = MapView::new(map) else { return };
    for c in &map.map.chains {
        let (_, _, _) = (c.head(), c.tail(), c.ost_index());
        for r in &c.replicas {
            let _ = (c.successor(r.target), c.state_of(r.target), map.node_of(r.target));
        }
    }
    let Ok(layout) = pb::Layout::decode(b) else { return };
    let Ok(m) = StripeMap::resolve(5, &layout, &map) else { return };
    for at in [0, 1, 65_535, u64::from(u32::MAX), MAX_FILE_SIZE - 1, MAX_FILE_SIZE, u64::MAX] {
        let mut end = at;
        for p in m.split(at, 5 * MAX_CHUNK).take(100) {
            assert_eq!(p.file_offset, end);
            assert!(p.len > 0 && u64::from(p.offset) + u64::from(p.len) <= MAX_CHUNK);
            assert_eq!(m.chain_of(p.chunk.index), p.chain);
            end += u64::from(p.len);
        }
        if at <= MAX_FILE_SIZE {
            let cut = m.cut(at);
            assert!(cut.kept == u32::MAX || cut.first_gone > 0);
        }
    }
});
