//! Target folders on the real file system.

use std::{fs, path::Path};

use strake_proto::{Code, Result};

use super::*;
use crate::engine::{TargetLayout, create_target_dir, open_target_dir};

async fn create(path: &Path) -> Result<()> {
    create_target_dir(path, TargetLayout::File { size: 64 << 20 }, identity()).await
}

async fn open(path: &Path) -> Result<Arc<Engine>> {
    open_target_dir(path, Some([1; 16]), Pool::default(), Options::default()).await?.whole()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_is_created_used_and_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t0");
    create(&path).await.unwrap();
    assert_eq!(create(&path).await.unwrap_err().code, Code::Exist);
    let data = pattern(3, 3_000_000);
    let e = open(&path).await.unwrap();
    assert_eq!(open(&path).await.err().unwrap().code, Code::Busy);
    apply(&e, key(0), write(100, &data), 1).await.unwrap();
    apply(&e, key(1), write(0, &data), 1).await.unwrap();
    e.flush().await.unwrap();
    apply(&e, key(1), Update::Remove, 2).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let e = open(&path).await.unwrap();
    assert_eq!(read(&e, key(0), 100, 5_000_000).await.unwrap(), data);
    assert!(e.meta(&key(1)).unwrap().unwrap().tombstone);
    assert_eq!(e.usage().used, 733 * BLOCK);
    drop(e);
    let other = open_target_dir(&path, Some([7; 16]), Pool::default(), Options::default())
        .await
        .err()
        .unwrap();
    assert!(other.code == Code::Perm && other.message.contains("another cluster"), "{other}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_made_and_incomplete_targets_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t0");
    assert_eq!(open(&path).await.err().unwrap().code, Code::NoEnt);
    create(&path).await.unwrap();
    fs::write(path.join("INCOMPLETE"), "").unwrap();
    let e = open(&path).await.err().unwrap();
    assert!(e.code == Code::NoEnt && e.message.contains("only partly created"), "{e}");
    create(&path).await.unwrap();
    drop(open(&path).await.unwrap());
    for part in ["data", "table"] {
        let away = dir.path().join("away");
        fs::rename(path.join(part), &away).unwrap();
        let e = open(&path).await.err().unwrap();
        assert!(e.code == Code::NoEnt && e.message.contains(part), "{e}");
        fs::rename(&away, path.join(part)).unwrap();
    }
    // An empty table folder is never taken for "no chunks".
    fs::rename(path.join("table"), dir.path().join("table")).unwrap();
    fs::create_dir(path.join("table")).unwrap();
    assert_eq!(open(&path).await.err().unwrap().code, Code::NoEnt);
    assert!(
        fs::read_dir(path.join("table")).unwrap().next().is_none(),
        "a disk that is not mounted is not written to"
    );
    fs::remove_dir(path.join("table")).unwrap();
    fs::rename(dir.path().join("table"), path.join("table")).unwrap();
    drop(open(&path).await.unwrap());
    fs::File::options().write(true).open(path.join("data")).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(open(&path).await.err().unwrap().code, Code::Corrupt);
}

/// Resident memory of this process, MiB.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// Measures the cost of millions of tombstones of one file: `TOMBSTONES=N cargo test ... millions
/// -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; prints figures"]
async fn millions_of_tombstones() {
    let most: u64 = std::env::var("TOMBSTONES").map_or(2_000_000, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t0");
    create(&path).await.unwrap();
    let mut begun = std::time::Instant::now();
    let mut say = |what: &str| {
        println!("{what}: {:.1} s, {} MiB resident", begun.elapsed().as_secs_f64(), resident());
        begun = std::time::Instant::now();
    };
    let e = open(&path).await.unwrap();
    for index in 0..most {
        apply(&e, key(index), Update::Remove, index + 1).await.unwrap();
    }
    e.flush().await.unwrap();
    say(&format!("{most} tombstones are made"));
    drop(e);
    let e = open(&path).await.unwrap();
    say("opened");
    let all = async |e: &Engine| {
        let (mut from, mut seen, mut longest) = (0, 0, 0.0f64);
        loop {
            let page = std::time::Instant::now();
            let list = e.chunks_of(CHAIN, 5, 6, from, 1024).unwrap();
            longest = longest.max(page.elapsed().as_secs_f64());
            seen += list.len() as u64;
            match list.last() {
                Some(last) if list.len() == 1024 => from = last.chunk.index + 1,
                _ => return (seen, longest),
            }
        }
    };
    let (seen, longest) = all(&e).await;
    assert_eq!(seen, most);
    say(&format!("all are listed, as a cut does; the longest page took {longest:.3} s"));
    let (mut from, mut forgotten, mut longest) = (0, 0, 0.0f64);
    loop {
        let window = std::time::Instant::now();
        let done = e.forget_tombstones(CHAIN, (5, 6), from, 16_384).unwrap();
        e.flush().await.unwrap();
        longest = longest.max(window.elapsed().as_secs_f64());
        forgotten += done.forgotten as u64;
        let Some(next) = done.next else { break };
        from = next;
    }
    assert_eq!(forgotten, most);
    say(&format!("all are forgotten; the longest window of 16384 took {longest:.3} s"));
    assert_eq!(all(&e).await.0, 0);
    say("listed once more: none");
    drop(e);
    let e = open(&path).await.unwrap();
    say("opened");
    assert_eq!(all(&e).await.0, 0);
}
