//! WebDataset shards: tar files of samples, written and read as a data loader does.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use sha2::{Digest, Sha256};

use crate::{Result, samples::Sample};

const SHARD_BYTES: u64 = 16 << 20;

/// Packs the samples in order; each shard is synced before the next one begins. The bytes are read
/// from their sources again, so `verify` finds a source that has changed in between.
pub fn pack(samples: &[Sample], dir: &Path) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(dir)?;
    let mut shards = Vec::new();
    let mut rest = samples;
    while !rest.is_empty() {
        let mut bytes = 0;
        let n = rest
            .iter()
            .take_while(|s| {
                bytes += s.len;
                bytes <= SHARD_BYTES
            })
            .count()
            .max(1);
        let (now, later) = rest.split_at(n);
        let shard = dir.join(format!("shard-{:06}.tar", shards.len()));
        write_shard(&shard, now).map_err(|e| format!("{}: {e}", shard.display()))?;
        shards.push(shard);
        rest = later;
    }
    Ok(shards)
}

fn write_shard(shard: &Path, samples: &[Sample]) -> Result<()> {
    let mut tar = tar::Builder::new(BufWriter::with_capacity(1 << 20, File::create(shard)?));
    for s in samples {
        let mut header = tar::Header::new_gnu();
        header.set_size(s.len);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append_data(&mut header, &s.name, File::open(&s.path)?.take(s.len))?;
    }
    let mut out = tar.into_inner()?;
    out.flush()?;
    out.into_inner().map_err(|e| e.to_string())?.sync_all()?;
    Ok(())
}

/// Reads all shards with `readers` threads. Every sample must be there once, with the SHA-256 of
/// its source. Returns the number of bytes.
pub fn verify(shards: &[PathBuf], samples: &[Sample], readers: usize) -> Result<u64> {
    let expected: BTreeMap<&str, &Sample> = samples.iter().map(|s| (s.name.as_str(), s)).collect();
    let (queue, bytes, count) = (Mutex::new(shards.iter()), AtomicU64::new(0), AtomicU64::new(0));
    let reader = || -> Result<()> {
        loop {
            let Some(shard) = queue.lock().map_err(|_| "a reader failed")?.next() else {
                return Ok(());
            };
            let mut tar = tar::Archive::new(BufReader::with_capacity(1 << 20, File::open(shard)?));
            for entry in tar.entries()? {
                let mut entry = entry?;
                let name = entry.path()?.to_string_lossy().into_owned();
                let want = expected
                    .get(name.as_str())
                    .ok_or_else(|| format!("{}: unknown sample {name}", shard.display()))?;
                let mut data = Vec::with_capacity(want.len as usize);
                entry.read_to_end(&mut data)?;
                if <[u8; 32]>::from(Sha256::digest(&data)) != want.sha256 {
                    return Err(format!(
                        "{}: sample {name} differs from {}",
                        shard.display(),
                        want.path.display()
                    )
                    .into());
                }
                bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|s| -> Result<()> {
        let threads: Vec<_> = (0..readers).map(|_| s.spawn(reader)).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a reader panicked")?)
    })?;
    let found = count.into_inner();
    if found != samples.len() as u64 {
        return Err(format!("{found} of {} samples found", samples.len()).into());
    }
    Ok(bytes.into_inner())
}
