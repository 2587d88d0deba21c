//! Lists of operations and their answers: what they change, and whether they may run twice.

use strake_fabric::Message;
use strake_proto::{Code, Error, Result, pb};

/// Decodes the body of a reply.
pub(crate) fn decode<M: prost::Message + Default>(m: &Message) -> Result<M> {
    M::decode(m.body.clone())
        .map_err(|e| Error::new(Code::Protocol, format!("a metadata server's reply: {e}")))
}

pub(crate) fn op(o: pb::op::Op) -> pb::Op {
    pb::Op { op: Some(o) }
}

/// The results of a list that succeeded, or its failure.
pub(crate) fn ok(mut results: Vec<pb::OpResult>) -> Result<Vec<pb::OpResult>> {
    match results.last_mut().and_then(|r| r.status.take()) {
        Some(s) if s.code != 0 => Err(s.into()),
        _ => Ok(results),
    }
}

/// The result of a list of one operation that succeeded, or its failure.
pub(crate) fn one(results: Vec<pb::OpResult>) -> Result<pb::OpResult> {
    let none = || Error::new(Code::Protocol, "an empty answer");
    ok(results)?.pop().ok_or_else(none)
}

/// Whether a list changes anything.
pub(crate) fn is_mutation(ops: &[pb::Op]) -> bool {
    ops.iter().any(strake_proto::ops::is_mutation)
}

/// Whether a list changes what other clients see: names, attributes, layouts or bytes. Operations
/// that only say which files are open do not count, nor does making earlier writes stable: files
/// that were written are opened again for that.
pub(crate) fn alters(ops: &[pb::Op]) -> bool {
    use pb::op::Op::*;
    let harmless =
        |o: &pb::Op| matches!(o.op, Some(Open(_) | Close(_) | Release(_) | SetLock(_) | Extend(_)));
    is_mutation(ops) && !ops.iter().all(harmless)
}

/// Whether running a list twice has the same effect as running it once, as far as its sender can
/// tell. Locks of a lost session are lost with it.
pub(crate) fn is_repeatable(ops: &[pb::Op]) -> bool {
    use pb::op::Op::*;
    ops.iter().all(|o| matches!(o.op, Some(Open(_) | Close(_) | Release(_) | SetLock(_))))
        || !is_mutation(ops)
}

/// Whether a repetition after a restart of the mount must find the answer of the first run. Other
/// lists may run twice.
pub(crate) fn keeps_number(ops: &[pb::Op]) -> bool {
    !is_repeatable(ops) && !ops.iter().all(|o| matches!(o.op, Some(pb::op::Op::Extend(_))))
}

pub(crate) fn is_resize(ops: &[pb::Op]) -> bool {
    ops.iter().any(|o| matches!(&o.op, Some(pb::op::Op::Setattr(s)) if s.size.is_some()))
}

/// A reply must be as long as the list, or end with a failure.
pub(crate) fn check(reply: pb::MetaReply, sent: usize) -> Result<pb::MetaReply> {
    let r = &reply.results;
    let failed_at = r.iter().position(|o| o.status.as_ref().is_some_and(|s| s.code != 0));
    match failed_at {
        None if r.len() == sent => Ok(reply),
        Some(i) if i + 1 == r.len() && i < sent => Ok(reply),
        _ => Err(Error::new(Code::Protocol, format!("{} results for {sent} operations", r.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_the_wrong_shape_are_refused() {
        let ok = pb::OpResult::default;
        let bad = || pb::OpResult {
            status: Some(Error::new(Code::NoEnt, "").to_status()),
            ..Default::default()
        };
        let reply = |results| pb::MetaReply { results, granted: Vec::new() };
        assert!(check(reply(vec![ok(), ok()]), 2).is_ok());
        assert!(check(reply(vec![ok(), bad()]), 3).is_ok());
        assert!(check(reply(vec![ok()]), 2).is_err());
        assert!(check(reply(vec![bad(), ok()]), 2).is_err());
        assert!(check(reply(vec![ok(), ok(), ok()]), 2).is_err());
    }

    #[test]
    fn a_read_only_client_alters_nothing() {
        use pb::op::Op::*;
        let op = |op| pb::Op { op: Some(op) };
        let open = |flags| op(Open(pb::Open { ino: 1, flags }));
        for good in [
            open(0),
            open(2),
            op(SetLock(Default::default())),
            op(Release(Default::default())),
            op(Extend(Default::default())),
        ] {
            assert!(!alters(&[good]));
        }
        for bad in [
            op(Setattr(Default::default())),
            op(Unlink(Default::default())),
            op(Setlayout(Default::default())),
        ] {
            assert!(alters(std::slice::from_ref(&bad)));
            assert!(alters(&[op(Release(Default::default())), bad]));
        }
    }

    #[test]
    fn reads_have_no_number() {
        use pb::op::Op::*;
        let op = |op| pb::Op { op: Some(op) };
        assert!(!is_mutation(&[
            op(Getattr(pb::GetAttr { ino: 1 })),
            op(Open(pb::Open { ino: 1, flags: 0 }))
        ]));
        assert!(
            is_mutation(&[op(Open(pb::Open { ino: 1, flags: 2 }))]),
            "it makes the session a writer"
        );
        assert!(is_mutation(&[
            op(Getattr(pb::GetAttr { ino: 1 })),
            op(Extend(pb::Extend { ino: 1, ..Default::default() }))
        ]));
    }
}
