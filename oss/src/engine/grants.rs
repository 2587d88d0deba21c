//! Space that a target has granted: pure bookkeeping. See `docs/leases.md`, "Space".
//!
//! Space granted to a session is kept free from the updates of all other sessions, and from its own
//! updates that do not ask to use the grant. Grants live in memory only, and last as long as the
//! session keeps asking. All grants together never exceed what updates may take of the target, so
//! granted blocks are always available.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::{
    SessionId,
    data::{GRANT_TERM, MAX_GRANT},
};

/// At most one part in so many of the free space is granted, to all sessions together. The rest is
/// for writes without a grant.
const PARTS: u64 = 4;
/// Most sessions with a grant; more than have a file open for writing on one target at a time.
const MOST_SESSIONS: usize = 4096;

struct Grant {
    blocks: u64,
    /// When it expires, on the boot clock.
    until: Duration,
    /// [`Ask::seq`] of the request that was answered last.
    seq: u64,
}

/// What a session asks for.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The session that asks.
    pub session: SessionId,
    /// Rises with each request; a request older than the last one is ignored.
    pub seq: u64,
    /// Granted blocks that the session needs to keep.
    pub keep: u64,
    /// Blocks that the session would like to have.
    pub want: u64,
}

/// See the module.
#[derive(Default)]
pub(super) struct Grants {
    sessions: BTreeMap<SessionId, Grant>,
    total: u64,
}

