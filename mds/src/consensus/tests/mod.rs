//! Tests of the module; this file has the network, the state machine and the cluster they share.

mod cluster;
mod damage;
mod disk;
mod hostile;
mod leases;
mod shuffle;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Pool, Service};
use strake_proto::{Code, Error, Result};
use strake_runtime::{Clock, Env};
use strake_store::{Batch, MemStore, MetaStore, Reader};

use super::*;

const CLUSTER: [u8; 16] = [7; 16];

struct TokioClock(tokio::time::Instant);
impl Clock for TokioClock {
    fn unix_ns(&self) -> i64 {
        self.0.elapsed().as_nanos() as i64
    }
    fn boot(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Members in one process that reach each other unless cut off.
#[derive(Default)]
struct Net {
    nodes: Mutex<BTreeMap<u32, Node>>,
    cut_off: Mutex<BTreeSet<u32>>,
    /// Batches between members so far.
    calls: std::sync::atomic::AtomicUsize,
    pool: Pool,
}

struct Port {
    net: Arc<Net>,
    me: u32,
}

struct Link {
    net: Arc<Net>,
    me: u32,
    to: u32,
}

impl Net {
    fn reach(&self, me: u32, to: u32) -> Result<Node> {
        let cut = self.cut_off.lock();
        let node = self.nodes.lock().get(&to).cloned();
        node.filter(|_| !cut.contains(&me) && !cut.contains(&to))
            .ok_or_else(|| Error::new(Code::Disconnected, "unreachable"))
    }
}

#[async_trait]
impl Connection for Link {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        let bulk = request.opcode == strake_proto::opcode::SNAPSHOT;
        tokio::time::sleep(Duration::from_micros(if bulk { 20_000 } else { 100 })).await;
        let node = self.net.reach(self.me, self.to)?;
        self.net.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let answer = tokio::time::timeout(timeout, node.handle(request)).await;
        answer.map_err(|_| Error::new(Code::TimedOut, "no answer"))?
    }
    fn is_closed(&self) -> bool {
        false
    }
    fn addr(&self) -> String {
        format!("sim:{}", self.to)
    }
    fn close(&self) {}
}

#[async_trait]
impl Fabric for Port {
    async fn connect(
        &self,
        to: &Endpoint,
        _: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let Endpoint::Sim(to) = to else { return Err(Error::new(Code::Inval, "not simulated")) };
        self.net.reach(self.me, *to)?;
        Ok(Arc::new(Link { net: self.net.clone(), me: self.me, to: *to }))
    }
    async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
        Err(Error::new(Code::OpNotSupp, "not needed"))
    }
    fn pool(&self) -> &Pool {
        &self.net.pool
    }
}

/// Keeps `key=value` commands in a store; answers with the value before.
struct Kv {
    store: MemStore,
    full: Mutex<bool>,
    /// Ids that the state says were removed.
    former: Mutex<BTreeSet<u64>>,
    /// Keys that cannot be read, and whether one was met.
    bad: Mutex<(BTreeSet<String>, bool)>,
}

impl Kv {
    fn new() -> Arc<Kv> {
        Arc::new(Kv {
            store: MemStore::new(),
            full: Mutex::new(false),
            former: Mutex::default(),
            bad: Mutex::default(),
        })
    }
    fn header(&self) -> Vec<u8> {
        self.store.get(b"\0").unwrap().map_or(vec![0; 16], |b| b.to_vec())
    }
    fn value(&self, key: &str) -> Option<Bytes> {
        self.store.get(key.as_bytes()).unwrap()
    }
    fn spoil(&self, key: &str) {
        self.bad.lock().0.insert(key.into());
    }
    fn read(&self, key: &str) -> Result<Option<Bytes>> {
        let mut bad = self.bad.lock();
        if bad.0.contains(key) {
            bad.1 = true;
            return Err(Error::new(Code::Corrupt, "a flipped bit"));
        }
        self.store.get(key.as_bytes())
    }
    /// Everything but the header, to compare members.
    fn pairs(&self) -> Vec<(Bytes, Bytes)> {
        let all =
            self.store.range(std::ops::Bound::Excluded(&b"\0"[..]), std::ops::Bound::Unbounded);
        all.map(|p| p.unwrap()).collect()
    }
}

fn header(index: u64, term: u64, conf: &[u8]) -> Vec<u8> {
    [&index.to_le_bytes()[..], &term.to_le_bytes(), conf].concat()
}

fn words(h: &[u8]) -> (u64, u64) {
    (
        u64::from_le_bytes(h[..8].try_into().unwrap()),
        u64::from_le_bytes(h[8..16].try_into().unwrap()),
    )
}

