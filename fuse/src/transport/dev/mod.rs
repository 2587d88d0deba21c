//! Our own implementation of the `/dev/fuse` protocol, without a library.
//!
//! `channel` reads requests and writes replies; `copies` revokes what the kernel was told;
//! `request`, `reply`, `init` and `notify` are the protocol itself, pure; `session` runs the
//! threads; `progress` knows how far the threads have come; `interim` answers while no daemon does;
//! `mapped` and `pages` order memory mappings with all other changes, `shared` with other nodes;
//! `moved` makes the kernel forget earlier places of directories; `interrupts` releases callers
//! that were killed; `running` knows which programs run; `serve` asks the [VFS core](crate::vfs).
//! See `docs/fuse.md`.

mod abi;
mod channel;
mod copies;
mod init;
pub(crate) mod interim;
mod interrupts;
mod mapped;
mod moved;
pub(crate) mod notify;
mod order;
mod pages;
mod progress;
mod reply;
mod request;
mod running;
mod serve;
mod session;
mod shared;

use std::{
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
};

use init::Agreed;
use interim::Interim;
use progress::Progress;
pub(crate) use serve::Serve;
pub(crate) use session::Session;
use strake_proto::{Error, Result};

use self::channel::Channel;
use crate::{MountConfig, mountpoint};

/// Largest read or write request: 256 pages of 4 KiB, the kernel's default limit.
pub(crate) const MAX_REQUEST: u32 = 1 << 20;

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
                let _ = c.send(unique, &reply::Reply::Error(libc::EIO));
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

/// For the fuzz target `kernel`: reads a request as it could come from `/dev/fuse`. Returns whether
/// it is well formed.
pub(crate) fn read_request(bytes: &[u8], setxattr_ext: bool) -> bool {
    let Ok(head) = request::Head::read(bytes) else { return false };
    let args = &bytes[abi::IN_HEAD..];
    let body = match args.split_at_checked(abi::WRITE_HEAD - abi::IN_HEAD) {
        Some((fixed, data)) if head.opcode == abi::op::WRITE => {
            let mut buf = strake_fabric::BufMut::unpooled(data.len());
            buf.copy_from_slice(data);
            request::write(fixed, buf.freeze())
        }
        _ => request::read(head, args, setxattr_ext),
    };
    if let Ok(request::Body::Init(asked)) = &body
        && let init::Outcome::Agreed(agreed) = init::negotiate(*asked, MAX_REQUEST)
    {
        assert!(
            agreed.flags & !asked.flags == 0
                && agreed.minor <= asked.minor
                && agreed.reply().len() == 64
        );
    }
    body.is_ok()
}

/// For the fuzz target `text`: parses the files that tell whether a caller is dying.
pub(crate) fn is_dying(text: &str) -> bool {
    interrupts::dies_of_signal(text) | interrupts::is_exiting(text)
}
