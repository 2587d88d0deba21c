//! The turn of a change among other requests of its caller.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use strake_proto::{Ino, Result};

use crate::{core::Core, locks::page_uses::Using};

/// Says when a change may be applied. A mount applies none while its kernel has pages of the bytes
/// that it changes. Dropped when the change can have no further effect, even if the caller has gone
/// away.
pub trait Turn: Send + Sync + 'static {
    /// The change has everything that it waits for, and would be applied now. Returns whether it
    /// may. If not, it gives up what it has, and waits for [`Turn::wait`].
    fn begin(&self) -> bool {
        true
    }

    /// Returns when it is time to call [`Turn::begin`] again.
    fn wait(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// After [`Turn::begin`]: the change is not applied now, and `begin` will be called again.
    fn pause(&self) {}
}

/// Always may.
impl Turn for () {}

impl<T: Turn> Turn for Arc<T> {
    fn begin(&self) -> bool {
        (**self).begin()
    }

    fn wait(&self) -> BoxFuture<'_, ()> {
        (**self).wait()
    }

    fn pause(&self) {
        (**self).pause();
    }
}

/// As [`Core::use_to_change`], for a change that must have its turn when the use begins. It waits
/// for its turn without the use: other clients may wait for the end of the use.
pub(super) async fn use_in_turn(core: &Arc<Core>, ino: Ino, turn: &dyn Turn) -> Result<Using> {
    loop {
        let using = core.use_to_change(ino).await?;
        if turn.begin() {
            return Ok(using);
        }
        drop(using);
        turn.wait().await;
    }
}
