//! Moves bytes between our files and the program's memory.

use std::{sync::Arc, time::Instant};

use strake_gds::{Cuda, Failed, FileIo, GpuMem, Report, Transfer, Watched};
use strake_proto::{Error, Result, layout::MAX_FILE_SIZE};

use crate::{
    abi,
    driver::{Driver, OurFile, Place},
    errors::{CallError, Done, say},
    host,
    stats::{Access, By, Ended},
};

/// How often a read is tried when the file is truncated meanwhile.
const LOOKS: u32 = 16;
/// Host memory is copied through a buffer of at most this many bytes.
const HOST_PIECE: usize = 16 << 20;

/// How a call is ordered against work that the program has queued on streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The call comes after everything in the default stream, as a cuMemcpy would.
    Default,
    /// Earlier work has been waited for already.
    Settled,
}

/// What a program asked for.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub access: Access,
    pub by: By,
    pub order: Order,
    pub base: u64,
    pub size: usize,
    pub offset: i64,
    pub base_offset: i64,
}

/// Where memory lies.
enum Memory {
    Device(u32, Cuda),
    Host,
}

/// The account of one call's bytes.
#[derive(Default)]
struct Account {
    device: Option<(u32, [u8; 16])>,
    reports: Vec<Report>,
    host: u64,
}

impl Asked {
    /// The address and offset, or cuFile's code for an invalid value.
    fn check(&self) -> Done<(u64, u64)> {
        let bad = CallError::Op(abi::INVALID_VALUE);
        let (offset, base_offset) = (u64::try_from(self.offset), u64::try_from(self.base_offset));
        let (Ok(offset), Ok(base_offset)) = (offset, base_offset) else { return Err(bad) };
        if self.base == 0 || isize::try_from(self.size).is_err() {
            return Err(bad);
        }
        let addr = self.base.checked_add(base_offset).ok_or(bad)?;
        addr.checked_add(self.size as u64).ok_or(CallError::Op(abi::CUDA_POINTER_RANGE_ERROR))?;
        Ok((addr, offset))
    }

    fn unaligned(&self) -> bool {
        [self.offset, self.base_offset, self.size as i64].iter().any(|n| n & 4095 != 0)
    }
}

/// Moves bytes and records the call, whatever its outcome. The caller must hold an `Active`.
pub fn transfer(driver: &Driver, of: &OurFile, asked: &Asked) -> Done<usize> {
    let (begun, mut account) = (Instant::now(), Account::default());
    let outcome = attempt(driver, of, asked, &mut account);
    driver.stats.ended(&Ended {
        access: asked.access,
        by: asked.by,
        device: account.device,
        unaligned: asked.unaligned(),
        took: begun.elapsed(),
        outcome,
        reports: &account.reports,
        host: account.host,
    });
    outcome
}

fn attempt(driver: &Driver, of: &OurFile, asked: &Asked, account: &mut Account) -> Done<usize> {
    let (addr, offset) = asked.check()?;
    let access = of.found.flags as i32 & libc::O_ACCMODE;
    let may =
        access == libc::O_RDWR || (access == libc::O_WRONLY) == (asked.access == Access::Write);
    if !may {
        return Err(CallError::Os(libc::EBADF));
    }
    if asked.size == 0 {
        return Ok(0);
    }
    let memory = whereabouts(driver, of, addr, asked.size as u64)?;
    if let Memory::Device(n, cuda) = &memory {
        account.device = Some((*n, cuda.uuid().unwrap_or_default()));
    }
    if asked.order == Order::Default {
        // Host memory must wait, too: the stream may contain a copy to or from it.
        let cuda = if let Memory::Device(_, cuda) = &memory {
            cuda.clone()
        } else {
            driver.cuda(of.home)?
        };
        cuda.wait_for_default().map_err(|f| CallError::from(&f))?;
    }
    let place = driver.place(of, if let Memory::Device(n, _) = memory { n } else { of.home })?;
    let host = matches!(memory, Memory::Host);
    match (asked.access, host) {
        (Access::Read, false) => load(of, &place, (addr, offset), asked.size, account),
        (Access::Write, false) => save(of, &place, (addr, offset), asked.size, account),
        (Access::Read, true) => read_host(&place, (addr, offset), asked.size, account),
        (Access::Write, true) => write_host(&place, (addr, offset), asked.size, account),
    }
}

