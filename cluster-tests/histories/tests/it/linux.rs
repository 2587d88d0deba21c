//! The model against Linux: what threads do on a tmpfs at the same time is linearizable.

use std::{path::Path, sync::Arc, time::Instant};

use rand::{SeedableRng, rngs::StdRng};
use strake_histories::{
    Head, History, Record, check,
    choose::{Chooser, Mix},
    explain::explain,
    mount::Mount,
    search::LIMIT,
};

fn on_linux(threads: u32, ops: u32, seed: u64) {
    // A file system that does not reuse inode numbers.
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        return println!("skipped: /dev/shm is missing");
    }
    let dir = tempfile::tempdir_in(shm).unwrap();
    let paths: Arc<Vec<String>> =
        Arc::new(["one", "two"].map(|n| format!("{}/{n}", dir.path().display())).into());
    paths.iter().for_each(|p| std::fs::create_dir(p).unwrap());
    let begun = Instant::now();
    let one = |client: u32| {
        let paths = paths.clone();
        move || {
            let mut mount = Mount::without_umask();
            let roots: Vec<u64> = paths.iter().map(|p| mount.enter(p).unwrap()).collect();
            let mut chooser = Chooser::new(Mix::Kernel, &roots, client);
            let mut rng = StdRng::seed_from_u64(seed << 8 | u64::from(client));
            let mut records = Vec::new();
            for _ in 0..ops {
                let op = chooser.next(&mut rng);
                let call = begun.elapsed().as_nanos() as u64;
                let outcome = mount.perform(&op);
                let reply = begun.elapsed().as_nanos() as u64;
                chooser.learn(&op, &outcome);
                records.push(Record { client, call, reply, op, outcome });
            }
            (roots, records)
        }
    };
    let threads: Vec<_> = (0..threads).map(|client| std::thread::spawn(one(client))).collect();
    let mut history = History {
        head: Head { source: format!("tmpfs, seed {seed}"), ..Head::default() },
        records: Vec::new(),
    };
    for t in threads {
        let (roots, records) = t.join().unwrap();
        history.head.roots = roots;
        history.records.extend(records);
    }
    let unknown = |r: &Record| matches!(r.outcome, strake_histories::Outcome::Unknown(_));
    assert!(!history.records.iter().any(unknown), "{history:#?}");
    let verdict = check(&history, LIMIT);
    assert!(verdict.is_linearizable(), "seed {seed}: {}", explain(&history, &verdict, LIMIT));
}

#[test]
fn linux_does_what_the_model_does() {
    (0..40).for_each(|seed| on_linux(1, 200, seed));
}

#[test]
fn threads_on_linux_are_linearizable() {
    (0..40).for_each(|seed| on_linux(6, 40, seed));
}
