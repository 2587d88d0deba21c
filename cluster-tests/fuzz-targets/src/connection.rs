//! A peer that speaks TCP by hand: before, during and after the handshake.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use strake_fabric::{
    Identity, Message, Peer, Pool, Service, TcpFabric,
    tcp::{
        Options,
        handshake::{HELLO_LEN, Hello, Party, WELCOME_LEN, Welcome, answer, dial},
    },
};
use strake_proto::{
    Result, WIRE_VERSION,
    checksum::crc32c,
    frame::{HEADER_LEN, Header, Kind},
    opcode,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, duplex};

use crate::{input::Input, world};

/// The first byte chooses who receives the rest.
pub fn run(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => handshake(data),
        1 => world::run(async { to_server(stream(data)).await }),
        2 => world::run(async { to_client(stream(data)).await }),
        _ => world::run(async { to_server(data.to_vec()).await }),
    }
}

/// A stream that returns its bytes and then ends, and accepts all writes.
struct Script<'a>(&'a [u8]);

impl AsyncRead for Script<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let n = to.remaining().min(self.0.len());
        to.put_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script<'_> {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        b: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(b.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn now<T>(f: impl Future<Output = T>) -> T {
    let f = std::pin::pin!(f);
    match f.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(r) => r,
        Poll::Pending => panic!("a script never makes one wait"),
    }
}

fn server() -> Identity {
    Identity::server(&[1; 32])
}

/// Both sides of a handshake get arbitrary bytes: they must neither succeed nor panic.
fn handshake(data: &[u8]) {
    let us = Party::new(server(), Some([2; 16]), [3; 32]);
    for magic in [false, true] {
        let mut bytes = data.to_vec();
        if magic && bytes.len() >= 8 {
            bytes[..8].copy_from_slice(b"STRAKEHS");
        }
        assert!(now(answer(&mut Script(&bytes), &us)).is_err());
        assert!(now(dial(&mut Script(&bytes), &us)).is_err());
        if let Some(Ok(h)) = bytes.first_chunk::<HELLO_LEN>().map(Hello::decode) {
            assert_eq!(Hello::decode(&h.encode()).unwrap(), h);
        }
        if let Some(Ok(w)) = bytes.first_chunk::<WELCOME_LEN>().map(Welcome::decode) {
            assert_eq!(Welcome::decode(&w.encode()).unwrap(), w);
        }
    }
}

/// Frames as the input says, most of them with a correct checksum.
fn stream(data: &[u8]) -> Vec<u8> {
    let mut i = Input(data);
    let mut out = Vec::new();
    while !i.is_empty() {
        let (how, kind) = (i.u8(), i.u8());
        let kind = match kind % 8 {
            0..3 => Kind::Request,
            3..5 => Kind::Response,
            5 => Kind::GoAway,
            6 => Kind::KeepAlive,
            _ => Kind::Hello,
        };
        let (body, payload) = (i.bytes(), i.bytes());
        let mut h = Header {
            version: if how & 1 == 0 { WIRE_VERSION } else { i.u16() },
            kind,
            flags: how >> 1 & 1 | how >> 6 & 2,
            opcode: i.u16(),
            status: if how & 4 == 0 { 0 } else { i.u16() },
            deadline_ms: u32::from(i.u8()),
            request_id: i.number(),
            body_len: body.len() as u32,
            payload_len: payload.len() as u32,
            body_crc: crc32c(body),
            payload_crc: crc32c(payload),
            trace: 0,
        };
        match how >> 3 & 7 {
            1 => h.body_len = i.u32(),
            2 => h.payload_len = i.u32(),
            3 => h.body_crc = i.u32(),
            4 => h.payload_crc = i.u32(),
            _ => {}
        }
        let mut bytes = h.encode();
        if how & 64 != 0 {
            let at = usize::from(i.u8()) % HEADER_LEN;
            bytes[at] ^= i.u8();
        }
        out.extend_from_slice(&bytes);
        out.extend_from_slice(body);
        out.extend_from_slice(payload);
    }
    out
}

struct Echo;

#[async_trait]
impl Service for Echo {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        Ok(m)
    }
}

fn fabric() -> TcpFabric {
    TcpFabric::new(world::env(1), server(), Some([2; 16]), Pool::default(), Options::default())
}

/// After a proper handshake the server gets arbitrary bytes. The connection must end.
async fn to_server(bytes: Vec<u8>) {
    let (mut near, far) = duplex(64 << 10);
    let (rd, wr) = tokio::io::split(far);
    let (_stop, stopping) = tokio::sync::watch::channel(());
    let served = tokio::spawn(async move {
        fabric().accept_over(rd, wr, "fuzz".into(), Arc::new(Echo), stopping).await
    });
    dial(&mut near, &Party::new(server(), Some([2; 16]), [3; 32]))
        .await
        .expect("a proper handshake");
    say(near, bytes).await;
    served.await.expect("no panic").expect("the handshake was proper");
}

/// The same for the side that connected and waits for answers.
async fn to_client(bytes: Vec<u8>) {
    let (mut near, far) = duplex(64 << 10);
    let (rd, wr) = tokio::io::split(far);
    let dialled = tokio::spawn(async move {
        fabric().connect_over(rd, wr, "fuzz".into(), Some(Arc::new(Echo))).await
    });
    answer(&mut near, &Party::new(server(), Some([2; 16]), [3; 32]))
        .await
        .expect("a proper handshake");
    let conn = dialled.await.expect("no panic").expect("a proper handshake");
    let calls: Vec<_> = (0..4)
        .map(|_| {
            let conn = conn.clone();
            tokio::spawn(async move {
                conn.call(Message::new(opcode::ECHO, vec![1, 2, 3]), Duration::from_secs(5)).await
            })
        })
        .collect();
    tokio::task::yield_now().await;
    say(near, bytes).await;
    for c in calls {
        let _ = c.await.expect("no panic");
    }
    assert!(conn.is_closed());
}

async fn say(near: tokio::io::DuplexStream, bytes: Vec<u8>) {
    let (mut rd, mut wr) = tokio::io::split(near);
    let heard = tokio::spawn(async move {
        let mut all = Vec::new();
        let _ = rd.read_to_end(&mut all).await;
    });
    let _ = wr.write_all(&bytes).await;
    let _ = wr.shutdown().await;
    drop(wr);
    heard.await.expect("no panic");
}
