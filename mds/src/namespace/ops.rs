//! Runs operation lists: the list and its limits, and the dispatch of each operation.

mod attrs;
mod locks;
mod names;
mod opens;
mod reads;
mod run;
mod seals;
mod xattrs;

use prost::Message;
use strake_proto::{Code, ops::is_mutation, pb};

use super::{
    caller::{By, in_order},
    fail::{Fail, Res, fail},
    format::RULES_STEPS,
    inode::shown,
    steps,
    txn::Txn,
};
use pb::op::Op;
use run::Run;

/// Most operations in one list.
const MAX_OPS: usize = 16_384;
/// Encoded bytes of one reply; with its envelope it must fit a frame's body.
const MAX_REPLY: usize = 3 << 20;

/// Runs a list; the second value says whether every operation succeeded. `mutations` allows
/// operations that change something.
pub(super) fn run(
    t: &mut Txn<'_>,
    by: By<'_>,
    ops: &[pb::Op],
    mutations: bool,
) -> Result<(pb::MetaReply, bool), Fail> {
    if by.rules >= RULES_STEPS {
        t.steps.allow(steps::OF_A_LIST);
    }
    let creds = in_order(by.creds);
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
            run.t.steps.take(steps::OPERATION).and_then(|()| one(&mut run, op))
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

fn one(run: &mut Run<'_, '_>, op: &pb::Op) -> Res<pb::OpResult> {
    let Some(op) = &op.op else {
        return fail(
            Code::OpNotSupp,
            "this metadata server does not know the operation; upgrade it",
        );
    };
    let r = match op {
        Op::Lookup(o) => reads::lookup(run, o),
        Op::Getattr(o) => Ok(shown(&run.inode(o.ino)?)),
        Op::Open(o) => opens::open(run, o),
        Op::Close(o) => Ok(pb::OpResult { ino: run.id(o.ino), ..Default::default() }),
        Op::Readdir(o) => reads::readdir(run, o),
        Op::Readlink(o) => reads::readlink(run, o.ino),
        Op::Getxattr(o) => xattrs::getxattr(run, o),
        Op::Listxattr(o) => xattrs::listxattr(run, o.ino),
        Op::Statfs(o) => reads::statfs(run, o),
        Op::Getlayout(o) => reads::getlayout(run, o.ino),
        Op::PathOf(o) => reads::path_of(run, o.ino),
        Op::Access(o) => reads::access(run, o),
        Op::GetLock(o) => locks::get_lock(run, o),
        Op::GetSeal(o) => seals::get_seal(run, o),
        Op::SetLock(o) => locks::set_lock(run, o),
        Op::Create(o) => names::create(run, o),
        Op::Tmpfile(o) => names::tmpfile(run, o),
        Op::Mkdir(o) => names::mkdir(run, o),
        Op::Mknod(o) => names::mknod(run, o),
        Op::Symlink(o) => names::symlink(run, o),
        Op::Link(o) => names::link(run, o),
        Op::Unlink(o) => names::unlink(run, o.parent, &o.name),
        Op::Rmdir(o) => names::rmdir(run, o.parent, &o.name),
        Op::Rename(o) => names::rename(run, o),
        Op::Setattr(o) => attrs::setattr(run, o),
        Op::Setxattr(o) => xattrs::setxattr(run, o),
        Op::Removexattr(o) => xattrs::removexattr(run, o),
        Op::Extend(o) => attrs::extend(run, o),
        Op::Release(o) => opens::release(run, o),
        Op::Setlayout(o) => attrs::setlayout(run, o),
        Op::Seal(o) => seals::seal(run, o),
    }?;
    match run.room.checked_sub(r.encoded_len() + 8) {
        Some(room) => run.room = room,
        None => {
            return fail(Code::TooBig, "the reply would be too long; split the list of operations");
        }
    }
    Ok(r)
}
