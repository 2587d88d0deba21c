//! What the simulated clients do, and the checks of what they see.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, Creds, File};
use strake_proto::{Code, Error, Ino, Result, checksum::BLOCK};
use tokio::time::sleep;

use crate::{
    net::Network,
    oracle::{CELL, FileModel, NameModel, fill},
};

/// Files of each client, and their largest size.
pub const FILES: usize = 3;
pub const FILE_BYTES: u64 = 1 << 20;
/// Names of each client that one file after another takes, and the largest size of these files.
const DOCUMENTS: u32 = 2;
const DOCUMENT_CELLS: usize = 200;
/// How often a read that fails is tried again until all repairs are done, and how long between:
/// storage servers try again every 30 s.
const REPAIRED: u32 = 5;
const REPAIR: Duration = Duration::from_secs(20);
/// O_RDWR on Linux.
pub const RDWR: u32 = 2;

/// Broken promises and counters, shared by all tasks of a run.
pub struct Findings {
    net: Network,
    pub violations: Vec<String>,
    /// How many events the trace had when the first broken promise was found.
    pub broken_at: Option<usize>,
    pub writes: u64,
    pub punches: u64,
    pub cuts: u64,
    pub seeks: u64,
    pub syncs: u64,
    pub reads: u64,
    pub names: u64,
    pub replaced: u64,
    pub locks: u64,
    pub looks: u64,
    pub waits_given_up: u64,
    pub errors: u64,
    /// Blocks decay, so bytes may be lost.
    pub decays: bool,
    /// Blocks that could not be read at the end.
    pub lost: Vec<Lost>,
    /// The end of the furthest write of each file that has returned.
    pub ends: BTreeMap<Ino, End>,
    /// A counter for each file: odd while its size is being set, when a reader may see the old size
    /// or the new one.
    pub sizings: BTreeMap<Ino, u64>,
    /// Smaller sizes that a client was shown later. These break a promise unless the writer lost
    /// its session, and with it the bytes.
    pub short: Vec<(End, String)>,
}

impl Findings {
    pub fn new(net: Network) -> Findings {
        Findings {
            net,
            violations: Vec::new(),
            broken_at: None,
            writes: 0,
            punches: 0,
            cuts: 0,
            seeks: 0,
            syncs: 0,
            reads: 0,
            names: 0,
            replaced: 0,
            locks: 0,
            looks: 0,
            waits_given_up: 0,
            errors: 0,
            decays: false,
            lost: Vec::new(),
            ends: BTreeMap::new(),
            sizings: BTreeMap::new(),
            short: Vec::new(),
        }
    }

    /// Notes a broken promise.
    pub fn broken(&mut self, what: String) {
        self.broken_at.get_or_insert(self.net.events());
        self.violations.push(what);
    }
}

/// A block of a file that cannot be read, and the model of what may be there.
pub struct Lost {
    pub ino: Ino,
    pub offset: u64,
    pub model: FileModel,
}

/// The furthest write of a client that returned, and how many sessions it had lost by then.
#[derive(Clone, Copy)]
pub struct End {
    pub end: u64,
    pub client: u32,
    pub lost: u64,
}

pub type Shared = Arc<Mutex<Findings>>;

pub fn root() -> Creds {
    Creds { uid: 0, gid: 0, groups: vec![] }
}

/// One client with files and names of its own, which other clients read.
pub struct Actor {
    id: u32,
    client: Client,
    rng: StdRng,
    found: Shared,
    dir: Ino,
    files: Vec<(File, FileModel)>,
    names: NameModel,
    /// What a document may hold: the file that took its name last, and also the ones before if it
    /// is not known whether that rename happened.
    documents: BTreeMap<String, Vec<Vec<u8>>>,
    /// About half of the documents are closed without an fsync, as a program may do.
    only_closes: bool,
    next_tag: u32,
    next_name: u32,
}

