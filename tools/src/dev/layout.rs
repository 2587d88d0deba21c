//! The folder of a local cluster: where its files are, and the configuration files made from its
//! parameters.

use std::{
    fmt::Write as _,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
};

use rustix::fs::Mode;
use serde::{Deserialize, Serialize};
use strake_proto::{Code, Error, Result};
use strake_runtime::{ClientKey, private};

use super::{
    MAX_TARGET_GIB, UpArgs,
    process::{self, Role},
};
use crate::{config, mount, server_config};

const FILE: &str = "cluster.toml";

/// `cluster.toml`: written once when the cluster is created.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameters {
    /// Format version of this file.
    version: u32,
    mds: u32,
    oss: u32,
    targets_per_oss: u32,
    mirror: u32,
    target_gib: u64,
    mount: Option<PathBuf>,
    /// Ports in order: fabric and admin of each mds, then of each oss.
    ports: Vec<u16>,
    /// Targets added by `strake target add`, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    added: Vec<Added>,
}

/// A target that was added after the cluster was created.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Added {
    /// Number of the storage server, from 1.
    oss: u32,
    gib: u64,
}

/// Maximum number of targets of one storage server.
const MOST_TARGETS: usize = 64;

impl Parameters {
    /// Checks that the numbers are those that [`UpArgs`] allows, and that each server has its
    /// ports.
    fn check(&self) -> Result<()> {
        let bad = |m: &str| Err(Error::new(Code::Inval, m));
        if self.version != 1 {
            return bad(&format!("version {} is newer than this program knows", self.version));
        }
        let numbers = (1..=7).contains(&self.mds)
            && (1..=64).contains(&self.oss)
            && (1..=16).contains(&self.targets_per_oss)
            && (1..=3).contains(&self.mirror)
            && (1..=MAX_TARGET_GIB).contains(&self.target_gib);
        if !numbers {
            return bad("no cluster can have such numbers; restore the file or make a new cluster");
        }
        if self.ports.len() != 2 * (self.mds + self.oss) as usize {
            return bad("`ports` must have two ports for each server");
        }
        let added =
            |a: &Added| (1..=self.oss).contains(&a.oss) && (1..=MAX_TARGET_GIB).contains(&a.gib);
        if !self.added.iter().all(added)
            || (1..=self.oss).any(|n| self.targets_of(n).len() > MOST_TARGETS)
        {
            return bad(
                "`added` names an unknown storage server, or an impossible size or number of \
                 targets",
            );
        }
        Ok(())
    }

    /// Sizes of a storage server's targets, GiB.
    fn targets_of(&self, oss: u32) -> Vec<u64> {
        let first = std::iter::repeat_n(self.target_gib, self.targets_per_oss as usize);
        first.chain(self.added.iter().filter(|a| a.oss == oss).map(|a| a.gib)).collect()
    }
}

/// Reads a cluster's parameters, checks them and generates the configurations of its servers, in
/// memory.
pub fn check(text: &str) -> Result<()> {
    let p: Parameters = config::parse("text", text, vec![])?;
    p.check()?;
    let c = Cluster { dir: "/".into(), p };
    for role in c.roles() {
        match role {
            Role::Mds(n) => {
                let text = c.mds_config(n);
                server_config::check_mds(&text).map_err(|e| e.context(text))?
            }
            _ => {
                let text = c.oss_config(&role);
                server_config::check_oss(&text).map_err(|e| e.context(text))?
            }
        }
    }
    Ok(())
}

pub struct Cluster {
    dir: PathBuf,
    p: Parameters,
}

impl Cluster {
    pub fn open(dir: &Path) -> Result<Cluster> {
        let dir = std::path::absolute(dir)?;
        let path = dir.join(FILE);
        let p: Parameters = config::load(Some(&path), vec![]).map_err(|e| {
            if e.code == Code::NoEnt {
                e.context(format!(
                    "no cluster in {}; make one with `strake up --dir`",
                    dir.display()
                ))
            } else {
                e
            }
        })?;
        p.check().map_err(|e| e.context(path.display()))?;
        Ok(Cluster { dir, p })
    }

    /// Whether this folder has a cluster.
    pub fn is_in(dir: &Path) -> bool {
        dir.join(FILE).exists()
    }

