//! One look at all names and all chunks of a file system in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message as _;
use strake_client::{Client, Creds};
use strake_fabric::{Connection, Endpoint, Fabric, Message};
use strake_proto::{
    ChunkId, Code, Error, Ino, NodeId, Result, TargetId,
    data::{DataRequest, ListEntry},
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};

use crate::findings::{FileInfo, Finding, Pending, compare, tombstones};

/// What one or two looks found.
#[derive(Default)]
pub struct Outcome {
    /// What was found, in order.
    pub findings: Vec<Finding>,
    /// Files, each once.
    pub files: u64,
    /// Chunk replicas.
    pub chunks: u64,
    /// Chunk replicas that wait for their deletion.
    pub pending: u64,
    /// Tombstones that nothing needs any more.
    pub tombstones: u64,
    /// Targets whose chunks were listed.
    pub listed: BTreeSet<TargetId>,
    /// [`Finding::only_copy`] of both looks, including what only one of them found.
    pub only_copies: BTreeSet<(Ino, u64, u32)>,
}

/// Checks a file system, and repairs it on request.
pub struct Checker {
    pub(crate) client: Client,
    fabric: Arc<dyn Fabric>,
    creds: Creds,
    mds: Vec<Endpoint>,
    connections: BTreeMap<NodeId, Arc<dyn Connection>>,
    pub(crate) progress: Box<dyn FnMut(String) + Send>,
    repairs: bool,
}

/// Most entries that a server returns per request.
const PAGE: u32 = 4096;
/// How long the metadata servers may be without a leader.
const LEADERLESS: Duration = Duration::from_secs(15);

impl Checker {
    /// `fabric` must act as a server, because storage servers list their chunks only for servers.
    /// `repairs`: also report tombstones that nothing needs. They take a little space and do no
    /// harm. `progress` receives progress messages.
    pub fn new(
        client: Client,
        fabric: Arc<dyn Fabric>,
        mds: Vec<Endpoint>,
        repairs: bool,
        progress: impl FnMut(String) + Send + 'static,
    ) -> Checker {
        let creds = Creds { uid: 0, gid: 0, groups: vec![] };
        let progress = Box::new(progress);
        Checker { client, fabric, creds, mds, connections: BTreeMap::new(), progress, repairs }
    }

    /// Ends the client's session.
    pub async fn close(self) -> Result<()> {
        self.client.close().await
    }

    /// Looks, and looks again if there are differences. `read_data`: also reads every byte of
    /// every file.
    pub async fn run(&mut self, read_data: bool) -> Result<Outcome> {
        let mut outcome = self.pass().await?;
        if !outcome.findings.is_empty() {
            // Files being written, deleted or truncated look wrong for a moment.
            (self.progress)(format!("{} differences; checking again", outcome.findings.len()));
            tokio::time::sleep(Duration::from_secs(3)).await;
            let again = self.pass().await?;
            outcome.only_copies.extend(&again.only_copies);
            let still: BTreeSet<Finding> = again.findings.into_iter().collect();
            outcome.findings.retain(|f| still.contains(f));
            outcome.pending = again.pending;
        }
        if read_data {
            let (_, unreadable) = self.walk(true).await?;
            // The walk's other findings come from the looks above.
            outcome
                .findings
                .extend(unreadable.into_iter().filter(|f| matches!(f, Finding::Unreadable { .. })));
        }
        Ok(outcome)
    }

