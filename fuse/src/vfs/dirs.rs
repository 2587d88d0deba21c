//! Requests about open directories.
//!
//! Offsets that the kernel sees: 1 is ".", 2 is "..", the other ones are the metadata server's
//! cookies, which are never 0 to 2.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use strake_client::DirPage;
use strake_proto::{Code, Ino, Result, ids::ROOT_INO, pb};
use strake_runtime::Record;
use tokio::sync::Mutex;

use super::{
    base::Base,
    claims::Claims,
    folders::{Folders, Seen},
    handles::Table,
    records,
    types::{Caller, Entry, is_dir},
};

/// Entries requested from the metadata server at a time.
const BATCH: u32 = 1000;
const DOT: u64 = 1;
const DOTDOT: u64 = 2;
/// The value that libfuse also shows for an inode number that is not known.
const UNKNOWN_INO: Ino = 0xffff_ffff;
const S_IFDIR: u32 = 4;

pub(super) struct OpenDir {
    ino: Ino,
    creds: pb::Creds,
    /// The caller was allowed to read the directory; that holds until it is closed.
    granted: AtomicBool,
    /// What was known of the directory when it was opened.
    seen: Option<Seen>,
    batch: Mutex<Batch>,
    /// Kept for the next daemon, as long as the directory is open.
    _kept: Option<Record>,
}

impl OpenDir {
    fn new(ino: Ino, creds: pb::Creds, seen: Option<Seen>, kept: Option<Record>) -> OpenDir {
        let (granted, batch) = (AtomicBool::new(false), Mutex::default());
        OpenDir { ino, creds, granted, seen, batch, _kept: kept }
    }

    pub fn ino(&self) -> Ino {
        self.ino
    }

    pub fn seen(&self) -> Option<Seen> {
        self.seen
    }
}

/// Entries after `from`, as fetched last.
#[derive(Default)]
struct Batch {
    from: u64,
    entries: Vec<Entry>,
    end: bool,
    attrs: bool,
}

impl Batch {
    /// The rest of the batch after `offset`, if the batch has it.
    fn after(&self, offset: u64) -> Option<&[Entry]> {
        let start = if offset == self.from {
            0
        } else {
            self.entries.iter().position(|e| e.offset == offset)? + 1
        };
        let rest = &self.entries[start..];
        (!rest.is_empty() || self.end).then_some(rest)
    }
}

/// The directories that the kernel has open, and the requests for them.
pub struct Dirs {
    base: Arc<Base>,
    open: Arc<Table<OpenDir>>,
    folders: Arc<Folders>,
    claims: Arc<Claims>,
}

impl Dirs {
    pub(super) fn new(
        base: Arc<Base>,
        open: Arc<Table<OpenDir>>,
        folders: Arc<Folders>,
        claims: Arc<Claims>,
    ) -> Dirs {
        Dirs { base, open, folders, claims }
    }

    /// opendir(3). The metadata server checks the permission to read the directory at the first
    /// batch.
    pub fn opendir(&self, caller: Caller<'_>, ino: Ino) -> u64 {
        let ino = self.base.inner(ino);
        let handle = self.base.numbering.next();
        let keep = self.base.keep.as_ref();
        let kept = keep.and_then(|keep| records::keep_directory(keep, handle, ino));
        let seen = self.folders.seen(ino);
        self.open.insert(handle, OpenDir::new(ino, caller.creds(), seen, kept));
        handle
    }

    /// A directory that an earlier daemon opened. The permission to read it was checked then.
    pub(super) fn again(&self, record: Record) {
        let (handle, ino) = (records::handle(&record), records::ino(&record));
        let open = OpenDir::new(ino, pb::Creds::default(), None, Some(record));
        open.granted.store(true, Relaxed);
        self.open.insert(handle, open);
    }

    /// Forgets all of them, after the kernel is gone.
    pub(super) fn forget_all(&self) {
        self.open.drain();
    }

    /// Entries after `offset` (0: from the start), none at the end. `take` returns false when it is
    /// full; what it did not take is returned again by the next call.
    pub async fn readdir(
        &self,
        handle: u64,
        offset: u64,
        attrs: bool,
        mut take: impl FnMut(&Entry) -> bool + Send,
    ) -> Result<()> {
        let dir = self.open.get(handle)?;
        for dot in dots(dir.ino, self.base.root.ino()).iter().filter(|d| d.offset > offset) {
            if !take(dot) {
                return Ok(());
            }
        }
        let mut offset = if offset <= DOTDOT { 0 } else { offset };
        let mut batch = dir.batch.lock().await;
        // Offset 0 fetches again (rewinddir).
        if offset == 0 || (attrs && !batch.attrs) || batch.after(offset).is_none() {
            *batch = self.fetch(&dir, offset, attrs).await?;
        }
        let node = self.base.root.node(dir.ino);
        let mut taken = 0;
        loop {
            for entry in batch.after(offset).unwrap_or_default() {
                if !take(entry) {
                    return Ok(());
                }
                if entry.attr.is_some_and(|a| !is_dir(&a)) {
                    self.claims.told(node, &entry.name);
                }
                taken += 1;
                offset = entry.offset;
            }
            // Continue only while no entry was taken, so that one answer costs at most one
            // additional round trip.
            if batch.end || taken > 0 {
                return Ok(());
            }
            *batch = self.fetch(&dir, offset, attrs).await?;
        }
    }

    async fn fetch(&self, dir: &Arc<OpenDir>, from: u64, attrs: bool) -> Result<Batch> {
        let page = match dir.granted.load(Relaxed) {
            false => self.base.client.readdir(&dir.creds, dir.ino, from, BATCH, attrs).await,
            true => {
                self.base.client.readdir(&pb::Creds::default(), dir.ino, from, BATCH, attrs).await
            }
        };
        let page = match page {
            // The directory was removed since it was opened: it is empty.
            Err(e) if e.code == Code::NoEnt => DirPage { end: true, ..DirPage::default() },
            page => page?,
        };
        dir.granted.store(true, Relaxed);
        // A server that sends neither entries nor an end would be asked forever.
        let end = page.end || page.entries.is_empty();
        let entries = page
            .entries
            .into_iter()
            .map(|e| Entry {
                name: e.name.to_vec(),
                ino: e.ino,
                kind: e.r#type,
                offset: e.cookie,
                attr: e.attr,
            })
            .collect();
        Ok(Batch { from, entries, end, attrs })
    }

    /// The directory is closed.
    pub fn releasedir(&self, handle: u64) {
        self.open.remove(handle);
    }
}

fn dots(ino: Ino, root: Ino) -> [Entry; 2] {
    let (ino, parent) = if ino == root { (ROOT_INO, ROOT_INO) } else { (ino, UNKNOWN_INO) };
    let dot = |name: &[u8], ino, offset| Entry {
        name: name.to_vec(),
        ino,
        kind: S_IFDIR,
        offset,
        attr: None,
    };
    [dot(b".", ino, DOT), dot(b"..", parent, DOTDOT)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_continues_where_the_kernel_stopped() {
        let entry = |offset| Entry { name: vec![b'x'], ino: offset, kind: 8, offset, attr: None };
        let mut b = Batch {
            from: 0,
            entries: vec![entry(10), entry(7), entry(90)],
            end: false,
            attrs: false,
        };
        assert_eq!(b.after(0).unwrap().len(), 3);
        assert_eq!(b.after(10).unwrap()[0].offset, 7);
        assert_eq!(b.after(90), None, "more may follow");
        assert_eq!(b.after(11), None, "seekdir to somewhere else");
        b.end = true;
        assert_eq!(b.after(90), Some(&[][..]));
    }
}
