//! How much free space of a target is kept from new data: pure arithmetic.
//!
//! Every update is copy-on-write, so a full target without a reserve could do nothing. Overwriting,
//! truncating and removing give blocks back as soon as they are flushed.

use strake_proto::SessionId;

use crate::device::BLOCK;

/// One part in so many of a target is kept for overwriting, and one in so many for truncating and
/// punching.
const OVERWRITE_PART: u64 = 64;
const CUT_PART: u64 = 1024;
const MOST_OVERWRITE: u64 = (64 << 20) / BLOCK;

/// Blocks kept back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reserve {
    /// For truncating and punching, which may take everything that is free.
    pub cut: u64,
    /// For blocks that replace others.
    pub overwrite: u64,
    /// Bytes in the file system that holds the target, for overwriting and for the chunk table.
    /// With less free, new data is refused.
    pub below: u64,
}

/// Which free blocks an update may take.
#[derive(Clone, Copy, Debug)]
pub(super) enum Claim {
    /// Blocks that are neither reserved nor granted, and the grant of this session, if any.
    Data(Option<SessionId>),
    /// All, because the update gives space back.
    All,
}

/// Blocks that an update needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub count: u64,
    /// How many of them replace other blocks.
    pub replaced: u64,
    pub claim: Claim,
}

impl Want {
    /// How many more blocks are in use afterwards.
    pub(super) fn fresh(&self) -> u64 {
        self.count - self.replaced
    }

    pub(super) fn session(&self) -> Option<SessionId> {
        match self.claim {
            Claim::Data(session) => session,
            Claim::All => None,
        }
    }
}

impl Reserve {
    /// The reserves of a target of `capacity` blocks.
    pub(super) fn of(capacity: u64) -> Reserve {
        let overwrite = (capacity / OVERWRITE_PART).min(MOST_OVERWRITE);
        Reserve { cut: (capacity / CUT_PART).clamp(16, 4096), overwrite, below: overwrite * BLOCK }
    }

    pub(super) fn total(&self) -> u64 {
        self.cut + self.overwrite
    }

    /// How many blocks must be left when the update has its blocks. `granted`: blocks granted to
    /// all sessions; `own`: those granted to the update's session.
    ///
    /// New blocks use the session's grant first. If they exceed it, the free blocks must still
    /// cover both reserves and the other grants, where replaced blocks count as free again. Blocks
    /// that replace others may use the overwrite reserve.
    pub(super) fn from(&self, want: Want, granted: u64, own: u64) -> u64 {
        if matches!(want.claim, Claim::All) {
            return 0;
        }
        let others = self.cut + granted - own;
        match want.fresh().saturating_sub(own) {
            0 => others,
            beyond => others.max((beyond + self.total() + granted).saturating_sub(want.count)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    fn data(count: u64, replaced: u64, session: Option<SessionId>) -> Want {
        Want { count, replaced, claim: Claim::Data(session) }
    }

    #[test]
    fn new_data_leaves_what_is_kept_and_overwriting_takes_it() {
        let k = Reserve { cut: 16, overwrite: 100, below: 0 };
        assert_eq!(k.from(data(10, 0, None), 0, 0), 116);
        assert_eq!(k.from(data(10, 10, None), 0, 0), 16);
        // Half new, half replaced: both limits hold. The limit of new data counts replaced blocks
        // as free again.
        assert_eq!((k.from(data(10, 5, None), 0, 0), k.from(data(300, 5, None), 0, 0)), (111, 111));
        assert_eq!(
            (k.from(data(10, 0, None), 50, 0), k.from(data(10, 10, None), 50, 0)),
            (166, 66)
        );
        // Overwriting leaves grants alone.
        assert_eq!(
            (k.from(data(10, 0, Some(1)), 50, 30), k.from(data(40, 0, Some(1)), 50, 30)),
            (36, 136)
        );
        assert_eq!(k.from(Want { claim: Claim::All, ..data(10, 0, None) }, 50, 0), 0);
        assert_eq!(Reserve::of(256), Reserve { cut: 16, overwrite: 4, below: 4 * BLOCK });
        assert_eq!(Reserve::of(1 << 40).total(), 4096 + MOST_OVERWRITE);
    }

    /// In whatever order updates come: as long as each overwrite is no larger than its reserve, an
    /// overwrite that runs alone finds its blocks, and so does a write within its grant.
    #[test]
    fn overwriting_always_finds_what_was_kept() {
        for seed in 0..300 {
            let mut rng = StdRng::seed_from_u64(seed);
            let k = Reserve { cut: 4, overwrite: 20, below: 0 };
            let (mut free, mut stored, mut grant) = (rng.random_range(24..200u64), 0u64, 0u64);
            // Blocks that a flush gives back.
            let mut replaced = 0u64;
            for _ in 0..300 {
                match rng.random_range(0..6) {
                    0 | 1 => {
                        let n = rng.random_range(1..30);
                        let of = rng.random_range(0..=n.min(stored.saturating_sub(replaced)));
                        let want = data(n, of, None);
                        if n + k.from(want, grant, 0) <= free {
                            (free, stored, replaced) = (free - n, stored + n - of, replaced + of);
                        }
                    }
                    2 => {
                        let n = rng.random_range(0..30).min(grant);
                        let want = data(n, 0, Some(1));
                        assert!(
                            n + k.from(want, grant, grant) <= free,
                            "{n} of a grant of {grant}, {free} free"
                        );
                        (free, stored, grant) = (free - n, stored + n, grant - n);
                    }
                    3 => grant = grant.max(free.saturating_sub(k.total()) / 4),
                    4 => (free, replaced) = (free + replaced, 0),
                    _ => {
                        (free, replaced) = (free + replaced, 0);
                        let n = stored.min(k.overwrite);
                        assert!(
                            n + k.from(data(n, n, None), grant, 0) <= free,
                            "{n} anew, {free} free, {grant} granted"
                        );
                        let gone = rng.random_range(0..=stored);
                        (free, stored) = (free + gone, stored - gone);
                    }
                }
            }
        }
    }
}
