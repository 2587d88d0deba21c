//! The load: threads that write, sync, rename and unlink until the mount returns an error or the
//! round ends.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::{fd::IntoRawFd as _, unix::fs::OpenOptionsExt as _},
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

use crate::{
    Result,
    journal::{Journal, Promise, sha256},
};

const THREADS: u64 = 4;

/// Runs the writers while `harm` runs; they stop at their first error or soon after `harm` returns.
pub fn under_load<T>(
    mount: &Path,
    round: u32,
    seed: u64,
    journal: &Journal,
    harm: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        let threads: Vec<_> = (0..THREADS)
            .map(|t| {
                let stop = &stop;
                s.spawn(move || writer(mount, &format!("r{round}-t{t}"), seed ^ t, journal, stop))
            })
            .collect();
        let harmed = harm();
        stop.store(true, Relaxed);
        for t in threads {
            t.join().map_err(|_| "a writer panicked")??;
        }
        harmed
    })
}

/// An error of the mount ends the writer without a message, because its servers were killed. An
/// error of the journal ends the test.
fn writer(
    mount: &Path,
    prefix: &str,
    seed: u64,
    journal: &Journal,
    stop: &AtomicBool,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut number = 0u32;
    while !stop.load(Relaxed) {
        let name = format!("{prefix}-{number}");
        number += 1;
        match rng.random_range(0..5) {
            0 => match whole(mount, &name, &mut rng) {
                Ok(p) => journal.note(&p)?,
                Err(_) => return Ok(()),
            },
            1 => {
                if !growing(mount, &name, &mut rng, journal)? {
                    return Ok(());
                }
            }
            2 => match closed(mount, &name, &mut rng) {
                Ok(p) => journal.note(&p)?,
                Err(_) => return Ok(()),
            },
            3 => {
                if !at_once(mount, &name, &mut rng, journal)? {
                    return Ok(());
                }
            }
            _ => match removed(mount, &name, &mut rng) {
                Ok(p) => journal.note(&p)?,
                Err(_) => return Ok(()),
            },
        }
    }
    Ok(())
}

fn bytes(rng: &mut StdRng, most: usize) -> Vec<u8> {
    let mut b = vec![0; rng.random_range(1..most)];
    rng.fill_bytes(&mut b);
    b
}

fn has(name: &str, content: &[u8]) -> Promise {
    Promise { name: name.into(), content: Some((content.len() as u64, sha256(content))) }
}

/// Writes a file under a temporary name, syncs and renames it: it is there completely or not at
/// all.
fn whole(mount: &Path, name: &str, rng: &mut StdRng) -> io::Result<Promise> {
    let content = bytes(rng, 3 << 20);
    let tmp = mount.join(format!("{name}.tmp"));
    let mut f = File::create(&tmp)?;
    f.write_all(&content)?;
    f.sync_all()?;
    fs::rename(&tmp, mount.join(name))?;
    Ok(has(name, &content))
}

/// Writes a growing file and syncs it again and again; each sync promises the bytes so far. Returns
/// false when the mount failed.
fn growing(mount: &Path, name: &str, rng: &mut StdRng, journal: &Journal) -> Result<bool> {
    let mut content = Vec::new();
    let Ok(mut f) = OpenOptions::new().create_new(true).append(true).open(mount.join(name)) else {
        return Ok(false);
    };
    for _ in 0..8 {
        let more = bytes(rng, 200_000);
        content.extend_from_slice(&more);
        if f.write_all(&more).and_then(|()| f.sync_data()).is_err() {
            return Ok(false);
        }
        journal.note(&has(name, &content))?;
    }
    Ok(true)
}

/// Writes a file and closes it without a sync: a close that succeeds promises durability, too.
fn closed(mount: &Path, name: &str, rng: &mut StdRng) -> io::Result<Promise> {
    let content = bytes(rng, 2 << 20);
    let mut f = File::create_new(mount.join(name))?;
    f.write_all(&content)?;
    // Dropping the file would hide an error.
    // SAFETY: the descriptor was just given up by its owner and is used nowhere else.
    match unsafe { libc::close(f.into_raw_fd()) } {
        0 => Ok(has(name, &content)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes a growing file with `O_SYNC` or `O_DSYNC`: each write is a promise. Returns false when
/// the mount failed.
fn at_once(mount: &Path, name: &str, rng: &mut StdRng, journal: &Journal) -> Result<bool> {
    let flag = if rng.random() { libc::O_SYNC } else { libc::O_DSYNC };
    let open =
        OpenOptions::new().create_new(true).append(true).custom_flags(flag).open(mount.join(name));
    let (Ok(mut f), mut content) = (open, Vec::new()) else { return Ok(false) };
    for _ in 0..8 {
        let more = bytes(rng, 60_000);
        // A call may write only a part; that part counts.
        match f.write(&more) {
            Ok(n) => content.extend_from_slice(&more[..n]),
            Err(_) => return Ok(false),
        }
        journal.note(&has(name, &content))?;
    }
    Ok(true)
}

/// Makes a file and removes it.
fn removed(mount: &Path, name: &str, rng: &mut StdRng) -> io::Result<Promise> {
    let path = mount.join(name);
    fs::write(&path, bytes(rng, 100_000))?;
    fs::remove_file(path)?;
    Ok(Promise { name: name.into(), content: None })
}
