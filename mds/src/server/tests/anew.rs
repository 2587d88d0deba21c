//! Chains on which no file has data begin anew when all their replicas are gone; chains with data
//! wait for an administrator.

use strake_proto::map::ChainExt;

use super::{
    leases::extend,
    world::{Client, FakeOss},
    *,
};
use crate::cluster::moves::target_action::GIVE_UP;
use pb::members_request::Change;

/// A target dead for this long counts as long dead.
const LONG: Duration = Duration::from_secs(4);

/// Two storage servers with a target each, which head a chain of one copy each.
async fn pair() -> (World, [std::sync::Arc<FakeOss>; 2]) {
    let configured = |c: &mut crate::server::Config| {
        (c.rebuild_after_ms, c.expect_targets, c.session_term_ms) =
            (LONG.as_millis() as u64, 2, 120_000);
    };
    let w = World::new(1, configured).await;
    let oss = [w.oss(1).await, w.oss(2).await];
    until("chains", || map(&w).sets.len() == 2).await;
    (w, oss)
}

fn map(w: &World) -> pb::ClusterMap {
    w.mds[0].as_ref().unwrap().1.status().map.unwrap()
}

fn chain(w: &World, id: u32) -> pb::Chain {
    map(w).chains.into_iter().find(|c| c.id == id).unwrap()
}

/// A file, and its chain; that chain's server is then stopped.
async fn made(c: &mut Client<'_>, name: &str, flags: u32) -> (pb::OpResult, u32) {
    let f = c.one(create(name, flags)).await;
    let id = f.layout.as_ref().unwrap().components[0].chains[0];
    (f, id)
}

/// Makes files until one is on this chain.
async fn files_until(c: &mut Client<'_>, name: &str, chain: u32) {
    for n in 0..100 {
        if made(c, &format!("{name}-{n}"), 0).await.1 == chain {
            return;
        }
    }
    panic!("no file gets chain {chain}");
}

/// The chain of one copy that this target heads.
fn single(w: &World, target: u32) -> u32 {
    map(w).chains.iter().find(|c| c.preferred == [target]).unwrap().id
}

fn kill(w: &World, oss: &[std::sync::Arc<FakeOss>; 2], id: u32) -> u32 {
    let target = chain(w, id).preferred[0];
    oss[target as usize].up.store(false, Ordering::Relaxed);
    target
}

async fn stays(w: &World, id: u32, what: &str) {
    until("nobody serves it", || chain(w, id).head().is_none()).await;
    sleep(3 * LONG).await;
    assert!(chain(w, id).head().is_none(), "{what}: {:?}", chain(w, id));
}

#[tokio::test(start_paused = true)]
async fn a_chain_without_data_begins_anew_and_one_with_data_is_given_up_by_name() {
    let (w, oss) = pair().await;
    let mut c = w.client(1).await;
    // One file of size 0, without a writer, on each of the two; and one with data.
    let (f, id) = made(&mut c, "f", 0).await;
    c.one(extend(f.ino, 5)).await;
    let other = single(&w, 1 - chain(&w, id).preferred[0]);
    files_until(&mut c, "empty", other).await;
    let target = kill(&w, &oss, id);
    stays(&w, id, "it has data").await;
    assert!(!chain(&w, id).lost);
    let give_up = pb::TargetChange { target, action: GIVE_UP, ..Default::default() };
    let give_up = pb::MembersRequest { change: Some(Change::Target(give_up)), levels: false };
    w.ask::<pb::MembersReply>(Role::Server, opcode::MEMBERS, &give_up).await.unwrap();
    assert!(chain(&w, id).lost);
    stays(&w, id, "given up").await;
    // Its last file is removed: nothing is lost any more, and no administrator needs to say so.
    let before = chain(&w, id);
    c.one(unlink("f")).await;
    c.one(Op::Close(pb::Close { ino: f.ino })).await;
    until("it begins anew", || chain(&w, id).head().is_some()).await;
    let now = chain(&w, id);
    assert!(now.preferred == [1 - target] && !now.lost && now.epoch == before.epoch + 1, "{now:?}");
    // And it takes files.
    files_until(&mut c, "new", id).await;
}

#[tokio::test(start_paused = true)]
async fn what_may_be_written_counts_as_data_until_it_is_closed() {
    let (w, oss) = pair().await;
    let mut c = w.client(1).await;
    let (f, id) = made(&mut c, "f", 2).await;
    let target = kill(&w, &oss, id);
    stays(&w, id, "somebody writes it").await;
    c.one(Op::Release(pb::Release { ino: f.ino, writer: f.writer, surplus: false })).await;
    until("it begins anew", || chain(&w, id).head().is_some()).await;
    assert_eq!(chain(&w, id).preferred, [1 - target]);
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_anew_where_there_is_no_target_or_before_it_is_dead_for_long() {
    let (w, oss) = pair().await;
    let (a, b) = (single(&w, 0), single(&w, 1));
    oss.iter().for_each(|o| o.up.store(false, Ordering::Relaxed));
    until("nobody serves them", || [a, b].iter().all(|c| chain(&w, *c).head().is_none())).await;
    let died = tokio::time::Instant::now();
    sleep(10 * LONG).await;
    assert!([a, b].iter().all(|c| chain(&w, *c).head().is_none()), "on what?");
    // A server that returns has what it had; its neighbour's empty chain goes to it.
    let again = w.oss(1).await;
    until("its own", || chain(&w, a).head() == Some(0)).await;
    until("the other one", || chain(&w, b).head() == Some(0)).await;
    assert!(died.elapsed() > LONG);
    again.up.store(false, Ordering::Relaxed);
}
