//! How a storage server joins the cluster and stays a member: registration, heartbeats, its lease.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::{Endpoint, Message};
use strake_proto::{
    Code, Error, Incarnation, Result, TargetId,
    map::{MAX_EVICTED, MapView},
    opcode, pb,
};
use tokio::time::Instant;

use super::{
    super::{endings::Endings, peers::MdsLink, refused_targets, replica::Replica},
    Node, Target, follows,
};

/// A target that left its chains for lack of space comes back when so many bytes are free.
const RETURN: u64 = 64 << 20;
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);

impl Node {
    /// One attempt to register the first target that waits to join.
    async fn join(self: &Arc<Self>, mds: &mut MdsLink, listening: &[Endpoint]) {
        let Some(j) = self.duty.joining.lock().pop_front() else { return };
        match self.register_with(mds, listening, Some(&j.target)).await {
            Ok(()) => {
                tracing::info!("target {} is registered", j.target.id());
                self.tend(&j.target);
                let _ = j.done.send(Ok(j.target.id()));
            }
            Err(e) if matches!(e.code, Code::Inval | Code::NoSpc) || Instant::now() > j.until => {
                let _ = j.done.send(Err(e));
            }
            Err(e) => {
                tracing::warn!("a new target is not registered yet, trying again: {e}");
                self.duty.joining.lock().push_back(j);
            }
        }
    }

    fn advertised(&self, listening: &[Endpoint]) -> Vec<String> {
        let all = if self.cfg.advertise.is_empty() { listening } else { &self.cfg.advertise };
        all.iter().map(Endpoint::to_string).collect()
    }

    /// Fetches the newest cluster map.
    async fn newest(
        mds: &mut MdsLink,
        known: &MapView,
        patience: Duration,
    ) -> Result<pb::ClusterMap> {
        let m = Message::new(opcode::MAP, pb::MapRequest { have: 0, latest: true }.encode_to_vec());
        let m = mds.call(known, m, patience).await?;
        let bad = |e: prost::DecodeError| {
            Error::new(Code::Protocol, format!("answer to a question for the map: {e}"))
        };
        Ok(pb::MapReply::decode(m.body).map_err(bad)?.map.unwrap_or_default())
    }

    fn register_request(
        &self,
        listening: &[Endpoint],
        all: &[Arc<Target>],
        stamps: &BTreeMap<Bytes, u64>,
    ) -> pb::RegisterRequest {
        let ids: Vec<_> = all.iter().map(|t| t.engine.identity()).collect();
        let fs = ids.iter().chain(&self.identities()).map(|i| i.fs_uuid).find(|u| *u != [0; 16]);
        let targets = all.iter().zip(&ids).map(|(t, id)| pb::RegisterTarget {
            uuid: id.target_uuid.to_vec().into(),
            capacity: t.engine.usage().capacity,
            stamp: t.stamp,
            id: id.target_id,
            sights: t.engine.chain_views(),
            follows: Some(stamps.get(&id.target_uuid[..]).copied().unwrap_or(0)),
        });
        pb::RegisterRequest {
            name: self.cfg.name.clone(),
            endpoints: self.advertised(listening),
            targets: targets.collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            fs_uuid: fs.map(Vec::from).unwrap_or_default().into(),
            incarnation: self.incarnation().0,
            rack: self.cfg.rack.clone(),
        }
    }

    /// Checks a target that is to join.
    fn check_fit(&self, new: &Target, map: &pb::ClusterMap) -> Result<()> {
        let id = new.engine.identity();
        if self.targets().iter().any(|t| t.engine.identity().target_uuid == id.target_uuid) {
            let m = format!(
                "another folder of this server holds target {}, too; it is a copy",
                id.target_id
            );
            return Err(Error::new(Code::Inval, m));
        }
        refused_targets::unfit(map, &self.cfg.name, &id).map_or(Ok(()), Err)
    }

    /// One attempt to register. `EINVAL`: this server or its targets belong elsewhere, and retrying
    /// does not help.
    pub(crate) async fn register(
        self: &Arc<Self>,
        mds: &mut MdsLink,
        listening: &[Endpoint],
    ) -> Result<()> {
        self.register_with(mds, listening, None).await
    }

