//! What a client does in the background, at intervals: it renews its session, reports sizes,
//! releases files, sends dirty data, flushes, and serves recalls.

use std::{
    future::Future,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::stream::{self, StreamExt};
use tokio::time::Instant;

use crate::{core::Core, inode::Inode, leases::recalls, write::writeback};

/// How many sizes are reported at a time.
const SIZES_AT_ONCE: usize = 32;
/// How long a release may wait to be sent together with others.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// Starts the background tasks, which run until the client is gone.
pub(crate) fn start(core: &Arc<Core>) {
    let weak = Arc::downgrade(core);
    core.shared.env.spawn(every(
        weak.clone(),
        |c| c.metadata.renew_interval(),
        |c| async move { c.metadata.clone().renew().await },
    ));
    let extend = core.shared.cfg.extend_interval;
    core.shared.env.spawn(every(
        weak.clone(),
        move |_| extend,
        |c| async move { push_sizes(c).await },
    ));
    let release = |c: Arc<Core>| async move { c.files.clone().send_releases().await };
    core.shared.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, release));
    let close = |c: Arc<Core>| async move { c.open_cache.clone().close_idle().await };
    core.shared.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, close));
    if core.shared.cfg.write_back || !core.writeback.has_inherited() {
        core.shared.env.spawn(every(
            weak.clone(),
            |_| writeback::LOOK,
            |c| async move { c.writeback.clone().send_due().await },
        ));
    }
    core.shared.env.spawn(recalls::serve(weak.clone()));
    core.shared.env.spawn(flush_loop(weak));
}

/// Reports all sizes that grew, several at a time.
async fn push_sizes(core: Arc<Core>) {
    core.cache.lock().age(Instant::now());
    let dirty = core.files.live_inodes().into_iter().filter(|inode| inode.is_dirty());
    let report = |inode: Arc<Inode>| {
        let core = core.clone();
        async move {
            if let Err(e) = core.files.push_size(&inode).await {
                tracing::warn!(ino = inode.ino, "could not report the size of a file: {e}");
            }
        }
    };
    stream::iter(dirty.map(report)).buffer_unordered(SIZES_AT_ONCE).collect::<()>().await;
}

/// Calls `f` repeatedly until the client is gone.
async fn every<F>(core: Weak<Core>, pause: impl Fn(&Core) -> Duration, f: impl Fn(Arc<Core>) -> F)
where
    F: Future<Output = ()>,
{
    loop {
        let Some(c) = core.upgrade() else { return };
        let pause = pause(&c);
        drop(c);
        tokio::time::sleep(pause).await;
        match core.upgrade() {
            Some(c) if !c.shared.is_closed() => f(c).await,
            _ => return,
        }
    }
}

/// Flushes chains whose unstable bytes are old or many: on a timer, and when a writer waits for
/// memory.
async fn flush_loop(core: Weak<Core>) {
    loop {
        let Some(c) = core.upgrade() else { return };
        if c.shared.is_closed() {
            return;
        }
        tokio::select! {
            biased;
            () = c.updates.flush_wanted() => {}
            () = tokio::time::sleep((c.shared.cfg.flush_age / 4).max(Duration::from_millis(1))) => {}
        }
        c.updates.flush_due();
    }
}
