//! Looking for decay: whether a chunk is stored as it was written. Records are read from the store,
//! not from memory, and every block is read from the device.

use std::ops::Range;

use strake_proto::{
    Code, Error, Result,
    checksum::{BLOCK, crc32c},
    data::Version,
    layout::MAX_CHUNK,
};

use super::{
    api::Engine,
    chunk::Key,
    read::{Piece, Source, pieces, segments_of},
    record::{HOLE, Header, SEG_BLOCKS, SEG_BYTES},
    shared::{Shared, add},
};

/// Bytes of a chunk that one step checks. It bounds the memory of a look, and how long blocks that
/// an update frees meanwhile must wait before they are used again.
pub const STEP: u32 = 1 << 20;

/// What a check found in a chunk, or in a part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Version of the chunk; the default if its header is damaged.
    pub version: Version,
    /// Length of the chunk in bytes; 0 if its header is damaged.
    pub len: u32,
    /// Bytes read from the device.
    pub bytes: u64,
    /// Unreadable bytes of the chunk, in order, no two ranges adjoining: whole blocks, cut off at
    /// the chunk's end.
    pub damaged: Vec<Range<u32>>,
    /// The header is damaged: nothing of the chunk can be read.
    pub headless: bool,
    /// Records that were damaged in the store and whole in memory. They are written again with the
    /// next flush.
    pub healed: usize,
}

impl Look {
    /// Whether nothing is damaged.
    pub fn is_whole(&self) -> bool {
        self.damaged.is_empty() && !self.headless
    }

    fn bad(&mut self, part: Range<u32>) {
        let part = part.start..part.end.min(self.len);
        match self.damaged.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => self.damaged.push(part),
        }
    }

    fn append(&mut self, next: Look) {
        self.bytes += next.bytes;
        self.healed += next.healed;
        self.headless |= next.headless;
        next.damaged.into_iter().for_each(|d| self.bad(d));
    }
}

impl Engine {
    /// Checks a part of a committed chunk. A part of more than [`STEP`] bytes takes as much memory.
    /// `None`: no such chunk. `Corrupt`: the store itself cannot read the chunk's records. Counts
    /// every damaged block and record that it finds.
    pub async fn check(&self, key: &Key, part: Range<u32>) -> Result<Option<Look>> {
        let shared = &self.shared;
        let end_in = |h: Option<&Header>| h.map_or(0, |h| h.meta.len.min(part.end));
        let view = shared.view_of(key, |h| segments_of(part.start, end_in(h)), Source::Store)?;
        let Some(header) = &view.header else { return Ok(None) };
        let (version, len, headless) = (header.meta.version, header.meta.len, header.damaged);
        let mut look = Look { version, len, headless, healed: view.healed, ..Look::default() };
        if headless {
            return Ok(Some(look));
        }
        let (from, to) =
            (part.start as usize / BLOCK, (end_in(Some(header)) as usize).div_ceil(BLOCK));
        let zero_sum = crc32c(&shared.zeros[..BLOCK]);
        for (seg, record) in &view.segments {
            let first = usize::from(*seg) * SEG_BLOCKS;
            let blocks = first.max(from)..(first + SEG_BLOCKS).min(to);
            if record.as_ref().is_some_and(|s| s.damaged) {
                let start = u32::from(*seg) * SEG_BYTES;
                look.bad(start..start + SEG_BYTES);
                continue;
            }
            for p in
                pieces(key, &view.segments, blocks, zero_sum)?.iter().filter(|p| p.block != HOLE)
            {
                look.bytes += (p.sums.len() * BLOCK) as u64;
                for at in shared.bad_blocks(key, p).await? {
                    look.bad((at * BLOCK) as u32..((at + 1) * BLOCK) as u32);
                }
            }
        }
        Ok(Some(look))
    }

    /// As [`Engine::check`], of a whole chunk, step by step. The caller must keep updates of the
    /// chunk away.
    pub async fn check_whole(&self, key: &Key) -> Result<Option<Look>> {
        let mut all: Option<Look> = None;
        for from in (0..MAX_CHUNK as u32).step_by(STEP as usize) {
            let Some(look) = self.check(key, from..from + STEP).await? else { break };
            let end = look.len;
            match &mut all {
                Some(all) => all.append(look),
                None => all = Some(look),
            }
            if from + STEP >= end {
                break;
            }
        }
        Ok(all)
    }
}

impl Shared {
    /// The damaged blocks of a piece, counted from the start of the chunk.
    async fn bad_blocks(&self, key: &Key, p: &Piece) -> Result<Vec<usize>> {
        let buf =
            match self.read_device(key, p.block, self.pool.get_now(p.sums.len() * BLOCK)).await {
                Err(e) if e.code == Code::Io => return self.unreadable_blocks(key, p, e).await,
                other => other?,
            };
        let blocks = buf.chunks(BLOCK).zip(&p.sums).enumerate();
        let bad: Vec<usize> = blocks
            .filter(|(_, (bytes, sum))| crc32c(bytes) != **sum)
            .map(|(i, _)| p.at + i)
            .collect();
        if let Some(first) = bad.first() {
            let m = format!(
                "{} blocks from block {first} on do not match their checksums (device block {} of {})",
                bad.len(),
                p.block + (first - p.at) as u64,
                self.device.name()
            );
            self.note_damage(key, &Error::new(Code::Corrupt, m));
            add(&self.counters.damaged, bad.len() as u64 - 1);
        }
        Ok(bad)
    }

    /// Called when the device cannot read the piece as a whole. Returns the blocks that cannot be
    /// read or do not match their checksums. `Io` if no block can be read.
    async fn unreadable_blocks(&self, key: &Key, p: &Piece, e: Error) -> Result<Vec<usize>> {
        let mut bad = Vec::new();
        for (i, sum) in p.sums.iter().enumerate() {
            let buf = self.read_device(key, p.block + i as u64, self.pool.get_now(BLOCK)).await;
            if !buf.is_ok_and(|bytes| crc32c(&bytes) == *sum) {
                bad.push(p.at + i);
            }
        }
        if bad.len() == p.sums.len() && bad.len() > 1 {
            return Err(e);
        }
        self.note_damage(key, &e.context(format!("{} blocks cannot be read", bad.len())));
        add(&self.counters.damaged, (bad.len() as u64).saturating_sub(1));
        Ok(bad)
    }
}
