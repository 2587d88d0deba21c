//! The suites of `cluster-tests/posix` that are short enough for every change, on a cluster of
//! processes.

fn suite(name: &str, args: &[&str]) {
    crate::suite::run(&format!("posix/{name}"), args);
}

#[test]
fn pjdfstest() {
    suite("pjdfstest", &[]);
}

#[test]
fn acl() {
    as_root("acl");
}

#[test]
fn mounting() {
    as_root("mounting");
}

fn as_root(name: &str) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    suite(name, &[]);
}

#[test]
fn holes() {
    suite("holes", &["200"]);
}

#[test]
fn fsx() {
    suite("fsx", &["1000"]);
}

#[test]
fn two_mounts() {
    suite("two-mounts", &[]);
}

#[test]
fn two_mounts_of_an_old_kernel() {
    suite("two-mounts", &["--old-kernel"]);
}

#[test]
fn file_io() {
    suite("file-io", &[]);
}

// All but postgres, in two tests that can run side by side.
fn programs_that_build() {
    suite("programs", &["git", "gcc", "cargo"]);
}

fn programs_with_data() {
    suite("programs", &["sqlite", "rsync", "tar", "python", "fio"]);
}

#[test]
fn handles() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    suite("handles", &["--no-nfs"]);
}

mod long {
    #[test]
    #[ignore = "long tier, 370 s: ./test --long"]
    fn programs_that_build() {
        super::programs_that_build();
    }

    #[test]
    #[ignore = "long tier, 330 s: ./test --long"]
    fn programs_with_data() {
        super::programs_with_data();
    }
}
