//! A checker for histories of metadata operations: whether what several clients were told at the
//! same time can be explained by one order in which each operation took effect at one moment
//! between its call and its answer. See docs/histories.md.

pub mod choose;
pub mod explain;
pub mod history;
pub mod library;
pub mod model;
pub mod mount;
pub mod search;

pub use history::{Answer, Attr, Errno, Head, History, How, Ino, Op, Outcome, Record};
pub use search::{Verdict, check};