    pub(crate) async fn pass(&mut self) -> Result<Outcome> {
        // List chunks first and pending deletions last. A file deleted after the listing is then
        // known to be gone or pending. A file made after the listing has no chunks in it, which is
        // no finding.
        let map = self.client.servers().fetch_map().await?;
        let mut lists = BTreeMap::new();
        let mut chunks = 0;
        for target in map.map.targets.iter().filter(|t| t.alive) {
            (self.progress)(format!("listing the chunks of target {}", target.id));
            for chain in map.chains_of(target.id).filter(|c| c.serving().any(|t| t == target.id)) {
                let list = self.list(&map, chain, target.id).await?;
                chunks += list.len() as u64;
                lists.insert((chain.id, target.id), list);
            }
        }
        let listed = lists.keys().map(|(_, target)| *target).collect();
        let (files, mut findings) = self.walk(false).await?;
        let unread = findings.iter().filter_map(|f| match f {
            Finding::Dangling { ino, gone: false, .. } => Some(*ino),
            _ => None,
        });
        let unread = unread.collect();
        let going = self.going().await?;
        let (found, pending) = compare(&map, &files, &lists, &going, &unread);
        findings.extend(found);
        let mut unneeded = tombstones(&files, &lists, &going, &unread);
        let count = |f: &Finding| {
            if let Finding::Tombstones { tombstones, .. } = f { *tombstones } else { 0 }
        };
        let tombstones = unneeded.iter().map(count).sum();
        if self.repairs {
            findings.append(&mut unneeded);
        }
        // Writers store data before they report a new end, and resend what storage servers lost.
        let beyond = |f: &Finding| match f {
            Finding::BeyondEnd { chunk, .. } => Some(chunk.ino),
            Finding::Missing { ino, .. } => Some(*ino),
            _ => None,
        };
        let inos: Vec<Ino> =
            findings.iter().filter_map(beyond).collect::<BTreeSet<_>>().into_iter().collect();
        if !inos.is_empty() {
            let written = self.of_leader(async |c| written(c, &inos).await).await?;
            findings.retain(|f| beyond(f).is_none_or(|ino| !written.contains(&ino)));
        }
        findings.sort();
        let only_copies = findings.iter().filter_map(Finding::only_copy).collect();
        Ok(Outcome {
            findings,
            files: files.len() as u64,
            chunks,
            pending,
            tombstones,
            listed,
            only_copies,
        })
    }

    /// What the metadata servers are about to delete.
    pub(crate) async fn going(&self) -> Result<Pending> {
        self.of_leader(async |c| going(c).await).await
    }