impl Grants {
    /// Blocks granted, to all sessions.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn of(&self, session: SessionId) -> u64 {
        self.sessions.get(&session).map_or(0, |g| g.blocks)
    }

    /// A session asks. `free`: blocks that updates may take, granted or not. Returns the session's
    /// grant from now on; `None` if a newer request of it was answered already.
    pub(super) fn ask(&mut self, now: Duration, ask: Ask, free: u64) -> Option<u64> {
        self.expire(now);
        let Ask { session, seq, keep, want } = ask;
        if self.sessions.get(&session).is_some_and(|g| seq < g.seq) {
            return None;
        }
        let own = self.of(session);
        let others = self.total - own;
        let room = (free / PARTS).saturating_sub(others).min(MAX_GRANT);
        let blocks = want.min(room).max(own.min(keep));
        self.total = others + blocks;
        if blocks == 0 {
            self.sessions.remove(&session);
        } else if own > 0 || self.sessions.len() < MOST_SESSIONS {
            self.sessions.insert(session, Grant { blocks, until: now + GRANT_TERM, seq });
        } else {
            self.total = others;
        }
        Some(self.of(session))
    }

    /// The session's update takes `blocks` of the target. They come out of its grant as far as that
    /// reaches; returns how many did.
    pub(super) fn take(&mut self, session: SessionId, blocks: u64) -> u64 {
        let Some(g) = self.sessions.get_mut(&session) else { return 0 };
        let taken = blocks.min(g.blocks);
        g.blocks -= taken;
        self.total -= taken;
        taken
    }

    /// Returns blocks to the grant: the update that had taken them failed and will be resent.
    pub(super) fn give_back(&mut self, session: SessionId, blocks: u64) {
        if let Some(g) = self.sessions.get_mut(&session) {
            g.blocks += blocks;
            self.total += blocks;
        }
    }

    /// Drops the grants of sessions that have not asked for too long.
    pub(super) fn expire(&mut self, now: Duration) {
        let over = self.sessions.extract_if(.., |_, g| g.until <= now);
        self.total -= over.map(|(_, g)| g.blocks).sum::<u64>();
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn ask(
        g: &mut Grants,
        now: Duration,
        session: SessionId,
        keep: u64,
        want: u64,
        free: u64,
    ) -> u64 {
        g.ask(now, Ask { session, seq: now.as_millis() as u64, keep, want }, free).unwrap()
    }

    #[test]
    fn a_quarter_of_what_is_free_is_granted_and_runs_out() {
        let mut g = Grants::default();
        assert_eq!(
            (
                ask(&mut g, S, 1, 0, 10, 400),
                ask(&mut g, S, 2, 0, 1000, 400),
                ask(&mut g, S, 3, 0, 1, 400)
            ),
            (10, 90, 0)
        );
        assert_eq!((g.total(), g.of(1), g.of(2)), (100, 10, 90));
        assert_eq!((g.take(1, 4), g.take(1, 40), g.take(1, 1), g.take(7, 1)), (4, 6, 0, 0));
        g.give_back(1, 4);
        g.give_back(7, 4);
        assert_eq!((g.total(), g.of(1)), (94, 4));
        // The target fills up: a session keeps what it needs and gives up the rest.
        assert_eq!(
            (ask(&mut g, S * 2, 2, 30, 90, 100), ask(&mut g, S * 2, 2, 999, 0, 100)),
            (30, 30)
        );
        g.expire(S + GRANT_TERM);
        assert_eq!((g.total(), g.of(1), g.of(2)), (30, 0, 30), "1 asked last a second before");
        assert_eq!(ask(&mut g, S * 3, 2, 0, 0, 100), 0);
        assert_eq!(ask(&mut g, S * 2 + GRANT_TERM, 2, u64::MAX, u64::MAX, u64::MAX), MAX_GRANT);
        assert_eq!(g.total(), MAX_GRANT);
        let late = Ask { session: 2, seq: 1, keep: 0, want: 0 };
        assert_eq!((g.ask(S * 13, late, 0), g.of(2)), (None, MAX_GRANT));
    }

    #[test]
    fn sessions_are_bounded() {
        let mut g = Grants::default();
        let n = MOST_SESSIONS as u64;
        assert_eq!((1..=n + 5).map(|s| ask(&mut g, S, s, 0, 2, u64::MAX)).sum::<u64>(), 2 * n);
        assert_eq!(
            (ask(&mut g, S, 7, 0, 3, u64::MAX), ask(&mut g, S, n + 1, 0, 3, u64::MAX), g.total()),
            (3, 0, 2 * n + 1)
        );
        assert_eq!((ask(&mut g, S, 7, 0, 0, 0), ask(&mut g, S, n + 1, 0, 3, u64::MAX)), (0, 3));
    }

    /// Whatever is asked for, taken, given back or expires while a target fills and empties:
    /// granted blocks are free.
    #[test]
    fn what_is_granted_is_free() {
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut g, mut now, mut free) = (Grants::default(), S, 400u64);
            let mut staged: Vec<(u64, u64, u64)> = Vec::new();
            for _ in 0..300 {
                let (session, n, m) =
                    (rng.random_range(1..6), rng.random_range(0..200), rng.random_range(0..200));
                match rng.random_range(0..8) {
                    0 | 1 => {
                        let had = g.of(session);
                        let has = ask(&mut g, now, session, n, m, free);
                        assert!(has <= (free / PARTS).min(m).max(had.min(n)));
                    }
                    2 => now += Duration::from_millis(n * 20),
                    // An update of a session without a grant.
                    3 if g.total() + n <= free => free -= n,
                    4 => free += n,
                    5 if !staged.is_empty() => {
                        let (session, taken, blocks) =
                            staged.swap_remove(n as usize % staged.len());
                        free += blocks;
                        g.give_back(session, taken);
                    }
                    6 => {
                        staged.pop();
                    }
                    _ if n <= g.of(session) || g.total() - g.of(session) + n <= free => {
                        assert!(free >= n, "within its grant a session finds space");
                        staged.push((session, g.take(session, n), n));
                        free -= n;
                    }
                    _ => {}
                }
                assert!(g.total() <= free, "{} granted of {free}", g.total());
                assert_eq!(g.total(), g.sessions.values().map(|g| g.blocks).sum::<u64>());
            }
        }
    }
}
