//! What a read keeps and fetches ahead. Both are pure tables.

pub mod cache;
pub mod readahead;
