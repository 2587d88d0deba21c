//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod chaos;
#[path = "common/cluster.rs"]
mod cluster;
mod coherence;
mod common;
mod copies;
mod cufile;
mod decay;
mod disaster;
mod disk_full;
mod doors;
mod expansion;
mod followers;
mod fsck;
mod gds;
mod gds_local;
mod health;
mod kill;
mod lfs;
mod local;
mod locks;
mod members;
mod posix;
mod processes;
mod restart;
mod scrub;
mod seal;
mod shares;
#[path = "common/suite.rs"]
mod suite;
mod targets;
mod upgrade;