    /// Asks the metadata servers in turn until the leader answers.
    pub(crate) async fn of_leader<T>(
        &self,
        ask: impl AsyncFn(&dyn Connection) -> Result<T>,
    ) -> Result<T> {
        let (start, mut last) =
            (Instant::now(), Error::new(Code::NoDev, "no metadata server is known"));
        loop {
            for at in &self.mds {
                let connect = async { self.fabric.connect(at, None).await };
                let unreachable = |e: Error| match e.code {
                    Code::Unauthenticated => e,
                    _ => Error::new(Code::Disconnected, e.message),
                };
                let answer = async { ask(&*connect.await.map_err(unreachable)?).await };
                match answer.await {
                    Err(e) if passes(&e) => last = e.context(format_args!("metadata server {at}")),
                    answer => return answer,
                }
            }
            if start.elapsed() > LEADERLESS || self.mds.is_empty() {
                return Err(last);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Every regular file, by inode, and names that lead nowhere. With `read`, reads all of them.
    async fn walk(&mut self, read: bool) -> Result<(BTreeMap<Ino, FileInfo>, Vec<Finding>)> {
        let (mut files, mut findings) = (BTreeMap::new(), Vec::new());
        let mut folders = vec![(self.client.root(), String::new())];
        let mut seen = BTreeSet::from([self.client.root()]);
        while let Some((dir, path)) = folders.pop() {
            let mut cookie = 0;
            loop {
                let page = match self.client.readdir(&self.creds, dir, cookie, 1000, true).await {
                    Err(e) if e.code == Code::NoEnt => break, // removed since its name was seen
                    page => page?,
                };
                for e in &page.entries {
                    if e.cookie <= cookie {
                        return Err(Error::new(
                            Code::Protocol,
                            format!("{path}/ is listed out of order"),
                        ));
                    }
                    cookie = e.cookie;
                    let path = format!("{path}/{}", String::from_utf8_lossy(&e.name));
                    let dangling = |path, x: Error| Finding::Dangling {
                        path,
                        parent: dir,
                        name: e.name.to_vec(),
                        ino: e.ino,
                        error: x.message,
                        gone: x.code == Code::NoEnt,
                    };
                    match e.r#type << 12 {
                        libc::S_IFREG if read => findings.extend(self.read_file(e.ino, path).await),
                        libc::S_IFREG => match self.file(e.ino, &path).await {
                            Ok(f) => drop(files.insert(e.ino, f)),
                            Err(x) => findings.push(dangling(path, x)),
                        },
                        kind => match self.exists(e).await {
                            Err(x) => findings.push(dangling(path, x)),
                            Ok(()) if kind != libc::S_IFDIR => {}
                            Ok(()) if seen.insert(e.ino) => folders.push((e.ino, path)),
                            Ok(()) => findings.push(Finding::TwoParents { path, ino: e.ino }),
                        },
                    }
                }
                (self.progress)(format!("{} files walked", files.len()));
                if page.end || page.entries.is_empty() {
                    break;
                }
            }
        }
        Ok((files, findings))
    }

    /// Whether the inode of an entry exists: an entry listed with attributes has one.
    async fn exists(&self, e: &pb::DirEntry) -> Result<()> {
        match e.attr {
            Some(_) => Ok(()),
            None => self.client.getattr(&self.creds, e.ino).await.map(drop),
        }
    }

    async fn file(&self, ino: Ino, path: &str) -> Result<FileInfo> {
        let attr = self.client.getattr(&self.creds, ino).await?;
        let info = self.client.layouts().get(&self.creds, ino).await?;
        let layout = info.layout.ok_or_else(|| Error::new(Code::Io, "has no layout"))?;
        let map = StripeMap::resolve(ino, &layout, &self.client.servers().map())?;
        Ok(FileInfo { path: path.to_string(), size: attr.size, dense: !attr.sparse, map })
    }

    async fn read_file(&mut self, ino: Ino, path: String) -> Option<Finding> {
        (self.progress)(format!("reading {path}"));
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
        let node = map
            .node_of(target)
            .ok_or_else(|| Error::new(Code::NoDev, format!("target {target} has no node")))?;
        if let Some(c) = self.connections.get(&node.id).filter(|c| !c.is_closed()) {
            return Ok(c.clone());
        }
        let mut failed = Error::new(Code::NoDev, format!("node {} has no endpoint", node.name));
        for at in self.fabric.routes(&node.endpoints).map_err(|e| e.context(&node.name))? {
            match self.fabric.connect(&at, None).await {
                Ok(c) => {
                    self.connections.insert(node.id, c.clone());
                    return Ok(c);
                }
                Err(e) => failed = e.context(&node.name),
            }
        }
        Err(failed)
    }

    async fn list(
        &mut self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
    ) -> Result<Vec<ListEntry>> {
        let connection = self.connection(map, target).await?;
        let mut all: Vec<ListEntry> = Vec::new();
        let mut after = ChunkId { ino: 0, data: 0, index: 0 };
        loop {
            let request =
                DataRequest { len: PAGE, ..DataRequest::new(chain.id, chain.epoch, target, after) };
            let reply = connection
                .call(Message::new(opcode::LIST_CHUNKS, request.encode()), Duration::from_secs(30))
                .await?;
            let bytes: Vec<u8> = reply.payload.iter().flat_map(|b| b.iter().copied()).collect();
            let page = ListEntry::decode_all(&bytes)?;
            let Some(last) = page.last() else { return Ok(all) };
            if !ListEntry::in_order(&page, (!all.is_empty()).then_some(after)) {
                return Err(Error::new(
                    Code::Protocol,
                    format!("target {target} lists its chunks out of order"),
                ));
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

/// Errors that a retry, or another server, may clear.
fn passes(e: &Error) -> bool {
    matches!(e.code, Code::NotLeader | Code::Disconnected | Code::TimedOut | Code::Overloaded)
}

async fn ask_pending(
    c: &dyn Connection,
    request: pb::PendingRequest,
) -> Result<Vec<pb::PendingItem>> {
    let body = Bytes::from(request.encode_to_vec());
    let reply = c.call(Message::new(opcode::PENDING, body), Duration::from_secs(10)).await?;
    let reply = pb::PendingReply::decode(reply.body)
        .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
    Ok(reply.items)
}

/// All pending deletions. A deletion that finishes between the listing of chunks and this call
/// looks like a leak until the second look.
async fn going(c: &dyn Connection) -> Result<Pending> {
    let mut all = Pending::new();
    for kind in 1..=3 {
        let mut after = 0;
        loop {
            let items =
                ask_pending(c, pb::PendingRequest { kind, after, limit: PAGE, inos: vec![] })
                    .await?;
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

/// Which of these files some client has open for writing.
pub(crate) async fn written(c: &dyn Connection, inos: &[Ino]) -> Result<BTreeSet<Ino>> {
    let mut all = BTreeSet::new();
    for part in inos.chunks(PAGE as usize) {
        let request = pb::PendingRequest { kind: 4, after: 0, limit: PAGE, inos: part.to_vec() };
        all.extend(ask_pending(c, request).await?.iter().map(|i| i.ino));
    }
    Ok(all)
}
