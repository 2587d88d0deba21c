//! Passing requests on to a server that their sender cannot reach: the link between two machines
//! may be cut while a third machine reaches both.
//!
//! A client that hears nothing from a server asks another one to pass its requests on
//! ([`through`]). That server ([`Relay`]) connects to the target with the client key only, once for
//! each connection that is passed on, so that the target sees a client's connection like any other:
//! session proofs count for this connection alone. Requests and answers pass unchanged. The relay
//! takes addresses from its own cluster map only, so that it cannot be directed elsewhere.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Connection, Endpoint, Fabric, Message, Peer, Traffic, endpoint::machine};
use strake_proto::{Code, Error, NodeId, Result, opcode};
use tokio::{sync::Mutex as AsyncMutex, time::timeout};

use crate::payloads;

/// Length of the header before the body of a request that is passed on.
const HEAD: usize = 12;
/// Limit of connections that one server passes on, and of those of one machine's clients.
const MOST: usize = 512;
const MOST_OF_MACHINE: usize = 64;
/// Maximum time to wait for an answer, whatever the sender asks for.
const LONGEST: Duration = Duration::from_secs(60);
/// Time limit for connecting to the target.
const CONNECT: Duration = Duration::from_millis(1000);

/// The header before the body: the target server, and the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    node: NodeId,
    /// 0: no request; the answer says that the server is reached.
    opcode: u16,
    limit_ms: u32,
}

impl Head {
    fn before(self, body: &[u8]) -> Vec<u8> {
        let mut b = Vec::with_capacity(HEAD + body.len());
        b.extend(self.node.to_le_bytes());
        b.extend(self.opcode.to_le_bytes());
        b.extend([0, 0]);
        b.extend(self.limit_ms.to_le_bytes());
        b.extend(body);
        b
    }

    fn decode(b: &[u8]) -> Result<Head> {
        let bad = || Error::new(Code::Protocol, "a request to relay is incomplete");
        let part = |from: usize| -> Result<[u8; 4]> {
            b.get(from..from + 4).and_then(|p| p.try_into().ok()).ok_or_else(bad)
        };
        let [low, high, ..] = part(4)?;
        Ok(Head {
            node: u32::from_le_bytes(part(0)?),
            opcode: u16::from_le_bytes([low, high]),
            limit_ms: u32::from_le_bytes(part(8)?),
        })
    }
}

/// The request inside a body of [`opcode::RELAY`]: opcode and body.
pub(crate) fn inner(body: &[u8]) -> Option<(u16, &[u8])> {
    Some((Head::decode(body).ok()?.opcode, &body[HEAD..]))
}

/// The opcode of the request inside a body of [`opcode::RELAY`].
pub fn asked(body: &[u8]) -> u16 {
    inner(body).map_or(0, |(op, _)| op)
}

/// The connection to the target for one incoming connection.
#[derive(Clone)]
struct Onward {
    node: NodeId,
    machine: String,
    to: Arc<AsyncMutex<Option<Arc<dyn Connection>>>>,
}

/// The server's side. A service gives it requests of [`opcode::RELAY`], and tells it which
/// connections are gone.
pub struct Relay {
    fabric: Arc<dyn Fabric>,
    /// By the id of the incoming connection.
    open: Mutex<BTreeMap<u64, Onward>>,
}

impl Relay {
    /// A relay that connects to servers over this fabric.
    pub fn new(fabric: Arc<dyn Fabric>) -> Relay {
        Relay { fabric, open: Mutex::default() }
    }

