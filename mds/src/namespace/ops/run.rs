//! One list of operations that is running, and what all operations share.

use strake_proto::{Code, Ino, Rights, ids::ROOT_INO, layout::MAX_FILE_SIZE, pb};

use crate::namespace::{
    caller::By,
    effects::Ending,
    fail::{Fail, Res, fail, next},
    inode::{Inode, is_dir},
    perm, placement,
    txn::Txn,
};

pub(super) const NAME_MAX: usize = 255;

/// One list of operations that is running.
pub(super) struct Run<'a, 't> {
    pub t: &'a mut Txn<'t>,
    pub by: By<'a>,
    /// What inode id 0 means.
    pub prev: Ino,
    /// Bytes that the reply may still grow by.
    pub room: usize,
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

/// `EFBIG` for a size beyond the largest file.
pub(super) fn check_size(size: u64) -> Res<()> {
    if size > MAX_FILE_SIZE {
        return fail(Code::FBig, format!("{size} bytes; the largest file is {MAX_FILE_SIZE}"));
    }
    Ok(())
}

impl Run<'_, '_> {
    pub(super) fn id(&self, ino: Ino) -> Ino {
        if ino == 0 { self.prev } else { ino }
    }

    pub(super) fn inode(&self, ino: Ino) -> Res<pb::InodeRecord> {
        self.t.need(self.id(ino))
    }

    /// A directory for which the caller has all of `mask`.
    pub(super) fn dir(&self, ino: Ino, mask: u32) -> Res<pb::InodeRecord> {
        let d = self.inode(ino)?;
        if !is_dir(d.attr()) {
            return fail(Code::NotDir, format!("inode {} is not a directory", d.attr().ino));
        }
        perm::check(self.by.creds, &d, mask)?;
        Ok(d)
    }

    /// Stores an inode with a new ctime and change count.
    pub(super) fn save(&mut self, mut r: pb::InodeRecord) -> pb::InodeRecord {
        let now = self.t.now();
        let a = r.attr_mut();
        a.ctime_ns = now;
        a.change = a.change.saturating_add(1);
        debug_assert!(a.ino != 0 && a.size <= MAX_FILE_SIZE, "inode {} of {} bytes", a.ino, a.size);
        self.t.put_inode(a.ino, r.clone());
        r
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

    pub(super) fn new_data_id(&mut self) -> Res<u64> {
        next(&mut self.t.header.next_data_id, "data ids")
    }

    /// Ends what others were given for the file, if this change may have taken away their right to
    /// it.
    pub(super) fn end_rights(&mut self, before: &pb::InodeRecord, after: &pb::InodeRecord) {
        if perm::takes_away(before, after) {
            let ino = after.attr().ino;
            self.t.notes.endings.push(Ending { session: 0, ino, rights: Rights::ALL });
        }
    }

    /// The layout of a new file. Notes it if there is none only because targets are away.
    pub(super) fn chosen(
        &self,
        spec: &pb::LayoutSpec,
        ino: Ino,
        data_id: u64,
        generation: u32,
    ) -> Res<pb::Layout> {
        self.t.place.layout(spec, ino, data_id, generation).map_err(|e| {
            if matches!(e.code, Code::NoSpc | Code::NoDev) && self.t.place.waits(spec) {
                self.t.notes.away.set(true);
            }
            Fail::Op(e)
        })
    }
}
