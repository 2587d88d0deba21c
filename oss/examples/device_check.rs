//! Runs the device conformance suite on the named device, and then random operations on it; each
//! block is verified.
//!
//! `cargo run --release -p strake-oss --features conformance --example device_check -- DEVICE
//! --erase [SECONDS [SEED]]`
//!
//! DEVICE is a value as for a target's `device`, or a file. **All data on it is lost.** SECONDS
//! defaults to 600. The seed is printed. At the end it prints how many bytes had to be copied on
//! their way to the device, and checks that an idle device uses no CPU.
//!
//! Other checks, which run instead:
//! - `--reads SECONDS`: flushed data is read again and again; for a controller that is removed
//!   meanwhile.
//! - `--reset FILE`: `1` is written several times to FILE, a PCI function's `reset` in sysfs, while
//!   the device is idle; it must work again each time. After a last reset the device is closed at
//!   once, which must take no more than 15 s.
//! - `--bad-read OFFSET`, `--bad-write OFFSET`: an error of the device at this offset must be
//!   reported correctly, and the rest must still work.

use std::{
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use strake_oss::device::{self, Device, conformance};

const USAGE: &str = "device_check DEVICE --erase [SECONDS [SEED]] | --erase --reads SECONDS | --erase --reset FILE | --erase --bad-read OFFSET | --erase --bad-write OFFSET";

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text} is no number; {USAGE}"))
}

/// CPU time allowed in one second in which the device is idle.
const IDLE: Duration = Duration::from_millis(50);

async fn at_rest(d: &dyn Device) -> ExitCode {
    println!("copied: {} bytes", d.copied());
    let used =
        || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("time that passed");
    // Time for threads that are about to sleep.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = used();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let took = used() - before;
    println!("idle: {} ms of CPU in a second", took.as_millis());
    if took > IDLE { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Limit for closing a device whose controller is dead: SPDK waits 10 s for a controller to shut
/// down.
const FAREWELL: Duration = Duration::from_secs(15);

/// The number of resets. Each pause is longer by `BETWEEN`, so that resets hit different moments
/// between two checks of the controller by the driver.
const RESETS: u32 = 10;
const BETWEEN: Duration = Duration::from_millis(57);

async fn reset(d: Arc<dyn Device>, file: &str) -> ExitCode {
    let reset = || std::fs::write(file, "1").unwrap_or_else(|e| panic!("{file}: {e}"));
    conformance::flushed(&*d, Duration::from_secs(1)).await;
    for n in 0..RESETS {
        tokio::time::sleep(BETWEEN * n).await;
        reset();
        let (reads, longest) = conformance::flushed(&*d, Duration::from_millis(500)).await;
        println!(
            "reset: {reads} reads after it are as written; the longest took {} ms",
            longest.as_millis()
        );
    }
    reset();
    let start = Instant::now();
    drop(d);
    println!("given back after another one: in {} ms", start.elapsed().as_millis());
    if start.elapsed() > FAREWELL { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (path, rest) = match &args[..] {
        [path, "--erase", rest @ ..] => (Path::new(path), rest),
        _ => {
            eprintln!("usage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let d = match device::open(path) {
        Ok(d) => d,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    println!("device: {}, {} MiB, direct: {}", d.name(), d.capacity() >> 20, d.direct());
    if let [what @ ("--bad-read" | "--bad-write"), offset] = rest {
        conformance::bad_blocks(&*d, number(offset), *what == "--bad-read").await;
        println!("its bad block is an error, and the rest serves on");
        return ExitCode::SUCCESS;
    }
    if let ["--reads", seconds] = rest {
        let (reads, longest) =
            conformance::flushed(&*d, Duration::from_secs(number(seconds))).await;
        println!("{reads} reads are as written; the longest took {} ms", longest.as_millis());
        return at_rest(&*d).await;
    }
    if let ["--reset", file] = rest {
        return reset(d, file).await;
    }
    conformance::all(d.clone()).await;
    println!("conformance: passed");
    let seconds = rest.first().map_or(600, |s| number(s));
    let seed = rest.get(1).map_or_else(rand::random, |s| number(s));
    println!("random operations for {seconds} s, seed {seed}");
    println!("{}", conformance::random_io(d.clone(), seed, Duration::from_secs(seconds)).await);
    at_rest(&*d).await
}
