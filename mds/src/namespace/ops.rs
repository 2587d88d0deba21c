//! Runs operation lists: dispatch, the operations that only read, and what all operations share.

use bytes::Bytes;
use prost::Message;
use strake_proto::{
    Code, Ino, SessionId, ids::ROOT_INO, layout::MAX_FILE_SIZE, ops::is_mutation, pb,
};

use super::{
    keys,
    perm::{self, R, W, X},
    placement, steps,
    txn::{Fail, Res, Spot, Txn, decode, fail},
    writers::{self, Left},
};
use pb::op::Op;

pub(super) const NAME_MAX: usize = 255;
/// Most operations in one list.
const MAX_OPS: usize = 16_384;
/// Encoded bytes of one reply; with its envelope it must fit a frame's body.
const MAX_REPLY: usize = 3 << 20;
const READDIR_DEFAULT: u32 = 1_000;
pub(super) const READDIR_MAX: u32 = 16_384;
/// Longest path that `path_of` answers.
const MAX_PATH: usize = 64 << 10;
pub(super) const DIR_SIZE: u64 = 4096;

/// The caller, and the time.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub creds: &'a pb::Creds,
    /// 0: the server itself.
    pub session: SessionId,
    /// Index of the log entry; 0: a read.
    pub index: u64,
    /// As in the log entry: entries from before this rule keep their old effect, on every member.
    pub ends_matter: bool,
    /// See [`super::RULES`].
    pub rules: u32,
}

/// One list of operations that is running.
pub(super) struct Run<'a, 't> {
    pub t: &'a mut Txn<'t>,
    pub by: By<'a>,
    /// What inode id 0 means.
    prev: Ino,
    /// Bytes that the reply may still grow by.
    room: usize,
}

/// Runs a list; the second value says whether every operation succeeded. `mutations` allows
/// operations that change something.
pub(super) fn run(
    t: &mut Txn<'_>,
    by: By<'_>,
    ops: &[pb::Op],
    mutations: bool,
) -> Result<(pb::MetaReply, bool), Fail> {
    if by.rules >= super::RULES_STEPS {
        t.steps.allow(steps::OF_A_LIST);
    }
    let creds = perm::in_order(by.creds);
    let by = By { creds: &creds, ..by };
    let mut results = Vec::with_capacity(ops.len().min(MAX_OPS));
    let mut run = Run { t, by, prev: 0, room: MAX_REPLY };
    for op in ops {
        let result = if ops.len() > MAX_OPS {
            fail(
                Code::TooBig,
                format!("a list of {} operations; {MAX_OPS} are the limit", ops.len()),
            )
        } else if !mutations && is_mutation(op) {
            fail(Code::Inval, "a change cannot be made by a read")
        } else {
            run.t.steps.take(steps::OPERATION).and_then(|()| run.one(op))
        };
        match result {
            Ok(r) => {
                run.prev = r.ino;
                results.push(r);
            }
            Err(Fail::Op(e)) => {
                results.push(pb::OpResult { status: Some(e.to_status()), ..Default::default() });
                return Ok((pb::MetaReply { results, granted: Vec::new() }, false));
            }
            Err(e) => return Err(e),
        }
    }
    Ok((pb::MetaReply { results, granted: Vec::new() }, true))
}

/// A result that ends on an inode and shows its attributes.
pub(super) fn shown(r: &pb::InodeRecord) -> pb::OpResult {
    pb::OpResult { ino: r.attr().ino, attr: r.attr, ..Default::default() }
}

/// Checks a name to be made or removed. `here`: the error for "." and "..".
pub(super) fn check_name(name: &[u8], here: Code) -> Res<()> {
    if name.is_empty() {
        return fail(Code::NoEnt, "empty name");
    }
    if name.len() > NAME_MAX {
        return fail(
            Code::NameTooLong,
            format!("a name of {} bytes; {NAME_MAX} are the limit", name.len()),
        );
    }
    if name.contains(&b'/') || name.contains(&0) {
        return fail(Code::Inval, "a name cannot contain '/' or NUL");
    }
    if name == b"." || name == b".." {
        return fail(here, "'.' and '..' cannot be made, removed or renamed");
    }
    Ok(())
}

