//! How a storage server joins the cluster and stays a member: registration, heartbeats, its lease.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

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
    chain_member::ChainMember,
    context::Context,
    group::{Group, follows},
    lease::Lease,
    map_updates::MapUpdates,
    peers::MdsLink,
    replicas::Replicas,
    revocations::Revocations,
    target::Target,
    targets::Targets,
};
use crate::engine::TargetIdentity;

/// A target that left its chains for lack of space comes back when so many bytes are free.
const RETURN: u64 = 64 << 20;
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// See the module.
pub(super) struct Membership {
    pub ctx: Arc<Context>,
    pub group: Arc<Group>,
    pub lease: Arc<Lease>,
    pub revocations: Arc<Revocations>,
    pub targets: Arc<Targets>,
    pub replicas: Arc<Replicas>,
    pub maps: MapUpdates,
}

impl Membership {
    /// One attempt to register the first target that waits to join.
    async fn join(&self, mds: &mut MdsLink, listening: &[Endpoint]) {
        let Some(j) = self.targets.next_joining() else { return };
        match self.register_with(mds, listening, Some(&j.target)).await {
            Ok(()) => {
                tracing::info!("target {} is registered", j.target.id());
                self.targets.tend(&j.target);
                let _ = j.done.send(Ok(j.target.id()));
            }
            Err(e) if matches!(e.code, Code::Inval | Code::NoSpc) || Instant::now() > j.until => {
                let _ = j.done.send(Err(e));
            }
            Err(e) => {
                tracing::warn!("a new target could not be registered, trying again: {e}");
                self.targets.join_later(j);
            }
        }
    }

