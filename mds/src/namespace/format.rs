//! Versions of the state's format, and of the rules for applying an entry.

/// The newest version of the state's format; a newer state is refused. A state has the version of
/// the newest kind of record that was ever put into it: 1, 2 with locks, 3 with files that may have
/// holes, 4 with sealed files, 5 with a cluster map that has `placement` or `min_copies`, 6 with
/// chains that began anew, 7 with one record per locked range, or with page locks, or 8 with a
/// feature level.
pub const FORMAT_VERSION: u32 = super::level::FORMAT;
pub(super) const FORMAT_FIRST: u32 = 1;
/// States with locks.
pub(super) const FORMAT_LOCKS: u32 = 2;
/// States with a file that may have holes.
pub(super) const FORMAT_SPARSE: u32 = 3;
/// States with a sealed file.
pub(super) const FORMAT_SEALED: u32 = 4;
/// States with rules that older programs do not know: `placement` and `min_copies` of the cluster
/// map, and that a file may have holes after a writer is gone that did not report everything.
pub(super) const FORMAT_CHAINS: u32 = 5;
/// States with an entry that older programs do not know: chains that hold nothing begin anew.
pub(super) const FORMAT_ANEW: u32 = 6;
/// States with one record per locked range, and an index.
pub(super) const FORMAT_RANGES: u32 = 7;

/// The newest rules for applying an entry; the leader writes them into what it logs. Older entries
/// keep their old effect. From 1 on: `RENAME_WHITEOUT`, a limit on the names of an inode's extended
/// attributes, set-group-id bits as since Linux 6.1, and `Layout.drafts`. From 2 on: a limit on the
/// cost of one list. From 3 on: a record for each locked range. From 4 on: page locks.
pub const RULES: u32 = 4;
pub(super) const RULES_STEPS: u32 = 2;
pub(super) const RULES_RANGES: u32 = 3;
pub(super) const RULES_PAGES: u32 = 4;
