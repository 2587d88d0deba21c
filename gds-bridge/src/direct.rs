//! The direct path, on which storage servers read and write the device's memory: one part, and its
//! self-test. See `docs/gds.md`.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures_util::future::try_join_all;
use strake_client::Arrived;
use strake_fabric::{Buf, BufMut, ByTransport, Transport};
use strake_proto::{
    Code, Error,
    checksum::{BLOCK, combine},
};

use crate::{
    FileIo, Tier, Unavailable,
    copier::{Call, Flight, Work},
    engine::Engine,
    fault::Fault,
    plan::Measured,
    scratch::{Scratch, pattern},
    transfer::{Place, Stop, Went, no_sums, wanting},
};

/// Maximum number of bytes that a storage server sends with its answer where it can write the lent
/// memory.
const WITH_ANSWER: u64 = 4096;

/// Classifies an error of the network: if something is missing or may not be lent, the tier failed;
/// otherwise the call failed.
fn stopped(e: Error, len: u64) -> Stop {
    match e.code {
        Code::OpNotSupp | Code::NoMem | Code::Overloaded | Code::Busy => {
            Stop::Want(Fault::Export { bytes: len, why: e.message })
        }
        _ => Stop::Call(e),
    }
}

/// Detects that a server sent bytes through host memory instead of writing them to the destination.
/// It may do so if it lacks memory that its card can read from.
fn sent_along(all: &[Arrived], len: u64) -> Option<Stop> {
    let here = |a: &Arrived| a.here.iter().map(|b| b.len() as u64).sum::<u64>();
    let most = all.iter().map(here).max().filter(|n| *n > WITH_ANSWER)?;
    let why = format!(
        "a server sent {most} bytes with its answer, through host memory, instead of writing them \
         there"
    );
    Some(Stop::Want(Fault::Export { bytes: len, why }))
}

/// Called with each tier over host memory that failed.
pub type Beside<'a> = dyn Fn(Tier, &Fault) + Sync + 'a;

impl Engine {
    /// Has the storage servers write a part into the device's memory. The checksums that they
    /// report are compared with those of the device, if it computes any; a part that differs is
    /// fetched once more. `beside` is told of a tier over host memory that failed to copy the rest.
    pub async fn load_direct(
        &self,
        flight: &Arc<Call>,
        p: Place<'_>,
        beside: &Beside<'_>,
    ) -> Result<Went, Stop> {
        let memory = self.device.export(p.gpu, p.len)?;
        let mut damaged = None;
        for _ in 0..2 {
            let all = p.file.read_direct(p.offset, &memory).await.map_err(|e| stopped(e, p.len))?;
            let got = all.last().map_or(0, |a| a.range.end);
            if got < p.len {
                let end = p.offset + got;
                let m = format!("the file ends after {end} bytes, within the range to load");
                return Err(Stop::Call(Error::new(Code::Io, m)));
            }
            if let Some(stop) = sent_along(&all, p.len) {
                return Err(stop);
            }
            self.device.arrived()?;
            let (staged, unsummed) =
                self.fill_up(flight, p.gpu, &all, beside).await.map_err(wanting)?;
            let verified = match unsummed {
                Some(why) => Err(why),
                None => self.verify_direct(flight, p.gpu, &all).await,
            };
            let (summed, unsummed) = match verified {
                Ok(summed) => (summed, None),
                Err(f @ Fault::Damaged { .. }) => {
                    damaged = Some(f);
                    continue;
                }
                // Without checksums it continues only if the caller has agreed to that.
                Err(f) if self.consent && !f.is_of_call() => (false, Some(f)),
                Err(f) => return Err(wanting(no_sums(f))),
            };
            // Fails if the memory was freed in the meantime.
            self.device.check(p.gpu, p.len)?;
            return Ok(Went { by: transports(&all), staged, summed, unsummed });
        }
        Err(Stop::Call(
            damaged.map_or_else(|| Error::new(Code::Io, "a part that was not loaded"), Error::from),
        ))
    }

    /// Copies into the device's memory what no server wrote. Returns the number of bytes, and why
    /// the device computed no checksum of them, if it should.
    async fn fill_up(
        &self,
        flight: &Arc<Call>,
        gpu: u64,
        all: &[Arrived],
        beside: &Beside<'_>,
    ) -> Result<(u64, Option<Fault>), Fault> {
        let (mut staged, mut unsummed) = (0, None);
        for a in all {
            let mut from = a.here.clone();
            let here: u64 = from.iter().map(|b| b.len() as u64).sum();
            let begun = a.placed + here;
            let hole = a.range.end - a.range.start - begun;
            if hole > 0 {
                from.push(BufMut::unpooled(hole as usize).freeze());
            }
            if !from.is_empty() {
                let to = gpu + a.range.start + a.placed;
                unsummed = unsummed.or(self.copy_beside(flight, &from, to, beside).await?);
                staged += here + hole;
            }
        }
        Ok((staged, unsummed))
    }

