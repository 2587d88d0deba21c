//! The order of requests relative to the memory mappings of their files.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use strake_client::Turn;

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

    /// Whether other clients may wait for this request: nothing may delay it.
    pub fn is_at_once(&self) -> bool {
        matches!(self, Order::PageIn(p) if p.is_at_once())
    }
}

impl Turn for Order {
    fn begin(&self) -> bool {
        match self {
            Order::Change(c) => c.begin(),
            _ => true,
        }
    }

    fn wait(&self) -> BoxFuture<'_, ()> {
        match self {
            Order::Change(c) => c.wait(),
            _ => Box::pin(async {}),
        }
    }

    fn pause(&self) {
        if let Order::Change(c) = self {
            c.pause();
        }
    }
}
