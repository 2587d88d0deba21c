//! Messages of `strake` about wrong configurations, and about options of `strake up` that
//! contradict the existing local cluster.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use crate::common::{eventually, kill, ok, refused, strake};

const LIMIT: Duration = Duration::from_secs(60);

/// One metadata server, one storage server, one copy; stopped when dropped.
struct Tiny {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl Tiny {
    fn new() -> Tiny {
        let root = tempfile::tempdir().unwrap();
        Tiny { dir: root.path().join("cluster"), root }
    }
    fn up(&self, extra: &[&str]) -> Output {
        strake()
            .arg("up")
            .arg("--dir")
            .arg(&self.dir)
            .args(extra)
            .current_dir(self.root.path())
            .output()
            .unwrap()
    }
    fn make(&self, mount: &str) -> Output {
        self.up(&[
            "--mds=1",
            "--oss=1",
            "--targets-per-oss=1",
            "--mirror=1",
            "--target-gib=1",
            "--mount",
            mount,
        ])
    }
    fn on_cluster(&self, command: &str) -> Output {
        strake().arg(command).arg("--dir").arg(&self.dir).output().unwrap()
    }
    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        if self.dir.exists() {
            let _ = self.on_cluster("down");
        }
    }
}

fn key(dir: &Path) -> PathBuf {
    let key = dir.join("key");
    fs::write(&key, "00".repeat(32)).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    key
}

#[test]
fn unknown_keys_of_mounts_and_clusters_are_errors_with_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mount.toml");
    fs::write(&file, "client_key = '/k'\n\n[mount]\nmds = ['tcp:127.0.0.1:1']\nread_onyl = true\n")
        .unwrap();
    let out = strake().args(["mount", "--config"]).arg(&file).arg(dir.path()).output().unwrap();
    refused(&out, &["mount.toml:5", "read_onyl"]);
    fs::write(dir.path().join("cluster.toml"), "version = 1\nmds = 1\nmirrors = 2\n").unwrap();
    refused(
        &strake().args(["status", "--dir"]).arg(dir.path()).output().unwrap(),
        &["cluster.toml:3", "mirrors"],
    );
}

#[test]
fn a_log_filter_that_means_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mds = |log: &str| {
        let mut c = strake();
        c.args(["mds", "--id=1", "--listen=tcp:127.0.0.1:0", "--log", log, "--dir"])
            .arg(dir.path().join("no/d"));
        c.arg("--cluster-key").arg(key(dir.path())).env_remove("STRAKE_LOG");
        c
    };
    refused(&mds("inof").output().unwrap(), &["inof", "MODULE=LEVEL"]);
    refused(
        &mds("info").env("STRAKE_LOG", "strake_mds=loud").output().unwrap(),
        &["STRAKE_LOG", "strake_mds=loud"],
    );
    let mut mount = strake();
    mount
        .args(["mount", "tcp:127.0.0.1:1", "--log=inof", "--client-key"])
        .arg(key(dir.path()))
        .arg(dir.path());
    refused(&mount.env_remove("STRAKE_LOG").output().unwrap(), &["inof", "MODULE=LEVEL"]);
    refused(&mds("strake_mds=debug,warn").output().unwrap(), &["no does not exist"]);
}

#[test]
fn a_port_that_a_storage_server_finds_in_use_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let file = dir.path().join("oss.toml");
    let config = format!(
        "cluster_key = {:?}\n[oss]\nname = 'a'\nlisten = 'tcp:127.0.0.1:{port}'\nmds = ['tcp:127.0.0.1:1']\n\
         targets = [{{ path = {:?}, size = 67108864 }}]\n",
        key(dir.path()),
        dir.path().join("t")
    );
    fs::write(&file, config).unwrap();
    let mut oss = Command::new("timeout");
    oss.arg("30").arg(env!("CARGO_BIN_EXE_strake")).args(["oss", "--config"]).arg(&file);
    refused(&oss.output().unwrap(), &[&port.to_string(), "in use"]);
}

