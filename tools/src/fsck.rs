//! `strake fsck`: metadata and stored chunks cross-checked while the file system is in use. It changes nothing.
//!
//! The namespace is walked through the client library; every target lists the chunks it has. What differs is looked at a
//! second time after a pause, because a file may have changed in between, and reported only if it still differs. Chunks
//! that the metadata servers are about to delete are counted apart: a removed file keeps them for a grace period.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use clap::Args;
use prost::Message as _;
use serde_json::json;
use strake_client::{Client, Creds};
use strake_fabric::{Connection, Endpoint, Env, Fabric, Identity, Message, Pool, tcp::TcpFabric};
use strake_proto::{
    ChunkId, Code, Error, Ino, NodeId, Result, TargetId,
    data::{DataRequest, ListEntry, Version},
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};

use crate::{config, dev::Cluster, mount, term::Progress};

#[derive(Args)]
pub struct FsckArgs {
    /// Folder of a local cluster (see `strake up`).
    #[arg(long, default_value = "strake-cluster", conflicts_with_all = ["mds", "cluster_key"])]
    dir: PathBuf,
    /// Metadata servers, tcp:HOST:PORT, instead of a local cluster.
    #[arg(long, value_delimiter = ',', requires = "cluster_key")]
    mds: Vec<String>,
    /// File with the cluster key.
    #[arg(long)]
    cluster_key: Option<PathBuf>,
    /// Also read every byte of every file and check its checksums.
    #[arg(long)]
    read_data: bool,
    #[arg(long)]
    json: bool,
}

/// One thing that should not be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Finding {
    /// Chunks of a file that no name and no deletion in progress refers to.
    Leaked { ino: Ino, data: u64, target: TargetId, chunks: u64 },
    /// A chunk on a chain that the file's layout does not put it on.
    Misplaced { chunk: String, target: TargetId },
    /// In-sync replicas of one chunk disagree.
    Diverged { chunk: String, chain: u32, versions: Vec<(TargetId, String)> },
    /// A chunk wholly beyond the end of its file, which nobody has open for writing.
    BeyondEnd { ino: Ino, chunk: String, target: TargetId, size: u64 },
    /// A directory entry whose inode cannot be read.
    Dangling { path: String, ino: Ino, error: String },
    /// A directory that has another name already.
    TwoParents { path: String, ino: Ino },
    /// A file with stripes on a chain whose last copies were given up.
    Lost { path: String, chains: Vec<u32> },
    /// A file whose bytes could not be read.
    Unreadable { path: String, error: String },
}

struct FileInfo {
    path: String,
    size: u64,
    map: StripeMap,
}

/// What one or two looks found.
#[derive(Default)]
struct Outcome {
    findings: Vec<Finding>,
    files: u64,
    chunks: u64,
    /// Chunk replicas that wait for their deletion.
    pending: u64,
}

/// What the metadata servers are about to delete: the lowest size in bytes that a pair of inode and data id is cut to.
type Pending = BTreeMap<(Ino, u64), u64>;

struct Checker {
    client: Client,
    fabric: TcpFabric,
    creds: Creds,
    mds: Vec<Endpoint>,
    connections: BTreeMap<NodeId, Arc<dyn Connection>>,
    progress: Progress,
}

/// What a server gives at most.
const PAGE: u32 = 4096;

pub fn fsck(args: &FsckArgs) -> Result<ExitCode> {
    let (mds, key) = match &args.cluster_key {
        Some(path) => (args.mds.clone(), config::read_key(path)?),
        None => {
            let c = Cluster::open(&args.dir)?;
            (c.mds_endpoints(), config::read_key(&c.cluster_key())?)
        }
    };
    crate::run(0, async {
        let identity = Identity::server(&key);
        let client = mount::connect(&mds, identity.client_key).await?;
        let fabric = TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default());
        let creds = Creds { uid: 0, gid: 0, groups: vec![] };
        let progress = Progress::new();
        let mds = mds.iter().map(|e| e.parse()).collect::<Result<Vec<Endpoint>>>()?;
        let mut checker = Checker { client, fabric, creds, mds, connections: BTreeMap::new(), progress };
        let result = checker.run(args.read_data).await;
        checker.progress.done();
        checker.client.close().await?;
        let outcome = result?;
        report(&outcome, args.json);
        Ok(if outcome.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(4) })
    })
}

