//! Opens, renews and closes clients' sessions, and notes the files that they hold open.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use strake_fabric::{Peer, Role};
use strake_proto::{
    Bound, CapKey, Capability, Code, Error, Result, Rights, SessionId,
    cap::{as_of, same_bytes},
    pb,
};

use super::{
    call::{Asker, Call},
    heavy::machine,
    levels,
    member::Member,
    wire::{encode, misread, ok, tag},
};
use crate::sessions::{MAX_SESSIONS, WasCounted, owners::Owners};
use pb::{log_command::Command, op::Op};

const S_IFMT: u32 = 0o170_000;
const S_IFREG: u32 = 0o100_000;

/// See the module.
pub(super) struct SessionService {
    member: Arc<Member>,
    /// For making capabilities.
    cap_key: CapKey,
    owners: Mutex<Owners>,
}

impl SessionService {
    pub(super) fn new(member: Arc<Member>, cap_key: CapKey) -> SessionService {
        SessionService { member, cap_key, owners: Mutex::default() }
    }

    pub(super) fn disconnected(&self, peer: &Peer) {
        self.owners.lock().disconnected(peer.id);
    }

    /// The address that a session came from; empty if that is not known.
    pub(super) fn machine_of(&self, session: SessionId) -> String {
        let owners = self.owners.lock();
        let machine = owners.machine(session).unwrap_or_default();
        machine.split_once(':').map_or(machine, |(_, host)| host).to_string()
    }

    /// Forgets the owners of sessions that have ended.
    pub(super) fn forget_ended(&self) {
        self.owners.lock().retain(|id| self.member.machine.namespace.session(id).is_some());
    }

    /// Notes that the session was heard of; returns its epoch.
    pub(super) fn heard(&self, session: SessionId) -> Result<u64> {
        let now = self.member.env.boot();
        self.member.with_lead(|l| {
            if let Some(epoch) = l.sessions.heard(now, session)? {
                return Ok(epoch);
            }
            let Some(record) = self.member.machine.namespace.session(session) else {
                let m = match l.sessions.why(session) {
                    Some(why) => why.to_string(),
                    None => format!("session {session} has ended; mount again"),
                };
                return Err(Error::new(Code::NoSession, m));
            };
            l.sessions.learn(now, session, record.epoch);
            Ok(record.epoch)
        })
    }

