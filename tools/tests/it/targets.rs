//! Data moves between targets under a mount in use: `strake target` and `strake node`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crate::cluster::{Cluster, pattern};
use crate::common::{ok, refused, strake, text};
use serde_json::Value;
use strake_faults::{Lossy, Rule};

/// Writes one file after the other, in place and as new files, and reads each back, until `stop` is
/// set.
fn work(at: PathBuf, stop: &AtomicBool) -> usize {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let file = at.join(format!("w{}", rounds % 7));
        let data = pattern(rounds, 300_000 + rounds % 1000);
        fs::write(&file, &data).unwrap();
        assert!(fs::read(&file).unwrap() == data, "round {rounds}");
        rounds += 1;
    }
    rounds
}

#[test]
fn targets_are_emptied_replaced_and_removed_while_files_are_written() {
    let c = Cluster::new("5");
    let data = |i| pattern(1000 + i, 1 << 20);
    let file = |i: usize| c.mnt().join(format!("f{i}"));
    (0..40).for_each(|i| fs::write(file(i), data(i)).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let worker = {
        let (at, stop) = (c.mnt(), stop.clone());
        thread::spawn(move || work(at, &stop))
    };
    let all_right =
        || (0..40).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));

    // A target is drained. It is alive, so it cannot be removed yet.
    let first = c.target_of(1);
    let said = ok(&c.run(&["target", "drain", &first.to_string()]));
    assert!(said.contains("are empty"), "{said}");
    let t = c.target(first);
    assert!(t["replicas"] == 0 && t["draining"] == true && t["alive"] == true, "{t}");
    refused(&c.run(&["target", "remove", &first.to_string()]), &["is alive"]);
    all_right();
    // Its data is deleted from it.
    c.until("its bytes are gone", || c.target(first)["used"].as_u64().unwrap() < 4 << 20);
    c.kill_oss(1);
    c.until("it is dead", || c.target(first)["alive"] == false);
    // Of two named targets one can be removed, and the same command may be repeated. An id that
    // never existed is refused.
    let other = c.target_of(2).to_string();
    let stays = format!("target {other} cannot be removed");
    refused(&c.run(&["target", "remove", &first.to_string(), &other]), &[&stays]);
    assert_eq!(c.targets().len(), 4);
    refused(&c.run(&["target", "remove", &first.to_string(), &other]), &[&stays]);
    assert!(ok(&c.run(&["target", "remove", &first.to_string()])).contains("was removed before"));
    refused(&c.run(&["target", "remove", "99"]), &["target 99 is not registered"]);
    all_right();

    // All targets of a server are drained without waiting; then the server is kept after all.
    let second = c.target_of(2);
    ok(&c.run(&["node", "drain", "oss2", "--no-wait"]));
    c.until("all has moved", || c.target(second)["replicas"] == 0);
    ok(&c.run(&["node", "keep", "oss2"]));
    assert_eq!(c.target(second)["draining"], false);
    all_right();

    stop.store(true, Ordering::Relaxed);
    assert!(worker.join().unwrap() > 20);
    all_right();
    let fsck = c.run(&["fsck", "--read-data"]);
    assert!(fsck.status.success(), "{}{}", text(&fsck.stdout), text(&fsck.stderr));
}

