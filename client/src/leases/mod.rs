//! What this client knows under leases of the metadata leader. See `docs/leases.md`.
//!
//! [`Table`] is pure; [`lease_cache`] is the stateful layer around it.

pub(crate) mod acknowledged;
pub(crate) mod lease_cache;
pub(crate) mod open_cache;
pub(crate) mod recalls;
pub(crate) mod recent_lookups;
mod table;

pub use table::{Change, Dropped, Name, Table, Token, Told};
