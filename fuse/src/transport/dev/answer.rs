//! What each request asks of the [VFS core](crate::vfs), and the reply to it.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use strake_client::Operation;
use strake_proto::{Code, Ino, Result, pb};
use tokio::sync::Semaphore;

use super::{
    abi::fattr,
    copies::Copies,
    init::Agreed,
    mapped::{HasPages, Mapped},
    moved::Moved,
    order::Order,
    reply::{self, Entries, Reply, Taken, Timeouts},
    request::{self, Body, Head, SetAttr},
    running,
    session::Answer,
    shared::Shared,
};
use crate::{
    transport::errno,
    vfs::{
        Caller, Change, CopyRange, Lock, LockType, MAX_REQUEST, Place, Stat, Time, Vfs, exchanges,
        is_dir, makes_zeros,
    },
};

/// State that the task of a request needs.
#[derive(Clone)]
pub(super) struct Core {
    pub vfs: Arc<Vfs>,
    /// The longest validity times that the kernel is given.
    pub bounds: Timeouts,
    pub copies: Arc<Copies>,
    pub mapped: Arc<Mapped>,
    pub moved: Arc<Moved>,
    pub shared: Arc<Shared>,
    pub agreed: Arc<OnceLock<Agreed>>,
    /// Limits the requests in progress.
    pub room: Arc<Semaphore>,
    /// The mountpoint without symbolic links.
    pub mountpoint: Arc<Path>,
    /// See [`crate::MountConfig::old_kernel`].
    pub old_kernel: bool,
}

/// Whether a write goes to the end of the file. Pages of a mapping are written where they are
/// mapped, whatever the handle's flags say.
fn appends(flags: u32, from_mapping: bool) -> bool {
    flags as i32 & libc::O_APPEND != 0 && !from_mapping
}

/// A reply without results.
pub(super) fn empty(result: Result<()>) -> Reply {
    match result {
        Ok(()) => Reply::ok(),
        Err(e) => Reply::Error(errno(&e)),
    }
}

/// A reply from a result.
fn with<T>(result: Result<T>, make: impl FnOnce(T) -> Reply) -> Reply {
    result.map_or_else(|e| Reply::Error(errno(&e)), make)
}

/// A reply about an inode that was created at a name.
fn made(result: Result<pb::Attr>, name: (Ino, &[u8])) -> Reply {
    with(result, |a| reply::entry(&a, name, Taken::Blindly))
}

impl Core {
    /// The order of a request relative to the mappings of its file.
    pub fn order(&self, head: &Head, body: &Body) -> Order {
        let (mapped, node) = (&self.mapped, head.node);
        let change =
            |node, offset: u64, end| Order::Change(Arc::new(mapped.change(node, offset, end)));
        match body {
            Body::Read { page_in: true, offset, size, .. } => {
                Order::PageIn(mapped.page_in(node, *offset, u64::from(*size)))
            }
            // The kernel keeps these pages locked, so a notice would wait for the write that waits
            // for it. It has them as they will be written.
            Body::Write { through_pages: true, .. } if !self.maps_direct() => Order::Nothing,
            Body::Write { from_mapping: false, handle, offset, flags, data, .. } => {
                match appends(*flags, false) {
                    // The write goes to the end of the file as the servers know it. That may be
                    // beyond the kernel's end, or before it if the kernel's is outdated.
                    true => change(
                        node,
                        self.vfs.files.known_end(*handle).map_or(0, |end| end.min(*offset)),
                        u64::MAX,
                    ),
                    false => change(node, *offset, offset.saturating_add(data.len() as u64)),
                }
            }
            Body::Fallocate { offset, len, mode, .. } if makes_zeros(*mode as i32) => {
                change(node, *offset, offset.saturating_add(*len))
            }
            Body::CopyRange(c) => {
                match mapped.change_that_drops(
                    c.to_node,
                    c.to_offset,
                    c.to_offset.saturating_add(c.len),
                ) {
                    Ok(change) => Order::Change(Arc::new(change)),
                    Err(HasPages) => Order::HasPages,
                }
            }
            _ => Order::Nothing,
        }
    }

