//! The storage server: a thin shell that connects chains, engines and the fabric.
//!
//! | file | idea |
//! |---|---|
//! | `start.rs`, `disk.rs` | starting and stopping all of this; from target folders |
//! | `node.rs`, `context.rs` | the services of a server; what all of them use |
//! | `service.rs` | incoming requests: rights, checks, dispatch |
//! | `revocations.rs`, `endings.rs` | evicted sessions and rights that have ended |
//! | `lease.rs`, `group.rs`, `membership.rs` | joining the cluster and staying a member |
//! | `map_updates.rs` | a newer cluster map |
//! | **a replica** | |
//! | `replicas.rs`, `chain_member.rs` | all replicas; the services of one |
//! | `replica.rs` | carries out what a chain's state machine asks for |
//! | `links.rs`, `peers.rs` | messages to the chain's other targets; connections to servers |
//! | `updates.rs`, `update_request.rs` | updates from clients and from other replicas |
//! | `trim.rs` | removing a file's data after its end |
//! | `resync.rs`, `backpressure.rs` | resyncing a replica; how that yields to applications |
//! | `repair.rs`, `damage.rs` | repairing a damaged chunk; what was found damaged |
//! | `copies.rs` | copies that are not in sync, as sources for repair |
//! | `leave.rs`, `vouch.rs` | the data of a chain that a target has left |
//! | **a target** | |
//! | `target.rs`, `targets.rs` | one target; those that serve, are out of service or join |
//! | `scrub/` | reading everything from time to time, to find damage before a reader does |
//! | `refused_targets.rs`, `come_back.rs` | targets out of service, and how they return |
//! | `target_folders.rs`, `add_targets.rs` | making and opening targets, at the start and later |
//! | **for administrators** | |
//! | `config.rs`, `status.rs`, `admin.rs` | configuration keys; status; gRPC |
//! | `places.rs` | paths of damaged files, for the log |

mod add_targets;
mod admin;
mod backpressure;
mod chain_member;
mod come_back;
mod config;
mod context;
mod copies;
mod damage;
mod disk;
mod endings;
mod group;
mod lease;
mod leave;
mod links;
mod map_updates;
mod membership;
mod node;
mod peers;
mod places;
mod refused_targets;
mod repair;
mod replica;
mod replicas;
mod resync;
mod revocations;
mod scrub;
mod service;
mod start;
mod status;
mod target;
mod target_folders;
mod targets;
#[cfg(test)]
mod tests;
mod trim;
mod update_request;
mod updates;
mod vouch;

pub use add_targets::Reread;
pub use config::{Config, TargetConfig};
pub use disk::{start_on_disk, start_on_disk_with};
pub use node::Parts;
pub use scrub::Ask;
pub use start::{OssServer, start};
