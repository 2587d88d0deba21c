//! The short form of the kill test (cluster-tests/faults): processes die under load, every promise is checked.

use std::path::{Path, PathBuf};

use strake_faults::{Options, can_lose_power, run};

#[test]
fn what_was_promised_survives_sigkill() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let strake = PathBuf::from(env!("CARGO_BIN_EXE_strake"));
    let power = can_lose_power(root.path());
    if let Err(e) = &power {
        println!("skipped: power loss: {e}");
    }
    for (name, all, power_loss) in [("some", false, false), ("all", true, false), ("power", true, true)] {
        if power_loss && power.is_err() {
            continue;
        }
        let (strake, dir) = (strake.clone(), root.path().join(name));
        let outcome = run(&Options { strake, rounds: 1, seed: 7, dir, mirror: 2, all, power_loss }).unwrap();
        assert_eq!(outcome.broken, 0, "{outcome:?}");
        assert!(outcome.promises > 0, "nothing was promised, so nothing was checked");
    }
}
