//! The processes of a mount: the supervisor, which stays, and the daemon, which serves. See
//! `docs/restart.md`.

use std::{
    os::fd::{OwnedFd, RawFd},
    process::ExitCode,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
};

use strake_client::{Client, Creds};
use strake_fuse::{
    HandoverMemory, Interim, MountConfig,
    supervisor::{
        self, OTHER_LAYOUT, Program, SOCKET, Supervisor,
        control::{Ask, Control},
        link::{Link, Message},
    },
    vfs,
};
use strake_proto::{Code, Error, Ino, Result};
use strake_runtime::{ClientKey, Env};
use tokio::{
    io::Interest,
    net::UnixDatagram,
    signal::unix::{SignalKind, signal},
};

use super::{FabricKey, MountSection, connect_with, make_way};
use crate::lifeline::{self, Lifeline};

/// Size of the kept memory for written data that is not known to be stable yet, and for data under
/// way; allocated as it is used.
const KEPT_BUFFERS: usize = 512 << 20;

/// Word of the kept memory that holds the inode of the mount's root.
const KEPT_ROOT: usize = 3;

/// The inode of the folder to be mounted, with the rights of the mounting user.
async fn root(section: &MountSection, client: &Client) -> Result<Ino> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let groups =
        rustix::process::getgroups().unwrap_or_default().into_iter().map(|g| g.as_raw()).collect();
    vfs::find_subtree(client, &Creds { uid, gid, groups }, section.subtree()).await
}

/// The socket of the supervisor, if one started this process as a daemon.
pub(super) fn socket() -> Option<RawFd> {
    std::env::var(SOCKET).ok()?.parse().ok()
}

/// Stays until the mount is gone.
pub(super) async fn supervise(section: MountSection) -> Result<ExitCode> {
    make_way(&section.mountpoint)?;
    strake_fuse::can_mount(&section.mountpoint)?;
    let uuid = Env::system().random_bytes();
    let keep = HandoverMemory::create(uuid, KEPT_BUFFERS)
        .map_err(|e| Error::from(e).context("memory for the mount"))?;
    let mut lifeline = lifeline(&section, uuid);
    let dead = lifeline.as_ref().map_or_else(Vec::new, |l| l.dead.clone());
    let program =
        Program { path: std::env::current_exe()?, args: std::env::args_os().skip(1).collect() };
    let supervisor = Supervisor::new(section.mount_config(), program, keep, dead);
    let code = supervisor.run(|| {
        tracing::info!("mounted at {}", section.mountpoint.display());
        if let Some(l) = &mut lifeline {
            l.told();
        }
    });
    Ok(ExitCode::from(code.await?))
}

/// The daemon: serves what its supervisor mounts or has mounted.
pub(super) async fn serve(
    section: MountSection,
    key: ClientKey,
    socket: RawFd,
) -> Result<ExitCode> {
    ignore_signals()?;
    let link = Link::inherited(socket).map_err(failed)?;
    let (order, mut fds) = link.receive().map_err(failed)?.ok_or_else(gone)?;
    if fds.is_empty() {
        return Err(Error::new(Code::Protocol, "the supervisor sent no handover memory"));
    }
    let keep = match HandoverMemory::open(fds.remove(0)) {
        Ok(k) => k,
        Err(e) => {
            tracing::error!("{e}");
            return Ok(ExitCode::from(OTHER_LAYOUT));
        }
    };
    let mut config = section.client_config()?;
    config.handover = Some(keep.clone());
    match &order {
        Message::Connect { dead } => config.dead.clone_from(dead),
        // It is mounted already, so connecting may take as long as any operation. It may have been
        // remounted since: the supervisor tells next whether it is read-only, and until then the
        // kernel enforces it.
        _ => (config.connect_timeout, config.read_only) = (config.op_timeout, false),
    }
    let interim = match &order {
        Message::TakeOver => Interim::start(&keep, &fds).unwrap_or_else(|e| {
            tracing::warn!("the mount does not answer until servers do: {e}");
            None
        }),
        _ => None,
    };
    // An unreachable transport is an error only if a transport was requested, and only for a new
    // mount. In an existing mount, only operations that need that server wait.
    let all = matches!(order, Message::Connect { .. }) && section.fabric != FabricKey::Auto;
    let client = connect_with(config, key, section.fabric.into(), all).await?;
    let mut mount = section.mount_config();
    let descriptors: Vec<OwnedFd> = match order {
        Message::TakeOver => {
            // The same folder as before, even if it was renamed.
            mount.root = keep.mount_word(KEPT_ROOT).load(Acquire);
            fds
        }
        _ => mounted(&section, &mut mount, &client, &keep, &link).await?,
    };
    let mount = strake_fuse::serve(&mount, client.clone(), keep, descriptors, interim).await?;
    let watch = link.watch().map_err(failed)?;
    link.send(&Message::Serving, &[]).map_err(failed)?;
    let work = async {
        mount.unmounted().await?;
        let _ = link.send(&Message::Unmounted, &[]);
        mount.wait().await?;
        let lost = end(&client, &mount).await;
        let _ = link.send(&Message::Ended(lost), &[]);
        Ok(ExitCode::SUCCESS)
    };
    tokio::select! {
        biased;
        r = work => r,
        () = obey(&link, &watch, &client) => {
            tracing::error!("the supervisor was killed: the mount ends");
            // Exits at once: tasks that wait for servers must not delay this.
            std::process::exit(1);
        }
    }
}

