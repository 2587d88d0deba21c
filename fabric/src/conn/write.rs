//! The writer of a connection: takes as many queued frames as there are, up to a limit, and writes
//! them with as few system calls as possible. Headers and small bodies are gathered in one scratch
//! buffer; payloads are never copied.

use std::{
    io::IoSlice, ops::Range, pin::pin, sync::atomic::Ordering::Relaxed, task::Poll, time::Duration,
};

use strake_proto::{Code, Error, frame::HEADER_LEN};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::mpsc,
    time::{Instant, timeout},
};

use super::{
    inbox::{LEAST_RATE, at_once},
    shared::{Hold, Outgoing, Shared},
};

/// Frames written at once, at most.
const BATCH: usize = 32;
/// Bodies up to this length are copied behind their header.
const SMALL: usize = 2048;
/// Slices per system call.
const SLICES: usize = 64;

enum Piece {
    Scratch(Range<usize>),
    Body(usize),
    Payload(usize, usize),
}

/// Writes until the socket fails or the connection is dropped, and returns the cause.
pub(super) async fn run<W: AsyncWrite + Unpin>(
    s: &Shared,
    mut wr: W,
    mut queue: mpsc::Receiver<Outgoing>,
) -> Error {
    let mut batch = Vec::with_capacity(BATCH);
    let mut scratch = Vec::new();
    let mut pieces = Vec::new();
    loop {
        if queue.recv_many(&mut batch, BATCH).await == 0 {
            return Error::new(Code::Disconnected, "connection dropped");
        }
        plan(&mut batch, &mut scratch, &mut pieces);
        if let Err(e) = write_pieces(s, &mut wr, &batch, &scratch, &pieces).await {
            return Error::new(Code::Disconnected, format!("sending to {} failed: {e}", s.addr));
        }
        batch.clear();
        if scratch.capacity() > 256 << 10 {
            scratch = Vec::new();
        }
    }
}

/// Lays out the batch. Requests that were abandoned are left out.
fn plan(batch: &mut Vec<Outgoing>, scratch: &mut Vec<u8>, pieces: &mut Vec<Piece>) {
    batch.retain(|f| !matches!(&f.hold, Hold::Request(slot) if slot.abandoned.load(Relaxed)));
    scratch.clear();
    pieces.clear();
    let mut start = 0;
    for (i, f) in batch.iter().enumerate() {
        scratch.extend_from_slice(&f.header.encode());
        if f.body.len() <= SMALL {
            scratch.extend_from_slice(&f.body);
            if f.payload.is_empty() {
                continue;
            }
        }
        pieces.push(Piece::Scratch(start..scratch.len()));
        start = scratch.len();
        if f.body.len() > SMALL {
            pieces.push(Piece::Body(i));
        }
        pieces.extend((0..f.payload.len()).map(|j| Piece::Payload(i, j)));
    }
    if start < scratch.len() {
        pieces.push(Piece::Scratch(start..scratch.len()));
    }
    debug_assert!(scratch.len() >= batch.len() * HEADER_LEN);
}

fn bytes<'a>(piece: &Piece, batch: &'a [Outgoing], scratch: &'a [u8]) -> &'a [u8] {
    match piece {
        Piece::Scratch(r) => &scratch[r.clone()],
        Piece::Body(i) => &batch[*i].body,
        Piece::Payload(i, j) => &batch[*i].payload[*j],
    }
}

/// Waits for a write as long as it makes progress: what is being written may hold memory that
/// others wait for. `begun`: when the batch began, and its bytes.
async fn goes_on<T>(
    s: &Shared,
    write: impl Future<Output = std::io::Result<T>>,
    (begun, bytes): (Instant, usize),
) -> std::io::Result<T> {
    let mut write = pin!(write);
    // The timer is only set up if it must wait.
    if let Poll::Ready(r) = at_once(write.as_mut()).await {
        return r;
    }
    let (o, mut waited) = (&s.options, Duration::ZERO);
    // The peer's reader may be waiting for memory, too.
    let (pause, least) = (o.frame_pause_full, o.room_wait * 2);
    let batch = least + Duration::from_secs(bytes as u64) / LEAST_RATE;
    loop {
        if let Ok(r) = timeout(pause, write.as_mut()).await {
            return r;
        }
        waited += pause;
        if waited >= o.frame_pause || s.is_short() && (waited >= least || begun.elapsed() >= batch)
        {
            let m = "the peer does not read the data sent to it";
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, m));
        }
    }
}

async fn write_pieces<W: AsyncWrite + Unpin>(
    s: &Shared,
    wr: &mut W,
    batch: &[Outgoing],
    scratch: &[u8],
    pieces: &[Piece],
) -> std::io::Result<()> {
    let whole = (Instant::now(), pieces.iter().map(|p| bytes(p, batch, scratch).len()).sum());
    let (mut at, mut done) = (0, 0);
    while at < pieces.len() {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut n = 0;
        for (i, p) in pieces[at..].iter().take(SLICES).enumerate() {
            let b = bytes(p, batch, scratch);
            slices[n] = IoSlice::new(if i == 0 { &b[done..] } else { b });
            n += 1;
        }
        let mut written = goes_on(s, wr.write_vectored(&slices[..n]), whole).await?;
        s.sent(written);
        let offered: usize = slices[..n].iter().map(|b| b.len()).sum();
        if written == 0 && offered > 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        while at < pieces.len() {
            let left = bytes(&pieces[at], batch, scratch).len() - done;
            if written < left {
                done += written;
                break;
            }
            written -= left;
            done = 0;
            at += 1;
        }
    }
    goes_on(s, wr.flush(), whole).await
}
