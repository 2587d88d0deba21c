//! Compares stored chunks with what the files say.

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{
    ChunkId, Ino, TargetId,
    data::{ListEntry, Version},
    layout::StripeMap,
    map::{ChainExt, MapView},
    pb,
};

/// One inconsistency. `ino` and `data` name a file's inode and its data, `target` where it was
/// found. Paths start at the root of the file system.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the fields mean the same in all variants")]
pub enum Finding {
    /// Chunks that no file and no pending deletion refers to.
    Leaked { ino: Ino, data: u64, target: TargetId, chains: BTreeSet<u32>, chunks: u64 },
    /// Tombstones of data that no file and no pending deletion has: a power loss brought them back.
    Tombstones { ino: Ino, data: u64, target: TargetId, chains: BTreeSet<u32>, tombstones: u64 },
    /// A chunk on a chain that the file's layout does not put it on.
    Misplaced { chunk: ChunkId, path: String, chain: u32, target: TargetId, place: Place },
    /// In-sync replicas of one chunk disagree.
    Diverged { chunk: String, chain: u32, versions: Vec<(TargetId, String)> },
    /// A chunk wholly beyond the end of its file, which no client has open for writing.
    BeyondEnd { chunk: ChunkId, path: String, target: TargetId, size: u64 },
    /// A directory entry whose inode cannot be read; `gone`: the inode does not exist.
    Dangling { path: String, parent: Ino, name: Vec<u8>, ino: Ino, error: String, gone: bool },
    /// A directory that has another name already.
    TwoParents { path: String, ino: Ino },
    /// Chunks below the end of a file without holes that no in-sync replica has. No client has the
    /// file open for writing.
    Missing { path: String, ino: Ino, chunks: u64, first: u64 },
    /// A file with stripes on a chain whose last copies were given up.
    Lost { path: String, chains: Vec<u32> },
    /// A file whose bytes could not be read.
    Unreadable { path: String, error: String },
}

/// Where a misplaced chunk should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The chain that the file's layout names.
    pub chain: u32,
    /// All in-sync replicas of that chain have the chunk: readable, identical and not shorter.
    pub there: bool,
    /// The chain that the chunk is on also holds chunks that belong there.
    pub beside_others: bool,
    /// Set, with the file's size, if the whole chunk lies beyond the file's end. Then no reader
    /// sees its bytes, whichever chain it is on.
    pub beyond: Option<u64>,
}

impl Place {
    /// Whether it may be the only copy of bytes that belong to the file.
    pub fn may_be_only(&self) -> bool {
        !self.there && self.beyond.is_none()
    }
}

impl Finding {
    /// Inode, data and chain of a misplaced chunk that may be the only copy.
    pub fn only_copy(&self) -> Option<(Ino, u64, u32)> {
        match self {
            Finding::Misplaced { chunk, chain, place, .. } if place.may_be_only() => {
                Some((chunk.ino, chunk.data, *chain))
            }
            _ => None,
        }
    }

    /// The targets that the finding is about.
    pub fn targets(&self) -> Vec<TargetId> {
        match self {
            Finding::Leaked { target, .. }
            | Finding::Tombstones { target, .. }
            | Finding::Misplaced { target, .. }
            | Finding::BeyondEnd { target, .. } => vec![*target],
            Finding::Diverged { versions, .. } => versions.iter().map(|v| v.0).collect(),
            _ => Vec::new(),
        }
    }
}

pub(crate) struct FileInfo {
    pub path: String,
    pub size: u64,
    /// The file has no holes: every byte up to its size is data.
    pub dense: bool,
    pub map: StripeMap,
}

/// What the metadata servers are about to delete: for each pair of inode and data id, the lowest
/// size in bytes that it is truncated to.
pub(crate) type Pending = BTreeMap<(Ino, u64), u64>;

pub(crate) type Lists = BTreeMap<(u32, TargetId), Vec<ListEntry>>;