impl Actor {
    pub async fn new(
        id: u32,
        client: Client,
        seed: u64,
        found: Shared,
        only_closes: bool,
    ) -> Result<Actor> {
        let dir =
            match client.mkdir(&root(), client.root(), format!("d{id}").as_bytes(), 0o755).await {
                Err(e) if e.code == Code::Exist => {
                    client.lookup(&root(), client.root(), format!("d{id}").as_bytes()).await?.ino
                }
                r => r?.ino,
            };
        let mut files = Vec::new();
        for n in 0..FILES {
            let name = format!("file{n}");
            let (f, _) =
                client.create(&root(), dir, name.as_bytes(), 0o644, RDWR, false, None).await?;
            files.push((f, FileModel::default()));
        }
        let names = NameModel {
            there: (0..FILES).map(|n| format!("file{n}")).collect(),
            ..NameModel::default()
        };
        let rng = StdRng::seed_from_u64(seed);
        let documents = BTreeMap::new();
        let (next_tag, next_name) = (id << 24 | 1, 0);
        Ok(Actor {
            id,
            client,
            rng,
            found,
            dir,
            files,
            names,
            documents,
            only_closes,
            next_tag,
            next_name,
        })
    }

    fn violation(&self, what: String) {
        self.found.lock().broken(format!("client {}: {what}", self.id));
    }

