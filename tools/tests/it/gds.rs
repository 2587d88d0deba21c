//! `strake gds`, and the bridge on the files of a cluster of real processes, over TCP.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::common::{ok, refused, strake, text};
use serde_json::Value;
use strake_client::{Client, Config, Creds, File};
use strake_fabric::{Identity, Pool, TcpFabric, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, GpuMem, Options, Policy, Tier, Transfer};
use strake_proto::{Code, layout::splitmix64};
use strake_runtime::Env;

const TIERS: [&str; 5] = ["gpu-rdma", "local-gds", "bounce-rdma", "bounce-tcp", "pageable"];

fn gds(args: &[&str]) -> Command {
    let mut c = strake();
    c.arg("gds").args(args);
    c
}

fn json(out: &Output) -> Value {
    serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}\n{}", text(&out.stdout), text(&out.stderr)))
}

#[track_caller]
fn reasons(v: &Value) -> Vec<(String, String)> {
    let tiers = v["tiers"].as_array().unwrap();
    assert_eq!(tiers.iter().map(|t| t["tier"].as_str().unwrap()).collect::<Vec<_>>(), TIERS);
    let word = |v: &Value| v.as_str().unwrap_or("").to_string();
    tiers.iter().map(|t| (word(&t["reason"]), word(&t["why"]))).collect()
}

/// Builds the stand-in of the driver library with a compiler flag. Prints a message and returns
/// `None` where there is no compiler.
fn standin(dir: &Path, flag: &str) -> Option<()> {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../gds-bridge/tests/standin/libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-pthread", flag, "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(source);
    match cc.output() {
        Ok(out) => assert!(out.status.success(), "{}", text(&out.stderr)),
        Err(e) => {
            println!("skipped: no C compiler here ({e})");
            return None;
        }
    }
    Some(())
}

#[test]
fn without_a_driver_each_tier_says_why_it_is_not_there() {
    let out = gds(&["status", "--json"]).output().unwrap();
    ok(&out);
    let v = json(&out);
    if !v["device"].is_null()
        || !v["tiers"][3]["why"].as_str().unwrap_or("").contains("libcuda.so.1 cannot be opened")
    {
        println!("skipped: this machine has a driver: {v}");
        return;
    }
    let kinds: Vec<String> = reasons(&v).into_iter().map(|r| r.0).collect();
    assert_eq!(kinds, ["no-library", "no-folder", "no-library", "no-library", "no-library"]);
    let shown = ok(&gds(&["status"]).output().unwrap());
    assert!(shown.starts_with("device: none\n"), "{shown}");
    for t in TIERS {
        assert!(
            shown.lines().any(|l| l.starts_with(t) && l.contains("not available")),
            "{t}: {shown}"
        );
        assert!(shown.lines().any(|l| l.starts_with(&format!("{t}: "))), "{t}: {shown}");
    }
    let out = gds(&["probe"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stdout).ends_with("the policy prefer cannot be met here\n"),
        "{}",
        text(&out.stdout)
    );
}

#[test]
fn the_stand_in_passes_its_self_tests_and_policies_decide_the_exit() {
    let out = gds(&["probe", "--memory=host", "--json"]).output().unwrap();
    ok(&out);
    let v = json(&out);
    assert_eq!((&v["met"], &v["policy"]), (&true.into(), &"prefer".into()));
    for tier in [3, 4] {
        let t = &v["tiers"][tier];
        assert_eq!(t["available"], true, "{v}");
        assert!(
            t["load_bytes_per_s"].as_f64().unwrap() > 0.0
                && t["save_bytes_per_s"].as_f64().unwrap() > 0.0
        );
    }
    let exit = |policy: &str| {
        gds(&["probe", "--memory=host", "--policy", policy]).output().unwrap().status.code()
    };
    assert_eq!(exit("require:bounce-tcp"), Some(0));
    assert_eq!(exit("at-least:bounce-rdma"), Some(1));
    let v = json(&gds(&["status", "--memory=host", "--json"]).output().unwrap());
    let kinds: Vec<String> = reasons(&v).into_iter().map(|r| r.0).collect();
    assert_eq!(kinds, ["no-rdma", "no-folder", "no-rdma", "not-tested", "not-tested"]);
    assert!(v.get("met").is_none());
    assert!(
        v["numa"]["node"].is_null() && v["numa"]["why"].as_str().unwrap().contains("no GPU"),
        "{v}"
    );
}

