//! The scrub: what it finds, repairs and reports, and how it proceeds.

use std::time::Duration;

use strake_proto::{
    Code,
    data::{DataRequest, FLAG_STABLE},
    opcode, pb,
};
use strake_store::{Batch, Fault, MetaStore, Reader};
use tokio::time::Instant;

use super::{
    bed::{CHAIN, Cluster, bytes, chunk},
    flip_everywhere, flip_now,
};
use crate::{
    device::mem::Op,
    engine::{
        Key,
        record::{header_key, segment_key},
    },
    server::Ask,
};

const MIB: u64 = 1 << 20;

pub(super) fn status(c: &Cluster, i: usize) -> pb::ScrubStatus {
    c.nodes[i].server.as_ref().unwrap().scrub(None).remove(0)
}

fn ask(c: &Cluster, i: usize, what: Ask) {
    c.nodes[i].server.as_ref().unwrap().scrub(Some(what));
}

/// Waits until no pass is running, an hour at most.
async fn done(c: &Cluster, i: usize) -> pb::ScrubStatus {
    let until = Instant::now() + Duration::from_secs(3600);
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let s = status(c, i);
        if !s.running && !s.under_way {
            return s;
        }
        assert!(Instant::now() < until, "the pass does not end: {s:?}");
    }
}

/// Waits until all replicas serve and know it.
pub(super) async fn in_sync(c: &Cluster) {
    c.whole().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
}

pub(super) async fn scrubbed(c: &Cluster, i: usize) -> pb::ScrubStatus {
    ask(c, i, Ask::Start);
    done(c, i).await
}

pub(super) fn key(index: u64) -> Key {
    Key { chain: CHAIN, chunk: chunk(index) }
}

/// Damages a record in the table of a target.
pub(super) fn flip_record(c: &Cluster, i: usize, k: &[u8], bit: usize) {
    let mut value = c.nodes[i].table.get(k).unwrap().unwrap().to_vec();
    let bit = bit % (value.len() * 8);
    value[bit / 8] ^= 1 << (bit % 8);
    let mut batch = Batch::default();
    batch.put(k.to_vec(), value);
    c.nodes[i].table.commit(batch).unwrap();
}

pub(super) fn counts(s: &pb::ScrubStatus) -> (u64, u64, u64) {
    (s.damaged, s.repaired, s.lost)
}

/// Chunks 0 to 3: small, of several segments, larger than one look, with a hole.
pub(super) async fn filled(c: &Cluster) -> Vec<Vec<u8>> {
    let mut all = vec![bytes(1, 5000), bytes(2, 700_000), bytes(3, 2_500_000), bytes(4, 4096)];
    for (i, data) in all.iter().enumerate() {
        c.write(i as u64, 0, data, i as u64 + 1).await.unwrap();
    }
    c.write(3, 400_000, b"behind a hole", 5).await.unwrap();
    all[3].resize(400_000, 0);
    all[3].extend(b"behind a hole");
    c.flush().await.unwrap();
    all
}

pub(super) async fn is_whole(c: &Cluster, i: u32, want: &[Vec<u8>]) {
    for (index, data) in want.iter().enumerate() {
        let got = c.read(i, index as u64, 0, 16 << 20).await.unwrap().1;
        assert!(got == *data, "chunk {index} on target {i}");
    }
}