#[test]
fn a_dead_target_is_replaced_by_another_and_what_cannot_move_is_said() {
    let c = Cluster::new("4");
    let data = |i| pattern(i, 1 << 20);
    (0..30).for_each(|i| fs::write(c.mnt().join(format!("f{i}")), data(i)).unwrap());
    let [dead, heir] = [1, 2].map(|oss| c.target_of(oss));
    refused(&c.run(&["target", "drain", "99"]), &["target 99 is not registered"]);
    refused(&c.run(&["target", "replace", &dead.to_string(), &dead.to_string()]), &["cannot take"]);
    refused(&c.run(&["node", "drain", "nobody"]), &["there is no storage server 'nobody'", "oss1"]);
    c.kill_oss(1);
    c.until("it is dead", || c.target(dead)["alive"] == false);
    // Its chains with two copies are resynced elsewhere. A chain with one copy cannot be, and the
    // command says so.
    let out = c.run(&["target", "replace", &dead.to_string(), &heir.to_string()]);
    refused(&out, &["nothing moves any more", "no replica in sync is alive"]);
    (0..30).for_each(|i| {
        assert!(fs::read(c.mnt().join(format!("f{i}"))).unwrap() == data(i), "file {i}")
    });
    // After a give-up, data that only it had is lost; here there is none. The target comes back, is
    // kept, and then its remaining data moves, too.
    let said = ok(&c.run(&["target", "give-up", &dead.to_string()]));
    assert!(said.contains("no other target had chains"), "{said}");
    assert_eq!(c.target(dead)["replicas"], 0);
    ok(&c.up());
    ok(&c.run(&["target", "keep", &dead.to_string()]));
    c.until("it is whole", || {
        c.target(dead)["replicas"].as_u64().unwrap() > 0 && c.target(dead)["alive"] == true
    });
    ok(&c.run(&["target", "drain", &dead.to_string()]));
    c.until("all has moved", || c.target(dead)["replicas"] == 0);
    (0..30).for_each(|i| {
        assert!(fs::read(c.mnt().join(format!("f{i}"))).unwrap() == data(i), "file {i}")
    });
    c.until("its bytes are gone", || c.target(dead)["used"].as_u64().unwrap() < 4 << 20);
    let fsck = c.run(&["fsck", "--read-data"]);
    assert!(fsck.status.success(), "{}{}", text(&fsck.stdout), text(&fsck.stderr));
}

#[test]
fn a_target_is_added_to_a_server_that_serves() {
    let c = Cluster::new("3");
    let (data, file) = (|i| pattern(3000 + i, 700_000), |i: usize| c.mnt().join(format!("f{i}")));
    (0..40).for_each(|i| fs::write(file(i), data(i)).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let worker = {
        let (at, stop) = (c.mnt(), stop.clone());
        thread::spawn(move || work(at, &stop))
    };
    refused(&c.run(&["target", "add", "--server", "oss9"]), &["oss1 to oss3"]);
    let said: Value =
        serde_json::from_str(&ok(&c.run(&["target", "add", "--server", "oss2", "--json"])))
            .unwrap();
    assert_eq!(said["targets"], serde_json::json!([3]), "{said}");
    c.until("it takes its part", || {
        c.target(3)["alive"] == true && c.target(3)["replicas"].as_u64() > Some(0)
    });
    assert!(c.target(3)["server"] == "oss2" && c.targets().len() == 4);
    stop.store(true, Ordering::Relaxed);
    assert!(worker.join().unwrap() > 5);
    ok(&c.run(&["down"]));
    ok(&c.up());
    c.until("it is back", || c.target(3)["alive"] == true);
    (0..40).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));

    // A server whose configuration was written by hand.
    let (config, ours) = (c.root.path().join("oss3.toml"), c.dir().join("oss3.toml"));
    let before = fs::read_to_string(&ours).unwrap();
    fs::write(&config, &before).unwrap();
    c.kill_oss(3);
    let mut server = Server::start(&config);
    let add = |config: &Path, path: &Path, more: &[&str]| {
        let mut add = strake();
        add.args(["target", "add", "--config"])
            .arg(config)
            .arg("--path")
            .arg(path)
            .args(more)
            .output()
            .unwrap()
    };
    let (new, own) = (c.root.path().join("new"), c.dir().join("oss3/target0"));
    c.until("it serves", || {
        server.again(&config);
        !text(&add(&config, &new, &[]).stderr).contains("does not answer")
    });
    let gib = ["--size-gib", "1"];
    refused(&add(&ours, &new, &gib), &["--server oss3"]);
    refused(&add(&config, &new, &[]), &["give either size or device", "nothing was added"]);
    refused(&add(&config, &own, &gib), &["already"]);
    refused(&add(&config, &c.dir().join("logs"), &gib), &["nothing was added"]);
    assert_eq!(fs::read_to_string(&config).unwrap(), before);
    assert!(ok(&add(&config, &new, &gib)).contains("target 4 was added"));
    c.until("it takes its part", || c.target(4)["replicas"].as_u64() > Some(0));
    assert!(c.target(4)["server"] == "oss3");
    // The target is there again after a restart.
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    refused(
        &add(&config, &c.root.path().join("other"), &gib),
        &["nothing was added", "start it first"],
    );
    c.until("both are back", || {
        server.again(&config);
        c.targets().iter().filter(|t| t["server"] == "oss3" && t["alive"] == true).count() == 2
    });

    (0..40).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));
    drop(server);
}

