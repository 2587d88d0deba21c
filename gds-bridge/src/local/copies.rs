//! The copies on this node that a call can use, and the load of a part from one.

use std::{
    collections::{HashMap, hash_map::Entry},
    path::Path,
    sync::Arc,
};

use strake_proto::{Code, Error};
use tokio::task::spawn_blocking;

use super::{
    cufile::CuFile,
    readers::{Open, Read},
    store::Copy,
};
use crate::{
    Direction, Network, Policy, Tier, Transfer, Unavailable,
    copier::Call,
    engine::Engine,
    fault::Fault,
    plan::Standing,
    transfer::{Place, Stop, Went},
};

/// The copies for the ranges of a call.
#[derive(Default)]
pub(crate) struct Copies {
    /// By range; empty: no range has one.
    of: Vec<Option<Arc<Open>>>,
    /// Why a file has none.
    pub missing: Option<Unavailable>,
}

impl Copies {
    pub fn of(&self, range: usize) -> Option<&Arc<Open>> {
        self.of.get(range)?.as_ref()
    }

    /// Whether there are no copies at all.
    pub fn is_empty(&self) -> bool {
        self.of.iter().all(Option::is_none)
    }
}

impl Engine {
    /// Finds the copies for a call. Asks the metadata servers each time how files are sealed, so
    /// that nothing is read that a file held before its seal was removed.
    pub async fn copies(&self, direction: Direction, all: &[Transfer], policy: Policy) -> Copies {
        let available =
            matches!(self.standings_of(direction)[Tier::LocalGds], Standing::Available(_));
        // Saves use no copies.
        let local = self.local.as_ref().filter(|_| available);
        let Some((local, Ok(cufile))) =
            local.filter(|_| policy.allows(Tier::LocalGds)).map(|l| (l, &l.cufile))
        else {
            return Copies::default();
        };
        let (mut found, mut missing) = (HashMap::new(), None);
        for t in all.iter().filter(|t| t.len > 0) {
            let ino = t.file.id();
            if let Entry::Vacant(place) = found.entry(ino) {
                let copy = copy_of(&*self.network, ino, local.dir(), cufile).await;
                let copy = copy.map_err(|why| missing.get_or_insert(why).clone()).ok();
                place.insert(copy);
            }
        }
        Copies {
            of: all.iter().map(|t| found.get(&t.file.id()).cloned().flatten()).collect(),
            missing,
        }
    }

    /// As [`Engine::load_direct`], from a copy.
    pub async fn load_local(
        &self,
        flight: &Arc<Call>,
        from: &Arc<Open>,
        p: Place<'_>,
    ) -> Result<Went, Stop> {
        let size = from.copy.sealed.size;
        if p.offset + p.len > size {
            let m = format!("the file ends after {size} bytes, within the range to load");
            return Err(Stop::Call(Error::new(Code::Io, m)));
        }
        let gone = || {
            Stop::Tier(Fault::Driver {
                call: "local-gds",
                code: Code::Io.errno(),
                name: "it is not open".into(),
            })
        };
        let local = self.local.as_ref().ok_or_else(gone)?;
        let read = Read {
            call: flight.clone(),
            from: from.clone(),
            offset: p.offset,
            to: p.gpu,
            len: p.len,
            sum: self.device_sums.is_ok(),
            patience: from.cufile.patience(),
            consent: self.consent,
            _memory: None,
        };
        let went = local.read(read).await?;
        // Fails if the memory was freed in the meantime.
        self.device.check(p.gpu, p.len)?;
        Ok(went)
    }
}

async fn copy_of(
    network: &dyn Network,
    ino: u64,
    dir: &Path,
    cufile: &Arc<dyn CuFile>,
) -> Result<Arc<Open>, Unavailable> {
    let none = move |why: String| Unavailable::NoCopy { ino, why };
    let sealed = network
        .sealed(ino)
        .await
        .map_err(|e| none(format!("its seal cannot be read: {}", e.message)))?;
    let sealed = sealed.ok_or(Unavailable::NotSealed { ino })?;
    let (dir, cufile) = (dir.to_path_buf(), cufile.clone());
    let open = move || match Copy::open(&dir, &sealed) {
        Ok(None) => {
            Err(none(format!("there is none in '{}': `strake gds stage` makes one", dir.display())))
        }
        Ok(Some(copy)) => {
            Open::new(copy, &cufile).map_err(|f| none(format!("cuFile does not accept it: {f}")))
        }
        Err(e) => Err(none(e.message)),
    };
    spawn_blocking(open)
        .await
        .unwrap_or_else(|e| Err(Unavailable::NoCopy { ino, why: e.to_string() }))
}