#[test]
fn what_a_cluster_was_made_with_holds_and_status_tells_by_its_exit() {
    let c = Tiny::new();
    assert_eq!(c.on_cluster("status").status.code(), Some(1), "there is none yet");
    ok(&c.make("none"));
    for (option, was) in
        [("--mirror=2", "--mirror 1"), ("--target-gib=2", "--target-gib 1"), ("--oss=2", "--oss 1")]
    {
        refused(&c.up(&[option]), &["was made with", was, "Leave the option out"]);
    }
    let out = ok(&c.up(&[]));
    assert!(!out.contains("mount  "), "it has none: {out}");
    assert_eq!(c.on_cluster("status").status.code(), Some(0));
    let pid = fs::read_to_string(c.dir.join("run/oss1.pid")).unwrap();
    kill(&pid);
    assert_eq!(c.on_cluster("status").status.code(), Some(2));
    ok(&c.on_cluster("down"));
    assert_eq!(c.on_cluster("status").status.code(), Some(1));
}

#[test]
fn status_and_lfs_path_tell_the_transport_of_each_connection_and_the_bytes_that_took_it() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    const MIB: u64 = 1 << 20;
    let c = Tiny::new();
    ok(&c.make("m"));
    let json = |args: &[&str], path: &Path| -> serde_json::Value {
        serde_json::from_str(&ok(&strake().args(args).arg(path).output().unwrap())).unwrap()
    };
    // For each server: its transports, and the connections and bytes (sent, received) of the only
    // transport in use.
    let servers = || {
        let status = json(&["status", "--json", "--dir"], &c.dir);
        let of = |s: &serde_json::Value| {
            let transports: Vec<_> = s["transports"].as_array().unwrap().clone();
            assert!(
                transports.iter().all(|r| r["transport"] == "tcp"
                    || (&r["sent"], &r["received"]) == (&0.into(), &0.into())),
                "{s:#}"
            );
            let tcp = transports
                .iter()
                .find(|r| r["transport"] == "tcp")
                .unwrap_or_else(|| panic!("{s:#}"));
            let n = |key: &str| tcp[key].as_u64().unwrap();
            (s["name"].as_str().unwrap().to_string(), (n("connections"), n("sent"), n("received")))
        };
        status["servers"]
            .as_array()
            .unwrap()
            .iter()
            .map(of)
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let before = servers();
    let file = c.at("m/file");
    fs::write(&file, vec![7; 3 * MIB as usize]).unwrap();
    fs::File::open(&file).unwrap().sync_all().unwrap();
    let after = servers();
    let grown = |name: &str| (after[name].1 - before[name].1, after[name].2 - before[name].2);
    let (sent, received) = grown("oss1");
    // More than 3 MiB may arrive: the client resends a write that has no answer in time.
    assert!((3 * MIB..30 * MIB).contains(&received) && sent < MIB, "{before:?} {after:?}");
    assert!(
        grown("mds1").1 < MIB,
        "the bytes of a file go to no metadata server: {before:?} {after:?}"
    );

    let path = json(&["lfs", "path", "--json"], &file);
    let file_of = if path.is_array() { &path[0] } else { &path };
    let server = &file_of["servers"][0];
    assert_eq!(
        (file_of["servers"].as_array().map(Vec::len), &server["name"]),
        (Some(1), &"oss1".into()),
        "{path:#}"
    );
    let connections = server["connections"].as_array().unwrap();
    assert!(
        !connections.is_empty() && connections.len() as u64 <= after["oss1"].0,
        "{path:#} {after:?}"
    );
    for w in connections {
        assert!(
            w["transport"] == "tcp"
                && w["endpoint"].as_str().is_some_and(|e| e.starts_with("tcp:")),
            "{w:#}"
        );
    }
    let sum: u64 = connections.iter().map(|w| w["sent"].as_u64().unwrap()).sum();
    assert!((3 * MIB..=servers()["oss1"].2).contains(&sum), "{path:#} {after:?}");
}