#[test]
fn a_disk_that_is_missing_costs_its_target_alone_and_one_that_is_lost_no_empty_chain() {
    let c = Cluster::with("3", "2");
    let (data, file) = (|i| pattern(4000 + i, 300_000), |i: usize| c.mnt().join(format!("f{i}")));
    (0..20).for_each(|i| fs::write(file(i), data(i)).unwrap());
    let all_right =
        || (0..20).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));
    let status =
        || -> Value { serde_json::from_slice(&c.run(&["status", "--json"]).stdout).unwrap() };
    let oss1 = || {
        status()["servers"]
            .as_array()
            .unwrap()
            .iter()
            .find(|s| s["name"] == "oss1")
            .unwrap()
            .clone()
    };
    let refused = || oss1()["refused"].as_array().unwrap().clone();
    let served = || oss1()["targets"].as_array().unwrap().len();
    let config = c.dir().join("oss1.toml");
    let no_create = fs::read_to_string(&config)
        .unwrap()
        .replace("[[oss.targets]]", "[[oss.targets]]\ncreate = false");
    assert!(no_create.contains("create = false"), "{no_create}");

    // The target's folder is missing when the server starts: the other target serves, and the
    // process stays.
    let (own, away) = (c.dir().join("oss1/target0"), c.root.path().join("away"));
    c.kill_oss(1);
    fs::rename(&own, &away).unwrap();
    let elsewhere = c.root.path().join("oss1.toml");
    fs::write(&elsewhere, no_create).unwrap();
    let mut server = Server::start(&elsewhere);
    c.until("the other one serves", || {
        server.again(&elsewhere);
        let s = status();
        s["servers"]
            .as_array()
            .unwrap()
            .iter()
            .any(|s| s["name"] == "oss1" && s["targets"].as_array().unwrap().len() == 1)
    });
    let r = refused().remove(0);
    let dead = r["target"].as_u64().unwrap() as usize;
    assert!(r["path"].as_str().unwrap().ends_with("oss1/target0"), "{r}");
    assert!(r["why"].as_str().unwrap().contains("no such target folder"), "{r}");
    let said = c.run(&["status"]);
    assert_eq!(said.status.code(), Some(2));
    assert!(text(&said.stdout).contains("is out of service"), "{}", text(&said.stdout));
    all_right();
    // When the folder is put back, the target comes into service.
    let pid = server.0.id();
    fs::rename(&away, &own).unwrap();
    c.until("it is back", || served() == 2 && refused().is_empty());
    assert!(server.0.try_wait().unwrap().is_none() && oss1()["pid"] == pid);
    c.until("all is whole", || c.run(&["status"]).status.success());
    all_right();

    // The target's disk is gone for good, and with it the only replicas of empty chains. Nothing is
    // lost, and nothing is reported as lost.
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    fs::rename(&own, &away).unwrap();
    let mut server = Server::start(&elsewhere);
    c.until("it is dead", || c.target(dead)["alive"] == false);
    let headless = || {
        let s = status();
        let chains = s["map"]["chains"].as_array().unwrap().clone();
        chains.iter().filter(|c| c["in_sync"].as_array().unwrap().is_empty()).count()
    };
    assert!(headless() >= 8, "it headed as many chains of one copy");
    ok(&c.run(&["target", "give-up", &dead.to_string()]));
    c.until("all chains are served", || headless() == 0);
    assert!(status()["map"]["chains"].as_array().unwrap().iter().all(|c| c["given_up"] == false));
    c.until("nothing of it is needed", || c.target(dead)["replicas"] == 0);
    ok(&c.run(&["target", "remove", &dead.to_string()]));
    all_right();
    server.again(&elsewhere);
    // The target is removed from the server's configuration: after a SIGHUP nothing is missing.
    let rest = fs::read_to_string(&elsewhere).unwrap();
    let (head, targets) = rest.split_once("[[oss.targets]]").unwrap();
    let others: Vec<&str> =
        targets.split("[[oss.targets]]").filter(|t| !t.contains("target0")).collect();
    fs::write(&elsewhere, format!("{head}[[oss.targets]]{}", others.join("[[oss.targets]]")))
        .unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&server.0),
        rustix::process::Signal::HUP,
    )
    .unwrap();
    c.until("it is forgotten", || refused().is_empty());
    c.until("all is whole", || c.run(&["status"]).status.success());
    all_right();
    let fsck = c.run(&["fsck", "--read-data"]);
    assert!(fsck.status.success(), "{}{}", text(&fsck.stdout), text(&fsck.stderr));
}

