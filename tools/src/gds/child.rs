//! Probes drivers in a child process: even if a driver hangs or crashes, `strake` can answer.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use strake_gds::{
    Cuda, GpuMem, HostMem, Numa, Options, Tier, Unavailable,
    child::{how_it_ended, kill, reap},
    status::{self, TierStatus},
};
use strake_proto::{Code, Error, Result};

use super::{Device, Memory, SELF};

/// What the child knows. It prints this after each step; the last one is the answer.
#[derive(Serialize, Deserialize)]
pub struct Found {
    pub device: Option<String>,
    pub notice: Option<String>,
    /// NUMA node of the device.
    #[serde(default)]
    pub numa: Option<Numa>,
    pub tiers: Vec<TierStatus>,
    /// No more steps follow.
    done: bool,
}

/// The child: probes, and prints what it found, one line of JSON for each step.
pub fn look(at: Device, test: bool, local: Option<PathBuf>) -> Result<ExitCode> {
    // If the driver hangs here, this process should die with its parent. Where that is not
    // possible, it may outlive it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let opened: Result<Arc<dyn GpuMem>, Unavailable> = match at.memory {
        Memory::Cuda => Cuda::open(at.device).map(|g| Arc::new(g) as _),
        Memory::Host => Ok(Arc::new(HostMem::new())),
    };
    let (device, tiers) = match &opened {
        Ok(d) => (Some(d.name()), status::untested(&**d, local.as_deref())),
        Err(why) => (None, status::without(why, local.as_deref())),
    };
    let numa = opened.as_ref().ok().map(|d| status::numa(&**d));
    let mut found = Found { device, notice: None, numa, tiers, done: !test || opened.is_err() };
    say(&found)?;
    if let (Ok(d), true) = (opened, test) {
        let options = Options { local, prober: SELF.into(), ..Options::default() };
        let tested = crate::run(2, status::tested(d, options))?;
        (found.tiers, found.notice, found.numa) = (tested.tiers, tested.notice, Some(tested.numa));
        found.done = true;
        say(&found)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens cuFile's driver, which may never return.
pub fn look_cufile() -> ExitCode {
    match strake_gds::local::look() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::from(strake_gds::local::REFUSED)
        }
    }
}

fn say(found: &Found) -> Result<()> {
    let mut line = serde_json::to_vec(found).map_err(std::io::Error::from)?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line)?;
    Ok(out.flush()?)
}

/// Starts the child and waits for it, at most `seconds`.
pub fn ask(at: Device, local: Option<&Path>, test: bool, seconds: u64) -> Result<Found> {
    let memory =
        at.memory.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
    let mut command = Command::new(SELF);
    command.args(["gds", "look", "--memory", &memory, "--device", &at.device.to_string()]);
    command.args(local.map(|_| "--local")).args(local);
    command.args(test.then_some("--test")).stdin(Stdio::null()).stdout(Stdio::piped());
    let failed =
        |e: std::io::Error| Error::from(e).context("starting the program that looks for devices");
    let mut child = command.spawn().map_err(failed)?;
    let out = child
        .stdout
        .take()
        .ok_or_else(|| Error::new(Code::Io, "the program that looks for devices has no output"))?;
    let (lines, heard) = mpsc::channel();
    // Not joined: it ends with the pipe, which a process that cannot be killed may keep open.
    thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(|l| l.ok()) {
            // A driver may print anything.
            if let Ok(found) = serde_json::from_str::<Found>(&line)
                && lines.send(found).is_err()
            {
                return;
            }
        }
    });
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut last = None;
    let why = loop {
        match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(found) if found.done => {
                reap(&mut child, until);
                return Ok(found);
            }
            Ok(found) => last = Some(found),
            Err(mpsc::RecvTimeoutError::Timeout) => break Unavailable::Hung { seconds },
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                break Unavailable::Died {
                    how: reap(&mut child, until).map_or("closed its output".into(), how_it_ended),
                };
            }
        }
    };
    kill(&mut child);
    Ok(without_answer(last, local, &why))
}

/// What the child said about unavailable tiers stays valid; for the others only `why` is known.
fn without_answer(last: Option<Found>, local: Option<&Path>, why: &Unavailable) -> Found {
    let Some(mut found) = last else {
        let tiers = status::without(why, local);
        return Found { device: None, notice: None, numa: None, tiers, done: true };
    };
    let open = Unavailable::NotTested.kind();
    for t in found.tiers.iter_mut().filter(|t| t.reason.as_deref() == Some(open)) {
        if let Ok(tier) = t.tier.parse::<Tier>() {
            *t = TierStatus::unavailable(tier, why);
        }
    }
    found.done = true;
    found
}