#[tokio::test(start_paused = true)]
async fn damaged_blocks_are_repaired_counted_and_reported_once_with_their_place() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    let s = scrubbed(&c, 0).await;
    assert_eq!((counts(&s), s.chunks, s.findings.len()), ((0, 0, 0), 4, 0));
    let stored = 2 + 171 + 611 + 2;
    assert_eq!((s.pass, s.bytes, s.bytes_total), (1, stored * 4096, stored * 4096));
    // At the end of the first look, at the start of the next, and near the end of the chunk.
    for at in [MIB as usize - 4096, MIB as usize, 2_498_560 - 4096] {
        flip_everywhere(&c, 0, &want[2][at..at + 4096]).await;
    }
    let s = scrubbed(&c, 0).await;
    assert_eq!((counts(&s), s.findings.len()), ((1, 1, 0), 1), "one chunk: {:?}", s.findings);
    let f = &s.findings[0];
    assert_eq!((f.chain, f.ino, f.data_id, f.index), (CHAIN, 4, 9, 2));
    assert_eq!((f.offset, f.offset + f.len, f.bytes), (MIB as u32 - 4096, 2_498_560, 3 * 4096));
    assert_eq!(
        (f.repaired, f.lost, f.gone, f.repaired_from, f.record),
        (true, false, false, Some(1), false)
    );
    assert!(f.unix_ms > 1_700_000_000_000);
    is_whole(&c, 0, &want).await;
    let s = scrubbed(&c, 0).await;
    assert_eq!((counts(&s), s.findings.len(), s.pass), ((1, 1, 0), 1, 3), "not again");
    assert_eq!(counts(&scrubbed(&c, 1).await), (0, 0, 0), "the other one was always whole");
    let t = &c.nodes[0].server.as_ref().unwrap().status().targets[0];
    assert_eq!((t.damaged, t.repaired, t.lost), (1, 1, 0));
}

/// Any bit of any record, whether it is still in memory or not.
#[tokio::test(start_paused = true)]
async fn damaged_records_are_repaired_from_memory_or_from_the_other_copy() {
    let mut c = Cluster::start(2).await;
    let want = filled(&c).await;
    let records = |i: u64| [header_key(&key(i)), segment_key(&key(i), 0)];
    let mut expected = 0;
    for bit in (0..1200).step_by(37) {
        let k = &records(u64::from(bit as u32) % 3)[bit % 2];
        let good = c.nodes[0].table.get(k).unwrap().unwrap();
        flip_record(&c, 0, k, bit);
        expected += 1;
        let s = scrubbed(&c, 0).await;
        let f = s.findings.last().unwrap();
        assert_eq!(
            (counts(&s), f.record, f.repaired_from),
            ((expected, expected, 0), true, None),
            "bit {bit}"
        );
        c.flush().await.unwrap();
        assert_eq!(c.nodes[0].table.get(k).unwrap().unwrap(), good, "bit {bit}");
    }
    // Without memory: the other replica has the record.
    c.kill(0);
    c.boot(0).await;
    in_sync(&c).await;
    let mut expected = 0;
    for (n, bit) in [(0, 3), (1, 900), (2, 100), (0, 77)] {
        c.flush().await.unwrap();
        for k in records(n) {
            flip_record(&c, 0, &k, bit);
        }
        // In any order: a scrub finds everything, a read what it needs.
        let s = scrubbed(&c, 0).await;
        expected += 1;
        let f = s.findings.last().unwrap();
        let from = f.repaired_from;
        assert_eq!((counts(&s), f.index, f.record), ((expected, expected, 0), n, true), "{f:?}");
        assert!(from == Some(1) || from.is_none());
        is_whole(&c, 0, &want).await;
    }
    is_whole(&c, 1, &want).await;
    // And it opens again.
    c.flush().await.unwrap();
    c.kill(0);
    c.boot(0).await;
    in_sync(&c).await;
    is_whole(&c, 0, &want).await;
}

#[tokio::test(start_paused = true)]
async fn a_removed_chunk_whose_record_is_damaged_stays_removed() {
    let mut c = Cluster::start(2).await;
    filled(&c).await;
    c.trim(2, u32::MAX).await;
    c.kill(0);
    c.boot(0).await;
    in_sync(&c).await;
    flip_record(&c, 0, &header_key(&key(2)), 5);
    let s = scrubbed(&c, 0).await;
    assert_eq!(counts(&s), (1, 1, 0));
    let list = c.nodes[0].server.as_ref().unwrap().status().targets[0].chunks;
    assert_eq!(list, 2, "chunks 0 and 1");
    assert_eq!(c.read(0, 2, 0, 100).await.unwrap().1, b"");
}

