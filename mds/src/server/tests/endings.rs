//! What storage servers learn of rights that ended, and what capabilities say about when they were
//! given.

use strake_proto::Capability;

use super::*;

fn open_cap(r: &pb::OpResult) -> Capability {
    let cap: [u8; CAP_LEN] = r.capability[..].try_into().unwrap();
    CapKey::from_cluster_key(&KEY).open(&cap, 0).unwrap()
}

fn open(ino: u64, flags: u32) -> Op {
    Op::Open(pb::Open { ino, flags })
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn storage_servers_hear_within_a_second_what_ended() {
    let mut w = World::new(3, |_| ()).await;
    let oss = w.oss(1).await;
    until("chains", || !oss.map.lock().chains.is_empty()).await;
    let (session, ino, reads) = {
        let (mut c, mut d) = (w.client(1).await, w.client(2).await);
        let made = c.one(create("f", 2)).await;
        let (first, ino) = (open_cap(&made), made.ino);
        sleep(SECOND).await;
        assert!(!oss.refuses(&first, Rights::READ) && !oss.refuses(&first, Rights::WRITE));
        let release = |writer| {
            vec![
                Op::Close(pb::Close { ino }),
                Op::Release(pb::Release { ino, writer, surplus: false }),
            ]
        };
        // Released: readers may read, and one that opens it again may write.
        c.run(release(made.writer)).await.unwrap();
        let again = c.one(open(ino, 2)).await;
        sleep(SECOND).await;
        assert!(
            oss.refuses(&first, Rights::WRITE.and(Rights::TRIM))
                && !oss.refuses(&first, Rights::READ)
        );
        assert!(!oss.refuses(&open_cap(&again), Rights::WRITE));
        c.run(release(again.writer)).await.unwrap();
        let reads = open_cap(&d.one(open(ino, 0)).await);
        let request = d.request(vec![set_size(ino, 0), open(ino, 0)]);
        let both = d.send(&request).await.unwrap();
        sleep(SECOND).await;
        assert!(
            oss.refuses(&open_cap(&again), Rights::WRITE) && !oss.refuses(&reads, Rights::READ)
        );
        assert!(!oss.refuses(&open_cap(&both[1]), Rights::READ));
        c.one(Op::Setattr(pb::SetAttr { ino, mode: Some(0o600), ..Default::default() })).await;
        // A list that ran is answered once more: its right was checked before the change.
        let late = d.send(&request).await.unwrap();
        let new = open_cap(&d.one(open(ino, 0)).await);
        sleep(SECOND).await;
        for old in [&reads, &open_cap(&again), &open_cap(&both[1]), &open_cap(&late[1])] {
            assert!(oss.refuses(old, Rights::READ) && oss.refuses(old, Rights::WRITE), "{old:?}");
        }
        assert!(!oss.refuses(&new, Rights::READ));
        (d.session, ino, new)
    };
    // A new leader continues where the last one stopped.
    let leader = w.leader().await;
    w.kill(leader);
    {
        let mut c = w.client(3).await;
        let cap = open_cap(&c.one(open(ino, 1)).await);
        sleep(2 * SECOND).await;
        assert!(!oss.refuses(&reads, Rights::READ) && !oss.refuses(&cap, Rights::WRITE));
        assert!(reads.session == session && cap.session != session);
        let close = pb::SessionCloseRequest { session };
        let _: pb::SessionCloseReply =
            w.ask(Role::Client, opcode::SESSION_CLOSE, &close).await.unwrap();
        sleep(SECOND).await;
        assert!(oss.refuses(&reads, Rights::READ) && !oss.refuses(&cap, Rights::WRITE));
    }
    // Restarted members do not know what ended before, and tell that to a server that asks from
    // there.
    let known = oss.endings.lock().through;
    w.start(leader).await;
    sleep(5 * SECOND).await;
    for i in 0..3 {
        w.kill(i);
        w.start(i).await;
        sleep(5 * SECOND).await;
    }
    let all = oss.endings.lock();
    assert!(all.through > known && all.floor <= known, "{} {known}", all.floor);
}
