//! Tiers that failed in calls for lack of something that their self-tests do not check. They are
//! not used for a while, longer each time, if another tier can serve. No clock: callers pass the
//! time.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{ByTier, Direction, Policy, Tier, Unavailable, fault::Fault, plan::Standing};

/// Duration after the first failure. A try may cost seconds, and what is missing (memory,
/// connections) may be available soon.
const FIRST: Duration = Duration::from_secs(10);
/// How often that duration is doubled by successive failures.
const DOUBLED: u32 = 4;

#[derive(Clone, Default)]
struct Rest {
    until: Option<(Instant, Fault)>,
    failed: u32,
}

/// What a call may use.
#[derive(Clone, Copy)]
pub struct Asked {
    pub policy: Policy,
    pub direction: Direction,
    /// As for [`crate::plan::choose`].
    pub consent: bool,
    /// A tier that cannot take all files of the call.
    pub partly: Option<Tier>,
}

/// The rests of all tiers of a bridge, in each direction.
pub struct Rests(Mutex<ByTier<[Rest; 2]>>);

const fn way(direction: Direction) -> usize {
    match direction {
        Direction::Load => 0,
        Direction::Save => 1,
    }
}

impl Rests {
    pub fn new() -> Rests {
        Rests(Mutex::new(ByTier::new(|_| Default::default())))
    }

    /// The tier failed in a call just now.
    pub fn failed(&self, tier: Tier, direction: Direction, why: Fault, now: Instant) {
        let r = &mut self.0.lock()[tier][way(direction)];
        r.until = Some((now + FIRST * (1 << r.failed.min(DOUBLED)), why));
        r.failed = r.failed.saturating_add(1);
    }

    /// The tier worked in a call.
    pub fn worked(&self, tier: Tier, direction: Direction) {
        self.0.lock()[tier][way(direction)] = Rest::default();
    }

    /// All tiers may be tried again, as requested.
    pub fn end(&self) {
        *self.0.lock() = ByTier::new(|_| Default::default());
    }

    /// Removes resting tiers from those that a call may take, if the policy leaves another one in
    /// their place. A call that allows nothing else tries the resting tier.
    pub fn take_out(&self, standings: &mut ByTier<Standing>, asked: Asked, now: Instant) {
        let Asked { policy, direction, consent, partly } = asked;
        let rests = self.0.lock();
        let rests =
            |t: Tier| rests[t][way(direction)].until.as_ref().filter(|(until, _)| now < *until);
        for tier in Tier::ALL {
            let Some((_, why)) = rests(tier) else { continue };
            let serves = |t: Tier| {
                let able =
                    matches!(standings[t], Standing::Available(_)) && (!t.is_straight() || consent);
                t != tier && Some(t) != partly && able && policy.allows(t) && rests(t).is_none()
            };
            // RDMA bytes that do not count as `BounceRdma` count as `BounceTcp`, and as nothing
            // else.
            let another = match tier {
                Tier::BounceRdma => serves(Tier::BounceTcp),
                _ => Tier::ALL.into_iter().any(serves),
            };
            if another && matches!(standings[tier], Standing::Available(_)) {
                standings[tier] = Standing::Unavailable(Unavailable::Resting(why.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Measured;

    fn all() -> ByTier<Standing> {
        ByTier::new(|_| Standing::Available(Measured { load: 1.0, save: 1.0 }))
    }

    fn fault() -> Fault {
        Fault::Export { bytes: 1, why: "no room".into() }
    }

    /// The tiers that rest for a call.
    fn resting(
        r: &Rests,
        policy: Policy,
        direction: Direction,
        consent: bool,
        now: Instant,
    ) -> Vec<Tier> {
        rest_of(r, Asked { policy, direction, consent, partly: None }, now)
    }

    fn rest_of(r: &Rests, asked: Asked, now: Instant) -> Vec<Tier> {
        let mut standings = all();
        r.take_out(&mut standings, asked, now);
        let rests = |s: &Standing| *s == Standing::Unavailable(Unavailable::Resting(fault()));
        standings.iter().filter(|(_, s)| rests(s)).map(|(t, _)| t).collect()
    }

    #[test]
    fn a_tier_rests_longer_each_time_until_it_works_and_in_one_direction() {
        let (r, begun) = (Rests::new(), Instant::now());
        let rests = |at: Duration| {
            !resting(&r, Policy::Prefer, Direction::Save, true, begun + at).is_empty()
        };
        assert!(!rests(Duration::ZERO));
        let mut now = Duration::ZERO;
        for secs in [10, 20, 40, 80, 160, 160] {
            r.failed(Tier::GpuRdma, Direction::Save, fault(), begun + now);
            assert!(rests(now) && rests(now + Duration::from_secs(secs - 1)), "{secs}");
            assert!(resting(&r, Policy::Prefer, Direction::Load, true, begun + now).is_empty());
            now += Duration::from_secs(secs);
            assert!(!rests(now), "{secs}");
        }
        r.worked(Tier::GpuRdma, Direction::Save);
        r.failed(Tier::GpuRdma, Direction::Save, fault(), begun + now);
        assert!(!rests(now + Duration::from_secs(10)), "from the beginning");
        assert!(rests(now));
        r.end();
        assert!(!rests(now));
    }

    #[test]
    fn a_call_that_leaves_no_other_tier_tries_it_all_the_same() {
        let (r, now) = (Rests::new(), Instant::now());
        let of = |policy, consent| resting(&r, policy, Direction::Load, consent, now);
        r.failed(Tier::BounceRdma, Direction::Load, fault(), now);
        assert_eq!(of(Policy::Prefer, true), [Tier::BounceRdma]);
        assert_eq!(of(Policy::AtLeast(Tier::BounceTcp), true), [Tier::BounceRdma]);
        for strict in [Policy::AtLeast(Tier::BounceRdma), Policy::Require(Tier::BounceRdma)] {
            assert!(of(strict, true).is_empty(), "{strict}");
        }
        r.failed(Tier::GpuRdma, Direction::Load, fault(), now);
        assert_eq!(of(Policy::Prefer, true), [Tier::GpuRdma, Tier::BounceRdma]);
        assert!(of(Policy::Require(Tier::GpuRdma), true).is_empty());
        // The other tier needs a consent that is not given.
        let (r, policy) = (Rests::new(), Policy::AtLeast(Tier::LocalGds));
        r.failed(Tier::LocalGds, Direction::Load, fault(), now);
        assert!(resting(&r, policy, Direction::Load, false, now).is_empty());
        assert_eq!(resting(&r, policy, Direction::Load, true, now), [Tier::LocalGds]);
        // The other tier has copies of some files only, or needs that consent, too.
        let (r, policy) = (Rests::new(), Policy::AtLeast(Tier::LocalGds));
        r.failed(Tier::GpuRdma, Direction::Load, fault(), now);
        let asked = |consent, partly| Asked { policy, direction: Direction::Load, consent, partly };
        assert_eq!(rest_of(&r, asked(true, None), now), [Tier::GpuRdma]);
        assert!(rest_of(&r, asked(true, Some(Tier::LocalGds)), now).is_empty());
        assert!(rest_of(&r, asked(false, None), now).is_empty());
    }
}
