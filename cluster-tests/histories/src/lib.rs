//! A checker for histories of metadata operations of several clients: whether one order explains
//! all answers, in which each operation takes effect at one moment between its call and its answer.
//! See docs/histories.md.

pub mod choose;
pub mod explain;
pub mod history;
pub mod library;
pub mod model;
pub mod mount;
pub mod search;

pub use history::{Answer, Attr, Errno, Head, History, How, Ino, Op, Outcome, Record};
pub use search::{Verdict, check};
