//! Options as in mount(8): `-o a,b=c`. Pure. The table is in `docs/mounting.md`.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::Deserialize;
use strake_client::FollowerReads;
use strake_fabric::Use;
use strake_fuse::{MountFlags, Transport, table};
use strake_proto::{Code, Error, Result};

use super::source;

/// Maximum of all times, in seconds: about a year.
pub const LONGEST: u64 = 366 * 86_400;
/// Maximum of `retry`, in minutes.
const LONGEST_RETRY: u64 = LONGEST / 60;
/// Maximum of a mount's cache for file data, in bytes.
pub const LARGEST_CACHE: u64 = 1 << 40;

/// See `docs/fuse.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKey {
    #[default]
    Dev,
    Fuser,
}

impl From<TransportKey> for Transport {
    fn from(key: TransportKey) -> Transport {
        match key {
            TransportKey::Dev => Transport::Dev,
            TransportKey::Fuser => Transport::Fuser,
        }
    }
}

/// See `docs/follower-reads.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FollowerKey {
    #[default]
    Auto,
    Always,
    Never,
}

impl From<FollowerKey> for FollowerReads {
    fn from(key: FollowerKey) -> FollowerReads {
        match key {
            FollowerKey::Auto => FollowerReads::Auto,
            FollowerKey::Always => FollowerReads::Always,
            FollowerKey::Never => FollowerReads::Never,
        }
    }
}

/// See `docs/rdma.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FabricKey {
    #[default]
    Auto,
    Tcp,
    Rdma,
}

impl From<FabricKey> for Use {
    fn from(key: FabricKey) -> Use {
        match key {
            FabricKey::Auto => Use::Best,
            FabricKey::Tcp => Use::Tcp,
            FabricKey::Rdma => Use::Rdma,
        }
    }
}

impl FromStr for FabricKey {
    type Err = Error;

    fn from_str(value: &str) -> Result<FabricKey> {
        match value {
            "auto" => Ok(FabricKey::Auto),
            "tcp" => Ok(FabricKey::Tcp),
            "rdma" => Ok(FabricKey::Rdma),
            _ => Err(bad(format!("option 'fabric={value}': expected 'auto', 'tcp' or 'rdma'"))),
        }
    }
}

/// The given options; `None` and empty: not given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub remount: bool,
    pub read_only: Option<bool>,
    pub allow_other: Option<bool>,
    /// Names of mount(2) flags, in order.
    pub flags: Vec<String>,
    pub soft: Option<bool>,
    /// Seconds.
    pub timeout: Option<u64>,
    pub background: Option<bool>,
    /// Minutes.
    pub retry: Option<u64>,
    pub subtree: Option<String>,
    pub key_file: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub log: Option<String>,
    pub log_file: Option<PathBuf>,
    pub transport: Option<TransportKey>,
    /// Seconds.
    pub attr_timeout: Option<f64>,
    /// Seconds.
    pub entry_timeout: Option<f64>,
    pub threads: Option<usize>,
    pub read_replica: Option<usize>,
    pub cache_bytes: Option<u64>,
    pub follower_reads: Option<FollowerKey>,
    pub write_back: Option<bool>,
    pub page_locks: Option<bool>,
    pub relay: Option<bool>,
    pub fabric: Option<FabricKey>,
    pub run_dir: Option<PathBuf>,
}

/// Options without a value, except for mount(2) flags.
const WORDS: [&str; 20] = [
    "ro",
    "rw",
    "allow_other",
    "noallow_other",
    "allow_suid",
    "allow_dev",
    "default_permissions",
    "hard",
    "soft",
    "bg",
    "fg",
    "write_back",
    "write_through",
    "page_locks",
    "nopage_locks",
    "relay",
    "norelay",
    "remount",
    "_netdev",
    "nofail",
];
/// Options with a value.
const VALUES: [&str; 18] = [
    "timeout",
    "retry",
    "subtree",
    "key_file",
    "secretfile",
    "config",
    "log",
    "log_file",
    "transport",
    "attr_timeout",
    "entry_timeout",
    "threads",
    "read_replica",
    "cache_bytes",
    "follower_reads",
    "fabric",
    "run_dir",
    "comment",
];
/// Options for mount(8) and systemd.
const FOR_OTHERS: [&str; 11] = [
    "defaults", "auto", "noauto", "_netdev", "nofail", "nouser", "users", "owner", "noowner",
    "group", "nogroup",
];
/// Options that the kernel shows for a FUSE mount, and that mount(8) passes on at a remount.
const OF_THE_KERNEL: [&str; 6] = ["user_id", "group_id", "blksize", "max_read", "rootmode", "fd"];

