//! A call over TCP and back, and what happens when the other end goes away.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use strake_fabric::{Buf, Env, Fabric, Identity, Message, Peer, Pool, Service, tcp::TcpFabric};
use strake_proto::{Code, Result};

struct Echo;

#[async_trait]
impl Service for Echo {
    async fn handle(&self, _: &Peer, request: Message) -> Result<Message> {
        Ok(request)
    }
}

fn fabric(identity: Identity) -> TcpFabric {
    TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default())
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_payloads_come_back_and_a_dead_listener_is_noticed() {
    let server = fabric(Identity::server(&[1; 32]));
    let listener = server.listen(&"127.0.0.1:0".parse().unwrap(), Arc::new(Echo)).await.unwrap();
    let client = fabric(Identity::client(Identity::server(&[1; 32]).client_key));
    let c = client.connect(listener.endpoint(), None).await.unwrap();
    for n in [0usize, 1, 4096, 1 << 20, 16 << 20] {
        let data: Vec<u8> = (0..n).map(|i| (i * 7) as u8).collect();
        let m = Message::new(0x101, vec![9u8; n.min(1000)]).with_payload(vec![Buf::copy_from(&data)]);
        let r = c.call(m, Duration::from_secs(10)).await.unwrap();
        let back: Vec<u8> = r.payload.iter().flat_map(|b| b.to_vec()).collect();
        assert!(back == data && r.body.len() == n.min(1000), "{n}");
    }
    drop(listener);
    let lost = loop {
        match c.call(Message::new(1, vec![]), Duration::from_secs(5)).await {
            Ok(_) => tokio::task::yield_now().await,
            Err(e) => break e,
        }
    };
    assert_eq!(lost.code, Code::Disconnected);
}