    /// Opens an existing cluster (its own numbers hold, only the mount point may change) or creates
    /// a new one.
    pub fn open_or_create(args: &UpArgs, theirs: Mode) -> Result<Cluster> {
        if Cluster::is_in(&args.dir) {
            let mut c = Cluster::open(&args.dir)?;
            c.same_numbers(args)?;
            if let Some(m) = &args.mount {
                c.move_mount(mountpoint(m)?)?;
            }
            c.make_private()?;
            if config::write_client_key(&c.client_key(), &ClientKey::of(&c.key()?))? {
                eprintln!(
                    "strake: {}: completed; clients can now tell servers from impostors",
                    c.client_key().display()
                );
            }
            c.write_configs()?;
            return Ok(c);
        }
        Cluster::create(args, theirs)
    }

    /// Closes what an older version left open to other users. Servers do that for the contents of
    /// their own folders; the mount point is left alone.
    fn make_private(&self) -> Result<()> {
        private::folder(&self.dir, is_passage(&self.dir, self.p.mount.as_deref()))?;
        let mut all: Vec<PathBuf> = self.roles().iter().map(|r| self.dir.join(r.name())).collect();
        for sub in [&self.logs(), &self.dir.join("run"), &self.dir] {
            all.push(sub.clone());
            let files = fs::read_dir(sub).into_iter().flatten().flatten();
            all.extend(
                files.filter(|f| f.file_type().is_ok_and(|t| t.is_file())).map(|f| f.path()),
            );
        }
        let mut changed = 0;
        for path in all.iter().filter(|p| **p != self.dir && p.exists()) {
            changed +=
                u32::from(private::mend(path).map_err(|e| Error::from(e).context(path.display()))?);
        }
        if changed > 0 {
            let at = self.dir.display();
            eprintln!(
                "strake: {at}: other users could read {changed} files and folders; now only the \
                 owner can"
            );
        }
        Ok(())
    }

    /// The numbers that a cluster was created with cannot change.
    fn same_numbers(&self, args: &UpArgs) -> Result<()> {
        let given = [
            ("--mds", args.mds.map(u64::from), u64::from(self.p.mds)),
            ("--oss", args.oss.map(u64::from), u64::from(self.p.oss)),
            (
                "--targets-per-oss",
                args.targets_per_oss.map(u64::from),
                u64::from(self.p.targets_per_oss),
            ),
            ("--mirror", args.mirror.map(u64::from), u64::from(self.p.mirror)),
            ("--target-gib", args.target_gib, self.p.target_gib),
        ];
        for (option, given, is) in given {
            if let Some(given) = given.filter(|g| *g != is) {
                let m = format!(
                    "the cluster in {} was made with {option} {is}; {option} {given} cannot \
                     change that. Leave the option out, or make another cluster in another --dir",
                    self.dir.display()
                );
                return Err(Error::new(Code::Inval, m));
            }
        }
        Ok(())
    }

    /// Sets another mount point from now on, unless it is mounted at the old one.
    fn move_mount(&mut self, to: Option<PathBuf>) -> Result<()> {
        if to == self.p.mount {
            return Ok(());
        }
        if let Some(old) = self.p.mount.as_ref() {
            if process::running(self, &Role::Mount).is_some() {
                let m = format!(
                    "the cluster is mounted at {}; leave out --mount to keep that, or run `strake umount {0}` first",
                    old.display()
                );
                return Err(Error::new(Code::Busy, m));
            }
            // Removes what a mount whose process died has left. A mount of something else is not
            // ours.
            let _ = mount::make_way(old);
        }
        self.p.mount = to;
        Ok(())
    }

