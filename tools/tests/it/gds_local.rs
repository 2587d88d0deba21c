//! `strake gds stage`, `copies` and `unstage` on a cluster of real processes, and the tier that
//! reads the copies.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};

use crate::common::{eventually, ok, refused, strake, text};
use serde_json::Value;
use strake_client::{Creds, File};
use strake_fake_gpu::FakeGpu;
use strake_gds::{
    Checksum, Fault, Options, Policy, Tier, Transfer,
    session::{Memory, Session, Setup, published},
};
use strake_proto::{
    Code,
    layout::splitmix64,
    pb::{self, seal::Step},
    seal::{self, Leaf},
};

const LOCAL: Policy = Policy::Require(Tier::LocalGds);
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
const CREATE: u32 = (libc::O_RDWR | libc::O_CREAT) as u32;

/// One metadata server and one storage server; stopped when dropped.
struct Cluster {
    root: tempfile::TempDir,
    mds: String,
}

impl Cluster {
    fn new() -> Cluster {
        Cluster::up(|_| "none".into())
    }

    /// A cluster and its mount point. Prints a message and returns `None` where nothing can be
    /// mounted.
    fn mounted() -> Option<(Cluster, PathBuf)> {
        if !Path::new("/dev/fuse").exists() {
            println!("skipped: /dev/fuse is missing");
            return None;
        }
        let c = Cluster::up(|root| root.join("mnt"));
        let at = c.root.path().join("mnt");
        Some((c, at))
    }

    fn up(mount: impl FnOnce(&Path) -> PathBuf) -> Cluster {
        let root = tempfile::tempdir().unwrap();
        let mut up = strake();
        up.arg("up").arg("--dir").arg(root.path().join("c")).arg("--mount").arg(mount(root.path()));
        ok(&up
            .args(["--mds=1", "--oss=1", "--targets-per-oss=1", "--mirror=1", "--target-gib=1"])
            .current_dir(root.path())
            .output()
            .unwrap());
        let made: toml::Table =
            fs::read_to_string(root.path().join("c/cluster.toml")).unwrap().parse().unwrap();
        let mds =
            format!("127.0.0.1:{}", made["ports"].as_array().unwrap()[0].as_integer().unwrap());
        Cluster { root, mds }
    }

    fn session(&self, local: Option<PathBuf>) -> Session {
        Session::open(&self.setup(local)).unwrap()
    }

    fn setup(&self, local: Option<PathBuf>) -> Setup {
        // Host memory in place of a device's cannot be summed there.
        let options =
            Options { local, accept_oss_checksum: true, slot_bytes: 1 << 20, ..Options::default() };
        let key = self.root.path().join("c/client.key");
        Setup { key, options, ..Setup::new(&self.mds, Memory::Host) }
    }

    fn stage(&self, dir: &Path, more: &[&str]) -> Output {
        let mut c = strake();
        c.args(["gds", "stage", &self.mds, "--client-key"])
            .arg(self.root.path().join("c/client.key"));
        c.arg("--to").arg(dir).args(more).output().unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = strake().args(["down", "--dir"]).arg(self.root.path().join("c")).output();
    }
}

fn pattern(len: usize) -> Vec<u8> {
    let mut seed = 7;
    (0..len.div_ceil(8)).flat_map(|_| splitmix64(&mut seed).to_le_bytes()).take(len).collect()
}

fn copies(dir: &Path) -> Vec<Value> {
    let out = strake().args(["gds", "copies", "--json"]).arg(dir).output().unwrap();
    ok(&out);
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    v["copies"].as_array().unwrap().clone()
}

/// Seals as `lfs seal` does, with a manifest of these bytes. `finish`: all steps, not only the
/// first.
fn seal(s: &Session, file: &File, bytes: &[u8], finish: bool) {
    let (ino, me) = (file.ino(), Creds::default());
    let step = |id, step| {
        let change = pb::Seal { ino, id, step: Some(step) };
        s.with_client(async |c| c.seals().step(&me, change.clone()).await).unwrap()
    };
    let id = step(0, Step::Begin(pb::SealBegin {})).unwrap().id;
    if !finish {
        return;
    }
    let leaf = |b: &[u8]| {
        let mut leaf = Leaf::default();
        leaf.update(b);
        leaf.finish()
    };
    let digests: Vec<_> = bytes.chunks(seal::EXTENT as usize).map(leaf).collect();
    step(id, Step::Page(pb::SealPage { number: 0, digests: digests.concat().into() }));
    let (size, extent_size) = (bytes.len() as u64, seal::EXTENT);
    let (sha256, root) = (vec![1; 32].into(), seal::root(&digests).to_vec().into());
    step(id, Step::Finish(pb::Manifest { size, extent_size, sha256, root, time_ns: 0 }));
}

