//! One directory or file that all clients have cached, and one client changes it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Client, Creds, SetAttr};
use strake_proto::Code;
use tokio::time::{Instant, sleep};

use crate::{Result, clients::Clients, report::Report};

/// Pause between two storms, because an inode that is recalled often is not leased for a while.
const PAUSE: Duration = Duration::from_millis(400);
const HOT: Duration = Duration::from_secs(5);
/// How often each client looks while the inode is hot.
const LOOK: Duration = Duration::from_millis(250);

pub async fn measure(clients: &Clients, rounds: usize, report: &mut Report) -> Result<()> {
    let (c, me) = (&clients.all[0], &clients.me);
    let dir = c.mkdir(me, c.root(), b"storm", 0o755).await?.ino;
    let file = c.mknod(me, c.root(), b"storm-file", 0o100_644u32, 0).await?.ino;
    storms(clients, rounds, dir, Kind::Names, report).await?;
    storms(clients, rounds, file, Kind::Mode, report).await?;
    hot(clients, dir, report).await?;
    sizes(clients, rounds, file, report).await
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Names in a directory are made and removed.
    Names,
    /// A file's mode changes.
    Mode,
}

async fn change(c: &Client, me: &Creds, ino: u64, kind: Kind, n: usize) -> Result<()> {
    match kind {
        Kind::Names if n.is_multiple_of(2) => {
            c.mknod(me, ino, b"name", 0o100_644u32, 0).await.map(drop)?
        }
        Kind::Names => c.unlink(me, ino, b"name").await?,
        Kind::Mode => {
            let mode = Some(0o600 + (n % 8) as u32);
            c.setattr(me, SetAttr { ino, mode, ..Default::default() }).await?;
        }
    }
    Ok(())
}

/// All clients hold a lease, one changes the inode, and all look again.
async fn storms(
    clients: &Clients,
    rounds: usize,
    ino: u64,
    kind: Kind,
    report: &mut Report,
) -> Result<()> {
    let what = if kind == Kind::Names { "directory" } else { "file" };
    let (mut answered, mut again, mut least) = (Vec::new(), Vec::new(), usize::MAX);
    let mut requests = Vec::new();
    for n in 0..rounds {
        let me = clients.me.clone();
        let look = move |_, c: Client| {
            let me = me.clone();
            async move { Ok(c.getattr(&me, ino).await.map(drop)?) }
        };
        let looked = clients.each(look).await?;
        if n > 0 {
            again.extend(looked);
        }
        least = least.min(clients.hold(ino).await?);
        let (counted, began) = (clients.counts(), Instant::now());
        change(&clients.all[n % clients.all.len()], &clients.me, ino, kind, n).await?;
        answered.push(began.elapsed());
        requests.push(clients.counts().since(&counted).of(strake_proto::opcode::RECALL));
        sleep(PAUSE).await;
    }
    answered.sort_unstable();
    again.sort_unstable();
    requests.sort_unstable();
    report.times(
        format!("a {what} that all hold is changed: until it is answered"),
        "p50 60 ms, p99 120 ms",
        &answered,
    );
    let median = requests[requests.len() / 2];
    let measured = format!("{median} acknowledgements (median), {least} holders at least");
    report.row(format!("messages of that, {what}"), "999", measured, median as f64);
    report.times(format!("then all look at once, {what}"), "p50 60 ms, p99 120 ms", &again);
    Ok(())
}

/// One client changes a directory without pause, while all others look at it again and again.
async fn hot(clients: &Clients, dir: u64, report: &mut Report) -> Result<()> {
    let (stop, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let counted = clients.counts();
    let lookers = clients.all[1..].iter().enumerate().map(|(i, c)| {
        let (c, me, stop, looks) = (c.clone(), clients.me.clone(), stop.clone(), looks.clone());
        tokio::spawn(async move {
            sleep(LOOK * (i % 16) as u32 / 16).await;
            while !stop.load(Relaxed) {
                let began = Instant::now();
                match c.lookup(&me, dir, b"name").await {
                    Err(e) if e.code != Code::NoEnt => return Err(e),
                    _ => looks.lock().push(began.elapsed()),
                }
                sleep(LOOK).await;
            }
            Ok(())
        })
    });
    let lookers: Vec<_> = lookers.collect();
    let (mut answered, began) = (Vec::new(), Instant::now());
    // Whether the name exists depends on the number of rounds in `storms()`.
    let there = clients.all[0].lookup(&clients.me, dir, b"name").await.is_ok();
    for n in usize::from(there).. {
        if began.elapsed() > HOT {
            break;
        }
        let one = Instant::now();
        change(&clients.all[0], &clients.me, dir, Kind::Names, n).await?;
        answered.push(one.elapsed());
    }
    stop.store(true, Relaxed);
    for l in lookers {
        l.await??;
    }
    let mut looks = std::mem::take(&mut *looks.lock());
    looks.sort_unstable();
    answered.sort_unstable();
    let what = "a directory changed without pause while all look every 250 ms";
    report.times(format!("{what}: changes"), "p50 10 ms, p99 100 ms", &answered);
    report.times(format!("{what}: looks"), "p50 10 ms, p99 100 ms", &looks);
    let measured =
        format!("{} changes, {}", answered.len(), clients.counts().since(&counted).text());
    report.row(
        format!("{what}: in 5 s"),
        "500 changes, 15,000 metadata, 2,000 recall",
        measured,
        answered.len() as f64,
    );
    Ok(())
}

/// One client writes at the end of a file, and all others ask for its size at once.
async fn sizes(clients: &Clients, rounds: usize, ino: u64, report: &mut Report) -> Result<()> {
    let writer = &clients.all[0];
    let (file, _) = writer.open(&clients.me, ino, libc::O_RDWR as u32).await?;
    let (mut times, mut requests) = (Vec::new(), Vec::new());
    for n in 0..rounds as u64 {
        file.write_all_at(n, b"x").await?;
        let (me, counted) = (clients.me.clone(), clients.counts());
        let look = move |i, c: Client| {
            let me = me.clone();
            async move {
                let size = if i == 0 { n + 1 } else { c.getattr(&me, ino).await?.size };
                if size < n + 1 {
                    Err(format!("client {i} sees {size} of {} bytes", n + 1).into())
                } else {
                    Ok(())
                }
            }
        };
        times.extend(clients.each(look).await?.split_off(1));
        requests.push(clients.counts().since(&counted).requests.values().sum::<u64>());
        sleep(PAUSE / 4).await;
    }
    file.close().await?;
    times.sort_unstable();
    requests.sort_unstable();
    report.times(
        "one writes a file, all others ask for its size at once",
        "p50 80 ms, p99 150 ms",
        &times,
    );
    let median = requests[requests.len() / 2];
    let measured = format!("{median} (median), renewals of the meantime included");
    report.row("requests of that", "1,010", measured, median as f64);
    Ok(())
}