    /// One copy to the device, by the first path over host memory that works. If such a path fails,
    /// that tier counts as failed, not the one that the copy was made for. Returns why the device
    /// computed no checksum, if it should.
    async fn copy_beside(
        &self,
        flight: &Arc<Call>,
        from: &[Buf],
        to: u64,
        beside: &Beside<'_>,
    ) -> Result<Option<Fault>, Fault> {
        let len = from.iter().map(|b| b.len() as u64).sum();
        let why = || {
            "neither bounce-tcp nor pageable is available, which copy data that no server writes"
                .into()
        };
        let mut last = Fault::Export { bytes: len, why: why() };
        for tier in [Tier::BounceTcp, Tier::Pageable].into_iter().filter(|t| self.is_available(*t))
        {
            let work = Work::Load { from: from.to_vec(), to, sum: self.device_sums.is_ok() };
            let f = match self.worker().copy(flight, tier, work).await {
                Ok(done) => return Ok(done.unsummed),
                Err(f) => self.device.check(to, len).err().unwrap_or(f),
            };
            if f.is_of_call() {
                return Err(f);
            }
            self.lose(tier, &f);
            beside(tier, &f);
            last = f;
        }
        Err(last)
    }

    /// Compares the device's checksums of what the servers wrote. `false`: the device computes
    /// none.
    async fn verify_direct(
        &self,
        flight: &Arc<Call>,
        gpu: u64,
        all: &[Arrived],
    ) -> Result<bool, Fault> {
        if self.device_sums.is_err() {
            return Ok(false);
        }
        let placed = all.iter().filter(|a| a.placed > 0);
        let verify = placed.map(|a| async move {
            let (at, len) = (gpu + a.range.start, a.placed);
            let sum = whole(&self.sums_of(flight, at, len).await?, len);
            if sum == a.sum { Ok(()) } else { Err(Fault::Damaged { addr: at, len }) }
        });
        try_join_all(verify).await.map(|_| true)
    }

    /// The device's checksums of its memory, for each 4 KiB.
    async fn sums_of(&self, flight: &Arc<Call>, from: u64, len: u64) -> Result<Vec<u32>, Fault> {
        let work = Work::Sum { from, len: len as usize };
        Ok(self.worker().copy(flight, Tier::GpuRdma, work).await?.sums)
    }

    /// Has the storage servers read a part from the device's memory. The device computes its
    /// checksums first. If the servers find different ones, both steps are repeated once.
    pub async fn save_direct(&self, flight: &Arc<Call>, p: Place<'_>) -> Result<Went, Stop> {
        let memory = self.device.export(p.gpu, p.len)?;
        for again in [true, false] {
            let sums = self.sums_of(flight, p.gpu, p.len).await.map_err(|f| wanting(no_sums(f)))?;
            match p.file.write_direct(p.offset, &memory, &sums).await {
                Ok(()) => {
                    // Fails if the memory was freed in the meantime: then it is unknown whose bytes
                    // were saved.
                    self.device.check(p.gpu, p.len)?;
                    return Ok(Went {
                        by: ByTransport::of(Transport::Rdma, p.len),
                        staged: 0,
                        summed: true,
                        unsummed: None,
                    });
                }
                Err(e) if e.code == Code::Resend && again => {}
                Err(e) if e.code == Code::Resend => {
                    return Err(Stop::Call(Fault::Damaged { addr: p.gpu, len: p.len }.into()));
                }
                Err(e) => return Err(stopped(e, p.len)),
            }
        }
        Err(Stop::Call(Error::new(Code::Io, "a part that was not saved")))
    }
}

/// Bytes of a part by transport; those of holes count as local.
fn transports(all: &[Arrived]) -> ByTransport {
    let mut by = ByTransport::default();
    for a in all {
        let mut of = ByTransport::came(&a.here);
        of.add(Transport::Rdma, a.placed);
        of.add(Transport::Local, a.range.end - a.range.start - of.sum());
        by += of;
    }
    by
}

/// The checksum of the whole range, from those of its blocks.
fn whole(sums: &[u32], len: u64) -> u32 {
    let lens = (0..len as usize).step_by(BLOCK).map(|at| BLOCK.min(len as usize - at));
    sums.iter().zip(lens).fold(0, |all, (sum, n)| combine(all, *sum, n))
}

/// How long a self-test may wait for the cluster. A reply takes milliseconds; opening a bridge must
/// not wait for servers that are away.
const PATIENCE: Duration = Duration::from_secs(15);

/// As [`there_and_back`], but a cluster that does not answer makes the tier unavailable.
pub async fn test(engine: &Engine, bounce: Option<Measured>) -> Result<Measured, Unavailable> {
    let tested = tokio::time::timeout(PATIENCE, there_and_back(engine, bounce)).await;
    tested.unwrap_or_else(|_| {
        Err(Unavailable::NoScratch {
            why: format!("the cluster did not answer within {} s", PATIENCE.as_secs()),
        })
    })
}

