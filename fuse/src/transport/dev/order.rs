//! The order of requests relative to the memory mappings of their files.

use std::sync::Arc;

use super::mapped::{Changing, PageIn};

/// The order of a request relative to the mappings of its file: `docs/mappings.md`.
pub(super) enum Order {
    /// No order.
    Nothing,
    PageIn(PageIn),
    Change(Arc<Changing>),
    /// The request is refused.
    HasPages,
}

impl Order {
    /// Returns when the request may proceed. `place` is given back if write-backs must come first,
    /// since they need a place.
    pub async fn turn<T>(&self, place: &mut Option<T>) {
        match self {
            Order::PageIn(p) => p.turn().await,
            Order::Change(c) if c.waits() => {
                *place = None;
                c.alone().await;
            }
            Order::Change(_) | Order::Nothing | Order::HasPages => {}
        }
    }
}