impl StateMachine for Kv {
    fn applied(&self) -> (u64, u64) {
        words(&self.header())
    }
    fn conf_state(&self) -> Vec<u8> {
        self.header()[16..].to_vec()
    }
    fn is_former(&self, id: u64) -> bool {
        self.former.lock().contains(&id)
    }
    fn apply(
        &self,
        entries: Vec<Committed>,
        last: (u64, u64),
        conf: Option<Vec<u8>>,
    ) -> Result<Vec<Bytes>> {
        if *self.full.lock() {
            return Err(Error::new(Code::NoSpc, "state disk full"));
        }
        let mut expected = self.applied().0;
        let mut batch = Batch::default();
        let mut replies = Vec::new();
        for e in entries {
            expected += 1;
            assert_eq!(e.index, expected, "entries are applied once each, in order");
            let text = String::from_utf8(e.data.to_vec()).unwrap();
            let (mut before, mut now) = (Bytes::new(), None);
            if let Some((key, value)) = text.split_once('=') {
                before = self.read(key)?.unwrap_or_default();
                now = Some((key.to_string(), value.to_string()));
            }
            replies.push(before);
            if let Some((k, v)) = now {
                batch.put(k.into_bytes(), v.into_bytes());
            }
        }
        batch.put(&b"\0"[..], header(last.0, last.1, &conf.unwrap_or_else(|| self.conf_state())));
        self.store.commit(batch)?;
        Ok(replies)
    }
    fn sync(&self) -> Result<()> {
        self.store.sync()
    }
    fn snapshot(&self) -> Result<StateSnapshot> {
        let (index, term) = self.applied();
        Ok(StateSnapshot {
            index,
            term,
            conf_state: self.conf_state(),
            view: self.store.snapshot()?,
        })
    }
    fn damage(&self) -> Option<Error> {
        self.bad.lock().1.then(|| Error::new(Code::Corrupt, "a flipped bit"))
    }
    fn restore_begin(&self) -> Result<()> {
        *self.bad.lock() = Default::default();
        self.store.clear()
    }
    fn restore_pairs(&self, pairs: Vec<(Bytes, Bytes)>) -> Result<()> {
        let mut batch = Batch::default();
        pairs.into_iter().filter(|(k, _)| k[..] != b"\0"[..]).for_each(|(k, v)| batch.put(k, v));
        self.store.commit(batch)
    }
    fn restore_end(&self, index: u64, term: u64, conf: Vec<u8>) -> Result<()> {
        let mut batch = Batch::default();
        batch.put(&b"\0"[..], header(index, term, &conf));
        self.store.commit(batch)
    }
}

struct Member {
    env: Env,
    node: Option<Node>,
    log: Arc<MemLog>,
    kv: Arc<Kv>,
}

/// Members 1, 2, ... and what they keep when they die.
struct Cluster {
    net: Arc<Net>,
    members: BTreeMap<u64, Member>,
    seed: u64,
    tune: fn(&mut Config),
}

impl Cluster {
    async fn new(n: u64, seed: u64, tune: fn(&mut Config)) -> Cluster {
        let mut c = Cluster { net: Arc::default(), members: BTreeMap::new(), seed, tune };
        let voters: Vec<u64> = (1..=n).collect();
        for id in 1..=n {
            c.add(id, voters.clone()).await;
        }
        c
    }

    async fn add(&mut self, id: u64, voters: Vec<u64>) {
        let log = Arc::new(MemLog::new(voters, 1000 + id, Duration::from_micros(300)));
        self.members.insert(id, Member { env: self.env(id), node: None, log, kv: Kv::new() });
        self.start(id).await.unwrap();
    }

    fn env(&self, id: u64) -> Env {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&(self.seed * 100 + id).to_le_bytes());
        Env::new(Arc::new(TokioClock(tokio::time::Instant::now())), seed)
    }

    async fn start(&mut self, id: u64) -> Result<()> {
        let others = self.members[&id].log.image().voters;
        let peers = others.into_iter().map(|id| (id, Endpoint::Sim(id as u32))).collect();
        let mut cfg = Config::new(id, CLUSTER, peers);
        (self.tune)(&mut cfg);
        let env = self.env(id);
        let port = Arc::new(Port { net: self.net.clone(), me: id as u32 });
        let m = self.members.get_mut(&id).unwrap();
        m.env = env.clone();
        let node = Node::start(cfg, env, port, m.log.clone(), m.kv.clone()).await?;
        self.net.nodes.lock().insert(id as u32, node.clone());
        m.node = Some(node);
        Ok(())
    }

    /// kill -9 with power loss: unsynced state is lost, the batch in flight to the log survives if
    /// `keep`.
    async fn kill(&mut self, id: u64, keep: bool) {
        self.net.nodes.lock().remove(&(id as u32));
        let m = self.members.get_mut(&id).unwrap();
        m.env.kill();
        m.node = None;
        tokio::task::yield_now().await;
        m.log.crash(keep);
    }

    fn node(&self, id: u64) -> &Node {
        self.members[&id].node.as_ref().unwrap()
    }
    fn kv(&self, id: u64) -> &Kv {
        &self.members[&id].kv
    }

    async fn leader(&self) -> u64 {
        within("a leader", || {
            let live = self
                .members
                .iter()
                .filter(|(id, _)| !self.net.cut_off.lock().contains(&(**id as u32)));
            let mut leaders =
                live.filter_map(|(id, m)| m.node.as_ref().map(|n| (*id, *n.leadership().borrow())));
            leaders.find(|(_, l)| l.ready).map(|(id, _)| id)
        })
        .await
    }

    /// Proposes to the leader, retrying as a client would, and until there is space.
    async fn put(&self, key: &str, value: &str) -> Bytes {
        loop {
            let leader = self.leader().await;
            let cmd = Bytes::from(format!("{key}={value}"));
            match tokio::time::timeout(Duration::from_secs(2), self.node(leader).propose(cmd)).await
            {
                Ok(Ok(reply)) => return reply,
                Ok(Err(e)) => assert!(e.is_retryable() || e.code == Code::NoSpc, "{e:?}"),
                Err(_) => {}
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn settled(&self, ids: &[u64]) {
        within("the same state everywhere", || {
            let first = self.kv(ids[0]);
            let same = ids.iter().all(|id| self.kv(*id).applied() == first.applied());
            same.then(|| ids.iter().for_each(|id| assert_eq!(self.kv(*id).pairs(), first.pairs())))
        })
        .await;
    }
}

/// Waits for a condition, up to a minute of paused time.
async fn within<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    for _ in 0..6000 {
        if let Some(t) = f() {
            return t;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
