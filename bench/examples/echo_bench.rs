//! Cost of the TCP fabric compared with a bare socket, both ends in this process over loopback:
//! `cargo run --release -p strake-bench --example echo_bench [MiB]`. CPU seconds are the sum of
//! both ends.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures_util::future::join_all;
use rustix::time::{ClockId, clock_gettime};
use strake_fabric::{
    Buf, Connection, Endpoint, Fabric, Identity, Message, Peer, Pool, Service, TcpFabric,
    tcp::Options,
};
use strake_proto::{Result, opcode};
use strake_runtime::Env;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const MIB: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// A message whose payload the transport does not sum, as those that carry blocks.
fn covered(opcode: u16, body: impl Into<bytes::Bytes>) -> Message {
    Message { is_covered: true, ..Message::new(opcode, body) }
}

/// Keeps what is written, answers reads from memory, echoes the rest.
struct Memory(Buf);

#[async_trait]
impl Service for Memory {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        Ok(match m.opcode {
            opcode::READ => covered(m.opcode, m.body).with_payload(vec![self.0.clone()]),
            opcode::WRITE => Message::new(m.opcode, m.body),
            _ => m,
        })
    }
}

struct Clock {
    wall: Instant,
    cpu: f64,
}

fn cpu() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

impl Clock {
    fn start() -> Clock {
        Clock { wall: Instant::now(), cpu: cpu() }
    }
    fn bytes(&self, what: &str, bytes: usize) {
        let (wall, used) = (self.wall.elapsed().as_secs_f64(), cpu() - self.cpu);
        let gb = bytes as f64 / 1e9;
        println!("{what:<34} {:>6.2} GB/s  {:>6.3} CPU s/GB", gb / wall, used / gb);
    }
    fn calls(&self, what: &str, n: usize) {
        let (wall, used) = (self.wall.elapsed().as_secs_f64(), cpu() - self.cpu);
        println!(
            "{what:<34} {:>6.1} us/call  {:>6.1} us CPU",
            wall * 1e6 / n as f64,
            used * 1e6 / n as f64
        );
    }
}

async fn raw_copy(mib: usize) -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?;
    let receiver = tokio::spawn(async move {
        let (mut s, _) = listener.accept().await?;
        let mut buf = vec![0; MIB];
        for _ in 0..mib {
            s.read_exact(&mut buf).await?;
        }
        std::io::Result::Ok(())
    });
    let mut s = TcpStream::connect(at).await?;
    let buf = vec![7; MIB];
    for _ in 0..mib {
        s.write_all(&buf).await?;
    }
    receiver.await.map_err(std::io::Error::other)?
}

async fn raw_ping(n: usize) -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?;
    tokio::spawn(async move {
        let (mut s, _) = listener.accept().await?;
        s.set_nodelay(true)?;
        let mut buf = [0; 192];
        loop {
            s.read_exact(&mut buf).await?;
            s.write_all(&buf).await?;
        }
        #[allow(unreachable_code)]
        std::io::Result::Ok(())
    });
    let mut s = TcpStream::connect(at).await?;
    s.set_nodelay(true)?;
    let mut buf = [0; 192];
    for _ in 0..n {
        s.write_all(&buf).await?;
        s.read_exact(&mut buf).await?;
    }
    Ok(())
}

/// `total` calls, `depth` at a time.
async fn calls(conn: &Arc<dyn Connection>, total: usize, depth: usize, make: impl Fn() -> Message) {
    let one = |n: usize| {
        let (conn, make) = (conn.clone(), &make);
        async move {
            for _ in 0..n {
                conn.call(make(), LONG).await.expect("call");
            }
        }
    };
    join_all((0..depth).map(|_| one(total / depth))).await;
}

#[tokio::main]
async fn main() {
    let mib: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(4096);
    let f = TcpFabric::new(
        Env::system(),
        Identity::server(&[1; 32]),
        None,
        Pool::default(),
        Options::default(),
    );
    let mut data = f.pool().get_now(MIB);
    data.fill(7);
    let data = data.freeze();
    let at: Endpoint = "tcp:127.0.0.1:0".parse().expect("an endpoint");
    let guard = f.listen(&at, Arc::new(Memory(data.clone()))).await.expect("listen");
    let conn = f.connect(guard.endpoint(), None).await.expect("connect");

    for round in 0..2 {
        println!("round {round}");
        let c = Clock::start();
        raw_copy(mib).await.expect("raw copy");
        c.bytes("raw socket, 1 MiB", mib * MIB);
        for depth in [1, 8] {
            let c = Clock::start();
            calls(&conn, mib, depth, || {
                covered(opcode::WRITE, vec![0; 96]).with_payload(vec![data.clone()])
            })
            .await;
            c.bytes(&format!("write 1 MiB, {depth} in flight"), mib * MIB);
            let c = Clock::start();
            calls(&conn, mib, depth, || Message::new(opcode::READ, vec![0; 96])).await;
            c.bytes(&format!("read 1 MiB, {depth} in flight"), mib * MIB);
        }
        let n = 20_000;
        let c = Clock::start();
        raw_ping(n).await.expect("raw ping");
        c.calls("raw socket, 192 B", n);
        for depth in [1, 64] {
            let c = Clock::start();
            calls(&conn, n / depth * depth, depth, || Message::new(opcode::ECHO, vec![0; 128]))
                .await;
            c.calls(&format!("echo 128 B, {depth} in flight"), n / depth * depth);
        }
    }
    println!("{:?}", f.pool().stats());
}
