//! The chunk store of one target: chunks on a [`Device`], found through a table in a [`MetaStore`].
//!
//! Every update is copy-on-write: [`Engine::stage`] puts bytes into fresh device blocks,
//! [`Engine::commit`] makes the table in memory name them, [`Engine::flush`] makes that durable.
//! Crash safety rests on the order of a flush:
//!
//! 1. freeze the records changed since the last flush;
//! 2. flush the device: every byte those records name is durable;
//! 3. commit the records to the store in one batch, and sync it;
//! 4. mark on the device, without waiting, how far the table was synced;
//! 5. only now may the blocks that the batch replaced be used again, when no reader still holds
//!    them.
//!
//! So the durable table never names bytes that are not durable, and after a power loss each chunk
//! is as it was at some flush. Formats are in `docs/formats.md`, "Chunk store".
//!
//! | file | idea |
//! |---|---|
//! | `api.rs`, `chunk.rs` | the engine as callers see it; what it is asked for |
//! | `shared.rs` | the device, the table and all that changes |
//! | `stage.rs` | from an update to staged blocks and the records that will name them |
//! | `read.rs` | consistent views of a chunk, verified reads |
//! | `check.rs`, `position.rs` | looking for decay, and how far the scrub got |
//! | `list.rs` | listings, extents, forgetting tombstones |
//! | `flush.rs` | the order above, shared by concurrent callers; reuse of space |
//! | `open.rs` | formatting, and rebuilding the allocator from the table |
//! | `target.rs`, `folder.rs` | the folder of a target: device, table, lock |
//! | `notes.rs`, `chain_views.rs`, `findings.rs` | what the server notes in the table |
//! | `used.rs` | which chains ever stored something here, in case the table is lost |
//! | `record.rs`, `superblock.rs` | the formats |
//! | `table_digest.rs` | how a table that lost synced changes is noticed |
//! | `overlay.rs`, `alloc.rs` | the table's part in memory; free space |
//! | `reserve.rs` | free space that is kept from new data |
//! | `grants.rs` | free space that is promised to sessions |

mod alloc;
mod api;
mod chain_views;
mod check;
mod chunk;
mod findings;
mod flush;
mod folder;
mod grants;
mod list;
mod notes;
mod open;
mod options;
mod overlay;
mod position;
mod read;
pub mod record;
mod reserve;
mod shared;
mod stage;
pub mod superblock;
pub mod table_digest;
mod target;
#[cfg(test)]
mod tests;
mod used;

pub use api::{Engine, Usage};
pub use check::{Look, STEP};
pub use chunk::{ChunkMeta, Key, ReadOut, Update};
pub use findings::Found;
pub use grants::Ask;
pub use list::Forgot;
pub use notes::TargetNotes;
pub use options::Options;
pub use position::Position;
pub use stage::Staged;
pub use strake_proto::data::ListEntry;
pub use superblock::TargetIdentity;
#[cfg(test)]
pub(crate) use target::open_device;
pub use target::{
    Damaged, Opened, TargetLayout, announce_device, create_target_dir, open_target_dir,
};
