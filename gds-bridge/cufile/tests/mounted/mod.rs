//! A real mount of a cluster in this process, with its servers behind sockets, for programs in
//! other processes.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
    time::Duration,
};

use strake_client::{Client, Config};
use strake_fabric::{Fabric, Identity, Listener, Pool, TcpFabric};
use strake_fuse::{Mount, MountConfig, can_mount, mount};
use strake_proto::cap::derive_key;
use strake_runtime::Env;

use super::common::Cluster;

const CLUSTER_KEY: [u8; 32] = [9; 32];

/// Mounted until it is dropped.
pub struct Mounted {
    pub key: PathBuf,
    /// Holds the libraries and the files that a program writes.
    pub dir: tempfile::TempDir,
    /// Where it is mounted.
    pub at: tempfile::TempDir,
    mount: Option<Mount>,
    _listeners: Vec<Listener>,
    runtime: tokio::runtime::Runtime,
}

/// Path of the shared library that was built for this test.
pub fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let found =
        [deps.join("libstrake_cufile.so"), deps.parent().unwrap().join("libstrake_cufile.so")];
    found.into_iter().find(|p| p.exists()).expect("cargo builds it with the test")
}

/// Runs the C compiler. Prints a message and returns false where there is none.
pub fn cc(args: &[&str], to: &Path, source: &Path) -> bool {
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-O1", "-g"]).arg("-o").arg(to).arg(source).args(args);
    match cc.output() {
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
        Err(e) => {
            println!("skipped: no C compiler here ({e})");
            return false;
        }
    }
    true
}

fn client_key() -> [u8; 32] {
    derive_key(&CLUSTER_KEY, "strake client v1")
}

impl Mounted {
    /// Prints a message and returns `None` where nothing can be mounted or compiled.
    pub fn new() -> Option<Mounted> {
        let (dir, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        if let Err(e) = can_mount(at.path()) {
            println!("skipped: {e}");
            return None;
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let to = |name: &str| dir.path().join(name);
        let libraries =
            [("recorder.c", "recorder.so"), ("modules.c", "modules.so"), ("cudart.c", "cudart.so")];
        let standin = here.join("../../tests/standin/libcuda.c");
        if !cc(&["-shared", "-fPIC", "-pthread"], &to("libcuda.so.1"), &standin) {
            return None;
        }
        for (source, name) in libraries {
            cc(&["-shared", "-fPIC", "-Wextra", "-ldl"], &to(name), &here.join(source));
        }
        std::fs::copy(library(), to("libcufile.so.0")).unwrap();
        let (search, by_name) =
            (format!("-L{}", dir.path().display()), ["-l:libcufile.so.0", "-l:libcuda.so.1"]);
        cc(
            &["-std=gnu11", "-Wextra", "-pthread", &search, by_name[0], by_name[1]],
            &to("program"),
            &here.join("program.c"),
        );
        std::fs::write(to("modules"), "ext4 1 1 - Live 0x0\n").unwrap();
        let key = to("client.key");
        std::fs::write(&key, hex::encode(client_key())).unwrap();
        std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::create_dir(to("elsewhere")).unwrap();

        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (listeners, mount) = runtime.block_on(serve(at.path()));
        Some(Mounted { key, dir, at, mount: Some(mount), _listeners: listeners, runtime })
    }

    /// The program with its arguments and environment.
    pub fn program(&self, what: &[&str]) -> Command {
        let dir = self.dir.path();
        let mut c = Command::new(dir.join("program"));
        c.current_dir(dir)
            .arg(what[0])
            .arg(self.at.path())
            .arg(dir.join("elsewhere"))
            .args(&what[1..]);
        c.env("LD_LIBRARY_PATH", dir)
            .env("STRAKE_GDS_KEY", &self.key)
            .env("STRAKE_GDS_LOG", dir.join("log"));
        c.env("STRAKE_GDS_STATS", dir.join("stats")).env("RECORD", dir.join("record"));
        c.env("STRAKE_CUFILE_REAL", "/nowhere/libcufile.so.0");
        c
    }

    /// A shell command that finds this library before others of the same name.
    pub fn shell(&self, command: &str) -> Command {
        let dir = self.dir.path();
        let mut c = Command::new("sh");
        c.current_dir(dir)
            .arg("-c")
            .arg(command)
            .env("MOUNT", self.at.path())
            .env("LD_PRELOAD", dir.join("libcufile.so.0"));
        c.env("STANDIN", dir).env("STRAKE_GDS_KEY", &self.key);
        c
    }

    /// As [`Mounted::program`], with a stand-in of the real library that records its calls.
    pub fn with_recorder(&self, what: &[&str]) -> Command {
        let (dir, mut c) = (self.dir.path(), self.program(what));
        c.env("STRAKE_CUFILE_REAL", dir.join("recorder.so"))
            .env("LD_PRELOAD", dir.join("modules.so"));
        c.env("MODULES", dir.join("modules"));
        c
    }

    /// Runs the program, which must succeed.
    #[track_caller]
    pub fn ok(&self, mut program: Command) -> Output {
        let out = program.output().unwrap();
        let said = [&out.stdout, &out.stderr].map(|b| String::from_utf8_lossy(b).into_owned());
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        assert!(out.status.success(), "{:?} {said:?}\n{log}", out.status);
        out
    }

    /// The content of a file that a program wrote; empty if there is none.
    pub fn left(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    /// As [`Mounted::left`], and removes the file.
    pub fn taken(&self, name: &str) -> String {
        let left = self.left(name);
        let _ = std::fs::remove_file(self.dir.path().join(name));
        left
    }
}

async fn serve(at: &Path) -> (Vec<Listener>, Mount) {
    let cluster = Cluster::new();
    let fabric = TcpFabric::new(
        Env::system(),
        Identity::server(&CLUSTER_KEY),
        None,
        Pool::default(),
        Default::default(),
    );
    let mut listeners = Vec::new();
    for service in cluster.services() {
        listeners.push(fabric.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service).await.unwrap());
    }
    let places: Vec<String> = listeners.iter().map(|l| l.endpoint().to_string()).collect();
    cluster.are_at(&places);
    let fabric = TcpFabric::new(
        Env::system(),
        Identity::client(client_key()),
        None,
        Pool::default(),
        Default::default(),
    );
    let config = Config::new(vec![places[0].parse().unwrap()]);
    let client = Client::connect(config, Env::system(), Arc::new(fabric)).await.unwrap();
    let mut cfg = MountConfig::new(at);
    cfg.allow_other = rustix::process::geteuid().is_root();
    (listeners, mount(cfg, client).await.unwrap())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mount = self.mount.take().unwrap();
        self.runtime.block_on(async {
            // The kernel releases closed files a little later.
            let unmounted = tokio::time::timeout(Duration::from_secs(20), async {
                while mount.unmount().await.is_err() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            });
            if unmounted.await.is_err() {
                println!("still in use");
            }
        });
    }
}
