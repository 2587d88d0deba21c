//! The bulk copy of a state: sent to a member that is behind, received from the leader.

use protobuf::Message as _;
use raft::eraftpb::{ConfState, Message};
use strake_proto::{Code, Error, Result, pb};

use super::{
    super::snapshot::{self, Incoming, Outgoing},
    Driver, conf_bytes,
    inputs::Reply,
    log_queue::{Event, Job},
};

impl Driver {
    pub(super) fn finish_restore(&mut self, index: u64, term: u64, conf: &ConfState) -> Result<()> {
        self.sm.restore_end(index, term, conf_bytes(conf)?)?;
        self.sm.sync()?;
        (self.copies.incoming, self.conf_unknown, self.damage.found) = (None, false, None);
        tracing::info!(index, term, "took over the state of the leader");
        Ok(())
    }

    pub(super) fn send_snapshot(&mut self, mut message: Message) -> Result<()> {
        let to = message.to;
        let gone =
            || Error::new(Code::NoEnt, format!("the address of metadata server {to} is not known"));
        let endpoint = self.peers.endpoint(to).ok_or_else(gone)?;
        if self.core.has_lost_state() {
            return Err(Error::new(Code::NotServing, "this metadata server has no state itself"));
        }
        let view = self.sm.snapshot()?;
        let conf = match &view.conf_state[..] {
            [] => self.core.conf().clone(),
            b => ConfState::parse_from_bytes(b)
                .map_err(|e| Error::new(Code::Corrupt, e.to_string()))?,
        };
        let id = self.env.random_u64();
        let s = message.mut_snapshot();
        s.data = id.to_le_bytes().to_vec().into();
        let meta = s.mut_metadata();
        (meta.index, meta.term) = (view.index, view.term);
        meta.set_conf_state(conf);
        tracing::info!(
            to,
            index = view.index,
            "copying the state to a metadata server that is behind"
        );
        let out =
            Outgoing { id, index: view.index, term: view.term, view: view.view, message, endpoint };
        let (sender, events, index) = (self.peers.sender(), self.events_tx.clone(), view.index);
        let task = self.env.spawn(async move {
            let result = snapshot::send(sender, out).await;
            let _ = events.send(Event::Sent { to, id, result }).await;
        });
        if let Some((_, _, old)) = self.copies.outgoing.insert(to, (id, index, task)) {
            old.abort();
        }
        Ok(())
    }

    /// Part of a peer's state. The first part is accepted only from the leader that this member
    /// follows, and only if this member needs a copy.
    pub(super) fn chunk(&mut self, chunk: pb::SnapshotChunk, reply: Reply) -> Result<()> {
        if chunk.number == 0 {
            if self.core.leader() == chunk.from && self.core.needs_no_copy(chunk.index, chunk.term)
            {
                let _ = reply.send(Err(Error::new(
                    Code::Exist,
                    "this metadata server already has that state",
                )));
                return Ok(());
            }
            if let Some(e) = &self.stall.why {
                let _ = reply.send(Err(e.clone()));
                return Ok(());
            }
            if !self.core.wants_snapshot(chunk.from, chunk.index, chunk.term) {
                let _ = reply.send(Err(Error::new(
                    Code::NotServing,
                    "this metadata server expects no copy from there",
                )));
                return Ok(());
            }
            let op = self.core.begin_restore(chunk.index, chunk.term);
            let id = chunk.snapshot;
            self.copies.incoming = Some(Incoming {
                from: chunk.from,
                id,
                index: chunk.index,
                term: chunk.term,
                next: 1,
                complete: false,
                first: Some((chunk, reply)),
            });
            return self.log.write(Job { restoring: Some(id), ..Job::of(op) });
        }
        if !self.copies.expects(&chunk) {
            let _ =
                reply.send(Err(Error::new(Code::Stale, "another part of the copy was expected")));
            return Ok(());
        }
        self.copies.take_pairs(&*self.sm, chunk, reply)
    }
}
