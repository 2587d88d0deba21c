//! The deterministic simulator: the real mds, oss and client code in one thread, with network,
//! clocks and disks driven by one seed. See docs/testing.md.

pub mod baton;
pub mod clock;
pub mod cluster;
pub mod copies;
pub mod coverage;
pub mod draw;
pub mod faults;
pub mod full;
pub mod ghost;
pub mod histories;
pub mod lapse;
pub mod late;
pub mod leaks;
pub mod ledger;
pub mod lockers;
mod members;
pub mod mix;
pub mod moves;
pub mod net;
pub mod nodes;
pub mod oracle;
pub mod outage;
pub mod plant;
pub mod rivals;
pub mod run;
pub mod savers;
pub mod scenario;
pub mod scribes;
pub mod shrink;
pub mod slow;
pub mod truth;
pub mod wide;
pub mod workload;