    /// Refuses (`Access`) a peer that uses a session without having proved that it is its own.
    /// Sessions that have ended are not refused here.
    pub(super) fn owns(&self, peer: &Peer, session: SessionId) -> Result<()> {
        if peer.role == Role::Server || self.owners.lock().has_proved(peer.id, session) {
            return Ok(());
        }
        match self.member.machine.namespace.session(session) {
            Some(s) if s.proves => {
                let m = format!(
                    "session {session} belongs to another client, or was not named on this \
                     connection before"
                );
                Err(Error::new(Code::Access, m))
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn open(
        &self,
        peer: &Peer,
        mut request: pb::SessionOpenRequest,
    ) -> Result<Bytes> {
        let machine = machine(&peer.addr);
        self.member.leading()?;
        let level = std::mem::take(&mut request.level);
        levels::check(&self.member, level, Code::OpNotSupp, || "this client".into())?;
        self.member.with_lead(|_| self.owners.lock().may_open(peer.id, machine))?;
        self.member.with_lead(|l| {
            if l.sessions.len() < MAX_SESSIONS {
                return Ok(());
            }
            let m = "that is the limit of a file system; `strake status` shows whose they are";
            Err(Error::new(
                Code::Overloaded,
                format!("{} sessions are open, {m}", l.sessions.len()),
            ))
        })?;
        let reply = self.member.propose(Command::SessionOpen(request)).await?;
        let Some(pb::log_reply::Reply::SessionOpen(mut r)) = reply.reply else {
            return Err(misread());
        };
        self.owners.lock().prove(peer.id, machine, r.session);
        // It was resumed and has ended meanwhile, or is about to: the next try gets a new session.
        let ending = |e: Error| {
            if e.code == Code::NoSession { Error { code: Code::Overloaded, ..e } } else { e }
        };
        self.heard(r.session).map_err(ending)?;
        levels::renewed(&self.member, r.session, level).await?;
        r.term_ms = u32::try_from(self.member.cfg.session_term_ms).unwrap_or(u32::MAX);
        Ok(self.member.map().encode_behind(&r, tag::SESSION_OPEN).into())
    }

    pub(super) async fn renew(
        &self,
        peer: &Peer,
        request: pb::SessionRenewRequest,
    ) -> Result<Bytes> {
        let own = |s: pb::SessionRecord| same_bytes(&s.client_uuid, &request.client_uuid);
        if self.member.machine.namespace.session(request.session).is_some_and(own) {
            self.owners.lock().prove(peer.id, machine(&peer.addr), request.session);
        }
        self.owns(peer, request.session)?;
        levels::renewed(&self.member, request.session, request.level).await?;
        self.heard(request.session)?;
        let term = self.member.leading()?;
        self.hello(term, &request)?;
        // A leader that was replaced meanwhile must not promise another term.
        self.member.node.read_barrier().await?;
        if request.reassert {
            // Reports on a newer connection are newer.
            self.member.recalls.in_time(
                term,
                Asker { session: request.session, connection: request.connection },
            )?;
            self.member.with_lead(|l| l.sessions.reassert(request.session, &request.opens))?;
        }
        let map = self.member.map();
        let newer = map.version() > request.map_version;
        let lease_ms = self.member.recalls.renewed(term, request.session, request.connection)?;
        let reply = pb::SessionRenewReply { map: None, lease_ms };
        Ok(if newer {
            map.encode_behind(&reply, tag::SESSION_RENEW).into()
        } else {
            encode(&reply)
        })
    }

    pub(super) async fn close(
        &self,
        peer: &Peer,
        request: pb::SessionCloseRequest,
    ) -> Result<Bytes> {
        self.owns(peer, request.session)?;
        self.heard(request.session)?;
        self.member
            .propose(Command::SessionEnd(pb::SessionEnd {
                sessions: vec![request.session],
                evict: false,
            }))
            .await?;
        self.owners.lock().leave(request.session);
        let _ = self.member.with_lead(|l| {
            l.sessions.remove(request.session);
            l.lock_waiters.remove(request.session);
            Ok(())
        });
        Ok(encode(&pb::SessionCloseReply {}))
    }

    /// Handles the first renewal on a connection, which says that its sender has forgotten all
    /// leases.
    fn hello(&self, term: u64, r: &pb::SessionRenewRequest) -> Result<()> {
        if r.hello && r.connection != 0 {
            let by = Asker { session: r.session, connection: r.connection };
            self.member.recalls.hello(term, by, r.lives_on)?;
            if self.member.machine.namespace.session(r.session).is_none() {
                self.member.recalls.gone(term, r.session, r.lives_on)?;
            }
        }
        Ok(())
    }

    /// Records the opens and closes of an answered list, once however often the list arrives; opens
    /// get their capability. `Disconnected` for a list that comes late: its sender has reported its
    /// open files since, on a newer connection. `looked`: the first log entry that was not applied
    /// when the read permission was checked.
    pub(super) fn note_handles(
        &self,
        call: &Call<'_>,
        looked: u64,
        ops: &[pb::Op],
        results: &mut [pb::OpResult],
    ) -> Result<()> {
        let touches = |o: &pb::Op| {
            matches!(o.op, Some(Op::Open(_) | Op::Create(_) | Op::Tmpfile(_) | Op::Close(_)))
        };
        if !ops.iter().any(touches) {
            return Ok(());
        }
        self.member.recalls.in_time(call.term, call.by)?;
        let session = call.session();
        // The list ran before its session ended. When the client asks again, it learns of that end.
        let ended = |e: Error| {
            if e.code == Code::NoSession { Error { code: Code::Disconnected, ..e } } else { e }
        };
        self.member.with_lead(|l| {
            let was = l
                .sessions
                .was_counted(session, call.by.connection, (call.seq, call.lowest_unanswered))
                .map_err(ended)?;
            for (op, r) in ops.iter().zip(results) {
                if !ok(r) {
                    // It may come again and succeed.
                    return Ok(());
                }
                let flags = match &op.op {
                    Some(Op::Open(o)) => o.flags,
                    Some(Op::Create(c)) => c.flags,
                    Some(Op::Tmpfile(t)) => t.flags,
                    Some(Op::Close(c)) => {
                        if was == WasCounted::No {
                            l.sessions.close(session, if c.ino == 0 { r.ino } else { c.ino });
                        }
                        continue;
                    }
                    _ => continue,
                };
                let ino = r.attr.as_ref().map_or(r.ino, |a| a.ino);
                if was != WasCounted::Yes
                    && let Err(e) = l.sessions.open(session, ino)
                {
                    *r = pb::OpResult { status: Some(e.to_status()), ..Default::default() };
                    return Ok(());
                }
                r.capability = self.capability(call, looked, flags, r).unwrap_or_default();
            }
            l.sessions.count(session, call.by.connection, call.seq);
            Ok(())
        })
    }

    /// The capability for a regular file's data, with the rights of its open flags; the open itself
    /// was allowed.
    fn capability(
        &self,
        call: &Call<'_>,
        looked: u64,
        flags: u32,
        r: &pb::OpResult,
    ) -> Option<Bytes> {
        let attr = r.attr.as_ref().filter(|a| a.mode & S_IFMT == S_IFREG)?;
        let layout = r.layout.as_ref()?;
        let data = layout.components.first()?.data_id;
        let rights = match flags & 3 {
            0 => Rights::READ,
            1 => Rights::WRITE.and(Rights::TRIM),
            2 => Rights::READ.and(Rights::WRITE).and(Rights::TRIM),
            _ => return None,
        };
        let expiry_ms = self.member.env.unix_ms() + self.member.cfg.capability_ms;
        let bound = Bound::of(layout, &self.member.map());
        // A capability to write has a log entry.
        let as_of = as_of(if r.writer != 0 { r.writer } else { looked });
        let (session, session_epoch) = (call.session(), call.epoch);
        let cap = Capability {
            ino: attr.ino,
            data,
            session,
            session_epoch,
            expiry_ms,
            rights,
            bound,
            as_of,
        };
        Some(Bytes::copy_from_slice(&self.cap_key.seal(&cap)))
    }
}
