//! Handshake messages from anyone: whole sides driven by arbitrary bytes never agree and never panic.
#![no_main]

use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
};

use libfuzzer_sys::fuzz_target;
use strake_fabric::{
    Identity,
    tcp::handshake::{HELLO_LEN, Hello, Party, WELCOME_LEN, Welcome, answer, dial},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Gives its bytes, then the end of the stream; takes everything.
struct Script<'a>(&'a [u8]);

impl AsyncRead for Script<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let n = to.remaining().min(self.0.len());
        to.put_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, b: &[u8]) -> Poll<std::io::Result<usize>> {
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

fuzz_target!(|data: &[u8]| {
    let us = Party::new(Identity::server(&[1; 32]), Some([2; 16]), [3; 32]);
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
});
