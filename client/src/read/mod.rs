//! The read cache, and the read-ahead policy. Both are pure tables.

pub mod cache;
pub mod readahead;
