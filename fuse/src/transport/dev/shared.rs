//! Checks whether pages that the kernel has are still the content of the file, since other nodes
//! may change it: "Between nodes" in `docs/mappings.md`.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::AsOf;
use strake_proto::SessionId;

use super::mapped::Mapped;
use crate::vfs::Vfs;

/// How often to check whether another client has changed a file that has pages out.
const LOOK: Duration = Duration::from_millis(200);

/// For each file that has pages out: the condition under which they are valid.
#[derive(Default)]
struct Known {
    files: HashMap<u64, AsOf>,
    /// The client's session in which the oldest of them were handed out.
    sessions: HashMap<u64, SessionId>,
    /// Whether a task watches them.
    watched: bool,
}

/// The condition for earlier pages and new ones together.
fn both(a: AsOf, b: AsOf) -> AsOf {
    match (a, b) {
        (a, b) if a == b => a,
        (AsOf::Change(a), AsOf::Change(b)) => AsOf::Change(a.min(b)),
        // They are of different times: no change has this number.
        _ => AsOf::Change(0),
    }
}

/// Takes pages back when another client has changed their file, or needs to read it.
pub struct Shared {
    mapped: Arc<Mapped>,
    vfs: Weak<Vfs>,
    known: Mutex<Known>,
}

impl Shared {
    pub fn new(mapped: Arc<Mapped>, vfs: Weak<Vfs>) -> Shared {
        Shared { mapped, vfs, known: Mutex::default() }
    }

    /// Pages that were read under this condition are about to be handed out.
    pub fn hands_out(self: &Arc<Self>, node: u64, as_of: AsOf) {
        let session = match as_of {
            // Stores are written back under the lock, so in its session.
            AsOf::Locked(number) => self.locked_in(node, number).unwrap_or_else(|| self.session()),
            _ => self.session(),
        };
        self.handed_out(node, as_of, session);
    }

    fn locked_in(&self, node: u64, number: u64) -> Option<SessionId> {
        let vfs = self.vfs.upgrade()?;
        vfs.holds_pages(node, number).filter(|session| *session == vfs.session())
    }

    fn handed_out(self: &Arc<Self>, node: u64, as_of: AsOf, session: SessionId) {
        let mut known = self.known.lock();
        known.sessions.entry(node).or_insert(session);
        known
            .files
            .entry(node)
            .and_modify(|before| *before = both(*before, as_of))
            .or_insert(as_of);
        if !std::mem::replace(&mut known.watched, true) {
            tokio::spawn(self.clone().watch());
        }
    }

    /// An earlier daemon may have handed out any pages, in this session.
    pub fn may_be_out(self: &Arc<Self>, node: u64, session: SessionId) {
        self.mapped.may_be_out(node);
        self.handed_out(node, AsOf::Change(0), session);
    }

    /// Whether the file has pages to give back.
    pub fn has_out(&self, node: u64) -> bool {
        self.mapped.has_out(node)
    }

    /// Returns when everything that was stored so far is written, and all pages that were handed
    /// out before are taken back.
    pub async fn give_back(&self, node: u64) {
        // Do this first: pages that are handed out from here on are not taken back.
        let session = {
            let mut known = self.known.lock();
            known.files.remove(&node);
            known.sessions.get(&node).copied()
        };
        self.mapped.give_back(node).await;
        let mut known = self.known.lock();
        if known.sessions.get(&node).copied() == session {
            known.sessions.remove(&node);
        }
    }

    /// The only session in which a write-back of the file is allowed. What was stored in a lost
    /// session must not overwrite what other clients have written since.
    pub fn writes_in(&self, node: u64) -> Option<SessionId> {
        self.known.lock().sessions.get(&node).copied().filter(|session| *session != 0)
    }

    fn session(&self) -> SessionId {
        self.vfs.upgrade().map_or(0, |v| v.session())
    }

    /// A lock was granted, or is about to be released. Afterwards mappings show what others wrote
    /// before, and others see what was stored under the lock.
    pub async fn synchronize(&self, node: u64) {
        if self.has_out(node) && !self.is_ours(node) {
            self.give_back(node).await;
        }
    }

    /// Whether no other client can have changed the file since its pages were handed out.
    fn is_ours(&self, node: u64) -> bool {
        match self.known.lock().files.get(&node).copied() {
            Some(AsOf::Tenure(t)) => self.vfs.upgrade().is_some_and(|v| v.tenure(node) == Some(t)),
            Some(AsOf::Locked(number)) => self.locked_in(node, number).is_some(),
            Some(AsOf::Change(_)) | None => false,
        }
    }

    /// Watches pages as long as any are out.
    async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let files: Vec<(u64, AsOf)> = {
                let mut known = self.known.lock();
                known.files.retain(|node, _| self.mapped.has_out(*node));
                known.sessions.retain(|node, _| self.mapped.has_out(*node));
                known.watched = !known.files.is_empty() && self.vfs.strong_count() > 0;
                if !known.watched {
                    return;
                }
                known.files.iter().map(|(node, as_of)| (*node, *as_of)).collect()
            };
            for (node, as_of) in files {
                self.look(node, as_of).await;
            }
        }
    }

    async fn look(&self, node: u64, as_of: AsOf) {
        let change = match as_of {
            AsOf::Tenure(_) | AsOf::Locked(_) if self.is_ours(node) => return,
            AsOf::Tenure(_) | AsOf::Locked(_) => None,
            AsOf::Change(change) => {
                Some(change).filter(|_| self.writes_in(node) == Some(self.session()))
            }
        };
        let Some(vfs) = self.vfs.upgrade() else { return };
        if let Some(change) = change {
            // The answer includes what other clients have written up to now.
            let now = match vfs.change_of(node).await {
                Ok(change) => change,
                // It is asked again at the next check.
                Err(_) => return,
            };
            if now == change {
                let mut known = self.known.lock();
                if let (Some(has), Some(t)) = (known.files.get_mut(&node), vfs.leased(node, change))
                    && *has == as_of
                {
                    *has = AsOf::Tenure(t);
                }
                return;
            }
        }
        self.give_back(node).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_two_times_are_as_old_as_the_older_ones() {
        use AsOf::{Change, Tenure};
        assert_eq!(both(Change(5), Change(7)), Change(5));
        assert_eq!(both(Tenure(2), Tenure(2)), Tenure(2));
        assert_eq!(both(Tenure(2), Tenure(3)), Change(0));
        assert_eq!(both(Change(5), Tenure(3)), Change(0), "nobody has told of what came between");
    }
}
