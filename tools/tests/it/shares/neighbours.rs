//! The attackers of [`super::rates`]: each goes on until it is killed.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use strake_fabric::Endpoint;
use strake_proto::{
    data::DataRequest,
    frame::{MAX_BODY, MAX_PAYLOAD},
    ids::ROOT_INO,
    opcode, pb,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    hands::{Answer, BYTES, Hand, Visitor, acl_of_groups, frame, silent},
    servers_of,
};
use pb::op::Op;

/// The kinds of attack. The first is a plain loop, as a baseline.
pub const KINDS: [&str; 8] =
    ["loop", "silent", "halves", "unread", "flood", "groups", "moves", "locks"];

/// Silent connections to each metadata server.
const SILENT: usize = 1200;
/// Connections that flood storage servers with reads.
const FLOOD: usize = 64;
const ASKED_AT_ONCE: u64 = 64;

pub fn attack(kind: &str, dir: &Path) {
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, files).unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let a = Arc::new(Neighbour {
        dir: dir.into(),
        mds: servers_of(dir, "mds"),
        oss: servers_of(dir, "oss"),
    });
    let _in = runtime.enter();
    match kind {
        "loop" => {
            let mut n = 0u64;
            loop {
                n = std::hint::black_box(n.wrapping_mul(5).wrapping_add(1));
            }
        }
        "silent" => a.silent(),
        "halves" => a.halves(),
        "unread" => a.reads(false),
        "flood" => a.reads(true),
        lists => a.work(lists),
    }
    runtime.block_on(std::future::pending())
}

struct Neighbour {
    dir: Box<Path>,
    mds: Vec<Endpoint>,
    oss: Vec<Endpoint>,
}

/// The read requests to send; empty until there is a file.
type Readable = watch::Receiver<Vec<(Endpoint, DataRequest)>>;

