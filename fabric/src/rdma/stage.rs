//! Registered memory of a device. Payloads that cannot be registered where they lie go through it,
//! piece by piece.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, frame};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{limits::PLACES, registered::Registered};
use crate::{BufMut, Pool};

/// Made with its device, so that it exists when nothing more may be registered.
pub struct Stage {
    /// Held for its memory.
    _memory: BufMut,
    start: *mut u8,
    /// Size of a place in bytes.
    piece: usize,
    mr: Option<Registered>,
    vacant: Mutex<Vec<usize>>,
    room: Arc<Semaphore>,
    /// Pieces that went through it.
    pub moved: AtomicU64,
}

// SAFETY: each place's memory is used by one holder of it at a time.
unsafe impl Send for Stage {}
// SAFETY: as above.
unsafe impl Sync for Stage {}

impl Stage {
    /// With places of `piece` bytes; not registered yet.
    pub fn new(pool: &Pool, piece: usize) -> Stage {
        let mut memory = pool.get_now(PLACES * piece);
        Stage {
            start: memory.as_mut_ptr(),
            _memory: memory,
            piece,
            mr: None,
            vacant: Mutex::new((0..PLACES).collect()),
            room: Arc::new(Semaphore::new(PLACES)),
            moved: AtomicU64::new(0),
        }
    }

    /// Its address and length.
    pub fn memory(&self) -> (*mut u8, usize) {
        (self.start, PLACES * self.piece)
    }

    pub fn registered(&mut self, mr: Registered) {
        self.mr = Some(mr);
    }

    pub fn piece(&self) -> usize {
        self.piece
    }

    /// Waits for a place; first come first served.
    pub async fn place(self: &Arc<Stage>) -> Result<Place> {
        let gone = || Error::new(Code::Disconnected, "the RDMA device is being closed");
        let room = self.room.clone().acquire_owned().await.map_err(|_| gone())?;
        let n = self.vacant.lock().pop().ok_or_else(gone)?;
        Ok(Place { stage: self.clone(), n, _room: room })
    }
}

/// A place for one piece. Exclusive to its holder until it is dropped.
pub struct Place {
    stage: Arc<Stage>,
    n: usize,
    _room: OwnedSemaphorePermit,
}

impl Place {
    fn start(&self) -> *mut u8 {
        self.stage.start.wrapping_add(self.n * self.stage.piece)
    }

    pub fn addr(&self) -> u64 {
        self.start().addr() as u64
    }

    pub fn lkey(&self) -> u32 {
        self.stage.mr.as_ref().map_or(0, Registered::lkey)
    }

    /// Copies the piece out, after the device is done with it.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert!(to.len() <= self.stage.piece);
        // SAFETY: within this place, which nobody else uses; the caller waited for the device.
        unsafe { std::ptr::copy_nonoverlapping(self.start(), to.as_mut_ptr(), to.len()) }
        self.stage.moved.fetch_add(1, Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before the permit is released: whoever gets the permit finds a place.
        self.stage.vacant.lock().push(self.n);
    }
}

/// The parts of the peer's regions that contain `len` bytes of the payload, from `skip` on.
pub fn cut(from: &[frame::Region], skip: usize, len: usize) -> Vec<frame::Region> {
    let (mut skip, mut left, mut out) = (skip as u64, len as u64, Vec::new());
    for r in from {
        let before = skip.min(r.len.into());
        skip -= before;
        let n = left.min(u64::from(r.len) - before);
        if n > 0 {
            out.push(frame::Region { addr: r.addr + before, key: r.key, len: n as u32 });
            left -= n;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn pieces_are_all_of_the_regions_in_order_and_once() {
        let region = |addr: u64, key: u32, len: u32| frame::Region { addr, key, len };
        for lens in [&[1u32, 10_000, 4096, 7][..], &[65536], &[4096, 4096], &[1; 8]] {
            let from: Vec<_> = lens
                .iter()
                .enumerate()
                .map(|(i, l)| region((i as u64 + 1) << 32, i as u32, *l))
                .collect();
            let total: usize = lens.iter().map(|l| *l as usize).sum();
            for piece in [1, 3, 4096, 5000, total, total + 1] {
                let (mut at, mut got) = (0, vec![0u64; from.len()]);
                while at < total {
                    let n = piece.min(total - at);
                    let parts = cut(&from, at, n);
                    assert_eq!(parts.iter().map(|p| p.len as usize).sum::<usize>(), n);
                    assert!(parts.len() <= from.len());
                    for p in parts {
                        let of = &mut got[p.key as usize];
                        assert_eq!(
                            p.addr,
                            ((u64::from(p.key) + 1) << 32) + *of,
                            "the next bytes of its region"
                        );
                        *of += u64::from(p.len);
                    }
                    at += n;
                }
                assert_eq!(got, lens.iter().map(|l| u64::from(*l)).collect::<Vec<_>>());
            }
        }
        assert!(cut(&[], 0, 0).is_empty());
    }

    #[tokio::test]
    async fn places_are_apart_and_who_comes_later_waits_for_one() {
        let stage = Arc::new(Stage::new(&Pool::new(4 << 20), 8192));
        let mut all = Vec::new();
        for _ in 0..PLACES {
            all.push(stage.place().await.unwrap());
        }
        let mut starts: Vec<u64> = all.iter().map(Place::addr).collect();
        starts.sort_unstable();
        assert!(starts.windows(2).all(|w| w[1] - w[0] == 8192));
        let mut next = Box::pin(stage.place());
        assert!((&mut next).now_or_never().is_none());
        let given = all.swap_remove(1).addr();
        assert_eq!(next.await.unwrap().addr(), given);
        drop(all);
        assert_eq!(stage.vacant.lock().len(), PLACES);
    }
}
