//! One run of a server's process.

use std::{future::Future, sync::Arc};

use parking_lot::Mutex;
use strake_proto::Result;
use strake_runtime::Env;

/// One run of a server's process: the server, or the error of its start, once either is known.
pub(super) struct Life<S> {
    env: Env,
    server: Arc<Mutex<Option<Result<S>>>>,
}

impl<S: Send + 'static> Life<S> {
    pub(super) fn begin(
        env: Env,
        starting: impl Future<Output = Result<S>> + Send + 'static,
    ) -> Life<S> {
        let server = Arc::new(Mutex::new(None));
        let started = server.clone();
        env.spawn(async move {
            let s = starting.await;
            *started.lock() = Some(s);
        });
        Life { env, server }
    }

    /// Asks the server for something, if it is up.
    pub(super) fn ask<T>(&self, what: impl FnOnce(&S) -> T) -> Option<T> {
        self.server.lock().as_ref().and_then(|s| s.as_ref().ok()).map(what)
    }

    /// Whether the server is up. Returns an error if it could not start.
    pub(super) fn is_up(&self) -> Result<bool> {
        match &*self.server.lock() {
            None => Ok(false),
            Some(Ok(_)) => Ok(true),
            Some(Err(e)) => Err(e.clone()),
        }
    }

    pub(super) fn end(self) {
        self.env.kill();
        let server = self.server.lock().take();
        drop(server);
    }
}
