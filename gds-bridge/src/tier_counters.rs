//! How many bytes of each file took which tier, over all calls of a bridge.

use std::{collections::BTreeMap, mem};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;

use crate::{report::Direction, tier::ByTier};

/// Number of files remembered; the one whose bytes moved longest ago is forgotten first.
const FILES: usize = 1024;

/// Bytes of one file by tier. Bytes of failed calls count, because they were moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FileTiers {
    /// To the device.
    pub loaded: ByTier<u64>,
    /// From it.
    pub saved: ByTier<u64>,
}

#[derive(Default)]
struct Files {
    turn: u64,
    /// By file id: when bytes of it moved last, and how many.
    of: BTreeMap<u64, (u64, FileTiers)>,
    /// File ids by that time.
    order: BTreeMap<u64, u64>,
}

/// The counts of one bridge.
#[derive(Default)]
pub struct TierCounters {
    files: Mutex<Files>,
    changed: Notify,
}

impl TierCounters {
    pub(crate) fn add(&self, id: u64, direction: Direction, bytes: &ByTier<u64>) {
        let mut files = self.files.lock();
        files.turn += 1;
        let turn = files.turn;
        let (last, file) = files.of.entry(id).or_default();
        let before = mem::replace(last, turn);
        let to = if direction == Direction::Load { &mut file.loaded } else { &mut file.saved };
        bytes.iter().for_each(|(t, n)| to[t] += n);
        files.order.remove(&before);
        files.order.insert(turn, id);
        if files.of.len() > FILES
            && let Some((_, oldest)) = files.order.pop_first()
        {
            files.of.remove(&oldest);
        }
        drop(files);
        self.changed.notify_one();
    }

    /// By the id of the file ([`crate::FileIo::id`]).
    pub fn files(&self) -> BTreeMap<u64, FileTiers> {
        self.files.lock().of.iter().map(|(id, (_, f))| (*id, f.clone())).collect()
    }

    /// Returns when bytes were moved since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tier;

    fn by(tier: Tier, n: u64) -> ByTier<u64> {
        ByTier::new(|t| if t == tier { n } else { 0 })
    }

    #[test]
    fn bytes_add_up_by_file_and_the_oldest_is_forgotten() {
        let t = TierCounters::default();
        t.add(7, Direction::Load, &by(Tier::BounceTcp, 10));
        t.add(8, Direction::Save, &by(Tier::Pageable, 5));
        t.add(7, Direction::Load, &by(Tier::Pageable, 1));
        t.add(7, Direction::Save, &by(Tier::GpuRdma, 2));
        let seven = t.files()[&7].clone();
        assert_eq!(
            (seven.loaded.sum(), seven.loaded[Tier::BounceTcp], seven.loaded[Tier::Pageable]),
            (11, 10, 1)
        );
        assert_eq!((seven.saved.sum(), seven.saved[Tier::GpuRdma]), (2, 2));
        for id in 100..100 + FILES as u64 - 1 {
            t.add(id, Direction::Load, &by(Tier::BounceTcp, 1));
        }
        let files = t.files();
        assert_eq!(
            (files.len(), files.contains_key(&7), files.contains_key(&8)),
            (FILES, true, false)
        );
        t.add(7, Direction::Load, &by(Tier::BounceTcp, 1));
        t.add(1, Direction::Load, &by(Tier::BounceTcp, 1));
        let files = t.files();
        assert_eq!(
            (files.len(), files.contains_key(&7), files.contains_key(&100)),
            (FILES, true, false)
        );
    }
}
