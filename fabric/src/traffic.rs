//! What goes over connections, counted.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use strake_proto::pb;

use crate::Fabric;

/// Connections that are open, and bytes since the beginning: of frames, and of payloads whichever way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub connections: u64,
    pub sent: u64,
    pub received: u64,
}

/// What went over each road of a fabric, for `strake status`.
pub fn roads(fabric: &dyn Fabric) -> Vec<pb::RoadStatus> {
    let of = |(road, t): (&str, Traffic)| pb::RoadStatus {
        road: road.into(),
        connections: t.connections,
        sent: t.sent,
        received: t.received,
    };
    fabric.roads().into_iter().map(of).collect()
}

/// Counters of a connection, or of all of a fabric.
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

/// All connections of a fabric, those that are gone too.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals(Arc<Counters>);

impl Totals {
    pub fn look(&self) -> Traffic {
        self.0.look()
    }

    /// A connection's counter, which counts here too.
    pub fn open(&self) -> Counter {
        self.0.connections.fetch_add(1, Relaxed);
        Counter { own: Counters { connections: 1.into(), ..Counters::default() }, all: self.0.clone() }
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