/// Shorthands for a record whose attributes are always there.
pub(super) trait Inode {
    fn attr(&self) -> &pb::Attr;
    fn attr_mut(&mut self) -> &mut pb::Attr;
}

static NO_ATTR: pb::Attr = pb::Attr {
    ino: 0,
    mode: 0,
    uid: 0,
    gid: 0,
    nlink: 0,
    size: 0,
    atime_ns: 0,
    mtime_ns: 0,
    ctime_ns: 0,
    btime_ns: 0,
    rdev: 0,
    change: 0,
    data_id: 0,
    acls: 0,
    sparse: false,
};

impl Inode for pb::InodeRecord {
    fn attr(&self) -> &pb::Attr {
        self.attr.as_ref().unwrap_or(&NO_ATTR)
    }
    fn attr_mut(&mut self) -> &mut pb::Attr {
        self.attr.get_or_insert_default()
    }
}

impl Run<'_, '_> {
    fn one(&mut self, op: &pb::Op) -> Res<pb::OpResult> {
        let Some(op) = &op.op else {
            return fail(
                Code::OpNotSupp,
                "this metadata server does not know the operation; upgrade it",
            );
        };
        let r = match op {
            Op::Lookup(o) => self.lookup(o),
            Op::Getattr(o) => Ok(shown(&self.inode(o.ino)?)),
            Op::Open(o) => self.open(o),
            Op::Close(o) => Ok(pb::OpResult { ino: self.id(o.ino), ..Default::default() }),
            Op::Readdir(o) => self.readdir(o),
            Op::Readlink(o) => self.readlink(o.ino),
            Op::Getxattr(o) => self.getxattr(o),
            Op::Listxattr(o) => self.listxattr(o.ino),
            Op::Statfs(o) => self.statfs(o),
            Op::Getlayout(o) => self.getlayout(o.ino),
            Op::PathOf(o) => self.path_of(o.ino),
            Op::Access(o) => self.access(o),
            Op::GetLock(o) => self.get_lock(o),
            Op::GetSeal(o) => self.get_seal(o),
            Op::SetLock(o) => self.set_lock(o),
            Op::Create(o) => self.create(o),
            Op::Tmpfile(o) => self.tmpfile(o),
            Op::Mkdir(o) => self.mkdir(o),
            Op::Mknod(o) => self.mknod(o),
            Op::Symlink(o) => self.symlink(o),
            Op::Link(o) => self.link(o),
            Op::Unlink(o) => self.unlink(o.parent, &o.name),
            Op::Rmdir(o) => self.rmdir(o.parent, &o.name),
            Op::Rename(o) => self.rename(o),
            Op::Setattr(o) => self.setattr(o),
            Op::Setxattr(o) => self.setxattr(o),
            Op::Removexattr(o) => self.removexattr(o),
            Op::Extend(o) => self.extend(o),
            Op::Release(o) => self.release(o),
            Op::Setlayout(o) => self.setlayout(o),
            Op::Seal(o) => self.seal(o),
        }?;
        match self.room.checked_sub(r.encoded_len() + 8) {
            Some(room) => self.room = room,
            None => {
                return fail(
                    Code::TooBig,
                    "the reply would be too long; split the list of operations",
                );
            }
        }
        Ok(r)
    }

    pub(super) fn id(&self, ino: Ino) -> Ino {
        if ino == 0 { self.prev } else { ino }
    }

    pub(super) fn inode(&self, ino: Ino) -> Res<pb::InodeRecord> {
        self.t.need(self.id(ino))
    }

    /// A directory for which the caller has all of `mask`.
    pub(super) fn dir(&self, ino: Ino, mask: u32) -> Res<pb::InodeRecord> {
        let d = self.inode(ino)?;
        if !perm::is_dir(d.attr()) {
            return fail(Code::NotDir, format!("inode {} is not a directory", d.attr().ino));
        }
        perm::check(self.by.creds, &d, mask)?;
        Ok(d)
    }

