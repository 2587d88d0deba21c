//! Configuration of a storage server.

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Deserializer, de::Error as _};
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Result};

/// One endpoint, several separated by commas, or a list.
fn own_endpoints<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Endpoint>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected an endpoint or a list of them")]
    enum Either {
        Text(String),
        List(Vec<String>),
    }
    let all = match Either::deserialize(d)? {
        Either::Text(t) => t.split(',').map(String::from).collect(),
        Either::List(l) => l,
    };
    all.iter().map(|s| s.trim().parse().map_err(D::Error::custom)).collect()
}

fn endpoints<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Endpoint>, D::Error> {
    Vec::<String>::deserialize(d)?.iter().map(|s| s.parse().map_err(D::Error::custom)).collect()
}

/// One target: a folder with its chunk table and its data, or a link to the block device that holds
/// the data.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetConfig {
    /// Folder of the target.
    pub path: PathBuf,
    /// Bytes of the data file made in the folder. Only read when the target is made.
    #[serde(default)]
    pub size: u64,
    /// Block device for the data, instead of `size`. Only read when the target is made.
    #[serde(default)]
    pub device: Option<PathBuf>,
    /// Make the target on a device that is not blank; all that is on it is lost. Only read when the
    /// target is made.
    #[serde(default)]
    pub force: bool,
    /// Make and format the target if its folder is absent or empty. Off: refuse to start (a disk
    /// that is not mounted).
    #[serde(default = "defaults::create")]
    pub create: bool,
}

/// See `docs/operations.md`, "Object storage server configuration".
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Stable name of this node, unique in the cluster.
    pub name: String,
    /// Where it listens, `tcp:HOST:PORT` and `rdma:HOST:PORT`; at least one. Port 0 picks one.
    #[serde(deserialize_with = "own_endpoints")]
    pub listen: Vec<Endpoint>,
    /// The address that others use to reach it, if that is not `listen`.
    #[serde(default, deserialize_with = "own_endpoints")]
    pub advertise: Vec<Endpoint>,
    /// Where the gRPC administration service listens; none if absent.
    #[serde(default)]
    pub admin: Option<SocketAddr>,
    /// What fails together with this node, for example its rack. Copies go to other racks if there
    /// are any.
    #[serde(default)]
    pub rack: String,
    /// The metadata servers, in any order.
    #[serde(deserialize_with = "endpoints")]
    pub mds: Vec<Endpoint>,
    /// The targets of this server.
    #[serde(default)]
    pub targets: Vec<TargetConfig>,
    /// Milliseconds between heartbeats.
    #[serde(default = "defaults::heartbeat")]
    pub heartbeat_ms: u64,
    /// Milliseconds between flushes of a target with unflushed changes.
    #[serde(default = "defaults::flush")]
    pub flush_ms: u64,
    /// Bytes per second that a resync may send per chain, 0 = no limit.
    #[serde(default)]
    pub sync_rate: u64,
    /// Chunks a resync keeps in flight per chain.
    #[serde(default = "defaults::sync_parallel")]
    pub sync_parallel: usize,
    /// Bytes per second that the scrub may read from each target, 0 = no limit.
    #[serde(default = "defaults::scrub_rate")]
    pub scrub_rate: u64,
    /// Seconds from the beginning of one scrub of a target to that of the next, 0 = only when asked
    /// for.
    #[serde(default = "defaults::scrub_every")]
    pub scrub_every_s: u64,
    /// A target's data of a chain that it has left is removed only when every in-sync replica has
    /// read its copy of the chunk. Off: as soon as all are in sync.
    #[serde(default = "defaults::keep_until_read")]
    pub keep_until_read: bool,
    /// Client requests worked on at a time; clients are told to retry others.
    #[serde(default = "defaults::max_requests")]
    pub max_requests: usize,
    /// Milliseconds to wait for another storage server's answer before it is asked again.
    #[serde(default = "defaults::peer_timeout")]
    pub peer_timeout_ms: u64,
    /// Milliseconds that an update may take from a client to here; a later one must be resent.
    /// 0 = no limit.
    #[serde(default = "defaults::update_life")]
    pub update_life_ms: u32,
    /// Capabilities end here when the right behind them ends. Off: when they expire.
    #[serde(default = "defaults::end_capabilities")]
    pub end_capabilities: bool,
    /// Not a configuration key. The newest feature level that the metadata servers are told this
    /// program knows: lower than [`strake_proto::FEATURE_LEVEL`] only in tests.
    #[serde(skip, default = "defaults::feature_level")]
    pub feature_level: u32,
}

