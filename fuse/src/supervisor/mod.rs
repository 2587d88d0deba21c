//! The supervisor outlives a mount's daemons: it holds the mount and the daemon's state, and starts
//! the next daemon. See `docs/restart.md`.

pub mod control;
pub mod link;

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    path::PathBuf,
    process::ExitStatus,
    sync::Arc,
    time::{Duration, Instant},
};

use control::{Ask, Asked, Control};
use link::{Link, Message};
use strake_proto::{Code, Error, Result};
use tokio::{
    io::Interest,
    net::UnixDatagram,
    process::{Child, Command},
    signal::unix::{Signal, SignalKind, signal},
};

use crate::{config::MountConfig, handover::HandoverMemory, mount, mountpoint, table};

/// The environment variable with the number of the daemon's end of the socket.
pub const SOCKET: &str = "STRAKE_MOUNT_SOCKET";
/// A daemon's exit status when it cannot read the handover memory.
pub const OTHER_LAYOUT: u8 = 64;
/// This program itself, even when its file is deleted.
const MYSELF: &str = "/proc/self/exe";

/// The report about a daemon that ended without a last message.
const UNSAID: &str =
    "it is not known whether all data is safe: the mount's daemon ended without a report";

/// After a daemon that served for less than this, the next one is not started immediately.
const SHORT_LIFE: Duration = Duration::from_millis(200);
/// This many short lives in a row count as chance.
const CHANCE: u32 = 3;
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How often to check whether a daemon runs, in case the kernel's notification is missed.
const LOOK: Duration = Duration::from_secs(1);

/// How to start a daemon.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program's file; it may be replaced by another version.
    pub path: PathBuf,
    /// Its arguments.
    pub args: Vec<std::ffi::OsString>,
}

/// Supervises one mount until it is unmounted.
pub struct Supervisor {
    cfg: MountConfig,
    program: Program,
    keep: Arc<HandoverMemory>,
    /// Passed to the first daemon: clients that are certainly gone.
    dead: Vec<[u8; 16]>,
    /// The `/dev/fuse` descriptors, once mounted.
    descriptors: Vec<OwnedFd>,
    /// The socket for other commands, once mounted.
    control: Option<Control>,
    /// Requests to the daemon that are not answered yet.
    asking: Vec<(Ask, tokio::sync::oneshot::Sender<String>)>,
    unmounted: bool,
    /// What was lost, as the last daemon reported.
    lost: Option<String>,
}

struct Daemon {
    child: Child,
    link: Link,
    /// Signals when there is something to receive.
    watch: UnixDatagram,
    serving_since: Option<Instant>,
}

enum Event {
    Ended(ExitStatus),
    Said(Message),
    Asked(Asked),
    Upgrade,
    Stop,
}

struct Signals {
    upgrade: Signal,
    term: Signal,
    interrupt: Signal,
}

impl Supervisor {
    /// For a mount as `cfg` says, whose daemons are started as `program` says. `keep`: the memory
    /// that the daemons share. `dead`: clients that are certainly gone.
    pub fn new(
        cfg: MountConfig,
        program: Program,
        keep: Arc<HandoverMemory>,
        dead: Vec<[u8; 16]>,
    ) -> Supervisor {
        Supervisor {
            cfg,
            program,
            keep,
            dead,
            descriptors: Vec::new(),
            control: None,
            asking: Vec::new(),
            unmounted: false,
            lost: None,
        }
    }

