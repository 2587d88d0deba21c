//! Chunk tables that decay, on real processes: a flipped bit costs one target, which comes back
//! empty and is resynced. The server's other target and all files stay available.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use crate::common::{kill, ok, strake, text};
use serde_json::Value;

/// One metadata server, two storage servers with two targets each, mounted; stopped when dropped.
struct Small {
    root: tempfile::TempDir,
}

impl Small {
    fn new() -> Small {
        let s = Small { root: tempfile::tempdir().unwrap() };
        s.up(&["--mds=1", "--oss=2", "--targets-per-oss=2", "--target-gib=1", "--mirror=2"]);
        s
    }
    /// Starts the cluster and waits until everything is in service.
    fn up(&self, more: &[&str]) {
        let mut c = strake();
        ok(&c
            .arg("up")
            .args(more)
            .arg("--dir")
            .arg(self.dir())
            .arg("--mount")
            .arg(self.mnt())
            .output()
            .unwrap());
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    /// The chunk table of the target that decays.
    fn table(&self) -> PathBuf {
        self.dir().join("oss1/target0/table")
    }
    fn status(&self) -> Value {
        let out = strake().args(["status", "--json", "--dir"]).arg(self.dir()).output().unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
    }
    fn oss1(&self) -> Value {
        let status = self.status();
        status["servers"].as_array().unwrap().iter().find(|s| s["name"] == "oss1").cloned().unwrap()
    }
    /// How many damaged tables the target has kept.
    fn kept(&self) -> usize {
        let is_kept = |name: String| name.starts_with("table.damaged-");
        let all = fs::read_dir(self.table().parent().unwrap()).unwrap();
        all.filter(|e| is_kept(e.as_ref().unwrap().file_name().into_string().unwrap())).count()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = strake().arg("down").arg("--dir").arg(self.dir()).output();
    }
}

fn content(seed: usize) -> Vec<u8> {
    (1..=300_000 + 7 * seed as u64)
        .map(|i| ((i ^ seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u8)
        .collect()
}

fn put(path: &Path, bytes: &[u8]) {
    let mut f = File::create(path).unwrap();
    f.write_all(bytes).unwrap();
    f.sync_all().unwrap();
}

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() { files(&entry.path(), out) } else { out.push(entry.path()) }
    }
    out.sort();
}

/// Inverts a bit of a nonzero byte. `part`: its position among the nonzero bytes, from 0 to 1.
fn flip(file: &Path, part: f64) -> bool {
    let Ok(mut bytes) = fs::read(file) else { return false };
    let used: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i] != 0).collect();
    let Some(at) = used.get((used.len() as f64 * part) as usize) else { return false };
    bytes[*at] ^= 0x04;
    fs::write(file, bytes).unwrap();
    true
}

fn a_decayed_table_costs_one_target_and_no_file() {
    if !Path::new("/dev/fuse").exists() {
        return println!("skipped: /dev/fuse is missing");
    }
    let c = Small::new();
    let names: Vec<PathBuf> = (0..60).map(|i| c.mnt().join(format!("f{i}"))).collect();
    let (first, later) = names.split_at(40);
    first.iter().enumerate().for_each(|(i, f)| put(f, &content(i)));
    let mut all = Vec::new();
    files(&c.table(), &mut all);
    // Not the version file: this version cannot tell a newer store from damage.
    let all = all.iter().filter(|f| !f.ends_with("version"));
    let flips = all.flat_map(|f| [(f.clone(), 0.3), (f.clone(), 0.7)]);
    let (mut healed, mut written) = (0, first.len());
    for (file, part) in flips {
        kill(&fs::read_to_string(c.dir().join("run/oss1.pid")).unwrap());
        let hit = flip(&file, part);
        // The chains of the killed server go on.
        if let Some(f) = later.get(written - first.len()) {
            put(f, &content(written));
            written += 1;
        }
        let before = c.kept();
        c.up(&[]);
        let (what, oss) = (format!("{} at {part}", file.display()), c.oss1());
        assert_eq!(oss["targets"].as_array().unwrap().len(), 2, "{what}: {oss:#}");
        if c.kept() > before {
            assert!(hit, "{what}");
            assert!(oss["notices"].to_string().contains("came back empty"), "{what}: {oss:#}");
            healed += 1;
        }
        for (i, f) in names[..written].iter().enumerate() {
            assert!(fs::read(f).unwrap() == content(i), "{what}: {}", f.display());
        }
    }
    assert!(healed >= 4, "{healed}");
    let log = fs::read_to_string(c.dir().join("logs/oss1.log")).unwrap();
    assert!(log.contains("is out of service") && log.contains("comes back empty"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    // fsck reads each replica on its own, past all caches.
    let out = ok(&strake().args(["fsck", "--read-data", "--dir"]).arg(c.dir()).output().unwrap());
    assert!(out.contains("clean"), "{out}");
}

mod long {
    #[test]
    #[ignore = "long tier, 50 s: ./test --long"]
    fn a_decayed_table_costs_one_target_and_no_file() {
        super::a_decayed_table_costs_one_target_and_no_file();
    }
}
