//! Limits and times of connections.

use std::time::Duration;

/// Limits and times of connections.
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests in flight per connection and direction; further callers wait.
    pub max_inflight: usize,
    /// Limit of payload bytes of these requests, and of the payloads of running handlers.
    pub max_inflight_bytes: usize,
    /// Requests of one connection that are handled at the same time.
    pub max_handlers: usize,
    /// How long to connect may take, to one address.
    pub connect_timeout: Duration,
    /// How long the handshake may take, at both ends.
    pub handshake_timeout: Duration,
    /// Accepted connections whose handshake is not finished. More than a thousand clients make when
    /// their leader dies: with fewer, connections are accepted so slowly that those at the end give
    /// up and begin anew. Beyond the limit the oldest is dropped, see [`crate::places`].
    pub max_half_open: usize,
    /// Accepted connections of one listener. An eighth is reserved for servers; one machine has at
    /// most half of all.
    pub max_connections: usize,
    /// A frame that has begun must make progress within this time, in both directions, or its
    /// connection is closed.
    pub frame_pause: Duration,
    /// As `frame_pause`, while others wait for the memory that the frame takes.
    pub frame_pause_full: Duration,
    /// Bytes of clients' request bodies that are longer than 16 KiB, over all connections. One
    /// machine has at most half of them.
    pub max_body_bytes: usize,
    /// As `max_body_bytes`, for answers to clients that are not written yet.
    pub max_answer_bytes: usize,
    /// A peer that owes an answer and sends nothing for this long is considered dead.
    pub silence: Duration,
    /// How long the reader waits for a free handler or for memory before it refuses a request.
    pub room_wait: Duration,
    /// How long requests may still run when a listener is dropped.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_inflight: 256,
            max_inflight_bytes: 64 << 20,
            max_handlers: 256,
            connect_timeout: Duration::from_secs(1),
            handshake_timeout: Duration::from_secs(5),
            max_half_open: 2048,
            max_connections: 8192,
            frame_pause: Duration::from_secs(10),
            frame_pause_full: Duration::from_millis(200),
            max_body_bytes: 64 << 20,
            max_answer_bytes: 128 << 20,
            silence: Duration::from_secs(2),
            room_wait: Duration::from_secs(1),
            drain: Duration::from_secs(1),
        }
    }
}
