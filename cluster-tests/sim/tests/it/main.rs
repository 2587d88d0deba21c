//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod decay;
mod faults;
mod found;
mod histories;
mod lapse;
mod late;
mod locks;
mod moves;
mod mutants;
mod outage;
mod replay;
mod shrink;
mod slow;
mod sweep;
mod tables;
mod writeback;
