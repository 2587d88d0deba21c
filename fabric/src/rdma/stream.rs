//! The stream of frames over a queue's messages.

use std::{
    io::IoSlice,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use strake_proto::{Code, Error};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::queue::Queue;
use crate::conn::Incoming;

pub struct ReadHalf(Arc<Queue>);
pub struct WriteHalf(Arc<Queue>);

/// The two halves. When both are dropped, the connection ends.
pub fn halves(q: &Arc<Queue>) -> (ReadHalf, WriteHalf) {
    (ReadHalf(q.clone()), WriteHalf(q.clone()))
}

fn io_error(e: Error) -> std::io::Error {
    let kind = match e.code {
        Code::Disconnected => std::io::ErrorKind::BrokenPipe,
        _ => std::io::ErrorKind::Other,
    };
    std::io::Error::new(kind, e)
}

impl Incoming for ReadHalf {}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.0.read(buf.initialize_unfilled(), cx.waker()) {
            None => Poll::Pending,
            Some(Ok(n)) => {
                buf.advance(n);
                Poll::Ready(Ok(()))
            }
            Some(Err(e)) => Poll::Ready(Err(io_error(e))),
        }
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match self.0.write(bufs, cx.waker()) {
            None => Poll::Pending,
            Some(r) => Poll::Ready(r.map_err(io_error)),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing: what was written still arrives, because the connection lingers when both
    /// halves are dropped.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for ReadHalf {
    fn drop(&mut self) {
        self.0.drop_half();
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        self.0.drop_half();
    }
}
