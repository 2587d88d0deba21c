//! The threads and the pinned memory of a bridge.

use std::sync::Arc;

use strake_proto::Result;

use crate::{
    GpuMem, Numa, Options,
    copier::Copier,
    fault::Fault,
    numa::Placing,
    pins::{MIN_SLOT, Pins, Regions},
};

/// The workers and memory of a bridge.
pub struct Hands {
    pub workers: Vec<Copier>,
    /// Largest part, bytes.
    pub part: usize,
    /// Limit of parts under way.
    pub width: usize,
    pub regions: Arc<Regions>,
    pub notice: Option<String>,
    pub numa: Numa,
    /// Why no memory is pinned.
    pub unpinned: Option<Fault>,
}

impl Hands {
    /// Pinned memory and threads, near the device if possible.
    pub fn new(device: &Arc<dyn GpuMem>, options: &Options) -> Result<Hands> {
        let shape = (options.workers, options.slots, options.slot_bytes);
        let placing = Placing::of(&options.sysfs, device.pci());
        let near: (_, &dyn Fn(*mut u8, usize)) =
            (placing.moves_to(), &|start, len| placing.prepare(start, len));
        let pins = Pins::new(device, shape, options.pinned_limit, near);
        let (slots, part, regions, less, unpinned) = match pins {
            Ok(p) => (p.slots, p.slot_bytes, p.regions, p.notice, None),
            Err(e) => {
                let none = (0..options.workers).map(|_| Vec::new()).collect();
                (
                    none,
                    MIN_SLOT,
                    Regions::none(device),
                    Some(format!("nothing is pinned: {e}")),
                    Some(e),
                )
            }
        };
        let width = slots.iter().map(|s| s.len().max(2)).sum();
        let at: Vec<_> = slots.iter().flatten().map(|s| s.bytes().as_ptr()).collect();
        let start = |slots| Copier::start(device.clone(), slots, regions.clone(), placing.cpus());
        let started = slots.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        let (workers, against): (Vec<_>, Vec<_>) = started.into_iter().unzip();
        let (numa, unplaced) = placing.done(&at, &against);
        let said: Vec<String> = less.into_iter().chain(unplaced).collect();
        let notice = (!said.is_empty()).then(|| said.join("; "));
        Ok(Hands { workers, part, width, regions, notice, numa, unpinned })
    }
}
