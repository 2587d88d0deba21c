//! How a command finds the cluster that it administers, and the key for it. The same for every
//! command; `docs/operations.md`, "How commands find the cluster".

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;
use strake_fuse::table;
use strake_proto::{Code, Error, Result};

use crate::{
    admin::{DIR, KEY_VARIABLE, key_for},
    config,
    dev::Cluster,
    mount::source::{self, Source},
};

/// Which cluster.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Address {
    /// Metadata servers, HOST[:PORT], separated by commas: one that answers is enough. Also in the
    /// variable STRAKE_MDS, or as `mds` in /etc/strake/admin.toml.
    #[arg(long, value_delimiter = ',')]
    pub mds: Vec<String>,
    /// Folder of a local cluster (see `strake up`). Also in STRAKE_DIR [default: strake-cluster,
    /// where it exists].
    #[arg(long, conflicts_with = "mds")]
    pub dir: Option<PathBuf>,
    /// File with the cluster key. Also in STRAKE_CLUSTER_KEY, or as `cluster_key` in
    /// /etc/strake/admin.toml [default: that of a local cluster, else /etc/strake/cluster.key].
    #[arg(long)]
    pub cluster_key: Option<PathBuf>,
}

/// A cluster that was found.
pub(crate) struct Place {
    /// Its metadata servers, as far as they were named: `tcp:HOST:PORT`.
    pub mds: Vec<String>,
    pub key: [u8; 32],
    /// The local cluster, if it is one.
    pub local: Option<Cluster>,
}

const MDS_VARIABLE: &str = "STRAKE_MDS";
const DIR_VARIABLE: &str = "STRAKE_DIR";
const FILE: &str = "/etc/strake/admin.toml";
const FS_TYPE: &str = "fuse.strake";

/// `/etc/strake/admin.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdminFile {
    #[serde(default)]
    mds: Vec<String>,
    cluster_key: Option<PathBuf>,
}

/// What a command finds where it runs, beside its options.
#[derive(Clone, Default)]
struct Surroundings {
    mds: Option<String>,
    dir: Option<PathBuf>,
    key: Option<PathBuf>,
    /// Whether there is a local cluster in the current folder.
    has_local: bool,
    file: AdminFile,
    /// The source of the mount in which the current folder lies.
    mount: Option<String>,
}

/// Where the cluster is.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    /// Metadata servers, and the file with the key if one is named.
    Mds(Vec<String>, Option<PathBuf>),
    /// A local cluster, and its key if it is not the cluster's own.
    Dir(PathBuf, Option<PathBuf>),
}

impl Address {
    /// Finds the cluster: by the options, else the variables, a local cluster in the current
    /// folder, `/etc/strake/admin.toml`, or the mount in which the current folder lies.
    pub fn find(&self) -> Result<Place> {
        match self.choose(&Surroundings::of(self)?)? {
            Way::Mds(mds, key) => {
                let key = key_for(key.as_deref(), None)?;
                Ok(Place { mds: endpoints(&mds)?, key, local: None })
            }
            Way::Dir(dir, key) => {
                let c = Cluster::open(&dir)?;
                let key = key.map_or_else(|| c.key(), |k| config::read_key(&k))?;
                Ok(Place { mds: c.mds_endpoints(), key, local: Some(c) })
            }
        }
    }

    fn choose(&self, here: &Surroundings) -> Result<Way> {
        let key = |of_file: Option<&PathBuf>| {
            let given = self.cluster_key.as_ref().or(here.key.as_ref()).or(of_file);
            given.cloned()
        };
        let list = |text: &str| text.split(',').map(str::to_string).collect();
        if !self.mds.is_empty() {
            return Ok(Way::Mds(self.mds.clone(), key(here.file.cluster_key.as_ref())));
        }
        if let Some(dir) = &self.dir {
            return Ok(Way::Dir(dir.clone(), self.cluster_key.clone()));
        }
        if let Some(mds) = &here.mds {
            return Ok(Way::Mds(list(mds), key(here.file.cluster_key.as_ref())));
        }
        if let Some(dir) = &here.dir {
            return Ok(Way::Dir(dir.clone(), self.cluster_key.clone()));
        }
        if here.has_local {
            return Ok(Way::Dir(DIR.into(), self.cluster_key.clone()));
        }
        if !here.file.mds.is_empty() {
            return Ok(Way::Mds(here.file.mds.clone(), key(here.file.cluster_key.as_ref())));
        }
        if let Some(source) = &here.mount
            && let Ok(Source { mds, subtree: Some(_) }) = Source::parse(source)
            && !mds.is_empty()
        {
            return Ok(Way::Mds(mds, key(here.file.cluster_key.as_ref())));
        }
        let m = format!(
            "which cluster? Name its metadata servers by --mds or {MDS_VARIABLE}, or as `mds` in \
             {FILE}; or the folder of a local cluster by --dir (`strake up` makes one); or call \
             this in a folder of a mount"
        );
        Err(Error::new(Code::NoDev, m))
    }
}