impl Checker {
    async fn run(&mut self, read_data: bool) -> Result<Outcome> {
        let mut outcome = self.pass().await?;
        if !outcome.findings.is_empty() {
            // Files being written, deleted or truncated look wrong for a moment.
            self.progress.say(format!("{} differences; looking again", outcome.findings.len()));
            tokio::time::sleep(Duration::from_secs(3)).await;
            let again = self.pass().await?;
            let still: BTreeSet<Finding> = again.findings.into_iter().collect();
            outcome.findings.retain(|f| still.contains(f));
            outcome.pending = again.pending;
        }
        if read_data {
            let (_, unreadable) = self.walk(true).await?;
            // What else it finds, both looks above have found.
            outcome.findings.extend(unreadable.into_iter().filter(|f| matches!(f, Finding::Unreadable { .. })));
        }
        Ok(outcome)
    }

    async fn pass(&mut self) -> Result<Outcome> {
        // Chunks first, what is pending last: a file deleted after its chunks were listed is then known to be gone or
        // going, and a file made after them has its chunks missing from the list, which is no finding.
        let map = self.client.fetch_map().await?;
        let mut lists = BTreeMap::new();
        let mut chunks = 0;
        for target in map.map.targets.iter().filter(|t| t.alive) {
            self.progress.say(format!("listing the chunks of target {}", target.id));
            for chain in map.chains_of(target.id).filter(|c| c.serving().any(|t| t == target.id)) {
                let list = self.list(&map, chain, target.id).await?;
                chunks += list.len() as u64;
                lists.insert((chain.id, target.id), list);
            }
        }
        let (files, mut findings) = self.walk(false).await?;
        let pending = self.of_leader(async |c| going(c).await).await?;
        let (found, pending) = compare(&map, &files, &lists, &pending);
        findings.extend(found);
        // Writers write before they report an end.
        let beyond = |f: &Finding| if let Finding::BeyondEnd { ino, .. } = f { Some(*ino) } else { None };
        let inos: Vec<Ino> = findings.iter().filter_map(beyond).collect::<BTreeSet<_>>().into_iter().collect();
        if !inos.is_empty() {
            let written = self.of_leader(async |c| written(c, &inos).await).await?;
            findings.retain(|f| beyond(f).is_none_or(|ino| !written.contains(&ino)));
        }
        findings.sort();
        Ok(Outcome { findings, files: files.len() as u64, chunks, pending })
    }

    /// Asks the metadata servers in turn until the leader answers.
    async fn of_leader<T>(&self, ask: impl AsyncFn(&dyn Connection) -> Result<T>) -> Result<T> {
        let mut last = Error::new(Code::NoDev, "no metadata server is known");
        for at in &self.mds {
            let answer = async { ask(&*self.fabric.connect(at, None).await?).await };
            match answer.await {
                Ok(a) => return Ok(a),
                Err(e) => last = e.context(format_args!("deletions in progress at {at}")),
            }
        }
        Err(last)
    }

