//! The configuration of a metadata server. `docs/operations.md` has the table for administrators.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use serde::{Deserialize, Deserializer, de::Error as _};
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, FEATURE_LEVEL, Result};

use crate::{
    cluster::state::{FIRST_OSS_NODE, MAX_COPIES},
    leases::Limits,
};

/// Most chains of each number of copies that a target may head.
const MAX_PER_TARGET: usize = 64;

/// How a leader makes sure that it still leads when it answers a read (`docs/leader-lease.md`).
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ReadCheck {
    /// By a lease of a quarter of a second. Needs clocks whose rates differ by less than 10 %.
    #[default]
    Lease,
    /// By asking the other metadata servers each time.
    Quorum,
}

/// Configuration of one metadata server, section `[mds]` of the configuration file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// This server's Raft id, 1 to 1000. Never given to another server again, not even after this
    /// one lost its disk.
    pub id: u64,
    /// Name shown to people, default `mds-ID`.
    #[serde(default)]
    pub name: String,
    /// Where it listens for clients, storage servers and the other metadata servers:
    /// `tcp:HOST:PORT`.
    #[serde(deserialize_with = "endpoint")]
    pub listen: Endpoint,
    /// The endpoint that others connect to, if it is not the one listened on (`0.0.0.0`, NAT).
    #[serde(default, deserialize_with = "some_endpoint")]
    pub advertise: Option<Endpoint>,
    /// Where it answers administration (gRPC): `HOST:PORT`. Absent: it does not. Callers must prove
    /// that they know the cluster key.
    #[serde(default)]
    pub admin: Option<SocketAddr>,
    /// The group's members, as `"ID=tcp:HOST:PORT"`; this server may be among them. The same on all
    /// members.
    #[serde(default, deserialize_with = "peers")]
    pub peers: Vec<(u64, Endpoint)>,
    /// This server joins an existing group (see "Changing the group of metadata servers"): it does
    /// not vote before the group adds it.
    #[serde(default)]
    pub join: bool,
    /// Folder for the Raft log and the metadata.
    pub dir: PathBuf,
    /// Name of the file system, used when it is formatted at the cluster's first start.
    #[serde(default = "fs_name")]
    pub fs_name: String,
    /// Copies of files whose directory does not set another number, 1 to 3; used at the first
    /// start.
    #[serde(default = "one")]
    pub default_copies: u32,
    /// A chain takes no writes while it has fewer replicas in sync (or fewer than its copies, if
    /// that is less), 1 to 3.
    #[serde(default = "one")]
    pub min_copies: u32,
    /// Owner of the root directory; used at the first start.
    #[serde(default)]
    pub root_uid: u32,
    /// Group of the root directory; used at the first start.
    #[serde(default)]
    pub root_gid: u32,
    /// Chains are made once this many targets are alive; 0: with the first ones.
    #[serde(default)]
    pub expect_targets: usize,
    /// How many chains of each number of copies a target heads. Its data is divided into this many
    /// parts, for balance.
    #[serde(default = "chains_per_target")]
    pub chains_per_target: usize,
    /// Percentage points that the fullest and the emptiest target may differ before data moves
    /// between targets; 0: it never does.
    #[serde(default = "balance_percent")]
    pub balance_percent: u32,
    /// How long a storage server may act on one answered heartbeat, milliseconds.
    #[serde(default = "lease_ms")]
    pub lease_ms: u64,
    /// How long a client's session lives without a renewal, milliseconds.
    #[serde(default = "session_term_ms")]
    pub session_term_ms: u64,
    /// The data of a storage target that was dead for this long is copied to others, milliseconds;
    /// 0: never.
    #[serde(default = "rebuild_after_ms")]
    pub rebuild_after_ms: u64,
    /// How long a capability for a file's data is valid, milliseconds.
    #[serde(default = "capability_ms")]
    pub capability_ms: u64,
    /// One Raft tick, milliseconds; followers wait 8 to 16 of them for a dead leader.
    #[serde(default = "tick_ms")]
    pub tick_ms: u64,
    /// How a leader makes sure that it still leads when it answers a read.
    #[serde(default)]
    pub reads: ReadCheck,
    /// A leader whose log writes take longer than this hands over to a member whose do not,
    /// milliseconds; 0: never.
    #[serde(default = "slow_disk_ms")]
    pub slow_disk_ms: u64,
    /// How often all of this server's metadata is read for damage, seconds; 0: never.
    #[serde(default = "scrub_every_s")]
    pub scrub_every_s: u64,
    /// Bytes per second that this reads; 0: no limit.
    #[serde(default = "scrub_rate")]
    pub scrub_rate: u64,
    /// A storage target whose device is this many times slower than the others' is slow; 0: none
    /// is.
    #[serde(default = "slow_factor")]
    pub slow_factor: u64,
    /// But only if its answers take longer than this (the median; for the slowest in a hundred ten
    /// times this), milliseconds.
    #[serde(default = "slow_floor_ms")]
    pub slow_floor_ms: u64,
    /// And only if that lasts this long without a break, milliseconds.
    #[serde(default = "slow_for_ms")]
    pub slow_for_ms: u64,
    /// Whether slow targets are drained, one at a time.
    #[serde(default = "yes")]
    pub drain_slow: bool,
    /// Files whose chunks are deleted at the same time.
    #[serde(default = "gc_parallel")]
    pub gc_parallel: usize,
    /// Memory for the metadata store's block cache, bytes.
    #[serde(default = "cache_bytes")]
    pub cache_bytes: u64,
    /// Disk space reserved in `dir`, bytes: with less, nothing new is accepted, but removals are.
    /// 0: none. Absent: 10 % of the file system, at most 256 MiB.
    #[serde(default)]
    pub reserve_bytes: Option<u64>,
    /// Not a configuration key: see [`Config::limit_leases`].
    #[serde(skip)]
    pub(crate) leases: Limits,
    /// Not a configuration key: see [`Config::pretend_level`].
    #[serde(skip, default = "newest")]
    pub(crate) feature_level: u32,
    /// Not a configuration key: see [`Config::begin_at_level`].
    #[serde(skip, default = "newest")]
    pub(crate) first_level: u32,
}