impl Surroundings {
    /// The file is read only if it may count: a mistake in it is no matter then.
    fn of(args: &Address) -> Result<Surroundings> {
        let of = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        let named = !args.mds.is_empty() || of(MDS_VARIABLE).is_some();
        let has_key = args.cluster_key.is_some() || of(KEY_VARIABLE).is_some();
        let counts = args.dir.is_none() && !(named && has_key);
        let file = match counts && Path::new(FILE).exists() {
            true => config::load(Some(Path::new(FILE)), Vec::new())?,
            false => AdminFile::default(),
        };
        Ok(Surroundings {
            mds: of(MDS_VARIABLE).map(|v| v.to_string_lossy().into_owned()),
            dir: of(DIR_VARIABLE).map(PathBuf::from),
            key: of(KEY_VARIABLE).map(PathBuf::from),
            has_local: Cluster::is_in(Path::new(DIR)),
            file,
            mount: mount_here(),
        })
    }
}

/// The source of the mount in which the current folder lies.
fn mount_here() -> Option<String> {
    let here = std::env::current_dir().ok()?;
    let ours = table::mounts().ok()?.into_iter().filter(|m| here.starts_with(&m.at));
    let last = ours.max_by_key(|m| m.at.as_os_str().len())?;
    (last.kind == FS_TYPE).then_some(last.source)
}

/// Endpoints of metadata servers, from addresses as people write them.
fn endpoints(mds: &[String]) -> Result<Vec<String>> {
    let of = |text: &String| {
        source::server(text).map(|s| format!("tcp:{s}")).ok_or_else(|| {
            Error::new(Code::Inval, format!("metadata server '{text}' is not HOST[:PORT]"))
        })
    };
    mds.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_counts() {
        let mut here = Surroundings {
            mds: Some("a,b".into()),
            dir: Some("d".into()),
            key: Some("k".into()),
            has_local: true,
            file: AdminFile { mds: vec!["f".into()], cluster_key: Some("kf".into()) },
            mount: Some("m1,m2:5:/sub".into()),
        };
        let all = |l: &[&str]| l.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        let mds = |l: &[&str], key: &str| Way::Mds(all(l), Some(key.into()));
        let flags = Address { mds: all(&["x"]), ..Address::default() };
        assert_eq!(flags.choose(&here).unwrap(), mds(&["x"], "k"));
        let with = |key: &str, a: Address| Address { cluster_key: Some(key.into()), ..a };
        assert_eq!(with("own", flags).choose(&here).unwrap(), mds(&["x"], "own"));
        let folder = Address { dir: Some("e".into()), ..Address::default() };
        // The variable is not about a cluster with a key of its own.
        assert_eq!(folder.choose(&here).unwrap(), Way::Dir("e".into(), None));
        assert_eq!(
            with("own", folder).choose(&here).unwrap(),
            Way::Dir("e".into(), Some("own".into()))
        );
        let none = Address::default();
        assert_eq!(none.choose(&here).unwrap(), mds(&["a", "b"], "k"));
        here.mds = None;
        assert_eq!(none.choose(&here).unwrap(), Way::Dir("d".into(), None));
        here.dir = None;
        assert_eq!(none.choose(&here).unwrap(), Way::Dir(DIR.into(), None));
        here.has_local = false;
        assert_eq!(none.choose(&here).unwrap(), mds(&["f"], "k"));
        here.key = None;
        assert_eq!(none.choose(&here).unwrap(), mds(&["f"], "kf"));
        here.file = AdminFile::default();
        assert_eq!(none.choose(&here).unwrap(), Way::Mds(all(&["m1:7400", "m2:5"]), None));
        // The name of a file system, not of a server.
        here.mount = Some("strake".into());
        let e = none.choose(&here).unwrap_err();
        assert!(e.message.contains("--mds") && e.message.contains("admin.toml"), "{e}");
    }

    #[test]
    fn addresses_are_completed() {
        let all = ["h".to_string(), "tcp:h:1".into(), "[::1]".into()];
        assert_eq!(endpoints(&all).unwrap(), ["tcp:h:7400", "tcp:h:1", "tcp:[::1]:7400"]);
        let e = endpoints(&["a b".to_string()]).unwrap_err();
        assert!(e.code == Code::Inval && e.message.contains("'a b' is not HOST[:PORT]"), "{e}");
    }
}