    async fn register_with(
        self: &Arc<Self>,
        mds: &mut MdsLink,
        listening: &[Endpoint],
        new: Option<&Arc<Target>>,
    ) -> Result<()> {
        let map = self.map.load_full();
        // The targets that serve need their next heartbeat before their lease expires.
        let patience =
            new.map_or(REGISTER_TIMEOUT, |_| Duration::from_millis(self.cfg.heartbeat_ms));
        let now = Self::newest(mds, &map, patience).await?;
        *self.group.fs.lock() = now.fs_uuid[..].try_into().ok();
        self.refuse_unfit(&now);
        if let Some(new) = new {
            self.check_fit(new, &now)?;
        }
        let stamps = now.targets.into_iter().map(|t| (t.uuid, t.stamp)).collect();
        let all: Vec<Arc<Target>> = self.targets().iter().chain(new).cloned().collect();
        let body = self.register_request(listening, &all, &stamps).encode_to_vec();
        let m = mds.call(&map, Message::new(opcode::REGISTER, body), patience).await?;
        let bad = |e: prost::DecodeError| {
            Error::new(Code::Protocol, format!("answer to registration: {e}"))
        };
        let r = pb::RegisterReply::decode(&m.body[..]).map_err(bad)?;
        let fs: [u8; 16] = r.fs_uuid[..].try_into().map_err(|_| {
            Error::new(Code::Protocol, "answer to registration: cluster uuid is not 16 bytes")
        })?;
        if r.target_ids.len() != all.len() {
            return Err(Error::new(
                Code::Protocol,
                "answer to registration: not one id per target",
            ));
        }
        let now = r.map.as_ref().map_or(0, |m| m.incarnation);
        let known = all.iter().map(|t| t.engine.identity()).chain(self.identities());
        if let Some(t) = known.into_iter().find(|t| !follows(t, now)) {
            let m = format!(
                "target {} belongs to incarnation {} of the metadata group; what answers is {}, which was given up",
                t.target_id,
                Incarnation(t.incarnation),
                Incarnation(now)
            );
            mds.reject();
            return Err(Error::new(Code::NotLeader, m));
        }
        for (t, id) in all.iter().zip(&r.target_ids) {
            let mut have = t.engine.identity();
            if have.fs_uuid != [0; 16] && have.fs_uuid != fs {
                let m = format!(
                    "target {} belongs to another cluster; it is not touched",
                    have.target_id
                );
                return Err(Error::new(Code::Inval, m));
            }
            let same = have.fs_uuid == fs && have.target_id == *id && have.node == self.cfg.name;
            if !same || have.incarnation != now {
                (have.fs_uuid, have.target_id, have.node) = (fs, *id, self.cfg.name.clone());
                have.incarnation = now;
                t.engine.set_identity(have).await?;
            }
            t.id.store(*id, Ordering::Release);
        }
        if self.group.joined.swap(now, Ordering::AcqRel) != now {
            // Another log: nothing of it is known, and all earlier sessions are evicted.
            *self.revoked.endings.write() = Endings::default();
            *self.lease.until.lock() = Duration::ZERO;
        }
        self.id.store(r.node, Ordering::Release);
        if new.is_some() {
            self.targets.store(Arc::new(all));
        }
        if let Some(map) = r.map {
            self.apply_map(map)?;
        }
        Ok(())
    }

    /// Registers, then sends heartbeats for ever.
    pub(crate) async fn stay_registered(
        self: Arc<Self>,
        mut mds: MdsLink,
        listening: Vec<Endpoint>,
    ) {
        let period = Duration::from_millis(self.cfg.heartbeat_ms);
        loop {
            self.let_go();
            self.join(&mut mds, &listening).await;
            let now = self.env.boot();
            self.targets().iter().for_each(|t| t.engine.expire_grants(now));
            match self.heartbeat(&mut mds, period).await {
                Ok(()) => {}
                Err(e) if e.code == Code::Stale => {
                    tracing::warn!("registering again: {e}");
                    if let Err(e) = self.register(&mut mds, &listening).await {
                        tracing::warn!("registration failed, trying again: {e}");
                        tokio::time::sleep(period).await;
                    }
                    continue;
                }
                Err(e) if e.code == Code::NotLeader => {
                    // The answer named another server, or the next one is asked: no reason to wait
                    // a whole period.
                    tokio::time::sleep(period / 5).await;
                    continue;
                }
                Err(e) => tracing::debug!("heartbeat: {e}"),
            }
            tokio::select! {
                biased;
                () = self.kick.notified() => tokio::time::sleep(Duration::from_millis(5)).await,
                () = tokio::time::sleep(period) => {}
            }
        }
    }