#[test]
fn sealed_files_are_staged_read_from_their_copies_and_removed() {
    let cluster = Cluster::new();
    let dir = cluster.root.path().join("copies");
    fs::create_dir(&dir).unwrap();
    let s = cluster.session(Some(dir.clone()));
    let data = pattern((9 << 20) + 1234);
    let write = |path: &str, bytes: &[u8]| {
        let f = s.open_file(path, CREATE, 0o644).unwrap();
        s.write(&f, 0, bytes).unwrap();
        s.fsync(&f).unwrap();
        s.close(f).unwrap();
        s.open_file(path, 0, 0).unwrap()
    };
    let (f, other) = (write("/model", &data), write("/other", &data));
    let to = s.device().alloc(data.len() as u64).unwrap();
    let f = Arc::new(f);
    let all = [Transfer { file: f.clone(), offset: 0, gpu: to, len: data.len() as u64 }];

    // A file that may still change is not staged.
    refused(&cluster.stage(&dir, &["/model"]), &["'/model'", "is not sealed", "`lfs seal` first"]);
    let e = s.load(&all, LOCAL).unwrap_err();
    assert!(e.error.code == Code::OpNotSupp && e.error.message.contains("is not sealed"), "{e}");
    seal(&s, &f, &data, false);
    refused(&cluster.stage(&dir, &["/model"]), &["immutable without a manifest"]);
    seal(&s, &f, &data, true);
    // Sealed with a manifest of other bytes.
    seal(&s, &other, &pattern(data.len() + 8)[8..], true);
    refused(
        &cluster.stage(&dir, &["/other"]),
        &["bytes 0 to 4194304 differ from what was sealed", "`lfs verify`"],
    );
    refused(&cluster.stage(&dir, &["/none"]), &["there is no such file"]);
    refused(&cluster.stage(&dir.join("none"), &["/model"]), &["none'", "No such file"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is left of any");
    let e = s.load(&all, LOCAL).unwrap_err();
    assert!(
        e.error.message.contains("has no copy on this node")
            && e.error.message.contains("gds stage"),
        "{e}"
    );

    // One file that can be staged and one that cannot: both are reported.
    let out = cluster.stage(&dir, &["/model", "/other", "--json"]);
    assert_eq!(out.status.code(), Some(1));
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&v["copies"][0]["already"], &v["failed"][0]["path"]),
        (&false.into(), &"/other".into()),
        "{v}"
    );
    let shown = ok(&cluster.stage(&dir, &["/model"]));
    assert_eq!(shown, "/model: is there, 9.0 MiB\n");

    let r = s.load(&all, LOCAL).unwrap();
    assert!(
        r.is_all(Tier::LocalGds)
            && r.by_transport.sum() == r.asked
            && r.checksum == Some(Checksum::AtOssOnly),
        "{r}"
    );
    let mut back = vec![0; data.len()];
    s.get(to, &mut back).unwrap();
    assert!(back == data);

    // Bench with `--strict`.
    let mut bench = strake();
    bench.args([
        "gds",
        "bench",
        &cluster.mds,
        "--memory=host",
        "--threads=1,2",
        "--load=/model",
        "--client-key",
    ]);
    bench.arg(cluster.root.path().join("c/client.key")).arg("--local").arg(&dir);
    bench.args(["--policy=require:local-gds", "--strict", "--json"]);
    let out = bench.output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(v["refused"].as_str().unwrap().contains("accept_oss_checksum"), "{v}");
    let v: Value =
        serde_json::from_str(&ok(&bench.arg("--accept-oss-checksum").output().unwrap())).unwrap();
    assert_eq!(
        (&v["bytes"], &v["loads"], v["rows"].as_array().unwrap().len()),
        (&(9 << 20).into(), &true.into(), 2)
    );
    for row in v["rows"].as_array().unwrap() {
        assert_eq!(row["loaded"]["by_tier"]["local-gds"], 9 << 20, "{row}");
        assert!(row["saved"].is_null() && row["rates"]["load"].as_f64().unwrap() > 0.0, "{row}");
    }

    let listed = copies(&dir);
    assert_eq!(
        (listed.len(), &listed[0]["path"], &listed[0]["usable"]),
        (1, &"/model".into(), &true.into())
    );
    assert_eq!(listed[0]["size"], data.len());
    let shown = ok(&strake().args(["gds", "copies"]).arg(&dir).output().unwrap());
    assert!(
        shown.contains("/model") && shown.contains("usable") && shown.contains("9.0 MiB"),
        "{shown}"
    );
    let unstage =
        |what: &str| strake().args(["gds", "unstage"]).arg(&dir).arg(what).output().unwrap();
    refused(&unstage("/nothing"), &["has no copy of '/nothing'"]);
    ok(&unstage("/model"));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    ok(&cluster.stage(&dir, &["/model"]));
    assert_eq!(copies(&dir)[0]["path"], "/model");
    ok(&unstage("--all"));
    assert!(copies(&dir).is_empty());
    drop(all);
    s.close(Arc::into_inner(f).unwrap()).unwrap();
    s.close(other).unwrap();
}

