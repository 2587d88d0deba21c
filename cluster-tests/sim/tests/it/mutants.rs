//! The simulator's oracle must catch builds that leave out one sync; otherwise "no promise broken"
//! would mean little. The mistakes in `mutants/` need a build of their own (`mutants/run`); here
//! they are only checked to fit the code.

use strake_sim::{
    run::run,
    scenario::{Scenario, Sync},
};

/// Some seed must break a promise: bytes or names are lost, or servers or chains do not recover.
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

#[test]
fn every_mistake_on_file_still_fits_the_code() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut patches: Vec<_> =
        std::fs::read_dir(here.join("mutants")).unwrap().map(|e| e.unwrap().path()).collect();
    patches.retain(|p| p.extension().is_some_and(|x| x == "patch"));
    patches.sort();
    assert!(patches.len() > 10, "{patches:?}");
    let root = here.join("../..");
    let out = std::process::Command::new("git")
        .current_dir(root)
        .args(["apply", "--check"])
        .args(&patches)
        .output();
    let out = out.expect("git");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
