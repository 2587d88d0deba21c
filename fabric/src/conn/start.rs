//! The tasks of a connection: the reader, the writer, and the pulse, which keeps the connection alive
//! and notices a dead peer. Requests get a task each while they are handled.

use std::sync::Arc;

use strake_proto::{Code, Error, frame::HEADER_LEN};
use strake_runtime::quiet::Quiet;
use tokio::{io::AsyncWrite, sync::mpsc, time::sleep};

use super::{
    inbox::Incoming,
    read,
    shared::{Handle, Outgoing, Setup, Shared},
    write,
};
use crate::{Peer, Service};

static SILENT: Quiet = Quiet::new();

/// Starts a connection's tasks over a byte stream.
pub(super) fn start<R, W>(mut setup: Setup, rd: R, wr: W) -> Arc<Shared>
where
    R: Incoming,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let o = &setup.options;
    // Every frame in the queue holds a slot or a place, except for keep-alives, refusals (one per
    // slot of the peer) and one GoAway.
    let (out, queue) = mpsc::channel(o.max_inflight * 2 + o.max_handlers + 16);
    let (role, id, service) = (setup.role, setup.id, setup.service.take());
    let shared = Arc::new(Shared::new(setup, out));
    let peer = Arc::new(Peer {
        role,
        addr: shared.addr.clone(),
        id,
        back: Some(Arc::new(Handle::back(shared.clone()))),
    });
    shared.env.spawn(run_reader(shared.clone(), rd, peer, service));
    shared.env.spawn(run_writer(shared.clone(), wr, queue));
    shared.env.spawn(run_pulse(shared.clone()));
    shared
}

async fn run_reader<R: Incoming>(
    s: Arc<Shared>,
    rd: R,
    peer: Arc<Peer>,
    service: Option<Arc<dyn Service>>,
) {
    let ended = tokio::select! {
        biased;
        () = s.closed() => None,
        e = read::run(&s, rd, &peer, service.as_ref()) => Some(e),
    };
    if let Some(e) = ended {
        s.fail(&e);
    }
    if let Some(service) = service {
        service.disconnected(&peer);
    }
}

async fn run_writer<W: AsyncWrite + Unpin>(s: Arc<Shared>, wr: W, queue: mpsc::Receiver<Outgoing>) {
    let ended = tokio::select! {
        biased;
        () = s.closed() => None,
        e = write::run(&s, wr, queue) => Some(e),
    };
    if let Some(e) = ended {
        s.fail(&e);
    }
}

/// Keeps the connection alive while this end owes answers, and closes it when the peer owes answers
/// and is silent.
async fn run_pulse(s: Arc<Shared>) {
    tokio::select! {
        biased;
        () = s.closed() => {}
        () = pulse(&s) => {}
    }
}

async fn pulse(s: &Arc<Shared>) {
    const TICKS: u32 = 5;
    let tick = s.options.silence / TICKS;
    let (mut received, mut sent, mut silent) = (0, 0, 0);
    loop {
        if s.liveness.busy().await {
            silent = 0;
            received = s.liveness.moved().0;
        }
        sleep(tick).await;
        let (now_received, now_sent) = s.liveness.moved();
        let idle = now_sent == sent && s.is_out_empty();
        sent = now_sent;
        if s.liveness.owes() && idle {
            s.keep_alive();
            sent += HEADER_LEN as u64;
        }
        silent = if now_received == received && s.liveness.is_awaited() { silent + 1 } else { 0 };
        received = now_received;
        // The first silent tick may have begun after a sign of life within it, so one less than
        // TICKS.
        if silent >= TICKS - 1 {
            SILENT.warn(|| {
                format!(
                    "closing the connection to {}: it is silent although answers are due",
                    s.addr
                )
            });
            let m = format!("{} is silent for {:?} and counts as dead", s.addr, s.options.silence);
            s.fail(&Error::new(Code::Disconnected, m));
            return;
        }
    }
}