fn fs_name() -> String {
    "strake".into()
}
const fn one() -> u32 {
    1
}
const fn chains_per_target() -> usize {
    8
}
const fn balance_percent() -> u32 {
    4
}
const fn lease_ms() -> u64 {
    2000
}
const fn rebuild_after_ms() -> u64 {
    600_000
}
const fn session_term_ms() -> u64 {
    30_000
}
const fn capability_ms() -> u64 {
    600_000
}
const fn tick_ms() -> u64 {
    50
}
const fn slow_disk_ms() -> u64 {
    300
}
const fn scrub_every_s() -> u64 {
    604_800
}
const fn scrub_rate() -> u64 {
    4 << 20
}
const fn slow_factor() -> u64 {
    8
}
const fn slow_floor_ms() -> u64 {
    20
}
const fn slow_for_ms() -> u64 {
    30_000
}
const fn yes() -> bool {
    true
}
const fn gc_parallel() -> usize {
    32
}
const fn cache_bytes() -> u64 {
    64 << 20
}
const fn newest() -> u32 {
    FEATURE_LEVEL
}

fn endpoint<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Endpoint, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

fn some_endpoint<'de, D: Deserializer<'de>>(
    d: D,
) -> std::result::Result<Option<Endpoint>, D::Error> {
    endpoint(d).map(Some)
}

fn peers<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Vec<(u64, Endpoint)>, D::Error> {
    Vec::<String>::deserialize(d)?.iter().map(|s| parse_peer(s).map_err(D::Error::custom)).collect()
}

/// `ID=tcp:HOST:PORT`, as in the configuration file and on the command line.
pub fn parse_peer(s: &str) -> Result<(u64, Endpoint)> {
    let bad = || {
        Error::new(
            Code::Inval,
            format!("'{s}' is not a metadata server; expected ID=tcp:HOST:PORT"),
        )
    };
    let (id, at) = s.split_once('=').ok_or_else(bad)?;
    Ok((id.trim().parse().map_err(|_| bad())?, at.trim().parse()?))
}

