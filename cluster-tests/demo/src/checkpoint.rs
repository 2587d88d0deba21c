//! A checkpoint, written by eight ranks (temporary name, fsync, rename), while the metadata leader
//! and a storage server are killed.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, sleep},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    Result,
    cluster::{Cluster, kill},
    path,
    report::Report,
    step,
};

const RANKS: usize = 8;
const BLOCK: usize = 1 << 20;
/// Each rank syncs after this many bytes, so that a part of the data is synced at the kill and a
/// part is not.
const SYNC_EVERY: u64 = 96 << 20;
/// The servers are killed once this many bytes are written, a part of them synced and a part not.
const MIN_IN_FLIGHT: u64 = 1_000_000_000;

/// How often the metadata service is probed.
const PROBE_EVERY: Duration = Duration::from_millis(50);

#[derive(Default)]
struct Progress {
    written: AtomicU64,
    synced: AtomicU64,
    finished: AtomicU64,
    /// Longest single call, in microseconds.
    longest: AtomicU64,
}

impl Progress {
    fn timed<T>(&self, call: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
        let t = Instant::now();
        let r = call();
        self.longest.fetch_max(t.elapsed().as_micros() as u64, Relaxed);
        r
    }
}

pub fn run(cluster: &Cluster, work: &Path, total: u64, report: &mut Report) -> Result<()> {
    let dir = work.join("checkpoint");
    fs::create_dir(&dir)?;
    step(format!(
        "checkpoint of {} GiB written by {RANKS} ranks; the metadata leader and a storage server die during the write",
        total >> 30
    ));
    let progress = Progress::default();
    let start_line = Barrier::new(RANKS);
    let per_rank = total / RANKS as u64;
    let t = Instant::now();
    let probed = AtomicBool::new(false);
    let (sums, killed, (metadata, probes)) = thread::scope(|s| -> Result<_> {
        let ranks: Vec<_> = (0..RANKS)
            .map(|r| {
                let (dir, progress, line) = (&dir, &progress, &start_line);
                s.spawn(move || write_rank(dir, r, per_rank, progress, line))
            })
            .collect();
        let probe = s.spawn(|| probe_metadata(work, &probed));
        let killed = kill_in_flight(cluster, &dir, &progress);
        let sums = ranks
            .into_iter()
            .map(|t| t.join().map_err(|_| "a rank panicked")?)
            .collect::<Result<Vec<String>>>();
        probed.store(true, Relaxed);
        let probe = probe.join().map_err(|_| "the probe panicked")?;
        Ok((sums?, killed?, probe?))
    })?;
    report.row("wrote the checkpoint through both failures", total, t.elapsed());
    let data = Duration::from_micros(progress.longest.load(Relaxed));
    println!(
        "    longest call of a rank {:.2} s; longest of {probes} times create and unlink {:.2} s",
        data.as_secs_f64(),
        metadata.as_secs_f64()
    );
    report.stall(data.max(metadata));
    let now = leader(&cluster.status()?).ok_or("no metadata leader after the failure")?;
    if now.1 == killed.leader.1 || now.0 == killed.leader.0 {
        return Err(format!(
            "no election took place: leader {} term {} before and after",
            now.0, now.1
        )
        .into());
    }
    println!(
        "    killed {} (leader, term {}) and {}; {} leads in term {}",
        killed.leader.0, killed.leader.1, killed.oss, now.0, now.1
    );
    fs::write(
        cluster.state_file("checkpoint.json"),
        json!({ "sha256": sums, "bytes": per_rank }).to_string(),
    )?;
    step("checkpoint verified while both are still down");
    let t = Instant::now();
    let n = verify(&dir, &cluster.state_file("checkpoint.json"))?;
    report.row("verified the checkpoint with both servers down", n, t.elapsed());
    report.verified(n);
    Ok(())
}

/// Fills a block with bytes that no other block has: a counter mixed with the rank and the block
/// number.
fn fill(block: &mut [u8], rank: usize, number: u64) {
    let mut x = (rank as u64) << 48 ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995;
    for word in block.chunks_exact_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes());
    }
}