    /// Does random operations until told to stop.
    pub async fn run(&mut self, stop: Arc<std::sync::atomic::AtomicBool>) {
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            let result = match self.rng.random_range(0..31) {
                27..=30 => self.replace().await,
                24..=26 => self.truncate().await,
                20..=21 => self.punch().await,
                22..=23 => self.seek().await,
                0..=7 => self.write().await,
                8..=10 => self.sync().await,
                11..=14 => self.read().await,
                15..=17 => self.rename_dance().await,
                _ => self.list().await,
            };
            if let Err(e) = result {
                self.found.lock().errors += 1;
                tracing::info!("client {}: {e:?}", self.id);
            }
            sleep(Duration::from_millis(self.rng.random_range(0..15))).await;
        }
    }

    async fn write(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        let cells = FILE_BYTES / CELL as u64;
        let first = self.rng.random_range(0..cells);
        let count = self.rng.random_range(1..=(cells - first).min(300));
        let (offset, len) = (first * CELL as u64, (count as usize) * CELL);
        let tag = self.next_tag;
        self.next_tag += 1;
        let mut bytes = vec![0; len];
        fill(tag, offset, &mut bytes);
        let (file, model) = &mut self.files[n];
        tracing::debug!(
            "client {}: writes {offset}+{len} of {:#x}, tag {tag}",
            self.id,
            file.ino()
        );
        model.wrote(tag, offset, len);
        file.write_all_at(offset, &bytes).await.inspect_err(|_| model.write_failed(tag))?;
        let end = offset + len as u64;
        model.answered(end);
        let (ino, lost) = (file.ino(), self.client.stats().sessions_lost);
        let mut found = self.found.lock();
        found.writes += 1;
        if found.ends.get(&ino).is_none_or(|e| e.end < end || e.lost != lost) {
            found.ends.insert(ino, End { end, client: self.id, lost });
        }
        Ok(())
    }

    async fn punch(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        let cells = FILE_BYTES / CELL as u64;
        let first = self.rng.random_range(0..cells);
        let count = self.rng.random_range(1..=(cells - first).min(600));
        let tag = self.next_tag;
        self.next_tag += 1;
        let (file, model) = &mut self.files[n];
        model.punched(tag, first * CELL as u64, count * CELL as u64);
        file.punch(first * CELL as u64, count * CELL as u64)
            .await
            .inspect_err(|_| model.write_failed(tag))?;
        self.found.lock().punches += 1;
        Ok(())
    }

    /// As a program that rewrites a file, or one that truncates or extends it.
    async fn truncate(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        let cells = FILE_BYTES / CELL as u64;
        let size = if self.rng.random_bool(0.5) {
            0
        } else {
            self.rng.random_range(0..=cells) * CELL as u64
        };
        let tag = self.next_tag;
        self.next_tag += 1;
        let (file, model) = &mut self.files[n];
        tracing::debug!(
            "client {}: sets the size of {:#x} to {size}, tag {tag}",
            self.id,
            file.ino()
        );
        model.sizing(tag, size);
        {
            let mut found = self.found.lock();
            found.ends.remove(&file.ino());
            *found.sizings.entry(file.ino()).or_default() |= 1;
        }
        file.truncate(size).await.inspect_err(|_| model.write_failed(tag))?;
        tracing::debug!(
            "client {}: set the size of {:#x} to {size}, tag {tag}",
            self.id,
            file.ino()
        );
        model.sized(size);
        let mut found = self.found.lock();
        *found.sizings.entry(file.ino()).or_default() += 1;
        found.cuts += 1;
        Ok(())
    }

    /// A reported hole must be a range that may read as zeros.
    async fn seek(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        let at = self.rng.random_range(0..FILE_BYTES / CELL as u64) * CELL as u64;
        let (file, model) = &self.files[n];
        let (data, hole) = (file.seek_data(at).await, file.seek_hole(at).await);
        let (data, hole) = match (data, hole) {
            (Err(d), Err(h)) if d.code == Code::NxIo && h.code == Code::NxIo => return Ok(()),
            (Err(d), Ok(hole)) if d.code == Code::NxIo => (model.most_size.max(at), hole),
            (data, hole) => (data?, hole?),
        };
        // The two calls need not agree: in between, data that are not synced may be lost and sent
        // again.
        let mut wrong = model.check_hole(at, data).err();
        if data < at || hole < at {
            wrong = Some(format!("from {at}: data at {data}, a hole at {hole}"));
        }
        if hole < model.most_size {
            wrong = wrong.or(model.check_hole(hole, (hole / 4096 + 1) * 4096).err());
        }
        if let Some(e) = wrong {
            self.violation(format!("file{n}: {e}"));
        }
        self.found.lock().seeks += 1;
        Ok(())
    }

    async fn sync(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        let (file, model) = &mut self.files[n];
        file.fsync().await.inspect_err(|_| model.sync_failed())?;
        tracing::debug!("client {}: synced {:#x}", self.id, file.ino());
        model.synced();
        self.found.lock().syncs += 1;
        Ok(())
    }

    async fn read(&mut self) -> Result<()> {
        let n = self.rng.random_range(0..FILES);
        self.read_file(n).await
    }

    async fn read_file(&mut self, n: usize) -> Result<()> {
        let bytes = match read_all(&self.files[n].0, FILE_BYTES).await {
            Err(e) if e.code == Code::Io => {
                // The data of an ended session are lost for the files that were open. An error for
                // that was returned before, or will be.
                let _ = self.reopen(n).await;
                return Err(e);
            }
            bytes => bytes?,
        };
        let model = &self.files[n].1;
        if let Err(e) = model.check_size(bytes.len() as u64).and_then(|()| model.check(0, &bytes)) {
            self.violation(format!("file{n}: {e}"));
        }
        self.found.lock().reads += 1;
        Ok(())
    }

    async fn reopen(&mut self, n: usize) -> Result<()> {
        let (file, model) = &mut self.files[n];
        let (new, _) = self.client.open(&root(), file.ino(), RDWR).await?;
        let old = std::mem::replace(file, new);
        old.close().await.inspect_err(|_| model.sync_failed())
    }

    /// Makes a file, renames it and sometimes removes it. Listings are checked against the
    /// acknowledgements.
    async fn rename_dance(&mut self) -> Result<()> {
        let (a, b) = (format!("n{}", self.next_name), format!("m{}", self.next_name));
        self.next_name += 1;
        self.names.open.extend([a.clone(), b.clone()]);
        self.client.mknod(&root(), self.dir, a.as_bytes(), 0o100_644, 0).await?;
        self.client.rename(&root(), (self.dir, a.as_bytes()), (self.dir, b.as_bytes()), 0).await?;
        self.names.open.remove(&a);
        if self.rng.random_bool(0.5) {
            self.client.unlink(&root(), self.dir, b.as_bytes()).await?;
        } else {
            self.names.there.insert(b.clone());
        }
        self.names.open.remove(&b);
        self.found.lock().names += 1;
        Ok(())
    }

    /// As an editor saves a document: writes a new file, syncs or closes it and renames it over the
    /// old one. Sometimes it removes the name instead.
    async fn replace(&mut self) -> Result<()> {
        let (new, name) =
            (format!("w{}", self.next_name), format!("doc{}", self.rng.random_range(0..DOCUMENTS)));
        self.next_name += 1;
        let (dir, client) = (self.dir, self.client.clone());
        if self.rng.random_bool(0.2) && self.names.there.remove(&name) {
            self.names.open.insert(name.clone());
            client.unlink(&root(), dir, name.as_bytes()).await?;
            self.names.open.remove(&name);
            return Ok(());
        }
        self.names.open.insert(new.clone());
        let (file, _) =
            client.create(&root(), dir, new.as_bytes(), 0o644, RDWR, true, None).await?;
        let saved = self.save(&file).await;
        let closed = file.close().await;
        let bytes = closed.and(saved)?;
        if !self.names.there.contains(&name) {
            self.names.open.insert(name.clone());
        }
        self.documents.entry(name.clone()).or_default().push(bytes.clone());
        client.rename(&root(), (dir, new.as_bytes()), (dir, name.as_bytes()), 0).await?;
        self.documents.insert(name.clone(), vec![bytes]);
        self.names.there.insert(name.clone());
        self.names.open.retain(|n| *n != new && *n != name);
        self.found.lock().replaced += 1;
        Ok(())
    }

    /// Writes a document and returns its bytes. They are safe now, or once the file is closed.
    async fn save(&mut self, file: &File) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        for _ in 0..self.rng.random_range(1..=3) {
            let mut bytes = vec![0; self.rng.random_range(1..=DOCUMENT_CELLS / 3) * CELL];
            fill(self.next_tag, all.len() as u64, &mut bytes);
            self.next_tag += 1;
            file.write_all_at(all.len() as u64, &bytes).await?;
            all.extend(bytes);
        }
        if !self.only_closes || self.next_tag.is_multiple_of(2) {
            file.fsync().await?;
        }
        Ok(all)
    }

    /// Checks with another client that each document holds what was safe before the rename to its
    /// name.
    async fn check_documents(&self, other: &Client) -> Result<()> {
        for (name, may_hold) in &self.documents {
            let found = match other.lookup(&root(), self.dir, name.as_bytes()).await {
                // The list of names is checked elsewhere.
                Err(e) if e.code == Code::NoEnt => continue,
                r => r?,
            };
            let (file, _) = other.open(&root(), found.ino, 0).await?;
            let bytes = read_all(&file, FILE_BYTES).await;
            file.close().await?;
            let bytes = match bytes {
                Err(e) if self.may_be_lost(&e) => continue,
                r => r?,
            };
            if !may_hold.contains(&bytes) {
                let (len, lens): (_, Vec<usize>) =
                    (bytes.len(), may_hold.iter().map(Vec::len).collect());
                self.violation(format!(
                    "{name} has {len} bytes that are none of those saved under it ({lens:?} bytes)"
                ));
            }
            self.found.lock().reads += 1;
        }
        Ok(())
    }

    async fn list(&mut self) -> Result<()> {
        let listed = list(&self.client, self.dir).await?;
        if let Err(e) = self.names.check(&listed) {
            self.violation(e);
        }
        Ok(())
    }

    /// An earlier failure is reported once; then, with nothing broken any more, the next fsync must
    /// succeed.
    async fn last_sync(&mut self, n: usize) -> Result<()> {
        let (file, model) = &mut self.files[n];
        // A failed write-back is reported by the first flush and by the first fsync.
        let told = [file.flush().await, file.fsync().await];
        if told.iter().any(|r| r.is_err()) {
            tracing::info!("client {}: file{n}: {told:?}", self.id);
            model.sync_failed();
            file.fsync()
                .await
                .map_err(|e| e.context(format!("client {}: last fsync of file{n}", self.id)))?;
        }
        model.synced();
        Ok(())
    }

    fn may_be_lost(&self, e: &Error) -> bool {
        matches!(e.code, Code::Corrupt | Code::Io) && self.found.lock().decays
    }

    /// As [`Actor::read_file`], but a read that fails is tried again until every repair had its
    /// time. Then the blocks that still cannot be read are noted; all others must be right.
    async fn last_read(&mut self, n: usize) -> Result<()> {
        for _ in 0..REPAIRED {
            match self.read_file(n).await {
                Err(e) if self.may_be_lost(&e) => sleep(REPAIR).await,
                r => return r,
            }
        }
        let (file, model) = &self.files[n];
        for offset in (0..model.most_size).step_by(BLOCK) {
            match file.read(offset, BLOCK).await {
                Ok(parts) => {
                    let bytes = parts.iter().map(|b| &b[..]).collect::<Vec<_>>().concat();
                    if let Err(e) = model.check(offset, &bytes) {
                        self.violation(format!("file{n}: {e}"));
                    }
                }
                Err(e) if self.may_be_lost(&e) => {
                    let (ino, model) = (file.ino(), model.clone());
                    self.found.lock().lost.push(Lost { ino, offset, model });
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// At the end, after the faults: everything is synced and checked once more, by another client,
    /// too.
    pub async fn finish(mut self, other: &Client) -> Result<()> {
        let lost = self.client.stats().sessions_lost;
        let short = std::mem::take(&mut self.found.lock().short);
        let (own, others): (Vec<_>, Vec<_>) =
            short.into_iter().partition(|(e, _)| e.client == self.id);
        self.found.lock().short = others;
        own.into_iter().filter(|(e, _)| e.lost == lost).for_each(|(_, m)| self.violation(m));
        for n in 0..FILES {
            self.last_sync(n).await?;
            match self.last_read(n).await {
                // The data of an ended session are lost for the file that was open; it has been
                // reopened by now.
                Err(e) if e.code == Code::Io => self.last_read(n).await?,
                r => r?,
            }
            let ino = self.files[n].0.ino();
            let (file, attr) = other.open(&root(), ino, 0).await?;
            let model = &self.files[n].1;
            let bytes = match read_all(&file, FILE_BYTES).await {
                // The file's own client has noted which blocks are lost.
                Err(e) if self.may_be_lost(&e) => {
                    file.close().await?;
                    continue;
                }
                r => r?,
            };
            if let Err(e) = model.check_size(attr.size).and_then(|()| model.check(0, &bytes)) {
                self.violation(format!("file{n} read by another client: {e}"));
            }
            file.close().await?;
        }
        self.check_documents(other).await?;
        self.list().await?;
        for (f, _) in std::mem::take(&mut self.files) {
            f.close().await?;
        }
        self.client.close().await
    }
}

/// The first `most` bytes of a file.
pub async fn read_all(file: &File, most: u64) -> Result<Vec<u8>> {
    Ok(file.read(0, most as usize).await?.iter().map(|b| &b[..]).collect::<Vec<_>>().concat())
}

async fn list(client: &Client, dir: Ino) -> Result<BTreeSet<String>> {
    let (mut names, mut cookie) = (BTreeSet::new(), 0);
    loop {
        let page = client.readdir(&root(), dir, cookie, 100, false).await?;
        for e in &page.entries {
            names.insert(String::from_utf8_lossy(&e.name).into_owned());
            cookie = e.cookie;
        }
        if page.end || page.entries.is_empty() {
            return Ok(names);
        }
    }
}