/// Options known from other file systems, and what to use here instead.
const ELSEWHERE: [(&str, &str); 12] = [
    ("timeo", "use soft,timeout=SECONDS"),
    ("retrans", "use soft,timeout=SECONDS"),
    ("intr", "killing a waiting program always ends it at once"),
    ("nointr", "killing a waiting program always ends it at once"),
    ("secret", "other users would see the key; use key_file=PATH"),
    ("name", "there is one key for all clients; use key_file=PATH"),
    ("sec", "use key_file=PATH"),
    ("mount_timeout", "use retry=MINUTES"),
    ("flock", "locks always hold between mounts"),
    ("localflock", "locks always hold between mounts"),
    ("noflock", "locks always hold between mounts"),
    ("allow_root", "use allow_other; permissions are checked for every user"),
];

fn bad(m: String) -> Error {
    Error::new(Code::Inval, m)
}

impl Options {
    /// Applies the options in `text` to the existing ones. `sloppy`: unknown options are returned
    /// instead of being an error.
    pub fn take(&mut self, text: &str, sloppy: bool) -> Result<Vec<String>> {
        let mut unknown = Vec::new();
        let all = split(text)?;
        for option in &all {
            let (name, value) = match option.split_once('=') {
                Some((n, v)) => (n, Some(unquoted(v))),
                None => (*option, None),
            };
            if !self.one(name, value)? {
                if !sloppy {
                    return Err(not_known(name));
                }
                unknown.push(name.to_string());
            }
        }
        // mount(8) moves these to the front, so their place in the list means nothing. At a remount
        // it repeats those that the kernel shows, which nobody asked for.
        let repeated =
            all.iter().any(|o| OF_THE_KERNEL.iter().any(|k| o.split('=').next() == Some(k)));
        for name in ["nosuid", "nodev"] {
            if all.contains(&name) && !repeated {
                self.flags.push(name.into());
            }
        }
        Ok(unknown)
    }

    /// Applies one option. False: it is unknown.
    fn one(&mut self, name: &str, value: Option<&str>) -> Result<bool> {
        if let Some((_, instead)) = ELSEWHERE.iter().find(|(n, _)| *n == name) {
            return Err(bad(format!("option '{name}' does not exist here: {instead}")));
        }
        let for_others = |n: &str| {
            n.starts_with("x-")
                || n.starts_with("X-")
                || matches!(n, "user" | "comment" | "uhelper")
        };
        if for_others(name) || OF_THE_KERNEL.contains(&name) {
            return Ok(true);
        }
        match value {
            Some(value) if VALUES.contains(&name) => self.value(name, value).map(|()| true),
            None if VALUES.contains(&name) => {
                Err(bad(format!("option '{name}' needs a value: {name}=...")))
            }
            None => Ok(self.word(name)),
            Some(_) if is_word(name) => Err(bad(format!("option '{name}' takes no value"))),
            Some(_) => Ok(false),
        }
    }

    fn word(&mut self, name: &str) -> bool {
        match name {
            "ro" | "rw" => self.read_only = Some(name == "ro"),
            // mount(8) uses `suid` and `dev` itself, so the options passed to us have other names.
            "allow_suid" | "allow_dev" => self.flags.push(name["allow_".len()..].into()),
            "allow_other" | "noallow_other" => self.allow_other = Some(name == "allow_other"),
            "hard" | "soft" => self.soft = Some(name == "soft"),
            "write_back" | "write_through" => self.write_back = Some(name == "write_back"),
            "page_locks" | "nopage_locks" => self.page_locks = Some(name == "page_locks"),
            "relay" | "norelay" => self.relay = Some(name == "relay"),
            "bg" | "fg" => self.background = Some(name == "bg"),
            "remount" => self.remount = true,
            _ if table::flag_names().any(|n| n == name) => self.flags.push(name.into()),
            _ => return is_word(name),
        }
        true
    }

