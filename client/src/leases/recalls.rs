//! Serves the recalls of the metadata leader. A request waits at the leader, again and again. The
//! client forgets, or reports, what the answer names, and acknowledges it with the next request.
//! See `docs/leases.md`.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use prost::Message as _;
use strake_fabric::Message;
use strake_proto::{Ino, Result, SessionId, opcode, pb};
use tokio::time::{sleep, timeout};

use crate::{
    config::Counters,
    core::Core,
    leases::lease_cache::forgotten,
    metadata::{
        link::{Leader, META_TRY},
        ops::decode,
    },
};

/// How often to check for leases while there are none.
const LOOK: Duration = Duration::from_millis(250);

/// How long a recall waits for a mount that is starting. Longer than the kernel uses what an
/// earlier daemon told it.
const COPIES: Duration = Duration::from_secs(2);
/// Pause after a request that failed.
const PAUSE: Duration = Duration::from_millis(20);

/// A report that takes longer than this is announced as being in progress.
const WORKING: Duration = Duration::from_secs(1);

/// Serves recalls until the client is gone.
pub(crate) async fn serve(core: Weak<Core>) {
    let mut waits = true;
    loop {
        let Some(c) = core.upgrade().filter(|c| !c.shared.is_closed()) else { return };
        let Some((leader, session)) = c.metadata.greeted_leader().await else {
            let _ = timeout(LOOK, c.metadata.leases_begin()).await;
            continue;
        };
        if std::mem::take(&mut waits)
            && c.shared.cfg.handover.as_ref().is_some_and(|k| k.former_session() == session)
        {
            // What an earlier daemon told the kernel may be recalled, too.
            let _ = timeout(COPIES, c.lease_cache.copies_known()).await;
        }
        match c.ask_recalls(&leader, session, Told::default()).await {
            // An empty answer usually comes late. The pause prevents a busy loop if the leader
            // answers at once.
            Ok(r) if r == pb::RecallReply::default() => sleep(PAUSE).await,
            Ok(r) => c.answer_asked(&leader, session, r),
            Err(e) => {
                tracing::debug!("asking for recalls: {e}");
                c.metadata.leader_failed(&leader, &e).await;
                sleep(PAUSE).await;
            }
        }
    }
}

/// What a request tells: finished reports, reports in progress, and answered questions about locks.
#[derive(Default)]
struct Told {
    reported: Vec<u64>,
    working: Vec<u64>,
    locks_checked: Vec<u64>,
}

impl Core {
    /// One request: acknowledges what is forgotten, tells about reports, and forgets what the
    /// answer recalls. The leader answers at once when there is something to tell.
    async fn ask_recalls(
        self: &Arc<Self>,
        leader: &Leader,
        session: SessionId,
        Told { reported, working, locks_checked }: Told,
    ) -> Result<pb::RecallReply> {
        let connection = leader.number;
        let acknowledged = self.recalls.upto(connection);
        let request = pb::RecallRequest {
            session,
            connection,
            acknowledged,
            reported,
            working,
            checks_locks: true,
            locks_checked,
        };
        let m = leader
            .conn
            .call(Message::new(opcode::RECALL, request.encode_to_vec()), META_TRY)
            .await?;
        let r: pb::RecallReply = decode(&m)?;
        let inos: Vec<Ino> = r.recalls.iter().map(|r| r.ino).collect();
        let forgetting = self.lease_cache.recalled(&inos);
        if !inos.is_empty() {
            Counters::add(&self.shared.stats.recalls, inos.len() as u64);
            let mut cache = self.cache.lock();
            inos.iter().for_each(|ino| cache.forget(*ino));
        }
        forgotten(forgetting).await;
        // Each answer has all outstanding recalls, the lowest numbers first.
        if let Some(last) = r.recalls.iter().map(|r| r.number).max() {
            self.recalls.note(connection, last);
        }
        Ok(r)
    }

    fn answer_asked(self: &Arc<Self>, leader: &Leader, session: SessionId, asked: pb::RecallReply) {
        for asked in asked.reports {
            self.shared.env.spawn(self.clone().report(leader.clone(), session, asked));
        }
        for pb::Recall { number, ino, .. } in asked.locks {
            let (core, leader) = (self.clone(), leader.clone());
            self.shared.env.spawn(async move {
                core.check_locks(ino).await;
                let answer = || Told { locks_checked: vec![number], ..Told::default() };
                core.tell_until_told(&leader, session, answer).await;
            });
        }
    }

    /// Whether the leader still waits for what it asked on this connection: on a new one it asks
    /// again.
    fn is_asked(&self, leader: &Leader, session: SessionId) -> bool {
        self.lease_cache.is_greeted(session, leader.number)
            && !leader.conn.is_closed()
            && !self.shared.is_closed()
    }

    async fn tell_until_told(
        self: &Arc<Self>,
        leader: &Leader,
        session: SessionId,
        told: impl Fn() -> Told,
    ) {
        while self.is_asked(leader, session) {
            match self.ask_recalls(leader, session, told()).await {
                Ok(more) => return self.answer_asked(leader, session, more),
                Err(e) => tracing::debug!("answering recalls: {e}"),
            }
            sleep(PAUSE).await;
        }
    }

    /// Another client needs the state of a file that may be written here, or its pages.
    async fn report(self: Arc<Self>, leader: Leader, session: SessionId, asked: pb::Recall) {
        let pb::Recall { number, ino, pages } = asked;
        let core = self.clone();
        let mut telling = self.shared.env.spawn(async move {
            // A previous process of the mount may have left dirty data.
            core.writeback.inheritance_known().await;
            if pages {
                return core.give_pages_back(ino).await;
            }
            forgotten(core.lease_cache.give_back(ino)).await;
            if let Some(inode) = core.files.live_inode(ino) {
                inode.awaited.none().await;
                let _placed = inode.placing.lock().await;
                if let Err(e) = core.tell_all(&inode).await {
                    tracing::warn!(
                        ino,
                        "another client asks for the size of a file, and it could not be \
                         reported: {e}"
                    );
                }
            }
        });
        // Sending dirty data may have to wait long for storage servers.
        while timeout(WORKING, &mut telling).await.is_err() {
            if !self.is_asked(&leader, session) {
                return;
            }
            let working = Told { working: vec![number], ..Told::default() };
            match self.ask_recalls(&leader, session, working).await {
                Ok(more) => self.answer_asked(&leader, session, more),
                Err(e) => tracing::debug!("announcing a report that takes long: {e}"),
            }
        }
        self.tell_until_told(&leader, session, || Told {
            reported: vec![number],
            ..Told::default()
        })
        .await;
    }
}
