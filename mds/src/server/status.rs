//! What `strake status` shows of a metadata server.

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use prost::Message as _;
use strake_links::traffic;
use strake_proto::{
    frame::MAX_BODY,
    health::{self, Notices},
    pb,
};

use super::{member::Member, membership::slow_targets, service::Mds};
use crate::cluster::{recovery, slow::words};

/// Queues are counted up to this number.
const STATUS_LIMIT: usize = 10_000;

pub(super) fn status(mds: &Mds) -> pb::StatusReply {
    let (member, followers) = (&mds.member, &mds.followers);
    let ns = &member.machine.namespace;
    let (header, map, now) = (ns.header(), member.map(), member.env.boot());
    let slow = slow_targets(member);
    let (notices, notice_codes) = notices(member, &map.map, &slow).split();
    let lead = member.lead.lock();
    let sessions = ns.sessions().into_iter().map(|(id, s)| pb::SessionStatus {
        id,
        hostname: s.hostname,
        pid: s.pid,
        version: s.version,
        idle_ms: lead
            .as_ref()
            .and_then(|l| l.sessions.idle_of(now, id))
            .map_or(0, |d| d.as_millis() as u64),
        opens: lead.as_ref().map_or(0, |l| l.sessions.opens_of(id) as u32),
        locks: ns.locked_by(id),
        address: mds.sessions.machine_of(id),
    });
    let targets = map.map.targets.iter().map(|t| pb::TargetStatus {
        id: t.id,
        capacity: t.capacity,
        used: t.used,
        lease_left_ms: lead.as_ref().map_or(0, |l| l.manager.lease_left(now, t).as_millis() as u64),
        slow: slow.iter().find(|s| s.target == t.id).and_then(|s| s.slow),
        ..Default::default()
    });
    pb::StatusReply {
        refused: Vec::new(),
        role: "mds".into(),
        node: member.own_id(),
        name: member.cfg.name(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: u64::from(std::process::id()),
        uptime_ms: now.saturating_sub(member.started).as_millis() as u64,
        raft: Some(member.node.status()),
        sessions: sessions.collect(),
        targets: targets.collect(),
        inodes: header.inodes,
        orphans: ns.backlog().orphans(STATUS_LIMIT).len() as u64,
        gc_queue: ns.backlog().gc_waiting(STATUS_LIMIT) as u64,
        notices,
        notice_codes,
        unix_ms: member.env.unix_ms(),
        sessions_left_out: 0,
        admin: member.cfg.admin.map(|a| a.to_string()).unwrap_or_default(),
        transports: traffic::transports(member.links.fabric()),
        map: Some(map.map.clone()),
        locks: ns.locked_by(0),
        lock_waits: lead.as_ref().map_or(0, |l| l.lock_waiters.len() as u64),
        follower_reads: followers.answered.load(Relaxed),
        follower_refusals: followers.refused.load(Relaxed),
    }
}

/// The status in a message, as asked for. Without its sessions if it would be too long with them.
pub(super) fn encoded(mds: &Mds, request: &pb::StatusRequest) -> Bytes {
    let mut s = status(mds);
    if request.brief {
        (s.map, s.sessions) = (None, Vec::new());
    }
    if s.encoded_len() > MAX_BODY as usize {
        s.sessions_left_out = s.sessions.len() as u64;
        s.sessions.clear();
    }
    s.encode_to_vec().into()
}

/// What an administrator should know, with a code where something is wrong.
fn notices(member: &Member, map: &pb::ClusterMap, slow: &[pb::SlowTarget]) -> Notices {
    let mut all = Notices::default();
    if member.disk_space.look().0 {
        all.found(
            health::METADATA_DISK_FULL,
            "the disk is almost full: nothing new is accepted here until there is space",
        );
    }
    damage_notices(member, &mut all);
    let awaited = recovery::all_awaited(map);
    if !awaited.is_empty() {
        let text = format!(
            "since the recovery {} chains wait to hear from targets {awaited:?}: start their servers, or see `strake mds give-up`",
            map.doubts.len()
        );
        all.found(health::RECOVERY_WAITS, text);
    }
    for text in slow_notices(map, slow) {
        all.found(health::TARGET_SLOW, text);
    }
    all
}

/// What was wrong with this server's own state, and what is done about it.
fn damage_notices(member: &Member, all: &mut Notices) {
    let raft = member.node.status();
    match (raft.no_state, raft.damage.as_str()) {
        (true, "") => all.found(
            health::MEMBER_COPYING,
            "waits for a copy of the metadata state from the leader",
        ),
        (true, why) => all.found(
            health::MEMBER_COPYING,
            format!("its metadata state was damaged ({why}): it waits for a copy from the leader"),
        ),
        (false, "") if raft.damages > 0 => all.found(
            health::MEMBER_REPAIRED,
            format!(
                "its metadata state was found damaged {} times since it started, and was copied \
                 again each time: check its disk",
                raft.damages
            ),
        ),
        (false, "") => {}
        (false, why) => all.found(
            health::MEMBER_DAMAGED,
            format!(
                "its metadata state is damaged ({why}), and no other member has one to copy: see docs/operations.md, 'Damaged metadata'"
            ),
        ),
    }
    if let Some(why) = &member.set_aside {
        let text = format!(
            "its metadata state was damaged when it started ({why}), was set aside and created \
             again: check its disk"
        );
        all.found(health::MEMBER_REPAIRED, text);
    }
}

/// Targets that are slow, and those that are drained because of that.
fn slow_notices(map: &pb::ClusterMap, slow: &[pb::SlowTarget]) -> Vec<String> {
    let drained = map.targets.iter().filter_map(|t| Some((t.id, t.slow.as_ref()?)));
    let named = |(id, s): (u32, &pb::Slow)| {
        format!(
            "target {id} is being drained because it was slow ({}): replace its device, or cancel \
             with `strake target keep {id}`",
            words(s)
        )
    };
    let mut all: Vec<String> = drained.clone().map(named).collect();
    let others = slow.iter().filter(|s| drained.clone().all(|(id, _)| id != s.target));
    all.extend(
        others.filter_map(|s| {
            Some(format!("target {} is slow: {}", s.target, words(s.slow.as_ref()?)))
        }),
    );
    all
}