    fn value(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "timeout" => self.timeout = Some(number(name, value, 1, LONGEST, "seconds")?),
            "retry" => self.retry = Some(number(name, value, 0, LONGEST_RETRY, "minutes")?),
            "subtree" => self.subtree = Some(source::subtree(value)?),
            "key_file" | "secretfile" => self.key_file = Some(path(name, value)?),
            "config" => self.config = Some(path(name, value)?),
            "log" => self.log = Some(value.into()),
            "log_file" => self.log_file = Some(path(name, value)?),
            "run_dir" => self.run_dir = Some(path(name, value)?),
            "transport" => {
                self.transport = Some(match value {
                    "dev" => TransportKey::Dev,
                    "fuser" => TransportKey::Fuser,
                    _ => {
                        return Err(bad(format!(
                            "option 'transport={value}': expected 'dev' or 'fuser'"
                        )));
                    }
                });
            }
            "attr_timeout" => self.attr_timeout = Some(seconds(name, value)?),
            "entry_timeout" => self.entry_timeout = Some(seconds(name, value)?),
            "cache_bytes" => {
                self.cache_bytes = Some(number(name, value, 0, LARGEST_CACHE, "bytes")?)
            }
            "follower_reads" => {
                self.follower_reads = Some(match value {
                    "auto" => FollowerKey::Auto,
                    "always" => FollowerKey::Always,
                    "never" => FollowerKey::Never,
                    _ => {
                        return Err(bad(format!(
                            "option 'follower_reads={value}': expected 'auto', 'always' or 'never'"
                        )));
                    }
                });
            }
            "fabric" => self.fabric = Some(value.parse()?),
            "threads" => {
                self.threads =
                    Some(number(name, value, 0, crate::MAX_THREADS as u64, "threads")? as usize)
            }
            "read_replica" => {
                self.read_replica =
                    Some(number(name, value, 0, 2, "the number of a copy")? as usize)
            }
            _ => return Err(bad(format!("option '{name}' is listed and has no effect"))),
        }
        Ok(())
    }
}

fn is_word(name: &str) -> bool {
    WORDS.contains(&name) || FOR_OTHERS.contains(&name) || table::flag_names().any(|n| n == name)
}

/// Splits at commas that are not between quotation marks.
fn split(text: &str) -> Result<Vec<&str>> {
    let (mut parts, mut start, mut quoted) = (Vec::new(), 0, false);
    for (i, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => {
                parts.push(&text[start..i]);
                start = i + 1;
            }
            '\0' => return Err(bad("the options contain a NUL".into())),
            _ => {}
        }
    }
    if quoted {
        return Err(bad(format!("options '{text}': a quotation mark is not closed")));
    }
    parts.push(&text[start..]);
    parts.retain(|p| !p.is_empty());
    Ok(parts)
}

fn unquoted(value: &str) -> &str {
    value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value)
}

fn number(name: &str, value: &str, least: u64, most: u64, what: &str) -> Result<u64> {
    let n = value.parse().ok().filter(|n| (least..=most).contains(n));
    n.ok_or_else(|| bad(format!("option '{name}={value}': expected {what}, {least} to {most}")))
}

fn seconds(name: &str, value: &str) -> Result<f64> {
    let n = value.parse().ok().filter(|n: &f64| (0.0..=LONGEST as f64).contains(n));
    n.ok_or_else(|| bad(format!("option '{name}={value}': expected seconds, 0 to {LONGEST}")))
}

/// Must be absolute: the mount's daemon may be restarted from another folder, where a relative path
/// would have another meaning.
fn path(name: &str, value: &str) -> Result<PathBuf> {
    let path = Path::new(value);
    if path.is_absolute() {
        return Ok(path.into());
    }
    Err(bad(format!("option '{name}={value}': the path must be absolute")))
}

/// Names the nearest known option, if one is near.
fn not_known(name: &str) -> Error {
    let all = WORDS.into_iter().chain(VALUES).chain(FOR_OTHERS).chain(table::flag_names());
    let nearest = all.map(|n| (distance(name, n), n)).min();
    let hint = match nearest {
        Some((d, n)) if d <= 1 + n.len() / 4 => format!("; did you mean '{n}'?"),
        _ => "; see docs/mounting.md".into(),
    };
    bad(format!("option '{name}' is not known{hint}"))
}

