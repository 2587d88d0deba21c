//! How other commands talk to a mount's process: a socket named after the mount's device, with
//! lines of text.
//!
//! `read-only` and `read-write` are answered with `ok` or with the error; `state` with `state` and
//! what is not safe yet; `stats` with `stats` and the daemon's counters, as `NAME=VALUE` separated
//! by blanks. When everything written is safe or lost, after the unmount, every connected peer gets
//! a last line `end` with what was lost.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Notify, mpsc, oneshot, watch},
};

/// Longest line, in bytes.
pub const LONGEST: usize = 4096;
/// Time limit for the last lines: a peer may not read them.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A request to a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Refuse changes from now on, or accept them.
    ReadOnly(bool),
    /// Ask what is not safe yet, and why.
    State,
    /// Ask for the counters.
    Stats,
}

/// A request, with the channel for the answer, one line.
pub type Asked = (Ask, oneshot::Sender<String>);

/// Accepts requests until it is dropped.
pub struct Control {
    asked: mpsc::Receiver<Asked>,
    end: watch::Sender<Option<String>>,
    closing: Arc<Notify>,
    listener: tokio::task::JoinHandle<()>,
}

fn address(device: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("strake-mount/{device}"))
}

impl Control {
    /// Listens for the mount with this device (`MAJOR:MINOR`), on a tokio runtime.
    pub fn listen(device: &str) -> io::Result<Control> {
        let socket = StdListener::bind_addr(&address(device)?)?;
        socket.set_nonblocking(true)?;
        let socket = UnixListener::from_std(socket)?;
        let (tell, asked) = mpsc::channel(16);
        let (end, ended) = watch::channel(None);
        let closing = Arc::new(Notify::new());
        let closed = closing.clone();
        let listener = tokio::spawn(async move {
            let admit = |peer: UnixStream| {
                if may_ask(&peer) {
                    tokio::spawn(serve(peer, tell.clone(), ended.clone()));
                }
            };
            loop {
                tokio::select! {
                    biased;
                    () = closed.notified() => break,
                    peer = socket.accept() => match peer {
                        Ok((peer, _)) => admit(peer),
                        Err(_) => return,
                    },
                }
            }
            // Peers that connected before must receive the end line: it tells them what became of
            // the mount that they unmounted.
            let Ok(waiting) = socket.into_std() else { return };
            while let Ok((peer, _)) = waiting.accept() {
                if peer.set_nonblocking(true).is_ok() {
                    UnixStream::from_std(peer).into_iter().for_each(admit);
                }
            }
        });
        Ok(Control { asked, end, closing, listener })
    }

    /// The next request.
    pub async fn next(&mut self) -> Option<Asked> {
        self.asked.recv().await
    }

    /// Stops accepting new peers: another mount may get the device's number.
    pub fn close(&self) {
        self.closing.notify_one();
    }

    /// Tells every connected peer what was lost, and waits until they have received it.
    pub async fn end(self, lost: String) {
        self.close();
        let _ = self.listener.await;
        self.end.send_replace(Some(lost));
        let _ = tokio::time::timeout(LAST_WORDS, self.end.closed()).await;
    }
}

/// Whether the peer is root or the user that runs the mount.
fn may_ask(peer: &UnixStream) -> bool {
    peer.peer_cred().is_ok_and(|c| c.uid() == 0 || c.uid() == rustix::process::geteuid().as_raw())
}