/// Largest value of counts: more at a time than any machine does.
const MOST: usize = 65_536;
const LONGEST_MS: u64 = 86_400_000;
/// Clients learn the server's time every third of an update's life.
const LEAST_LIFE_MS: u32 = 1000;
const LONGEST_SCRUB_S: u64 = 100 * 365 * 86_400;

mod defaults {
    pub(super) fn create() -> bool {
        true
    }
    pub(super) fn heartbeat() -> u64 {
        250
    }
    pub(super) fn flush() -> u64 {
        1000
    }
    pub(super) fn sync_parallel() -> usize {
        4
    }
    pub(super) fn scrub_rate() -> u64 {
        32 << 20
    }
    pub(super) fn scrub_every() -> u64 {
        7 * 86_400
    }
    pub(super) fn keep_until_read() -> bool {
        true
    }
    pub(super) fn end_capabilities() -> bool {
        true
    }
    pub(super) fn max_requests() -> usize {
        1024
    }
    pub(super) fn peer_timeout() -> u64 {
        4000
    }
    pub(super) fn update_life() -> u32 {
        15_000
    }
    pub(super) fn feature_level() -> u32 {
        strake_proto::FEATURE_LEVEL
    }
}

impl Config {
    /// With defaults for everything else.
    pub fn new(name: impl Into<String>, listen: Endpoint, mds: Vec<Endpoint>) -> Config {
        Config {
            name: name.into(),
            listen: vec![listen],
            advertise: Vec::new(),
            admin: None,
            rack: String::new(),
            mds,
            targets: Vec::new(),
            heartbeat_ms: defaults::heartbeat(),
            flush_ms: defaults::flush(),
            sync_rate: 0,
            sync_parallel: defaults::sync_parallel(),
            scrub_rate: defaults::scrub_rate(),
            scrub_every_s: defaults::scrub_every(),
            keep_until_read: defaults::keep_until_read(),
            max_requests: defaults::max_requests(),
            peer_timeout_ms: defaults::peer_timeout(),
            update_life_ms: defaults::update_life(),
            end_capabilities: defaults::end_capabilities(),
            feature_level: defaults::feature_level(),
        }
    }

    /// `Inval` for values that cannot work, with the key's name.
    pub fn check(&self) -> Result<()> {
        let bad =
            |m: &str| Err(Error::new(Code::Inval, format!("storage server configuration: {m}")));
        if self.name.is_empty() || self.name.len() > 255 {
            return bad("name must be 1 to 255 bytes");
        }
        if self.rack.len() > 255 || self.rack.chars().any(char::is_control) {
            return bad("rack must be at most 255 bytes of printable text");
        }
        if self.listen.is_empty() || self.listen.len() > 16 || self.advertise.len() > 16 {
            return bad("listen must name 1 to 16 endpoints, advertise at most 16");
        }
        if self.mds.is_empty() {
            return bad("mds must name at least one metadata server");
        }
        if self.heartbeat_ms == 0 || self.flush_ms == 0 || self.peer_timeout_ms == 0 {
            return bad("heartbeat_ms, flush_ms and peer_timeout_ms must be above 0");
        }
        let mut devices: Vec<&PathBuf> =
            self.targets.iter().filter_map(|t| t.device.as_ref()).collect();
        devices.sort();
        if let Some(twice) = devices.windows(2).find(|w| w[0] == w[1]) {
            return bad(&format!("two targets name the device {}", twice[0].display()));
        }
        if self.sync_parallel == 0 || self.max_requests == 0 {
            return bad("sync_parallel and max_requests must be above 0");
        }
        if self.sync_parallel > MOST || self.max_requests > MOST {
            return bad("sync_parallel and max_requests are at most 65536");
        }
        if self.heartbeat_ms.max(self.flush_ms).max(self.peer_timeout_ms) > LONGEST_MS {
            return bad("heartbeat_ms, flush_ms and peer_timeout_ms are at most a day");
        }
        if self.update_life_ms != 0 && self.update_life_ms < LEAST_LIFE_MS
            || u64::from(self.update_life_ms) > LONGEST_MS
        {
            return bad("update_life_ms is 1000 to a day; 0 switches it off");
        }
        if self.scrub_every_s > LONGEST_SCRUB_S {
            return bad("scrub_every_s is at most a hundred years; 0 switches it off");
        }
        Ok(())
    }
}