    /// Passes a request on and its answer back. `endpoints`: the endpoints of a server of the
    /// cluster; `None` for an unknown server and for this one.
    pub async fn handle(
        &self,
        peer: &Peer,
        mut m: Message,
        endpoints: impl FnOnce(NodeId) -> Option<Vec<String>>,
    ) -> Result<Message> {
        // Dropped early, so that the body and its reservation are not held while the request is
        // under way.
        let body = std::mem::take(&mut m.body);
        let head = Head::decode(&body)?;
        let body = body.slice(HEAD..);
        if matches!(head.opcode, opcode::RELAY | opcode::ROOM) {
            return Err(Error::new(Code::Inval, "this kind of request cannot be relayed"));
        }
        let onward = self.enter(peer, head.node)?;
        let reached =
            self.reach(&onward, endpoints).await.and_then(|conn| still_wanted(peer, conn));
        let (conn, answer) = match reached {
            Ok(conn) if head.opcode == 0 => return Ok(answer_of(&conn)),
            Ok(conn) => {
                let inner = payloads::request(Message { opcode: head.opcode, body, ..m });
                let limit = Duration::from_millis(u64::from(head.limit_ms)).min(LONGEST);
                let answer = conn.call(inner, limit).await;
                (Some(conn), answer)
            }
            Err(e) => (None, Err(e)),
        };
        match answer {
            Ok(a) => Ok(Message::new(opcode::RELAY, a.body).with_payload(a.payload)),
            Err(e) => {
                // If the connection to the target is over, the sender's connection ends, too: a new
                // one would be another connection, over which the target has seen no proofs.
                if conn.is_some_and(|c| c.is_closed())
                    && let Some(back) = &peer.back
                {
                    // In this order: a request that arrives over an open connection would get a new
                    // connection to the target.
                    back.close();
                    self.disconnected(peer);
                }
                Err(e)
            }
        }
    }

    /// The incoming connection is gone; closes its connection to the target.
    pub fn disconnected(&self, peer: &Peer) {
        let gone = self.open.lock().remove(&peer.id);
        if let Some(gone) = gone
            && let Ok(to) = gone.to.try_lock()
            && let Some(c) = to.as_ref()
        {
            c.close();
        }
    }

    /// Gives the connection its place, once.
    fn enter(&self, peer: &Peer, node: NodeId) -> Result<Onward> {
        let mut open = self.open.lock();
        if let Some(o) = open.get(&peer.id) {
            if o.node != node {
                return Err(Error::new(Code::Inval, "a connection is relayed to one server only"));
            }
            return Ok(o.clone());
        }
        // A connection that is over is not entered: its end would never be reported.
        if peer.back.as_ref().is_none_or(|b| b.is_closed()) {
            return Err(Error::new(Code::Disconnected, "the connection is closed"));
        }
        let machine = machine(&peer.addr).to_string();
        let of_machine = open.values().filter(|o| o.machine == machine).count();
        if open.len() >= MOST || of_machine >= MOST_OF_MACHINE {
            let m = format!(
                "this server relays {} connections, {of_machine} of them from {machine}; that is \
                 the limit",
                open.len()
            );
            return Err(Error::new(Code::Overloaded, m));
        }
        let new = Onward { node, machine, to: Arc::default() };
        open.insert(peer.id, new.clone());
        Ok(new)
    }

    async fn reach(
        &self,
        onward: &Onward,
        endpoints: impl FnOnce(NodeId) -> Option<Vec<String>>,
    ) -> Result<Arc<dyn Connection>> {
        let mut to = onward.to.lock().await;
        if let Some(c) = to.as_ref() {
            return Ok(c.clone());
        }
        let node = onward.node;
        let none = || Error::new(Code::Inval, format!("server {node} is not a server to relay to"));
        let endpoints = endpoints(node).ok_or_else(none)?;
        let mut last = Error::new(Code::Disconnected, format!("server {node} has no TCP endpoint"));
        let by_tcp = |e: &Endpoint| matches!(e, Endpoint::Tcp(..) | Endpoint::Sim(_));
        for at in endpoints.iter().filter_map(|e| e.parse().ok()).filter(by_tcp) {
            last = match timeout(CONNECT, self.fabric.connect_as_client(&at)).await {
                Ok(Ok(c)) => return Ok(to.insert(c).clone()),
                Ok(Err(e)) => e,
                Err(_) => Error::new(Code::TimedOut, format!("{at} does not answer")),
            };
        }
        Err(last.context("relaying requests"))
    }
}

/// The sender's connection may have ended by now; then nothing else would end this one.
fn still_wanted(peer: &Peer, conn: Arc<dyn Connection>) -> Result<Arc<dyn Connection>> {
    if peer.back.as_ref().is_none_or(|b| b.is_closed()) {
        conn.close();
        return Err(Error::new(Code::Disconnected, "the connection is closed"));
    }
    Ok(conn)
}

/// The answer that a server is reached.
fn answer_of(conn: &Arc<dyn Connection>) -> Message {
    Message::new(opcode::RELAY, conn.addr().into_bytes())
}

/// The client's side: a connection to a server through another one.
pub struct Relayed {
    via: Arc<dyn Connection>,
    node: NodeId,
    to: String,
    retired: AtomicBool,
}