#[test]
fn wrong_arguments_are_refused() {
    refused(&gds(&["probe", "--policy=best"]).output().unwrap(), &["best", "at-least:TIER"]);
    refused(
        &gds(&["probe", "--policy=require:rdma"]).output().unwrap(),
        &["`rdma` is not a tier", "gpu-rdma"],
    );
    for bad in [
        ["status", "--timeout=0"],
        ["status", "--timeout=601"],
        ["status", "--device=-1"],
        ["probe", "--memory=gpu"],
    ] {
        refused(&gds(&bad).output().unwrap(), &["error"]);
    }
    refused(&gds(&[]).output().unwrap(), &["status", "probe"]);
}

#[test]
fn a_driver_that_hangs_or_crashes_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let with = |args: &[&str]| gds(args).env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
    let Some(()) = standin(dir.path(), "-DHANGS") else { return };
    let begun = Instant::now();
    let out = with(&["probe", "--json", "--timeout=2"]);
    assert!(begun.elapsed() > Duration::from_secs(2) && begun.elapsed() < Duration::from_secs(60));
    assert_eq!(out.status.code(), Some(1));
    let why = reasons(&json(&out));
    assert_eq!((why[0].0.as_str(), why[3].0.as_str(), why[4].0.as_str()), ("hung", "hung", "hung"));
    assert!(why[3].1.starts_with("no answer in 2 s: the driver hangs"), "{why:?}");
    // The helper process is gone. Only processes of this test have this variable in their
    // environment.
    let mark = format!("LD_LIBRARY_PATH={}", dir.path().display());
    let left = fs::read_dir("/proc").unwrap().flatten().filter(|p| {
        fs::read(p.path().join("environ"))
            .is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == mark.as_bytes()))
    });
    assert_eq!(left.count(), 0);

    let Some(()) = standin(dir.path(), "-DCRASHES") else { return };
    let why = reasons(&json(&with(&["status", "--json"])));
    assert_eq!(
        why[3],
        (
            "died".into(),
            "the probing program was killed by signal 6 before it had an answer".into()
        )
    );

    let Some(()) = standin(dir.path(), "-DNO_DMA_BUF") else { return };
    let v = json(&with(&["probe", "--json", "--device=1", "--policy=require:bounce-tcp"]));
    assert_eq!((&v["device"], &v["met"]), (&"Stand-in GPU (device 1)".into(), &true.into()), "{v}");
    let why = v["numa"]["why"].as_str().unwrap_or_default();
    assert!(
        why.contains("/sys/bus/pci/devices/0000:3c:00.0/numa_node") || v["numa"]["node"].is_u64(),
        "{why}"
    );
    assert_eq!(reasons(&v)[0].0, "no-dma-buf");
    let why = reasons(&json(&with(&["status", "--json", "--device=7"])));
    assert_eq!(why[3], ("no-device".into(), "there is no device 7: the numbers are 0 to 1".into()));
}

/// One metadata server and two storage servers; stopped when dropped.
struct Small {
    _root: tempfile::TempDir,
    dir: PathBuf,
}

impl Small {
    fn new() -> Small {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("cluster");
        let mut up = strake();
        up.arg("up").arg("--dir").arg(&dir).args([
            "--mount=none",
            "--mds=1",
            "--oss=2",
            "--targets-per-oss=1",
        ]);
        ok(&up.args(["--mirror=2", "--target-gib=1"]).current_dir(root.path()).output().unwrap());
        Small { _root: root, dir }
    }

    /// Port of the metadata server.
    fn port(&self) -> i64 {
        let made: toml::Table =
            fs::read_to_string(self.dir.join("cluster.toml")).unwrap().parse().unwrap();
        made["ports"].as_array().unwrap()[0].as_integer().unwrap()
    }