    /// Carries a request out, and says what to reply.
    pub async fn answer(
        &self,
        head: Head,
        operation: Option<&Operation>,
        body: Body,
        order: Order,
    ) -> Reply {
        let who = Caller { uid: head.uid, gid: head.gid, pid: head.pid, operation };
        match body {
            Body::Open { .. }
            | Body::Create { .. }
            | Body::Tmpfile { .. }
            | Body::Read { .. }
            | Body::Write { .. }
            | Body::Flush { .. }
            | Body::Release { .. }
            | Body::Fsync { .. }
            | Body::Fallocate { .. }
            | Body::Lseek { .. }
            | Body::Getlk { .. }
            | Body::Setlk { .. }
            | Body::Ioctl { .. }
            | Body::CopyRange(_) => self.file(who, head.node, body, order).await,
            Body::Opendir | Body::Readdir { .. } | Body::Releasedir { .. } | Body::Fsyncdir => {
                self.directory(who, head.node, body).await
            }
            Body::Getxattr { .. }
            | Body::Setxattr { .. }
            | Body::Listxattr { .. }
            | Body::Removexattr { .. } => self.xattr(who, head.node, body).await,
            body => self.name(who, head.node, body).await,
        }
    }

    /// Sends a reply. What the kernel may cache is decided at this moment: a recall happens
    /// completely before or after it.
    pub fn send(&self, answer: Answer, reply: Reply) {
        let Reply::Told(told) = reply else {
            answer.send(&reply);
            return;
        };
        let (v, taken) = (&self.vfs, told.taken());
        let keeps_names = self.agreed.get().is_some_and(Agreed::forgets_names);
        let _now = v.telling();
        let attr = |s: &Stat| {
            if taken == Taken::Blindly {
                return Duration::ZERO; // the kernel asks when it needs them
            }
            s.timeout(self.bounds.attr.min(v.attr_valid(&s.attr)))
        };
        let name = |dir, name: &[u8], to| {
            // Names of a listing would be valid from when the kernel processes them, not from its
            // request.
            if !keeps_names || taken == Taken::Listed {
                return Duration::ZERO;
            }
            let valid = self.bounds.entry.min(v.name_valid(dir, name, to));
            if !valid.is_zero() {
                self.copies.has_names();
            }
            valid
        };
        let nodes: Vec<u64> = told.nodes().collect();
        self.copies.brings(&nodes);
        if !answer.send(&told.finish(attr, name)) {
            self.copies.forgotten(nodes.into_iter().map(|n| (n, 1)));
        }
    }