impl Relayed {
    /// A better connection exists: requests under way are answered, and no more are sent.
    pub fn retire(&self) {
        self.retired.store(true, Relaxed);
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        self.via.close();
    }
}

/// Asks the server at the other end of `via` to pass on everything that is sent to `node`. `via`
/// must not be used for anything else: it ends with this connection.
pub async fn through(
    via: Arc<dyn Connection>,
    node: NodeId,
    limit: Duration,
) -> Result<Arc<Relayed>> {
    let mut new = Relayed { via, node, to: String::new(), retired: AtomicBool::new(false) };
    let there = new.call(Message::new(0, ""), limit).await?;
    new.to = String::from_utf8_lossy(&there.body).into_owned();
    Ok(Arc::new(new))
}

#[async_trait]
impl Connection for Relayed {
    async fn call(&self, m: Message, limit: Duration) -> Result<Message> {
        if m.lend.is_some() {
            return Err(Error::new(Code::OpNotSupp, "memory cannot be lent through a relay"));
        }
        let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let body = Head { node: self.node, opcode: m.opcode, limit_ms }.before(&m.body);
        let asked = payloads::request(Message { opcode: opcode::RELAY, body: body.into(), ..m });
        self.via.call(asked, limit).await
    }
    fn is_closed(&self) -> bool {
        self.retired.load(Relaxed) || self.via.is_closed()
    }
    fn addr(&self) -> String {
        format!("{} through {}", self.to, self.via.addr())
    }
    fn traffic(&self) -> Traffic {
        self.via.traffic()
    }
    fn close(&self) {
        self.via.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use strake_fabric::{Identity, Listener, Pool, Role, Service, TcpFabric, conformance::pattern};
    use strake_runtime::{ClientKey, Env};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const TARGET: NodeId = 7;

    fn fabric(identity: Identity) -> TcpFabric {
        TcpFabric::new(Env::system(), identity, None, Pool::new(64 << 20), Default::default())
    }
    fn servers() -> TcpFabric {
        fabric(Identity::server(&[1; 32]))
    }
    fn client() -> TcpFabric {
        fabric(Identity::client(ClientKey::of(&[1; 32])))
    }
    fn any() -> Endpoint {
        "tcp:127.0.0.1:0".parse().unwrap()
    }

    /// What the target answers to a READ.
    const MUCH: usize = 3 << 20;

    /// Peers that sent requests, and peers that are gone.
    #[derive(Default)]
    struct Target {
        peers: Mutex<Vec<(Role, u64)>>,
        gone: AtomicUsize,
    }

    #[async_trait]
    impl Service for Target {
        async fn handle(&self, peer: &Peer, m: Message) -> Result<Message> {
            self.peers.lock().push((peer.role, peer.id));
            match m.opcode {
                opcode::ECHO => Ok(m),
                opcode::READ => {
                    Ok(Message::new(opcode::READ, "").with_payload(vec![pattern(MUCH, 1)]))
                }
                _ => Err(Error::not_leader(3)),
            }
        }
        fn disconnected(&self, _: &Peer) {
            self.gone.fetch_add(1, SeqCst);
        }
    }

    /// A server that passes requests on to the target only, wherever that is.
    struct Passes {
        relay: Relay,
        target: Mutex<Option<Endpoint>>,
    }

    #[async_trait]
    impl Service for Passes {
        async fn handle(&self, peer: &Peer, m: Message) -> Result<Message> {
            let target = self.target.lock().clone();
            let known =
                |node| (node == TARGET).then(|| target.iter().map(ToString::to_string).collect());
            self.relay.handle(peer, m, known).await
        }
        fn disconnected(&self, peer: &Peer) {
            self.relay.disconnected(peer);
        }
    }

    struct Bed {
        target: Arc<Target>,
        passes: Arc<Passes>,
        at: Endpoint,
        of_target: Option<Listener>,
        _of_relay: Listener,
    }

    async fn bed() -> Bed {
        bed_with(Pool::new(64 << 20)).await
    }

    /// `pool`: the pool of the server that passes on.
    async fn bed_with(pool: Pool) -> Bed {
        let target = Arc::new(Target::default());
        let of_target = servers().listen(&any(), target.clone()).await.unwrap();
        let passes = Arc::new(Passes {
            relay: Relay::new(Arc::new(TcpFabric::new(
                Env::system(),
                Identity::server(&[1; 32]),
                None,
                pool,
                Default::default(),
            ))),
            target: Mutex::new(Some(of_target.endpoint().clone())),
        });
        let of_relay = servers().listen(&any(), passes.clone()).await.unwrap();
        let at = of_relay.endpoint().clone();
        Bed { target, passes, at, of_target: Some(of_target), _of_relay: of_relay }
    }

    impl Bed {
        async fn via(&self, from: &TcpFabric, node: NodeId) -> Result<Arc<Relayed>> {
            through(from.connect(&self.at, None).await?, node, LONG).await
        }
        async fn until(&self, what: impl Fn(&Bed) -> bool) {
            let wait = async {
                while !what(self) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            timeout(LONG, wait).await.expect("it comes to that");
        }
    }

    #[tokio::test]
    async fn requests_and_answers_pass_unchanged_and_each_connection_is_one_at_the_server() {
        let bed = bed().await;
        let (a, b) =
            (bed.via(&client(), TARGET).await.unwrap(), bed.via(&client(), TARGET).await.unwrap());
        for conn in [&a, &a, &b] {
            let payload = pattern(100_000, 5);
            let m = Message { trace: 9, ..Message::new(opcode::ECHO, "body") }
                .with_payload(vec![payload.clone()]);
            let got = conn.call(m, LONG).await.unwrap();
            assert_eq!(&got.body[..], b"body");
            assert!(got.payload.len() == 1 && got.payload[0][..] == payload[..]);
        }
        let e = a.call(Message::new(opcode::META, ""), LONG).await.unwrap_err();
        assert_eq!((e.code, e.leader), (Code::NotLeader, 3), "what the server says");
        assert!(!a.is_closed() && !a.lends());
        let peers = bed.target.peers.lock().clone();
        assert!(peers.iter().all(|p| p.0 == Role::Client), "{peers:?}");
        assert!(
            peers[0].1 == peers[1].1 && peers[0].1 != peers[2].1,
            "a proof counts for its sender: {peers:?}"
        );
        drop(a);
        bed.until(|bed| bed.target.gone.load(SeqCst) == 1).await;
        assert_eq!(bed.passes.relay.open.lock().len(), 1);
    }

    #[tokio::test]
    async fn a_server_that_goes_away_ends_what_is_passed_on_to_it() {
        let mut bed = bed().await;
        let conn = bed.via(&client(), TARGET).await.unwrap();
        bed.of_target = None;
        bed.until(|bed| bed.target.gone.load(SeqCst) == 1).await;
        let e = conn.call(Message::new(opcode::ECHO, ""), LONG).await.unwrap_err();
        assert_eq!(e.code, Code::Disconnected);
        bed.until(|_| conn.is_closed()).await;
        assert!(bed.passes.relay.open.lock().is_empty());
        // No new connection is made in its place without the client's knowledge. A new client
        // learns the reason.
        let e = bed.via(&client(), TARGET).await.err().unwrap();
        assert_eq!(e.code, Code::Disconnected, "{e}");
        bed.until(|bed| bed.passes.relay.open.lock().is_empty()).await;
    }

    #[tokio::test]
    async fn only_known_servers_are_reached_with_a_key_and_only_as_a_client() {
        let bed = bed().await;
        let refused = |r: Result<Arc<Relayed>>| r.err().unwrap().code;
        assert_eq!(refused(bed.via(&client(), 8).await), Code::Inval, "no server of the cluster");
        let stranger = fabric(Identity::client([9; 32]));
        assert_eq!(refused(bed.via(&stranger, TARGET).await), Code::Unauthenticated);
        let server = bed.via(&servers(), TARGET).await.unwrap();
        server.call(Message::new(opcode::ECHO, ""), LONG).await.unwrap();
        assert_eq!(bed.target.peers.lock()[0].0, Role::Client, "also for a server");

        let conn = client().connect(&bed.at, None).await.unwrap();
        let ask = async |node, opcode| {
            let body = Head { node, opcode, limit_ms: 1000 }.before(b"");
            conn.call(Message::new(opcode::RELAY, body), LONG).await
        };
        assert_eq!(
            ask(TARGET, opcode::RELAY).await.unwrap_err().code,
            Code::Inval,
            "no chain of relays"
        );
        ask(TARGET, opcode::ECHO).await.unwrap();
        assert_eq!(ask(8, opcode::ECHO).await.unwrap_err().code, Code::Inval, "one server only");
        let short = conn.call(Message::new(opcode::RELAY, vec![0; HEAD - 1]), LONG).await;
        assert_eq!(short.unwrap_err().code, Code::Protocol);
        ask(TARGET, opcode::ECHO).await.expect("the connection goes on");
    }

    #[tokio::test]
    async fn whoever_has_no_more_than_the_client_key_is_not_taken_for_the_server() {
        let bed = bed().await;
        let liar = Identity { signing: None, server_key: None, ..Identity::server(&[1; 32]) };
        let rogue = fabric(liar).listen(&any(), Arc::new(Target::default())).await.unwrap();
        *bed.passes.target.lock() = Some(rogue.endpoint().clone());
        let e = bed.via(&client(), TARGET).await.err().unwrap();
        assert_eq!(e.code, Code::Unauthenticated, "{e}");
    }

    #[tokio::test]
    async fn one_machine_has_so_many_and_no_more() {
        let (bed, from) = (bed().await, client());
        let mut mine = Vec::new();
        for _ in 0..MOST_OF_MACHINE {
            mine.push(bed.via(&from, TARGET).await.unwrap());
        }
        let e = bed.via(&from, TARGET).await.err().unwrap();
        assert!(e.code == Code::Overloaded && e.message.contains("from tcp:127.0.0.1"), "{e}");
        mine[5]
            .call(Message::new(opcode::ECHO, ""), LONG)
            .await
            .expect("those that are there go on");
        mine.pop();
        bed.until(|bed| bed.passes.relay.open.lock().len() < MOST_OF_MACHINE).await;
        bed.via(&from, TARGET).await.unwrap();
    }

    #[tokio::test]
    async fn answers_that_are_passed_on_keep_to_the_pool() {
        let pool = Pool::new(8 << 20);
        let bed = bed_with(pool.clone()).await;
        let conn = bed.via(&client(), TARGET).await.unwrap();
        let read = || conn.call(Message::new(opcode::READ, ""), LONG);
        assert_eq!(read().await.unwrap().payload_len(), MUCH);
        let taken = pool.get(8 << 20).await.unwrap();
        let e = read().await.unwrap_err();
        assert_eq!(e.code, Code::Overloaded, "{e}");
        assert_eq!(pool.stats().used, 8 << 20);
        drop(taken);
        assert_eq!(read().await.unwrap().payload_len(), MUCH, "the connection goes on");
    }

    /// Reports that it is closed, and notes whether it is closed again.
    struct Ends(AtomicBool);

    #[async_trait]
    impl Connection for Ends {
        async fn call(&self, _: Message, _: Duration) -> Result<Message> {
            Err(Error::new(Code::Disconnected, "nobody"))
        }
        fn is_closed(&self) -> bool {
            self.0.load(SeqCst)
        }
        fn addr(&self) -> String {
            "here".into()
        }
        fn close(&self) {
            self.0.store(true, SeqCst);
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_while_the_server_is_reached_is_not_passed_on() {
        let bed = bed().await;
        let back = Arc::new(Ends(AtomicBool::new(false)));
        let peer =
            Peer { role: Role::Client, addr: "tcp:h:1".into(), id: 5, back: Some(back.clone()) };
        let asked = Head { node: TARGET, opcode: opcode::ECHO, limit_ms: u32::MAX }.before(b"");
        let at = bed.of_target.as_ref().unwrap().endpoint().to_string();
        let relay = &bed.passes.relay;
        let e = relay.handle(&peer, Message::new(opcode::RELAY, asked), |_| {
            // It ends just now.
            back.close();
            relay.disconnected(&peer);
            Some(vec![at])
        });
        assert_eq!(e.await.unwrap_err().code, Code::Disconnected);
        assert!(bed.target.peers.lock().is_empty(), "nothing is asked for nobody");
        bed.until(|bed| bed.target.gone.load(SeqCst) == 1).await;
        assert!(relay.open.lock().is_empty());
    }

    #[test]
    fn bytes_are_as_documented() {
        let head = Head { node: 0x0102, opcode: opcode::READ, limit_ms: 5000 };
        let bytes = head.before(b"xy");
        assert_eq!(bytes, [2, 1, 0, 0, 1, 1, 0, 0, 0x88, 0x13, 0, 0, b'x', b'y']);
        assert_eq!((Head::decode(&bytes).unwrap(), asked(&bytes)), (head, opcode::READ));
    }
}