    async fn client(&self) -> Client {
        let port = self.port();
        let hex = fs::read_to_string(self.dir.join("client.key")).unwrap();
        let byte = |i: usize| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
        let key: [u8; 32] = std::array::from_fn(byte);
        let env = Env::system();
        let fabric = TcpFabric::new(
            env.clone(),
            Identity::client(key),
            None,
            Pool::default(),
            Default::default(),
        );
        let config = Config::new(vec![format!("tcp:127.0.0.1:{port}").parse().unwrap()]);
        Client::connect(config, env, Arc::new(fabric)).await.unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = strake().arg("down").arg("--dir").arg(&self.dir).output();
    }
}

fn range(f: &File, offset: u64, gpu: u64, len: u64) -> Transfer {
    Transfer { file: Arc::new(f.clone()), offset, gpu, len }
}

#[test]
fn bytes_go_to_a_cluster_and_come_back_over_tcp() {
    const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);
    let cluster = Small::new();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (a, b) = (cluster.client().await, cluster.client().await);
        let mem = FakeGpu::new();
        mem.limit_pins(1 << 30);
        let options = Options { pinned_limit: Some(256 << 20), ..Options::default() };
        let len = (24 << 20) + 12_345u64;
        let mut seed = 5;
        let data: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|_| splitmix64(&mut seed).to_le_bytes()).collect();
        let data = &data[..len as usize];
        let tensor = mem.alloc(len).unwrap();
        mem.poke(tensor, data).unwrap();

        let bridge = Bridge::open(Arc::new(mem.clone()), Arc::new(a.clone()), options.clone())
            .await
            .unwrap();
        let (f, _) = a
            .create(&Creds::default(), a.root(), b"checkpoint", 0o644, 2, true, None)
            .await
            .unwrap();
        let r = bridge.save(&[range(&f, 0, tensor, len)], BOUNCE).await.unwrap();
        assert!(
            r.is_all(Tier::BounceTcp) && r.staged == 0 && r.by_transport[Transport::Tcp] == len,
            "{r}"
        );
        f.fsync().await.unwrap();

        // Read through the other client, past its cache: bytes from the socket arrive directly in
        // pinned memory.
        let bridge =
            Bridge::open(Arc::new(mem.clone()), Arc::new(b.clone()), options).await.unwrap();
        let (g, attr) = b.open(&Creds::default(), f.ino(), 0o40000).await.unwrap();
        assert_eq!(attr.size, len);
        let to = mem.alloc(len).unwrap();
        let before = mem.copied();
        let r = bridge
            .load(
                &[range(&g, 0, to, len / 2), range(&g, len / 2, to + len / 2, len - len / 2)],
                BOUNCE,
            )
            .await;
        let r = r.unwrap();
        assert!(r.is_all(Tier::BounceTcp), "{r}");
        assert_eq!(
            (r.staged, r.by_transport[Transport::Tcp]),
            (0, len),
            "no byte was copied once more: {r}"
        );
        let of_file = b.servers().file_transports(f.ino()).file;
        let tcp = of_file.iter().find(|r| r.transport == "tcp").unwrap();
        assert_eq!((tcp.fetched, of_file.iter().map(|r| r.fetched).sum::<u64>()), (len, len));
        assert!(bridge.pinned_buffers() > 0);
        assert_eq!(mem.copied().load_pinned - before.load_pinned, len);
        assert!(mem.peek(to, len).unwrap() == data);
        f.close().await.unwrap();
        g.close().await.unwrap();
        a.close().await.unwrap();
        b.close().await.unwrap();
    });
}

