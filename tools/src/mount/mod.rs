//! `strake mount`: its arguments and configuration. For users see `docs/mounting.md`.

mod background;
mod daemon;
pub mod helper;
mod options;
pub(crate) mod source;
mod stats;
mod umount;
mod users;

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use clap::Args;
use options::{FabricKey, FollowerKey, LONGEST, Options, TransportKey};
use serde::Deserialize;
use source::Source;
use strake_client::{Client, FOREVER};
use strake_fabric::{Endpoint, Fabric, Identity, Pool, Transports, Use, rdma};
use strake_fuse::{
    MountConfig, Transport,
    supervisor::control::Asker,
    table::{self, Mounted},
};
use strake_proto::{Code, Error, Result, map::ROLE_MDS};
use strake_runtime::{ClientKey, Env, private};

pub use stats::{StatsArgs, stats};
pub use umount::{UmountArgs, umount, unmount};

use crate::{
    config::{self, Overrides},
    pretend,
};

/// Default path of the client key.
const KEY: &str = "/etc/strake/client.key";
/// The configuration file that is read if it exists and no other is given.
const CONFIG: &str = "/etc/strake/mount.toml";
/// Default timeout of a soft mount, in seconds.
const TIMEOUT: u64 = 60;
/// How long the first mount is tried, in minutes.
const RETRY: u64 = 1;
const RETRY_IN_BACKGROUND: u64 = 10_000;
/// With `retry=0`: long enough to ask each server.
const ONE_ROUND: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct MountArgs {
    /// Metadata servers (HOST[:PORT], separated by commas), then an existing folder. MDS:/SUBTREE
    /// mounts a part of the file system. With --config: the folder or nothing.
    #[arg(value_names = ["MDS[:/SUBTREE]", "MOUNTPOINT"], num_args = 0..=2)]
    what: Vec<String>,
    /// Configuration file (TOML).
    #[arg(long, short)]
    config: Option<PathBuf>,
    /// Options as for mount(8), separated by commas: ro, soft, timeout=30 and so on. See
    /// docs/mounting.md.
    #[arg(short, long = "options")]
    options: Vec<String>,
    /// File with the client key [default: /etc/strake/client.key].
    #[arg(long)]
    client_key: Option<PathBuf>,
    /// How data goes to and from storage servers: auto (RDMA where both ends have it), tcp, or rdma
    /// (nothing else).
    #[arg(long)]
    fabric: Option<FabricKey>,
    /// Let other users access the mount.
    #[arg(long)]
    allow_other: bool,
    /// Mount read-only.
    #[arg(long)]
    read_only: bool,
    /// Read only from this replica of each chain (0 = first), to verify copies one by one.
    #[arg(long)]
    read_replica: Option<usize>,
    /// Stay in the foreground.
    #[arg(long, short)]
    foreground: bool,
    /// What to log: error, warn, info or debug; or a level per module, MODULE=LEVEL.
    #[arg(long)]
    log: Option<String>,
}

/// The configuration file of a mount.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountFile {
    #[serde(default = "default_key")]
    client_key: PathBuf,
    #[serde(default = "default_log")]
    log: String,
    #[serde(default)]
    threads: usize,
    mount: MountSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountSection {
    mds: Vec<String>,
    mountpoint: PathBuf,
    allow_other: Option<bool>,
    #[serde(default)]
    read_only: bool,
    #[serde(default = "one_hour")]
    attr_timeout: f64,
    #[serde(default)]
    entry_timeout: f64,
    #[serde(default)]
    transport: TransportKey,
    read_replica: Option<usize>,
    cache_bytes: Option<u64>,
    #[serde(default)]
    follower_reads: FollowerKey,
    #[serde(default)]
    write_back: bool,
    #[serde(default = "yes")]
    page_locks: bool,
    #[serde(default = "yes")]
    relay: bool,
    #[serde(default)]
    fabric: FabricKey,
    run_dir: Option<PathBuf>,
    #[serde(default)]
    options: String,
    /// The options of the file and of the command line.
    #[serde(skip)]
    asked: Options,
    /// Shown as the source of the mount; empty: the file system's name.
    #[serde(skip)]
    source: String,
}