fn write_rank(
    dir: &Path,
    rank: usize,
    bytes: u64,
    progress: &Progress,
    line: &Barrier,
) -> Result<String> {
    let (tmp, name) = (dir.join(format!(".rank{rank}.tmp")), dir.join(format!("rank{rank}.pt")));
    let failed = |what: &str, e: std::io::Error| format!("rank {rank}: {what}: {e}");
    let mut file = progress.timed(|| File::create(&tmp)).map_err(|e| failed("create", e))?;
    line.wait();
    let mut sum = Sha256::new();
    let mut block = vec![0u8; BLOCK];
    let (mut done, mut unsynced) = (0u64, 0u64);
    while done < bytes {
        let n = BLOCK.min((bytes - done) as usize);
        fill(&mut block[..n], rank, done / BLOCK as u64);
        sum.update(&block[..n]);
        progress.timed(|| file.write_all(&block[..n])).map_err(|e| failed("write", e))?;
        done += n as u64;
        unsynced += n as u64;
        progress.written.fetch_add(n as u64, Relaxed);
        if unsynced >= SYNC_EVERY {
            progress.timed(|| file.sync_data()).map_err(|e| failed("fsync", e))?;
            progress.synced.fetch_add(unsynced, Relaxed);
            unsynced = 0;
        }
    }
    progress.timed(|| file.sync_all()).map_err(|e| failed("fsync", e))?;
    progress.timed(|| fs::rename(&tmp, &name)).map_err(|e| failed("rename", e))?;
    progress.finished.fetch_add(1, Relaxed);
    Ok(hex::encode(sum.finalize()))
}

struct Killed {
    leader: (String, u64),
    oss: String,
}

/// Waits until enough is in flight, then kills the leader and a storage server that holds stripes
/// of these files and was writing a moment ago.
fn kill_in_flight(cluster: &Cluster, dir: &Path, progress: &Progress) -> Result<Killed> {
    let start = Instant::now();
    let open_enough = || {
        let (written, synced) = (progress.written.load(Relaxed), progress.synced.load(Relaxed));
        written >= MIN_IN_FLIGHT && synced > 0 && written > synced
    };
    while !open_enough() {
        if start.elapsed() > Duration::from_secs(120) {
            return Err("1 GB was not written in 120 s".into());
        }
        sleep(Duration::from_millis(5));
    }
    let before = cluster.status()?;
    let leader = leader(&before).ok_or("no metadata leader before the failure")?;
    let victim = serving_oss(cluster, &before, &dir.join(".rank0.tmp"))?;
    let (moved_before, t) = (written_by(&before, &victim), Instant::now());
    let mut moved = moved_before;
    while moved == moved_before && t.elapsed() < Duration::from_secs(5) {
        moved = written_by(&cluster.status()?, &victim);
    }
    if moved == moved_before {
        return Err(format!(
            "{victim} was idle: it wrote nothing for 5 s while ranks were writing"
        )
        .into());
    }
    let pids = [cluster.pid_of(&leader.0)?, cluster.pid_of(&victim)?];
    let (written, synced) = at_the_kill(progress, || pids.iter().try_for_each(|pid| kill(*pid)))?;
    println!(
        "    SIGKILL {} and {victim} with {} MB written, {} MB of it not yet synced",
        leader.0,
        written / 1_000_000,
        (written - synced) / 1_000_000
    );
    Ok(Killed { leader, oss: victim })
}

/// Kills at a moment when some of the written bytes are not synced and every rank still writes.
/// Returns the bytes that were written before the kill, and those that were synced after it.
fn at_the_kill(progress: &Progress, kill: impl FnOnce() -> Result<()>) -> Result<(u64, u64)> {
    let start = Instant::now();
    let mut written = progress.written.load(Relaxed);
    while progress.synced.load(Relaxed) + BLOCK as u64 > written {
        if start.elapsed() > Duration::from_secs(10) {
            return Err(
                "everything written was synced for 10 s; nothing would be in flight at the kill"
                    .into(),
            );
        }
        sleep(Duration::from_millis(1));
        written = progress.written.load(Relaxed);
    }
    kill()?;
    let synced = progress.synced.load(Relaxed);
    if progress.finished.load(Relaxed) > 0 {
        return Err("a rank had finished before the kill; give a larger --checkpoint-gib".into());
    }
    if synced >= written {
        return Err(format!(
            "all of the {written} bytes written were synced when the servers were killed"
        )
        .into());
    }
    Ok((written, synced))
}

/// Creates and removes a file every 50 ms, from before the kill until after the election. Returns
/// how long the longest round took, and how many rounds there were.
fn probe_metadata(dir: &Path, stop: &AtomicBool) -> Result<(Duration, u64)> {
    let path = dir.join(".probe");
    let (mut longest, mut number) = (Duration::ZERO, 0);
    while !stop.load(Relaxed) {
        let t = Instant::now();
        File::create_new(&path).map_err(|e| format!("probe: create: {e}"))?;
        fs::remove_file(&path).map_err(|e| format!("probe: unlink: {e}"))?;
        longest = longest.max(t.elapsed());
        number += 1;
        sleep(PROBE_EVERY.saturating_sub(t.elapsed()));
    }
    Ok((longest, number))
}