    /// `theirs`: the umask of the calling user.
    fn create(args: &UpArgs, theirs: Mode) -> Result<Cluster> {
        let (mds, oss) = (args.mds.unwrap_or(3), args.oss.unwrap_or(4));
        let mirror = args.mirror.unwrap_or(2);
        if oss < mirror {
            let m = format!(
                "{mirror} copies need at least as many storage servers; give --oss {mirror} or --mirror 1"
            );
            return Err(Error::new(Code::Inval, m));
        }
        let mount = mountpoint(args.mount.as_deref().unwrap_or(Path::new("strake-mnt")))?;
        let dir = std::path::absolute(&args.dir)?;
        // Folders above it get the mode that the user's umask gives.
        private::under(theirs, || fs::create_dir_all(dir.parent().unwrap_or(&dir)))?;
        fs::create_dir_all(&dir)?;
        if fs::read_dir(&dir)?.next().is_some() {
            let m = format!(
                "{} is not empty and holds no cluster; name another --dir",
                args.dir.display()
            );
            return Err(Error::new(Code::NotEmpty, m));
        }
        private::folder(&dir, is_passage(&dir, mount.as_deref()))?;
        let p = Parameters {
            version: 1,
            mds,
            oss,
            targets_per_oss: args.targets_per_oss.unwrap_or(2),
            mirror,
            target_gib: args.target_gib.unwrap_or(16),
            mount,
            ports: free_ports(2 * (mds + oss) as usize)?,
            added: Vec::new(),
        };
        let c = Cluster { dir, p };
        let servers = c.roles().into_iter().map(|r| r.name());
        for sub in servers.chain(["logs".into(), "run".into()]) {
            fs::create_dir_all(c.dir.join(sub))?;
        }
        let mut key = [0u8; 32];
        getrandom::fill(&mut key)
            .map_err(|e| Error::new(Code::Io, format!("the kernel's random source: {e}")))?;
        config::write_key(&c.cluster_key(), &key)?;
        config::write_client_key(&c.client_key(), &ClientKey::of(&key))?;
        c.write_configs()?;
        Ok(c)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
    pub fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }
    pub fn cluster_key(&self) -> PathBuf {
        self.dir.join("cluster.key")
    }
    pub fn key(&self) -> Result<[u8; 32]> {
        config::read_key(&self.cluster_key())
    }
    pub fn client_key(&self) -> PathBuf {
        self.dir.join("client.key")
    }
    pub fn mountpoint(&self) -> Option<PathBuf> {
        self.p.mount.clone()
    }
    pub fn target_count(&self) -> usize {
        (self.p.oss * self.p.targets_per_oss) as usize
    }

    /// Copies of each file's data.
    pub fn copies(&self) -> u32 {
        self.p.mirror.max(1)
    }

    /// The servers, metadata first.
    pub fn roles(&self) -> Vec<Role> {
        (1..=self.p.mds).map(Role::Mds).chain((1..=self.p.oss).map(Role::Oss)).collect()
    }

    pub fn config_of(&self, role: &Role) -> PathBuf {
        self.dir.join(format!("{}.toml", role.name()))
    }

    fn port(&self, role: &Role, admin: bool) -> u16 {
        let n = match role {
            Role::Mds(n) => n - 1,
            Role::Oss(n) => self.p.mds + n - 1,
            Role::Mount => return 0,
        };
        self.p.ports.get(2 * n as usize + usize::from(admin)).copied().unwrap_or(0)
    }

    pub fn mds_endpoints(&self) -> Vec<String> {
        (1..=self.p.mds)
            .map(|n| format!("tcp:127.0.0.1:{}", self.port(&Role::Mds(n), false)))
            .collect()
    }
    pub fn admin_mds(&self) -> Vec<String> {
        (1..=self.p.mds).map(|n| format!("127.0.0.1:{}", self.port(&Role::Mds(n), true))).collect()
    }
    pub fn admin_oss(&self) -> Vec<String> {
        (1..=self.p.oss).map(|n| format!("127.0.0.1:{}", self.port(&Role::Oss(n), true))).collect()
    }

    /// Adds a target for a storage server to its configuration; `gib`: by default as large as the
    /// first ones. Returns the server's administration address.
    pub fn add_target(&mut self, server: &str, gib: Option<u64>) -> Result<String> {
        let oss = (1..=self.p.oss).find(|n| Role::Oss(*n).name() == server).ok_or_else(|| {
            let m = format!(
                "there is no storage server '{server}'; there are oss1 to oss{}",
                self.p.oss
            );
            Error::new(Code::NoEnt, m)
        })?;
        if self.p.targets_of(oss).len() >= MOST_TARGETS {
            return Err(Error::new(
                Code::NoSpc,
                format!("{server} has {MOST_TARGETS} targets already"),
            ));
        }
        self.p.added.push(Added { oss, gib: gib.unwrap_or(self.p.target_gib) });
        self.p.check()?;
        self.write_configs()?;
        Ok(format!("127.0.0.1:{}", self.port(&Role::Oss(oss), true)))
    }

    /// Undoes the last [`add_target`](Cluster::add_target).
    pub fn take_target_back(&mut self) -> Result<()> {
        self.p.added.pop();
        self.write_configs()
    }

    fn write_configs(&self) -> Result<()> {
        for role in self.roles() {
            let text = match role {
                Role::Mds(n) => self.mds_config(n),
                _ => self.oss_config(&role),
            };
            put(&self.config_of(&role), &text)?;
        }
        if let Some(m) = &self.p.mount {
            put(&self.config_of(&Role::Mount), &self.mount_config(m))?;
        }
        let text = toml::to_string(&self.p).map_err(|e| Error::new(Code::Io, e.to_string()))?;
        put(&self.dir.join(FILE), &text)?;
        Ok(fs::File::open(&self.dir)?.sync_all()?)
    }