    fn advertised(&self, listening: &[Endpoint]) -> Vec<String> {
        let all =
            if self.ctx.cfg.advertise.is_empty() { listening } else { &self.ctx.cfg.advertise };
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
            Error::new(Code::Protocol, format!("answer to a request for the map: {e}"))
        };
        Ok(pb::MapReply::decode(m.body).map_err(bad)?.map.unwrap_or_default())
    }

    fn register_request(
        &self,
        listening: &[Endpoint],
        all: &[Arc<Target>],
        boot_ids: &BTreeMap<Bytes, u64>,
    ) -> pb::RegisterRequest {
        let ids: Vec<_> = all.iter().map(|t| t.engine.identity()).collect();
        let fs =
            ids.iter().chain(&self.targets.identities()).map(|i| i.fs_uuid).find(|u| *u != [0; 16]);
        let targets = all.iter().zip(&ids).map(|(t, id)| pb::RegisterTarget {
            uuid: id.target_uuid.to_vec().into(),
            capacity: t.engine.usage().capacity,
            stamp: t.boot_id,
            id: id.target_id,
            sights: t.engine.notes().chain_views(),
            follows: Some(boot_ids.get(&id.target_uuid[..]).copied().unwrap_or(0)),
        });
        pb::RegisterRequest {
            name: self.ctx.cfg.name.clone(),
            endpoints: self.advertised(listening),
            targets: targets.collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            fs_uuid: fs.map(Vec::from).unwrap_or_default().into(),
            incarnation: self.targets.incarnation().0,
            rack: self.ctx.cfg.rack.clone(),
            level: self.ctx.cfg.feature_level,
        }
    }

    /// One attempt to register. `EINVAL`: this server or its targets belong elsewhere, and retrying
    /// does not help.
    pub(super) async fn register(&self, mds: &mut MdsLink, listening: &[Endpoint]) -> Result<()> {
        self.register_with(mds, listening, None).await
    }

    async fn register_with(
        &self,
        mds: &mut MdsLink,
        listening: &[Endpoint],
        new: Option<&Arc<Target>>,
    ) -> Result<()> {
        let map = self.ctx.map.load_full();
        // The targets that serve need their next heartbeat before their lease expires.
        let patience =
            new.map_or(REGISTER_TIMEOUT, |_| Duration::from_millis(self.ctx.cfg.heartbeat_ms));
        let now = Self::newest(mds, &map, patience).await?;
        self.group.set_fs(&now.fs_uuid);
        self.targets.refuse_unfit(&now);
        if let Some(new) = new {
            self.targets.check_fit(new, &now)?;
        }
        let boot_ids = now.targets.into_iter().map(|t| (t.uuid, t.stamp)).collect();
        let all: Vec<Arc<Target>> = self.targets.all().iter().chain(new).cloned().collect();
        let body = self.register_request(listening, &all, &boot_ids).encode_to_vec();
        let m = mds.call(&map, Message::new(opcode::REGISTER, body), patience).await?;
        let (r, fs) = decode_reply(&m.body, all.len())?;
        let now = r.map.as_ref().map_or(0, |m| m.incarnation);
        let known = all.iter().map(|t| t.engine.identity()).chain(self.targets.identities());
        if let Some(t) = known.into_iter().find(|t| !follows(t, now)) {
            let m = format!(
                "target {} belongs to incarnation {} of the metadata group; the answer is from \
                 {}, which was given up",
                t.target_id,
                Incarnation(t.incarnation),
                Incarnation(now)
            );
            mds.reject();
            return Err(Error::new(Code::NotLeader, m));
        }
        for (t, id) in all.iter().zip(&r.target_ids) {
            self.take_identity(t, *id, fs, now).await?;
        }
        if self.group.join(now) {
            // Another log: nothing of it is known, and all earlier sessions are evicted.
            self.revocations.forget_endings();
            self.lease.end();
        }
        self.ctx.set_id(r.node);
        if new.is_some() {
            self.targets.replace(all);
        }
        if let Some(map) = r.map {
            self.maps.apply(map)?;
        }
        Ok(())
    }

    /// Writes to a target's superblock what the cluster knows it as. `Inval`: it belongs to another
    /// cluster.
    async fn take_identity(
        &self,
        t: &Target,
        id: TargetId,
        fs: [u8; 16],
        incarnation: u64,
    ) -> Result<()> {
        let have = t.engine.identity();
        if have.fs_uuid != [0; 16] && have.fs_uuid != fs {
            let m =
                format!("target {} belongs to another cluster and was not changed", have.target_id);
            return Err(Error::new(Code::Inval, m));
        }
        let want = TargetIdentity {
            fs_uuid: fs,
            target_id: id,
            node: self.ctx.cfg.name.clone(),
            incarnation,
            ..have.clone()
        };
        if want != have {
            t.engine.set_identity(want).await?;
        }
        t.set_id(id);
        Ok(())
    }

    /// Registers, then sends heartbeats for ever.
    pub(super) async fn stay_registered(
        self: Arc<Self>,
        mut mds: MdsLink,
        listening: Vec<Endpoint>,
    ) {
        let period = Duration::from_millis(self.ctx.cfg.heartbeat_ms);
        loop {
            self.targets.retire_unreadable();
            self.join(&mut mds, &listening).await;
            let now = self.ctx.env.boot();
            self.targets.all().iter().for_each(|t| t.engine.expire_grants(now));
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
                () = self.ctx.kick.notified() => tokio::time::sleep(Duration::from_millis(5)).await,
                () = tokio::time::sleep(period) => {}
            }
        }
    }

    /// Brings back targets that left for lack of space, when there is space again and no replica
    /// with missing data still counts as in sync.
    fn look_for_space(&self) {
        let now = self.ctx.env.boot();
        let replicas: Vec<Arc<ChainMember>> = self.replicas.all();
        for t in self.targets.all().iter().filter(|t| t.lacks_space()) {
            // It must be out of all its chains in the map that this server acts on. While the
            // server has a lease for an older map, the target must stay out.
            let out = self.ctx.map.load().target(t.id()).is_some_and(|t| !t.alive);
            let told =
                out && !replicas.iter().any(|r| r.replica.id == t.id() && r.replica.has_failed());
            if told && t.engine.device().spare() >= RETURN && !t.table_is_full(now) {
                t.has_space_again();
            }
        }
    }

    fn heartbeat_request(&self) -> pb::HeartbeatRequest {
        let replicas: Vec<Arc<ChainMember>> = self.replicas.all();
        let (map_version, now) = (self.ctx.map.load().version(), self.ctx.env.boot());
        let report = |t: &Arc<Target>| {
            let u = t.engine.usage();
            let synced = replicas
                .iter()
                .filter(|r| r.replica.id == t.id() && r.has_synced())
                .map(|r| r.replica.chain)
                .collect();
            pb::TargetReport {
                target: t.id(),
                stamp: t.boot_id,
                capacity: u.capacity,
                used: u.used,
                failed: t.failed(),
                synced_chains: synced,
                chunks: u.chunks,
                lapses: t.lapses(),
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
            node: self.ctx.id(),
            map_version,
            targets: self.targets.all().iter().map(report).collect(),
            unreachable: self.ctx.peers.unreachable(),
            evicted_seen: self.revocations.evictions_over(),
            incarnation: self.targets.incarnation().0,
            leaseless: self.lease.left().is_zero(),
            number: self.lease.next_beat(),
            endings_known: self.revocations.endings_known(),
            level: self.ctx.cfg.feature_level,
        }
    }

    async fn heartbeat(&self, mds: &mut MdsLink, period: Duration) -> Result<()> {
        let map = self.ctx.map.load_full();
        self.look_for_space();
        let body = self.heartbeat_request().encode_to_vec();
        let sent = self.ctx.env.boot();
        let m = mds.call(&map, Message::new(opcode::HEARTBEAT, body), period * 2).await?;
        let bad = |e: prost::DecodeError| {
            Error::new(Code::Protocol, format!("answer to a heartbeat: {e}"))
        };
        let r = pb::HeartbeatReply::decode(&m.body[..]).map_err(bad)?;
        self.revocations.evict(&r.evicted);
        // The map first: a lease must not cover what the same answer takes away.
        if let Some(map) = r.map {
            self.maps.apply(map)?;
        }
        self.step_out(&r.step_out);
        let more_ended = r.endings.as_ref().is_some_and(|e| e.more);
        if let Some(endings) = &r.endings {
            self.revocations.end_rights(endings);
        }
        if r.evicted.len() >= MAX_EVICTED || more_ended {
            // More may be pending. After a restart, a lease would otherwise let in sessions that
            // were evicted long ago, and rights that have ended.
            self.ctx.kick.notify_one();
            return Ok(());
        }
        if r.lease_ms == 0 {
            self.give_up_lease();
            return Ok(());
        }
        // Clock rates may differ by a tenth, as those of clients may.
        let until = sent + Duration::from_millis(u64::from(r.lease_ms)) / 10 * 9;
        self.lease.extend(until);
        Ok(())
    }

    /// Fails targets that cannot take truncations or removals; their chains continue without them.
    fn step_out(&self, asked: &[TargetId]) {
        let now = self.ctx.env.boot();
        for t in
            self.targets.all().iter().filter(|t| asked.contains(&t.id()) && t.table_is_full(now))
        {
            t.fail(&Error::new(
                Code::NoSpc,
                "its chunk table accepts no writes: its file system is full",
            ));
            self.ctx.kick.notify_one();
        }
    }

    /// Other servers cannot reach this node. Once the metadata server knows that the lease is given
    /// up, it need not wait for its end.
    fn give_up_lease(&self) {
        if self.lease.end() {
            tracing::warn!("other storage servers cannot reach this one; giving up the lease");
            self.ctx.kick.notify_one();
        }
    }
}

/// The answer to a registration of so many targets, and the cluster's UUID in it.
fn decode_reply(body: &[u8], targets: usize) -> Result<(pb::RegisterReply, [u8; 16])> {
    let bad = |what: &str| Error::new(Code::Protocol, format!("answer to registration: {what}"));
    let r = pb::RegisterReply::decode(body).map_err(|e| bad(&e.to_string()))?;
    let fs = r.fs_uuid[..].try_into().map_err(|_| bad("cluster uuid is not 16 bytes"))?;
    if r.target_ids.len() != targets {
        return Err(bad("not one id per target"));
    }
    Ok((r, fs))
}
