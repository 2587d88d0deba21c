//! Clusters of storage servers under failures. The helpers that all files share are here.

mod backpressure;
mod bed;
mod bounds;
mod copies;
mod devices;
mod endings;
mod grants;
mod kept;
mod leaving;
mod numbers;
mod refused;
mod refused_targets;
mod removals;
mod rights;
mod rot;
mod scrub;
mod tcp;
mod trims;
mod turns;
mod writes;

use std::time::Duration;

use bed::{CHAIN, Cluster, SESSION, bytes};
use devices::{flip_everywhere, flip_now};
use strake_fabric::Role;
use strake_proto::{
    Code, Incarnation, Result, Rights,
    checksum::block_sums,
    data::{DataRequest, FLAG_REPLAY, FLAG_STABLE, FLAG_TOMBSTONE, Kind, Version, Writer},
    layout::MAX_CHUNK,
    map::ChainExt,
    opcode, pb,
};
use tokio::time::Instant;

use crate::device::mem::Op;