#[test]
fn files_are_striped_as_a_session_asks() {
    use strake_gds::session::{Memory, Session, Setup, Stripes};
    let cluster = Small::new();
    let mds = format!("127.0.0.1:{}", cluster.port());
    let setup = Setup { key: cluster.dir.join("client.key"), ..Setup::new(&mds, Memory::Host) };
    let s = Session::open(&setup).unwrap();
    let new = |path: &str| s.open_file(path, (libc::O_CREAT | libc::O_RDWR) as u32, 0o600).unwrap();
    let stripes = |f: &File| {
        let c = &f.layout().components[0];
        let count = c.set.as_ref().map_or(c.chains.len(), |set| set.count as usize);
        (count, c.stripe_size)
    };
    let plain = stripes(&new("/plain"));
    assert_eq!(plain.0, 1);
    let wide = s
        .open_striped("/wide", (libc::O_CREAT | libc::O_RDWR) as u32, 0o600, Stripes::ALL)
        .unwrap();
    assert_eq!(stripes(&wide), (2, plain.1));
    s.stripe_folder("/", Stripes { count: 2, size: 128 << 10 }).unwrap();
    assert_eq!(stripes(&new("/later")), (2, 128 << 10));
    assert_eq!(stripes(&new("/plain")), plain, "as it was made");
    assert_eq!(s.stripe_folder("/wide", Stripes::ALL).unwrap_err().code, Code::NotDir);
    assert_eq!(s.stripe_folder("/none", Stripes::ALL).unwrap_err().code, Code::NoEnt);
    let odd = Stripes { count: 1, size: 1000 };
    assert_eq!(s.stripe_folder("/", odd).unwrap_err().code, Code::Inval);
}

#[test]
fn the_benchmark_measures_on_a_cluster_and_a_strict_run_is_refused() {
    let cluster = Small::new();
    let mds = format!("127.0.0.1:{}", cluster.port());
    let key = cluster.dir.join("client.key");
    let bench = |more: &[&str]| {
        let mut c =
            gds(&["bench", &mds, "--memory=host", "--mib=8", "--threads=1,2", "--client-key"]);
        c.arg(&key).args(more).output().unwrap()
    };
    let out = bench(&["--json", "--strict", "--policy=require:pageable"]);
    ok(&out);
    let v = json(&out);
    assert_eq!(
        (&v["gpu"], &v["bytes"], &v["refused"]),
        (&false.into(), &(8 << 20).into(), &Value::Null)
    );
    for (i, row) in v["rows"].as_array().unwrap().iter().enumerate() {
        assert_eq!(row["threads"], i + 1);
        assert_eq!(row["loaded"]["by_tier"]["pageable"], 8 << 20);
        assert_eq!(row["loaded"]["by_transport"]["tcp"], 8 << 20, "{row}");
        assert_eq!(row["saved"]["by_transport"]["tcp"], 8 << 20, "{row}");
        assert!(row["of_ceiling"]["load"].as_f64().unwrap() > 0.0);
    }
    // A policy that cannot be met here, with `--strict`: bench says so and exits with 1.
    let out = bench(&["--strict", "--policy=at-least:bounce-rdma"]);
    assert_eq!(out.status.code(), Some(1));
    let (shown, said) = (text(&out.stdout), text(&out.stderr));
    assert!(
        shown.contains("no GPU was used") && shown.contains("ceiling: pinned copies alone"),
        "{shown}"
    );
    assert!(
        said.contains("this run is refused")
            && said.contains("no storage server is reached by RDMA"),
        "{said}"
    );
    // The file of the first run is removed, so that another run is possible.
    let shown = ok(&bench(&[]));
    assert!(shown.contains("bridge, 2 threads") && shown.contains("times the loop"), "{shown}");
    assert!(
        shown.contains("checksums: host, not verified on the GPU: it was not requested"),
        "{shown}"
    );
    refused(&bench(&["--file=/none/x"]), &["/none/x"]);
}

