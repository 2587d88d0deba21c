//! Checksums computed by the device. The driver compiles the kernel's text at first use.

use std::{collections::BTreeMap, ffi::c_void, ptr};

use strake_fabric::{BufMut, REGION};
use strake_proto::checksum::{BLOCK, combine, crc32c};

use super::{Gpu, OUT_OF_MEMORY, PORTABLE, table::Handle};
use crate::fault::Fault;

/// PTX, which drivers from CUDA 9 on compile for every device since Maxwell.
const TEXT: &str = concat!(include_str!("crc32c.ptx"), "\0");
/// Threads of a thread group.
const GROUP: u32 = 128;
/// Threads that share a block, each with one result word: the checksum is the XOR of all words.
const PIECES: usize = 32;
/// Maximum number of blocks of a part.
const MOST: usize = REGION / BLOCK;
/// Size of the result words of a block, and of a part, in bytes.
const SAID: usize = 4 * PIECES;
const ROOM: usize = SAID * MOST;

/// The kernel in a context.
pub struct Kernel {
    module: Handle,
    function: Handle,
}

/// Result words of the blocks of one part: written by the device to its own memory, and copied to
/// the host's.
struct Room {
    device: u64,
    host: BufMut,
    pinned: bool,
}

struct Pending {
    room: Room,
    len: usize,
}

/// The pending checksums of one stream.
#[derive(Default)]
pub struct Sums {
    given: u64,
    pending: BTreeMap<u64, Pending>,
    spare: Vec<Room>,
}

impl Gpu {
    /// Loads the kernel into the current context.
    pub fn load_kernel(&self) -> Result<Kernel, Fault> {
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the text ends with a zero; the calls write one handle each.
        unsafe {
            self.table.call(
                "cuModuleLoadData",
                (self.table.module_load)(&mut module, TEXT.as_ptr().cast()),
            )?;
            let found =
                (self.table.module_function)(&mut function, module, c"strake_crc32c".as_ptr());
            self.table.call("cuModuleGetFunction", found).inspect_err(|_| {
                (self.table.module_unload)(module);
            })?;
        }
        Ok(Kernel { module, function })
    }

    /// Checks that the kernel's results for known bytes equal those of this machine.
    pub fn try_kernel(&self, kernel: &Kernel) -> Result<(), String> {
        const LEN: usize = 3 * BLOCK + 77;
        let mut bytes = BufMut::unpooled(LEN);
        for (i, b) in bytes.iter_mut().enumerate() {
            *b = (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3];
        }
        let mut memory = 0;
        let (mut stream, mut sums) = (ptr::null_mut(), Sums::default());
        // SAFETY: writes one address.
        let room = self.table.call("cuMemAlloc", unsafe { (self.table.alloc)(&mut memory, LEN) });
        room.map_err(|e| e.to_string())?;
        // SAFETY: writes one handle.
        let made = self.table.call("cuStreamCreate", unsafe {
            (self.table.stream_create)(&mut stream, super::NON_BLOCKING)
        });
        let told = made.and_then(|()| {
            // SAFETY: `bytes` live until the stream was waited for.
            let code =
                unsafe { (self.table.to_device)(memory, bytes.as_ptr().cast(), LEN, stream) };
            let number = self
                .table
                .call("cuMemcpyHtoDAsync", code)
                .and_then(|()| sums.sum(self, kernel, stream, memory, LEN));
            // SAFETY: the stream was made above.
            let waited =
                self.table.call("cuStreamSynchronize", unsafe { (self.table.stream_wait)(stream) });
            waited.and(number)
        });
        let outcome = match told.map(|n| sums.summed(n)) {
            Ok(Some(sum)) if sum == crc32c(&bytes) => Ok(()),
            Ok(sum) => {
                Err(format!("it returns {sum:#x?} for bytes whose CRC32C is {:#x}", crc32c(&bytes)))
            }
            Err(e) => Err(e.to_string()),
        };
        sums.free(self);
        // SAFETY: both were made above, and nothing uses them any more.
        unsafe {
            if !stream.is_null() {
                (self.table.stream_destroy)(stream);
            }
            (self.table.free)(memory);
        }
        outcome.map_err(|e| format!("the checksum kernel does not work on this device: {e}"))
    }

    /// Unloads the kernel from the current context.
    pub fn unload(&self, kernel: &Kernel) {
        // SAFETY: loaded by `load_kernel`, and no stream runs it any more.
        unsafe { (self.table.module_unload)(kernel.module) };
    }
}