/// The number of characters to change, add or remove to turn one name into the other. Names longer
/// than 64 bytes are similar to none.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The flags that these names make of the default flags of FUSE mounts.
pub fn flags(names: &[String]) -> MountFlags {
    let mut flags = table::DEFAULT_FLAGS;
    for name in names {
        table::apply_flag(&mut flags, name);
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Options> {
        let mut o = Options::default();
        o.take(text, false).map(|_| o)
    }

    #[test]
    fn later_ones_win() {
        let o = of(
            "ro,soft,rw,timeout=5,,hard,noexec,exec,noatime,key_file=/k,secretfile=/s,attr_timeout=0.5,cache_bytes=0",
        )
        .unwrap();
        assert_eq!((o.read_only, o.soft, o.timeout), (Some(false), Some(false), Some(5)));
        assert_eq!(
            (o.key_file.unwrap(), o.attr_timeout, o.cache_bytes),
            (PathBuf::from("/s"), Some(0.5), Some(0))
        );
        let base = table::DEFAULT_FLAGS;
        assert_eq!(flags(&o.flags), base | MountFlags::NOATIME);
        assert_eq!(of("").unwrap(), Options::default());
        assert_eq!(flags(&of("allow_suid").unwrap().flags), MountFlags::NODEV);
        for list in ["allow_dev,allow_suid,nosuid", "rw,nosuid,allow_dev,allow_suid"] {
            assert_eq!(flags(&of(list).unwrap().flags), MountFlags::NOSUID, "{list}");
        }
        let remount = of("remount,rw,nosuid,nodev,user_id=0,group_id=0,allow_suid").unwrap();
        assert_eq!(flags(&remount.flags), MountFlags::NODEV);
        assert_eq!(
            (
                of("write_back").unwrap().write_back,
                of("write_back,write_through").unwrap().write_back
            ),
            (Some(true), Some(false))
        );
        assert_eq!(of("page_locks,nopage_locks").unwrap().page_locks, Some(false));
        assert_eq!(of("norelay").unwrap().relay, Some(false));
        assert_eq!(of("retry=0,bg,subtree=/a/./b,log=debug").unwrap().subtree.unwrap(), "/a/b");
    }

    #[test]
    fn what_is_for_others_says_nothing() {
        let text = "defaults,auto,noauto,nofail,_netdev,user,user=joe,nouser,users,owner,group,comment=\"a,b\",x-gvfs-hide,\
                    x-systemd.requires=\"a,b\",X-mount.mkdir=0755,user_id=0,group_id=0,blksize=4096,max_read=131072,\
                    default_permissions,silent";
        let o = of(text).unwrap();
        assert_eq!(o, Options { flags: vec!["silent".into()], ..Default::default() });
    }

    #[test]
    fn unknown_options_name_the_nearest() {
        let said = |text: &str| of(text).unwrap_err().message;
        assert_eq!(
            said("ro,alow_other"),
            "option 'alow_other' is not known; did you mean 'allow_other'?"
        );
        assert_eq!(said("timout=5"), "option 'timout' is not known; did you mean 'timeout'?");
        assert_eq!(said("noattime"), "option 'noattime' is not known; did you mean 'noatime'?");
        assert_eq!(said("frobnicate"), "option 'frobnicate' is not known; see docs/mounting.md");
        assert!(said(&"x".repeat(100_000)).contains("is not known"));
        assert!(said("secret=abc").contains("key_file=PATH"));
        assert!(said("timeo=600").contains("timeout=SECONDS"));
        let mut o = Options::default();
        assert_eq!(o.take("ro,frobnicate,wibble=5", true).unwrap(), ["frobnicate", "wibble"]);
        assert_eq!(o.read_only, Some(true));
    }

    #[test]
    fn every_value_is_checked() {
        for text in [
            "timeout=0",
            "timeout=-1",
            "timeout=x",
            "timeout=",
            "timeout",
            "timeout=99999999999999999999",
            "retry=-1",
            "retry=1.5",
            "retry",
            "subtree=a",
            "subtree=/a/../b",
            "subtree",
            "key_file=k",
            "key_file",
            "secretfile=",
            "config=c",
            "log_file=f",
            "log",
            "run_dir=r",
            "transport=rdma",
            "transport",
            "fabric=infiniband",
            "fabric",
            "attr_timeout=-1",
            "attr_timeout=nan",
            "attr_timeout=inf",
            "entry_timeout=x",
            "threads=-1",
            "threads=100000",
            "read_replica=3",
            "read_replica=x",
            "cache_bytes=-1",
            "follower_reads",
            "follower_reads=yes",
            "cache_bytes=1M",
            "cache_bytes=1099511627777",
            "cache_bytes",
            "ro=1",
            "soft=yes",
            "noexec=1",
            "_netdev=x",
            "comment=\"a",
            "ro\0",
        ] {
            assert_eq!(of(text).map(drop).unwrap_err().code, Code::Inval, "{text}");
        }
    }

    #[test]
    fn every_option_is_documented() {
        let text = include_str!("../../../docs/mounting.md");
        let table =
            text.split("\n## Options\n").nth(1).and_then(|t| t.split("\n## ").next()).unwrap();
        for name in WORDS.into_iter().chain(FOR_OTHERS).chain(table::flag_names()) {
            assert!(
                table.contains(&format!("`{name}`")) || table.contains(&format!("`{name},")),
                "`{name}`"
            );
        }
        for name in VALUES.iter().chain(&OF_THE_KERNEL[..4]) {
            assert!(table.contains(&format!("`{name}=")), "`{name}=`");
        }
        for (name, _) in ELSEWHERE {
            assert!(table.contains(&format!("`{name}")), "`{name}`");
        }
    }
}
