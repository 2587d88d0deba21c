//! What wide runs add ([`crate::scenario::Scenario::wide`]): clients that look at files while others
//! write them, and a stranger that speaks the protocol by hand and breaks its rules.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, SetAttr};
use strake_fabric::{Buf, Connection, Endpoint, Fabric, Message};
use strake_proto::{
    Bound, ChainId, ChunkId, Code, Error, Ino, Result,
    cap::{CAP_LEN, peek},
    checksum::block_sums,
    data::{DataRequest, Kind},
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    cluster::Cluster,
    net::SimFabric,
    nodes::MDS,
    workload::{End, FILE_BYTES, FILES, Shared, root},
};

/// Numbers of the clients that look, and of the stranger.
const ONLOOKERS: [u32; 2] = [0, 6];
const STRANGER: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(2);

/// Starts all of them. The clients 1 to `writers` write the files that are looked at.
pub async fn start(
    cluster: &mut Cluster,
    seed: u64,
    writers: u32,
    found: &Shared,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<JoinHandle<()>>> {
    let (sizes, mut tasks) = (Sizes::default(), Vec::new());
    for n in ONLOOKERS {
        let (client, found, sizes) = (cluster.client(n).await?, found.clone(), sizes.clone());
        let rng = StdRng::seed_from_u64(seed ^ u64::from(n) << 32);
        tasks.push(tokio::spawn(Onlooker { client, rng, found, sizes, writers }.run(stop.clone())));
    }
    let (_, _, fabric) = cluster.prepare(STRANGER);
    let stranger = Stranger {
        fabric,
        rng: StdRng::seed_from_u64(seed ^ 0xbad),
        found: found.clone(),
        sessions: 0,
    };
    tasks.push(tokio::spawn(stranger.run(stop.clone())));
    Ok(tasks)
}

/// The largest size that any client was shown of each file since its size was last set. After that,
/// files only grow.
type Sizes = Arc<Mutex<BTreeMap<(Ino, u64), u64>>>;

/// What was known before a look.
struct Known {
    sizes: BTreeMap<(Ino, u64), u64>,
    ends: BTreeMap<Ino, End>,
    sizings: BTreeMap<Ino, u64>,
}

struct Onlooker {
    client: Client,
    rng: StdRng,
    found: Shared,
    sizes: Sizes,
    writers: u32,
}

impl Onlooker {
    async fn run(mut self, stop: Arc<AtomicBool>) {
        while !stop.load(Relaxed) {
            let (n, file) =
                (self.rng.random_range(1..=self.writers), self.rng.random_range(0..FILES));
            if let Err(e) = self.look(n, file).await {
                tracing::info!("onlooker: {e}");
            }
            sleep(Duration::from_millis(self.rng.random_range(0..80))).await;
        }
    }

    async fn look(&mut self, writer: u32, file: usize) -> Result<()> {
        let (me, client) = (root(), self.client.clone());
        let dir = client.lookup(&me, client.root(), format!("d{writer}").as_bytes()).await?.ino;
        let known = self.known();
        match self.rng.random_range(0..10) {
            0 => {
                let page = client.readdir(&me, dir, 0, 100, true).await?;
                page.entries
                    .iter()
                    .filter_map(|e| e.attr.as_ref())
                    .for_each(|a| self.told(&known, a));
            }
            1 => {
                let ino = client.lookup(&me, dir, format!("file{file}").as_bytes()).await?.ino;
                let mode = Some(0o600 | self.rng.random_range(0..64));
                client.setattr(&me, SetAttr { ino, mode, ..Default::default() }).await?;
            }
            _ => {
                let attr = client.lookup(&me, dir, format!("file{file}").as_bytes()).await?;
                self.told(&known, &attr);
                self.told(&known, &client.getattr(&me, attr.ino).await?);
            }
        }
        Ok(())
    }

    fn known(&self) -> Known {
        let found = self.found.lock();
        Known {
            sizes: self.sizes.lock().clone(),
            ends: found.ends.clone(),
            sizings: found.sizings.clone(),
        }
    }

    fn told(&self, known: &Known, attr: &pb::Attr) {
        let sizing = |of: &BTreeMap<Ino, u64>| of.get(&attr.ino).copied().unwrap_or(0);
        let (before, now) = (sizing(&known.sizings), sizing(&self.found.lock().sizings));
        if attr.mode & 0o170_000 != 0o100_000 || before != now || now % 2 == 1 {
            return;
        }
        let key = (attr.ino, now);
        let least = known.sizes.get(&key).copied().unwrap_or(0);
        if attr.size < least || attr.size > FILE_BYTES {
            let m = format!("file {:#x} has {} bytes; {least} had been told", attr.ino, attr.size);
            self.found.lock().broken(m);
        }
        if let Some(e) = known.ends.get(&attr.ino).filter(|e| attr.size < e.end) {
            let m = format!(
                "file {:#x} has {} bytes for somebody; a write up to {} had returned",
                attr.ino, attr.size, e.end
            );
            self.found.lock().short.push((*e, m));
        }
        let mut sizes = self.sizes.lock();
        let most = sizes.entry(key).or_insert(0);
        *most = attr.size.max(*most);
        self.found.lock().looks += 1;
    }
}

/// Says hello late, repeats it, and says it for another connection; never acknowledges a recall;
/// sends requests for sessions of others, and for chunks that its file does not have on that chain.
struct Stranger {
    fabric: Arc<SimFabric>,
    rng: StdRng,
    found: Shared,
    sessions: u64,
}

type Link = Arc<dyn Connection>;

/// A request to the head of a chain, by the map.
fn request(map: &MapView, chain: ChainId, chunk: ChunkId) -> DataRequest {
    let c = map.chain(chain);
    let head = c.and_then(ChainExt::head).unwrap_or_default();
    DataRequest::new(chain, c.map_or(0, |c| c.epoch), head, chunk)
}

async fn call<R: prost::Message + Default>(
    link: &Link,
    op: u16,
    request: &impl prost::Message,
) -> Result<R> {
    let m = link.call(Message::new(op, request.encode_to_vec()), PATIENCE).await?;
    R::decode(m.body).map_err(|e| Error::new(Code::Protocol, e.to_string()))
}

impl Stranger {
    async fn run(mut self, stop: Arc<AtomicBool>) {
        let mut server = 0;
        while !stop.load(Relaxed) {
            server = server % MDS + 1;
            match self.visit(server, &stop).await {
                Ok(()) => sleep(Duration::from_millis(self.rng.random_range(500..3000))).await,
                Err(e) => {
                    tracing::info!("stranger: {e}");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// One session from beginning to end.
    async fn visit(&mut self, server: u32, stop: &AtomicBool) -> Result<()> {
        let link = self.fabric.connect(&Endpoint::Sim(server), None).await?;
        self.sessions += 1;
        let uuid = (u128::from(self.sessions) << 64 | 0xbad).to_be_bytes().to_vec();
        let open = pb::SessionOpenRequest {
            level: strake_proto::FEATURE_LEVEL,
            client_uuid: uuid.into(),
            hostname: "stranger".into(),
            ..Default::default()
        };
        let opened: pb::SessionOpenReply = call(&link, opcode::SESSION_OPEN, &open).await?;
        let (session, root) = (opened.session, opened.root);
        self.forge(&link, session).await?;
        let renew = pb::SessionRenewRequest {
            level: strake_proto::FEATURE_LEVEL,
            session,
            connection: 10,
            hello: true,
            ..Default::default()
        };
        let without = pb::SessionRenewRequest { hello: false, ..renew.clone() };
        let renewed: pb::SessionRenewReply = call(&link, opcode::SESSION_RENEW, &without).await?;
        if renewed.lease_ms != 0 {
            self.violation(format!("session {session} was given leases before it said hello"));
        }
        let _: pb::SessionRenewReply = call(&link, opcode::SESSION_RENEW, &renew).await?;
        let late = pb::SessionRenewRequest { connection: 9, ..renew.clone() };
        let _: pb::SessionRenewReply = call(&link, opcode::SESSION_RENEW, &late).await?;
        let lives_on = pb::SessionRenewRequest { connection: 11, lives_on: true, ..renew.clone() };
        let _: pb::SessionRenewReply = call(&link, opcode::SESSION_RENEW, &lives_on).await?;
        let get = pb::Op { op: Some(pb::op::Op::Getattr(pb::GetAttr { ino: root })) };
        let read = |connection| pb::MetaRequest {
            session,
            connection,
            ops: vec![get.clone()],
            ..Default::default()
        };
        let told: pb::MetaReply = call(&link, opcode::META, &read(9)).await?;
        if !told.granted.is_empty() {
            self.violation(format!(
                "a lease was granted on a connection that session {session} has left"
            ));
        }
        let _: pb::MetaReply = call(&link, opcode::META, &read(11)).await?;
        let map = MapView::new(opened.map.unwrap_or_default())?;
        self.stray(&link, (session, root), &map).await?;
        if self.rng.random_bool(0.5) {
            let close = pb::SessionCloseRequest { session };
            return call::<pb::SessionCloseReply>(&link, opcode::SESSION_CLOSE, &close)
                .await
                .map(drop);
        }
        // It keeps its session, holds a lease and never answers a recall.
        let alive = pb::SessionRenewRequest { connection: 11, hello: false, ..renew };
        while !stop.load(Relaxed) {
            let _: pb::SessionRenewReply = call(&link, opcode::SESSION_RENEW, &alive).await?;
            sleep(Duration::from_millis(400)).await;
        }
        Ok(())
    }

    /// Requests with session numbers that no client was given must be refused.
    async fn forge(&mut self, link: &Link, own: u64) -> Result<()> {
        for session in [0, own ^ self.rng.random_range(1 << 40..1 << 50), u64::MAX] {
            let get = pb::Op { op: Some(pb::op::Op::Getattr(pb::GetAttr { ino: 1 })) };
            let meta = pb::MetaRequest { session, ops: vec![get], ..Default::default() };
            let meta = call::<pb::MetaReply>(link, opcode::META, &meta).await.map(drop);
            let recall =
                pb::RecallRequest { session, acknowledged: u64::MAX, ..Default::default() };
            let recall = call::<pb::RecallReply>(link, opcode::RECALL, &recall).await.map(drop);
            let close = pb::SessionCloseRequest { session };
            let close =
                call::<pb::SessionCloseReply>(link, opcode::SESSION_CLOSE, &close).await.map(drop);
            for r in [meta, recall, close] {
                if r.is_ok() {
                    self.violation(format!(
                        "a request of session {session:#x}, which nobody has, was served"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Chunks of a file are served only where its layout puts them, whatever index is asked for.
    async fn stray(
        &mut self,
        link: &Link,
        (session, root): (u64, Ino),
        map: &MapView,
    ) -> Result<()> {
        let spec =
            pb::LayoutSpec { stripe_count: self.rng.random_range(1..=3), ..Default::default() };
        let make = pb::Tmpfile {
            parent: root,
            mode: 0o600,
            flags: 2,
            layout: Some(spec),
            ..Default::default()
        };
        let ops = vec![pb::Op { op: Some(pb::op::Op::Tmpfile(make)) }];
        let creds = Some(pb::Creds::default());
        let (seq, connection) = (1, 11);
        let meta = pb::MetaRequest { session, connection, seq, creds, ops, ..Default::default() };
        let made: pb::MetaReply = call(link, opcode::META, &meta).await?;
        let Some(made) = made.results.first().filter(|r| r.status.is_none()) else { return Ok(()) };
        let Ok(cap) = <[u8; CAP_LEN]>::try_from(&made.capability[..]) else { return Ok(()) };
        let stripes = StripeMap::resolve(made.ino, &made.layout.clone().unwrap_or_default(), map)?;
        if matches!(peek(&cap).bound, Bound::Any | Bound::Mask(_)) {
            self.violation(format!("a capability does not say where {stripes:?} is"));
            return Ok(());
        }
        for chain in map.map.chains.iter().map(|c| c.id) {
            let index = self.rng.random_range(0..9);
            let is_own = stripes.chain_of(index) == chain;
            let far = 1 << self.rng.random_range(34..64);
            let data = &b"stray"[..];
            let ask = |index| {
                let chunk = ChunkId { ino: made.ino, data: stripes.data, index };
                DataRequest {
                    len: data.len() as u32,
                    session,
                    cap: Some(cap),
                    ..request(map, chain, chunk)
                }
            };
            let (sums, kind) = (block_sums(0, [data]), Kind::Write);
            let write = |index| DataRequest { sums: sums.clone(), kind, seq: 1, ..ask(index) };
            let shown = self.data(map, opcode::READ, ask(index), &[]).await;
            if matches!(shown, Err(Code::TimedOut | Code::Disconnected)) {
                return Ok(());
            }
            if is_own && shown == Err(Code::BadCap) || !is_own && shown.is_ok() {
                self.violation(format!("chunk {index} on chain {chain} of {stripes:?}: {shown:?}"));
            }
            let foreign = (!is_own).then_some(index);
            for index in foreign.into_iter().chain([far]) {
                if self.data(map, opcode::WRITE, write(index), data).await.is_ok() {
                    self.violation(format!(
                        "chunk {index} was written on chain {chain} of {stripes:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Sends the request to the head of its chain.
    async fn data(&self, map: &MapView, op: u16, r: DataRequest, data: &[u8]) -> Result<(), Code> {
        let at = map
            .node_of(r.target)
            .and_then(|n| n.endpoints.first()?.parse().ok())
            .ok_or(Code::NotServing)?;
        let link = self.fabric.connect(&at, None).await.map_err(|e| e.code)?;
        let payload = if data.is_empty() { Vec::new() } else { vec![Buf::copy_from(data)] };
        let m = Message::new(op, r.encode()).with_payload(payload);
        link.call(m, PATIENCE).await.map(drop).map_err(|e| e.code)
    }

    fn violation(&self, what: String) {
        self.found.lock().broken(what);
    }
}