/// `lfs path` of a file that a mount and a bridge use. It shows the mount's bytes by transport and
/// the bridge's bytes by tier, as long as the bridge lives.
#[test]
fn lfs_path_tells_the_tiers_of_a_file() {
    let Some((cluster, mount)) = Cluster::mounted() else { return };
    if published::folder().is_none() {
        println!("skipped: neither root nor $XDG_RUNTIME_DIR: sessions publish nothing");
        return;
    }
    let (name, len) = (mount.join("f"), (3 << 20) + 5);
    let data = pattern(len);
    // The mount counts bytes of a file as long as the file is in use.
    let mut kept = fs::File::create_new(&name).unwrap();
    kept.write_all(&data).unwrap();
    kept.sync_all().unwrap();
    let path =
        |more: &[&str]| ok(&strake().args(["lfs", "path"]).args(more).arg(&name).output().unwrap());
    let seen =
        || -> Value { serde_json::from_str::<Value>(&path(&["--json"])).unwrap()[0].clone() };
    assert_eq!(
        (&seen()["bytes"]["sent"]["together"], &seen()["bridges"]),
        (&len.into(), &Value::Array(vec![]))
    );

    let s = cluster.session(None);
    let gpu = s.device().alloc(len as u64).unwrap();
    let file = Arc::new(s.open_file("/f", libc::O_RDWR as u32, 0).unwrap());
    let whole = [Transfer { file: file.clone(), offset: 0, gpu, len: len as u64 }];
    let loaded = s.load(&whole, Policy::Require(Tier::Pageable)).unwrap();
    let part = [Transfer { file: file.clone(), offset: 5, gpu: gpu + 5, len: 4096 }];
    let saved = s.save(&part, Policy::Require(Tier::Pageable)).unwrap();
    // The bridge publishes its counters within a quarter of a second.
    let mut last = Value::Null;
    eventually("the counters of the bridge", LIMIT, || {
        last = seen();
        last["bridges"][0]["saved"]["together"] == 4096
    });
    let bridge = &last["bridges"][0];
    assert_eq!(bridge["pid"], std::process::id());
    for (way, report) in [("loaded", &loaded), ("saved", &saved)] {
        assert_eq!(bridge[way]["by_tier"], serde_json::to_value(report.by_tier).unwrap());
        assert_eq!(bridge[way]["together"], report.moved());
    }
    let shown = path(&[]);
    assert!(
        shown.contains("GPU BRIDGE OF") && shown.contains(&format!("pageable  {len}")),
        "{shown}"
    );
    drop((whole, part));
    s.close(Arc::into_inner(file).unwrap()).unwrap();
    drop(s);
    assert_eq!(seen()["bridges"], Value::Array(vec![]), "it went with its session");
}