    /// Configuration of a mount of this cluster at an absolute path.
    pub fn mount_config(&self, at: &Path) -> String {
        format!(
            "client_key = {:?}\n\n[mount]\nmds = {:?}\nmountpoint = {at:?}\nallow_other = {}\n",
            self.client_key(),
            self.mds_endpoints(),
            rustix::process::geteuid().is_root()
        )
    }

    fn mds_config(&self, n: u32) -> String {
        let role = Role::Mds(n);
        let mut s = format!(
            "cluster_key = {:?}\n\n[mds]\nid = {n}\nname = {:?}\n",
            self.cluster_key(),
            role.name()
        );
        let _ = writeln!(s, "dir = {:?}", self.dir.join(role.name()));
        let _ = writeln!(s, "listen = \"tcp:127.0.0.1:{}\"", self.port(&role, false));
        let _ = writeln!(s, "admin = \"127.0.0.1:{}\"", self.port(&role, true));
        let _ = writeln!(
            s,
            "default_copies = {}\nexpect_targets = {}",
            self.p.mirror,
            self.target_count()
        );
        let _ = writeln!(s, "root_uid = {}", rustix::process::geteuid().as_raw());
        let _ = writeln!(s, "root_gid = {}", rustix::process::getegid().as_raw());
        let peers: Vec<String> = self
            .mds_endpoints()
            .iter()
            .enumerate()
            .map(|(i, e)| format!("{}={e}", i + 1))
            .collect();
        let _ = writeln!(s, "peers = {peers:?}");
        s
    }

    fn oss_config(&self, role: &Role) -> String {
        let mut s =
            format!("cluster_key = {:?}\n\n[oss]\nname = {:?}\n", self.cluster_key(), role.name());
        let _ = writeln!(s, "listen = \"tcp:127.0.0.1:{}\"", self.port(role, false));
        let _ = writeln!(s, "admin = \"127.0.0.1:{}\"", self.port(role, true));
        let _ = writeln!(s, "mds = {:?}", self.mds_endpoints());
        let Role::Oss(n) = role else { return s };
        for (t, gib) in self.p.targets_of(*n).into_iter().enumerate() {
            let path = self.dir.join(role.name()).join(format!("target{t}"));
            let _ = writeln!(s, "\n[[oss.targets]]\npath = {path:?}\nsize = {}", gib << 30);
        }
        s
    }
}

/// Whether other users reach the mount through the cluster's folder.
fn is_passage(dir: &Path, mount: Option<&Path>) -> bool {
    // Follows all links. Of a mount point that does not exist yet, uses the part that exists; does
    // not ask the mounted file system.
    let real = |p: &Path| {
        p.ancestors().find_map(|a| Some(fs::canonicalize(a).ok()?.join(p.strip_prefix(a).ok()?)))
    };
    let above = |m: &Path| real(m.parent()?)?.starts_with(real(dir)?).then_some(());
    mount.and_then(above).is_some()
}

/// An absolute path; `none` for no mount.
fn mountpoint(given: &Path) -> Result<Option<PathBuf>> {
    if given.as_os_str() == "none" { Ok(None) } else { Ok(Some(std::path::absolute(given)?)) }
}

/// Replaces a file as a whole, unless it has this content already: after a crash it is the old file
/// or the new one.
fn put(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::File::open(&new)?.sync_all()?;
    Ok(fs::rename(new, path)?)
}

/// Ports that are free now. The kernel is asked for all of them together, so that no two are equal.
fn free_ports(n: usize) -> Result<Vec<u16>> {
    let sockets: Vec<TcpListener> =
        (0..n).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<_>>()?;
    sockets.iter().map(|s| Ok(s.local_addr()?.port())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_reached_through_the_folder_that_it_lies_in() {
        let root = tempfile::tempdir().unwrap();
        let (dir, link) = (root.path().join("c"), root.path().join("link"));
        fs::create_dir(&dir).unwrap();
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        let at = |m: &Path| is_passage(&dir, Some(m));
        assert!(at(&dir.join("mnt")) && at(&dir.join("a/b/mnt")) && at(&link.join("mnt")));
        assert!(is_passage(&link, Some(&dir.join("mnt"))));
        assert!(
            !at(&root.path().join("mnt"))
                && !at(&root.path().join("c2/mnt"))
                && !is_passage(&dir, None)
        );
    }
}