impl Sums {
    fn room(&mut self, gpu: &Gpu) -> Result<Room, Fault> {
        if let Some(r) = self.spare.pop() {
            return Ok(r);
        }
        let (mut device, mut host) = (0, BufMut::unpooled(ROOM));
        // SAFETY: writes one address.
        match unsafe { (gpu.table.alloc)(&mut device, ROOM) } {
            OUT_OF_MEMORY => return Err(Fault::NoMemory { bytes: ROOM as u64 }),
            code => gpu.table.call("cuMemAlloc", code)?,
        }
        // If it cannot be pinned it is slower, but works.
        // SAFETY: whole pages, which live until they were unregistered in `free`.
        let pinned =
            unsafe { (gpu.table.host_register)(host.as_mut_ptr().cast(), ROOM, PORTABLE) } == 0;
        Ok(Room { device, host, pinned })
    }

    /// Queues the kernel and the copy of its results.
    pub fn sum(
        &mut self,
        gpu: &Gpu,
        kernel: &Kernel,
        stream: Handle,
        from: u64,
        len: usize,
    ) -> Result<u64, Fault> {
        let blocks = len.div_ceil(BLOCK);
        if blocks > MOST {
            return Err(Fault::NoMemory { bytes: (SAID * blocks) as u64 });
        }
        let mut room = self.room(gpu)?;
        let (mut from, mut bytes, mut block, mut to) =
            (from, len as u64, BLOCK as u32, room.device);
        let mut params: [*mut c_void; 4] = [
            (&raw mut from).cast(),
            (&raw mut bytes).cast(),
            (&raw mut block).cast(),
            (&raw mut to).cast(),
        ];
        let grid = ((blocks * PIECES) as u32).div_ceil(GROUP);
        // SAFETY: four parameters of the types that the kernel has, which the call copies; it reads
        // and writes device memory only. The host's room is held until the sum is asked for or the
        // stream is gone.
        let queued = unsafe {
            let none = ptr::null_mut();
            let code = (gpu.table.launch)(
                kernel.function,
                grid,
                1,
                1,
                GROUP,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                none,
            );
            gpu.table.call("cuLaunchKernel", code).and_then(|()| {
                let code = (gpu.table.to_host)(
                    room.host.as_mut_ptr().cast(),
                    room.device,
                    SAID * blocks,
                    stream,
                );
                gpu.table.call("cuMemcpyDtoHAsync", code)
            })
        };
        self.given += 1;
        self.pending.insert(self.given, Pending { room, len });
        queued.map(|()| self.given)
    }

    /// The results of the blocks, and their total length. The stream must have been waited for.
    fn told(&mut self, number: u64) -> Option<(Vec<u32>, usize)> {
        let later = self.pending.split_off(&(number + 1));
        let told = std::mem::replace(&mut self.pending, later);
        let mut found = None;
        for (n, p) in told {
            if n == number {
                let word = |w: &[u8]| u32::from_le_bytes([w[0], w[1], w[2], w[3]]);
                let sums = p
                    .room
                    .host
                    .chunks_exact(SAID)
                    .map(|said| said.chunks_exact(4).fold(0, |s, w| s ^ word(w)));
                found = Some((sums.take(p.len.div_ceil(BLOCK)).collect(), p.len));
            }
            self.spare.push(p.room);
        }
        found
    }

    /// The checksum of the whole range. The stream must have been waited for.
    pub fn summed(&mut self, number: u64) -> Option<u32> {
        let (blocks, all) = self.told(number)?;
        let lens = (0..all).step_by(BLOCK).map(|at| BLOCK.min(all - at));
        Some(blocks.iter().zip(lens).fold(0, |sum, (word, len)| combine(sum, *word, len)))
    }

    /// The checksums of its blocks. The stream must have been waited for.
    pub fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>> {
        self.told(number).map(|(blocks, _)| blocks)
    }

    /// Frees the memory, which must be unused.
    pub fn free(&mut self, gpu: &Gpu) {
        let pending = std::mem::take(&mut self.pending).into_values().map(|p| p.room);
        for mut room in self.spare.drain(..).chain(pending) {
            // SAFETY: allocated and registered in `room`.
            unsafe {
                if room.pinned {
                    (gpu.table.host_unregister)(room.host.as_mut_ptr().cast());
                }
                (gpu.table.free)(room.device);
            }
        }
    }
}
