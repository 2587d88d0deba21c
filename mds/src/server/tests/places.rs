//! Where a chunk lies in a file, as storage servers ask for it.

use super::*;

#[tokio::test(start_paused = true)]
async fn servers_are_told_where_a_chunk_lies() {
    let w = World::new(3, |_| ()).await;
    let _oss = w.oss(1).await;
    until("chains", || {
        w.mds.iter().flatten().any(|(_, s)| !s.status().map.unwrap().sets.is_empty())
    })
    .await;
    let mut c = w.client(1).await;
    let dir = c.one(mkdir("d")).await.ino;
    let Op::Create(o) = create("samples", 0) else { unreachable!() };
    let f = c.one(Op::Create(pb::Create { parent: dir, ..o })).await;
    let (ino, data_id) = (f.ino, f.attr.unwrap().data_id);
    let of = |ino, data_id, index| pb::ChunkOf { ino, data_id, index };
    // Chunks of other data, of no file, of a directory, of an unknown inode.
    let chunks = vec![
        of(ino, data_id, 0),
        of(ino, data_id, 3),
        of(ino, data_id + 9, 0),
        of(99_999, 1, 0),
        of(dir, 0, 0),
        of(0, 0, 0),
    ];
    let r: pb::PlacesReply =
        w.ask(Role::Server, opcode::PLACES, &pb::PlacesRequest { chunks }).await.unwrap();
    let said: Vec<_> =
        r.places.iter().map(|p| (std::str::from_utf8(&p.path).unwrap(), p.start)).collect();
    assert_eq!(
        said,
        [("/d/samples", 0), ("/d/samples", 3 * (4 << 20)), ("", 0), ("", 0), ("", 0), ("", 0)]
    );
    // Any member answers; clients get no answer, and only a few chunks fit in one request.
    let one = pb::PlacesRequest { chunks: vec![of(ino, data_id, 0)] };
    let leader = w.leader().await;
    for i in 0..3 {
        until("it has applied it", || {
            w.mds[i].as_ref().unwrap().1.status().raft.unwrap().applied
                >= w.mds[leader].as_ref().unwrap().1.status().raft.unwrap().applied
        })
        .await;
        let m =
            w.ask_at(i, Role::Server, opcode::PLACES, one.encode_to_vec().into()).await.unwrap();
        assert_eq!(
            pb::PlacesReply::decode(m.body).unwrap().places[0].path,
            &b"/d/samples"[..],
            "member {i}"
        );
    }
    assert!(w.ask::<pb::PlacesReply>(Role::Client, opcode::PLACES, &one).await.is_err());
    let many = pb::PlacesRequest { chunks: vec![of(ino, data_id, 0); 257] };
    let e = w.ask::<pb::PlacesReply>(Role::Server, opcode::PLACES, &many).await.unwrap_err();
    assert_eq!(e.code, Code::TooBig, "{e}");
}
