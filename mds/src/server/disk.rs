//! Starts a metadata server from its folder, see [`data_dir`](crate::data_dir).

use futures_util::future::BoxFuture;
use std::{
    fs::{self, File},
    sync::Arc,
};

use strake_fabric::{Identity, Pool, Transports};
use strake_proto::{CapKey, Code, Error, Result};
use strake_runtime::{Env, private};
use strake_store::FjallStore;

use super::{
    admin,
    config::Config,
    disk_space,
    start::{Disk, MdsServer, Parts, start_with},
};
use crate::{
    consensus::{DiskLog, LogImage, LogStore as _, disk_log},
    data_dir::{self, LOG, RESERVE, Record, STATE, Sizes, State, cluster_id},
    namespace::Namespace,
};

/// Starts a server from `cfg.dir`, making the folder at the first start. `cluster_key` is the
/// secret that all servers of the cluster share; the keys against forgery by clients and other
/// clusters are derived from it.
///
/// Errors name the folder and the fault: it is in use, of another member or cluster, newer, or
/// damaged.
pub fn start_on_disk(
    cfg: Config,
    env: Env,
    cluster_key: [u8; 32],
) -> BoxFuture<'static, Result<MdsServer>> {
    Box::pin(async move {
        cfg.check()?;
        let cluster = cluster_id(&cluster_key, &cfg.fs_name);
        let lock = open_folder(&cfg, cluster)?;
        private::mend_all(&cfg.dir);
        let sizes = Sizes::of(&cfg.dir)?;
        let mut voters: Vec<u64> = cfg.peers.iter().map(|p| p.0).chain([cfg.id]).collect();
        voters.sort_unstable();
        voters.dedup();
        if cfg.join {
            voters.clear();
        }
        let log = DiskLog::open(
            &cfg.dir.join(LOG),
            cluster,
            cfg.id,
            &voters,
            env.random_u64(),
            sizes.log(),
        )?;
        let (store, set_aside) = open_state(&cfg, &sizes, &log.load().await?)?;
        Record { member: cfg.id, cluster, state: State::Complete }.write(&cfg.dir)?;
        let fabric = Transports::new(
            env.clone(),
            Identity::server(&cluster_key),
            None,
            Pool::default(),
            Default::default(),
        );
        let parts = Parts {
            env,
            fabric: Arc::new(fabric),
            log: Arc::new(log),
            store: Arc::new(store),
            cap_key: CapKey::from_cluster_key(&cluster_key),
            cluster,
        };
        let admin_at = cfg.admin;
        let reserve = cfg.reserve_bytes.unwrap_or_else(|| disk_space::default_reserve(sizes.total));
        let disk = Disk {
            reserve_file: Some(cfg.dir.join(RESERVE)),
            reserve,
            segment: sizes.segment,
            set_aside,
        };
        let mut server = start_with(cfg, parts, disk).await?;
        server.lock = Some(lock);
        if let Some(at) = admin_at {
            let serve = admin::serve(server.mds.clone(), at, &cluster_key)?;
            server.tasks.push(server.mds.member.env.spawn(serve));
        }
        Ok(server)
    })
}

/// Opens the state, or makes it. A damaged state is set aside if it can be restored: the `log` has
/// everything that was ever agreed on, or other members have a copy. Then the error is returned
/// with an empty state.
fn open_state(cfg: &Config, sizes: &Sizes, log: &LogImage) -> Result<(FjallStore, Option<Error>)> {
    let (dir, aside) = (&cfg.dir, cfg.dir.join(data_dir::DAMAGED));
    let open = || {
        let store = Arc::new(sizes.store(dir, cfg.cache_bytes)?);
        let state = Namespace::open_knowing(store.clone(), cfg.feature_level)?;
        let applied = state.header().applied_index;
        drop(state);
        Ok((Arc::into_inner(store), applied))
    };
    let damage = match open() {
        Ok((Some(store), applied)) => {
            let whole = log.restoring.is_none() && applied >= log.base.0;
            if whole && aside.exists() {
                tracing::info!(
                    "the state is whole again: removing the damaged one that was set aside"
                );
                fs::remove_dir_all(&aside).map_err(|e| data_dir::at(&aside, e))?;
            }
            return Ok((store, None));
        }
        Ok((None, _)) => Error::new(Code::Busy, "the metadata store is still open"),
        Err(e) => e,
    };
    if damage.code != Code::Corrupt {
        return Err(damage);
    }
    let again = log.base.0 == 0 || log.voters != [cfg.id] || !log.peers.is_empty();
    if !again {
        let next = "there is no other member to copy it from: restore a backup (docs/operations.md, 'Damaged metadata')";
        return Err(Error { message: format!("{}; {next}", damage.message), ..damage });
    }
    tracing::error!(
        "the metadata state is damaged; it is set aside as {} and created again: {damage}",
        aside.display()
    );
    if aside.exists() {
        fs::remove_dir_all(&aside).map_err(|e| data_dir::at(&aside, e))?;
    }
    fs::rename(dir.join(STATE), &aside).map_err(|e| data_dir::at(&aside, e))?;
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| data_dir::at(dir, e))?;
    Ok((sizes.store(dir, cfg.cache_bytes)?, Some(damage)))
}

