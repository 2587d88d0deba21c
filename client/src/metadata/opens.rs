//! What the metadata leader is told about open files: each open and close as it happens and, on a
//! new connection, all files that are open. The latter is a *reassertion*, which replaces what was
//! told before. The leader counts opens. If it were told of one close twice, it would take an open
//! file for closed, and free it if it has no name any more. So a close is sent once. When that
//! fails a new connection is made, and the reassertion on it leaves the closed file out. Should the
//! network deliver a close twice, the leader recognises its number.
//!
//! An open that was requested before a reassertion and is answered after it may be counted or not,
//! so everything is reasserted. During a reassertion on a connection that is in use no opens are
//! requested. Otherwise each would cause the next reassertion, for as long as programs open files.
//!
//! The right to write a file is tracked by numbers instead: a release names the last open that it
//! knows of, and has no effect after a later one. The release cannot cover an earlier open that is
//! not answered yet, so it waits for that.

use futures_util::future::BoxFuture;
use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use prost::Message as _;
use strake_fabric::Message;
use strake_proto::{Code, Ino, Result, opcode, pb};
use tokio::time::timeout;

use super::{
    link::{HELLO_TRY, META_TRY},
    openings::{Beside, Opening},
    service::Metadata,
};
use crate::{config::Counters, inode::O_ACCMODE};

/// How often a close is sent to an overloaded server, with a pause in between. After that
/// everything is reasserted to it, later.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);
/// Longest pause between two attempts at a reassertion.
const LONG_PAUSE: Duration = Duration::from_secs(10);
/// How long a reassertion waits for opens in progress; new opens wait with it.
const QUIET: Duration = Duration::from_millis(500);

impl Metadata {
    /// An open is about to be requested. `ino`: its file, if known.
    pub(crate) async fn opening(self: &Arc<Self>, ino: Option<Ino>, flags: u32) -> Opening {
        let gate = self.openings.gate.clone().read_owned().await;
        let number = (flags & O_ACCMODE != 0).then(|| self.openings.begin(ino));
        let since =
            if self.openings.beside.load(SeqCst) > 0 { u64::MAX } else { self.reassertions() };
        self.openings.opening(since, number, gate)
    }

    /// An open that was requested at `since` counts from now on (or it does not, and its close will
    /// be sent). A reassertion meanwhile did not include it, so another one follows.
    pub(crate) fn counted_open(self: &Arc<Self>, since: u64) {
        let now = self.reassertions();
        if now != since {
            self.spawn(move |me| async move { me.reassert_after(now).await });
        }
    }

    /// Spawns a task that keeps the client alive until it ends: the report must not come from a
    /// client that is half dropped.
    fn spawn<F>(self: &Arc<Self>, work: impl FnOnce(Arc<Metadata>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (owner, work) = (self.owner(), work(self.clone()));
        self.shared.env.spawn(async move {
            work.await;
            drop(owner);
        });
    }

    /// Reasserts everything that this session has open, whatever the leader assumed before. If the
    /// leader does not accept it now, it is repeated later.
    pub(crate) async fn reassert(self: &Arc<Self>) {
        self.reassert_after(self.reassertions()).await;
    }

    /// As [`Metadata::reassert`], unless there was a reassertion since the one of this number.
    async fn reassert_after(self: &Arc<Self>, number: u64) {
        let Err(mut e) = self.try_reassert(number).await else { return };
        self.spawn(move |me| async move {
            let mut pause = PAUSE;
            loop {
                tracing::debug!("reasserting: {e}");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONG_PAUSE);
                match me.try_reassert(me.reassertions()).await {
                    Err(again) if !me.shared.is_closed() => e = again,
                    _ => return,
                }
            }
        });
    }

    /// One attempt at a reassertion, unless there was another one after that of this number.
    /// Returns an error if no other task will reassert.
    async fn try_reassert(self: &Arc<Self>, number: u64) -> Result<()> {
        // A new connection reasserts everything. This must not run while opens wait.
        if self.leader().await.is_err() {
            return Ok(());
        }
        let (leader, e) = {
            // The reassertion must not overtake closes that are sent on the same connection.
            let _alone = self.closing.write().await;
            let quiet = timeout(QUIET, self.openings.gate.write()).await;
            let _beside = quiet.is_err().then(|| Beside::begin(&self.openings.beside));
            let (Some(s), true) = (self.current_session(), self.reassertions() == number) else {
                return Ok(());
            };
            let Ok(leader) = self.leader().await else { return Ok(()) };
            match self.renew_on(&leader, &s, true, HELLO_TRY).await {
                Ok(()) => return Ok(()),
                Err(e) => (leader, e),
            }
        };
        // Without its session no file is open.
        if self.leader_failed(&leader, &e).await || e.code == Code::NoSession {
            Ok(())
        } else {
            Err(e)
        }
    }

    /// Reports files that were closed at `since`, once for each handle.
    pub(crate) fn tell_closed<'a>(
        self: &'a Arc<Self>,
        inos: &'a [Ino],
        since: u64,
    ) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let Some(s) = self.current_session() else { return };
            let close = |ino: &Ino| pb::Op { op: Some(pb::op::Op::Close(pb::Close { ino: *ino })) };
            let ops: Vec<_> = inos.iter().map(close).collect();
            let Ok(turn) = s.begin(None) else { return };
            for _ in 0..ATTEMPTS {
                let beside = self.closing.read().await;
                let Ok(leader) = self.leader().await else { return };
                if self.reassertions() != since {
                    return;
                }
                let request = pb::MetaRequest {
                    session: s.id,
                    seq: turn.1,
                    lowest_unanswered: s.lowest_unanswered(),
                    creds: Some(pb::Creds::default()),
                    connection: leader.number,
                    ops: ops.clone(),
                    ..Default::default()
                };
                Counters::add(&self.shared.stats.meta_requests, 1);
                Counters::add(&self.shared.stats.operations, 1);
                match leader
                    .conn
                    .call(Message::new(opcode::META, request.encode_to_vec()), META_TRY)
                    .await
                {
                    Ok(_) => return,
                    Err(e) if e.code == Code::Overloaded => {
                        drop(beside);
                        tokio::time::sleep(PAUSE).await;
                    }
                    Err(e) if e.code == Code::NoSession => return self.session_gone(&s, &e),
                    Err(e) => {
                        tracing::debug!("closing files: {e}");
                        if self.leader_failed(&leader, &e).await {
                            return;
                        }
                        break;
                    }
                }
            }
            drop(turn);
            self.spawn(move |me| async move {
                tokio::time::sleep(LONG_PAUSE).await;
                if me.reassertions() == since {
                    me.reassert().await;
                }
            });
        })
    }
}
