//! kill -9 in the middle of commits: synced data is there, and no batch is there in part.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use strake_store::{Batch, FjallStore, MetaStore, Reader};

const DIR: &str = "STRAKE_STORE_KILL_DIR";
const KEYS: u64 = 4;

fn key(batch: u64, k: u64) -> Vec<u8> {
    [batch.to_be_bytes(), k.to_be_bytes()].concat()
}

fn last_of(s: &FjallStore) -> u64 {
    s.get(b"last").unwrap().map_or(0, |v| u64::from_be_bytes(v[..].try_into().unwrap()))
}

/// The process that is killed: does nothing unless the test below started it. Prints which batch
/// is synced.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let s = FjallStore::open(dir).unwrap();
    for i in last_of(&s) + 1.. {
        let mut b = Batch::default();
        for k in 0..KEYS {
            b.put(key(i, k), vec![i as u8; 100 + (i as usize * 37) % 4000]);
        }
        b.put("last", i.to_be_bytes().to_vec());
        s.commit(b).unwrap();
        if i % 16 == 0 {
            s.sync().unwrap();
            println!("synced {i}");
        }
    }
}

#[test]
fn synced_batches_survive_and_none_is_half() {
    let dir = tempfile::tempdir().unwrap();
    let mut before = 0;
    for round in 0..4 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill::child", "--nocapture"])
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut synced = 0;
        let mut seen = 0;
        for line in lines {
            let line = line.unwrap();
            let Some((_, n)) = line.split_once("synced ") else { continue };
            synced = n.parse().unwrap();
            seen += 1;
            if seen == 20 + round * 7 {
                child.kill().unwrap(); // SIGKILL; what it printed meanwhile is read to the end
            }
        }
        child.wait().unwrap();
        assert!(seen >= 20 + round * 7, "the child died by itself after {seen} syncs");

        let s = FjallStore::open(dir.path()).unwrap();
        let last = last_of(&s);
        assert!(
            last >= synced && synced > before,
            "synced {synced}, found {last}, before {before}"
        );
        for i in 1..=last {
            for k in 0..KEYS {
                let v = s
                    .get(&key(i, k))
                    .unwrap()
                    .unwrap_or_else(|| panic!("batch {i} of {last} lacks key {k}"));
                assert!(
                    v.len() == 100 + (i as usize * 37) % 4000 && v.iter().all(|b| *b == i as u8)
                );
            }
        }
        let count = s.prefix(&[0]).count() as u64;
        assert_eq!(count, last * KEYS, "keys of a batch after the last");
        before = last;
    }
}
