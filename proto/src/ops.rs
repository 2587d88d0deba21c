//! The kind of a metadata operation. Client and servers must agree on it: it decides where a
//! request goes and whether it has a number in the log.

use crate::pb::{self, op::Op};

/// The bits of open(2)'s flags that say whether it is for reading, writing or both.
pub const O_ACCMODE: u32 = 3;

/// Whether an operation only reads, and only what the log determines: a member that does not lead
/// can answer it. Which sessions have something open or wait for a lock is known only to the
/// leader.
pub fn only_looks(op: &pb::Op) -> bool {
    use Op::{
        Access, GetSeal, Getattr, Getlayout, Getxattr, Listxattr, Lookup, PathOf, Readdir,
        Readlink, Statfs,
    };
    matches!(
        op.op,
        Some(
            Lookup(_)
                | Getattr(_)
                | Readdir(_)
                | Readlink(_)
                | Getxattr(_)
                | Listxattr(_)
                | Statfs(_)
                | Getlayout(_)
                | PathOf(_)
                | Access(_)
                | GetSeal(_)
        )
    )
}

/// Whether an operation changes anything. Opening a file for writing does: it records the session
/// as a writer. An unknown operation does not, because it is refused.
pub fn is_mutation(op: &pb::Op) -> bool {
    match &op.op {
        Some(Op::Open(o)) => o.flags & O_ACCMODE != 0,
        None | Some(Op::Close(_) | Op::GetLock(_)) => false,
        Some(_) => !only_looks(op),
    }
}
