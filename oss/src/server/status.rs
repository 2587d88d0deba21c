//! The status of a storage server, for administrators.

use std::{collections::BTreeSet, sync::Arc};

use strake_proto::{
    Error, TargetId,
    health::{self, Notices},
    pb,
};

use super::{node::Node, refused_targets, target::Target};

/// The status as of now.
pub(super) fn status(node: &Node) -> pb::StatusReply {
    let ctx = &node.ctx;
    let lease_left_ms = node.lease.left().as_millis() as u64;
    let refused = refused(node);
    let mut notices = Notices::default();
    for r in &refused {
        notices.found(health::TARGET_REFUSED, refused_targets::notice(r));
    }
    for id in node.targets.emptied() {
        let text = format!(
            "target {id} had lost its chunk table when or before this server started; it came \
             back empty and is filled by a resync"
        );
        notices.found(health::TARGET_EMPTIED, text);
    }
    node.targets.all().iter().for_each(|t| notices_of(node, t, &mut notices));
    let (notices, notice_codes) = notices.split();
    pb::StatusReply {
        role: "oss".into(),
        node: ctx.id(),
        name: ctx.cfg.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: u64::from(std::process::id()),
        uptime_ms: ctx.env.boot().saturating_sub(ctx.started).as_millis() as u64,
        map: Some(ctx.map.load().map.clone()),
        notices,
        notice_codes,
        unix_ms: ctx.env.unix_ms(),
        admin: ctx.cfg.admin.map(|a| a.to_string()).unwrap_or_default(),
        targets: node.targets.all().iter().map(|t| status_of(t, lease_left_ms)).collect(),
        transports: ctx.peers.transports(),
        refused,
        ..pb::StatusReply::default()
    }
}

fn status_of(t: &Target, lease_left_ms: u64) -> pb::TargetStatus {
    let u = t.engine.usage();
    let (device, found) = (t.engine.device(), t.damage.counts());
    pb::TargetStatus {
        id: t.id(),
        device: device.name(),
        capacity: u.capacity,
        used: u.used,
        chunks: u.chunks,
        direct_io: device.direct(),
        reads: u.reads,
        writes: u.writes,
        read_bytes: u.read_bytes,
        write_bytes: u.write_bytes,
        checksum_errors: u.checksum_errors,
        lease_left_ms,
        damaged: found.damaged,
        repaired: found.repaired,
        lost: found.lost,
        times: Some(t.times()),
        slow: None,
    }
}

/// What an administrator should know about a target that serves.
fn notices_of(node: &Node, t: &Arc<Target>, notices: &mut Notices) {
    match t.unreadable().as_ref().map(Error::to_string) {
        Some(why) => notices.found(
            health::TARGET_FAILED,
            format!(
                "target {} has failed; it comes back empty when none of its data is needed: {why}",
                t.id()
            ),
        ),
        None if t.failed() => notices.found(
            health::TARGET_FAILED,
            format!(
                "target {} has failed; replace its device, then send SIGHUP to the server",
                t.id()
            ),
        ),
        None => {}
    }
    if t.lacks_space() {
        let text = format!(
            "target {} has left its chains, because its file system is full; make space there, \
             and it comes back by itself",
            t.id()
        );
        notices.found(health::TARGET_LACKS_SPACE, text);
    }
    let lost = t.damage.counts().lost;
    if lost > 0 {
        let text = format!(
            "target {}: {lost} chunks have no good copy; see `strake scrub status`",
            t.id()
        );
        notices.found(health::NO_GOOD_COPY, text);
    }
    for r in node.replicas.all().iter().filter(|r| r.replica.id == t.id()) {
        let kept = r.departure.kept();
        if kept > 0 {
            let text = format!(
                "target {} has left chain {} and keeps {kept} chunks of it, which are damaged on replicas in sync; see `strake scrub status`",
                t.id(),
                r.replica.chain,
            );
            notices.found(health::CHUNKS_KEPT, text);
        }
    }
    if !t.engine.device().direct() {
        notices.note(format!(
            "target {} runs without direct I/O, which its file system does not support",
            t.id()
        ));
    }
}

/// Targets out of service. If one folder does not tell its target, and exactly one target of this
/// server is missing in the cluster, it must be that one.
fn refused(node: &Node) -> Vec<pb::RefusedTarget> {
    let (refused, map, id) = (node.targets.refused(), node.ctx.map.load(), node.ctx.id());
    let known: BTreeSet<TargetId> =
        node.targets.identities().iter().map(|id| id.target_id).collect();
    let mut missing =
        map.map.targets.iter().filter(|t| t.node == id && !known.contains(&t.id)).map(|t| t.id);
    let only =
        (missing.next(), missing.next(), refused.iter().filter(|o| o.id().is_none()).count());
    let number = if let (Some(id), None, 1) = only { Some(id) } else { None };
    refused.iter().map(|o| o.status(number.filter(|_| o.id().is_none()))).collect()
}
