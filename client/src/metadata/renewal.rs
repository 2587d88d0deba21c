//! The session and its leases: opening, renewal, loss and end.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::Message;
use strake_proto::{Code, Error, Ino, Result, SessionId, opcode, pb};

use super::{
    link::{HELLO_TRY, Leader, META_TRY},
    ops::decode,
    service::Metadata,
    session::Session,
};
use crate::{
    config::Counters, leases::lease_cache::forgotten, rows::Holder, shared::unreachable::Kind,
};

/// How often leases are renewed. They live about three times as long.
const LEASE_RENEWAL: Duration = Duration::from_millis(400);

impl Metadata {
    /// The session; opens one if there is none.
    pub(crate) async fn session(self: &Arc<Self>) -> Result<Arc<Session>> {
        self.session_within(self.shared.cfg.op_timeout).await
    }

    pub(crate) fn session_within<'a>(
        self: &'a Arc<Self>,
        limit: Duration,
    ) -> BoxFuture<'a, Result<Arc<Session>>> {
        Box::pin(async move {
            if let Some(s) = self.current_session() {
                return Ok(s);
            }
            let _one = self.session_change.lock().await;
            if let Some(s) = self.current_session() {
                return Ok(s);
            }
            if self.shared.is_ending() {
                return Err(Error::new(Code::Io, "the client is being closed"));
            }
            let body = pb::SessionOpenRequest {
                client_uuid: self.shared.uuid.to_vec().into(),
                hostname: self.shared.cfg.hostname.clone(),
                version: self.shared.cfg.version.clone(),
                pid: self.shared.cfg.pid,
                dead: self.shared.cfg.dead.iter().map(|uuid| uuid.to_vec().into()).collect(),
                incarnation: self.shared.map().map.incarnation,
                write_back: self.shared.cfg.write_back,
                proves: true,
                level: self.shared.cfg.feature_level,
            };
            let mut at = self.shared.attempts_for("opening a session", limit);
            let body = Bytes::from(body.encode_to_vec());
            let m = self.call(opcode::SESSION_OPEN, |_| body.clone(), META_TRY, &mut at).await;
            let m = m.map_err(|e| match (e.code, self.shared.unreachable()) {
                (Code::TimedOut, list) if !list.is_empty() => Error::new(
                    Code::TimedOut,
                    format!("no answer in {:.0} s from {list}", limit.as_secs_f64()),
                ),
                _ => e,
            })?;
            let mut r: pb::SessionOpenReply = decode(&m)?;
            if let Some(map) = r.map.take() {
                self.install_map(map)?;
            }
            let handover = self.shared.cfg.handover.clone();
            if let Some(k) = &handover {
                k.set_session(r.session);
            }
            let may_hold_back = self.shared.cfg.write_back && r.write_back;
            let s = Arc::new(Session::new(&r, may_hold_back, handover));
            if self.shared.cfg.handover.as_ref().is_some_and(|k| k.former_session() == s.id) {
                // Fences what an earlier process had on its way and will not be repeated.
                s.next_round();
            }
            *self.session.lock() = Some(s.clone());
            Ok(s)
        })
    }

    /// The servers no longer know `session`: its unstable writes are lost to their files. The next
    /// operation opens a new session.
    pub(crate) fn session_gone(&self, session: &Session, why: &Error) {
        let owner = self.owner();
        let mut current = self.session.lock();
        if current.as_ref().is_none_or(|s| s.id != session.id) {
            return;
        }
        // This must happen before there is another session, in which the lost end would be
        // reported.
        if let Some(owner) = &owner {
            owner.forget_ends(session.id);
        }
        *current = None;
        drop(current);
        // No need to wait: the leader waits until the leases have expired, and by then the copies
        // have, too.
        if let Some(owner) = &owner {
            drop(owner.forget_all());
            owner.forget_kept();
        }
        Counters::add(&self.shared.stats.sessions_lost, 1);
        tracing::warn!(
            session = session.id,
            "the session is gone ({}); unstable writes of open files are lost",
            why.message
        );
        if let Some(owner) = owner {
            owner.lost(session.id);
        }
    }

    /// The leader, if this client has leases from it, and the session of those leases.
    pub async fn greeted_leader(self: &Arc<Self>) -> Option<(Leader, SessionId)> {
        let session = self.current_session()?.id;
        let leader = self.leader().await.ok()?;
        self.lease_cache.is_greeted(session, leader.number).then_some((leader, session))
    }

    pub(crate) fn renew_interval(&self) -> Duration {
        let term = self.current_session().map_or(Duration::from_secs(4), |s| s.term);
        (term / 4).clamp(Duration::from_millis(10), LEASE_RENEWAL)
    }

    /// Renews the session and its leases. On a new connection it forgets everything and says hello.
    pub(crate) fn renew_on<'a>(
        &'a self,
        leader: &'a Leader,
        s: &'a Session,
        reassert: bool,
        patience: Duration,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let closed = || Error::new(Code::Io, "the client was closed");
            let owner = self.owner().ok_or_else(closed)?;
            let hello = !self.lease_cache.is_greeted(s.id, leader.number);
            if hello {
                forgotten(owner.forget_all()).await;
            }
            let opens = reassert.then(|| {
                owner.forget_kept();
                self.begin_reassertion();
                // One entry per handle, because the server counts.
                owner.open_in(s.id)
            });
            let body = self.renewal(leader, s, hello, opens);
            let m = Message::new(opcode::SESSION_RENEW, body.encode_to_vec());
            Counters::add(&self.shared.stats.meta_requests, 1);
            let sent = self.shared.env.boot();
            let m = leader.conn.call(m, patience).await?;
            let r: pb::SessionRenewReply = decode(&m)?;
            if r.lease_ms != 0 {
                let term = Duration::from_millis(u64::from(r.lease_ms));
                if self.lease_cache.renewed(self.shared.env.boot(), sent, term) {
                    owner.forget_bytes();
                }
                self.lease_cache.greeted(s.id, leader.number);
                if hello {
                    self.greeted.notify_one();
                }
            } else {
                // The same server was elected again. Requests sent on this connection may still
                // run, so hello is said on another one.
                self.lease_cache.greeted(0, 0);
                if !hello {
                    Holder::NoLeases.taken();
                    return Err(Error::new(
                        Code::Disconnected,
                        "the metadata leader has no leases for this connection",
                    ));
                }
            }
            match r.map {
                Some(map) => self.install_map(map),
                None => Ok(()),
            }
        })
    }

    /// The request for a renewal; `opens` are the open files, to reassert them.
    fn renewal(
        &self,
        leader: &Leader,
        s: &Session,
        hello: bool,
        opens: Option<Vec<Ino>>,
    ) -> pb::SessionRenewRequest {
        let map = self.shared.map();
        let reassert = opens.is_some();
        // The owner of the session, sent once per connection.
        let client_uuid = if hello || reassert {
            Bytes::copy_from_slice(&self.shared.uuid)
        } else {
            Bytes::new()
        };
        // The kernel may still use what an earlier daemon of the mount told it.
        let lives_on =
            hello && self.shared.cfg.handover.as_ref().is_some_and(|k| k.former_session() == s.id);
        pb::SessionRenewRequest {
            session: s.id,
            map_version: map.version(),
            reassert,
            opens: opens.unwrap_or_default(),
            connection: leader.number,
            hello,
            lives_on,
            incarnation: map.map.incarnation,
            client_uuid,
            level: self.shared.cfg.feature_level,
        }
    }

    /// Background task: keeps the session, or replaces a lost one and reopens the open files.
    pub(crate) async fn renew(self: Arc<Self>) {
        let Some(s) = self.current_session() else {
            if self.shared.is_ending() {
                return;
            }
            match self.session().await {
                Ok(_) => {
                    if let Some(owner) = self.owner() {
                        owner.reopen_all().await;
                    }
                }
                Err(e) => tracing::warn!("{e}"),
            }
            return;
        };
        let outcome = match self.leader().await {
            Ok(leader) => match self.renew_on(&leader, &s, false, HELLO_TRY).await {
                Ok(()) => Ok(()),
                Err(e) => {
                    self.leader_failed(&leader, &e).await;
                    Err(e)
                }
            },
            Err(e) => Err(e),
        };
        match outcome {
            Ok(()) => self.shared.answered(Kind::Metadata, ""),
            Err(e) if e.code == Code::NoSession => self.session_gone(&s, &e),
            // The pause is short: this runs again before the term is over.
            Err(e) => tracing::debug!("renewing the session: {e}"),
        }
    }

    /// Ends the session; that closes the open files.
    pub(crate) async fn end_session(self: &Arc<Self>) -> Result<()> {
        // Set this before the session is removed: a task that finds no session must not open
        // another one.
        self.shared.set_ending();
        let Some(s) = self.session.lock().take() else { return Ok(()) };
        let body = Bytes::from(pb::SessionCloseRequest { session: s.id }.encode_to_vec());
        let mut at = self.shared.attempts_for("closing the session", Duration::from_secs(5));
        match self
            .call(opcode::SESSION_CLOSE, |_| body.clone(), Duration::from_secs(2), &mut at)
            .await
        {
            Err(e) if e.code != Code::NoSession => Err(e),
            _ => Ok(()),
        }
    }
}