fn default_key() -> PathBuf {
    KEY.into()
}
fn default_log() -> String {
    "info".into()
}
fn yes() -> bool {
    true
}
fn one_hour() -> f64 {
    3600.0
}
impl MountSection {
    /// `EINVAL` that names the invalid key.
    fn check(&self) -> Result<()> {
        let bad = |key: &str| {
            let m = format!("mount configuration: `{key}` is 0 to {LONGEST} seconds");
            Err(Error::new(Code::Inval, m))
        };
        for (key, t) in [("attr_timeout", self.attr_timeout), ("entry_timeout", self.entry_timeout)]
        {
            if !(0.0..=LONGEST as f64).contains(&t) {
                return bad(key);
            }
        }
        if self.cache_bytes.is_some_and(|n| n > options::LARGEST_CACHE) {
            let m = format!(
                "mount configuration: `cache_bytes` is 0 to {} bytes",
                options::LARGEST_CACHE
            );
            return Err(Error::new(Code::Inval, m));
        }
        Transport::from(self.transport).check()?;
        client_config(&self.mds).map(drop)
    }

    /// Options override the keys of the file.
    fn apply(&mut self, asked: Options) {
        self.read_only = asked.read_only.unwrap_or(self.read_only);
        self.allow_other = asked.allow_other.or(self.allow_other);
        self.attr_timeout = asked.attr_timeout.unwrap_or(self.attr_timeout);
        self.entry_timeout = asked.entry_timeout.unwrap_or(self.entry_timeout);
        self.transport = asked.transport.unwrap_or(self.transport);
        self.read_replica = asked.read_replica.or(self.read_replica);
        self.cache_bytes = asked.cache_bytes.or(self.cache_bytes);
        self.follower_reads = asked.follower_reads.unwrap_or(self.follower_reads);
        self.write_back = asked.write_back.unwrap_or(self.write_back);
        self.page_locks = asked.page_locks.unwrap_or(self.page_locks);
        self.relay = asked.relay.unwrap_or(self.relay);
        self.fabric = asked.fabric.unwrap_or(self.fabric);
        self.run_dir = asked.run_dir.clone().or(self.run_dir.take());
        self.asked = asked;
    }

    /// Checks that this machine has the requested transport; an error says what is missing.
    fn has_fabric(&self) -> Result<()> {
        match self.fabric {
            FabricKey::Rdma => rdma::probe().map(drop),
            FabricKey::Auto | FabricKey::Tcp => Ok(()),
        }
    }

    fn background(&self) -> bool {
        self.asked.background.unwrap_or(false)
    }

    /// How long the first mount is tried while the cluster is unreachable.
    fn retry(&self) -> Duration {
        let usual = if self.background() { RETRY_IN_BACKGROUND } else { RETRY };
        Duration::from_secs(60 * self.asked.retry.unwrap_or(usual)).max(ONE_ROUND)
    }

    fn subtree(&self) -> &str {
        self.asked.subtree.as_deref().unwrap_or("/")
    }

    fn client_config(&self) -> Result<strake_client::Config> {
        let op_timeout = match self.asked.soft {
            Some(true) => Duration::from_secs(self.asked.timeout.unwrap_or(TIMEOUT)),
            _ => FOREVER,
        };
        let usual = client_config(&self.mds)?;
        Ok(strake_client::Config {
            op_timeout,
            connect_timeout: self.retry(),
            read_only: self.read_only,
            read_replica: self.read_replica,
            cache_bytes: self.cache_bytes.map_or(usual.cache_bytes, |n| n as usize),
            follower_reads: self.follower_reads.into(),
            write_back: self.write_back,
            page_locks: self.page_locks,
            relay: self.relay,
            ..usual
        })
    }