    /// Operations on names and attributes.
    async fn name(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Lookup { name } => match v.names.lookup(who, node, &name).await {
                Err(e) if e.code == Code::NoEnt => {
                    self.moved.left((node, &name));
                    reply::missing((node, &name))
                }
                Err(e) => Reply::Error(errno(&e)),
                Ok(a) => {
                    match is_dir(&a) && !matches!(&name[..], b"." | b"..") {
                        true => Box::pin(self.moved.found(a.ino, (node, &name))).await,
                        false => self.moved.left((node, &name)),
                    }
                    reply::entry(&a, (node, &name), Taken::Found)
                }
            },
            Body::Getattr => with(v.names.getattr(node).await, |a| reply::attr(&a, Taken::InOrder)),
            Body::Statx => with(v.names.getattr(node).await, |a| reply::statx(&a)),
            Body::Setattr(set) => with(v.names.setattr(who, node, change(&set)).await, |a| {
                reply::attr(&a.into(), Taken::Blindly)
            }),
            Body::Readlink => with(v.names.readlink(who, node).await, Reply::Bytes),
            Body::Symlink { name, target } => {
                made(v.names.symlink(who, node, &name, &target).await, (node, &name))
            }
            Body::Mknod { name, mode, rdev, umask } => {
                made(v.names.mknod(who, node, &name, mode, umask, rdev).await, (node, &name))
            }
            Body::Mkdir { name, mode, umask } => {
                let dir = v.names.mkdir(who, node, &name, mode, umask).await;
                made(dir.inspect(|a| self.moved.made(a.ino, (node, &name))), (node, &name))
            }
            Body::Unlink { name } => empty(v.names.unlink(who, node, &name).await),
            Body::Rmdir { name } => empty(
                v.names.rmdir(who, node, &name).await.inspect(|()| self.moved.left((node, &name))),
            ),
            Body::Rename { name, to, to_name, flags } => {
                with(v.names.rename(who, (node, &name), (to, &to_name), flags).await, |()| {
                    self.moved.renamed((node, &name), (to, &to_name), exchanges(flags));
                    // The kernel uses the new name for as long as the old one, but the client may
                    // not know it.
                    self.copies.forget_names();
                    Reply::ok()
                })
            }
            Body::Link { ino, name } => {
                made(v.names.link(who, ino, node, &name).await, (node, &name))
            }
            Body::Access { mask } => empty(v.names.access(who, node, mask).await),
            Body::Statfs => with(v.statfs().await, |s| reply::statfs(&s)),
            Body::Syncfs => empty(v.files.sync_all().await),
            Body::Destroy => Reply::ok(),
            _ => Reply::Error(libc::ENOSYS),
        }
    }

    fn open_flags(&self, flags: u32) -> u32 {
        self.agreed.get().map_or(0, |a| a.open_flags(flags))
    }

    fn maps_direct(&self) -> bool {
        self.agreed.get().is_some_and(Agreed::maps_direct)
    }

    /// Operations on open files.
    async fn file(&self, who: Caller<'_>, node: u64, body: Body, order: Order) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Open { flags }
                if running::cuts_unseen(flags) && running::runs(&self.mountpoint, node).await =>
            {
                Reply::Error(libc::ETXTBSY)
            }
            Body::Open { flags } => with(v.files.open(who, node, flags as i32).await, |o| {
                reply::opened(o.handle, self.open_flags(flags))
            }),
            Body::Create { name, flags, mode, umask } => {
                with(v.files.create(who, node, &name, mode, umask, flags as i32).await, |(a, o)| {
                    reply::created(&a, (node, &name), o.handle, self.open_flags(flags))
                })
            }
            Body::Tmpfile { flags, mode, umask } => {
                with(v.files.tmpfile(who, node, mode, umask, flags as i32).await, |(a, o)| {
                    reply::created(&a, (node, b""), o.handle, self.open_flags(flags))
                })
            }
            Body::Read { handle, offset, size, .. } => {
                self.read((node, handle), offset, size as usize, order).await
            }
            Body::Write { handle, offset, flags, from_mapping, strips, data, .. } => {
                let place = if appends(flags, from_mapping) {
                    Place::End { at: offset, tid: who.pid }
                } else {
                    Place::At(offset)
                };
                if strips && let Err(e) = v.files.strip(who, handle).await {
                    return Reply::Error(errno(&e));
                }
                let len = data.len();
                match from_mapping {
                    true => with(
                        v.files
                            .write_mapped(who, handle, offset, data, self.shared.writes_in(node))
                            .await,
                        |()| reply::written(len),
                    ),
                    false => {
                        with(v.files.write(who, handle, place, data, order).await, reply::written)
                    }
                }
            }
            Body::Getlk { handle, lock } => {
                with(v.locks.getlk(handle, &lock).await, |found| reply::lock(&lock, found))
            }
            Body::Setlk { handle, lock, wait } => {
                empty(self.lock((node, handle), &lock, wait).await)
            }
            Body::Fsync { handle, .. } => empty(v.files.fsync(handle).await),
            Body::Fallocate { handle, offset, len, mode } => {
                empty(v.files.fallocate(who, handle, (offset, len), mode as i32, order).await)
            }
            Body::Lseek { handle, offset, whence } => {
                with(v.files.seek(handle, offset, whence as i32).await, reply::number)
            }
            Body::Ioctl { handle, command, room } => v
                .ioctl(handle, command, room as usize)
                .map_or(Reply::Error(libc::ENOTTY), |a| reply::answer(&a)),
            Body::CopyRange(c) => self.copy(who, c, order).await,
            _ => Reply::Error(libc::ENOSYS),
        }
    }

    /// The `order` of a page-in ends before the kernel has the answer.
    async fn read(
        &self,
        (node, handle): (u64, u64),
        offset: u64,
        len: usize,
        order: Order,
    ) -> Reply {
        let Order::PageIn(page_in) = &order else {
            return with(self.vfs.files.read(handle, offset, len).await, Reply::Data);
        };
        let files = &self.vfs.files;
        let read = match page_in.is_at_once() {
            true => {
                let read = files.read_at_once(handle, offset, len).await;
                read.map(|(parts, as_of)| (parts, as_of, None))
            }
            false => files.read_to_keep(handle, offset, len, || page_in.asked()).await,
        };
        with(read, |(parts, as_of, using)| {
            self.shared.hands_out(node, as_of);
            // Drop this first: a task that waits for the end of the use then takes out all pages
            // that are out.
            drop(order);
            drop(using);
            Reply::Data(parts)
        })
    }

    async fn lock(&self, (node, handle): (u64, u64), lock: &Lock, wait: bool) -> Result<()> {
        let unlocks = lock.mode == LockType::LockUnlock;
        if unlocks {
            self.shared.synchronize(node).await;
        }
        let done = self.vfs.locks.setlk(handle, lock, wait).await;
        if !unlocks && done.is_ok() {
            self.shared.synchronize(node).await;
        }
        done
    }

    async fn copy(&self, who: Caller<'_>, c: request::CopyRange, order: Order) -> Reply {
        let range = CopyRange {
            from: c.from,
            from_offset: c.from_offset,
            to: c.to,
            to_offset: c.to_offset,
        };
        let made = |n| if c.wide { reply::number(n as u64) } else { reply::written(n) };
        match order {
            Order::Nothing => with(self.vfs.files.copy_range(who, range, c.len, ()).await, made),
            Order::Change(change) => {
                let copied = self.vfs.files.copy_range(who, range, c.len, change.clone()).await;
                // The kernel would drop what programs store to pages that it gets now. With this
                // error it copies again, by reading and writing.
                if copied.is_ok() && change.is_waited_for() {
                    return Reply::Error(libc::EXDEV);
                }
                change.until_dropped();
                with(copied, made)
            }
            Order::PageIn(_) | Order::HasPages => Reply::Error(libc::EXDEV),
        }
    }

    async fn directory(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Opendir => reply::opened(v.dirs.opendir(who, node), 0),
            Body::Readdir { handle, offset, size, plus } => {
                let room = size.min(MAX_REQUEST) as usize;
                let mut entries = Entries::new(room, plus.then_some(node));
                let read = v.dirs.readdir(handle, offset, plus, |e| entries.take(e)).await;
                with(read, |()| entries.reply())
            }
            Body::Releasedir { handle } => {
                v.dirs.releasedir(handle);
                Reply::ok()
            }
            // Every change of a directory is in the Raft log before it is answered.
            _ => Reply::ok(),
        }
    }

    async fn xattr(&self, who: Caller<'_>, node: u64, body: Body) -> Reply {
        let v = &self.vfs;
        match body {
            Body::Getxattr { name, size } => {
                with(v.xattrs.get(who, node, &name).await, |x| reply::xattr(&x, size))
            }
            Body::Listxattr { size } => {
                with(v.xattrs.list(who, node).await, |x| reply::xattr(&x, size))
            }
            Body::Setxattr { name, value, flags } => {
                empty(v.xattrs.set(who, node, &name, &value, flags).await)
            }
            Body::Removexattr { name } => empty(v.xattrs.remove(who, node, &name).await),
            _ => Reply::Error(libc::ENOSYS),
        }
    }
}

