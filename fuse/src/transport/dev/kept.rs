//! The result of the negotiation with the kernel, kept for the next daemon: the kernel does not send
//! INIT again.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::init::Agreed;
use crate::handover::HandoverMemory;

/// Words of the handover memory with it.
const WORDS: [usize; 2] = [1, 2];

/// The result of an earlier daemon's negotiation.
pub(super) fn agreed_before(keep: &HandoverMemory) -> Option<Agreed> {
    Agreed::from_words(WORDS.map(|n| keep.mount_word(n).load(Acquire)))
}

/// Keeps this daemon's.
pub(super) fn keep_agreed(keep: &HandoverMemory, agreed: Agreed) {
    for (n, word) in WORDS.into_iter().zip(agreed.to_words()) {
        keep.mount_word(n).store(word, Release);
    }
}