    fn mount_config(&self) -> MountConfig {
        MountConfig {
            // As with other file systems: for everybody, each user with their own rights. A user
            // other than root would need permission in /etc/fuse.conf.
            allow_other: self.allow_other.unwrap_or_else(|| rustix::process::geteuid().is_root()),
            read_only: self.read_only,
            flags: options::flags(&self.asked.flags),
            fsname: self.source.clone(),
            attr_timeout: Duration::from_secs_f64(self.attr_timeout),
            entry_timeout: Duration::from_secs_f64(self.entry_timeout),
            transport: self.transport.into(),
            // In builds for tests only.
            old_kernel: cfg!(debug_assertions) && std::env::var_os("STRAKE_OLD_KERNEL").is_some(),
            ..MountConfig::new(&self.mountpoint)
        }
    }
}

/// Reads a mount's configuration and checks it.
pub fn check(text: &str) -> Result<()> {
    let file = config::parse::<MountFile>("text", text, Overrides::new())?;
    options_of(&file.mount)?;
    file.mount.check()
}

/// Checks that a source and options from outside are well formed.
pub fn check_words(source: &str, options: &str) -> bool {
    Source::parse(source).is_ok() & Options::default().take(options, false).is_ok()
}

/// The options in a configuration file.
fn options_of(section: &MountSection) -> Result<Options> {
    let mut o = Options::default();
    o.take(&section.options, false).map_err(|e| e.context("mount configuration: `options`"))?;
    if o.remount || o.config.is_some() {
        let m = "mount configuration: `options`: 'remount' and 'config' belong on the command line";
        return Err(Error::new(Code::Inval, m));
    }
    Ok(o)
}

/// The operands of the command line: what to mount, and where.
fn operands(args: &MountArgs, has_config: bool) -> Result<(Option<&String>, Option<&String>)> {
    match &args.what[..] {
        [] if has_config => Ok((None, None)),
        [mountpoint] if has_config => Ok((None, Some(mountpoint))),
        [source, mountpoint] => Ok((Some(source), Some(mountpoint))),
        _ => Err(Error::new(
            Code::Inval,
            "expected MDS[,MDS...][:/SUBTREE] MOUNTPOINT, or --config FILE [MOUNTPOINT]",
        )),
    }
}

/// The options of the command line.
fn asked(args: &MountArgs) -> Result<Options> {
    let mut o = Options::default();
    for text in &args.options {
        o.take(text, false)?;
    }
    Ok(o)
}

fn load(args: &MountArgs, asked: &Options) -> Result<MountFile> {
    let given = args.config.as_ref().or(asked.config.as_ref());
    let (text, mountpoint) = operands(args, given.is_some())?;
    let source = text.map(|t| Source::parse(t)).transpose()?;
    let usual = Path::new(CONFIG);
    let config =
        given.map(PathBuf::as_path).or_else(|| std::fs::File::open(usual).is_ok().then_some(usual));
    let mut o = Overrides::new();
    if let Some(source) = source.as_ref().filter(|s| !s.mds.is_empty()) {
        o.push((
            "mount",
            "mds",
            toml::Value::Array(source.mds.iter().cloned().map(Into::into).collect()),
        ));
    }
    if let Some(m) = mountpoint {
        o.push(("mount", "mountpoint", m.clone().into()));
    }
    o.extend(args.client_key.as_ref().map(|p| ("", "client_key", p.display().to_string().into())));
    o.extend(args.allow_other.then_some(("mount", "allow_other", true.into())));
    o.extend(args.read_replica.map(|n| ("mount", "read_replica", (n as i64).into())));
    o.extend(args.read_only.then_some(("mount", "read_only", true.into())));
    o.extend(args.log.clone().map(|l| ("", "log", l.into())));
    let mut file: MountFile = config::load(config, o)?;
    let mut all = options_of(&file.mount)?;
    for text in &args.options {
        all.take(text, false)?;
    }
    // Overrides the file, including its options.
    all.fabric = asked.fabric.or(args.fabric).or(all.fabric);
    if let (Some(text), Some(Source { subtree: Some(of_source), .. })) = (text, source) {
        if let Some(other) = asked.subtree.as_ref().filter(|s| **s != of_source) {
            let m = format!(
                "option 'subtree={other}' and the source '{text}' name different folders; leave \
                 one out"
            );
            return Err(Error::new(Code::Inval, m));
        }
        all.subtree = Some(of_source);
        file.mount.source.clone_from(text);
    }
    let key =
        asked.key_file.clone().or_else(|| args.client_key.clone()).or_else(|| all.key_file.clone());
    file.client_key = key.unwrap_or(file.client_key);
    file.log = all.log.clone().unwrap_or(file.log);
    file.threads = all.threads.unwrap_or(file.threads);
    file.mount.apply(all);
    Ok(file)
}

