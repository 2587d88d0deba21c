//! Which recalls are acknowledged.

use std::cmp::Ordering;

use parking_lot::Mutex;

/// The connection, and the number up to which everything that was recalled on it is forgotten.
#[derive(Default)]
pub(crate) struct Acknowledged(Mutex<(u64, u64)>);

impl Acknowledged {
    pub fn upto(&self, connection: u64) -> u64 {
        let (of, number) = *self.0.lock();
        if of == connection { number } else { 0 }
    }

    pub fn note(&self, connection: u64, number: u64) {
        let mut known = self.0.lock();
        match known.0.cmp(&connection) {
            Ordering::Less => *known = (connection, number),
            Ordering::Equal => known.1 = known.1.max(number),
            Ordering::Greater => {}
        }
    }
}
