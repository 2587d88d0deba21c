//! A fabric that counts the requests that pass through it, by opcode.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Pool, Service};
use strake_proto::{Result, opcode};

/// Requests that were sent, by opcode, and the bytes of their answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub requests: BTreeMap<u16, u64>,
    pub answered_bytes: u64,
}

impl Counts {
    /// What was added since `before`.
    pub fn since(&self, before: &Counts) -> Counts {
        let less = |(op, n): (&u16, &u64)| (*op, n - before.requests.get(op).copied().unwrap_or(0));
        Counts {
            requests: self.requests.iter().map(less).collect(),
            answered_bytes: self.answered_bytes - before.answered_bytes,
        }
    }

    pub fn of(&self, op: u16) -> u64 {
        self.requests.get(&op).copied().unwrap_or(0)
    }

    /// A text for the report.
    pub fn text(&self) -> String {
        let (meta, recall, renew) =
            (self.of(opcode::META), self.of(opcode::RECALL), self.of(opcode::SESSION_RENEW));
        format!("{meta} metadata, {recall} recall, {renew} renewal")
    }
}

pub struct Counting {
    inner: Arc<dyn Fabric>,
    counts: Arc<Mutex<Counts>>,
}

impl Counting {
    pub fn new(inner: Arc<dyn Fabric>, counts: Arc<Mutex<Counts>>) -> Counting {
        Counting { inner, counts }
    }
}

#[async_trait]
impl Fabric for Counting {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let inner = self.inner.connect(to, back).await?;
        Ok(Arc::new(Counted { inner, counts: self.counts.clone() }))
    }
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        self.inner.listen(at, service).await
    }
    fn pool(&self) -> &Pool {
        self.inner.pool()
    }
}

struct Counted {
    inner: Arc<dyn Connection>,
    counts: Arc<Mutex<Counts>>,
}

#[async_trait]
impl Connection for Counted {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        *self.counts.lock().requests.entry(request.opcode).or_insert(0) += 1;
        let answer = self.inner.call(request, timeout).await?;
        self.counts.lock().answered_bytes += answer.body.len() as u64;
        Ok(answer)
    }
    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }
    fn addr(&self) -> String {
        self.inner.addr()
    }
    fn close(&self) {
        self.inner.close();
    }
}