#[tokio::test(start_paused = true)]
async fn without_a_good_copy_it_is_an_error_reported_once_until_it_is_written_anew() {
    let c = Cluster::start(1).await;
    let want = filled(&c).await;
    flip_everywhere(&c, 0, &want[1][8192..12_288]).await;
    for pass in 1..4 {
        let s = scrubbed(&c, 0).await;
        assert_eq!((counts(&s), s.findings.len(), s.pass), ((1, 0, 1), 1, pass));
        let f = &s.findings[0];
        assert_eq!((f.index, f.offset, f.len, f.lost, f.repaired), (1, 8192, 4096, true, false));
        assert!(f.cause.contains("no other copy"), "{}", f.cause);
        assert_eq!(c.read(0, 1, 8000, 1000).await.unwrap_err().code, Code::Corrupt);
        assert_eq!(c.read(0, 1, 0, 8192).await.unwrap().1, want[1][..8192]);
    }
    let status_of = || c.nodes[0].server.as_ref().unwrap().status();
    assert!(
        status_of().notices.iter().any(|n| n.contains("1 chunks have no good copy")),
        "{:?}",
        status_of().notices
    );
    // Damage of another part of the same chunk is no news. Overwritten, it is gone without a pass.
    c.write(1, 8192, &want[1][8192..12_288], 50).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let s = status(&c, 0);
    assert_eq!((counts(&s), s.findings[0].gone, s.findings[0].lost), ((1, 0, 0), true, false));
    is_whole(&c, 0, &want).await;
    assert!(status_of().notices.iter().all(|n| !n.contains("good copy")));
}

#[tokio::test(start_paused = true)]
async fn what_a_reader_finds_is_told_as_what_the_scrub_finds() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    flip_everywhere(&c, 1, &want[1][8192..12_288]).await;
    let reads = (0..8).map(|_| c.read(1, 1, 0, 700_000));
    for r in futures_util::future::join_all(reads).await {
        assert!(r.unwrap().1 == want[1]);
    }
    let s = status(&c, 1);
    assert_eq!(
        (counts(&s), s.findings.len(), s.pass),
        ((1, 1, 0), 1, 0),
        "once, by however many readers"
    );
    assert_eq!(
        (s.findings[0].offset, s.findings[0].len, s.findings[0].repaired_from),
        (8192, 4096, Some(0))
    );
}

/// Each copy has what the other lacks. A part that both lack affects nothing else.
#[tokio::test(start_paused = true)]
async fn copies_damaged_in_different_places_heal_each_other() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    flip_everywhere(&c, 0, &want[1][8192..12_288]).await;
    flip_everywhere(&c, 1, &want[1][400_000 / 4096 * 4096..][..4096]).await;
    assert_eq!(counts(&scrubbed(&c, 0).await), (1, 1, 0));
    assert_eq!(counts(&scrubbed(&c, 1).await), (1, 1, 0));
    is_whole(&c, 0, &want).await;
    is_whole(&c, 1, &want).await;
    for i in 0..2 {
        flip_everywhere(&c, i, &want[1][16_384..20_480]).await;
    }
    flip_everywhere(&c, 0, &want[1][32_768..36_864]).await;
    let s = scrubbed(&c, 0).await;
    assert_eq!((counts(&s), s.findings[1].lost), ((2, 1, 1), true), "{:?}", s.findings);
    assert_eq!(c.read(0, 1, 16_000, 1000).await.unwrap_err().code, Code::Corrupt);
    assert_eq!(
        c.read(0, 1, 32_768, 4096).await.unwrap().1,
        want[1][32_768..36_864],
        "that one had a good copy"
    );
}

/// Reads and writes beside lost data succeed at once.
#[tokio::test(start_paused = true)]
async fn what_has_a_good_copy_is_repaired_at_the_first_touch_beside_what_has_none() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    for i in 0..2 {
        flip_everywhere(&c, i, &want[1][16_384..20_480]).await;
    }
    flip_everywhere(&c, 0, &want[1][32_768..36_864]).await;
    flip_everywhere(&c, 0, &want[1][65_536..69_632]).await;
    assert_eq!(c.read(0, 1, 32_768, 4096).await.unwrap().1, want[1][32_768..36_864]);
    flip_everywhere(&c, 1, &want[1][40_960..45_056]).await;
    c.write(1, 41_000, b"part of a block", 50).await.unwrap();
    assert_eq!(c.read(1, 1, 40_960, 40).await.unwrap().1, want[1][40_960..41_000]);
    assert_eq!(c.read(1, 1, 41_000, 15).await.unwrap().1, b"part of a block");
    assert_eq!(c.read(0, 1, 16_384, 1).await.unwrap_err().code, Code::Corrupt);
}

