//! Two mounts of one cluster of processes see the same state: the cases of
//! `cluster-tests/coherence`.

#[test]
fn two_mounts_see_one_truth() {
    crate::suite::run("coherence/run", &[]);
}

#[test]
fn what_a_mount_knows_costs_no_message() {
    crate::suite::run("coherence/messages", &[]);
}

/// The same cases with other options of the mounts.
mod long {
    #[test]
    #[ignore = "long tier, 4 minutes: ./test --long"]
    fn also_without_copies_in_the_kernel() {
        crate::suite::run("coherence/run", &["--nothing"]);
    }

    #[test]
    #[ignore = "long tier, 4 minutes: ./test --long"]
    fn also_with_names_in_the_kernel() {
        crate::suite::run("coherence/run", &["--names"]);
    }
}