/// Name and term of the metadata leader.
fn leader(status: &Value) -> Option<(String, u64)> {
    let servers = status["servers"].as_array()?;
    servers
        .iter()
        .filter(|s| s["raft"].is_object() && s["raft"]["leader"] == s["raft"]["id"])
        .max_by_key(|s| s["raft"]["term"].as_u64())
        .map(|s| {
            (
                s["name"].as_str().unwrap_or_default().to_string(),
                s["raft"]["term"].as_u64().unwrap_or(0),
            )
        })
}

/// The storage server of a file's first stripe, by `lfs getstripe`.
fn serving_oss(cluster: &Cluster, status: &Value, file: &Path) -> Result<String> {
    let index: u64 = cluster.lfs(&["getstripe", "-i", path(file)?])?.trim().parse()?;
    let map = &status["map"];
    let find = |list: &Value, id: &Value| {
        list.as_array().and_then(|a| a.iter().find(|x| x["id"] == *id)).cloned()
    };
    let target =
        find(&map["targets"], &json!(index)).ok_or("the file's target is not in the map")?;
    let node = find(&map["nodes"], &target["node"]).ok_or("the target's node is not in the map")?;
    Ok(node["name"].as_str().unwrap_or_default().to_string())
}

fn written_by(status: &Value, name: &str) -> u64 {
    let Some(server) =
        status["servers"].as_array().and_then(|a| a.iter().find(|s| s["name"] == name))
    else {
        return 0;
    };
    server["targets"]
        .as_array()
        .map_or(0, |t| t.iter().filter_map(|t| t["write_bytes"].as_u64()).sum())
}

/// Compares every rank's file with the checksum that was made while it was written. Returns the
/// bytes verified.
pub fn verify(dir: &Path, sums: &Path) -> Result<u64> {
    let want: Value = serde_json::from_slice(&fs::read(sums)?)?;
    let files: Vec<PathBuf> = (0..RANKS).map(|r| dir.join(format!("rank{r}.pt"))).collect();
    let next = AtomicU64::new(0);
    let reader = || -> Result<u64> {
        let mut bytes = 0;
        loop {
            let r = next.fetch_add(1, Relaxed) as usize;
            let Some(path) = files.get(r) else { return Ok(bytes) };
            let (sum, n) = sha256_of(path).map_err(|e| format!("{}: {e}", path.display()))?;
            if want["bytes"] != n || want["sha256"][r] != sum {
                return Err(
                    format!("{} is not what rank {r} wrote ({n} bytes)", path.display()).into()
                );
            }
            bytes += n;
        }
    };
    thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|_| s.spawn(reader)).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| "a reader panicked")?).sum()
    })
}

fn sha256_of(path: &Path) -> Result<(String, u64)> {
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut block = vec![0u8; BLOCK];
    let mut bytes = 0;
    loop {
        match file.read(&mut block)? {
            0 => return Ok((hex::encode(sum.finalize()), bytes)),
            n => {
                sum.update(&block[..n]);
                bytes += n as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(written: u64, synced: u64) -> Progress {
        Progress { written: written.into(), synced: synced.into(), ..Progress::default() }
    }

    #[test]
    fn the_kill_comes_while_bytes_are_in_flight() {
        let mib = BLOCK as u64;
        assert_eq!(
            at_the_kill(&progress(9 * mib, 4 * mib), || Ok(())).unwrap(),
            (9 * mib, 4 * mib)
        );
        // At first everything is synced: the kill waits for more writes.
        let p = progress(4 * mib, 4 * mib);
        thread::scope(|s| {
            let kill = s.spawn(|| at_the_kill(&p, || Ok(())).map_err(|e| e.to_string()));
            p.written.fetch_add(2 * mib, Relaxed);
            assert_eq!(kill.join().unwrap().unwrap(), (6 * mib, 4 * mib));
        });
        // Everything is synced, or a rank has finished, while the kill is sent.
        let p = progress(9 * mib, 4 * mib);
        let late = || {
            p.synced.store(9 * mib, Relaxed);
            Ok(())
        };
        assert!(at_the_kill(&p, late).is_err());
        let p = progress(9 * mib, 4 * mib);
        p.finished.store(1, Relaxed);
        assert!(at_the_kill(&p, || Ok(())).is_err());
    }

    #[test]
    fn the_probe_measures_its_longest_operation() {
        let dir = std::env::temp_dir().join(format!("strake-demo-probe-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let stop = AtomicBool::new(false);
        let (longest, n) = thread::scope(|s| {
            let probe = s.spawn(|| probe_metadata(&dir, &stop).map_err(|e| e.to_string()));
            while !dir.join(".probe").exists() && !probe.is_finished() {
                thread::yield_now();
            }
            stop.store(true, Relaxed);
            probe.join().unwrap().unwrap()
        });
        assert!(n > 0 && longest > Duration::ZERO);
        let stop = AtomicBool::new(false);
        assert!(probe_metadata(&dir.join("gone"), &stop).is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