/// The tail has committed the update before the head knows that its own block, which the update
/// builds on, is bad.
#[tokio::test(start_paused = true)]
async fn a_partial_write_onto_a_damaged_block_whose_good_copy_it_replaces_is_taken_from_there() {
    let c = Cluster::start(2).await;
    let mut want = filled(&c).await;
    c.nodes[0].device.set_latency(&[Op::Read], Duration::from_millis(20));
    flip_everywhere(&c, 0, &want[1][40_960..45_056]).await;
    c.write(1, 41_000, b"part of a block", 50).await.unwrap();
    want[1][41_000..41_015].copy_from_slice(b"part of a block");
    assert!(c.nodes[0].server.as_ref().unwrap().status().notices.is_empty(), "the target failed");
    is_whole(&c, 0, &want).await;
    is_whole(&c, 1, &want).await;
    // The earlier writer is still known: its repeated write is answered and not applied again.
    let first = c.write(1, 0, &want[1], 2).await.unwrap();
    assert_eq!((first.stable, first.version.number), (true, 1), "{first:?}");
    is_whole(&c, 0, &want).await;
}

/// The record with a chunk's version is damaged at the head and at the tail when an update comes.
#[tokio::test(start_paused = true)]
async fn an_update_of_a_chunk_whose_header_is_damaged_repairs_it_first() {
    let mut c = Cluster::start(2).await;
    let mut want = filled(&c).await;
    for (life, head) in [(0, 1), (1, 0)] {
        // A server that restarts becomes the tail, and has nothing in memory.
        c.kill(life);
        c.boot(life).await;
        in_sync(&c).await;
        assert_eq!(c.head() as usize, head);
        for i in 0..=life {
            let index = life * 2 + i;
            flip_record(&c, i, &header_key(&key(index as u64)), 100);
            c.write(index as u64, 100, &[7; 5000], 60 + index as u64).await.unwrap();
            let data = &mut want[index];
            data.resize(data.len().max(5100), 7);
            data[100..5100].fill(7);
        }
    }
    for i in 0..2 {
        is_whole(&c, i, &want).await;
        let s = status(&c, i as usize);
        assert_eq!(s.damaged, s.repaired);
    }
    assert_eq!(status(&c, 0).repaired, 2, "{:?}", status(&c, 0).findings);
}

/// Such a chunk is reported at once and repaired later.
#[tokio::test(start_paused = true)]
async fn damage_beneath_an_update_that_hangs_is_told_and_repaired_when_it_is_over() {
    let c = Cluster::start(2).await;
    let mut want = filled(&c).await;
    c.nodes[0].device.set_latency(&[Op::Write], Duration::from_secs(150));
    let data = bytes(9, 4096);
    let hanging = c.write_request(1, 0, &data, 70);
    assert_eq!(c.call(0, opcode::WRITE, &hanging, &data).await.unwrap_err().code, Code::TimedOut);
    flip_now(&c, 0, &want[1][8192..12_288]);
    ask(&c, 0, Ask::Start);
    tokio::time::sleep(Duration::from_secs(90)).await;
    let s = status(&c, 0);
    assert_eq!((counts(&s), s.findings.len(), s.running), ((1, 0, 0), 1, true), "{s:?}");
    let f = &s.findings[0];
    assert!(
        !f.repaired && !f.gone && f.cause.contains("has been changing") && f.offset == 8192,
        "{f:?}"
    );
    c.nodes[0].device.set_latency(&[Op::Write], Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(150)).await;
    let s = status(&c, 0);
    assert_eq!(
        (counts(&s), s.findings.len(), s.findings[0].repaired),
        ((1, 1, 0), 1, true),
        "{s:?}"
    );
    want[1][..4096].copy_from_slice(&data);
    is_whole(&c, 0, &want).await;
}

