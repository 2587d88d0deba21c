//! Streams that copy only when a caller waits for them.

use std::{
    collections::{BTreeMap, VecDeque},
    ptr, thread,
};

use strake_fabric::REGION;
use strake_gds::{Fault, Mark, Stream};
use strake_proto::checksum::{BLOCK, block_sums, combine};

use super::FakeGpu;

/// A copy that was ordered and not made yet; without a host address, a checksum.
pub struct Pending {
    pub host: *mut u8,
    pub device: u64,
    pub len: usize,
    pub to_device: bool,
}

/// A stream whose copies are made only when a caller waits for them.
pub struct FakeStream {
    device: FakeGpu,
    copies: VecDeque<Pending>,
    /// Errors of failed copies, by their numbers, until a caller has waited for them.
    faults: VecDeque<(u64, Fault)>,
    given: u64,
    done: u64,
    /// Checksums of blocks by the numbers of their orders, and the total bytes.
    told: BTreeMap<u64, (Vec<u32>, usize)>,
}

impl FakeStream {
    pub fn new(device: &FakeGpu) -> FakeStream {
        let (copies, faults) = (VecDeque::new(), VecDeque::new());
        let (device, told) = (device.clone(), BTreeMap::new());
        FakeStream { device, copies, faults, given: 0, done: 0, told }
    }

    /// The next error of a copy before this one.
    fn told_before(&mut self, n: u64) -> Option<(u64, Fault)> {
        if self.faults.front()?.0 < n { self.faults.pop_front() } else { None }
    }

    /// Makes the copies before this one.
    fn make(&mut self, before: u64) {
        while self.done < before {
            let Some(c) = self.copies.pop_front() else { break };
            let (pace, gate) = {
                let s = self.device.state.lock();
                (s.orders.pace, s.gate.clone())
            };
            gate.pass();
            if !pace.is_zero() {
                thread::sleep(pace);
            }
            if c.host.is_null() {
                match self.device.peek(c.device, c.len as u64) {
                    Ok(bytes) => drop(
                        self.told.insert(self.done, (block_sums(0, [&bytes[..]]), bytes.len())),
                    ),
                    Err(e) => self.faults.push_back((self.done, e)),
                }
            } else if let Err(e) = self.device.state.lock().copy(&self.device.memory, &c) {
                self.faults.push_back((self.done, e));
            }
            self.done += 1;
        }
    }

    fn push(&mut self, c: Pending) -> Result<(), Fault> {
        let s = self.device.state.lock();
        s.alive()?;
        if c.len > 0 {
            s.gate.ordered();
            drop(s);
            self.copies.push_back(c);
            self.given += 1;
        }
        Ok(())
    }
}

impl Stream for FakeStream {
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault> {
        self.push(Pending { host: from.cast_mut(), device: to, len, to_device: true })
    }

    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault> {
        self.push(Pending { host: to, device: from, len, to_device: false })
    }

    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault> {
        // Like a device that stores its results there, for each 4 KiB.
        let bytes = 4 * (REGION / BLOCK) as u64;
        if !self.device.state.lock().has_room(bytes) {
            return Err(Fault::NoMemory { bytes });
        }
        let number = self.given;
        self.push(Pending { host: ptr::null_mut(), device: from, len, to_device: false })?;
        Ok(number)
    }

    fn summed(&mut self, number: u64) -> Option<u32> {
        let (blocks, all) = self.told.remove(&number)?;
        self.told.retain(|n, _| *n > number);
        let lens = (0..all).step_by(BLOCK).map(|at| BLOCK.min(all - at));
        Some(blocks.iter().zip(lens).fold(0, |sum, (word, len)| combine(sum, *word, len)))
    }

    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>> {
        let told = self.told.remove(&number);
        self.told.retain(|n, _| *n > number);
        told.map(|(blocks, _)| blocks)
    }

    fn mark(&mut self) -> Result<Mark, Fault> {
        Ok(Mark(self.given))
    }

    fn wait(&mut self, mark: Mark) -> Result<(), Fault> {
        self.make(mark.0);
        let mut outcome = Ok(());
        while let Some((_, fault)) = self.told_before(mark.0) {
            outcome = outcome.and(Err(fault));
        }
        outcome
    }

    fn drain(&mut self) {
        self.make(self.given);
    }
}

impl Drop for FakeStream {
    fn drop(&mut self) {
        self.drain();
    }
}
