//! The nodes of a simulated cluster, by their numbers on the network.

/// Metadata servers of a cluster.
pub const MDS: u32 = 3;
/// Storage servers of a cluster at first.
pub const OSS: u32 = 3;
/// Node numbers of all metadata servers that may be members at some time of a run: one may be
/// replaced.
pub const ANY_MDS: std::ops::RangeInclusive<u32> = 1..=MDS + 1;
/// Clients that work during a run.
pub const CLIENTS: u32 = 3;
/// Node numbers on the network: metadata servers from 1, storage servers from 101, clients from
/// 201.
pub const FIRST_OSS: u32 = 101;
pub const FIRST_CLIENT: u32 = 201;

/// A node's name in output.
pub fn called(node: u32) -> String {
    match node {
        n if n >= FIRST_CLIENT => format!("client {}", n - FIRST_CLIENT),
        n if n >= FIRST_OSS => format!("oss {n}"),
        n => format!("mds {n}"),
    }
}

/// All servers that every cluster has.
pub fn servers() -> Vec<u32> {
    (1..=MDS).chain(FIRST_OSS..FIRST_OSS + OSS).collect()
}
