//! What a connection has lent to the other end, and the memory windows that open it.

use std::{collections::BTreeMap, sync::Arc};

use super::{registered::Registered, verbs::Mw};
use crate::{Buf, BufMut, Foreign};

/// Memory that the other end may reach through windows. Registrations come first: they must be
/// dropped before the memory.
pub struct Lent {
    pub _mrs: Vec<Arc<Registered>>,
    pub _payload: Vec<Buf>,
    pub room: Option<BufMut>,
    pub _foreign: Option<Foreign>,
    pub windows: Vec<*mut Mw>,
}

/// The loans and windows of one connection.
#[derive(Default)]
pub struct Loans {
    /// All windows that were made.
    pub windows: Vec<*mut Mw>,
    /// Those that are not bound.
    pub spare: Vec<*mut Mw>,
    lent: BTreeMap<u64, Lent>,
    next: u64,
}

// SAFETY: windows are only used through the queue, under its state's lock.
unsafe impl Send for Loans {}

impl Loans {
    /// Holds the memory until the loan ends, and returns the loan's number.
    pub fn add(&mut self, lent: Lent) -> u64 {
        let id = self.next;
        self.next += 1;
        self.lent.insert(id, lent);
        id
    }

    /// `None`: the loan has ended.
    pub fn get(&self, id: u64) -> Option<&Lent> {
        self.lent.get(&id)
    }

    /// Ends a loan whose windows are not bound any more: they can be used again.
    pub fn end(&mut self, id: u64) -> Option<Lent> {
        let lent = self.lent.remove(&id)?;
        self.spare.extend(&lent.windows);
        Some(lent)
    }

    /// Drops everything that is lent, after the queue pair was destroyed.
    pub fn end_all(&mut self) {
        self.lent.clear();
    }
}
