//! Programs of two feature levels in one cluster, and `strake upgrade`. Members of the older one are
//! this program with `STRAKE_FEATURE_LEVEL=0`, which debug builds obey.
//! `cluster-tests/mixed/run` does the same with two programs.

use std::{
    fs,
    io::{Read, Write},
    path::PathBuf,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::common::{kill, ok, refused, strake, text};

const LIMIT: Duration = Duration::from_secs(60);

fn until(what: &str, mut f: impl FnMut() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < LIMIT, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn older() -> Command {
    let mut c = strake();
    c.env("STRAKE_FEATURE_LEVEL", "0");
    c
}

struct Mixed {
    root: tempfile::TempDir,
}

impl Mixed {
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    /// Starts what is missing with this program.
    fn up(&self, mut program: Command) {
        let options = "up --mds 3 --oss 2 --targets-per-oss 1 --target-gib 1 --mirror 2";
        program.args(options.split(' ')).arg("--dir").arg(self.dir());
        ok(&program.arg("--mount").arg(self.mnt()).output().unwrap());
    }
    fn kill(&self, role: &str) {
        kill(&fs::read_to_string(self.dir().join("run").join(format!("{role}.pid"))).unwrap());
    }
    fn run(&self, args: &[&str]) -> Output {
        strake().args(args).arg("--dir").arg(self.dir()).output().unwrap()
    }
    fn umount(&self) {
        ok(&strake().arg("umount").arg(self.mnt()).output().unwrap());
    }
    fn status(&self) -> Value {
        serde_json::from_slice(&self.run(&["upgrade", "status", "--json"]).stdout).unwrap()
    }
    fn in_the_way(&self) -> Vec<String> {
        let s = self.status();
        let all = s["in_the_way"].as_array().unwrap();
        all.iter().map(|w| w.as_str().unwrap().to_string()).collect()
    }
    /// The cluster serves: what is written through the mount is there afterwards.
    fn serves(&self, name: &str) {
        let (a, b) = (self.mnt().join(format!("{name}.new")), self.mnt().join(name));
        let data: Vec<u8> = (0..300_000u32).map(|i| (i * 7 + name.len() as u32) as u8).collect();
        let mut f = fs::File::create_new(&a).unwrap();
        f.write_all(&data).unwrap();
        f.sync_all().unwrap();
        fs::rename(&a, &b).unwrap();
        let mut read = Vec::new();
        fs::File::open(&b).unwrap().read_to_end(&mut read).unwrap();
        assert!(read == data, "{name}");
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}

#[test]
fn members_of_two_levels_serve_until_the_level_is_raised() {
    if !cfg!(debug_assertions) {
        println!("skipped: only a debug build can pretend to be an older program");
        return;
    }
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let m = Mixed { root: tempfile::tempdir().unwrap() };
    m.up(older());
    m.serves("old");
    assert_eq!((m.status()["level"].as_u64(), m.status()["newest"].as_u64()), (Some(0), Some(1)));

    // All but one of each role are replaced.
    ["mds1", "mds2", "oss1"].iter().for_each(|role| m.kill(role));
    m.up(strake());
    m.serves("mixed");
    until("only the older ones are in the way", || {
        let way = m.in_the_way();
        way.len() == 3 && way.iter().all(|w| w.contains("knows feature level 0"))
    });
    let finish = m.run(&["upgrade", "finish"]);
    refused(&finish, &["metadata server 3 knows", "storage server oss2 knows", "mount "]);
    refused(&finish, &["cannot be reached", "newer strake", "--evict-clients"]);
    assert_eq!(m.status()["level"], 0);

    // Then these. A mount in use goes on over a restart of its daemon only with the same program.
    // It goes first: a session that cannot be closed, since no server leads, lasts for its term.
    m.umount();
    ["mds3", "oss2"].iter().for_each(|role| m.kill(role));
    m.up(strake());
    m.serves("new");
    let said = ok(&m.run(&["upgrade", "finish"]));
    assert!(said.contains("has feature level 1; older programs are refused"), "{said}");
    assert!(said.contains("nothing is left to do"), "{said}");
    assert!(ok(&m.run(&["upgrade", "finish"])).contains("has feature level 1 already"));
    assert!(ok(&m.run(&["upgrade", "status"])).contains("feature level of the cluster: 1"));
    m.serves("raised");

    // An older program is refused in one sentence, wherever it shows itself.
    let sentence = ["feature level 1", "knows level 0: run a newer strake"];
    let starts = |role: &str, config: &str| {
        let config = m.dir().join(format!("{config}.toml"));
        let mut c = Command::new("timeout");
        c.arg("60").arg(older().get_program()).arg(role).arg("--config").arg(config);
        c.env("STRAKE_FEATURE_LEVEL", "0").output().unwrap()
    };
    for (role, name) in [("mds", "mds3"), ("oss", "oss2")] {
        m.kill(name);
        let out = starts(role, name);
        refused(&out, &sentence);
        let err = text(&out.stderr);
        assert_eq!(err.lines().filter(|l| l.starts_with("strake: ")).count(), 1, "{err}");
    }
    let second = m.root.path().join("second");
    fs::create_dir(&second).unwrap();
    let config = m.dir().join("mount.toml");
    let out = older().arg("mount").arg("--config").arg(config).arg(&second).output().unwrap();
    refused(&out, &sentence);
    m.up(strake());
    m.serves("after");
    for (name, data) in [("old", 3), ("mixed", 5)] {
        assert_eq!(fs::read(m.mnt().join(name)).unwrap()[0], data, "{name}");
    }
    assert!(ok(&m.run(&["fsck"])).contains("clean"));
}

/// `--evict-clients` does not wait for mounts.
#[test]
fn an_older_mount_is_told_why_its_session_ended() {
    if !cfg!(debug_assertions) {
        println!("skipped: only a debug build can pretend to be an older program");
        return;
    }
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let m = Mixed { root: tempfile::tempdir().unwrap() };
    m.up(older());
    m.serves("old");
    ["mds1", "mds2", "mds3", "oss1", "oss2"].iter().for_each(|role| m.kill(role));
    m.up(strake());
    until(
        "only the mount is in the way",
        || matches!(&m.in_the_way()[..], [w] if w.starts_with("mount ")),
    );
    refused(&m.run(&["upgrade", "finish"]), &["mount ", "--evict-clients"]);
    ok(&m.run(&["upgrade", "finish", "--evict-clients"]));
    let log = m.dir().join("logs/mount.log");
    until("the mount says why", || {
        let said = fs::read_to_string(&log).unwrap_or_default();
        said.contains("feature level 1, and the program of this client knows level 0")
    });
    assert!(fs::write(m.mnt().join("late"), b"x").is_err());
    m.kill("mount");
    m.up(strake());
    m.serves("new");
}