#[test]
fn a_cluster_stays_where_it_is_mounted() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Tiny::new();
    ok(&c.make("a"));
    fs::write(c.at("a/f"), "x").unwrap();
    // `strake up` from another folder, without naming the mount point.
    let elsewhere = c.at("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let out = strake().arg("up").arg("--dir").arg(&c.dir).current_dir(&elsewhere).output().unwrap();
    assert!(ok(&out).contains(c.at("a").to_str().unwrap()));
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    ok(&c.up(&["--mount", "a"]));
    for other in ["b", "none"] {
        refused(
            &c.up(&["--mount", other]),
            &["is mounted at", c.at("a").to_str().unwrap(), "strake umount"],
        );
    }
    assert_eq!(fs::read_to_string(c.at("a/f")).unwrap(), "x");
    // A killed mount does not count as a mount, and its remains are removed.
    let pid = fs::read_to_string(c.dir.join("run/mount.pid")).unwrap();
    kill(&pid);
    ok(&c.on_cluster("down"));
    ok(&c.up(&["--mount", "b"]));
    assert_eq!(fs::read_to_string(c.at("b/f")).unwrap(), "x");
    // The mount is unmounted by hand; its process may still be ending.
    ok(&strake().arg("umount").arg(c.at("b")).output().unwrap());
    ok(&c.up(&[]));
    assert_eq!(fs::read_to_string(c.at("b/f")).unwrap(), "x");
}

/// One member whose log is damaged, one storage server that lost its target, and one member that
/// lost its folder.
#[test]
fn a_cluster_comes_up_without_what_is_refused_and_says_so() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Tiny::new();
    let new =
        ["--mds=3", "--oss=2", "--targets-per-oss=1", "--mirror=2", "--target-gib=1", "--mount=m"];
    ok(&c.up(&new));
    for n in 0..50 {
        fs::write(c.at(&format!("m/f{n}")), vec![n; 100_000]).unwrap();
    }
    let whole = |what: &str| {
        for n in 0..50 {
            assert!(
                fs::read(c.at(&format!("m/f{n}"))).unwrap() == vec![n; 100_000],
                "{what}: file {n}"
            );
        }
        fs::write(c.at(&format!("m/{what}")), what).unwrap();
    };
    let up_without = |words: &[&str]| {
        let out = c.up(&["--timeout=60"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{said}");
        for w in words.iter().chain(&["up, but not whole"]) {
            assert!(said.contains(w), "'{w}' is not in: {said}");
        }
        assert_eq!(c.on_cluster("status").status.code(), Some(2));
    };
    ok(&c.on_cluster("down"));
    // Damage the middle of the first member's log.
    let logs = || fs::read_dir(c.dir.join("mds1/log")).unwrap().map(|e| e.unwrap().path());
    let log = logs()
        .filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("log-"))
        .min()
        .unwrap();
    let good = fs::read(&log).unwrap();
    let mut bad = good.clone();
    let used = bad.iter().rposition(|b| *b != 0).unwrap();
    bad[used / 2 / 4096 * 4096..][..4096].fill(0);
    fs::write(&log, &bad).unwrap();
    up_without(&["mds1 does not run: ", "damaged"]);
    whole("damaged");
    ok(&c.on_cluster("down"));
    fs::write(&log, &good).unwrap();
    ok(&c.up(&[]));
    // A target whose device is gone when its server is started again.
    let target = c.dir.join("oss2/target0");
    kill(&fs::read_to_string(c.dir.join("run/oss2.pid")).unwrap());
    fs::rename(target.join("data"), target.join("away")).unwrap();
    up_without(&["oss2: target ", "is out of service", "data is missing"]);
    whole("gone");
    fs::rename(target.join("away"), target.join("data")).unwrap();
    ok(&c.up(&[]));
    // The folder of mds1 is removed, and mds1 starts again under its id.
    ok(&c.on_cluster("down"));
    fs::remove_dir_all(c.dir.join("mds1")).unwrap();
    up_without(&["mds1 has applied entry ", "strake mds replace"]);
    whole("emptied");
    let status = String::from_utf8(c.on_cluster("status").stdout).unwrap();
    assert!(status.contains("member-behind: mds1 has applied entry "), "{status}");
    // Without a majority there is nothing to mount.
    ok(&c.on_cluster("down"));
    fs::write(c.dir.join("mds2/identity"), "nonsense").unwrap();
    fs::write(c.dir.join("mds3/identity"), "nonsense").unwrap();
    refused(&c.up(&["--timeout=20"]), &["mds2 ended"]);
}

const ROWS: [&str; 13] = [
    "mount: write 1 MiB",
    "mount: read 1 MiB",
    "mount: read 1 MiB, 4 readers",
    "mount: read 4 KiB random",
    "mount: create",
    "mount: stat",
    "mount: unlink",
    "client: write 1 MiB",
    "client: read 1 MiB",
    "client: read 4 KiB random",
    "client: create",
    "client: stat",
    "client: unlink",
];

