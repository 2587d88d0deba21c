//! The metadata server as a process: a thin shell around the pure state machines and `consensus`.
//!
//! | file | idea |
//! |---|---|
//! | `start.rs` | starting and stopping all of this |
//! | `service.rs`, `wire.rs` | requests as they arrive: access checks, dispatch |
//! | `call.rs` | what stays the same for a list while it is answered |
//! | `member.rs` | what the others use: the log, the state, and what only the leader knows |
//! | `session_service.rs` | sessions, and the files that they hold open ([`crate::sessions`]) |
//! | `evictions.rs` | evictions that are not for silence, with their reason |
//! | `reads.rs` | lists that change nothing: read after a barrier |
//! | `changes.rs` | lists that change something; each runs once ([`crate::request_dedup`]) |
//! | `recalls.rs`, `lease_service.rs` | leases; clients are asked to forget and report |
//! | `machine.rs` | what the log is applied to |
//! | `followers.rs` | reads while this server does not lead ([`crate::recent_changes`]) |
//! | `heavy.rs`, `fair.rs` | lists that are much work wait for each other; clients take turns |
//! | `leader.rs` | what only the leader does: membership ticks, session terms, orphans |
//! | `links.rs` | connections to storage servers |
//! | `chunks.rs`, `size_recovery.rs` | the leader at storage servers: trim, delete, find ends |
//! | `anew.rs` | the leader's worker that brings back chains that hold nothing |
//! | `locks.rs` | clients wait for locks ([`crate::lock_waiters`]) |
//! | `membership.rs` | changes of the group |
//! | `levels.rs` | feature levels: who knows which ([`crate::levels`]), and raising the cluster's |
//! | `disk.rs`, `disk_space.rs` | starting from a folder; which changes its disk has space for |
//! | `scrub.rs` | looks for damage in the state |
//! | `config.rs`, `status.rs`, `admin.rs`, `places.rs` | keys, status, gRPC, paths in logs |

mod admin;
mod anew;
mod call;
mod changes;
mod chunks;
mod config;
mod disk;
mod disk_space;
mod evictions;
mod fair;
mod followers;
mod heavy;
mod leader;
mod lease_service;
mod levels;
mod links;
mod locks;
mod machine;
mod member;
mod membership;
mod places;
mod reads;
mod recalls;
mod scrub;
mod service;
mod session_service;
mod size_recovery;
mod start;
mod status;
mod wire;

#[cfg(test)]
mod tests;

pub use config::{Config, ReadCheck, parse_peer};
pub use disk::{read_identity, start_on_disk};
pub use start::{MdsServer, Parts, start};
