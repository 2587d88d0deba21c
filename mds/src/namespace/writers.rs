//! Which sessions may write a file, so that no data of a writer that disappeared shows up later.
//!
//! A write is on its replicas before its end is in the inode. A writer that dies in between leaves
//! bytes beyond the file's end, which would be read as data, not as zeros, when the file grows over
//! them. So every session that may write is recorded (in the log, so that the record outlives
//! leaders). When one ends without having reported everything, the file is trimmed at its recorded
//! end as soon as no other session may be writing, and before a new one may. Beside other writers
//! nothing can be trimmed: after an eviction the file's size is found out instead.

use strake_proto::{Code, Error, Ino, Rights, SessionId, pb};

use super::{
    caller::By,
    effects::Ending,
    fail::{Fail, Res, fail},
    format::FORMAT_CHAINS,
    gc,
    inode::Inode,
    keys,
    txn::Txn,
};

/// The rights to the data that a session that may write a file has, besides reading.
pub(super) const TO_WRITE: Rights = Rights::WRITE.and(Rights::TRIM);

/// Records that the session may write the file.
pub(super) fn enlist(t: &mut Txn<'_>, by: &By<'_>, r: &mut pb::InodeRecord) -> Res<()> {
    let ino = r.attr().ino;
    let key = keys::writer(by.session, ino);
    if t.get(&key)?.is_none() {
        let Some(writers) = r.writers.checked_add(1) else {
            return fail(Code::Overloaded, format!("inode {ino} has too many writers"));
        };
        r.writers = writers;
        // This is a change for the other clients, too: what they cache about the file may now be
        // outdated.
        t.put_inode(ino, r.clone());
        t.notes.writers.push((by.session, ino, true));
    }
    t.put(key, by.index.to_be_bytes().to_vec());
    Ok(())
}

/// How a writer left.
#[derive(Clone, Copy)]
pub(super) enum Left {
    /// It reported everything that it wrote.
    Clean,
    /// It may have left bytes beyond the recorded end.
    Surplus,
    /// The same, by the eviction with this number.
    Evicted(u64),
}

/// The session no longer writes the file. `opened`: only if that was its last open.
pub(super) fn release(
    t: &mut Txn<'_>,
    session: SessionId,
    ino: Ino,
    opened: Option<u64>,
    left: Left,
) -> Res<()> {
    let key = keys::writer(session, ino);
    let Some(last) = t.get(&key)? else { return Ok(()) };
    let goes = opened.is_none_or(|o| last == o.to_be_bytes()[..]);
    if goes {
        t.delete(key);
        t.notes.writers.push((session, ino, false));
        // The end of a session reports this for all its files at once.
        if opened.is_some() {
            t.notes.endings.push(Ending { session, ino, rights: TO_WRITE });
        }
    }
    let Some(mut r) = t.inode(ino)? else { return Ok(()) };
    r.writers = r.writers.saturating_sub(goes.into());
    match left {
        Left::Clean => {}
        Left::Surplus => r.surplus = true,
        Left::Evicted(number) => {
            (r.surplus, r.fence) = (true, r.fence.max(number));
            t.notes.fences.push((ino, number));
        }
    }
    if !matches!(left, Left::Clean) && t.header.format_version >= FORMAT_CHAINS && r.attr().size > 0
    {
        // Data that it reported but did not sync may be lost from storage servers' memory: no
        // client is left to resend it.
        r.attr_mut().sparse = true;
    }
    if r.writers == 0 && r.surplus && r.layout.is_some() {
        let end = r.attr().size;
        gc::cut(t, &mut r, end)?;
        (r.surplus, r.fence) = (false, 0);
    } else if let Left::Evicted(number) = left {
        t.notes.ends.push((ino, number));
    }
    t.put_unseen(ino, r);
    Ok(())
}

/// Refuses to set attributes that a write changes until the size that an evicted session wrote is
/// found out, which would undo them. The leader waits before such a list goes to the log; this is
/// for an eviction in between.
pub(super) fn may_set(by: &By<'_>, r: &pb::InodeRecord) -> Res<()> {
    if r.fence == 0 || !by.ends_matter {
        return Ok(());
    }
    let m = format!(
        "the size of inode {:#x} is not known yet, because an evicted client wrote it",
        r.attr().ino
    );
    Err(Fail::Later(Error::new(Code::Overloaded, m)))
}

/// The session has ended; `left` is how it left the files that it did not release.
pub(super) fn release_all(t: &mut Txn<'_>, session: SessionId, left: Left) -> Res<()> {
    let mut inos = Vec::new();
    t.scan(&keys::numbered(keys::WRITER, session), &[], |key, _| {
        inos.extend(keys::last_number(key));
        Ok(true)
    })?;
    inos.into_iter().try_for_each(|ino| release(t, session, ino, None, left))
}