impl Neighbour {
    /// Silent connections, opened again when they are closed. Half of them send one byte.
    fn silent(&self) {
        for (n, at) in self.mds.iter().flat_map(|at| vec![at.clone(); SILENT]).enumerate() {
            tokio::spawn(async move {
                loop {
                    if let Ok(mut s) = silent(&at).await {
                        let _ = s.write_all(&[0; 1][..n % 2]).await;
                        let _ = s.read(&mut [0; 64]).await;
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
    }

    /// Incomplete frames: payloads at storage servers, bodies at metadata servers.
    fn halves(self: &Arc<Self>) {
        let write =
            [frame(opcode::WRITE, 1, &[0; 96], &[], MAX_PAYLOAD), vec![0; 100_000]].concat();
        let body = vec![0; MAX_BODY as usize];
        let mut meta = frame(opcode::META, 1, &body, &[], 0);
        meta.pop();
        let (write, meta) = (Bytes::from(write), Bytes::from(meta));
        let oss = self.oss.iter().flat_map(|at| std::iter::repeat_n((at, &write), 16));
        let mds = self.mds.iter().flat_map(|at| std::iter::repeat_n((at, &meta), 20));
        for (at, bytes) in oss.chain(mds) {
            let (a, at, bytes) = (self.clone(), at.clone(), bytes.clone());
            tokio::spawn(async move {
                loop {
                    if let Ok(mut h) = Hand::reach(&a.dir, &at).await {
                        let _ = h.stream.write_all(&bytes).await;
                        let _ = h.stream.read(&mut [0; 64]).await;
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
    }

    /// Read requests on many connections, some small and some large. `reads`: whether the answers
    /// are read.
    fn reads(self: &Arc<Self>, reads: bool) {
        let readable = self.readable();
        for n in 0..FLOOD {
            let (a, mut readable) = (self.clone(), readable.clone());
            tokio::spawn(async move {
                loop {
                    let all = readable.wait_for(|r| !r.is_empty()).await.unwrap().clone();
                    let (at, ask) = &all[n % all.len()];
                    let len = if n / all.len() % 2 == 0 { 4096 } else { BYTES };
                    let body = DataRequest { len, ..ask.clone() }.encode();
                    let many: Vec<u8> = (1..=ASKED_AT_ONCE)
                        .flat_map(|id| frame(opcode::READ, id, &body, &[], 0))
                        .collect();
                    if let Ok(h) = Hand::reach(&a.dir, at).await {
                        read_on(h, &many, reads).await;
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
    }

    /// A file to read. It exists as long as its session lives; then another one is made.
    fn readable(self: &Arc<Self>) -> Readable {
        let (a, (tell, told)) = (self.clone(), watch::channel(Vec::new()));
        tokio::spawn(async move {
            loop {
                let mut v = Visitor::new(&a.dir, &a.mds).await;
                let Ok(what) = v.readable(&a.dir).await else { continue };
                tell.send_replace(what);
                let look = || Op::Getattr(pb::GetAttr { ino: ROOT_INO });
                while v.run(&pb::Creds::default(), vec![look()]).await.is_ok() {
                    sleep(Duration::from_millis(300)).await;
                }
            }
        });
        told
    }

    /// Operation lists that cost as much work as possible, from four sessions.
    fn work(self: &Arc<Self>, kind: &str) {
        for n in 0..4 {
            let (a, kind) = (self.clone(), kind.to_owned());
            tokio::spawn(async move {
                loop {
                    let mut v = Visitor::new(&a.dir, &a.mds).await;
                    let _ = match &kind[..] {
                        "groups" => groups(&mut v, n).await,
                        "moves" => moves(&mut v, n).await,
                        "locks" => locks(&mut v, n).await,
                        other => panic!("no attack is called {other}"),
                    };
                }
            });
        }
    }
}

/// Sends requests until the connection ends, or for a few seconds.
async fn read_on(h: Hand, many: &[u8], reads: bool) {
    let (mut rd, mut wr) = h.stream.into_split();
    let asks = async {
        loop {
            match timeout(Duration::from_secs(3), wr.write_all(many)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return,
                // The connection is full. Keep it for a while.
                Err(_) => return sleep(Duration::from_secs(3)).await,
            }
        }
    };
    let drains = async {
        let mut to = vec![0; 256 << 10];
        while reads && rd.read(&mut to).await.is_ok_and(|n| n > 0) {}
        if !reads {
            std::future::pending::<()>().await;
        }
    };
    let both = async {
        tokio::select! { () = asks => {}, () = drains => {} }
    };
    let _ = timeout(Duration::from_secs(10), both).await;
}

fn name(s: &str) -> Bytes {
    s.to_owned().into()
}

fn mkdir(parent: u64, at: &str) -> Op {
    Op::Mkdir(pb::Mkdir { parent, name: name(at), mode: 0o777, umask: 0 })
}

/// Makes a folder for the session.
async fn folder(v: &mut Visitor, n: u64) -> Answer<u64> {
    let own = format!("work-{:x}-{n}", v.session);
    Ok(v.run(&pb::Creds::default(), vec![mkdir(ROOT_INO, &own)]).await??.ino)
}

/// An ACL of 506 groups, checked for a caller with the largest possible number of groups.
async fn groups(v: &mut Visitor, n: u64) -> Answer<()> {
    let dir = folder(v, n).await?;
    v.run(&pb::Creds::default(), vec![acl_of_groups(dir)]).await??;
    let many = pb::Creds { uid: 1000, gid: 1000, groups: (0..65_000).collect() };
    let lookup = Op::Lookup(pb::Lookup { parent: dir, name: name("k") });
    for round in 0.. {
        let changes = std::iter::once(mkdir(dir, &format!("k{round}")))
            .chain(vec![lookup.clone(); 8000])
            .collect();
        let _ = v.run(&many, changes).await?;
        let _ = v.run(&many, vec![lookup.clone(); 300]).await?;
        let _ = v.run(&many, vec![lookup.clone(); 8000]).await?;
    }
    Ok(())
}

/// Lists of renames, as deep in the tree as allowed.
async fn moves(v: &mut Visitor, n: u64) -> Answer<()> {
    let (root, mut deep) = (pb::Creds::default(), folder(v, n).await?);
    for _ in 0..8 {
        let down = (0..500).map(|i| mkdir(if i == 0 { deep } else { 0 }, "d")).collect();
        deep = v.run(&root, down).await??.ino;
    }
    let a = v.run(&root, vec![mkdir(deep, "a")]).await??.ino;
    let b = v.run(&root, vec![mkdir(deep, "b")]).await??.ino;
    v.run(&root, vec![mkdir(a, "v")]).await??;
    let moved = |from, to| {
        Op::Rename(pb::Rename {
            parent: from,
            name: name("v"),
            new_parent: to,
            new_name: name("v"),
            flags: 0,
        })
    };
    loop {
        let _ = v
            .run(
                &root,
                (0..1000).map(|i| if i % 2 == 0 { moved(a, b) } else { moved(b, a) }).collect(),
            )
            .await?;
        for _ in 0..4 {
            let _ = v.run(&root, vec![moved(a, b), moved(b, a)]).await?;
        }
    }
}

/// Many locks in one file.
async fn locks(v: &mut Visitor, n: u64) -> Answer<()> {
    let (root, dir) = (pb::Creds::default(), folder(v, n).await?);
    let file = Op::Create(pb::Create {
        parent: dir,
        name: name("locks"),
        mode: 0o666,
        ..Default::default()
    });
    let ino = v.run(&root, vec![file]).await??.attr.unwrap().ino;
    let lock = |r#type: i32, start: u64, end: u64| {
        let span = Some(pb::LockSpan { start, end, r#type, pid: 1 });
        Op::SetLock(pb::SetLock { ino, owner: n, span, ..Default::default() })
    };
    loop {
        for from in (0..4000).step_by(1000) {
            let _ = v
                .run(&root, (from..from + 1000).map(|i| lock(2, 4 * i, 4 * i + 1)).collect())
                .await?;
        }
        let _ = v.run(&root, vec![lock(0, 0, u64::MAX)]).await?;
    }
}
