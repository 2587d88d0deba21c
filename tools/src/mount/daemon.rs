//! The processes of a mount: the supervisor that stays and the daemon that serves, see `docs/restart.md`.

use std::{
    os::fd::{OwnedFd, RawFd},
    process::ExitCode,
};

use strake_client::Keep;
use strake_fabric::Env;
use strake_fuse::supervisor::{
    OTHER_LAYOUT, Program, SOCKET, Supervisor,
    link::{Link, Message},
};
use strake_proto::{Code, Error, Result};
use tokio::signal::unix::{SignalKind, signal};

use super::{MountSection, connect_with};
use crate::lifeline::{self, Lifeline};

/// Memory for written data that is not yet known to be stable, and for what is on its way; taken as it is used.
const KEPT_BUFFERS: usize = 512 << 20;

/// The socket of the supervisor that started this process as a daemon, if one did.
pub(super) fn socket() -> Option<RawFd> {
    std::env::var(SOCKET).ok()?.parse().ok()
}

/// Stays until the mount is gone.
pub(super) async fn supervise(section: MountSection) -> Result<ExitCode> {
    strake_fuse::can_mount(&section.mountpoint)?;
    let uuid = Env::system().random_bytes();
    let keep = Keep::create(uuid, KEPT_BUFFERS).map_err(|e| Error::from(e).context("memory for the mount"))?;
    let mut lifeline = lifeline(&section, uuid);
    let dead = lifeline.as_ref().map_or_else(Vec::new, |l| l.dead.clone());
    let program = Program { path: std::env::current_exe()?, args: std::env::args_os().skip(1).collect() };
    let supervisor = Supervisor::new(section.mount_config(), program, keep, dead);
    let code = supervisor.run(|| {
        tracing::info!("mounted at {}", section.mountpoint.display());
        if let Some(l) = &mut lifeline {
            l.told();
        }
    });
    Ok(ExitCode::from(code.await?))
}

/// A daemon: serves what its supervisor mounts or has mounted.
pub(super) async fn serve(section: MountSection, key: [u8; 32], socket: RawFd) -> Result<ExitCode> {
    ignore_signals()?;
    let failed = |e: std::io::Error| Error::from(e).context("the supervisor's socket");
    let link = Link::inherited(socket).map_err(failed)?;
    let gone = || Error::new(Code::Disconnected, "the supervisor is gone");
    let (order, mut fds) = link.receive().map_err(failed)?.ok_or_else(gone)?;
    if fds.is_empty() {
        return Err(Error::new(Code::Protocol, "the supervisor sent no kept memory"));
    }
    let keep = match Keep::open(fds.remove(0)) {
        Ok(k) => k,
        Err(e) => {
            tracing::error!("{e}");
            return Ok(ExitCode::from(OTHER_LAYOUT));
        }
    };
    let mut config = section.client_config()?;
    config.keep = Some(keep.clone());
    if let Message::Connect { dead } = &order {
        config.dead.clone_from(dead);
    }
    let client = connect_with(config, key).await?;
    let descriptors: Vec<OwnedFd> = match order {
        Message::TakeOver => fds,
        _ => {
            link.send(&Message::Connected { name: client.map().map.fs_name.clone() }, &[]).map_err(failed)?;
            // It mounts, which needs nothing of this process.
            let reply = tokio::task::block_in_place(|| link.receive()).map_err(failed)?;
            reply.ok_or_else(gone)?.1
        }
    };
    let mount = strake_fuse::serve(&section.mount_config(), client.clone(), keep, descriptors).await?;
    let alive = link.watch().map_err(failed)?;
    link.send(&Message::Serving, &[]).map_err(failed)?;
    tokio::select! {
        biased;
        r = mount.wait() => r?,
        // It says nothing any more: this is its end.
        _ = alive.readable() => {
            tracing::error!("the supervisor was killed: the mount ends");
            // At once: what waits for servers must not hold the mount up.
            std::process::exit(1);
        }
    }
    client.close().await?;
    Ok(ExitCode::SUCCESS)
}

/// A mount in one process, by the fuser crate.
pub(super) async fn unsupervised(section: MountSection, key: [u8; 32]) -> Result<ExitCode> {
    let uuid = Env::system().random_bytes();
    let mut lifeline = lifeline(&section, uuid);
    let mut config = section.client_config()?;
    if let Some(l) = &lifeline {
        config.uuid = Some(uuid);
        config.dead.clone_from(&l.dead);
    }
    let client = connect_with(config, key).await?;
    if let Some(l) = &mut lifeline {
        l.told();
    }
    let mount = strake_fuse::mount(section.mount_config(), client.clone()).await?;
    tracing::info!("mounted at {}", section.mountpoint.display());
    tokio::select! {
        biased;
        r = crate::serve::until_signal() => { r?; mount.unmount().await?; }
        r = mount.wait() => r?,
    }
    client.close().await?;
    Ok(ExitCode::SUCCESS)
}

/// What a terminal or a service manager sends to all processes of a mount is the supervisor's to follow.
fn ignore_signals() -> Result<()> {
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()] {
        // A handler that nobody listens to.
        let _ = signal(kind).map_err(|e| Error::from(e).context("signals"))?;
    }
    Ok(())
}

/// Without one the mount works, and what a killed one before it had open is free a session's term later.
fn lifeline(section: &MountSection, uuid: [u8; 16]) -> Option<Lifeline> {
    let folder = section.run_dir.clone().or_else(lifeline::default_folder)?;
    match Lifeline::start(&folder, &section.mds, uuid) {
        Ok(l) => Some(l),
        Err(e) => {
            tracing::warn!("a mount that is killed will not be missed before its session's term: {e}");
            None
        }
    }
}