impl Config {
    /// A configuration with defaults for all keys except these three.
    pub fn new(id: u64, listen: Endpoint, dir: PathBuf) -> Config {
        Config {
            id,
            name: String::new(),
            listen,
            advertise: None,
            admin: None,
            peers: Vec::new(),
            join: false,
            dir,
            fs_name: fs_name(),
            default_copies: one(),
            min_copies: one(),
            root_uid: 0,
            root_gid: 0,
            expect_targets: 0,
            chains_per_target: chains_per_target(),
            balance_percent: balance_percent(),
            lease_ms: lease_ms(),
            session_term_ms: session_term_ms(),
            rebuild_after_ms: rebuild_after_ms(),
            capability_ms: capability_ms(),
            tick_ms: tick_ms(),
            reads: ReadCheck::default(),
            slow_disk_ms: slow_disk_ms(),
            scrub_every_s: scrub_every_s(),
            scrub_rate: scrub_rate(),
            slow_factor: slow_factor(),
            slow_floor_ms: slow_floor_ms(),
            slow_for_ms: slow_for_ms(),
            drain_slow: yes(),
            gc_parallel: gc_parallel(),
            cache_bytes: cache_bytes(),
            reserve_bytes: None,
            leases: Limits::default(),
            feature_level: newest(),
            first_level: newest(),
        }
    }

    /// Sets other limits of leases than all clusters have: for tests that must reach them.
    pub fn limit_leases(&mut self, limits: Limits) {
        self.leases = limits;
    }
    /// Behaves as a program that knows feature levels up to this one: for tests.
    pub fn pretend_level(&mut self, level: u32) {
        self.feature_level = level;
        self.first_level = self.first_level.min(level);
    }
    /// Gives a new file system a lower feature level than the program knows: for tests.
    pub fn begin_at_level(&mut self, level: u32) {
        self.first_level = level;
    }
    pub(super) fn leases(&self) -> Limits {
        self.leases
    }