/// `cluster-tests/gpu/run`, with host memory in place of a GPU: its clusters, rows and ratios, and
/// that a step that cannot run does not count as passed.
#[test]
fn the_script_for_gpu_machines_runs_and_says_what_it_did_not() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster-tests/gpu/run");
    // Not in the system's temporary folder, which may be a tmpfs.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let run = |more: &[&str]| {
        let mut c = Command::new(&script);
        c.args([
            "--memory=host",
            "--mib=8",
            "--threads=1,2",
            "--json",
            "--strake",
            env!("CARGO_BIN_EXE_strake"),
        ]);
        c.arg("--ram")
            .arg(dir.path())
            .arg("--disk")
            .arg(dir.path())
            .arg("--out")
            .arg(dir.path().join("out"));
        c.args(more).output().unwrap()
    };
    let out = run(&["--policy=require:pageable"]);
    ok(&out);
    let v = json(&out);
    let outcome =
        |v: &Value, step: &str| v["steps"][step]["outcome"].as_str().unwrap_or("").to_string();
    for step in ["memory", "verified", "disk"] {
        assert_eq!(
            (outcome(&v, step).as_str(), v["steps"][step]["rows"].as_array().unwrap().len()),
            ("ran", 2)
        );
    }
    assert_eq!(outcome(&v, "local"), "skipped");
    assert!(v["steps"]["local"]["why"].as_str().unwrap().contains("for GPUs"));
    // This step runs only where `python3` has PyTorch and safetensors.
    let loaders = &v["steps"]["loaders"];
    match loaders["figures"].as_object() {
        Some(figures) => assert!(
            figures["safetensors.torch.load_file, a local file"].as_f64().unwrap() > 0.0,
            "{v}"
        ),
        None => {
            assert!(
                outcome(&v, "loaders") == "skipped"
                    && loaders["why"].as_str().unwrap().contains("not installed")
            )
        }
    }
    assert_eq!((&v["gpu"], v["goals"].as_array().unwrap().len()), (&false.into(), 5));
    for goal in v["goals"].as_array().unwrap() {
        let needs_a_gpu = goal["what"].as_str().unwrap().contains("local");
        assert_eq!(goal["met"].is_null(), needs_a_gpu, "{goal}");
    }
    let shown = fs::read_to_string(dir.path().join("out/figures.md")).unwrap();
    assert!(
        shown.contains("nothing here says anything of one") && shown.contains("pageable 8388608"),
        "{shown}"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the clusters are gone");

    // Without a GPU the script says why it measures nothing, and makes no cluster.
    let alone = |library: &Path| {
        let mut c = Command::new(&script);
        c.args(["--strake", env!("CARGO_BIN_EXE_strake")]).env("LD_LIBRARY_PATH", library);
        c.args(["--ram=/nowhere", "--disk=/nowhere"]).output().unwrap()
    };
    if !Path::new("/proc/driver/nvidia").exists() {
        let out = alone(Path::new("/nowhere"));
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(77) && out.stdout.is_empty(), "{said}");
        assert!(
            said.starts_with("skipped: ") && said.contains("libcuda.so.1 cannot be opened"),
            "{said}"
        );
    }
    if let Some(()) = standin(dir.path(), "-DINIT=100") {
        let out = alone(dir.path());
        assert!(
            out.status.code() == Some(77) && text(&out.stderr).starts_with("skipped: "),
            "{}",
            text(&out.stderr)
        );
        fs::remove_file(dir.path().join("libcuda.so.1")).unwrap();
    }

    // A call that fails because of its policy fails the step and the run, and no goal is reported
    // as reached.
    let out = run(&["--policy=require:bounce-rdma"]);
    assert_eq!(out.status.code(), Some(1));
    let v = json(&out);
    assert_eq!(outcome(&v, "memory"), "failed");
    assert!(v["steps"]["memory"]["why"].as_str().unwrap().contains("RDMA"), "{v}");
    assert!(v["goals"].as_array().unwrap().iter().all(|g| g["met"].is_null()));
}

