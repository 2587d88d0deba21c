//! What every part of the client uses.

pub mod retry;
pub mod unreachable;