async fn serve(
    peer: UnixStream,
    tell: mpsc::Sender<Asked>,
    mut ended: watch::Receiver<Option<String>>,
) {
    let (from, mut to) = peer.into_split();
    let mut from = tokio::io::BufReader::new(from.take(1 << 20));
    let mut line = String::new();
    loop {
        line.clear();
        let ask = tokio::select! {
            biased;
            lost = lost(&mut ended) => {
                let _ = to.write_all(format!("end {}\n", one_line(&lost)).as_bytes()).await;
                return;
            }
            n = from.read_line(&mut line) => match n {
                Ok(n) if n > 0 => parse(line.trim_end()),
                _ => return,
            },
        };
        let said = match ask {
            Some(ask) => answer(&tell, ask).await,
            None => "what?".into(),
        };
        if to.write_all(format!("{}\n", one_line(&said)).as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn lost(ended: &mut watch::Receiver<Option<String>>) -> String {
    ended.wait_for(Option::is_some).await.ok().and_then(|r| r.clone()).unwrap_or_default()
}

async fn answer(tell: &mpsc::Sender<Asked>, ask: Ask) -> String {
    let (reply, said) = oneshot::channel();
    let lost = || "the mount is ending".to_string();
    if tell.send((ask, reply)).await.is_err() {
        return lost();
    }
    said.await.unwrap_or_else(|_| lost())
}

fn parse(line: &str) -> Option<Ask> {
    match line {
        "read-only" => Some(Ask::ReadOnly(true)),
        "read-write" => Some(Ask::ReadOnly(false)),
        "state" => Some(Ask::State),
        "stats" => Some(Ask::Stats),
        _ => None,
    }
}

/// The text on one line, at most [`LONGEST`] bytes.
fn one_line(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    while line.len() > LONGEST - 16 {
        line.pop();
    }
    line
}

/// A connection from a command to a mount's process.
pub struct Asker(BufReader<StdStream>);

/// How a mount's process ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// It said what was lost; empty when everything is safe.
    Said(String),
    /// It was killed, or does not say anything.
    Silent,
    /// It has not ended yet.
    NotYet,
}

impl Asker {
    /// Connects to the process of the mount with this device. Fails if there is none, or if it does
    /// not belong to `owner` or root.
    pub fn connect(device: &str, owner: u32) -> io::Result<Asker> {
        let s = StdStream::connect_addr(&address(device)?)?;
        let uid = rustix::net::sockopt::socket_peercred(&s)?.uid.as_raw();
        if uid != 0 && uid != owner {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user's process"));
        }
        Ok(Asker(BufReader::new(s)))
    }

    /// Sends a line and returns the answer.
    pub fn ask(&mut self, line: &str, limit: Duration) -> io::Result<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes())?;
        self.line(limit)
    }

    fn line(&mut self, limit: Duration) -> io::Result<String> {
        self.0.get_ref().set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        let mut line = String::new();
        io::Read::take(&mut self.0, LONGEST as u64).read_line(&mut line)?;
        match line.strip_suffix('\n') {
            Some(l) => Ok(l.into()),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Waits until the mount's process has ended, at most `limit`.
    pub fn wait(&mut self, limit: Duration) -> End {
        let until = Instant::now() + limit;
        loop {
            match self.line(until.saturating_duration_since(Instant::now())) {
                Ok(l) => match l.strip_prefix("end ") {
                    Some(lost) => return End::Said(lost.into()),
                    None if l == "end" => return End::Said(String::new()),
                    None => {}
                },
                Err(e)
                    if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
                {
                    return End::NotYet;
                }
                Err(_) => return End::Silent,
            }
            if Instant::now() >= until {
                return End::NotYet;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As on a busy machine, where the mount is gone before its process has accepted a connection.
    #[tokio::test]
    async fn who_connected_before_the_end_hears_of_it() {
        for close_first in [false, true] {
            let device = format!("early:{close_first}:{}", std::process::id());
            let control = Control::listen(&device).unwrap();
            let mut a = Asker::connect(&device, rustix::process::geteuid().as_raw()).unwrap();
            if close_first {
                control.close();
            }
            control.end("3 bytes".into()).await;
            let waiting = tokio::task::spawn_blocking(move || a.wait(Duration::from_secs(10)));
            assert_eq!(waiting.await.unwrap(), End::Said("3 bytes".into()));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn questions_and_the_end() {
        let device = format!("test:{}", std::process::id());
        let mut control = Control::listen(&device).unwrap();
        assert!(Control::listen(&device).is_err(), "taken");
        let owner = rustix::process::geteuid().as_raw();
        let asking = {
            let device = device.clone();
            std::thread::spawn(move || {
                let mut a = Asker::connect(&device, owner).unwrap();
                let limit = Duration::from_secs(10);
                assert_eq!(a.ask("nonsense", limit).unwrap(), "what?");
                assert_eq!(a.ask("read-only", limit).unwrap(), "ok");
                assert_eq!(a.wait(Duration::ZERO), End::NotYet);
                assert_eq!(a.ask("state", limit).unwrap(), "state 5 bytes  wait");
                assert_eq!(a.ask("stats", limit).unwrap(), "stats a=1");
                a.wait(limit)
            })
        };
        let answers = [
            (Ask::ReadOnly(true), "ok"),
            (Ask::State, "state 5 bytes\n wait"),
            (Ask::Stats, "stats a=1"),
        ];
        for (want, said) in answers {
            let (ask, reply) = control.next().await.unwrap();
            assert_eq!(ask, want);
            reply.send(said.into()).unwrap();
        }
        control.end("7 bytes".into()).await;
        assert_eq!(asking.join().unwrap(), End::Said("7 bytes".into()));
        assert!(Asker::connect(&device, owner).is_err());
        assert!(one_line(&"x".repeat(99_999)).len() < LONGEST);
    }
}
