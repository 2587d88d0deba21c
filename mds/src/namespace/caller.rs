//! Who asks for an operation, and what that says about permissions.

use std::borrow::Cow;

use strake_proto::{SessionId, pb};

/// The caller, and the place of its request in the log.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub creds: &'a pb::Creds,
    /// 0: the server itself.
    pub session: SessionId,
    /// Index of the log entry; 0: a read.
    pub index: u64,
    /// As in the log entry: entries from before this rule keep their old effect, on every member.
    pub ends_matter: bool,
    /// See [`RULES`](super::RULES).
    pub rules: u32,
}

pub(super) fn is_root(c: &pb::Creds) -> bool {
    c.uid == 0
}

pub(super) fn owns(c: &pb::Creds, a: &pb::Attr) -> bool {
    is_root(c) || c.uid == a.uid
}

/// Whether the caller is in a group. The groups must be [in order](in_order).
pub(super) fn in_group(c: &pb::Creds, gid: u32) -> bool {
    debug_assert!(c.groups.is_sorted(), "groups that are searched are in order");
    c.gid == gid || c.groups.binary_search(&gid).is_ok()
}

/// The same caller with sorted groups, so that a search is cheap however many there are.
pub(super) fn in_order(c: &pb::Creds) -> Cow<'_, pb::Creds> {
    if c.groups.is_sorted() {
        return Cow::Borrowed(c);
    }
    let mut c = c.clone();
    c.groups.sort_unstable();
    Cow::Owned(c)
}
