//! Findings of damage are known again after a restart of the server, until the chunk is repaired,
//! written anew or removed.

use std::time::Duration;

use strake_proto::pb;
use strake_store::{MetaStore as _, Reader as _};

use super::{
    bed::{Cluster, chunk},
    flip_everywhere,
    scrub::{counts, filled, flip_record, in_sync, is_whole, key, scrubbed, status},
};
use crate::engine::{Key, record::finding_key, record::header_key};

async fn restart(c: &mut Cluster, i: usize) {
    // Longer than anything stays unsynced.
    tokio::time::sleep(Duration::from_secs(2)).await;
    c.kill(i);
    c.boot(i).await;
    in_sync(c).await;
}

/// The findings without the fields that change at another look.
fn places(s: &pb::ScrubStatus) -> Vec<pb::DamageFinding> {
    let mut all: Vec<_> = s
        .findings
        .iter()
        .map(|f| pb::DamageFinding { cause: String::new(), ..f.clone() })
        .collect();
    all.sort_by_key(|f| f.index);
    all
}

#[tokio::test(start_paused = true)]
async fn what_has_no_good_copy_is_known_after_a_restart() {
    let mut c = Cluster::start(1).await;
    let want = filled(&c).await;
    // After a restart none of the records is in memory.
    restart(&mut c, 0).await;
    flip_everywhere(&c, 0, &want[1][8192..12_288]).await;
    flip_record(&c, 0, &header_key(&key(2)), 77);
    let before = scrubbed(&c, 0).await;
    assert_eq!(counts(&before), (2, 0, 2), "{:?}", before.findings);
    restart(&mut c, 0).await;
    // No new look has happened.
    let s = status(&c, 0);
    assert_eq!((s.pass, counts(&s), places(&s)), (before.pass, (2, 0, 2), places(&before)));
    let said = c.nodes[0].server.as_ref().unwrap().status().notices.join("\n");
    assert!(said.contains("2 chunks have no good copy"), "{said}");
    // A damaged record of the finding loses only the finding: the next pass finds the chunk again.
    flip_record(&c, 0, &finding_key(&key(1)), 300);
    c.nodes[0].table.sync().unwrap();
    restart(&mut c, 0).await;
    assert_eq!(counts(&status(&c, 0)), (1, 0, 1));
    assert_eq!(counts(&scrubbed(&c, 0).await), (2, 0, 2));
    // A chunk that was written anew counts as such after a restart, too.
    c.write(1, 8192, &want[1][8192..12_288], 50).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(counts(&status(&c, 0)), (2, 0, 1));
    assert_eq!(c.nodes[0].table.get(&finding_key(&key(1))).unwrap(), None);
    restart(&mut c, 0).await;
    assert_eq!(counts(&status(&c, 0)), (1, 0, 1));
    assert_eq!(status(&c, 0).findings[0].index, 2);
    is_whole(&c, 0, &want[..2]).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_repaired_or_removed_is_not_found_again_after_a_restart() {
    let mut c = Cluster::start(2).await;
    let want = filled(&c).await;
    // Damage both copies of chunks 1 and 2; then repair the other replica's copy of chunk 1 by
    // hand.
    for (index, at) in [(1, 8192), (2, 4096)] {
        for i in 0..2 {
            flip_everywhere(&c, i, &want[index][at..at + 4096]).await;
        }
    }
    assert_eq!(counts(&scrubbed(&c, 0).await), (2, 0, 2));
    let kept = |c: &Cluster, i| {
        c.nodes[0].table.get(&finding_key(&Key { chunk: chunk(i), ..key(0) })).unwrap()
    };
    assert!(kept(&c, 1).is_some() && kept(&c, 2).is_some());
    c.trim(2, u32::MAX).await;
    let mut flipped = want[1][8192..12_288].to_vec();
    flipped[77] ^= 1 << 3;
    flip_everywhere(&c, 1, &flipped).await;
    restart(&mut c, 0).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let s = status(&c, 0);
    assert_eq!((s.lost, kept(&c, 1), kept(&c, 2)), (0, None, None), "{:?}", s.findings);
    restart(&mut c, 0).await;
    assert_eq!((counts(&status(&c, 0)), status(&c, 0).findings.len()), ((0, 0, 0), 0));
    is_whole(&c, 0, &want[..2]).await;
}
