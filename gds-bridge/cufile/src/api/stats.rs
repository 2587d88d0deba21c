//! What is counted.

use std::ffi::c_int;

use super::put;
use crate::{
    abi::{Level1, Level2, Level3, Status},
    driver::Driver,
    errors::control,
    stats::{self, Stats},
};

/// Sets how much is counted: 0 to 3.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetStatsLevel(level: c_int) -> Status {
    control(|| Driver::get()?.stats.set_level(level))
}

/// How much is counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { put(level, Driver::get()?.stats.level()) })
}

fn counting(f: impl FnOnce(&Stats)) -> Status {
    control(|| {
        f(&Driver::open_one()?.stats);
        Ok(())
    })
}

/// Starts counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStart() -> Status {
    counting(Stats::start)
}

/// Stops counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStop() -> Status {
    counting(Stats::stop)
}

/// Resets the counters.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsReset() -> Status {
    counting(Stats::reset)
}

/// The counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL1(to: *mut Level1) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(1)?.detailed.basic) })
}

/// The counters with histograms of sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL2(to: *mut Level2) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(2)?.detailed) })
}

/// The counters with histograms of sizes and figures per GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL3(to: *mut Level3) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(3)?) })
}