fn change(set: &SetAttr) -> Change {
    let has = |bit| set.valid & bit != 0;
    let time = |bit, now, (seconds, nanos): (i64, u32)| match (has(now), has(bit)) {
        (true, _) => Some(Time::Now),
        (false, true) => {
            Some(Time::At(seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(nanos))))
        }
        (false, false) => None,
    };
    Change {
        mode: has(fattr::MODE).then_some(set.mode),
        uid: has(fattr::UID).then_some(set.uid),
        gid: has(fattr::GID).then_some(set.gid),
        size: has(fattr::SIZE).then_some(set.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, set.atime),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, set.mtime),
        handle: has(fattr::FH).then_some(set.handle),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_fields_change() {
        assert_eq!(
            change(&SetAttr { mode: 7, uid: 7, size: 7, ..Default::default() }),
            Change::default()
        );
        let set = SetAttr {
            valid: fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW,
            atime: (-1, 5),
            ..Default::default()
        };
        let want = Change {
            atime: Some(Time::At(-999_999_995)),
            mtime: Some(Time::Now),
            ..Default::default()
        };
        assert_eq!(change(&set), want);
        let far =
            SetAttr { valid: fattr::ATIME, atime: (i64::MAX, 999_999_999), ..Default::default() };
        assert_eq!(change(&far).atime, Some(Time::At(i64::MAX)));
    }
}
