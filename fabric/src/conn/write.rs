//! The writer of a connection: takes what is queued, as much as there is up to a limit, and writes it with as few system
//! calls as possible. Headers and small bodies are gathered in one scratch buffer; payloads are never copied.

use std::{io::IoSlice, ops::Range, sync::atomic::Ordering::Relaxed};

use strake_proto::{Code, Error, frame::HEADER_LEN};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};

use super::shared::{Hold, Outgoing, Shared};

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

/// Writes until the socket fails. Ends without an error's cause only when the connection is dropped.
pub(super) async fn run<W: AsyncWrite + Unpin>(s: &Shared, mut wr: W, mut queue: mpsc::Receiver<Outgoing>) -> Error {
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

/// Lays out the batch. Requests that nobody waits for any more are left out.
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

async fn write_pieces<W: AsyncWrite + Unpin>(
    s: &Shared,
    wr: &mut W,
    batch: &[Outgoing],
    scratch: &[u8],
    pieces: &[Piece],
) -> std::io::Result<()> {
    let (mut at, mut done) = (0, 0);
    while at < pieces.len() {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut n = 0;
        for (i, p) in pieces[at..].iter().take(SLICES).enumerate() {
            let b = bytes(p, batch, scratch);
            slices[n] = IoSlice::new(if i == 0 { &b[done..] } else { b });
            n += 1;
        }
        let mut written = wr.write_vectored(&slices[..n]).await?;
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
    wr.flush().await
}