/// Compares the listed chunks with the files. Also returns how many chunk replicas wait for their
/// deletion. Chunks of the `unread` inodes are never leaks, because their files are not known.
pub(crate) fn compare(
    map: &MapView,
    files: &BTreeMap<Ino, FileInfo>,
    lists: &Lists,
    pending: &Pending,
    unread: &BTreeSet<Ino>,
) -> (Vec<Finding>, u64) {
    let mut findings = Vec::new();
    let mut waiting = 0;
    let mut leaks: BTreeMap<(Ino, u64, TargetId), (BTreeSet<u32>, u64)> = BTreeMap::new();
    for ((chain, target), list) in lists {
        for e in list.iter().filter(|e| !e.tombstone) {
            let (chunk, target) = (e.chunk, *target);
            let cut = pending.get(&(chunk.ino, chunk.data));
            let is_cut =
                |f: &FileInfo| cut.is_some_and(|size| chunk.index >= f.map.cut(*size).first_gone);
            match files.get(&chunk.ino).filter(|f| f.map.data == chunk.data) {
                None if cut == Some(&0) => waiting += 1,
                None if unread.contains(&chunk.ino) => {}
                None => {
                    let (chains, chunks) =
                        leaks.entry((chunk.ino, chunk.data, target)).or_default();
                    chains.insert(*chain);
                    *chunks += 1;
                }
                Some(f) if f.map.chains.contains(chain) && is_cut(f) => waiting += 1,
                Some(f) if f.map.chain_of(chunk.index) != *chain => {
                    let place = place(map, f, lists, e, *chain);
                    findings.push(Finding::Misplaced {
                        chunk,
                        path: f.path.clone(),
                        chain: *chain,
                        target,
                        place,
                    });
                }
                Some(f) if chunk.index >= f.map.cut(f.size).first_gone => {
                    findings.push(Finding::BeyondEnd {
                        chunk,
                        path: f.path.clone(),
                        target,
                        size: f.size,
                    });
                }
                Some(_) => {}
            }
        }
    }
    findings.extend(leaks.into_iter().map(|((ino, data, target), (chains, chunks))| {
        Finding::Leaked { ino, data, target, chains, chunks }
    }));
    for chain in &map.map.chains {
        findings.extend(diverged(chain, lists));
    }
    let cut = |ino: &Ino, f: &FileInfo| pending.contains_key(&(*ino, f.map.data));
    let dense = files.iter().filter(|(ino, f)| f.dense && !cut(ino, f));
    findings.extend(dense.filter_map(|(ino, f)| missing(map, *ino, f, lists)));
    for f in files.values().filter(|f| f.size > 0) {
        let used: BTreeSet<u32> = f.map.chains.iter().copied().collect();
        let chains: Vec<u32> =
            used.into_iter().filter(|id| map.chain(*id).is_some_and(|c| c.lost)).collect();
        if !chains.is_empty() {
            findings.push(Finding::Lost { path: f.path.clone(), chains });
        }
    }
    (findings, waiting)
}

/// Tombstones that nothing needs: no file has the data, it belongs to none of the `unread` inodes,
/// and no pending deletion is about it.
pub(crate) fn tombstones(
    files: &BTreeMap<Ino, FileInfo>,
    lists: &Lists,
    pending: &Pending,
    unread: &BTreeSet<Ino>,
) -> Vec<Finding> {
    let mut all: BTreeMap<(Ino, u64, TargetId), (BTreeSet<u32>, u64)> = BTreeMap::new();
    for ((chain, target), list) in lists {
        for ChunkId { ino, data, .. } in list.iter().filter(|e| e.tombstone).map(|e| e.chunk) {
            let has = files.get(&ino).is_some_and(|f| f.map.data == data);
            if !has && !unread.contains(&ino) && !pending.contains_key(&(ino, data)) {
                let (chains, tombstones) = all.entry((ino, data, *target)).or_default();
                chains.insert(*chain);
                *tombstones += 1;
            }
        }
    }
    let finding = |((ino, data, target), (chains, tombstones))| Finding::Tombstones {
        ino,
        data,
        target,
        chains,
        tombstones,
    };
    all.into_iter().map(finding).collect()
}

fn place(map: &MapView, file: &FileInfo, lists: &Lists, e: &ListEntry, on: u32) -> Place {
    let chain = file.map.chain_of(e.chunk.index);
    let members: Vec<TargetId> =
        map.chain(chain).map(|c| c.serving().collect()).unwrap_or_default();
    let of = |t: &TargetId| {
        let list = lists.get(&(chain, *t))?;
        let at = list.binary_search_by_key(&e.chunk, |e| e.chunk).ok()?;
        Some(&list[at])
    };
    // A chunk whose record is damaged is listed without a version.
    let good = |o: &ListEntry| !o.tombstone && o.version != Version::default() && o.len >= e.len;
    let all: Option<Vec<&ListEntry>> = members.iter().map(of).collect();
    let same = |all: &Vec<&ListEntry>| all.windows(2).all(|w| w[0].version == w[1].version);
    let there = all.is_some_and(|all| !all.is_empty() && all.iter().all(|o| good(o)) && same(&all));
    let beyond = (e.chunk.index >= file.map.cut(file.size).first_gone).then_some(file.size);
    Place { chain, there, beside_others: file.map.chains.contains(&on), beyond }
}