/// A table that cannot be read can be repaired only by another target.
#[tokio::test(start_paused = true)]
async fn a_table_that_cannot_be_read_costs_the_target_where_others_go_on() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    c.nodes[0].table.fail_next(Fault::Read, u64::MAX, Code::Corrupt);
    let s = scrubbed(&c, 0).await;
    assert!(s.trouble.contains("failed"), "{s:?}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(c.authority.states()[0], (1, pb::ReplicaState::ReplicaServing));
    assert_ne!(c.authority.states()[1].1, pb::ReplicaState::ReplicaServing);
    is_whole(&c, 1, &want).await;
    // The last replica serves what it can.
    c.nodes[1].table.fail_next(Fault::Read, u64::MAX, Code::Corrupt);
    let s = scrubbed(&c, 1).await;
    assert!(s.trouble.contains("injected fault"), "{s:?}");
    c.nodes[1].table.fail_next(Fault::Read, 0, Code::Corrupt);
    is_whole(&c, 1, &want).await;
    let s = scrubbed(&c, 1).await;
    assert_eq!((s.trouble.as_str(), counts(&s)), ("", (0, 0, 0)));
}

/// A copy that cannot be asked does not count as lost. Lost data is repaired when a good copy comes
/// into sync.
#[tokio::test(start_paused = true)]
async fn a_copy_that_comes_back_repairs_what_had_none() {
    let mut c = Cluster::start(2).await;
    let want = filled(&c).await;
    c.kill(1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    flip_now(&c, 0, &want[1][8192..12_288]);
    ask(&c, 0, Ask::Start);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(status(&c, 0).lost, 0, "the other one is in sync as far as is known");
    c.authority.tick();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let s = status(&c, 0);
    assert_eq!((counts(&s), s.findings.len()), ((1, 0, 1), 1), "{s:?}");
    c.boot(1).await;
    in_sync(&c).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let s = status(&c, 0);
    assert_eq!(
        (counts(&s), s.findings.len(), s.findings[0].repaired),
        ((1, 1, 0), 1, true),
        "{s:?}"
    );
    is_whole(&c, 0, &want).await;
}

/// Updates in flight, flushes, and space reused under the reader.
#[tokio::test(start_paused = true)]
async fn updates_in_flight_are_no_damage() {
    let c = Cluster::start_with(2, |cfg| {
        (cfg.scrub_rate, cfg.flush_ms) = (0, 30);
    })
    .await;
    for node in &c.nodes {
        node.device.set_latency(&[Op::Read, Op::Write, Op::Flush], Duration::from_millis(3));
    }
    let mut passes = 0;
    for i in 0..2 {
        ask(&c, i, Ask::Start);
    }
    for seq in 0..600u64 {
        let (index, offset) = (seq % 5, (seq * 7919 % 90_000) as u32);
        c.write(index, offset, &bytes(seq, 1 + (seq * 977 % 30_000) as usize), seq + 1)
            .await
            .unwrap();
        for i in 0..2 {
            if !status(&c, i).running {
                passes += 1;
                ask(&c, i, Ask::Start);
            }
        }
    }
    assert!(passes > 20, "{passes} passes");
    for i in 0..2 {
        let s = done(&c, i).await;
        assert_eq!((counts(&s), s.trouble.as_str()), ((0, 0, 0), ""));
        assert_eq!(c.nodes[i].server.as_ref().unwrap().status().targets[0].checksum_errors, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_pass_keeps_to_its_rate_and_yields_unless_it_was_asked_for() {
    let c = Cluster::start_with(1, |cfg| (cfg.scrub_rate, cfg.scrub_every_s) = (MIB, 1000)).await;
    for i in 0..16 {
        c.write(i, 0, &bytes(i, MIB as usize), i + 1).await.unwrap();
    }
    c.flush().await.unwrap();
    let took = async |busy: bool| {
        let t = Instant::now();
        let mut read = 0;
        while status(&c, 0).under_way {
            if busy {
                c.read(0, read % 16, 0, 10).await.unwrap();
                read += 1;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        t.elapsed().as_secs_f64()
    };
    let begun = async || {
        let until = Instant::now() + Duration::from_secs(1100);
        while !status(&c, 0).under_way {
            assert!(Instant::now() < until, "no pass begins");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Instant::now()
    };
    ask(&c, 0, Ask::Start);
    begun().await;
    let asked = took(true).await;
    assert!((16.0..17.0).contains(&asked), "{asked} s for 16 MiB at 1 MiB/s");
    // The next passes start by themselves.
    let first = begun().await;
    let idle = took(false).await;
    assert!((16.0..17.0).contains(&idle), "{idle} s");
    let second = begun().await;
    let apart = (second - first).as_secs_f64();
    assert!((999.0..1001.0).contains(&apart), "{apart} s from one pass to the next");
    let busy = took(true).await;
    assert!((50.0..70.0).contains(&busy), "{busy} s beside requests");
    assert_eq!(status(&c, 0).pass, 3);
}

#[tokio::test(start_paused = true)]
async fn a_pass_is_stopped_resumed_and_survives_a_restart_while_chunks_come_and_go() {
    let mut c = Cluster::start_with(1, |cfg| (cfg.scrub_rate, cfg.scrub_every_s) = (MIB, 0)).await;
    for i in 0..20 {
        let stable = || DataRequest {
            flags: FLAG_STABLE,
            ..c.write_request(i, 0, &bytes(i, MIB as usize), i + 1)
        };
        c.retry(opcode::WRITE, &bytes(i, MIB as usize), stable).await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(status(&c, 0).pass, 0, "switched off");
    ask(&c, 0, Ask::Start);
    tokio::time::sleep(Duration::from_millis(8500)).await;
    ask(&c, 0, Ask::Stop);
    tokio::time::sleep(Duration::from_secs(100)).await;
    let s = status(&c, 0);
    assert_eq!((s.pass, s.running, s.under_way, s.paused), (1, false, true, true));
    assert!((7..=9).contains(&s.chunks), "{} chunks", s.chunks);
    // One chunk after the position is removed, some before it too, and one is added.
    c.trim(15, u32::MAX).await;
    ask(&c, 0, Ask::Resume);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let before = status(&c, 0).chunks;
    assert!((9..=12).contains(&before), "{before}");
    ask(&c, 0, Ask::Stop);
    c.write(18, 0, &bytes(9, 1000), 100).await.unwrap();
    c.flush().await.unwrap();
    c.kill(0);
    c.boot(0).await;
    in_sync(&c).await;
    let again = status(&c, 0);
    assert_eq!((again.pass, again.under_way, again.running), (1, true, false), "where it was");
    assert!((before - 1..=before + 1).contains(&again.chunks), "{again:?}");
    // Once the server has settled, the pass continues by itself.
    let t = Instant::now();
    let s = done(&c, 0).await;
    assert_eq!((s.pass, s.paused), (1, false));
    assert!((15..=22).contains(&s.chunks), "{} chunks", s.chunks);
    assert!(t.elapsed() < Duration::from_secs(30 + 12), "it began anew");
    assert!(s.ended_ms > s.began_ms && s.took_ms > 100_000);
    assert_eq!(counts(&s), (0, 0, 0));
}

/// The scrub skips a chain that is out of sync: a resync handles it.
#[tokio::test(start_paused = true)]
async fn chains_out_of_sync_are_left_out_and_the_pass_ends() {
    let c = Cluster::start(2).await;
    let want = filled(&c).await;
    flip_everywhere(&c, 1, &want[1][8192..12_288]).await;
    c.net.cut.lock().insert(1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.authority.tick();
    c.authority.map.lock().chains[0].replicas[1].set_state(pb::ReplicaState::ReplicaWaiting);
    c.authority.map.lock().version += 1;
    c.authority.map.lock().chains[0].epoch += 1;
    c.net.cut.lock().clear();
    // It gets the map, and then comes into sync; the pass runs before, in between or after.
    let s = scrubbed(&c, 1).await;
    assert_eq!(s.lost, 0, "{s:?}");
    in_sync(&c).await;
    let s = scrubbed(&c, 1).await;
    assert_eq!((counts(&s), s.skipped_chains), ((1, 1, 0), 0));
    is_whole(&c, 1, &want).await;
}