    /// Starts the first daemon, mounts when it is connected (then `mounted` is called), and serves
    /// until the mount is gone. Returns the status to exit with.
    pub async fn run(mut self, mut mounted: impl FnMut()) -> Result<u8> {
        let failed = |e: io::Error| Error::from(e).context("listening for signals");
        let mut signals = Signals {
            upgrade: signal(SignalKind::hangup()).map_err(failed)?,
            term: signal(SignalKind::terminate()).map_err(failed)?,
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
        };
        let mut path = self.program.path.clone();
        let mut short_lives = 0;
        let mut stopping = false;
        loop {
            let mut daemon = self.start(&path)?;
            let status = loop {
                match daemon.next(&mut signals, &mut self.control).await? {
                    Event::Ended(status) => break status,
                    Event::Said(Message::Connected { name }) if self.descriptors.is_empty() => {
                        self.mount(&daemon, &name)?;
                        mounted();
                    }
                    Event::Said(Message::Serving) => {
                        daemon.serving_since = Some(Instant::now());
                        tracing::info!("daemon {} serves", daemon.child.id().unwrap_or(0));
                    }
                    Event::Said(m) => self.heard(m),
                    Event::Asked((ask, reply)) => self.asked(&daemon, ask, reply),
                    Event::Upgrade => {
                        tracing::info!(
                            "restarting the daemon with {}",
                            self.program.path.display()
                        );
                        path.clone_from(&self.program.path);
                        short_lives = 0;
                        daemon.kill();
                    }
                    Event::Stop if self.descriptors.is_empty() => daemon.kill(),
                    Event::Stop if self.unmounted => {
                        tracing::error!("stopped before all written data was safe");
                        return Ok(1);
                    }
                    Event::Stop => self.stop(&mut stopping)?,
                }
            };
            if self.descriptors.is_empty() {
                return Ok(code(status));
            }
            if status.success() {
                unread(&daemon.link).for_each(|m| self.heard(m));
                if let Some(control) = self.control.take() {
                    control.end(self.lost.take().unwrap_or_else(|| UNSAID.into())).await;
                }
                return Ok(0);
            }
            let other = status.code() == Some(i32::from(OTHER_LAYOUT));
            tracing::warn!(
                "the daemon of {} ended: {status}; starting the next",
                mountpoint::shown(&self.cfg.mountpoint)
            );
            if other {
                path = MYSELF.into();
            }
            // A program that dies at its start must not keep the machine busy.
            let served = daemon.serving_since.is_some_and(|since| since.elapsed() >= SHORT_LIFE);
            short_lives = if served { 0 } else { short_lives + 1 };
            tokio::time::sleep(pause(short_lives)).await;
        }
    }

    fn start(&self, path: &std::path::Path) -> Result<Daemon> {
        let failed = |e: io::Error| Error::from(e).context("starting the mount's daemon");
        let (link, its) = Link::pair().map_err(failed)?;
        let path = if path.exists() { path } else { MYSELF.as_ref() };
        let mut command = Command::new(path);
        command.args(&self.program.args).env(SOCKET, its.as_raw_fd().to_string());
        let child = command.spawn().map_err(failed)?;
        drop(its);
        let kept = self.keep.fd();
        let told = if self.descriptors.is_empty() {
            link.send(&Message::Connect { dead: self.dead.clone() }, &[kept])
        } else {
            let all: Vec<_> =
                std::iter::once(kept).chain(self.descriptors.iter().map(AsFd::as_fd)).collect();
            link.send(&Message::TakeOver, &all)
        };
        if let Err(e) = told {
            tracing::warn!("telling the daemon how to start: {e}");
        }
        if !self.descriptors.is_empty()
            && let Err(e) = link.send(&Message::ReadOnly(self.cfg.read_only), &[])
        {
            tracing::warn!("telling the daemon: {e}");
        }
        let watch = link.watch().map_err(failed)?;
        Ok(Daemon { child, link, watch, serving_since: None })
    }

    fn mount(&mut self, daemon: &Daemon, name: &str) -> Result<()> {
        if self.cfg.fsname.is_empty() {
            self.cfg.fsname = name.into();
        }
        // Look this up before mounting: afterwards requests to the mount are not answered yet.
        let at = self.cfg.mountpoint.canonicalize();
        self.descriptors = mount::attach(&self.cfg)?;
        self.control = at.ok().and_then(|at| listen(&at));
        let fds: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        if let Err(e) = daemon.link.send(&Message::Mounted, &fds) {
            // The daemon died; the next one takes over.
            tracing::warn!("telling the daemon that it is mounted: {e}");
        }
        Ok(())
    }

