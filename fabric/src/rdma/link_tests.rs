//! Tests over links to another machine, which are cut and come back. `peer_that_serves` in
//! `tests.rs` runs there; the environment variables are described there, too.

use std::time::Instant;

use strake_proto::opcode;

use super::{
    tests::{LONG, client_identity, fabric_of, settled, works},
    *,
};
use crate::{Message, conformance};

/// Drops all packets that this machine sends, or stops doing so.
fn cut(interface: &str, cut: bool) {
    let loss = [
        "qdisc",
        "replace",
        "dev",
        interface,
        "root",
        "netem",
        "loss",
        if cut { "100%" } else { "0%" },
    ];
    let done = std::process::Command::new("tc").args(loss).status();
    assert!(done.is_ok_and(|s| s.success()), "tc {loss:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_to_another_machine_that_is_cut_and_comes_back() {
    let (Ok(at), Ok(interface)) =
        (std::env::var("STRAKE_RDMA_REMOTE"), std::env::var("STRAKE_RDMA_LINK"))
    else {
        println!(
            "skipped: STRAKE_RDMA_REMOTE and STRAKE_RDMA_LINK name no other machine that serves, and no link to it"
        );
        return;
    };
    let at: Endpoint = at.parse().unwrap();
    let f = fabric_of(client_identity(), None, Options::default());
    let conn = again(&f, &at).await;
    works(&*conn).await;
    cut(&interface, true);
    let start = Instant::now();
    let big = Message::new(opcode::ECHO, "").with_payload(vec![conformance::pattern(1 << 20, 1)]);
    let e = conn.call(big, LONG).await.unwrap_err();
    let took = start.elapsed();
    let meanwhile = f.connect(&at, None).await.err();
    cut(&interface, false);
    println!("cut: {e} after {took:?}; to connect: {meanwhile:?}");
    assert!(e.code == Code::Disconnected && took < Duration::from_secs(8) && meanwhile.is_some());
    let start = Instant::now();
    works(&*again(&f, &at).await).await;
    println!("back: after {:?}", start.elapsed());
    drop(conn);
    settled(&f).await;
}

/// What a client does: the best endpoint first, a second and a half for each.
async fn by_rails(f: &RdmaFabric, all: &[Endpoint]) -> Arc<dyn Connection> {
    for at in f.by_rail(all.to_vec()) {
        if let Ok(Ok(c)) = timeout(Duration::from_millis(1500), f.connect(&at, None)).await {
            return c;
        }
    }
    panic!("no rail leads to {all:?}");
}

fn link(interface: &str, state: &str) {
    let done = std::process::Command::new("ip").args(["link", "set", interface, state]).status();
    assert!(done.is_ok_and(|s| s.success()), "ip link set {interface} {state}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_spread_over_rails_and_take_another_when_one_goes() {
    let (Ok(all), Ok(interface)) =
        (std::env::var("STRAKE_RDMA_RAILS"), std::env::var("STRAKE_RDMA_LINK"))
    else {
        println!(
            "skipped: STRAKE_RDMA_RAILS and STRAKE_RDMA_LINK name no two endpoints of another machine, and no link to the second"
        );
        return;
    };
    let all: Vec<Endpoint> = all.split(',').map(|e| e.parse().unwrap()).collect();
    let f = fabric_of(client_identity(), None, Options::default());
    for at in &all {
        works(&*again(&f, at).await).await;
    }
    let mut conns = Vec::new();
    for _ in 0..6 {
        conns.push(by_rails(&f, &all).await);
    }
    let of = |conns: &[Arc<dyn Connection>], at: &Endpoint| {
        conns.iter().filter(|c| c.addr() == at.to_string()).count()
    };
    assert_eq!(all.iter().map(|at| of(&conns, at)).collect::<Vec<_>>(), [3, 3]);
    futures_util::future::join_all(conns.iter().map(|c| works(&**c))).await;
    // The port of the second rail is still active, but nothing gets through.
    cut(&interface, true);
    let start = Instant::now();
    let calls = conns.iter().map(|c| async move {
        let m = Message::new(opcode::ECHO, "").with_payload(vec![conformance::pattern(1 << 20, 1)]);
        (c.addr(), c.call(m, LONG).await)
    });
    for (addr, got) in futures_util::future::join_all(calls).await {
        let cut_off = addr == all[1].to_string();
        assert!(
            got.map_or_else(|e| cut_off && e.code == Code::Disconnected, |_| !cut_off),
            "{addr}"
        );
    }
    println!("rails: 3 of 6 connections ended {:?} after the cut", start.elapsed());
    conns.retain(|c| c.addr() == all[0].to_string());
    let start = Instant::now();
    for n in 1..=3 {
        conns.push(by_rails(&f, &all).await);
        println!("rails: {n} new ones after {:?}", start.elapsed());
    }
    assert_eq!(of(&conns, &all[0]), 6);
    futures_util::future::join_all(conns.iter().map(|c| works(&**c))).await;
    cut(&interface, false);
    // What failed is tried again some time after.
    let start = Instant::now();
    while f.by_rail(all.clone())[0] != all[1] {
        assert!(start.elapsed() < 3 * LONG);
        sleep(Duration::from_millis(500)).await;
    }
    println!("rails: the second one first again after {:?}", start.elapsed());
    let back = by_rails(&f, &all).await;
    assert_eq!(back.addr(), all[1].to_string());
    works(&*back).await;
    drop(back);
    // An inactive port is known without a try.
    link(&interface, "down");
    let start = Instant::now();
    while f.by_rail(all.clone())[0] != all[0] {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(100)).await;
    }
    let only = by_rails(&f, &all).await;
    assert_eq!(only.addr(), all[0].to_string());
    works(&*only).await;
    link(&interface, "up");
    drop((conns, only));
    settled(&f).await;
}

async fn again(f: &RdmaFabric, at: &Endpoint) -> Arc<dyn Connection> {
    let start = Instant::now();
    loop {
        match f.connect(at, None).await {
            Ok(c) => return c,
            Err(e) => assert!(start.elapsed() < 2 * LONG, "{e}"),
        }
        sleep(Duration::from_millis(200)).await;
    }
}
