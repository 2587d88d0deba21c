//! Sizes that a device and its connections share.

/// Maximum length of a message, and size of a receive buffer, in bytes.
pub const MESSAGE: usize = 4096;
/// Minimum number of receive buffers of a device.
pub const FEWEST: u32 = 16;
/// Maximum number of messages of the stream in flight.
pub const SENDS: usize = 16;
/// Maximum number of messages in flight that only return credits.
pub const RETURNS: usize = 4;
/// Maximum number of posted operations on payloads.
pub const OPS: usize = 256;
/// Maximum number of posted work requests of a queue pair.
pub const DEPTH: usize = SENDS + RETURNS + 1 + OPS;
/// Number of places of a device's stage, one for each piece under way: a piece that waits for a
/// vanished peer keeps its place for seconds.
pub const PLACES: usize = 4;