/// For the fuzz targets: reads the text of an identity file, and returns it as it would be written.
#[doc(hidden)]
pub fn read_identity(text: &str) -> Result<String> {
    Record::parse(text).map(|r| r.text())
}

/// Checks that the folder is this member's or unused, and locks it until the file is closed.
fn open_folder(cfg: &Config, cluster: [u8; 16]) -> Result<File> {
    let dir = &cfg.dir;
    strake_store::make_folder(dir)?;
    let lock = data_dir::lock(dir)?;
    let record = match Record::read(dir)? {
        Some(r) => r,
        None => {
            data_dir::refuse_foreign(dir)?;
            let fresh = Record { member: cfg.id, cluster, state: State::New };
            fresh.write(dir)?;
            fresh
        }
    };
    let refuse = |m: String| Err(Error::new(Code::Inval, format!("{}: {m}", dir.display())));
    if record.member != cfg.id {
        return refuse(format!(
            "this folder belongs to metadata server {}, but the configuration says {}",
            record.member, cfg.id
        ));
    }
    if record.cluster != cluster {
        return refuse(
            "this folder belongs to another cluster: its key or file system name differs".into(),
        );
    }
    match record.state {
        State::New | State::Complete => {}
        State::Removed => {
            return refuse(format!(
                "metadata server {} was removed from its group; to use this machine again give it an empty folder and an id never \
                 used before (docs/membership.md)",
                record.member
            ));
        }
        State::Recovering { .. } => {
            return refuse("a recovery of it is incomplete; run `strake mds recover` again".into());
        }
        State::Loading => {
            return refuse(
                "loading a dump into it is incomplete; run `strake mds load` again".into(),
            );
        }
    }
    let log = dir.join(LOG);
    if record.state == State::Complete
        && fs::read_dir(&log).map_or(true, |mut d| d.next().is_none())
    {
        return Err(disk_log::refusal(format!("{} is missing", log.display())));
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::super::start::mark_removed;
    use std::path::Path;

    use strake_fabric::Endpoint;

    use super::*;

    fn config(dir: &Path) -> Config {
        Config::new(1, Endpoint::Tcp("127.0.0.1".into(), 0), dir.to_path_buf())
    }

    #[test]
    fn folders_of_others_are_refused_with_words() {
        let dir = tempfile::tempdir().unwrap();
        let cfg = config(dir.path());
        let cluster = cluster_id(&[1; 32], "a");
        let held = open_folder(&cfg, cluster).unwrap();
        assert_eq!(open_folder(&cfg, cluster).unwrap_err().code, Code::Busy);
        drop(held);
        open_folder(&cfg, cluster).unwrap();
        let other = open_folder(&cfg, cluster_id(&[1; 32], "b")).unwrap_err();
        assert!(other.message.contains("another cluster"), "{other}");
        let moved = open_folder(&Config { id: 2, ..cfg.clone() }, cluster).unwrap_err();
        assert!(moved.message.contains("metadata server 1"), "{moved}");
        mark_removed(&cfg, cluster);
        let removed = open_folder(&cfg, cluster).unwrap_err();
        assert!(removed.message.contains("was removed from its group"), "{removed}");
        for (state, word) in [
            (State::Recovering { to: 2, incarnation: Default::default() }, "strake mds recover"),
            (State::Loading, "strake mds load"),
        ] {
            Record { member: 1, cluster, state }.write(dir.path()).unwrap();
            let e = open_folder(&cfg, cluster).unwrap_err();
            assert!(e.code == Code::Inval && e.message.contains(word), "{e}");
        }
        Record { member: 1, cluster, state: State::Complete }.write(dir.path()).unwrap();
        let lost = open_folder(&cfg, cluster).unwrap_err();
        assert!(
            lost.code == Code::Corrupt
                && lost.message.contains("Changing the group of metadata servers"),
            "{lost}"
        );
        fs::write(dir.path().join("identity"), "strake mds 9\n").unwrap();
        assert!(open_folder(&cfg, cluster).unwrap_err().message.contains("newer"));

        let foreign = tempfile::tempdir().unwrap();
        fs::write(foreign.path().join("photo.jpg"), "x").unwrap();
        let e = open_folder(&config(foreign.path()), cluster).unwrap_err();
        assert!(e.message.contains("photo.jpg"), "{e}");
    }
}