    /// Every regular file, by inode; and names that lead nowhere. With `read`, reads them all.
    async fn walk(&mut self, read: bool) -> Result<(BTreeMap<Ino, FileInfo>, Vec<Finding>)> {
        let (mut files, mut findings) = (BTreeMap::new(), Vec::new());
        let mut folders = vec![(self.client.root(), String::new())];
        let mut seen = BTreeSet::from([self.client.root()]);
        while let Some((dir, path)) = folders.pop() {
            let mut cookie = 0;
            loop {
                let page = self.client.readdir(&self.creds, dir, cookie, 1000, true).await?;
                for e in &page.entries {
                    if e.cookie <= cookie {
                        return Err(Error::new(Code::Protocol, format!("{path}/ is listed out of order")));
                    }
                    cookie = e.cookie;
                    let path = format!("{path}/{}", String::from_utf8_lossy(&e.name));
                    match e.r#type << 12 {
                        libc::S_IFDIR if seen.insert(e.ino) => folders.push((e.ino, path)),
                        libc::S_IFDIR => findings.push(Finding::TwoParents { path, ino: e.ino }),
                        libc::S_IFREG if read => findings.extend(self.read_file(e.ino, path).await),
                        libc::S_IFREG => match self.file(e.ino, &path).await {
                            Ok(f) => drop(files.insert(e.ino, f)),
                            Err(x) => findings.push(Finding::Dangling { path, ino: e.ino, error: x.message }),
                        },
                        _ => {}
                    }
                }
                self.progress.say(format!("{} files walked", files.len()));
                if page.end || page.entries.is_empty() {
                    break;
                }
            }
        }
        Ok((files, findings))
    }

    async fn file(&self, ino: Ino, path: &str) -> Result<FileInfo> {
        let attr = self.client.getattr(&self.creds, ino).await?;
        let info = self.client.get_layout(&self.creds, ino).await?;
        let layout = info.layout.ok_or_else(|| Error::new(Code::Io, "has no layout"))?;
        let map = StripeMap::resolve(ino, &layout, &self.client.map())?;
        Ok(FileInfo { path: path.to_string(), size: attr.size, map })
    }

    async fn read_file(&mut self, ino: Ino, path: String) -> Option<Finding> {
        self.progress.say(format!("reading {path}"));
        let all = async {
            let (file, attr) = self.client.open(&self.creds, ino, 0).await?;
            for at in (0..attr.size).step_by(4 << 20) {
                file.read(at, 4 << 20).await?;
            }
            file.close().await
        };
        all.await.err().map(|e: Error| Finding::Unreadable { path, error: e.message })
    }

    async fn connection(&mut self, map: &MapView, target: TargetId) -> Result<Arc<dyn Connection>> {
        let node =
            map.node_of(target).ok_or_else(|| Error::new(Code::NoDev, format!("target {target} has no node")))?;
        if let Some(c) = self.connections.get(&node.id).filter(|c| !c.is_closed()) {
            return Ok(c.clone());
        }
        let at = node.endpoints.iter().find_map(|e| e.parse::<Endpoint>().ok());
        let at = at.ok_or_else(|| Error::new(Code::NoDev, format!("node {} has no endpoint", node.name)))?;
        let c = self.fabric.connect(&at, None).await.map_err(|e| e.context(&node.name))?;
        self.connections.insert(node.id, c.clone());
        Ok(c)
    }

    async fn list(&mut self, map: &MapView, chain: &pb::Chain, target: TargetId) -> Result<Vec<ListEntry>> {
        let connection = self.connection(map, target).await?;
        let mut all: Vec<ListEntry> = Vec::new();
        let mut after = ChunkId { ino: 0, data: 0, index: 0 };
        loop {
            let request = DataRequest { len: PAGE, ..DataRequest::new(chain.id, chain.epoch, target, after) };
            let reply =
                connection.call(Message::new(opcode::LIST_CHUNKS, request.encode()), Duration::from_secs(30)).await?;
            let bytes: Vec<u8> = reply.payload.iter().flat_map(|b| b.iter().copied()).collect();
            let page = ListEntry::decode_all(&bytes)?;
            let Some(last) = page.last() else { return Ok(all) };
            if !ListEntry::in_order(&page, (!all.is_empty()).then_some(after)) {
                return Err(Error::new(Code::Protocol, format!("target {target} lists its chunks out of order")));
            }
            after = last.chunk;
            let full = page.len() as u32 >= PAGE;
            all.extend(page);
            if !full {
                return Ok(all);
            }
        }
    }
}

async fn ask_pending(c: &dyn Connection, request: pb::PendingRequest) -> Result<Vec<pb::PendingItem>> {
    let body = Bytes::from(request.encode_to_vec());
    let reply = c.call(Message::new(opcode::PENDING, body), Duration::from_secs(10)).await?;
    let reply = pb::PendingReply::decode(reply.body).map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
    Ok(reply.items)
}

/// All that is about to go. A deletion that ends between the listing of chunks and this looks leaked until the second look.
async fn going(c: &dyn Connection) -> Result<Pending> {
    let mut all = Pending::new();
    for kind in 1..=3 {
        let mut after = 0;
        loop {
            let items = ask_pending(c, pb::PendingRequest { kind, after, limit: PAGE, inos: vec![] }).await?;
            let Some(last) = items.last() else { break };
            if last.key <= after {
                return Err(Error::new(Code::Protocol, "items out of order"));
            }
            after = last.key;
            for i in items {
                let size = all.entry((i.ino, i.data_id)).or_insert(i.size);
                *size = i.size.min(*size);
            }
        }
    }
    Ok(all)
}

/// Which of the files somebody has open for writing.
async fn written(c: &dyn Connection, inos: &[Ino]) -> Result<BTreeSet<Ino>> {
    let mut all = BTreeSet::new();
    for part in inos.chunks(PAGE as usize) {
        let request = pb::PendingRequest { kind: 4, after: 0, limit: PAGE, inos: part.to_vec() };
        all.extend(ask_pending(c, request).await?.iter().map(|i| i.ino));
    }
    Ok(all)
}

type Lists = BTreeMap<(u32, TargetId), Vec<ListEntry>>;

