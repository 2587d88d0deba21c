//! Incarnations of a metadata group.
//!
//! A group that lost its quorum for good, or all its members, is started again from what is left: a
//! survivor's folder or a dump. Everything that happened after that state is lost, and former
//! members may return without knowing about it. So each start is an incarnation of its own,
//! recorded in the cluster map and in everything that communicates with metadata servers. Its
//! **era** counts up, and its lower 48 bits are random, because two people may recover the same
//! group independently.

use std::{cmp::Ordering, fmt};

use crate::{Code, Error, Result};

/// 0 is the group as it was first formatted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Incarnation(pub u64);

/// The relation of another incarnation to the own one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kin {
    /// They are the same.
    Same,
    /// The other one was given up when the own one began, or before.
    Older,
    /// The own one was given up.
    Newer,
    /// Of the same era: both were started from what was left of the same group. One of them must be
    /// given up.
    Twin,
}

const ERA_SHIFT: u32 = 48;
const RANDOM: u64 = (1 << ERA_SHIFT) - 1;
/// Counters of an era begin at the era shifted left by this number of bits or above, so that no two
/// eras give out the same numbers.
const SPAN: u32 = 32;

impl Incarnation {
    /// The incarnation of an era, made unique by `random`. `EINVAL` for the last era and beyond,
    /// and for era 0.
    pub fn new(era: u64, random: u64) -> Result<Incarnation> {
        if era == 0 || era >= u64::from(u16::MAX) {
            return Err(Error::new(
                Code::Inval,
                format!("era {era} is not possible for a recovery (1 to 65534)"),
            ));
        }
        Ok(Incarnation(era << ERA_SHIFT | random & RANDOM))
    }

    /// How often the group was recovered.
    pub fn era(self) -> u64 {
        self.0 >> ERA_SHIFT
    }

    /// How another incarnation is related to this one.
    pub fn kin(self, other: Incarnation) -> Kin {
        match other.era().cmp(&self.era()) {
            Ordering::Less => Kin::Older,
            Ordering::Greater => Kin::Newer,
            Ordering::Equal if other == self => Kin::Same,
            Ordering::Equal => Kin::Twin,
        }
    }

    /// Where a counter continues in this era: beyond every number that an earlier era may have
    /// given out.
    pub fn beyond(self, counter: u64) -> u64 {
        ((counter >> SPAN) + 1).max(self.era()) << SPAN
    }
}

impl fmt::Display for Incarnation {
    /// `2-00c0ffee1234`; the first incarnation is `0`.
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
