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
pub enum Road {
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

impl Road {
    /// All of them.
    pub const ALL: [Road; 4] = [Road::Local, Road::Tcp, Road::RdmaStream, Road::Rdma];

    /// The name that users see.
    pub const fn name(self) -> &'static str {
        match self {
            Road::Local => "local",
            Road::Tcp => "tcp",
            Road::RdmaStream => "rdma-stream",
            Road::Rdma => "rdma",
        }
    }
}

impl fmt::Display for Road {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Bytes by transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByRoad([u64; Road::ALL.len()]);

impl ByRoad {
    /// This many bytes by one transport.
    pub fn of(road: Road, bytes: u64) -> ByRoad {
        let mut all = ByRoad::default();
        all.add(road, bytes);
        all
    }

    /// The bytes of these buffers, by the transport that brought them.
    pub fn came(bufs: &[Buf]) -> ByRoad {
        let mut all = ByRoad::default();
        bufs.iter().for_each(|b| all.add(b.road(), b.len() as u64));
        all
    }

    /// Adds bytes of one transport.
    pub fn add(&mut self, road: Road, bytes: u64) {
        self.0[road as usize] += bytes;
    }

    /// The sum over all transports.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Each transport with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Road, u64)> {
        Road::ALL.into_iter().zip(self.0)
    }
}

impl Index<Road> for ByRoad {
    type Output = u64;
    fn index(&self, road: Road) -> &u64 {
        &self.0[road as usize]
    }
}

impl AddAssign for ByRoad {
    fn add_assign(&mut self, other: ByRoad) {
        other.iter().for_each(|(road, bytes)| self.add(road, bytes));
    }
}

/// Counts bytes by transport, from many threads.
#[derive(Debug, Default)]
pub struct RoadCounter([AtomicU64; Road::ALL.len()]);

impl RoadCounter {
    /// Adds bytes.
    pub fn add(&self, more: ByRoad) {
        for (road, bytes) in more.iter().filter(|(_, bytes)| *bytes > 0) {
            self.0[road as usize].fetch_add(bytes, Relaxed);
        }
    }

    /// The bytes so far.
    pub fn look(&self) -> ByRoad {
        ByRoad(std::array::from_fn(|i| self.0[i].load(Relaxed)))
    }
}

/// How the bytes of one buffer left it; small counters, because each buffer has one.
#[derive(Debug, Default)]
pub(crate) struct Went([AtomicU32; Road::ALL.len()]);

impl Went {
    pub fn add(&self, road: Road, bytes: usize) {
        self.0[road as usize].fetch_add(bytes as u32, Relaxed);
    }

    pub fn look(&self) -> ByRoad {
        ByRoad(std::array::from_fn(|i| self.0[i].load(Relaxed).into()))
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