/// Has the supervisor mount. Returns the descriptors by which the kernel sends its requests.
async fn mounted(
    section: &MountSection,
    mount: &mut MountConfig,
    client: &Client,
    keep: &Arc<HandoverMemory>,
    link: &Link,
) -> Result<Vec<OwnedFd>> {
    mount.root = root(section, client).await?;
    keep.mount_word(KEPT_ROOT).store(mount.root, Release);
    let learning = tokio::time::timeout(section.retry(), strake_fuse::learn(mount, client, keep));
    learning.await.map_err(|_| {
        let m = format!("connected, but then there was no answer from {}", client.servers().away());
        Error::new(Code::TimedOut, m)
    })??;
    let name = client.servers().map().map.fs_name.clone();
    link.send(&Message::Connected { name }, &[]).map_err(failed)?;
    // The supervisor mounts now, which needs nothing of this process.
    let reply = tokio::task::block_in_place(|| link.receive()).map_err(failed)?;
    Ok(reply.ok_or_else(gone)?.1)
}

fn failed(e: std::io::Error) -> Error {
    Error::from(e).context("the supervisor's socket")
}

fn gone() -> Error {
    Error::new(Code::Disconnected, "the supervisor is gone")
}

/// Follows the supervisor's orders until it is gone.
async fn obey(link: &Link, watch: &UnixDatagram, client: &Client) {
    while let Ok(Some((message, _))) = watch.async_io(Interest::READABLE, || link.receive()).await {
        match message {
            Message::ReadOnly(yes) => client.set_read_only(yes),
            Message::Ask => {
                let _ = link.send(&Message::State(state(client)), &[]);
            }
            Message::Count => {
                let _ = link.send(&Message::Counts(counts(client)), &[]);
            }
            m => tracing::warn!("unexpected message {m:?} from the supervisor"),
        }
    }
}

/// Data that is not stable yet, and why.
fn state(client: &Client) -> String {
    let (bytes, away) = (client.stats().unstable_bytes, client.servers().away());
    let why = if away.is_empty() { String::new() } else { format!("; no answer from {away}") };
    format!("{bytes} written bytes are not on disk yet{why}")
}

/// The counters, as `NAME=VALUE` separated by blanks.
fn counts(client: &Client) -> String {
    let one = |(name, value): (&str, u64)| format!("{name}={value}");
    client.stats().fields().into_iter().map(one).collect::<Vec<_>>().join(" ")
}

/// After the unmount: makes written data stable. Returns what was lost, empty if nothing.
async fn end(client: &Client, mount: &strake_fuse::Mount) -> String {
    match client.close().await.and(mount.lost().cloned().map_or(Ok(()), Err)) {
        Ok(()) => String::new(),
        Err(e) => {
            tracing::error!("written data was lost: {e}");
            format!("written data was lost: {e}")
        }
    }
}

/// A mount in one process, with the fuser crate.
pub(super) async fn unsupervised(section: MountSection, key: ClientKey) -> Result<ExitCode> {
    make_way(&section.mountpoint)?;
    let uuid = Env::system().random_bytes();
    let mut lifeline = lifeline(&section, uuid);
    let mut config = section.client_config()?;
    if let Some(l) = &lifeline {
        config.uuid = Some(uuid);
        config.dead.clone_from(&l.dead);
    }
    let client =
        connect_with(config, key, section.fabric.into(), section.fabric != FabricKey::Auto).await?;
    if let Some(l) = &mut lifeline {
        l.told();
    }
    let config = MountConfig { root: root(&section, &client).await?, ..section.mount_config() };
    let at = config.mountpoint.canonicalize();
    let mount = strake_fuse::mount(config, client.clone()).await?;
    tracing::info!("mounted at {}", section.mountpoint.display());
    let mut control = at.ok().and_then(|at| supervisor::listen(&at));
    tokio::select! {
        biased;
        r = crate::until_signal() => { r?; mount.unmount().await?; }
        r = mount.wait() => r?,
        () = answer(&mut control, &client) => {}
    }
    let lost = end(&client, &mount).await;
    if let Some(c) = control {
        c.end(lost).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Answers other commands for ever.
async fn answer(control: &mut Option<Control>, client: &Client) {
    while let Some(c) = control
        && let Some((ask, reply)) = c.next().await
    {
        let said = match ask {
            Ask::ReadOnly(yes) => {
                client.set_read_only(yes);
                "ok".into()
            }
            Ask::State => format!("state {}", state(client)),
            Ask::Stats => format!("stats {}", counts(client)),
        };
        let _ = reply.send(said);
    }
    std::future::pending().await
}

/// Signals that a terminal or a service manager sends to all processes of a mount are for the
/// supervisor only.
fn ignore_signals() -> Result<()> {
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()] {
        // A handler without a listener ignores the signal.
        let _ = signal(kind).map_err(|e| Error::from(e).context("signals"))?;
    }
    Ok(())
}

/// Without a lifeline the mount works, but files that a killed mount before it had open are
/// released only when that session expires.
fn lifeline(section: &MountSection, uuid: [u8; 16]) -> Option<Lifeline> {
    let folder = section.run_dir.clone().or_else(lifeline::default_folder)?;
    match Lifeline::start(&folder, &section.mds, uuid) {
        Ok(l) => Some(l),
        Err(e) => {
            tracing::warn!(
                "if this mount is killed, servers notice it only when its session's term is over: \
                 {e}"
            );
            None
        }
    }
}