    fn heard(&mut self, m: Message) {
        match m {
            Message::State(text) => self.reply(Ask::State, &format!("state {text}")),
            Message::Counts(text) => self.reply(Ask::Stats, &format!("stats {text}")),
            Message::Unmounted => {
                self.unmounted = true;
                self.control.iter().for_each(Control::close);
            }
            Message::Ended(lost) => self.lost = Some(lost),
            m => tracing::warn!("unexpected message {m:?} from the daemon"),
        }
    }

    fn asked(&mut self, daemon: &Daemon, ask: Ask, reply: tokio::sync::oneshot::Sender<String>) {
        let message = match ask {
            Ask::ReadOnly(yes) => Message::ReadOnly(yes),
            Ask::State => Message::Ask,
            Ask::Stats => Message::Count,
        };
        let sent = daemon.link.send(&message, &[]);
        match (ask, sent) {
            (Ask::ReadOnly(yes), sent) => {
                // If the daemon is just dying, its successor is started with the new setting.
                self.cfg.read_only = yes;
                let _ = reply.send(sent.map_or_else(|e| e.to_string(), |()| "ok".into()));
            }
            (ask, Ok(())) => self.asking.push((ask, reply)),
            (Ask::State, Err(e)) => {
                drop(reply.send(format!("state the mount's daemon does not answer: {e}")))
            }
            (Ask::Stats, Err(e)) => {
                drop(reply.send(format!("the mount's daemon does not answer: {e}")))
            }
        }
    }

    /// Replies to all requests of this kind.
    fn reply(&mut self, to: Ask, text: &str) {
        let (those, others): (Vec<_>, Vec<_>) =
            self.asking.drain(..).partition(|(ask, _)| *ask == to);
        self.asking = others;
        for (_, reply) in those {
            let _ = reply.send(text.into());
        }
    }

    /// Unmounts. A mount in use continues until it is no longer used; a second signal stops it
    /// immediately.
    fn stop(&self, again: &mut bool) -> Result<()> {
        if std::mem::replace(again, true) {
            return Err(Error::new(Code::Intr, "stopped while files were open"));
        }
        match mountpoint::detach(&self.cfg.mountpoint, false) {
            Err(e) if e.code == Code::Busy => {
                tracing::warn!(
                    "{e}; no new file can be opened there; open files keep working until they are \
                     closed"
                );
                mountpoint::detach(&self.cfg.mountpoint, true)
            }
            // It is unmounted already: the daemon ends in a moment.
            Err(e) if e.code == Code::Inval => Ok(()),
            r => r,
        }
    }
}

impl Daemon {
    async fn next(
        &mut self,
        signals: &mut Signals,
        control: &mut Option<Control>,
    ) -> Result<Event> {
        let asked = async {
            match control {
                Some(c) => c.next().await,
                None => None,
            }
        };
        tokio::select! {
            biased;
            status = ended(&mut self.child) => Ok(Event::Ended(status?)),
            _ = signals.term.recv() => Ok(Event::Stop),
            _ = signals.interrupt.recv() => Ok(Event::Stop),
            _ = signals.upgrade.recv() => Ok(Event::Upgrade),
            event = said(&self.link, &self.watch) => Ok(event),
            Some(asked) = asked => Ok(Event::Asked(asked)),
        }
    }

    fn kill(&mut self) {
        if let Err(e) = self.child.start_kill() {
            tracing::warn!("killing the daemon: {e}");
        }
    }
}

