//! What a mount shows while no server answers: the root's attributes and the space, as last heard.
//! umount(8) looks at both before it unmounts.

use std::{
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::Client;
use strake_proto::{Result, ids::ROOT_INO, pb};

use super::base::Base;
use crate::handover::HandoverMemory;

/// How long an answer is waited for while servers are away, before the last known one is used.
const PATIENCE: Duration = Duration::from_secs(1);

/// The first of the eleven words of the handover memory for it.
const KEPT: usize = 4;

/// The values for this daemon and, with handover memory, for the next one.
pub(crate) struct Known {
    root: Mutex<Option<pb::Attr>>,
    space: Mutex<Option<pb::StatfsReply>>,
    keep: Option<Arc<HandoverMemory>>,
}

impl Known {
    /// Begins with what an earlier daemon knew.
    pub fn new(keep: Option<Arc<HandoverMemory>>) -> Known {
        let former =
            keep.as_ref().map(|k| std::array::from_fn(|n| k.mount_word(KEPT + n).load(Acquire)));
        let (root, space) = former.map_or((None, None), read);
        Known { root: Mutex::new(root), space: Mutex::new(space), keep }
    }

    pub fn root(&self) -> Option<pb::Attr> {
        *self.root.lock()
    }

    pub fn space(&self) -> Option<pb::StatfsReply> {
        self.space.lock().clone()
    }

    /// The root's attributes, asked of the servers if they answer.
    pub(super) async fn ask_root(
        &self,
        client: &Client,
        asking: impl Future<Output = Result<pb::Attr>>,
    ) -> Result<pb::Attr> {
        self.or_last(client, &self.root, asking).await
    }

    /// The space of the file system, counted with the default layout of the mount's root.
    pub(super) async fn ask_space(&self, base: &Base) -> Result<pb::StatfsReply> {
        let nobody = pb::Creds::default();
        let asking = base.client.space().statfs_in(&nobody, "", base.root.ino());
        self.or_last(&base.client, &self.space, asking).await
    }

    /// An answer, or the last known one when the servers have been away for a while. For what
    /// umount(8) looks at before it unmounts: it must not wait for the servers.
    async fn or_last<T: Clone>(
        &self,
        client: &Client,
        last: &Mutex<Option<T>>,
        asking: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let instead = async {
            loop {
                tokio::time::sleep(PATIENCE).await;
                let last = last.lock().clone();
                if let Some(known) = last.filter(|_| !client.servers().away().is_empty()) {
                    return known;
                }
            }
        };
        tokio::select! {
            biased;
            answer = asking => {
                let answer = answer?;
                *last.lock() = Some(answer.clone());
                self.write();
                Ok(answer)
            }
            known = instead => Ok(known),
        }
    }

    /// Writes changed values to the handover memory. If a crash interrupts this, the worst result
    /// is a mixture of values from two moments.
    fn write(&self) {
        let Some(keep) = &self.keep else { return };
        let (root, space) = (self.root.lock(), self.space.lock());
        // The first word says that there are values, so it is written last.
        for (n, word) in words(root.as_ref(), space.as_ref()).into_iter().enumerate().rev() {
            keep.mount_word(KEPT + n).store(word, Release);
        }
    }
}

fn words(root: Option<&pb::Attr>, space: Option<&pb::StatfsReply>) -> [u64; 11] {
    let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let [mode, ids, size, atime, mtime, ctime, btime] = root.map_or([0; 7], |a| {
        let times = [a.atime_ns, a.mtime_ns, a.ctime_ns, a.btime_ns].map(|t| t as u64);
        [pair(a.mode, a.nlink), pair(a.uid, a.gid), a.size, times[0], times[1], times[2], times[3]]
    });
    let [total, free, inodes, free_inodes] =
        space.map_or([0; 4], |s| [s.total_bytes, s.free_bytes, s.inodes, s.free_inodes]);
    [mode, ids, size, atime, mtime, ctime, btime, total, free, inodes, free_inodes]
}

/// A mode of 0 means no root, and zero inodes mean no space: neither occurs in valid values.
fn read(words: [u64; 11]) -> (Option<pb::Attr>, Option<pb::StatfsReply>) {
    let [mode, ids, size, atime, mtime, ctime, btime, total_bytes, free_bytes, inodes, free_inodes] =
        words;
    let (high, low) = (|w: u64| (w >> 32) as u32, |w: u64| w as u32);
    let root = pb::Attr {
        ino: ROOT_INO,
        mode: high(mode),
        nlink: low(mode),
        uid: high(ids),
        gid: low(ids),
        size,
        atime_ns: atime as i64,
        mtime_ns: mtime as i64,
        ctime_ns: ctime as i64,
        btime_ns: btime as i64,
        ..Default::default()
    };
    let space =
        pb::StatfsReply { total_bytes, free_bytes, inodes, free_inodes, targets: Vec::new() };
    ((mode != 0).then_some(root), (inodes | free_inodes != 0).then_some(space))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_daemon_knows_what_the_last_one_knew() {
        let keep = HandoverMemory::create([1; 16], 1 << 20).unwrap();
        let next = || {
            Known::new(Some(HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap()))
        };
        assert_eq!((next().root(), next().space()), (None, None));
        let known = Known::new(Some(keep.clone()));
        let space = pb::StatfsReply {
            total_bytes: u64::MAX,
            free_bytes: 2,
            inodes: 3,
            free_inodes: 4,
            targets: vec![],
        };
        *known.space.lock() = Some(space.clone());
        known.write();
        assert_eq!((next().root(), next().space()), (None, Some(space.clone())));
        let root = pb::Attr {
            ino: ROOT_INO,
            mode: libc::S_IFDIR | 0o7777,
            uid: u32::MAX,
            gid: 6,
            nlink: 7,
            size: 8,
            atime_ns: i64::MIN,
            mtime_ns: -1,
            ctime_ns: 11,
            btime_ns: 12,
            ..Default::default()
        };
        *known.root.lock() = Some(root);
        known.write();
        assert_eq!((next().root(), next().space()), (Some(root), Some(space)));
    }
}
