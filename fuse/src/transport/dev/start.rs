//! Begins to serve a mount: gets its descriptors, and takes over from what served it before.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
};

use strake_proto::{Error, Result};

use super::{
    abi, channel::Channel, init::Agreed, interim::Interim, notify, progress::Progress,
    reply::Reply, serve::Serve, session::Session,
};
use crate::{config::MountConfig, mountpoint};

/// Mounts. Returns the descriptors to be served, one for each thread. The mount ends when the last
/// of them is closed.
pub(crate) fn attach(cfg: &MountConfig) -> Result<Vec<OwnedFd>> {
    let first = if rustix::process::geteuid().is_root() {
        let channel = Channel::open()?;
        mountpoint::attach(cfg, channel.fd())?;
        channel
    } else {
        Channel::new(mountpoint::attach_as_user(cfg)?)
    };
    let more =
        (1..cfg.threads.clamp(1, 64)).map(|_| first.another()).collect::<Result<Vec<_>, _>>();
    match more {
        Ok(mut all) => {
            all.push(first);
            Ok(all.into_iter().map(OwnedFd::from).collect())
        }
        Err(e) => {
            // The mount would never be answered.
            let _ = mountpoint::detach(&cfg.mountpoint, true);
            Err(Error::from(e).context("opening /dev/fuse once more"))
        }
    }
}

/// Serves a mount from its descriptors until it is unmounted, in the place of `interim`.
pub(crate) fn start(
    descriptors: Vec<OwnedFd>,
    mut serve: Serve,
    agreed: Arc<OnceLock<Agreed>>,
    interim: Option<Interim>,
) -> Result<Session> {
    drop(interim);
    let channels: Vec<Arc<Channel>> =
        descriptors.into_iter().map(|fd| Arc::new(Channel::new(fd))).collect();
    if let Some(c) = channels.first() {
        serve.keep_copies(c);
    }
    let progress = Arc::new(Progress::new(&channels));
    // Without a negotiation, only the first request was read, which must come again too.
    let is_next = serve.is_next();
    let resends = agreed.get().is_none_or(|a| a.has(abi::init::HAS_RESEND));
    if is_next && !resends {
        for (unique, index) in serve.give_up_left() {
            if let Some(c) = channels.get(index) {
                let _ = c.send(unique, &Reply::Error(libc::EIO));
            }
        }
    }
    serve.expect_left();
    // Do this before anything is read: else the requests that this daemon has read would come
    // again, too, and be done twice.
    if is_next
        && resends
        && let Some(c) = channels.first()
        && let Err(e) = c.notify(&notify::resend())
    {
        tracing::warn!("asking the kernel to send unanswered requests again: {e}");
    }
    // Do this after the resend: requests that come again are in the queue before the leader is told
    // which locks programs still hold.
    serve.set_queue(&progress);
    let pool = serve.pool();
    let session = Session::start(channels, Arc::new(serve), pool, agreed, progress);
    session.map_err(|e| Error::from(e).context("starting the threads of a mount"))
}
