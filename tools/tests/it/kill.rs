//! The short form of the kill test (cluster-tests/faults): processes die under load, and every
//! guarantee is checked.

use std::path::{Path, PathBuf};

use strake_faults::{Options, Power, Rule, can_lose, run};

#[test]
fn what_was_promised_survives_sigkill() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let strake = PathBuf::from(env!("CARGO_BIN_EXE_strake"));
    let kinds = [
        ("some", false, Power::Stays, 2),
        ("all", true, Power::Stays, 2),
        ("power", true, Power::Ext4, 2),
        ("lossy", false, Power::Lossy(Rule::Posix), 3),
        ("lossy-all", true, Power::Lossy(Rule::Posix), 2),
        ("lossy-one-copy", true, Power::Lossy(Rule::Posix), 1),
    ];
    for (name, all, power, mirror) in kinds {
        if let Err(e) = can_lose(power, root.path()) {
            println!("skipped: {name}: {e}");
            continue;
        }
        let (strake, dir) = (strake.clone(), root.path().join(name));
        let outcome =
            run(&Options { strake, rounds: 1, seed: 7, dir, mirror, all, power }).unwrap();
        assert_eq!(outcome.broken, 0, "{name}: {outcome:?}");
        assert!(outcome.promises > 0, "{name}: nothing was promised, so nothing was checked");
    }
}
