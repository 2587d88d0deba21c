//! Counters of traffic over connections.

use std::{
    fmt,
    ops::{AddAssign, Index},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use crate::Buf;

/// How bytes came into a buffer, or left it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// By no network: made or copied here, zeros of a hole, or of a simulated network.
    #[default]
    Local,
    /// Through a TCP stream.
    Tcp,
    /// Between two RDMA devices, but through the stream of frames and copied between it and the
    /// buffer: a large payload for which there was no memory to lend.
    RdmaStream,
    /// Between two RDMA devices and directly into or out of the buffer; or with its frame, if it
    /// has no more than 4 KiB.
    Rdma,
}

impl Transport {
    /// All of them.
    pub const ALL: [Transport; 4] =
        [Transport::Local, Transport::Tcp, Transport::RdmaStream, Transport::Rdma];

    /// The name that users see.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Local => "local",
            Transport::Tcp => "tcp",
            Transport::RdmaStream => "rdma-stream",
            Transport::Rdma => "rdma",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Bytes by transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByTransport([u64; Transport::ALL.len()]);

impl ByTransport {
    /// This many bytes by one transport.
    pub fn of(transport: Transport, bytes: u64) -> ByTransport {
        let mut all = ByTransport::default();
        all.add(transport, bytes);
        all
    }

    /// The bytes of these buffers, by the transport that brought them.
    pub fn came(bufs: &[Buf]) -> ByTransport {
        let mut all = ByTransport::default();
        bufs.iter().for_each(|b| all.add(b.transport(), b.len() as u64));
        all
    }

    /// Adds bytes of one transport.
    pub fn add(&mut self, transport: Transport, bytes: u64) {
        self.0[transport as usize] += bytes;
    }

    /// The sum over all transports.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Each transport with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Transport, u64)> {
        Transport::ALL.into_iter().zip(self.0)
    }
}

impl Index<Transport> for ByTransport {
    type Output = u64;
    fn index(&self, transport: Transport) -> &u64 {
        &self.0[transport as usize]
    }
}

impl AddAssign for ByTransport {
    fn add_assign(&mut self, other: ByTransport) {
        other.iter().for_each(|(transport, bytes)| self.add(transport, bytes));
    }
}

/// Counts bytes by transport, from many threads.
#[derive(Debug, Default)]
pub struct TransportCounter([AtomicU64; Transport::ALL.len()]);

impl TransportCounter {
    /// Adds bytes.
    pub fn add(&self, more: ByTransport) {
        for (transport, bytes) in more.iter().filter(|(_, bytes)| *bytes > 0) {
            self.0[transport as usize].fetch_add(bytes, Relaxed);
        }
    }

    /// The bytes so far.
    pub fn look(&self) -> ByTransport {
        ByTransport(std::array::from_fn(|i| self.0[i].load(Relaxed)))
    }
}

/// How the bytes of one buffer left it; small counters, because each buffer has one.
#[derive(Debug, Default)]
pub(crate) struct Went([AtomicU32; Transport::ALL.len()]);

impl Went {
    pub fn add(&self, transport: Transport, bytes: usize) {
        self.0[transport as usize].fetch_add(bytes as u32, Relaxed);
    }

    pub fn look(&self) -> ByTransport {
        ByTransport(std::array::from_fn(|i| self.0[i].load(Relaxed).into()))
    }
}

/// Number of open connections, and bytes since the start: of frames, and of payloads whichever way
/// they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that are open.
    pub connections: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

/// Counters of a connection, or of a whole fabric.
#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    fn look(&self) -> Traffic {
        Traffic {
            connections: self.connections.load(Relaxed),
            sent: self.sent.load(Relaxed),
            received: self.received.load(Relaxed),
        }
    }
}

/// Counters of all connections of a fabric, including those that are gone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals(Arc<Counters>);

impl Totals {
    pub fn look(&self) -> Traffic {
        self.0.look()
    }

    /// The counter of a new connection, which counts here too.
    pub fn open(&self) -> Counter {
        self.0.connections.fetch_add(1, Relaxed);
        Counter {
            own: Counters { connections: 1.into(), ..Counters::default() },
            all: self.0.clone(),
        }
    }
}

/// See [`Totals::open`].
#[derive(Debug)]
pub(crate) struct Counter {
    own: Counters,
    all: Arc<Counters>,
}

impl Counter {
    pub fn sent(&self, bytes: u64) {
        self.own.sent.fetch_add(bytes, Relaxed);
        self.all.sent.fetch_add(bytes, Relaxed);
    }

    pub fn received(&self, bytes: u64) {
        self.own.received.fetch_add(bytes, Relaxed);
        self.all.received.fetch_add(bytes, Relaxed);
    }

    pub fn look(&self) -> Traffic {
        self.own.look()
    }

    /// The connection is over; what it has counted stays.
    pub fn close(&self) {
        let was = self.own.connections.swap(0, Relaxed);
        self.all.connections.fetch_sub(was, Relaxed);
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.close();
    }
}
