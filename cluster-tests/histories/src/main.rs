//! `strake-histories`: checks recorded histories, and records some on a cluster of real processes.

mod real;

use std::{fs::File, io::BufReader, path::PathBuf, process::ExitCode};

use clap::Parser;
use strake_histories::{History, check, explain::explain, search::LIMIT};

/// Check histories of metadata operations.
#[derive(Parser)]
enum Args {
    /// Check whether recorded histories are linearizable. Exits with 1 if one is not, or is not
    /// decided.
    Check {
        /// Files with one history each, as the tests keep them.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Steps of the search after which a history counts as undecided.
        #[arg(long, default_value_t = LIMIT)]
        limit: u64,
    },
    /// Record histories on a running cluster and check them: see cluster-tests/histories/run.
    Real(real::RealArgs),
    /// One client of such a history.
    #[command(hide = true)]
    Worker(real::worker::WorkerArgs),
}

fn main() -> ExitCode {
    match Args::parse() {
        Args::Check { files, limit } => check_files(&files, limit),
        Args::Real(args) => status(real::run(&args).map(|failed| failed == 0)),
        Args::Worker(args) => status(real::worker::run(args).map(|()| true)),
    }
}

fn status(good: std::io::Result<bool>) -> ExitCode {
    match good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("strake-histories: {e}");
            ExitCode::FAILURE
        }
    }
}

fn check_files(files: &[PathBuf], limit: u64) -> ExitCode {
    let mut good = true;
    for file in files {
        match File::open(file).and_then(|f| History::read(BufReader::new(f))) {
            Ok(history) => {
                let verdict = check(&history, limit);
                good &= verdict.is_linearizable();
                print!(
                    "{} ({}): {}",
                    file.display(),
                    history.head.source,
                    explain(&history, &verdict, limit)
                );
            }
            Err(e) => {
                good = false;
                println!("{}: {e}", file.display());
            }
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