/// Chunks of a file without holes that no replica has, on chains that were listed.
fn missing(map: &MapView, ino: Ino, f: &FileInfo, lists: &Lists) -> Option<Finding> {
    let is_nowhere = |index: &u64| {
        let chunk = ChunkId { ino, data: f.map.data, index: *index };
        let chain = f.map.chain_of(*index);
        let of = map
            .chain(chain)
            .filter(|c| !c.lost)
            .into_iter()
            .flat_map(|c| c.serving().collect::<Vec<_>>());
        let listed: Vec<&Vec<ListEntry>> = of.filter_map(|t| lists.get(&(chain, t))).collect();
        let has = |list: &&Vec<ListEntry>| {
            list.binary_search_by_key(&chunk, |e| e.chunk).is_ok_and(|at| !list[at].tombstone)
        };
        !listed.is_empty() && !listed.iter().any(has)
    };
    let mut nowhere = (0..f.map.cut(f.size).first_gone).filter(is_nowhere);
    let first = nowhere.next()?;
    Some(Finding::Missing { path: f.path.clone(), ino, chunks: 1 + nowhere.count() as u64, first })
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
            format!(
                "{}.{}{}",
                v.epoch,
                v.number,
                if *tombstone { " removed".into() } else { format!(" {len} bytes") }
            )
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

/// A finding as one line for people.
pub fn text(f: &Finding) -> String {
    match f {
        Finding::Leaked { ino, data, target, chunks, .. } => {
            format!(
                "leaked: {chunks} chunks of inode {ino:#x}, data {data:#x}, on target {target}: no file has them"
            )
        }
        Finding::Tombstones { ino, data, target, tombstones, .. } => {
            format!(
                "tombstones: {tombstones} of inode {ino:#x}, data {data:#x}, on target {target}: no file has them"
            )
        }
        Finding::Misplaced { chunk, path, chain, target, place } => {
            let right = match (place.beyond, place.there) {
                (Some(size), _) => {
                    format!("{}, beyond the end of the file, which has {size} bytes", place.chain)
                }
                (None, true) => format!("{}, which has the chunk, too", place.chain),
                (None, false) => format!(
                    "{}, which lacks all or part of it: a hole, or this is the only copy",
                    place.chain
                ),
            };
            format!(
                "misplaced: chunk {chunk} ({path}) on target {target}, chain {chain}; its chain is {right}"
            )
        }
        Finding::Diverged { chunk, chain, versions } => {
            let v: Vec<String> = versions.iter().map(|(t, v)| format!("target {t}: {v}")).collect();
            format!("diverged: chunk {chunk} of chain {chain}: {}", v.join(", "))
        }
        Finding::BeyondEnd { chunk, path, target, size } => {
            format!(
                "beyond the end: chunk {chunk} ({path}) on target {target}; the file has {size} bytes"
            )
        }
        Finding::Dangling { path, parent, ino, error, .. } => {
            format!("dangling: {path} (inode {ino:#x}, in directory {parent:#x}): {error}")
        }
        Finding::Missing { path, ino, chunks, first } => {
            format!(
                "missing: {chunks} chunks of {path} (inode {ino:#x}), the first its number {first}: no replica in sync has them"
            )
        }
        Finding::TwoParents { path, ino } => {
            format!("directory with two names: {path} (inode {ino:#x})")
        }
        Finding::Lost { path, chains } => {
            let list = chains.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            format!("lost: {path} has stripes on chains {list}, whose last copies were given up")
        }
        Finding::Unreadable { path, error } => format!("unreadable: {path}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ino: Ino, index: u64, number: u64) -> ListEntry {
        let version = Version { epoch: 1, number };
        ListEntry { chunk: ChunkId { ino, data: 1, index }, version, len: 10, tombstone: false }
    }

    fn map() -> MapView {
        let serving =
            |target| pb::Replica { target, state: pb::ReplicaState::ReplicaServing as i32 };
        let chain = |id| pb::Chain {
            id,
            epoch: 1,
            replicas: vec![serving(1), serving(2)],
            preferred: vec![1, 2],
            lost: false,
        };
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
        BTreeMap::from([(7, FileInfo { path: "/f".into(), size: 2 << 20, dense: true, map })])
    }

    #[test]
    fn a_whole_file_system_has_no_findings() {
        let lists = Lists::from([
            ((1, 1), vec![entry(7, 0, 3)]),
            ((1, 2), vec![entry(7, 0, 3)]),
            ((2, 1), vec![entry(7, 1, 1)]),
            ((2, 2), vec![entry(7, 1, 1)]),
        ]);
        assert_eq!(
            compare(&map(), &files(), &lists, &Pending::new(), &BTreeSet::new()),
            (vec![], 0)
        );
    }

    #[test]
    fn chunks_that_are_nowhere_are_missed_where_nobody_made_a_hole() {
        let lists = |second: Vec<ListEntry>| {
            Lists::from([
                ((1, 1), vec![entry(7, 0, 3)]),
                ((1, 2), vec![entry(7, 0, 3)]),
                ((2, 1), second.clone()),
                ((2, 2), second),
            ])
        };
        let found = |files: &_, second, pending: &_| {
            compare(&map(), files, &lists(second), pending, &BTreeSet::new()).0
        };
        let gone = Finding::Missing { path: "/f".into(), ino: 7, chunks: 1, first: 1 };
        assert_eq!(found(&files(), vec![], &Pending::new()), std::slice::from_ref(&gone));
        let removed = ListEntry { tombstone: true, ..entry(7, 1, 1) };
        assert_eq!(found(&files(), vec![removed], &Pending::new()), [gone]);
        let mut sparse = files();
        sparse.values_mut().for_each(|f| f.dense = false);
        assert_eq!(found(&sparse, vec![], &Pending::new()), []);
        // The file is being truncated.
        assert_eq!(found(&files(), vec![], &Pending::from([((7, 1), 1 << 20)])), []);
        // A chain that could not be listed proves nothing.
        let mut unlisted = lists(vec![]);
        unlisted.retain(|(chain, _), _| *chain == 1);
        assert_eq!(compare(&map(), &files(), &unlisted, &Pending::new(), &BTreeSet::new()).0, []);
    }

    #[test]
    fn chunks_that_are_about_to_go_are_no_findings() {
        let both = |e: Vec<ListEntry>| Lists::from([((1, 1), e.clone()), ((1, 2), e)]);
        let lists = both(vec![entry(7, 0, 1), entry(7, 2, 1), entry(8, 0, 1)]);
        assert_eq!(compare(&map(), &files(), &lists, &Pending::new(), &BTreeSet::new()).0.len(), 4);
        // The file is truncated to its size, the other one is removed.
        let pending = Pending::from([((7, 1), 2 << 20), ((8, 1), 0)]);
        assert_eq!(compare(&map(), &files(), &lists, &pending, &BTreeSet::new()), (vec![], 4));
        // Another generation of the data is removed: not these chunks.
        let pending = Pending::from([((8, 2), 0)]);
        assert_eq!(compare(&map(), &files(), &lists, &pending, &BTreeSet::new()).0.len(), 4);
    }

    #[test]
    fn each_planted_fault_is_found() {
        let lists = Lists::from([
            ((1, 1), vec![entry(7, 0, 3), entry(7, 1, 1), entry(8, 0, 1), entry(8, 2, 1)]),
            ((1, 2), vec![entry(7, 0, 2)]),
            ((2, 1), vec![entry(7, 3, 1)]),
            ((2, 2), vec![]),
        ]);
        let (found, waiting) = compare(&map(), &files(), &lists, &Pending::new(), &BTreeSet::new());
        assert_eq!(waiting, 0);
        let has = |f: fn(&Finding) -> bool| found.iter().any(f);
        assert!(
            has(|f| matches!(f, Finding::Leaked { ino: 8, target: 1, chunks: 2, .. })),
            "{found:?}"
        );
        let misplaced = |f: &Finding| matches!(f, Finding::Misplaced { target: 1, place, .. } if !place.there && place.beside_others);
        assert!(found.iter().any(misplaced), "{found:?}");
        assert!(has(|f| matches!(f, Finding::BeyondEnd { target: 1, .. })), "{found:?}");
        assert!(
            has(|f| matches!(f, Finding::Diverged { chunk, .. } if chunk == "7.1.0")),
            "{found:?}"
        );
        // Which chunks an unread inode owns is not known.
        let unread = BTreeSet::from([8]);
        let (found, _) = compare(&map(), &files(), &lists, &Pending::new(), &unread);
        assert!(!found.iter().any(|f| matches!(f, Finding::Leaked { .. })), "{found:?}");
    }

    #[test]
    fn tombstones_are_found_of_data_that_nobody_has() {
        let gone = |ino, index| ListEntry { tombstone: true, ..entry(ino, index, 1) };
        let lists = Lists::from([
            ((1, 1), vec![entry(7, 0, 3), gone(7, 2), gone(8, 0), gone(8, 1), gone(9, 0)]),
            ((2, 1), vec![gone(8, 2)]),
        ]);
        let found = |pending, unread| tombstones(&files(), &lists, &pending, &unread);
        let of = |ino, chains: &[u32], tombstones| Finding::Tombstones {
            ino,
            data: 1,
            target: 1,
            chains: chains.iter().copied().collect(),
            tombstones,
        };
        // The tombstones of an existing file stay.
        assert_eq!(found(Pending::new(), BTreeSet::new()), [of(8, &[1, 2], 3), of(9, &[1], 1)]);
        assert_eq!(found(Pending::from([((8, 1), 0)]), BTreeSet::from([9])), []);
        assert_eq!(
            compare(&map(), &files(), &lists, &Pending::new(), &BTreeSet::new()).0.len(),
            2,
            "they are no chunks"
        );
    }

    #[test]
    fn a_misplaced_chunk_is_there_only_with_all_replicas_of_its_chain() {
        let files = files();
        let place_of = |second: Vec<ListEntry>| {
            let lists = Lists::from([
                ((1, 1), vec![entry(7, 0, 3), entry(7, 1, 1)]),
                ((2, 1), vec![entry(7, 1, 1)]),
                ((2, 2), second),
            ]);
            place(&map(), &files[&7], &lists, &entry(7, 1, 1), 3)
        };
        let whole = Place { chain: 2, there: true, beside_others: false, beyond: None };
        assert_eq!(place_of(vec![entry(7, 1, 1), entry(7, 3, 1)]), whole);
        assert!(!place_of(vec![entry(7, 3, 1)]).there);
        assert!(!place_of(vec![ListEntry { tombstone: true, ..entry(7, 1, 1) }]).there);
        assert!(!place_of(vec![ListEntry { len: 9, ..entry(7, 1, 1) }]).there, "shorter");
        assert!(!place_of(vec![entry(7, 1, 2)]).there, "they disagree");
        assert!(
            !place_of(vec![ListEntry { version: Version::default(), ..entry(7, 1, 1) }]).there,
            "damaged"
        );
    }

    #[test]
    fn what_no_byte_of_the_file_reaches_is_no_only_copy_of_it() {
        let misplaced = |index, size| {
            let mut files = files();
            files.values_mut().for_each(|f| f.size = size);
            let place = place(&map(), &files[&7], &Lists::new(), &entry(7, index, 1), 3);
            let (chunk, path) = (ChunkId { ino: 7, data: 1, index }, "/f".into());
            Finding::Misplaced { chunk, path, chain: 3, target: 1, place }
        };
        let only = Some((7, 1, 3));
        // A chunk that holds at least one byte below the file's end may be the only copy. The
        // next one lies beyond the end.
        for (size, first_gone) in [(0, 0), (1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (2 << 20, 2)] {
            assert_eq!(misplaced(first_gone, size).only_copy(), None, "{size}");
            if first_gone > 0 {
                assert_eq!(misplaced(first_gone - 1, size).only_copy(), only, "{size}");
            }
        }
        assert!(text(&misplaced(2, 5)).contains("beyond the end of the file, which has 5 bytes"));
        assert!(text(&misplaced(0, 5)).contains("only copy"));
    }

    #[test]
    fn what_a_pending_cut_removes_waits_also_on_a_wrong_chain() {
        let lists = Lists::from([((1, 1), vec![entry(7, 3, 1)]), ((3, 1), vec![entry(7, 3, 1)])]);
        let pending = Pending::from([((7, 1), 2 << 20)]);
        let (found, waiting) = compare(&map(), &files(), &lists, &pending, &BTreeSet::new());
        // A pending truncation does not reach a chain that the file does not use.
        let on: Vec<_> = found.iter().filter(|f| matches!(f, Finding::Misplaced { .. })).collect();
        assert!(matches!(on[..], [Finding::Misplaced { chain: 3, .. }]), "{found:?}");
        assert_eq!(waiting, 1);
    }
}
