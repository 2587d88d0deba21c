//! Makes the member of a surviving folder the only voter of its group, in a new incarnation.
//!
//! The member always gets a new id. The former members know the log and its stamp under the old id,
//! and there may be copies of the folder; what they would accept from that id, or give to it, was
//! agreed on by a group that no longer exists. So every folder made before the recovery has a used
//! id, this one's own backup included.
//!
//! The steps, each of which may be interrupted and repeated:
//!
//! 1. The identity becomes `recovering`: no server starts on the folder any more.
//! 2. The rest of the log is applied, whether it was committed or not: no client was told that it
//!    did not happen. Then one commit makes the state that of the new incarnation.
//! 3. The old log is replaced by one that begins with that state.
//! 4. The identity names the new member.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use raft::eraftpb::EntryType;
use strake_proto::{Code, Error, Incarnation, Result};

use super::{
    begin_anew, finish,
    inspect::{self, Folder, Known, Report},
    inval, new_id, next_incarnation, spent_ids,
};
use crate::{
    data_dir::{Record, State},
    namespace::Namespace,
};

/// Entries applied in one commit.
const BATCH: usize = 256;

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The member's new id; `None`: the lowest that no member ever had.
    pub id: Option<u64>,
    /// The new incarnation's era must be higher than this.
    pub beyond: u64,
    /// Folders of other survivors, to make sure that this one's log is the longest.
    pub others: Vec<PathBuf>,
}

/// What a recovery would do.
#[derive(Clone, Debug)]
pub struct Plan {
    pub from: Report,
    /// The member's new id and the group's new incarnation.
    pub to: u64,
    pub incarnation: Incarnation,
    /// The last entry, index and term, that is kept.
    pub last: (u64, u64),
    /// Entries that are applied first.
    pub entries: u64,
    /// The members that are removed.
    pub gone: Vec<Known>,
    /// Why its log is not used, if so.
    pub log_lost: Option<String>,
    /// Whether acknowledged changes may be missing.
    pub may_lose: bool,
    /// It continues a recovery that was begun before.
    pub resumed: bool,
    /// Nothing needs to be done: its server only needs to be started.
    pub needless: bool,
}

/// A recovery of a folder, which stays locked meanwhile.
pub struct Recovery {
    folder: Folder,
    spent: BTreeSet<u64>,
    pub plan: Plan,
}

impl Recovery {
    /// Checks the folder; changes nothing. `random` makes the incarnation unique. `Busy`: a server
    /// runs on it. `EINVAL`: nothing can be recovered from it, another folder has more, or the id
    /// was used.
    pub fn prepare(dir: &Path, options: &Options, random: u64) -> Result<Recovery> {
        let folder = inspect::open(dir)?;
        let r = folder.report.clone();
        let mut reports = vec![r.clone()];
        for other in &options.others {
            reports.push(inspect::inspect(other)?);
        }
        check_choice(&reports)?;
        let mut spent = spent_ids(&folder.map, &folder.conf);
        spent.insert(r.member);
        if let Ok(log) = &folder.log {
            spent.extend(inspect::named_in(log, r.applied.0));
        }
        let resumed = matches!(r.identity, State::Recovering { .. });
        let (to, incarnation) = match r.identity {
            State::Recovering { to, .. } if options.id.is_some_and(|id| id != to) => {
                return Err(inval(format!(
                    "a recovery of this folder as metadata server {to} was begun; leave out --id"
                )));
            }
            State::Recovering { to, incarnation } => (to, incarnation),
            // It keeps its own id here, which an option could not choose.
            _ if r.is_whole() => (r.member, r.incarnation),
            _ => (
                new_id(options.id, &spent)?,
                next_incarnation(r.incarnation, options.beyond, random)?,
            ),
        };
        spent.remove(&to);
        let applied = r.incarnation == incarnation;
        let usable = r
            .log
            .as_ref()
            .ok()
            .filter(|l| !applied && (l.last.1, l.last.0) >= (r.applied.1, r.applied.0));
        let plan = Plan {
            to,
            incarnation,
            last: usable.map_or(r.applied, |l| l.last),
            entries: usable.map_or(0, |l| l.unapplied),
            gone: r
                .voters
                .iter()
                .chain(&r.learners)
                .filter(|(id, _)| *id != r.member && *id != to)
                .cloned()
                .collect(),
            log_lost: r.log.as_ref().err().filter(|_| !applied).map(|e| e.message.clone()),
            may_lose: !inspect::is_complete(&reports),
            resumed,
            needless: r.is_whole(),
            from: r,
        };
        Ok(Recovery { folder, spent, plan })
    }

    /// Does the recovery. After an interruption it can be repeated.
    pub fn run(&self, stamp: u64, mut progress: impl FnMut(String)) -> Result<()> {
        if self.plan.needless {
            return Ok(());
        }
        self.mark()?;
        self.apply(&mut progress)?;
        progress("making the new log".into());
        finish(
            &self.folder.dir,
            &self.folder.store,
            self.folder.record.cluster,
            self.plan.to,
            stamp,
        )
    }

    pub(super) fn mark(&self) -> Result<()> {
        let state = State::Recovering { to: self.plan.to, incarnation: self.plan.incarnation };
        Record { state, ..self.folder.record.clone() }.write(&self.folder.dir)
    }

    pub(super) fn apply(&self, progress: &mut impl FnMut(String)) -> Result<()> {
        let store = &self.folder.store;
        if self.folder.map.incarnation != self.plan.incarnation.0 {
            self.apply_log(progress)?;
        }
        begin_anew(store, self.plan.to, self.plan.incarnation, &self.spent)
    }

    fn apply_log(&self, progress: &mut impl FnMut(String)) -> Result<()> {
        let Ok(log) = &self.folder.log else { return Ok(()) };
        let state = Namespace::open(self.folder.store.clone())?;
        let from = state.header().applied_index;
        let rest: Vec<_> = log.entries.iter().filter(|e| e.index > from).collect();
        for (done, batch) in rest.chunks(BATCH).enumerate() {
            progress(format!("applying the log: {} of {} entries", done * BATCH, rest.len()));
            // Membership changes are skipped: there is only one member from now on.
            let data = |e: &raft::eraftpb::Entry| match e.get_entry_type() {
                EntryType::EntryNormal => e.data.clone(),
                _ => Bytes::new(),
            };
            let entries: Vec<_> = batch.iter().map(|e| (e.index, e.term, data(e))).collect();
            let last = entries.last().map_or((from, 0), |e| (e.0, e.1));
            state.apply(&entries, last, None)?;
        }
        Ok(())
    }
}

/// Checks that the first of these can be recovered: it must be usable and of the same group as the
/// others, and none of them may have more.
fn check_choice(reports: &[Report]) -> Result<()> {
    let r = &reports[0];
    if let Some(why) = &r.void {
        let m = format!(
            "{}: nothing can be recovered from this folder: {why}. Use another survivor's folder, \
             or load a dump (`strake mds load`)",
            r.dir.display()
        );
        return Err(Error::new(Code::Inval, m));
    }
    for o in &reports[1..] {
        if o.cluster != r.cluster {
            let m =
                format!("{} and {} belong to different clusters", r.dir.display(), o.dir.display());
            return Err(inval(m));
        }
        if o.rank() > r.rank() {
            let (_, term, index) = o.rank().unwrap_or_default();
            let m = format!(
                "{} has more: it ends with entry {index} of term {term}. Recover from that one",
                o.dir.display()
            );
            return Err(inval(m));
        }
    }
    Ok(())
}