/// Mounts. `argv`: this command's arguments, beginning with `mount`, for the processes that it
/// starts.
pub fn mount(args: &MountArgs, argv: Vec<OsString>) -> Result<ExitCode> {
    let asked = asked(args)?;
    if asked.remount {
        return remount(args, &asked);
    }
    private::umask();
    let file = load(args, &asked)?;
    file.mount.check()?;
    let socket = daemon::socket();
    if socket.is_none() {
        file.mount.has_fabric()?;
    }
    let log = config::log_filter(&file.log)?;
    let key = config::read_client(&file.client_key)?;
    if socket.is_none() && !args.foreground {
        return background::in_background(&file.mount, argv);
    }
    crate::init_log(&log);
    if key.servers.is_none() && socket.is_none() {
        tracing::warn!(
            "key file {}: lacks its second line, so a client that poses as a server is not \
             detected. Print a new key file on a server: `strake key client --cluster-key FILE`",
            file.client_key.display()
        );
    }
    match (socket, file.mount.transport) {
        (Some(socket), _) => crate::run(file.threads, daemon::serve(file.mount, key, socket)),
        (None, TransportKey::Dev) => crate::run(1, daemon::supervise(file.mount)),
        (None, TransportKey::Fuser) => {
            crate::run(file.threads, daemon::unsupervised(file.mount, key))
        }
    }
}

/// Does all checks of [`mount`] that come before anything is mounted.
fn check_only(args: &MountArgs) -> Result<()> {
    let asked = asked(args)?;
    let file = load(args, &asked)?;
    file.mount.check()?;
    file.mount.has_fabric()?;
    config::log_filter(&file.log)?;
    config::read_client(&file.client_key)?;
    strake_fuse::can_mount(&file.mount.mountpoint)
}

