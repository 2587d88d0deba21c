//! Linearizable reads: one read index answers all that wait, while later ones collect.

use strake_proto::{Error, Result};
use tokio::sync::oneshot;

pub(super) type Reply = oneshot::Sender<Result<()>>;

#[derive(Default)]
pub(super) struct Reads {
    number: u64,
    gathering: Vec<Reply>,
    /// Asked for under this number.
    asked: Option<(u64, Vec<Reply>)>,
    /// Allowed once this index is applied.
    allowed: Vec<(u64, Vec<Reply>)>,
}

impl Reads {
    pub(super) fn add(&mut self, reply: Reply) {
        self.gathering.push(reply);
    }
    pub(super) fn len(&self) -> usize {
        self.gathering.len()
    }

    /// The number under which to ask for a read index now, `None` if there is nothing to ask.
    pub(super) fn ask(&mut self) -> Option<u64> {
        if self.asked.is_some() || self.gathering.is_empty() {
            return None;
        }
        self.number += 1;
        self.asked = Some((self.number, std::mem::take(&mut self.gathering)));
        Some(self.number)
    }

    pub(super) fn allow(&mut self, number: u64, index: u64) {
        if let Some((_, replies)) = self.asked.take_if(|(n, _)| *n == number) {
            self.allowed.push((index, replies));
        }
    }

    pub(super) fn applied(&mut self, index: u64) {
        self.allowed.retain_mut(|(needed, replies)| {
            let wait = *needed > index;
            if !wait {
                replies.drain(..).for_each(|r| drop(r.send(Ok(()))));
            }
            wait
        });
    }

    /// Fails all reads: this member cannot answer any of them.
    pub(super) fn fail(&mut self, e: &Error) {
        self.answer(|| Err(e.clone()));
    }

    /// Allows all reads to look at what is applied now.
    pub(super) fn allow_all(&mut self) {
        self.answer(|| Ok(()));
    }

    fn answer(&mut self, with: impl Fn() -> Result<()>) {
        let asked = self.asked.take().into_iter().flat_map(|(_, r)| r);
        let allowed = self.allowed.drain(..).flat_map(|(_, r)| r);
        for r in self.gathering.drain(..).chain(asked).chain(allowed) {
            let _ = r.send(with());
        }
    }
}