    /// Brings back targets that left for lack of space, when there is space again and no replica
    /// with missing data still counts as in sync.
    fn look_for_space(&self) {
        let now = self.env.boot();
        let replicas: Vec<Arc<Replica>> = self.replicas.lock().values().cloned().collect();
        for t in self.targets().iter().filter(|t| t.lacks_space()) {
            // It must be out of all its chains in the map that this server acts on. While the
            // server has a lease for an older map, the target must stay out.
            let out = self.map.load().target(t.id()).is_some_and(|t| !t.alive);
            let told = out && !replicas.iter().any(|r| r.id == t.id() && r.has_failed());
            if told && t.engine.device().spare() >= RETURN && !t.table_is_full(now) {
                t.come_back();
            }
        }
    }

    fn heartbeat_request(&self) -> pb::HeartbeatRequest {
        let replicas: Vec<Arc<Replica>> = self.replicas.lock().values().cloned().collect();
        let (map_version, now) = (self.map.load().version(), self.env.boot());
        let report = |t: &Arc<Target>| {
            let u = t.engine.usage();
            let synced = replicas
                .iter()
                .filter(|r| r.id == t.id() && r.has_synced())
                .map(|r| r.chain)
                .collect();
            pb::TargetReport {
                target: t.id(),
                stamp: t.stamp,
                capacity: u.capacity,
                used: u.used,
                failed: t.failed(),
                synced_chains: synced,
                chunks: u.chunks,
                lapses: t.lapses.load(Ordering::Acquire),
                stored: t
                    .engine
                    .stored()
                    .into_iter()
                    .map(|(chain, bytes)| pb::ChainBytes { chain, bytes })
                    .collect(),
                device: Some(t.times()),
                table_full: t.table_is_full(now),
            }
        };
        pb::HeartbeatRequest {
            node: self.id.load(Ordering::Acquire),
            map_version,
            targets: self.targets().iter().map(report).collect(),
            unreachable: self.peers.unreachable(),
            evicted_seen: self.revoked.evictions.lock().over(),
            incarnation: self.incarnation().0,
            leaseless: self.lease_left().is_zero(),
            number: self.lease.beats.fetch_add(1, Ordering::Relaxed) + 1,
            endings_known: self.cfg.end_capabilities.then(|| self.revoked.endings.read().known()),
        }
    }

    async fn heartbeat(self: &Arc<Self>, mds: &mut MdsLink, period: Duration) -> Result<()> {
        let map = self.map.load_full();
        self.look_for_space();
        let body = self.heartbeat_request().encode_to_vec();
        let sent = self.env.boot();
        let m = mds.call(&map, Message::new(opcode::HEARTBEAT, body), period * 2).await?;
        let bad = |e: prost::DecodeError| {
            Error::new(Code::Protocol, format!("answer to a heartbeat: {e}"))
        };
        let r = pb::HeartbeatReply::decode(&m.body[..]).map_err(bad)?;
        {
            let mut ev = self.revoked.evictions.lock();
            r.evicted.iter().for_each(|e| ev.add(e));
        }
        // The map first: a lease must not cover what the same answer takes away.
        if let Some(map) = r.map {
            self.apply_map(map)?;
        }
        self.step_out(&r.step_out);
        let more_ended = r.endings.as_ref().is_some_and(|e| e.more);
        if let Some(endings) = r.endings.filter(|_| self.cfg.end_capabilities) {
            self.revoked.endings.write().take(&endings);
        }
        if r.evicted.len() >= MAX_EVICTED || more_ended {
            // More may be pending. After a restart, a lease would otherwise let in sessions that
            // were evicted long ago, and rights that have ended.
            self.kick.notify_one();
            return Ok(());
        }
        if r.lease_ms == 0 {
            self.give_up_lease();
            return Ok(());
        }
        // Clock rates may differ by a tenth, as those of clients may.
        let until = sent + Duration::from_millis(u64::from(r.lease_ms)) / 10 * 9;
        let mut lease = self.lease.until.lock();
        *lease = until.max(*lease);
        Ok(())
    }

    /// Fails targets that cannot take truncations or removals; their chains continue without them.
    fn step_out(&self, asked: &[TargetId]) {
        let now = self.env.boot();
        for t in self.targets().iter().filter(|t| asked.contains(&t.id()) && t.table_is_full(now)) {
            t.fail(&Error::new(
                Code::NoSpc,
                "its chunk table takes no writes: the file system that it is in is full",
            ));
            self.kick.notify_one();
        }
    }

    /// Other servers cannot reach this node. Once the metadata server knows that the lease is given
    /// up, it need not wait for its end.
    fn give_up_lease(&self) {
        let before = std::mem::take(&mut *self.lease.until.lock());
        if before > self.env.boot() {
            tracing::warn!("other storage servers cannot reach this one; it gives its lease up");
            self.kick.notify_one();
        }
    }
}
