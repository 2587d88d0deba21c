use strake_client::{Appended, OperationRecord, WriteKind};
use strake_fabric::KeptAt;
use strake_proto::{
    ChunkId,
    data::{BootId, Version},
};

use super::{requests::Request, *};

fn write(n: u64) -> KeptWrite {
    KeptWrite {
        kind: if n == 3 { WriteKind::Punch } else { WriteKind::Unstable },
        chain: 7,
        chunk: ChunkId { ino: n, data: 2, index: 3 },
        offset: u32::MAX,
        file_offset: 5,
        len: 100,
        session: 6,
        seq: 7,
        version: Version { epoch: 8, number: 9 },
        boot_ids: vec![
            BootId { target: 1, number: 2 },
            BootId { target: u32::MAX, number: u64::MAX },
        ],
    }
}

fn next_life(keep: &HandoverMemory) -> Arc<HandoverMemory> {
    HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap()
}

/// The record of a request, as the client sees it.
fn record(keep: &HandoverMemory, unique: u64, channel: u64, ino: Ino) -> Request {
    Request(keep.requests.put(&requests::words(unique, channel, ino)).unwrap())
}

#[test]
fn everything_is_found_again() {
    let first = HandoverMemory::create([9; 16], 8 << 20).unwrap();
    let mut b = first.pool().get_now(5000);
    b.fill(42);
    let data = b.freeze();
    let part = [data.slice(1000..1100)];
    let kept = [(8, 1, &[][..]), (9, 2, &part[..]), (10, 3, &[][..])];
    let kept = kept.map(|(order, n, bytes)| first.keep_write(order, &write(n), bytes).unwrap());
    kept[1].cut(60);
    let file = first.keep_file(77).unwrap();
    file.wrote(1000, true, (1, 2));
    file.wrote(1000, false, (1, 2));
    file.set_surplus();
    let request = record(&first, 55, 3, 77);
    request.set_mutation(6, 10);
    assert_eq!(request.append(), None);
    request.set_append(Some(Appended { offset: 0, end: 9, session: 5 }));
    request.set_append(Some(Appended { offset: 0, end: 10, session: 6 }));
    assert_eq!(request.data(), None);
    request.set_data(6, 20);
    first.set_session(6);
    // The process is killed here.
    kept.into_iter().for_each(std::mem::forget);
    std::mem::forget((file, request, data));

    let second = next_life(&first);
    assert_eq!((second.uuid(), second.former_session()), ([9; 16], 6));
    assert_eq!((second.in_doubt(6), second.in_doubt(7)), (vec![10], vec![]));
    let writes = second.left_writes();
    assert_eq!((writes[0].order, &writes[0].write), (8, &write(1)));
    assert_eq!((writes[2].order, &writes[2].write), (10, &write(3)), "a punch");
    assert_eq!(writes[1].write, KeptWrite { len: 60, ..write(2) });
    assert!(writes[0].bytes.is_none() && writes[2].bytes.is_none());
    let bytes = writes[1].bytes.as_ref().unwrap();
    assert!(bytes.len() == 60 && bytes.iter().all(|b| *b == 42));
    let files = second.left_files();
    assert_eq!(
        (files[0].ino(), files[0].unreported(), files[0].surplus()),
        (77, Some((1000, true, (1, 2))), true)
    );
    files[0].reported();
    assert_eq!(files[0].unreported(), None);
    files[0].wrote(5, false, (1, 2));
    assert_eq!(files[0].unreported(), Some((5, false, (1, 2))));
    let request = Request(std::mem::take(&mut second.left.lock().requests).pop().unwrap());
    let append = Appended { offset: 0, end: 10, session: 6 };
    assert_eq!(
        (request.mutation(), request.data(), request.append()),
        (Some((6, 10)), Some((6, 20)), Some((77, append)))
    );
    let request = LeftRequest::of(request.0);
    assert_eq!((request.unique, request.channel), (55, 3));
    assert!(second.left_requests().is_empty() && second.left_writes().is_empty());
}

#[test]
fn what_is_not_sent_is_kept_with_its_bytes_only() {
    let first = HandoverMemory::create([9; 16], 4 << 20).unwrap();
    let held = KeptWrite { kind: WriteKind::Held { uid: u32::MAX, gid: 5 }, seq: 0, ..write(1) };
    let sent = KeptWrite { kind: WriteKind::Sent, ..write(1) };
    for w in [&held, &sent] {
        let elsewhere = Buf::copy_from(&[1; 100]);
        assert!(first.keep_write(1, w, &[elsewhere]).is_none());
        let bytes = [first.pool().get_now(100).freeze()];
        std::mem::forget(first.keep_write(1, w, &bytes).unwrap());
        std::mem::forget(bytes);
    }
    let left = next_life(&first).left_writes();
    let mut kinds: Vec<_> = left.iter().map(|l| l.write.clone()).collect();
    kinds.sort_by_key(|w| w.kind == WriteKind::Sent);
    assert_eq!(kinds, [held, sent]);
}

#[test]
fn another_version_is_refused() {
    let keep = HandoverMemory::create([1; 16], 4 << 20).unwrap();
    keep.word(head::LAYOUT).store(LAYOUT + 1, Relaxed);
    let again = HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap());
    assert_eq!(again.err().unwrap().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn the_next_one_knows_the_newest_metadata_servers() {
    let keep = HandoverMemory::create([1; 16], 4 << 20).unwrap();
    assert_eq!(keep.mds(), []);
    let at = |host: &str, port| Endpoint::Tcp(host.into(), port);
    let (old, new) = ([at("a", 1), at("much-longer-name", 2)], [at("c", 3)]);
    keep.set_mds(&old);
    assert_eq!(next_life(&keep).mds(), old);
    keep.set_mds(&new);
    assert_eq!(next_life(&keep).mds(), new);
    // Killed while writing the next addresses: the previous ones stay valid.
    keep.word(head::MDS_TEXTS[0]).store(u64::MAX, Relaxed);
    assert_eq!(next_life(&keep).mds(), new);
    // More addresses than fit, and an invalid word.
    let many: Vec<Endpoint> = (0..200).map(|n| at(&format!("host-{n}"), 7400)).collect();
    keep.set_mds(&many);
    let kept = next_life(&keep).mds();
    assert!(kept.len() > 40 && kept[..] == many[..kept.len()], "{}", kept.len());
    keep.word(head::MDS).store(u64::MAX, Relaxed);
    assert_eq!(keep.mds(), []);
    keep.word(head::MDS).store(u64::MAX << 8 | 1, Relaxed);
    keep.mds();
}

#[test]
fn a_damaged_place_has_no_bytes() {
    let keep = HandoverMemory::create([1; 16], 4 << 20).unwrap();
    let at = KeptAt { block: 0, capacity: 4096, start: 4000, len: 100 };
    let r = keep.writes.put(&writes::words(1, &write(1), Some(at))).unwrap();
    assert!(writes::left(vec![r], keep.pool())[0].bytes.is_none());
}