/// `mount -o remount`: changes the kernel's flags. Everything else stays as it was mounted.
fn remount(args: &MountArgs, asked: &Options) -> Result<ExitCode> {
    let Some(dir) = args.what.last() else {
        return Err(Error::new(
            Code::Inval,
            "option 'remount': name the folder where it is mounted",
        ));
    };
    let at = mounted_at(Path::new(dir))?.ok_or_else(|| not_mounted(Path::new(dir)))?;
    let mut flags = at.options.split(',').map(String::from).collect::<Vec<_>>();
    flags.extend(asked.flags.iter().cloned());
    // Based on the current flags, not on the table's defaults.
    let flags = flags.iter().fold(strake_fuse::MountFlags::empty(), |mut f, name| {
        table::apply_flag(&mut f, name);
        f
    });
    let now = |list: &str| list.split(',').any(|o| o == "ro");
    let read_only = asked.read_only.unwrap_or(now(&at.options) || now(&at.super_options));
    // To allow changes: the client first. To forbid them: the kernel first, because it knows which
    // files are open for writing.
    if !read_only {
        tell(&at, "read-write")?;
    }
    strake_fuse::remount(&at.at, read_only, flags)?;
    if read_only {
        tell(&at, "read-only")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Sends an order to a mount's process.
fn tell(mount: &Mounted, what: &str) -> Result<()> {
    let failed = |e: std::io::Error| {
        Error::from(e).context(format!("telling the process of {}", mount.at.display()))
    };
    let mut process = Asker::connect(&mount.device, umount::owner_of(mount)).map_err(failed)?;
    match process.ask(what, Duration::from_secs(10)).map_err(failed)?.as_str() {
        "ok" => Ok(()),
        said => Err(Error::new(Code::Io, format!("the process of {}: {said}", mount.at.display()))),
    }
}

fn not_mounted(dir: &Path) -> Error {
    Error::new(Code::Inval, format!("{} is not a StrakeFS mount", dir.display()))
}

/// Connects a client of a running cluster.
pub async fn connect(mds: &[String], client_key: ClientKey) -> Result<Client> {
    connect_with(client_config(mds)?, client_key, Use::Best, false).await
}

fn client_config(mds: &[String]) -> Result<strake_client::Config> {
    let mds = mds.iter().map(|s| s.parse()).collect::<Result<Vec<Endpoint>>>()?;
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let feature_level = pretend::feature_level();
    Ok(strake_client::Config { hostname, feature_level, ..strake_client::Config::new(mds) })
}

/// Connects a client. If a storage server cannot be reached by any allowed transport, this is
/// `OpNotSupp` or `NoMem` if `all` must be reached. Otherwise, operations that need that server
/// wait as if it were down.
async fn connect_with(
    config: strake_client::Config,
    client_key: ClientKey,
    transports: Use,
    all: bool,
) -> Result<Client> {
    let env = Env::system();
    let mut pool = Pool::default();
    // Half of the pool is for data under way.
    let wanted = 2 * config.cache_bytes as u64;
    if config.cache_bytes > strake_client::Config::new(Vec::new()).cache_bytes
        && pool.stats().limit < wanted
    {
        pool = Pool::new(wanted);
    }
    let pool = transports.pool(pool)?;
    let fabric =
        Transports::new(env.clone(), Identity::client(client_key), None, pool, Default::default())
            .only(transports);
    let client = Client::connect(config, env, Arc::new(fabric.clone())).await?;
    let map = client.servers().map();
    for n in map.map.nodes.iter().filter(|n| n.role != ROLE_MDS) {
        match fabric
            .routes(&n.endpoints)
            .map_err(|e| e.context(format!("storage server '{}'", n.name)))
        {
            Ok(_) => {}
            Err(e) if all => return Err(e),
            Err(e) => tracing::warn!("access to data on this server waits: {e}"),
        }
    }
    Ok(client)
}

/// Whether a StrakeFS is mounted exactly there.
pub fn is_mounted(mountpoint: &Path) -> Result<bool> {
    Ok(mounted_at(mountpoint)?.is_some())
}

/// The StrakeFS that is mounted exactly there. Does not access the mount: its servers may be away.
fn mounted_at(mountpoint: &Path) -> Result<Option<Mounted>> {
    let Ok(path) = std::path::absolute(mountpoint) else { return Ok(None) };
    let table = table::mounts()?;
    let find = |path: &Path| table::topmost(&table, path);
    // Does not resolve the last part: accessing the mount itself could wait for its servers.
    let real = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    let found = find(&path).or_else(|| find(&real()?));
    // A mount that lies under another file system can be neither used nor unmounted.
    Ok(found.filter(|m| m.kind == "fuse.strake").cloned())
}

/// To be called before mounting there: unmounts a StrakeFS whose processes are gone, which is
/// unusable. Never unmounts one that is served, nor another file system: `EBUSY` for a StrakeFS
/// mount that is alive.
pub fn make_way(mountpoint: &Path) -> Result<()> {
    // Repeats for mounts on top of each other.
    while let Some(m) = mounted_at(mountpoint)? {
        let busy = |why: &str| {
            let m = format!(
                "{} is mounted already{why}; run `strake umount` first",
                mountpoint.display()
            );
            Err(Error::new(Code::Busy, m))
        };
        match state_of(&m) {
            State::Served => return busy(""),
            State::Silent => return busy(" and does not answer"),
            State::Dead => {}
        }
        umount::take_off(&m)?;
        eprintln!("{}: removed a mount whose processes are gone", m.at.display());
    }
    Ok(())
}

/// The state of a mount.
enum State {
    Served,
    /// No process answers for it, but the kernel does not report it as dead.
    Silent,
    /// Its processes are gone: every call fails with `ENOTCONN`, for ever.
    Dead,
}

/// How long a silent mount may take until the kernel reports that it is dead: its processes may be
/// ending.
const DYING: Duration = Duration::from_secs(5);

fn state_of(m: &Mounted) -> State {
    if Asker::connect(&m.device, umount::owner_of(m)).is_ok() {
        return State::Served;
    }
    let until = Instant::now() + DYING;
    loop {
        // In a thread: if an unresponsive process still holds the mount open, this waits for ever.
        let (tell, told) = mpsc::channel();
        let at = m.at.clone();
        std::thread::spawn(move || tell.send(rustix::fs::stat(&at).err()));
        match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Some(rustix::io::Errno::NOTCONN)) => return State::Dead,
            Ok(_) if Instant::now() < until => std::thread::sleep(DYING / 100),
            Ok(_) => return State::Served,
            Err(_) => return State::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use strake_fuse::MountFlags;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: MountArgs,
    }

    #[test]
    fn set_id_bits_and_devices_count_only_where_somebody_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mount.toml");
        let flags = |options: &str, words: &[&str]| {
            let text =
                format!("[mount]\nmds = ['tcp:h:1']\nmountpoint = '/m'\noptions = '{options}'\n");
            std::fs::write(&file, text).unwrap();
            let words = ["mount", "--config", file.to_str().unwrap()]
                .into_iter()
                .chain(words.iter().copied());
            let args = Only::try_parse_from(words).unwrap().args;
            load(&args, &asked(&args).unwrap()).unwrap().mount.mount_config().flags
        };
        let both = MountFlags::NOSUID | MountFlags::NODEV;
        assert_eq!(flags("", &[]), both);
        assert_eq!(flags("suid", &[]), MountFlags::NODEV);
        assert_eq!(flags("", &["-o", "allow_dev,rw"]), MountFlags::NOSUID);
        assert_eq!(flags("suid,allow_dev", &[]), MountFlags::empty());
        assert_eq!(flags("allow_suid", &["-o", "nosuid"]), both);
    }

    #[test]
    fn a_transport_that_is_not_in_the_program_is_refused() {
        let words = ["mount", "h:1", "/m", "-o", "transport=fuser"];
        let args = Only::try_parse_from(words).unwrap().args;
        let checked = load(&args, &asked(&args).unwrap()).unwrap().mount.check();
        if cfg!(feature = "fuser") {
            checked.unwrap();
        } else {
            let e = checked.unwrap_err();
            assert!(e.message.contains("--features fuser"), "{e}");
        }
    }

    #[test]
    fn rdma_that_is_asked_for_and_missing_is_named_before_anything_else() {
        let of = |words: &[&str]| {
            let args = Only::try_parse_from([&["mount", "h:1", "/m"], words].concat())
                .map_err(|e| e.to_string())?
                .args;
            let asked = asked(&args).map_err(|e| e.to_string())?;
            load(&args, &asked).map(|f| f.mount).map_err(|e| e.to_string())
        };
        assert_eq!(of(&["--fabric", "rdma"]).unwrap().fabric, FabricKey::Rdma);
        assert_eq!(of(&["--fabric", "rdma", "-o", "fabric=tcp"]).unwrap().fabric, FabricKey::Tcp);
        assert!(
            of(&["--fabric", "ib"]).is_err_and(|e| e.contains("expected 'auto', 'tcp' or 'rdma'"))
        );
        assert!(
            of(&[]).unwrap().has_fabric().is_ok()
                && of(&["-o", "fabric=tcp"]).unwrap().has_fabric().is_ok()
        );
        match (rdma::probe(), of(&["--fabric", "rdma"]).unwrap().has_fabric()) {
            (Ok(devices), r) => assert!(r.is_ok(), "{devices:?}"),
            (Err(why), r) => assert_eq!(r.unwrap_err().message, why.message),
        }
    }
}
