//! The conformance suite of devices on one that is named, and then random operations on it, each
//! block verified.
//!
//! `cargo run --release -p strake-oss --features conformance --example device_check -- DEVICE
//! --erase [SECONDS [SEED]]`
//!
//! DEVICE is what a target's `device` may be, or a file. **All that is on it is lost.** Without
//! SECONDS: 600. The seed is printed. At the end: how many bytes were copied once more on their way
//! to the device, and that a device nobody uses takes no CPU. `--reads SECONDS`: instead, what was
//! written and flushed is read again and again, for a controller that is taken away meanwhile.
//! `--reset FILE`: instead, `1` is written to FILE, a PCI function's `reset` in sysfs, while nobody
//! uses the device, several times, and it works again. Then once more, and at once it is given
//! back, which takes no longer. `--bad-read OFFSET`, `--bad-write OFFSET`: instead, that the device
//! fails there is reported as it must be, and the rest serves on.

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

/// Of a second in which nobody wants anything of the device.
const IDLE: Duration = Duration::from_millis(50);

async fn at_rest(d: &dyn Device) -> ExitCode {
    println!("copied: {} bytes", d.copied());
    let used =
        || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("time that passed");
    // What is about to sleep sleeps then.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = used();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let took = used() - before;
    println!("idle: {} ms of CPU in a second", took.as_millis());
    if took > IDLE { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Of a device whose controller is dead before it is given back: SPDK waits for 10 s for one to
/// shut down.
const FAREWELL: Duration = Duration::from_secs(15);

/// As many as there are, by so much more apart: at each moment between two looks of the driver's at
/// its controller.
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
