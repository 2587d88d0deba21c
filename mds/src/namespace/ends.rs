//! The size of a file that evicted sessions wrote beside others: recorded once it is found out.

use strake_proto::{Code, pb};

use super::{
    caller::By,
    fail::{Fail, Res, fail},
    inode::Inode,
    ops,
    txn::Txn,
};

/// The writer of the found bytes is not known: not root, whose writes alone keep set-id bits.
const NOBODY: u32 = 65_534;

/// The ends that evicted writers did not report were found out. `surplus` stays: another writer may
/// have left some, too.
pub(super) fn end_found(t: &mut Txn<'_>, e: &pb::EndFound, index: u64) -> Res<()> {
    let before = t.need(e.ino)?;
    if before.fence == 0 || before.fence != e.fence || before.attr().change != e.change {
        return fail(
            Code::Stale,
            format!("inode {:#x} was changed during its size recovery", e.ino),
        );
    }
    if e.end > before.attr().size {
        // As if the writer had reported it. There may be holes in it.
        let creds = pb::Creds { uid: NOBODY, gid: NOBODY, ..Default::default() };
        let extend = pb::op::Op::Extend(pb::Extend { ino: e.ino, end: e.end, holes: true });
        let by = By { creds: &creds, session: 0, index, ends_matter: false, rules: 0 };
        let (reply, _) = ops::run(t, by, &[pb::Op { op: Some(extend) }], true)?;
        if let Some(s) = reply.results.into_iter().find_map(|r| r.status) {
            return Err(Fail::Op(s.into()));
        }
    }
    let mut r = t.need(e.ino)?;
    r.fence = 0;
    t.put_unseen(e.ino, r);
    Ok(())
}