fn whereabouts(driver: &Driver, of: &OurFile, addr: u64, len: u64) -> Done<Memory> {
    let fault = |f| CallError::from(&f);
    let Some(device) = driver.cuda(of.home)?.device_of(addr).map_err(fault)? else {
        return Ok(Memory::Host);
    };
    let cuda = driver.cuda(device)?;
    cuda.check(addr, len).map_err(|f| {
        say(|| f.to_string());
        CallError::from(&f)
    })?;
    Ok(Memory::Device(device, cuda))
}

fn io(e: &Error) -> CallError {
    say(|| e.to_string());
    CallError::of_io(e)
}

/// Records the report of a bridge call.
fn noted(outcome: Result<Report, Failed>, account: &mut Account) -> Result<()> {
    match outcome {
        Ok(report) => {
            account.reports.push(report);
            Ok(())
        }
        Err(Failed { error, report }) => {
            account.reports.push(*report);
            Err(error)
        }
    }
}

fn one(file: Arc<dyn FileIo>, (gpu, offset): (u64, u64), len: u64) -> [Transfer; 1] {
    [Transfer { file, offset, gpu, len }]
}

/// As pread(2): fewer bytes at the end of the file. The size is checked first, because the bridge
/// fails on a range beyond the end. If the file is truncated meanwhile, the remaining range is read
/// again.
fn load(
    of: &OurFile,
    place: &Place,
    at: (u64, u64),
    size: usize,
    account: &mut Account,
) -> Done<usize> {
    let (session, file) = place;
    let mut end = session.size(file).map_err(|e| io(&e))?;
    for look in 1.. {
        let n = (size as u64).min(end.saturating_sub(at.1));
        if n == 0 {
            break;
        }
        let watched = Arc::new(Watched::new(file.clone(), end));
        let outcome = noted(session.load(&one(watched.clone(), at, n), of.policy), account);
        let Err(e) = outcome else { return Ok(n as usize) };
        let found = watched.end();
        if found >= at.1 + n || look == LOOKS {
            return Err(io(&e));
        }
        end = found;
    }
    Ok(0)
}

/// As pwrite(2) and fdatasync(2). The program's fsync(2) goes to the mount, which does not know
/// these bytes, so they are made stable before the call returns.
fn save(
    of: &OurFile,
    place: &Place,
    at: (u64, u64),
    size: usize,
    account: &mut Account,
) -> Done<usize> {
    within_bounds(at.1, size)?;
    let (session, file) = place;
    noted(session.save(&one(file.clone(), at, size as u64), of.policy), account)
        .map_err(|e| io(&e))?;
    session.fsync(file).map_err(|e| io(&e))?;
    Ok(size)
}

fn within_bounds(offset: u64, size: usize) -> Done<()> {
    let end = offset.checked_add(size as u64).filter(|end| *end <= MAX_FILE_SIZE);
    end.map(drop).ok_or(CallError::Os(libc::EFBIG))
}

fn read_host(
    (session, file): &Place,
    at: (u64, u64),
    size: usize,
    account: &mut Account,
) -> Done<usize> {
    let mut done = 0;
    while done < size {
        let want = (size - done).min(HOST_PIECE);
        let bytes = session.read(file, at.1 + done as u64, want).map_err(|e| io(&e))?;
        host::put(at.0 + done as u64, &bytes)?;
        done += bytes.len();
        account.host += bytes.len() as u64;
        if bytes.len() < want {
            break;
        }
    }
    Ok(done)
}

fn write_host(
    (session, file): &Place,
    at: (u64, u64),
    size: usize,
    account: &mut Account,
) -> Done<usize> {
    within_bounds(at.1, size)?;
    let mut done = 0;
    while done < size {
        let bytes = host::get(at.0 + done as u64, (size - done).min(HOST_PIECE))?;
        session.write(file, at.1 + done as u64, &bytes).map_err(|e| io(&e))?;
        done += bytes.len();
        account.host += bytes.len() as u64;
    }
    session.fsync(file).map_err(|e| io(&e))?;
    Ok(size)
}
