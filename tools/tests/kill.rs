//! The short form of the kill test (cluster-tests/faults): processes die under load, every promise is checked.

use std::path::{Path, PathBuf};

use strake_faults::{Options, run};

#[test]
fn what_was_promised_survives_sigkill() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let strake = PathBuf::from(env!("CARGO_BIN_EXE_strake"));
    for (name, all) in [("some", false), ("all", true)] {
        let o = Options { strake: strake.clone(), rounds: 1, seed: 7, dir: root.path().join(name), mirror: 2, all };
        let outcome = run(&o).unwrap();
        assert_eq!(outcome.broken, 0, "{outcome:?}");
        assert!(outcome.promises > 0, "nothing was promised, so nothing was checked");
    }
}
