//! Which life of a metadata group something belongs to.
//!
//! A group that lost its quorum for good, or all its members, begins anew from what is left: a
//! survivor's folder or a dump. What happened after that state is lost, and the former members may
//! come back and know nothing of it. So each beginning is an incarnation of its own, in the cluster
//! map and in whatever speaks with metadata servers: its **era** counts up, and its lower 48 bits
//! are random, because two people may recover the same group twice.

use std::{cmp::Ordering, fmt};

use crate::{Code, Error, Result};

/// 0 is the group as it was first formatted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Incarnation(pub u64);

/// How another incarnation stands to one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kin {
    Same,
    /// It was given up when one's own began, or before.
    Older,
    /// One's own was given up.
    Newer,
    /// Of the same era: both were made from what was left of the same group. One of the two has to
    /// go.
    Twin,
}

const ERA_SHIFT: u32 = 48;
const RANDOM: u64 = (1 << ERA_SHIFT) - 1;
/// Numbers that a group of an era gives out begin at the era times this, so that no two eras give
/// out the same.
const SPAN: u32 = 32;

impl Incarnation {
    /// The one of an era that `random` makes different from others. `EINVAL` for the last era and
    /// beyond.
    pub fn new(era: u64, random: u64) -> Result<Incarnation> {
        if era == 0 || era >= u64::from(u16::MAX) {
            return Err(Error::new(
                Code::Inval,
                format!("era {era} is none that a recovery can begin (1 to 65534)"),
            ));
        }
        Ok(Incarnation(era << ERA_SHIFT | random & RANDOM))
    }

    /// How often the group was recovered.
    pub fn era(self) -> u64 {
        self.0 >> ERA_SHIFT
    }

    pub fn kin(self, other: Incarnation) -> Kin {
        match other.era().cmp(&self.era()) {
            Ordering::Less => Kin::Older,
            Ordering::Greater => Kin::Newer,
            Ordering::Equal if other == self => Kin::Same,
            Ordering::Equal => Kin::Twin,
        }
    }

    /// Where a counter goes on in this era: beyond all that any earlier one may have given out.
    pub fn beyond(self, counter: u64) -> u64 {
        ((counter >> SPAN) + 1).max(self.era()) << SPAN
    }
}

impl fmt::Display for Incarnation {
    /// `2-00c0ffee1234`; the first one is `0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            f.write_str("0")
        } else {
            write!(f, "{}-{:012x}", self.era(), self.0 & RANDOM)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eras_are_in_order_and_twins_are_told_apart() {
        let first = Incarnation::default();
        let (a, b, c) = (
            Incarnation::new(1, 7).unwrap(),
            Incarnation::new(1, 8).unwrap(),
            Incarnation::new(2, 7).unwrap(),
        );
        for (own, other, kin) in [
            (first, first, Kin::Same),
            (a, a, Kin::Same),
            (a, first, Kin::Older),
            (first, a, Kin::Newer),
            (a, b, Kin::Twin),
            (c, b, Kin::Older),
            (b, c, Kin::Newer),
        ] {
            assert_eq!(own.kin(other), kin, "{own} {other}");
        }
        assert_eq!(
            Incarnation::new(3, u64::MAX).unwrap().era(),
            3,
            "the random part does not spill"
        );
        for era in [0, 65_535, u64::MAX] {
            assert_eq!(Incarnation::new(era, 1).unwrap_err().code, Code::Inval);
        }
        assert_eq!((first.to_string(), c.to_string()), ("0".into(), "2-000000000007".into()));
    }

    #[test]
    fn counters_go_on_beyond_every_earlier_era() {
        let era = |n| Incarnation::new(n, 1).unwrap();
        assert_eq!(era(1).beyond(0), 1 << 32);
        assert_eq!(era(1).beyond(77), 1 << 32);
        assert_eq!(era(5).beyond(77), 5 << 32, "eras in between were another group's");
        assert_eq!(era(1).beyond(9 << 32 | 5), 10 << 32);
    }
}