/// `out`: what a bench of one run through both transports printed.
fn both_transports_are_measured(out: &str) {
    let v: serde_json::Value = serde_json::from_str(out).unwrap();
    assert_eq!(v["transports"], serde_json::json!(["dev", "fuser"]));
    assert_eq!(v["rows"].as_array().unwrap().len(), 7);
    for r in v["rows"].as_array().unwrap() {
        let (ours, other) = (&r["runs"], &r["others"][0]);
        assert_eq!(other["name"], "fuser");
        assert_eq!(
            (ours.as_array().unwrap().len(), other["runs"].as_array().unwrap().len()),
            (1, 1),
            "{r:#}"
        );
        let ratio = ours[0].as_f64().unwrap() / other["runs"][0].as_f64().unwrap();
        for told in [&other["ratio"]["median"], &other["ratio"]["interval"][0]] {
            assert!((told.as_f64().unwrap() / ratio - 1.0).abs() < 1e-9, "{r:#}");
        }
    }
}

#[test]
fn a_small_bench_measures_every_row_and_leaves_nothing() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Tiny::new();
    ok(&c.make("m"));
    let bench =
        |args: &[&str]| strake().arg("bench").arg("--dir").arg(&c.dir).args(args).output().unwrap();
    for zero in ["--size-mib=0", "--files=0", "--random-ops=0", "--runs=0"] {
        refused(&bench(&[zero]), &["0 is not in", zero.split('=').next().unwrap()]);
    }
    // A bench that is killed while it reads from its own mount ends, removes the mount, and does
    // not block the next one.
    let own =
        c.dir.join("bench/memory").canonicalize().unwrap_or_else(|_| c.dir.join("bench/memory"));
    let is_mounted =
        || fs::read_to_string("/proc/self/mountinfo").unwrap().contains(own.to_str().unwrap());
    let kills = if cfg!(feature = "fuser") { 5 } else { 0 };
    for _ in 0..kills {
        let mut killed = strake();
        killed.arg("bench").arg("--dir").arg(&c.dir).args([
            "--size-mib=64",
            "--runs=1000",
            "--only=4 readers",
        ]);
        let mut killed = killed.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        eventually("its own mount", LIMIT, is_mounted);
        killed.kill().unwrap();
        eventually("its end", LIMIT, || killed.try_wait().unwrap().is_some());
        eventually("the end of its mount", LIMIT, || !is_mounted());
    }
    let small = ["--size-mib=10", "--files=80", "--random-ops=400", "--runs=1", "--json"];
    let out = ok(&bench(&small));
    let v: serde_json::Value = serde_json::from_str(&out).unwrap();
    let rows = v["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["name"].as_str().unwrap()).collect::<Vec<_>>(), ROWS);
    for r in rows {
        assert!(r["median"].as_f64().is_some_and(|m| m > 0.0), "{r:#}");
        assert!(r["ratio"].as_f64().is_some_and(|m| m > 0.0), "{r:#}");
        assert!(
            r["limits"]
                .as_array()
                .is_some_and(|l| l.iter().all(|l| l["median"].as_f64() > Some(0.0))),
            "{r:#}"
        );
    }
    if Command::new("fio").arg("--version").output().is_ok() {
        let patterns: Vec<&str> =
            v["fio"].as_array().unwrap().iter().map(|f| f["pattern"].as_str().unwrap()).collect();
        assert_eq!(patterns, ["1 MiB write", "1 MiB read", "4 KiB random read"]);
    }
    refused(&bench(&["--transports=dev,dev"]), &["--transports", "once"]);
    let beside = bench(&[&small[..], &["--only=mount", "--transports=dev,fuser"]].concat());
    match cfg!(feature = "fuser") {
        true => both_transports_are_measured(&ok(&beside)),
        false => refused(&beside, &["'fuser'", "--features fuser"]),
    }
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(c.dir.to_str().unwrap()));
    assert_eq!(fs::read_dir(c.at("m")).unwrap().count(), 0);
    assert!(!c.dir.join("bench").exists());
    refused(
        &bench(&["--size-mib=4", "--files=8", "--random-ops=8", "--only=nonsense"]),
        &["nonsense"],
    );
}
