//! Builds that leave out one sync must be seen by the simulator's oracle: otherwise "no promise broken" would mean little.

use strake_sim::{
    cluster::Sync,
    run::{Scenario, run},
};

/// Some run must break a promise: bytes or names are lost, or servers or chains do not come back.
fn caught(skip: Sync) {
    const SEEDS: u64 = 10;
    for seed in 1..=SEEDS {
        let how = match run(Scenario { skip: Some(skip), ..Scenario::new(seed) }) {
            Ok(o) => o.violations.first().cloned(),
            Err(e) => Some(e.to_string()),
        };
        if let Some(how) = how {
            return println!("{skip:?}, seed {seed}: {how}");
        }
    }
    panic!("{SEEDS} seeds did not notice that servers left out the sync of {skip:?}");
}

#[test]
fn a_raft_log_without_its_fsync_is_caught() {
    caught(Sync::Log);
}

#[test]
fn a_device_without_its_flush_is_caught() {
    caught(Sync::Device);
}

#[test]
fn a_chunk_table_without_its_sync_is_caught() {
    caught(Sync::Table);
}
