//! Operations on file locks: which lock is in the way, take and release.

use prost::Message;
use strake_proto::{Code, Ino, pb};

use super::run::Run;
use crate::namespace::{
    fail::{Res, fail},
    format::{FORMAT_RANGES, RULES_PAGES, RULES_RANGES},
    inode::{Inode, is_file},
    keys,
    locks::{
        Want, conflict, ranges,
        spans::{self, Span},
        table::{barring, check_room, convert, of_owner, put, total},
        want,
    },
};
use pb::LockKind;

/// At most this many of the ranges that a lock replaces are reported.
const MAX_UNDO: usize = 64;

pub(super) fn get_lock(run: &mut Run<'_, '_>, o: &pb::GetLock) -> Res<pb::OpResult> {
    let ino = run.id(o.ino);
    let (who, span, _) = want(ino, run.by.session, o.owner, o.kind, o.span.as_ref())?;
    let Some(span) = span else {
        return fail(Code::Inval, "an unlock conflicts with nothing");
    };
    run.t.need(ino)?;
    let want = Want { ino, who, span };
    let (all, _) = barring(run.t, &want, usize::MAX)?;
    let first = all.into_iter().min_by_key(|(who, s)| (s.start, *who));
    let lock = first.map(|(who, s)| pb::LockReply {
        spans: vec![s.to_pb()],
        session: who.session,
        left: 0,
    });
    Ok(pb::OpResult { ino, lock, ..Default::default() })
}

pub(super) fn set_lock(run: &mut Run<'_, '_>, o: &pb::SetLock) -> Res<pb::OpResult> {
    let ino = run.id(o.ino);
    let (who, span, raw) = want(ino, run.by.session, o.owner, o.kind, o.span.as_ref())?;
    if who.kind == LockKind::LockPages && run.by.rules < RULES_PAGES {
        return fail(Code::Inval, format!("a lock of inode {ino}: its kind is unknown"));
    }
    let ranged = form(run, ino)?;
    let had = match ranged {
        true => ranges::near(run.t, ino, &who, raw.start, raw.end)?,
        false => of_owner(run.t, ino, &who)?,
    };
    let undo = had
        .iter()
        .filter_map(|s| s.within(&Span { start: raw.start, end: raw.end, write: true, pid: 0 }));
    let undo: Vec<_> =
        if o.undo { undo.take(MAX_UNDO).map(Span::to_pb).collect() } else { Vec::new() };
    let (mut has, mut limit) = (had.clone(), 2);
    match span {
        Some(span) => {
            let r = run.t.need(ino)?;
            if !is_file(r.attr()) {
                return fail(
                    Code::Inval,
                    format!(
                        "inode {ino} is not a regular file; only regular files have locks \
here"
                    ),
                );
            }
            if let Some((other, s)) = barring(run.t, &Want { ino, who, span }, 1)?.0.first() {
                return Err(conflict(other, s).into());
            }
            spans::lock(&mut has, span);
            limit = 1;
        }
        None => spans::unlock(&mut has, raw.start, raw.end),
    }
    if has.len() > had.len() {
        check_room(run.t, ino, &who, (has.len() - had.len()) as u64, limit)?;
    }
    if span.is_some() || has != had {
        put(run.t, ino, &who, (&had, &has), ranged, span.is_some())?;
    }
    let left = if ranged { ranges::left(run.t, ino, &who)? } else { has.len() as u64 };
    let lock = Some(pb::LockReply { spans: undo, session: who.session, left });
    Ok(pb::OpResult { ino, lock, ..Default::default() })
}

/// Whether the locks of a file use one record per range: converts them first if they must.
fn form(run: &mut Run<'_, '_>, ino: Ino) -> Res<bool> {
    let total = total(run.t, 0, ino)?;
    if total.ranged || run.by.rules < RULES_RANGES {
        return Ok(total.ranged);
    }
    if total.ranges > 0 {
        let mut now = total;
        convert(run.t, ino, &mut now)?;
        run.t.put(keys::lock_total(0, ino), now.encode_to_vec());
        run.t.header.format_version = run.t.header.format_version.max(FORMAT_RANGES);
    }
    Ok(true)
}
