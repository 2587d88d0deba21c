//! The self-test of the tier.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant, SystemTime},
};

use strake_fabric::{Buf, BufMut};
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    cufile::CuFile,
    readers::{Local, Open, Read},
    store::{Copy, Header, Making, Sealed, check_folder},
};
use crate::{
    Unavailable,
    copier::{Flight, Work},
    engine::Engine,
    fault::Fault,
    plan::Measured,
    scratch::{Scratch, pattern},
    transfer::Stop,
};

/// Reads patterns from an unnamed file in the folder to the device, and checks what arrived. Like
/// [`crate::direct::test`], it measures how much faster or slower that is than the same bytes from
/// a file of the cluster, and scales `bounce` by it; without a cluster, it measures the speed
/// itself.
pub(crate) async fn test(
    engine: &Engine,
    bounce: Option<Measured>,
) -> Result<Measured, Unavailable> {
    let local = engine.local.as_ref().ok_or(Unavailable::NoFolder)?;
    let cufile = local.cufile.clone()?;
    let patience = cufile.patience();
    if local.stuck.load(Relaxed) {
        return Err(Unavailable::Hung { seconds: patience.as_secs() });
    }
    let (part, count) = (engine.part as u64, engine.workers.len() as u64);
    let mut seed = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let sent: Vec<_> =
        (0..count).map(|_| pattern(BufMut::unpooled(engine.part), &mut seed)).collect();
    let no_room = |_| Unavailable::TestStopped(Fault::NoMemory { bytes: part });
    let memory = Arc::new(Scratch::new(&engine.device, part).map_err(no_room)?);
    let from = copy_with(local, &cufile, &sent).await?;
    // Dropped before the memory; nothing in it waits for a read that does not end.
    let flight = Flight(Arc::default());
    let test = Test { engine, local, patience, from: &from, memory: &memory, flight: &flight };
    let mut took = Duration::ZERO;
    for (n, sent) in sent.iter().enumerate() {
        // Parts that begin or end within a block are handled differently, so they are tested, too.
        let (skip, len) = if n == 0 { (1000, part - 2000) } else { (0, part) };
        took += test.read(n as u64 * part + skip, skip, len).await?;
        test.compare(skip, &sent[skip as usize..][..len as usize]).await?;
    }
    let bytes = (part * count - 2000) as f64;
    let other = match bounce {
        Some(b) => by_the_cluster(engine, &flight, memory.addr, &sent).await.map(|t| (b.load, t)),
        None => None,
    };
    let seconds = took.as_secs_f64().max(1e-9);
    let load = other.map_or(bytes / seconds, |(rate, other)| rate * other.as_secs_f64() / seconds);
    Ok(Measured { load, save: 0.0 })
}

/// The transfer of parts of one copy to the start of the memory.
struct Test<'a> {
    engine: &'a Engine,
    local: &'a Local,
    patience: Duration,
    from: &'a Arc<Open>,
    memory: &'a Arc<Scratch>,
    flight: &'a Flight,
}

impl Test<'_> {
    /// Reads bytes at `offset` of the copy to the place `skip` of the memory. Returns how long that
    /// took.
    async fn read(&self, offset: u64, skip: u64, len: u64) -> Result<Duration, Unavailable> {
        let begun = Instant::now();
        let read = Read {
            call: Arc::default(),
            from: self.from.clone(),
            offset,
            to: self.memory.addr + skip,
            len,
            sum: self.engine.device_sums.is_ok(),
            // A read that is delayed by others, in the queue and up to three times in rounds, must
            // fail before it is itself considered hung.
            patience: self.patience / 5,
            consent: self.engine.consent,
            _memory: Some(self.memory.clone()),
        };
        let read = timeout(self.patience, self.local.read(read)).await.map_err(|_| {
            self.local.stuck.store(true, Relaxed);
            Unavailable::Hung { seconds: self.patience.as_secs() }
        })?;
        read.map_err(|stop| match stop {
            Stop::Tier(f) | Stop::Want(f) | Stop::Once(f) => Unavailable::TestStopped(f),
            Stop::Call(e) => Unavailable::TestStopped(Fault::Driver {
                call: "a read",
                code: e.code.errno(),
                name: e.message,
            }),
        })?;
        Ok(begun.elapsed())
    }

    /// Compares the memory from `skip` on with what was sent there.
    async fn compare(&self, skip: u64, sent: &[u8]) -> Result<(), Unavailable> {
        let into = BufMut::unpooled(sent.len());
        let work = Work::Save { from: self.memory.addr + skip, into, sum: false };
        let copied = self.engine.worker().copy(&self.flight.0, self.engine.copies_as(), work).await;
        let came = copied.map_err(Unavailable::TestStopped)?.saved;
        let came = came.unwrap_or_else(|| BufMut::unpooled(0));
        if came[..] != *sent {
            let at = sent.iter().zip(came.iter()).position(|(a, b)| a != b).unwrap_or(came.len());
            return Err(Unavailable::TestFailed { at: at as u64 });
        }
        Ok(())
    }
}

/// An unnamed copy in the folder that holds these parts, open.
async fn copy_with(
    local: &Local,
    cufile: &Arc<dyn CuFile>,
    parts: &[Buf],
) -> Result<Arc<Open>, Unavailable> {
    let bad = |why: String| Unavailable::BadFolder { dir: local.dir().display().to_string(), why };
    let (dir, all) = (local.dir().to_path_buf(), parts.to_vec());
    let made = spawn_blocking(move || scratch(&dir, &all)).await.map_err(|e| bad(e.to_string()))?;
    Open::new(made.map_err(|e| bad(e.message))?, cufile).map_err(Unavailable::TestStopped)
}

/// An unnamed copy that holds these parts.
fn scratch(dir: &Path, parts: &[Buf]) -> strake_proto::Result<Copy> {
    check_folder(dir)?;
    let size = parts.iter().map(|p| p.len() as u64).sum();
    let sealed = Sealed { fs: [0; 16], ino: 0, size, sha256: [0; 32], root: [0; 32] };
    let mut making = Making::begin(dir, Header { sealed, staged_ns: 0, path: String::new() })?;
    parts.iter().try_for_each(|p| making.push(p))?;
    making.unnamed()
}

/// How long the same parts take from a file of the cluster over host memory. `None`: there is no
/// such file.
async fn by_the_cluster(
    engine: &Engine,
    flight: &Flight,
    to: u64,
    parts: &[Buf],
) -> Option<Duration> {
    let measure = async {
        let file = engine.network.scratch().await.ok()?;
        let mut took = Duration::ZERO;
        for (n, part) in parts.iter().enumerate() {
            let offset = (n * part.len()) as u64;
            file.write(offset, part.clone()).await.ok()?;
            let begun = Instant::now();
            let from = file.read(offset, part.len()).await.ok()?;
            let work = Work::Load { from, to, sum: false };
            engine.worker().copy(&flight.0, engine.copies_as(), work).await.ok()?;
            took += begun.elapsed();
        }
        Some(took)
    };
    timeout(Duration::from_secs(15), measure).await.ok().flatten()
}