/// The step `local` of that script, with a stand-in of the driver: the copied bytes are compared
/// with the file.
#[test]
fn a_local_file_is_read_and_copied_by_a_driver() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-pthread", "-O1", "-o"]).arg(dir.path().join("libcuda.so.1"));
    match cc.arg(here.join("../gds-bridge/tests/standin/libcuda.c")).output() {
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
        Err(e) => return println!("skipped: no C compiler here ({e})"),
    }
    let built = |source: &str, name: &str| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-DCOMPAT", "-o"])
            .arg(dir.path().join(name))
            .arg(here.join(source))
            .arg("-ldl");
        assert!(cc.status().unwrap().success(), "{source}");
        dir.path().join(name)
    };
    let local = |library: &Path, set: &[(&str, &Path)]| {
        let mut c = Command::new("python3");
        c.arg(here.join("../cluster-tests/gpu/local.py")).arg(dir.path()).args(["0", "33"]);
        c.env("STRAKE_CUFILE_REAL", "/nowhere/libcufile.so.0").envs(set.iter().copied());
        c.env("LD_LIBRARY_PATH", library).output().unwrap()
    };
    // With a stand-in of cuFile: its read is compared with the file, and the step reports its own
    // figures.
    let cufile = built("../gds-bridge/tests/standin/libcufile.c", "libcufile.so.0");
    let modules = built("../gds-bridge/cufile/tests/modules.c", "modules.so");
    fs::write(dir.path().join("modules"), "ext4 1 1 - Live 0x0\n").unwrap();
    let (preload, list) = (("LD_PRELOAD", &*modules), dir.path().join("modules"));
    let v =
        json(&local(dir.path(), &[("STRAKE_CUFILE_REAL", &cufile), preload, ("MODULES", &list)]));
    for threads in [1, 8] {
        let rate = &v["figures"][format!("cuFile, compatibility mode, {threads} thread(s)")];
        assert!(rate.as_f64().is_some_and(|r| r > 0.0), "{v}");
    }
    let v = json(&local(dir.path(), &[]));
    assert_eq!(v["bytes"], 32 << 20);
    let figures = v["figures"].as_object().unwrap();
    assert!(
        figures["read 1 MiB, copy, wait; the file in the page cache"].as_f64().unwrap() > 0.0,
        "{v}"
    );
    assert!(figures.values().filter_map(|f| f.as_str()).any(|f| f.starts_with("not run: ")), "{v}");
    if !Path::new("/proc/driver/nvidia").exists() {
        assert_eq!(
            local(Path::new("/nowhere"), &[]).status.code(),
            Some(77),
            "no driver: it cannot run here"
        );
    }
}

/// Runs the commands of the page exactly as written there.
#[test]
fn the_five_minute_page_works_as_it_is_written() {
    let page = include_str!("../../../docs/gds.md");
    // The second is run by gds_local.rs, the third by gds-bridge/cufile/tests/program.rs; the last
    // needs KvikIO and PyTorch.
    assert_eq!(page.matches("```sh\n").count(), 4, "are all tested?");
    let block =
        |kind: &str| page.split_once(kind).unwrap().1.split_once("```").unwrap().0.to_string();
    let (mut script, python) = (block("```sh\n"), block("```python\n"));
    assert!(script.contains("strake up ") && script.contains("strake gds bench"), "{script}");
    // One after the other, as a reader runs them, with no variables set before.
    let module = std::env::var_os("STRAKE_GDS_PYTHON");
    match &module {
        Some(_) => script += &format!("\"$STRAKE_GDS_PYTHON\" - <<'PYTHON'\n{python}PYTHON\n"),
        None => {
            println!(
                "skipped: the block in Python, because STRAKE_GDS_PYTHON names no interpreter with the module"
            )
        }
    }
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("strake-gds");
    let stop = Small { _root: root, dir: dir.clone() };
    let binary = strake().get_program().to_owned();
    let path = format!("{}:/usr/bin:/bin", Path::new(&binary).parent().unwrap().display());
    let mut sh = Command::new("sh");
    sh.args(["-euxc", &script])
        .env("HOME", stop._root.path())
        .env("PATH", path)
        .current_dir(stop._root.path());
    for name in ["DIR", "MDS", "KEY", "MEMORY", "POLICY"] {
        sh.env_remove(name);
    }
    let shown = ok(&sh.output().unwrap());
    for words in [
        "device: host memory in place of a device",
        "the policy at-least:pageable can be met",
        "of the ceiling",
    ] {
        assert!(shown.contains(words), "'{words}' is not in: {shown}");
    }
    assert!(module.is_none() || shown.contains("'pageable':"), "{shown}");
}