struct Server(Child);

impl Server {
    fn start(config: &Path) -> Server {
        Server(
            strake().arg("oss").arg("--config").arg(config).stdin(Stdio::null()).spawn().unwrap(),
        )
    }
    /// Starts the server again if it has ended: the previous process may not have released the
    /// targets yet.
    fn again(&mut self, config: &Path) {
        if self.0.try_wait().unwrap().is_some() {
            *self = Server::start(config);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_target_whose_device_becomes_slow_is_emptied_and_kept_if_asked() {
    // All devices are on file systems of the same kind; the first server has its own.
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [disk, others] = match roots.each_ref().map(|r| Lossy::new(r.path(), Rule::Journal)) {
        [Ok(disk), Ok(others)] => [disk, others],
        [Err(e), _] | [_, Err(e)] => return println!("skipped: {e}"),
    };
    let c = Cluster::new("4");
    let slow = c.target_of(1);
    ok(&c.run(&["down"]));
    for oss in 1..=4 {
        let device = c.dir().join(format!("oss{oss}/target0/data"));
        let there = if oss == 1 { disk.at() } else { others.at() }.join(oss.to_string());
        let copied =
            Command::new("cp").arg("--sparse=always").args([&device, &there]).status().unwrap();
        assert!(copied.success());
        fs::remove_file(&device).unwrap();
        symlink(&there, &device).unwrap();
    }
    ok(&c.up());
    let (data, file) = (|i| pattern(i, 300_000), |i: usize| c.mnt().join(format!("f{i}")));
    (0..30).for_each(|i| fs::write(file(i), data(i)).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let worker = {
        let (at, stop) = (c.mnt(), stop.clone());
        thread::spawn(move || work(at, &stop))
    };
    // Long enough for the servers to learn the usual latency; no target is slow.
    thread::sleep(Duration::from_secs(12));
    assert!(
        c.targets().iter().all(|t| t["slow"].is_null() && t["draining"] == false),
        "{:#?}",
        c.targets()
    );

    disk.slow(Duration::from_millis(200));
    c.until("it is drained", || c.target(slow)["draining"] == true);
    let drained = |t: &&Value| t["drained_because_slow"] == true;
    assert!(
        c.targets().iter().filter(drained).count() == 1 && drained(&&c.target(slow)),
        "{:#?}",
        c.targets()
    );
    let list = ok(&c.run(&["target", "list"]));
    assert!(
        list.contains("draining, slow")
            && list.contains(&format!("target {slow} has been slow for")),
        "{list}"
    );
    let status = text(&c.run(&["status"]).stdout);
    assert!(
        status.contains(&format!("target {slow} is being drained because it was slow")),
        "{status}"
    );
    c.until("all has moved", || c.target(slow)["replicas"] == 0);
    stop.store(true, Ordering::Relaxed);
    assert!(worker.join().unwrap() > 20);
    (0..30).for_each(|i| assert!(fs::read(file(i)).unwrap() == data(i), "file {i}"));

    // After `keep` the target stays, even if it stays slow.
    ok(&c.run(&["target", "keep", &slow.to_string()]));
    thread::sleep(Duration::from_secs(12));
    let t = c.target(slow);
    assert!(t["draining"] == false && t["drained_because_slow"] == false, "{t}");
    disk.slow(Duration::ZERO);
    let fsck = c.run(&["fsck", "--read-data"]);
    assert!(fsck.status.success(), "{}{}", text(&fsck.stdout), text(&fsck.stderr));
}

#[test]
fn pools_keep_files_within_and_are_managed_by_command() {
    let c = Cluster::new("3");
    let pools = || {
        let v: Value =
            serde_json::from_slice(&ok_bytes(&c.run(&["pool", "list", "--json"]))).unwrap();
        v["pools"].as_array().unwrap().clone()
    };
    ok(&c.run(&["pool", "new", "fast", "0"]));
    ok(&c.run(&["pool", "add", "fast", "2"]));
    refused(&c.run(&["pool", "new", "fast"]), &["exists"]);
    refused(&c.run(&["pool", "add", "fast", "2"]), &["already"]);
    refused(&c.run(&["pool", "add", "fast", "9"]), &["not registered"]);
    refused(&c.run(&["pool", "remove", "slow", "0"]), &["no pool 'slow'"]);
    assert!(
        pools().len() == 1 && pools()[0]["targets"] == serde_json::json!([0, 2]),
        "{:?}",
        pools()
    );
    let chains = || {
        let v: Value = serde_json::from_slice(&c.run(&["status", "--json"]).stdout).unwrap();
        v["map"]["chains"].as_array().unwrap().clone()
    };
    let general = c.targets().len() * 8 * 3;
    c.until("the pool has chains", || chains().len() >= general + 2 * 8 * 2);
    let d = c.mnt().join("d");
    fs::create_dir(&d).unwrap();
    let lfs = |args: &[&str]| strake().arg("lfs").args(args).arg(&d).output().unwrap();
    ok(&lfs(&["setstripe", "-p", "fast"]));
    assert_eq!(ok(&lfs(&["getstripe", "-N"])), "2\n", "as the file system says");
    refused(&lfs(&["setstripe", "-p", "fast", "--copies=3"]), &["2 storage servers", "3 copies"]);
    refused(&lfs(&["setstripe", "--copies=4"]), &["invalid number of copies '4'"]);
    let three = c.mnt().join("three");
    fs::create_dir(&three).unwrap();
    let lfs3 = |args: &[&str], at: &Path| strake().arg("lfs").args(args).arg(at).output().unwrap();
    ok(&lfs3(&["setstripe", "-N3"], &three));
    fs::write(three.join("f"), b"three times").unwrap();
    for at in [&three, &three.join("f")] {
        assert_eq!(ok(&lfs3(&["getstripe", "-N"], at)), "3\n");
    }
    let shown = ok(&lfs3(&["getstripe", "--copies"], &three.join("f")));
    let (_, copies) = shown.trim_end().rsplit_once("\t ").unwrap();
    let copies: BTreeSet<&str> = copies.split(',').collect();
    assert_eq!(copies, BTreeSet::from(["0", "1", "2"]), "{shown}");
    let before: Vec<u64> = c.targets().iter().map(|t| t["used"].as_u64().unwrap()).collect();
    (0..20).for_each(|i| fs::write(d.join(format!("f{i}")), pattern(i, 1 << 20)).unwrap());
    // Two copies of each, all of them in the pool.
    c.until("what was written is reported", || {
        let used = |id: usize| c.target(id)["used"].as_u64().unwrap() - before[id];
        used(0) >= 20 << 20 && used(2) >= 20 << 20
    });
    assert!(c.target(1)["used"].as_u64().unwrap() < before[1] + (1 << 20));
    ok(&c.run(&["pool", "destroy", "fast"]));
    assert!(pools().is_empty());
    (0..20)
        .for_each(|i| assert!(fs::read(d.join(format!("f{i}"))).unwrap() == pattern(i, 1 << 20)));
}

fn ok_bytes(out: &Output) -> Vec<u8> {
    ok(out).into_bytes()
}

mod long {
    #[test]
    #[ignore = "long tier, 80 s: ./test --long"]
    fn a_target_whose_device_becomes_slow_is_emptied_and_kept_if_asked() {
        super::a_target_whose_device_becomes_slow_is_emptied_and_kept_if_asked();
    }
}