/// Returns when no thread of a process can run any more. The kernel reports the end of a process
/// only when its last thread is gone. That thread may wait in the kernel for a lock of an inode or
/// a page, which is released only when the next daemon answers. If the first thread is a zombie,
/// the process was killed: its remaining threads never leave the kernel.
async fn ended(child: &mut Child) -> io::Result<ExitStatus> {
    let mut was_over = false;
    loop {
        tokio::select! {
            biased;
            status = child.wait() => return status,
            () = tokio::time::sleep(LOOK) => {}
        }
        let is_over = child.id().is_some_and(is_zombie);
        if is_over && was_over {
            tracing::warn!("a thread of the daemon that ended is still blocked in the kernel");
            return Ok(ExitStatus::from_raw(libc::SIGKILL));
        }
        was_over = is_over;
    }
}

/// Whether a process's first thread has ended (proc_pid_stat(5), field 3).
fn is_zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name before it may contain blanks and parentheses.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Messages that a daemon sent before it ended, and that were not read yet.
fn unread(link: &Link) -> impl Iterator<Item = Message> {
    std::iter::from_fn(|| link.receive().ok().flatten().map(|(message, _)| message))
}

/// The daemon's next message. Never returns after the daemon has closed its end: the process ends
/// soon.
async fn said(link: &Link, watch: &UnixDatagram) -> Event {
    match watch.async_io(Interest::READABLE, || link.receive()).await {
        Ok(Some((message, _))) => Event::Said(message),
        Ok(None) => std::future::pending().await,
        Err(e) => {
            tracing::warn!("the daemon's socket: {e}");
            std::future::pending().await
        }
    }
}

/// Listens for `strake umount` and remounts. A mount without this socket works, but unmounting does
/// not wait until written data is safe. `at`: the mountpoint, without symbolic links.
pub fn listen(at: &std::path::Path) -> Option<Control> {
    let mounts = table::mounts().ok()?;
    let device = &table::topmost(&mounts, at)?.device;
    match Control::listen(device) {
        Ok(c) => Some(c),
        Err(e) => {
            tracing::warn!(
                "unmounting will not wait for written data: the socket for {device}: {e}"
            );
            None
        }
    }
}

/// The pause before the next start, after so many short lives in a row.
fn pause(short_lives: u32) -> Duration {
    match short_lives.checked_sub(CHANCE + 1) {
        None => Duration::ZERO,
        Some(n) => SHORTEST_PAUSE.saturating_mul(1 << n.min(16)).min(LONGEST_PAUSE),
    }
}

fn code(status: ExitStatus) -> u8 {
    status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_words_of_a_daemon_are_heard_after_its_end() {
        let (link, its) = Link::pair().unwrap();
        let _watch = link.watch().unwrap();
        assert_eq!(unread(&link).count(), 0, "alive and silent");
        let daemon = Link::inherited(std::os::fd::IntoRawFd::into_raw_fd(its)).unwrap();
        let said = || [Message::Unmounted, Message::Ended("7 bytes".into())];
        for m in said() {
            daemon.send(&m, &[]).unwrap();
        }
        drop(daemon);
        assert_eq!(unread(&link).collect::<Vec<_>>(), said());
    }

    /// Simulates a thread that the kernel holds: the process's first thread has ended, another one
    /// has not.
    #[tokio::test]
    async fn a_daemon_has_ended_though_a_thread_of_it_is_held() {
        let code = format!(
            "import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({}, 0)",
            libc::SYS_exit
        );
        let mut child =
            Command::new("python3").arg("-c").arg(code).kill_on_drop(true).spawn().unwrap();
        let pid = child.id().unwrap();
        let status = tokio::time::timeout(20 * LOOK, ended(&mut child)).await.unwrap().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
        assert!(threads > 1, "it was held");
        assert_eq!(child.try_wait().unwrap(), None, "the kernel has not told of its end");
        child.kill().await.unwrap();

        let mut ends = Command::new("true").spawn().unwrap();
        assert!(ended(&mut ends).await.unwrap().success());
    }

    #[test]
    fn a_daemon_that_dies_at_its_start_is_started_ever_more_slowly() {
        let pauses: Vec<u64> = (0..7).map(|n| pause(n).as_millis() as u64).collect();
        assert_eq!(pauses, [0, 0, 0, 0, 100, 200, 400]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}
