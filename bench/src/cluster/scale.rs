//! How much work the rows do.

use std::path::{Path, PathBuf};

use strake_proto::{Code, Error, Result};

/// Sizes shared by all rows.
#[derive(Clone, Copy)]
pub struct Scale {
    pub bytes: u64,
    pub files: u64,
    pub random_ops: u64,
}

pub const MIB: u64 = 1 << 20;
/// Threads or tasks of the rows with many small operations.
pub const JOBS: u64 = 8;

/// Runs `job(n)` for n in 0..JOBS on threads of their own and returns the sum of their results.
pub fn in_threads(job: impl Fn(u64) -> Result<u64> + Sync) -> Result<f64> {
    std::thread::scope(|s| {
        let job = &job;
        let threads: Vec<_> = (0..JOBS).map(|n| s.spawn(move || job(n))).collect();
        let mut sum = 0;
        for t in threads {
            sum += t.join().map_err(|_| Error::new(Code::Io, "a thread panicked"))??;
        }
        Ok(sum as f64)
    })
}

/// Path of the n-th file of a row below a folder.
pub fn nth(dir: &Path, n: u64) -> PathBuf {
    dir.join(format!("f{n:06}"))
}