/// A tier fails in the middle of a load: both tiers are reported, and their bytes add up.
#[test]
fn lfs_path_tells_both_tiers_of_a_call_that_changed_between_them() {
    let Some((cluster, mount)) = Cluster::mounted() else { return };
    if published::folder().is_none() {
        println!("skipped: neither root nor $XDG_RUNTIME_DIR: sessions publish nothing");
        return;
    }
    let (name, len) = (mount.join("f"), 8 << 20);
    fs::write(&name, pattern(len)).unwrap();
    let kept = fs::File::open(&name).unwrap();
    // The call must begin with pinned memory. On host memory that depends on the measured rates.
    let pinned_first = || {
        let device = FakeGpu::new();
        let s = Session::open_on(&cluster.setup(None), Arc::new(device.clone())).unwrap();
        let tiers = s.tiers().unwrap();
        let rate =
            |tier: &str| tiers.iter().find(|t| t.tier == tier).and_then(|t| t.load_bytes_per_s);
        match (rate("bounce-tcp"), rate("pageable")) {
            (Some(pinned), Some(other)) => Ok((pinned > other).then_some((s, device))),
            _ => Err("skipped: no memory can be locked here"),
        }
    };
    let (s, device) = match (0..1000).find_map(|_| pinned_first().transpose()) {
        Some(Ok(both)) => both,
        Some(Err(why)) => return println!("{why}"),
        None => panic!("pinned memory was never the faster one"),
    };
    let gpu = s.device().alloc(len as u64).unwrap();
    let file = Arc::new(s.open_file("/f", 0, 0).unwrap());
    device.fail_pinned_after(4, Fault::Driver { call: "copy", code: 1, name: "as asked".into() });
    let whole = [Transfer { file: file.clone(), offset: 0, gpu, len: len as u64 }];
    let r = s.load(&whole, Policy::Prefer).unwrap();
    assert!(
        r.by_tier[Tier::BounceTcp] > 0 && r.by_tier[Tier::Pageable] > 0 && r.moved() == len as u64,
        "{r}"
    );
    let path =
        |more: &[&str]| ok(&strake().args(["lfs", "path"]).args(more).arg(&name).output().unwrap());
    let mut loaded = Value::Null;
    eventually("the counters of the bridge", LIMIT, || {
        let v: Value = serde_json::from_str(&path(&["--json"])).unwrap();
        loaded = v[0]["bridges"][0]["loaded"].clone();
        loaded["together"] == len
    });
    assert_eq!(loaded["by_tier"], serde_json::to_value(r.by_tier).unwrap());
    let sum: u64 =
        loaded["by_tier"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(sum, len as u64);
    let shown = path(&[]);
    for tier in [Tier::BounceTcp, Tier::Pageable] {
        assert!(shown.contains(&format!("{tier:10}  {}", r.by_tier[tier])), "{shown}");
    }
    drop((kept, whole));
    s.close(Arc::into_inner(file).unwrap()).unwrap();
}

/// Runs the commands of the page exactly as written there, with host memory in place of the device.
#[test]
fn the_commands_of_the_page_work_on_a_mount() {
    let Some((cluster, mount)) = Cluster::mounted() else { return };
    let (dir, bin) = (cluster.root.path().join("copies"), cluster.root.path().join("bin"));
    for dir in [&dir, &bin, &mount.join("models")] {
        fs::create_dir(dir).unwrap();
    }
    for name in ["strake", "lfs"] {
        std::os::unix::fs::symlink(strake().get_program(), bin.join(name)).unwrap();
    }
    let len = (6 << 20) + 99;
    let head = format!(r#"{{"w":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let model = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &pattern(len)].concat();
    fs::write(mount.join("models/70b.safetensors"), model).unwrap();

    let page = include_str!("../../../docs/gds.md").split_once("## A copy on this node").unwrap().1;
    let script = page.split_once("```sh\n").unwrap().1.split_once("```").unwrap().0;
    assert!(
        ["lfs seal", "gds stage", "gds probe", "gds bench", "gds copies", "gds unstage"]
            .iter()
            .all(|c| script.contains(c))
    );
    let key = cluster.root.path().join("c/client.key");
    let path = format!("{}:/usr/bin:/bin", bin.display());
    // The page's Python block runs before the copy is removed.
    let (stage, unstage) = script.split_once("strake gds unstage").unwrap();
    let in_python = page.split_once("```python\n").unwrap().1.split_once("```").unwrap().0;
    let script = format!("{stage}$PYTHON_STEP\nstrake gds unstage{unstage}");
    let script = script
        .replace("/mnt/ai", mount.to_str().unwrap())
        .replace("/nvme/copies", dir.to_str().unwrap())
        .replace("\"$MDS\"", "\"$MDS\" --client-key \"$KEY\"")
        .replace(" probe ", " probe --memory host ")
        .replace(" bench ", " bench --memory host --accept-oss-checksum ");
    let in_python = format!("import os, strake_gds\n{in_python}").replace(
        "/nvme/copies\"",
        &format!(
            "{}\", memory=\"host\", key=os.environ[\"KEY\"], accept_oss_checksum=True",
            dir.display()
        ),
    );
    let python = std::env::var("STRAKE_GDS_PYTHON").ok();
    let step = python.map_or_else(
        || "echo skipped: STRAKE_GDS_PYTHON names no interpreter that has the module".to_string(),
        |python| format!("'{python}' -c \"$IN_PYTHON\""),
    );
    let script = script.replace("$PYTHON_STEP", &step);
    let mut sh = Command::new("sh");
    sh.args(["-euxc", &script])
        .env("PATH", path)
        .env("MDS", &cluster.mds)
        .env("KEY", key)
        .env("IN_PYTHON", in_python);
    let shown = ok(&sh.output().unwrap());
    for words in [
        "the policy require:local-gds can be met",
        "6.0 MiB of an existing file",
        "usable",
        "removed",
    ] {
        assert!(shown.contains(words), "'{words}' is not in: {shown}");
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}

/// Staging a file larger than the 1 MiB file system is refused before the copy begins.
#[test]
fn a_full_file_system_is_told_and_nothing_stays_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs"]).arg(dir.path());
    match mount.output() {
        Ok(out) if out.status.success() => {}
        out => {
            println!("skipped: no file system can be mounted here: {out:?}");
            return;
        }
    }
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.0).output();
        }
    }
    let _mounted = Mounted(dir.path());
    let cluster = Cluster::new();
    let s = cluster.session(None);
    let data = pattern(2 << 20);
    let f = s.open_file("/large", CREATE, 0o644).unwrap();
    s.write(&f, 0, &data).unwrap();
    s.fsync(&f).unwrap();
    s.close(f).unwrap();
    let f = s.open_file("/large", 0, 0).unwrap();
    seal(&s, &f, &data, true);
    refused(&cluster.stage(dir.path(), &["/large"]), &["has no space for 2097152 bytes"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    s.close(f).unwrap();
}

#[test]
fn probe_tells_of_the_tier_and_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let probe = |what: &str, more: &[&str]| {
        let mut c = strake();
        let out = c.args(["gds", what, "--memory=host", "--json"]).args(more).output().unwrap();
        let v: Value = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)));
        (out.status.code(), v["tiers"][1].clone())
    };
    let local = format!("--local={}", dir.path().display());
    let (code, tier) = probe("probe", &[&local, "--policy=prefer"]);
    assert_eq!((code, &tier["tier"]), (Some(0), &"local-gds".into()));
    assert!(
        tier["available"] == false || tier["load_bytes_per_s"].as_f64().unwrap() > 0.0,
        "{tier}"
    );
    assert!(
        tier["available"] == true || tier["why"].as_str().unwrap().contains("direct I/O"),
        "{tier}"
    );
    assert_eq!(tier["save_bytes_per_s"], Value::Null);
    assert_eq!(probe("status", &[&local]).1["reason"], "not-tested");
    assert_eq!(probe("status", &[]).1["reason"], "no-folder");
    for what in ["status", "probe"] {
        let (_, tier) = probe(what, &["--local=/none/of/it"]);
        assert_eq!(tier["reason"], "bad-folder", "{tier}");
    }
}

/// A driver that would hang is not opened, neither in the helper process nor in the process that
/// asked.
#[test]
fn cufile_is_looked_at_from_another_process() {
    let out = strake()
        .args(["gds", "look-cufile"])
        .env("STRAKE_CUFILE_REAL", "/none/libcufile.so.0")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(3), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    let why = if Path::new("/proc/modules").exists() {
        "libcufile is not available"
    } else {
        "cuFile would hang"
    };
    assert!(said.starts_with("cuFile: ") && said.contains(why), "{said}");
}