/// What the lists say against what the files say; and how many chunk replicas wait for their deletion.
fn compare(map: &MapView, files: &BTreeMap<Ino, FileInfo>, lists: &Lists, pending: &Pending) -> (Vec<Finding>, u64) {
    let mut findings = Vec::new();
    let mut waiting = 0;
    let mut leaks: BTreeMap<(Ino, u64, TargetId), u64> = BTreeMap::new();
    for ((chain, target), list) in lists {
        for e in list.iter().filter(|e| !e.tombstone) {
            let chunk = e.chunk.to_string();
            let cut = pending.get(&(e.chunk.ino, e.chunk.data));
            match files.get(&e.chunk.ino).filter(|f| f.map.data == e.chunk.data) {
                None if cut == Some(&0) => waiting += 1,
                None => *leaks.entry((e.chunk.ino, e.chunk.data, *target)).or_default() += 1,
                Some(f) if f.map.chain_of(e.chunk.index) != *chain => {
                    findings.push(Finding::Misplaced { chunk: format!("{chunk} ({})", f.path), target: *target });
                }
                Some(f) if cut.is_some_and(|size| e.chunk.index >= f.map.cut(*size).first_gone) => waiting += 1,
                Some(f) if e.chunk.index >= f.map.cut(f.size).first_gone => {
                    let chunk = format!("{chunk} ({})", f.path);
                    let ino = e.chunk.ino;
                    findings.push(Finding::BeyondEnd { ino, chunk, target: *target, size: f.size });
                }
                Some(_) => {}
            }
        }
    }
    findings.extend(leaks.into_iter().map(|((ino, data, target), chunks)| Finding::Leaked {
        ino,
        data,
        target,
        chunks,
    }));
    for chain in &map.map.chains {
        findings.extend(diverged(chain, lists));
    }
    for f in files.values().filter(|f| f.size > 0) {
        let used: BTreeSet<u32> = f.map.chains.iter().copied().collect();
        let chains: Vec<u32> = used.into_iter().filter(|id| map.chain(*id).is_some_and(|c| c.lost)).collect();
        if !chains.is_empty() {
            findings.push(Finding::Lost { path: f.path.clone(), chains });
        }
    }
    (findings, waiting)
}

/// Chunks whose versions differ between the chain's in-sync replicas.
fn diverged(chain: &pb::Chain, lists: &Lists) -> Vec<Finding> {
    let members: Vec<TargetId> = chain.serving().collect();
    let mut seen: BTreeMap<ChunkId, BTreeMap<TargetId, (Version, bool, u32)>> = BTreeMap::new();
    for t in &members {
        for e in lists.get(&(chain.id, *t)).into_iter().flatten() {
            seen.entry(e.chunk).or_default().insert(*t, (e.version, e.tombstone, e.len));
        }
    }
    let tell = |v: Option<&(Version, bool, u32)>| match v {
        None => "absent".to_string(),
        Some((v, tombstone, len)) => {
            format!("{}.{}{}", v.epoch, v.number, if *tombstone { " removed".into() } else { format!(" {len} bytes") })
        }
    };
    let differs = |by: &BTreeMap<TargetId, (Version, bool, u32)>| {
        // A tombstone may be forgotten on one replica before the other; both mean "not there".
        let there = |t: &TargetId| by.get(t).filter(|v| !v.1);
        members.windows(2).any(|w| there(&w[0]) != there(&w[1]))
    };
    seen.iter()
        .filter(|(_, by)| differs(by))
        .map(|(chunk, by)| Finding::Diverged {
            chunk: chunk.to_string(),
            chain: chain.id,
            versions: members.iter().map(|t| (*t, tell(by.get(t)))).collect(),
        })
        .collect()
}

fn text(f: &Finding) -> String {
    match f {
        Finding::Leaked { ino, data, target, chunks } => {
            format!("leaked: {chunks} chunks of inode {ino:#x}, data {data:#x}, on target {target}: no file has them")
        }
        Finding::Misplaced { chunk, target } => format!("misplaced: chunk {chunk} on target {target}"),
        Finding::Diverged { chunk, chain, versions } => {
            let v: Vec<String> = versions.iter().map(|(t, v)| format!("target {t}: {v}")).collect();
            format!("diverged: chunk {chunk} of chain {chain}: {}", v.join(", "))
        }
        Finding::BeyondEnd { chunk, target, size, .. } => {
            format!("beyond the end: chunk {chunk} on target {target}; the file has {size} bytes")
        }
        Finding::Dangling { path, ino, error } => format!("dangling: {path} (inode {ino:#x}): {error}"),
        Finding::TwoParents { path, ino } => format!("directory with two names: {path} (inode {ino:#x})"),
        Finding::Lost { path, chains } => {
            let list = chains.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            format!("lost: {path} has stripes on chains {list}, whose last copies were given up")
        }
        Finding::Unreadable { path, error } => format!("unreadable: {path}: {error}"),
    }
}

