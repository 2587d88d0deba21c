//! Processes that behave as those of an older program, for tests of upgrades.

use strake_proto::FEATURE_LEVEL;

/// The feature level that a server or a mount of this program knows. In debug builds the environment
/// variable `STRAKE_FEATURE_LEVEL` makes it a lower one, for tests.
pub(crate) fn feature_level() -> u32 {
    let pretended = || std::env::var("STRAKE_FEATURE_LEVEL").ok()?.parse::<u32>().ok();
    let pretended = if cfg!(debug_assertions) { pretended() } else { None };
    pretended.map_or(FEATURE_LEVEL, |level| level.min(FEATURE_LEVEL))
}
