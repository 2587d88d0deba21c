//! Damaged blocks, failing devices and full ones.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_damaged_block_is_repaired_from_another_replica_and_never_returned() {
    let c = Cluster::start(2).await;
    let data = bytes(3, 64 << 10);
    c.write(0, 0, &data, 1).await.unwrap();
    c.flush().await.unwrap();
    for damaged in 0..2u32 {
        flip_everywhere(&c, damaged, &data[8192..12288]).await;
        assert!(c.read(damaged, 0, 0, 64 << 10).await.unwrap().1 == data);
        let status = c.nodes[damaged as usize].server.as_ref().unwrap().status();
        assert!(status.targets[0].checksum_errors > 0);
    }
    // A partial write onto a damaged block of either replica needs the good copy first.
    for (seq, damaged) in [(2, 0u32), (3, 1)] {
        flip_everywhere(&c, damaged, &data[16384..20480]).await;
        c.write(0, 16384 + 4000, &[seq as u8], seq).await.unwrap();
        let mut want = data[16384..20384].to_vec();
        want.extend([seq as u8]);
        assert!(c.read(damaged, 0, 16384, 4001).await.unwrap().1 == want);
        c.write(0, 16384, &data[16384..20480], seq + 10).await.unwrap();
    }
    flip_everywhere(&c, 0, &data[8192..12288]).await;
    flip_everywhere(&c, 1, &data[8192..12288]).await;
    let e = c.read(0, 0, 0, 64 << 10).await.unwrap_err();
    assert_eq!(e.code, Code::Corrupt, "no good copy is left");
}

/// Damages every block of a target's device with these contents.
pub(super) async fn flip_everywhere(c: &Cluster, target: u32, block: &[u8]) {
    c.flush().await.unwrap();
    flip_now(c, target, block);
}

pub(super) fn flip_now(c: &Cluster, target: u32, block: &[u8]) {
    let device = &c.nodes[target as usize].device;
    let found = device.find(&block[..4000]);
    assert!(!found.is_empty(), "target {target} does not hold the block");
    found.into_iter().for_each(|at| device.flip_bit(at + 77, 3));
}

#[tokio::test(start_paused = true)]
async fn a_failed_device_leaves_the_chain_and_service_goes_on() {
    let c = Cluster::start(3).await;
    c.write(0, 0, b"before", 1).await.unwrap();
    c.nodes[1].device.fail(crate::device::mem::Op::Write, 0, Code::Io);
    c.write(1, 0, &bytes(1, 8192), 2).await.unwrap();
    let serving =
        c.authority.states().iter().filter(|(_, s)| *s == pb::ReplicaState::ReplicaServing).count();
    assert_eq!(serving, 2, "{:?}", c.authority.states());
    assert_eq!(c.read(2, 1, 0, 8192).await.unwrap().1, bytes(1, 8192));
    assert!(!c.nodes[1].server.as_ref().unwrap().status().notices.is_empty());
}

/// The file system below a target is full although the target itself has space: other replicas have
/// updates that it cannot store.
#[tokio::test(start_paused = true)]
async fn a_target_that_lacks_space_leaves_its_chain_and_comes_back_by_itself() {
    for victim in 0..3 {
        let c = Cluster::start(3).await;
        c.write(0, 0, b"before", 1).await.unwrap();
        c.nodes[victim].device.fail(crate::device::mem::Op::Write, 0, Code::NoSpc);
        let (epoch, data) = (c.authority.chain().epoch, bytes(1, 8192));
        let result = c.write(1, 0, &data, 2).await;
        // The tail has no successor: it refuses before any replica has the update. The others
        // find out too late.
        match victim {
            2 => assert_eq!(result.unwrap_err().code, Code::NoSpc),
            _ => assert_eq!(result.unwrap().version.number, 1),
        }
        assert_eq!(
            c.authority.chain().epoch > epoch,
            victim != 2,
            "target {victim}: {:?}",
            c.authority.states()
        );
        c.whole().await;
        c.write(1, 4096, b"after", 3).await.unwrap();
        for t in 0..3 {
            let (_, got) = c.read(t, 1, 4096, 5).await.unwrap();
            assert_eq!(got, b"after", "target {victim} was out, {t} is read");
            assert_eq!(c.read(t, 0, 0, 6).await.unwrap().1, b"before");
        }
        assert!(c.nodes[victim].server.as_ref().unwrap().status().notices.is_empty());
    }
}

/// The file system below a target has no space for its table, while the other replicas could apply
/// the truncations that wait for it.
#[tokio::test(start_paused = true)]
async fn a_target_whose_table_is_full_leaves_its_chain_when_asked() {
    use strake_store::mem::Fault;
    for victim in 0..3 {
        let c = Cluster::start(3).await;
        c.write(0, 0, b"before", 1).await.unwrap();
        c.whole().await;
        let (epoch, table) = (c.authority.chain().epoch, &c.nodes[victim].table);
        table.fail_next(Fault::Commit, u64::MAX, Code::NoSpc);
        let began = Instant::now();
        c.write(1, 0, b"not flushed", 2).await.unwrap();
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert!(c.authority.full.lock().is_empty(), "for a moment only, as far as is known");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(*c.authority.full.lock(), [victim as u32].into());
        assert_eq!(c.authority.chain().epoch, epoch, "it waits until it is asked");
        c.authority.step_out.lock().insert(victim as u32);
        while c.authority.chain().epoch == epoch {
            assert!(began.elapsed() < Duration::from_secs(5));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        c.authority.step_out.lock().clear();
        let server = c.nodes[victim].server.as_ref().unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(
            c.authority.chain().serving().count(),
            2,
            "target {victim} stays out while its table is full"
        );
        assert!(!server.status().notices.is_empty());
        c.write(1, 4096, b"after", 3).await.unwrap();
        table.fail_next(Fault::Commit, 0, Code::NoSpc);
        c.whole().await;
        for t in 0..3 {
            assert_eq!(
                c.read(t, 1, 4096, 5).await.unwrap().1,
                b"after",
                "target {victim} was out, {t} is read"
            );
            assert_eq!(c.read(t, 0, 0, 6).await.unwrap().1, b"before");
        }
        assert!(server.status().notices.is_empty());
    }
}

/// A late answer asks for something that no longer holds.
#[tokio::test(start_paused = true)]
async fn a_target_with_room_in_its_table_stays_though_it_is_asked_to_leave() {
    let c = Cluster::start(3).await;
    let epoch = c.authority.chain().epoch;
    c.authority.step_out.lock().extend([0, 1, 2, 77]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.write(0, 0, b"goes on", 1).await.unwrap();
    assert_eq!(c.authority.chain().epoch, epoch);
}