/// Moves patterns from the device's memory to an unnamed file and back. Measures how much faster or
/// slower that is than the same file over host memory, and scales `bounce` by it, which was
/// measured without a network.
async fn there_and_back(
    engine: &Engine,
    bounce: Option<Measured>,
) -> Result<Measured, Unavailable> {
    let file = engine.network.scratch().await.map_err(no_file)?;
    let (part, count) = (engine.part as u64, engine.workers.len() as u64);
    let no_room = |_| Unavailable::TestStopped(Fault::NoMemory { bytes: 2 * part });
    // One part is sent, another one is received.
    let scratch = Scratch::new(&engine.device, 2 * part).map_err(no_room)?;
    let flight = Flight(Arc::default());
    let mut seed = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let mut took = Took::default();
    for n in 0..count {
        let sent = pattern(BufMut::unpooled(engine.part), &mut seed);
        let test = Test {
            engine,
            flight: &flight.0,
            file: &*file,
            offset: n * part,
            from: scratch.addr,
            to: scratch.addr + part,
        };
        let once = test.once(sent).await?;
        // The first round opens the connections, so it does not count.
        if n > 0 || count == 1 {
            took.add(once);
        }
    }
    Ok(took.ranked(bounce, part * count.saturating_sub(1).max(1)))
}

/// Duration of a save and a load, by the direct path and over host memory.
#[derive(Default)]
struct Took {
    save: [Duration; 2],
    load: [Duration; 2],
}

impl Took {
    fn add(&mut self, o: Took) {
        for i in 0..2 {
            self.save[i] += o.save[i];
            self.load[i] += o.load[i];
        }
    }

    fn ranked(&self, bounce: Option<Measured>, bytes: u64) -> Measured {
        let rate = |[direct, other]: [Duration; 2], of: Option<f64>| {
            let secs = direct.as_secs_f64().max(1e-9);
            of.map_or(bytes as f64 / secs, |of| of * other.as_secs_f64() / secs)
        };
        Measured {
            load: rate(self.load, bounce.map(|m| m.load)),
            save: rate(self.save, bounce.map(|m| m.save)),
        }
    }
}

/// The transfer of one pattern.
struct Test<'a> {
    engine: &'a Engine,
    flight: &'a Arc<Call>,
    file: &'a dyn FileIo,
    offset: u64,
    from: u64,
    to: u64,
}

impl Test<'_> {
    async fn once(&self, sent: Buf) -> Result<Took, Unavailable> {
        let len = sent.len() as u64;
        let at = |gpu| Place { file: self.file, offset: self.offset, gpu, len };
        let stop = |s| match s {
            Stop::Tier(f) | Stop::Want(f) | Stop::Once(f) => Unavailable::TestStopped(f),
            Stop::Call(e) => Unavailable::NoScratch { why: e.message },
        };
        self.copy(Work::Load { from: vec![sent.clone()], to: self.from, sum: false }).await?;
        let mut took = Took::default();
        let begun = Instant::now();
        if self.engine.device_sums.is_ok() {
            self.engine.save_direct(self.flight, at(self.from)).await.map_err(stop)?;
            took.save[0] = begun.elapsed();
        } else {
            self.write(sent.clone()).await?;
        }
        let begun = Instant::now();
        self.engine.load_direct(self.flight, at(self.to), &|_, _| {}).await.map_err(stop)?;
        took.load[0] = begun.elapsed();
        let came = self
            .copy(Work::Save { from: self.to, into: BufMut::unpooled(sent.len()), sum: false })
            .await?;
        let came = came.unwrap_or_else(|| BufMut::unpooled(0));
        if came.len() != sent.len() || came[..] != sent[..] {
            let at = sent.iter().zip(came.iter()).position(|(a, b)| a != b).unwrap_or(came.len());
            return Err(Unavailable::TestFailed { at: at as u64 });
        }
        // The same over host memory.
        let begun = Instant::now();
        let read = self.file.read(self.offset, sent.len()).await.map_err(no_file)?;
        self.copy(Work::Load { from: read, to: self.to, sum: false }).await?;
        took.load[1] = begun.elapsed();
        let begun = Instant::now();
        let into = self.engine.network.pool().get_now(sent.len());
        if let Some(b) = self.copy(Work::Save { from: self.to, into, sum: false }).await? {
            self.write(b.freeze()).await?;
        }
        took.save[1] = begun.elapsed();
        Ok(took)
    }

    async fn write(&self, b: Buf) -> Result<(), Unavailable> {
        self.file.write(self.offset, b).await.map(drop).map_err(no_file)
    }

    async fn copy(&self, work: Work) -> Result<Option<BufMut>, Unavailable> {
        let done = self.engine.worker().copy(self.flight, self.engine.copies_as(), work).await;
        done.map(|d| d.saved).map_err(Unavailable::TestStopped)
    }
}

fn no_file(e: Error) -> Unavailable {
    Unavailable::NoScratch { why: e.message }
}