    /// `EINVAL`, with the name of the key, for an impossible value.
    pub fn check(&self) -> Result<()> {
        let bad =
            |m: String| Err(Error::new(Code::Inval, format!("metadata server configuration: {m}")));
        let id_ok = |id: u64| id > 0 && id < u64::from(FIRST_OSS_NODE);
        if !id_ok(self.id) || self.peers.iter().any(|p| !id_ok(p.0)) {
            return bad(format!("ids are 1 to {}", FIRST_OSS_NODE - 1));
        }
        let mut ids: Vec<u64> = self.peers.iter().map(|p| p.0).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|w| w[0] == w[1]) {
            return bad("`peers` names an id twice".into());
        }
        if self.default_copies == 0 || self.default_copies as usize > MAX_COPIES {
            return bad(format!("`default_copies` is 1 to {MAX_COPIES}"));
        }
        if self.min_copies == 0 || self.min_copies as usize > MAX_COPIES {
            return bad(format!("`min_copies` is 1 to {MAX_COPIES}"));
        }
        if !(1..=MAX_PER_TARGET).contains(&self.chains_per_target) {
            return bad(format!("`chains_per_target` is 1 to {MAX_PER_TARGET}"));
        }
        if self.balance_percent > 100 {
            return bad("`balance_percent` is 0 to 100".into());
        }
        if self.fs_name.is_empty()
            || self.fs_name.len() > 64
            || self.fs_name.chars().any(char::is_control)
        {
            return bad("`fs_name` is 1 to 64 bytes of printable text".into());
        }
        if self.join && self.peers.iter().all(|p| p.0 == self.id) {
            return bad("`join` needs the group's members in `peers`".into());
        }
        if !matches!(self.slow_factor, 0 | 2..=1000) {
            return bad(format!("`slow_factor` = {} is neither 0 nor 2 to 1000", self.slow_factor));
        }
        for (key, value, min) in [
            ("lease_ms", self.lease_ms, 100),
            ("session_term_ms", self.session_term_ms, 100),
            ("rebuild_after_ms", self.rebuild_after_ms, 0),
            ("capability_ms", self.capability_ms, 1000),
            ("tick_ms", self.tick_ms, 1),
            ("slow_disk_ms", self.slow_disk_ms, 0),
            ("scrub_every_s", self.scrub_every_s, 0),
            ("scrub_rate", self.scrub_rate, 0),
            ("slow_floor_ms", self.slow_floor_ms, 1),
            ("slow_for_ms", self.slow_for_ms, 1000),
            ("gc_parallel", self.gc_parallel as u64, 1),
            ("cache_bytes", self.cache_bytes, 1 << 20),
            ("reserve_bytes", self.reserve_bytes.unwrap_or(0), 0),
        ] {
            if value < min || value > u64::from(u32::MAX) * 64 {
                return bad(format!("`{key}` = {value} is out of range, the least is {min}"));
            }
        }
        Ok(())
    }

    pub fn name(&self) -> String {
        if self.name.is_empty() { format!("mds-{}", self.id) } else { self.name.clone() }
    }
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
    pub fn rebuild_after(&self) -> Duration {
        Duration::from_millis(self.rebuild_after_ms)
    }
    pub fn session_term(&self) -> Duration {
        Duration::from_millis(self.session_term_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> std::result::Result<Config, toml::de::Error> {
        toml::from_str(text)
    }

    const LEAST: &str = "id = 2\nlisten = 'tcp:0.0.0.0:7000'\ndir = '/d'\n";

    #[test]
    fn keys_and_defaults() {
        let c = parse(LEAST).unwrap();
        c.check().unwrap();
        assert_eq!(
            (c.name(), c.lease_ms, c.session_term_ms, c.default_copies),
            ("mds-2".into(), 2000, 30_000, 1)
        );
        let new = Config::new(2, "tcp:0.0.0.0:7000".parse().unwrap(), "/d".into());
        assert_eq!(format!("{c:?}"), format!("{new:?}"), "both ways give the same defaults");
        let c = parse(&format!(
            "{LEAST}peers = ['1=tcp:a:1', '2=tcp:b:1']\nadvertise = 'tcp:b:1'\nadmin = '127.0.0.1:1'\n"
        ));
        let c = c.unwrap();
        c.check().unwrap();
        assert_eq!(c.peers[0], (1, "tcp:a:1".parse().unwrap()));
    }

    #[test]
    fn nonsense_is_refused_with_its_key() {
        for (line, word) in [
            ("nodes = 3", "nodes"),
            ("peers = ['a:1']", "expected ID=tcp:HOST:PORT"),
            ("peers = ['1=a:1', '1=b:1']", "peers"),
            ("peers = ['2000=a:1']", "ids"),
            ("default_copies = 4", "default_copies"),
            ("min_copies = 0", "min_copies"),
            ("min_copies = 4", "min_copies"),
            ("chains_per_target = 0", "chains_per_target"),
            ("chains_per_target = 65", "chains_per_target"),
            ("balance_percent = 101", "balance_percent"),
            ("lease_ms = 0", "lease_ms"),
            ("slow_factor = 1", "slow_factor"),
            ("slow_for_ms = 999", "slow_for_ms"),
            ("drain_slow = 1", "drain_slow"),
            ("reserve_bytes = 9000000000000000000", "reserve_bytes"),
            ("join = true", "join"),
            ("fs_name = ''", "fs_name"),
            ("advertise = 'x'", "endpoint"),
        ] {
            let text = match parse(&format!("{LEAST}{line}\n")) {
                Err(e) => e.to_string(),
                Ok(c) => c.check().unwrap_err().message,
            };
            assert!(text.contains(word), "{line}: {text}");
        }
        assert!(parse("listen = 'tcp:a:1'\ndir = '/d'\n").unwrap_err().to_string().contains("id"));
    }

    /// Every key is in the table for administrators.
    #[test]
    fn all_keys_are_documented() {
        let table = include_str!("../../../docs/operations.md");
        let source = include_str!("config.rs");
        let fields =
            source.split("pub struct Config {").nth(1).unwrap().split("\n}").next().unwrap();
        let keys = fields.lines().filter_map(|l| l.trim().strip_prefix("pub ")?.split(':').next());
        let missing: Vec<&str> = keys.filter(|k| !table.contains(&format!("| `{k}` |"))).collect();
        assert!(missing.is_empty(), "not in docs/operations.md: {missing:?}");
    }
}