fn report(o: &Outcome, as_json: bool) {
    let (findings, clean) = (&o.findings, o.findings.is_empty());
    if as_json {
        let list: Vec<String> = findings.iter().map(text).collect();
        let all = json!({
            "files": o.files, "chunks": o.chunks, "pending_deletion": o.pending, "findings": list, "clean": clean
        });
        println!("{all:#}");
        return;
    }
    for f in findings {
        println!("{}", text(f));
    }
    let verdict = if clean { "clean".to_string() } else { format!("{} findings", findings.len()) };
    let pending = if o.pending > 0 { format!(" ({} pending deletion)", o.pending) } else { String::new() };
    println!("{} files, {} chunk replicas{pending}: {verdict}", o.files, o.chunks);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ino: Ino, index: u64, number: u64) -> ListEntry {
        let version = Version { epoch: 1, number };
        ListEntry { chunk: ChunkId { ino, data: 1, index }, version, len: 10, tombstone: false }
    }

    fn map() -> MapView {
        let serving = |target| pb::Replica { target, state: pb::ReplicaState::ReplicaServing as i32 };
        let chain =
            |id| pb::Chain { id, epoch: 1, replicas: vec![serving(1), serving(2)], preferred: vec![1, 2], lost: false };
        let target = |id| pb::Target { id, alive: true, ..Default::default() };
        let map = pb::ClusterMap {
            chains: vec![chain(1), chain(2)],
            targets: vec![target(1), target(2)],
            ..Default::default()
        };
        MapView::new(map).unwrap()
    }

    fn files() -> BTreeMap<Ino, FileInfo> {
        let map = StripeMap { ino: 7, data: 1, stripe_size: 1 << 20, chains: vec![1, 2] };
        BTreeMap::from([(7, FileInfo { path: "/f".into(), size: 2 << 20, map })])
    }

    #[test]
    fn a_whole_file_system_has_no_findings() {
        let lists = Lists::from([
            ((1, 1), vec![entry(7, 0, 3)]),
            ((1, 2), vec![entry(7, 0, 3)]),
            ((2, 1), vec![entry(7, 1, 1)]),
            ((2, 2), vec![entry(7, 1, 1)]),
        ]);
        assert_eq!(compare(&map(), &files(), &lists, &Pending::new()), (vec![], 0));
    }

    #[test]
    fn chunks_that_are_about_to_go_are_no_findings() {
        let both = |e: Vec<ListEntry>| Lists::from([((1, 1), e.clone()), ((1, 2), e)]);
        let lists = both(vec![entry(7, 0, 1), entry(7, 2, 1), entry(8, 0, 1)]);
        assert_eq!(compare(&map(), &files(), &lists, &Pending::new()).0.len(), 4);
        // The file is cut to its size, the other one is removed.
        let pending = Pending::from([((7, 1), 2 << 20), ((8, 1), 0)]);
        assert_eq!(compare(&map(), &files(), &lists, &pending), (vec![], 4));
        // Another generation of the data is removed: not these chunks.
        let pending = Pending::from([((8, 2), 0)]);
        assert_eq!(compare(&map(), &files(), &lists, &pending).0.len(), 4);
    }

    #[test]
    fn each_planted_fault_is_found() {
        let lists = Lists::from([
            ((1, 1), vec![entry(7, 0, 3), entry(7, 1, 1), entry(8, 0, 1), entry(8, 2, 1)]),
            ((1, 2), vec![entry(7, 0, 2)]),
            ((2, 1), vec![entry(7, 3, 1)]),
            ((2, 2), vec![]),
        ]);
        let (found, waiting) = compare(&map(), &files(), &lists, &Pending::new());
        assert_eq!(waiting, 0);
        let has = |f: fn(&Finding) -> bool| found.iter().any(f);
        assert!(has(|f| matches!(f, Finding::Leaked { ino: 8, target: 1, chunks: 2, .. })), "{found:?}");
        assert!(has(|f| matches!(f, Finding::Misplaced { target: 1, .. })), "{found:?}");
        assert!(has(|f| matches!(f, Finding::BeyondEnd { target: 1, .. })), "{found:?}");
        assert!(has(|f| matches!(f, Finding::Diverged { chunk, .. } if chunk == "7.1.0")), "{found:?}");
    }
}
