//! A cluster that grows, and a cluster that permanently lost the only copies of some data.

use std::{fs, path::Path};

use crate::cluster::{Cluster, pattern};
use crate::common::{ok, refused, strake, text};
use serde_json::Value;

fn json(c: &Cluster, args: &[&str]) -> Value {
    serde_json::from_slice(&c.run(args).stdout).unwrap()
}

fn lfs(args: &[&str], at: &Path) {
    ok(&strake().arg("lfs").args(args).arg(at).output().unwrap());
}

/// The number of chunks on each target.
fn chunks(c: &Cluster) -> Vec<u64> {
    let status = json(c, &["status", "--json"]);
    let targets = status["servers"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|s| s["role"] == "oss")
        .flat_map(|n| n["targets"].as_array().cloned().unwrap_or_default());
    targets.map(|t| t["chunks"].as_u64().unwrap()).collect()
}

/// Fullest minus emptiest, in points.
fn spread(c: &Cluster) -> f64 {
    let full: Vec<f64> = c.targets().iter().map(|t| t["percent"].as_f64().unwrap()).collect();
    full.iter().fold(0f64, |a, b| a.max(*b)) - full.iter().fold(100f64, |a, b| a.min(*b))
}

fn a_ninth_target_beside_eight_gets_its_part() {
    let c = Cluster::new("8");
    let d = c.mnt().join("d");
    fs::create_dir(&d).unwrap();
    // 2,200 chunks with two copies on eight targets: 550 chunks on each, about 17 % of a target.
    lfs(&["setstripe", "-S", "320k", "-c", "-1"], &d);
    let (files, file) = (55, |i: usize| d.join(format!("f{i}")));
    let data = |i| pattern(i, 40 * (320 << 10));
    (0..files).for_each(|i| fs::write(file(i), data(i)).unwrap());
    c.until("what was written is reported", || {
        c.targets().iter().all(|t| t["percent"].as_f64() > Some(12.0))
    });
    let before = chunks(&c);
    assert!(before.len() == 8 && before.iter().all(|n| *n >= 500), "{before:?}");
    assert!(spread(&c) < 5.0);

    ok(&c.run(&["target", "add", "--server", "oss1"]));
    assert!(spread(&c) > 12.0, "the new one is empty");
    // New data prefers the new target at once. With plain rotation it would get every ninth of
    // these one-stripe files.
    let e = c.mnt().join("e");
    fs::create_dir(&e).unwrap();
    lfs(&["setstripe", "-S", "320k", "-c", "1"], &e);
    c.until("it takes its part", || c.target(8)["replicas"].as_u64() > Some(0));
    (0..40).for_each(|i| fs::write(e.join(format!("n{i}")), data(1000 + i)).unwrap());

    let said = ok(&c.run(&["target", "wait"]));
    assert!(said.contains("nothing moves"), "{said}");
    c.until("all are about as full", || spread(&c) <= 5.0);
    let after = chunks(&c);
    assert!(after.len() == 9 && after.iter().all(|n| *n > 300), "{after:?}");
    (0..files).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));
    (0..40).for_each(|i| {
        assert!(fs::read(e.join(format!("n{i}"))).unwrap() == data(1000 + i), "new file {i}")
    });
    let fsck = c.run(&["fsck", "--read-data"]);
    assert!(fsck.status.success(), "{}{}", text(&fsck.stdout), text(&fsck.stderr));
}

/// All copies of some chains are gone. Access to their files waits until an administrator gives up
/// the targets by id. Then reads are `EIO`, never zeros; all other files are whole; and lost files
/// can be removed and written again.
#[test]
fn what_only_dead_targets_had_is_lost_by_name_alone() {
    let c = Cluster::new("5");
    let (file, data) = (|i: usize| c.mnt().join(format!("f{i}")), |i| pattern(i, 900_000));
    (0..48).for_each(|i| fs::write(file(i), data(i)).unwrap());
    let dead = [1, 2].map(|oss| c.target_of(oss));
    // One after the other, so that the second holds the last in-sync replica of the chains on both.
    for (oss, target) in [1, 2].into_iter().zip(dead) {
        c.kill_oss(oss);
        c.until("it is dead", || c.target(target)["alive"] == false);
    }
    let nodes = json(&c, &["node", "list", "--json"]);
    let state = |name: &str| {
        nodes["nodes"].as_array().unwrap().iter().find(|n| n["server"] == name).unwrap()["state"]
            .clone()
    };
    assert_eq!((state("oss1"), state("oss3")), ("dead".into(), "alive".into()));
    refused(
        &c.run(&["node", "remove", "nobody"]),
        &["there is no storage server 'nobody'", "oss1"],
    );

    // Giving up one of the two is not enough: the other may come back.
    ok(&c.run(&["target", "give-up", &dead[0].to_string()]));
    let fsck = c.run(&["fsck"]);
    assert!(!text(&fsck.stdout).contains("lost:"), "{}", text(&fsck.stdout));
    let said = ok(&c.run(&["target", "give-up", &dead[1].to_string()]));
    assert!(said.contains("no other target had chains"), "{said}");
    let lost: Vec<usize> = (0..48)
        .filter(|i| match read_past_cache(&file(*i)) {
            Ok(got) => {
                assert!(got == data(*i), "file {i} has other bytes");
                false
            }
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EIO), "file {i}: {e}");
                true
            }
        })
        .collect();
    assert!(!lost.is_empty() && lost.len() < 30, "{lost:?}");
    let fsck = c.run(&["fsck"]);
    assert_eq!(fsck.status.code(), Some(4));
    let found = text(&fsck.stdout);
    assert!(
        (0..48).all(|i| found.contains(&format!("lost: /f{i} ")) == lost.contains(&i)),
        "{found}"
    );
    // Lost files can be removed and written again.
    for i in &lost {
        fs::remove_file(file(*i)).unwrap();
        fs::write(file(*i), data(100 + i)).unwrap();
        assert!(fs::read(file(*i)).unwrap() == data(100 + i));
    }
    // The servers are taken out of the cluster by their names.
    c.until("nothing needs them", || c.run(&["node", "remove", "oss1", "oss2"]).status.success());
    assert_eq!(c.targets().len(), 3);
    c.until("fsck is clean", || c.run(&["fsck", "--read-data"]).status.success());
}

/// Reads with O_DIRECT, past the caches of the kernel and the mount.
fn read_past_cache(at: &Path) -> std::io::Result<Vec<u8>> {
    use std::{io::Read as _, os::unix::fs::OpenOptionsExt as _};
    let mut file = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(at)?;
    let len = file.metadata()?.len() as usize;
    let mut space = vec![0u8; len + 8192];
    let start = space.as_ptr().align_offset(4096);
    let mut at = start;
    while at < start + len {
        match file.read(&mut space[at..start + len.next_multiple_of(4096)])? {
            0 => break,
            n => at += n,
        }
    }
    Ok(space[start..at].to_vec())
}

mod long {
    #[test]
    #[ignore = "long tier, 50 s: ./test --long"]
    fn a_ninth_target_beside_eight_gets_its_part() {
        super::a_ninth_target_beside_eight_gets_its_part();
    }
}
