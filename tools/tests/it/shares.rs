//! Attacks by clients with few rights, on clusters of real processes: operation lists that cost
//! much work, silent connections, incomplete frames. Other clients must still be served.
//! `cluster-tests/attacks` has a command for each.

#[allow(dead_code, reason = "some of it is for other tests")]
mod hands;
mod neighbours;
mod places;
mod rates;
mod rights;
mod work;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{ok, strake, up};
use strake_fabric::{Connection, Endpoint, Fabric, Identity, Message, Pool, TcpFabric};
use strake_proto::{Code, Result, opcode, pb};
use strake_runtime::{Env, keyfile};
use tokio::runtime::Runtime;

const LONG: Duration = Duration::from_secs(60);

/// Addresses of the servers of a role.
fn servers_of(dir: &Path, role: &str) -> Vec<Endpoint> {
    let of = |n: u32| {
        let text = fs::read_to_string(dir.join(format!("{role}{n}.toml"))).ok()?;
        let config: toml::Value = toml::from_str(&text).unwrap();
        Some(config[role]["listen"].as_str().unwrap().parse().unwrap())
    };
    (1..10).map_while(of).collect()
}

/// A mounted cluster, stopped when dropped, and the attacker's access to it.
struct Victim {
    root: tempfile::TempDir,
    runtime: Runtime,
}

impl Victim {
    /// `None` where nothing can be mounted.
    fn new() -> Option<Victim> {
        if !Path::new("/dev/fuse").exists() {
            println!("skipped: /dev/fuse is missing");
            return None;
        }
        // Each silent connection needs a descriptor in this process, too.
        let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        files.current = files.maximum;
        rustix::process::setrlimit(rustix::process::Resource::Nofile, files).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let v = Victim { root: tempfile::tempdir().unwrap(), runtime };
        let mut up = up(3, 2);
        ok(&up.arg("--dir").arg(v.dir()).arg("--mount").arg(v.mount()).output().unwrap());
        Some(v)
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mount(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn servers(&self, role: &str) -> Vec<Endpoint> {
        servers_of(&self.dir(), role)
    }
    fn identity(&self) -> Identity {
        Identity::client(keyfile::read_client(&self.dir().join("client.key")).unwrap())
    }
    fn fabric(&self) -> TcpFabric {
        TcpFabric::new(
            Env::system(),
            self.identity(),
            None,
            Pool::new(64 << 20),
            Default::default(),
        )
    }
    fn connect(&self, at: &Endpoint) -> Result<Arc<dyn Connection>> {
        let _in = self.runtime.enter();
        self.runtime.block_on(self.fabric().connect(at, None))
    }
    fn call<R: prost::Message + Default>(
        &self,
        c: &dyn Connection,
        op: u16,
        body: &impl prost::Message,
    ) -> Result<R> {
        let m = Message::new(op, body.encode_to_vec());
        Ok(R::decode(self.runtime.block_on(c.call(m, LONG))?.body).unwrap())
    }
    /// The address of the leader, and a connection to it.
    fn leader(&self) -> (Endpoint, Arc<dyn Connection>) {
        let began = Instant::now();
        while began.elapsed() < LONG {
            for at in self.servers("mds") {
                let Ok(c) = self.connect(&at) else { continue };
                let unknown = pb::SessionRenewRequest {
                    level: strake_proto::FEATURE_LEVEL,
                    session: 1 << 62,
                    ..Default::default()
                };
                let e = self
                    .call::<pb::SessionRenewReply>(&*c, opcode::SESSION_RENEW, &unknown)
                    .unwrap_err();
                if e.code == Code::NoSession {
                    return (at, c);
                }
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("nobody leads");
    }
    fn session(&self) -> Session<'_> {
        let (at, conn) = self.leader();
        let open = pb::SessionOpenRequest {
            level: strake_proto::FEATURE_LEVEL,
            client_uuid: Env::system().random_bytes::<16>().to_vec().into(),
            hostname: "attacker".into(),
            ..Default::default()
        };
        let r: pb::SessionOpenReply = self.call(&*conn, opcode::SESSION_OPEN, &open).unwrap();
        Session { v: self, at, conn, id: r.session, seq: 0 }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if self.dir().exists() {
            let _ = strake().arg("down").arg("--dir").arg(self.dir()).output();
        }
    }
}

/// An attacker's session.
struct Session<'a> {
    v: &'a Victim,
    at: Endpoint,
    conn: Arc<dyn Connection>,
    id: u64,
    seq: u64,
}

impl Session<'_> {
    /// Runs an operation list as a user; returns the answer to the last operation.
    fn run(
        &mut self,
        creds: &pb::Creds,
        ops: Vec<pb::op::Op>,
    ) -> std::result::Result<pb::OpResult, Code> {
        let ops: Vec<pb::Op> = ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect();
        let changes = ops.iter().any(strake_proto::ops::is_mutation);
        self.seq += u64::from(changes);
        let m = pb::MetaRequest {
            session: self.id,
            seq: if changes { self.seq } else { 0 },
            lowest_unanswered: self.seq,
            creds: Some(creds.clone()),
            ops,
            ..Default::default()
        };
        let r: pb::MetaReply = self.v.call(&*self.conn, opcode::META, &m).map_err(|e| e.code)?;
        let last = r.results.last().cloned().unwrap_or_default();
        match last.status {
            Some(s) if s.code != 0 => Err(Code::from_wire(s.code)),
            _ => Ok(last),
        }
    }
}

/// Looks up names that do not exist for `lasts`; returns the longest lookup.
fn looks(mount: &Path, lasts: Duration) -> Duration {
    let (began, mut worst, mut n) = (Instant::now(), Duration::ZERO, 0);
    while began.elapsed() < lasts {
        n += 1;
        let at = Instant::now();
        assert!(!mount.join(format!("no-such-name-{n}-{}", at.elapsed().as_nanos())).exists());
        worst = worst.max(at.elapsed());
        thread::sleep(Duration::from_millis(5));
    }
    worst
}

/// Looks up names on the mount while `attack` runs; returns the longest lookup.
fn looks_while(mount: &Path, attack: impl FnOnce()) -> Duration {
    let over = Arc::new(AtomicBool::new(false));
    let (mount, ends) = (mount.to_path_buf(), over.clone());
    let looking = thread::spawn(move || {
        let mut worst = Duration::ZERO;
        while !ends.load(SeqCst) {
            worst = worst.max(looks(&mount, Duration::from_millis(100)));
        }
        worst
    });
    attack();
    over.store(true, SeqCst);
    looking.join().unwrap()
}
