//! What the metadata leader is told of open files: each open and close as it happens, and on a new connection all that are open, a
//! *reassertion*, which takes the place of what was told before. It counts: told of one close twice, it would take a file that is
//! open for closed, and free it if it has no name any more. So a close is told once; when that fails a new connection is made, and
//! on that all is told without it. Should the network bring it twice, the leader knows its number.
//!
//! Who may write a file goes by numbers instead: a release names the last open that it knows of, and has no effect after a later one.
//! An open of before that is not answered yet has no say in that, so a release waits for it.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::Message;
use strake_proto::{Code, Ino, opcode, pb};

use crate::{
    config::Counters,
    core::Core,
    inode::O_ACCMODE,
    mds::{HELLO_TRY, META_TRY},
    meta::op,
};

/// A server that has too much to do is asked so often, with a pause; then it counts a file as open until the next reassertion.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

/// Opens for writing that were asked for and whose handles do not count yet, by rising numbers. Which file one is of may be known only
/// by its answer.
#[derive(Default)]
pub(crate) struct Openings(Mutex<(u64, BTreeMap<u64, Option<Ino>>)>);

impl Openings {
    fn begin(&self, ino: Option<Ino>) -> u64 {
        let (last, under_way) = &mut *self.0.lock();
        *last += 1;
        under_way.insert(*last, ino);
        *last
    }

    /// The number of the last one.
    pub fn last(&self) -> u64 {
        self.0.lock().0
    }

    /// Whether one up to `number` is under way that may be of this file.
    pub fn may_open(&self, ino: Ino, number: u64) -> bool {
        self.0.lock().1.range(..=number).any(|(_, of)| of.is_none_or(|of| of == ino))
    }
}

/// An open, from before it is asked for until its handle counts.
pub(crate) struct Opening {
    core: Arc<Core>,
    /// See [`Core::reassertions`].
    pub since: u64,
    /// Of one for writing.
    number: Option<u64>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(n) = self.number {
            self.core.openings.0.lock().1.remove(&n);
        }
    }
}

impl Core {
    /// An open is about to be asked for. `ino`: of this file, if that is known.
    pub(crate) fn opening(self: &Arc<Self>, ino: Option<Ino>, flags: u32) -> Opening {
        let number = (flags & O_ACCMODE != 0).then(|| self.openings.begin(ino));
        Opening { core: self.clone(), since: self.reassertions(), number }
    }

    /// How often all was told, or is being told. To be taken before an open is asked for, and before a close is counted.
    pub(crate) fn reassertions(&self) -> u64 {
        self.reassertions.load(SeqCst)
    }

    /// All that is open from here on is not in this reassertion.
    pub(crate) fn begin_reassertion(&self) {
        self.reassertions.fetch_add(1, SeqCst);
    }

    /// An open counts from now on, which was asked for at `since`. If all was told meanwhile, that was without it.
    pub(crate) fn counted_open(self: &Arc<Self>, since: u64) {
        if self.reassertions() != since {
            let core = self.clone();
            self.env.spawn(async move { core.reassert().await });
        }
    }

    /// Tells everything that this session has open, whatever the leader believed before.
    pub(crate) async fn reassert(self: &Arc<Self>) {
        // What is told on the same connection must not be overtaken by this.
        let _alone = self.closing.write().await;
        let Some(s) = self.current_session() else { return };
        // Whoever is connected to next is told everything anyway.
        let Ok(leader) = self.leader().await else { return };
        if let Err(e) = self.renew_on(&leader, &s, true, HELLO_TRY).await {
            tracing::debug!("reasserting: {e}");
            self.leader_failed(&leader, &e).await;
        }
    }

    /// Tells of files that were closed at `since`, once for each handle.
    pub(crate) async fn tell_closed(self: &Arc<Self>, inos: &[Ino], since: u64) {
        let Some(s) = self.current_session() else { return };
        let close = |ino: &Ino| op(pb::op::Op::Close(pb::Close { ino: *ino }));
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
            Counters::add(&self.stats.meta_requests, 1);
            Counters::add(&self.stats.operations, 1);
            match leader.conn.call(Message::new(opcode::META, request.encode_to_vec()), META_TRY).await {
                Ok(_) => return,
                Err(e) if e.code == Code::Overloaded => {
                    drop(beside);
                    tokio::time::sleep(PAUSE).await;
                }
                Err(e) if e.code == Code::NoSession => return self.session_gone(&s),
                Err(e) => {
                    tracing::debug!("closing files: {e}");
                    return self.leader_failed(&leader, &e).await;
                }
            }
        }
    }
}