    /// Changes an inode and counts the change.
    pub(super) fn edit(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut pb::InodeRecord),
    ) -> Res<pb::InodeRecord> {
        let mut r = self.t.need(ino)?;
        change(&mut r);
        Ok(self.save(r))
    }

    /// Stores an inode with a new ctime and change count.
    pub(super) fn save(&mut self, mut r: pb::InodeRecord) -> pb::InodeRecord {
        let now = self.t.now();
        let a = r.attr_mut();
        a.ctime_ns = now;
        a.change += 1;
        self.t.put_inode(a.ino, r.clone());
        r
    }

    fn lookup(&mut self, o: &pb::Lookup) -> Res<pb::OpResult> {
        let dir = self.dir(o.parent, X)?;
        let name = &o.name[..];
        if name == b"." {
            return Ok(shown(&dir));
        }
        if name == b".." {
            let up = dir.links.first().map_or(ROOT_INO, |l| l.parent);
            return Ok(shown(&self.t.need(up)?));
        }
        check_name(name, Code::Inval)?;
        match self.t.find(dir.attr().ino, name)? {
            Spot::Taken(_, d) => {
                let r = self.t.need(d.ino)?;
                // The link's contents are asked for next, and it may be gone by then.
                Ok(pb::OpResult { data: r.symlink.clone(), ..shown(&r) })
            }
            Spot::Free(_) => fail(Code::NoEnt, "no such name"),
        }
    }

    fn open(&mut self, o: &pb::Open) -> Res<pb::OpResult> {
        let r = self.inode(o.ino)?;
        self.may_open(&r, o.flags)?;
        self.open_as(r, o.flags)
    }

    /// The answer to an allowed open; one for writing makes the session a writer.
    pub(super) fn open_as(&mut self, mut r: pb::InodeRecord, flags: u32) -> Res<pb::OpResult> {
        let mut result = opened(&r);
        if writers::asks_to_write(flags) && perm::is_file(r.attr()) {
            writers::enlist(self.t, &self.by, &mut r)?;
            result.writer = self.by.index;
        }
        Ok(result)
    }

    fn release(&mut self, o: &pb::Release) -> Res<pb::OpResult> {
        let ino = self.id(o.ino);
        let left = if o.surplus { Left::Surplus } else { Left::Clean };
        writers::release(self.t, self.by.session, ino, Some(o.writer), left)?;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    pub(super) fn may_open(&self, r: &pb::InodeRecord, flags: u32) -> Res<()> {
        let mask = perm::mask_of_open(flags);
        match r.attr().mode & perm::S_IFMT {
            perm::S_IFDIR if mask & W != 0 => {
                return fail(Code::IsDir, "a directory cannot be opened for writing");
            }
            perm::S_IFLNK => return fail(Code::Loop, "a symbolic link cannot be opened"),
            _ => {}
        }
        Ok(perm::check(self.by.creds, r, mask)?)
    }

    fn readdir(&mut self, o: &pb::Readdir) -> Res<pb::OpResult> {
        let dir = self.dir(o.dir, R)?.attr().ino;
        let limit = if o.limit == 0 { READDIR_DEFAULT } else { o.limit.min(READDIR_MAX) } as usize;
        let prefix = &keys::dentry(dir, 0)[..11];
        let after = keys::dentry(dir, o.cookie);
        let mut entries = Vec::new();
        let mut room = self.room.saturating_sub(64);
        let t = &*self.t;
        let end = t.scan(prefix, &after, |key, value| {
            let d: pb::DentryRecord = decode(key, value)?;
            if d.ino == 0 {
                return Ok(true);
            }
            if entries.len() == limit {
                return Ok(false);
            }
            let attr = if o.attrs { t.inode(d.ino)?.and_then(|r| r.attr) } else { None };
            let cookie = keys::last_number(key).unwrap_or_default();
            let e = pb::DirEntry { name: d.name, ino: d.ino, r#type: d.r#type, cookie, attr };
            let need = e.encoded_len() + 8;
            if need > room {
                return Ok(false);
            }
            room -= need;
            entries.push(e);
            Ok(true)
        })?;
        if entries.is_empty() && !end {
            return fail(Code::TooBig, "the reply would be too long; split the list of operations");
        }
        Ok(pb::OpResult { ino: dir, entries, end, ..Default::default() })
    }

    fn readlink(&mut self, ino: Ino) -> Res<pb::OpResult> {
        let r = self.inode(ino)?;
        if r.attr().mode & perm::S_IFMT != perm::S_IFLNK {
            return fail(Code::Inval, format!("inode {} is not a symbolic link", r.attr().ino));
        }
        Ok(pb::OpResult { ino: r.attr().ino, data: r.symlink, ..Default::default() })
    }

    fn statfs(&mut self, o: &pb::Statfs) -> Res<pb::OpResult> {
        let dir = if o.dir == 0 { ROOT_INO } else { self.id(o.dir) };
        // A directory that is gone, or whose default names something that is gone, uses the default
        // of the file system.
        let spec = match self.inode(dir).and_then(|r| self.spec_in(&r, None)) {
            Ok(spec) => Some(spec),
            Err(Fail::Op(_)) => None,
            Err(e) => return Err(e),
        };
        let copies = spec.map_or(self.t.place.view.map.default_copies.max(1), |s| s.copies);
        let s = placement::statfs(&self.t.place, &self.t.header, &o.pool, copies)?;
        Ok(pb::OpResult { ino: self.prev, statfs: Some(s), ..Default::default() })
    }

    fn access(&mut self, o: &pb::Access) -> Res<pb::OpResult> {
        let r = self.inode(o.ino)?;
        if o.mask & !7 != 0 {
            return fail(Code::Inval, format!("access mask {:#o} has unknown bits", o.mask));
        }
        perm::check(self.by.creds, &r, o.mask)?;
        Ok(shown(&r))
    }

    fn getlayout(&mut self, ino: Ino) -> Res<pb::OpResult> {
        let r = self.inode(ino)?;
        let mut result = pb::OpResult { ino: r.attr().ino, ..Default::default() };
        if perm::is_dir(r.attr()) {
            // Absent if a default names something that is gone, such as a pool; a create here
            // returns that error.
            result.effective = match self.spec_in(&r, None) {
                Ok(spec) => self.t.place.effective(&spec).ok(),
                Err(Fail::Op(_)) => None,
                Err(e) => return Err(e),
            };
            result.spec = r.default_layout;
        } else if perm::is_file(r.attr()) {
            result.layout = r.layout;
        } else {
            return fail(Code::NoData, "only regular files and directories have a layout");
        }
        Ok(result)
    }

    /// The resolved layout specification of a file made in `dir`.
    pub(super) fn spec_in(
        &self,
        dir: &pb::InodeRecord,
        asked: Option<&pb::LayoutSpec>,
    ) -> Res<pb::LayoutSpec> {
        let root =
            if dir.attr().ino == ROOT_INO { None } else { self.t.need(ROOT_INO)?.default_layout };
        if let Some(s) = asked {
            placement::validate(s)?;
        }
        Ok(self.t.place.resolve(asked.into_iter().chain(&dir.default_layout).chain(&root))?)
    }

    /// The path from the root by the first recorded name. The caller must have search permission on
    /// its directories.
    fn path_of(&mut self, ino: Ino) -> Res<pb::OpResult> {
        let ino = self.id(ino);
        let mut names: Vec<Bytes> = Vec::new();
        let mut len = 0;
        let mut at = self.t.need(ino)?;
        while at.attr().ino != ROOT_INO {
            let Some(link) = at.links.first() else {
                return fail(Code::NoEnt, format!("inode {} has no name on record", at.attr().ino));
            };
            len += link.name.len() + 1;
            if len > MAX_PATH {
                return fail(
                    Code::NameTooLong,
                    format!("the path is longer than {MAX_PATH} bytes"),
                );
            }
            names.push(link.name.clone());
            at = self.dir(link.parent, X)?;
        }
        let mut path = Vec::with_capacity(len.max(1));
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        if path.is_empty() {
            path.push(b'/');
        }
        Ok(pb::OpResult { ino, data: path.into(), ..Default::default() })
    }
}

/// A result with the fields that the holder of an open file needs.
pub(super) fn opened(r: &pb::InodeRecord) -> pb::OpResult {
    pb::OpResult { layout: r.layout.clone(), ..shown(r) }
}

pub(super) fn check_size(size: u64) -> Res<()> {
    if size > MAX_FILE_SIZE {
        return fail(Code::FBig, format!("{size} bytes; the largest file is {MAX_FILE_SIZE}"));
    }
    Ok(())
}
