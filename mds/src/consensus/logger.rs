//! raft-rs logs through slog; its warnings and errors go to tracing, the rest is dropped.

use slog::{Drain, Level, Logger, Never, OwnedKVList, Record};

struct ToTracing;

impl Drain for ToTracing {
    type Ok = ();
    type Err = Never;

    fn log(&self, record: &Record<'_>, _: &OwnedKVList) -> Result<(), Never> {
        match record.level() {
            Level::Critical | Level::Error => tracing::error!(target: "raft", "{}", record.msg()),
            Level::Warning => tracing::warn!(target: "raft", "{}", record.msg()),
            Level::Info => tracing::debug!(target: "raft", "{}", record.msg()),
            _ => {}
        }
        Ok(())
    }

    fn is_enabled(&self, level: Level) -> bool {
        match level {
            Level::Critical | Level::Error | Level::Warning => true,
            Level::Info => tracing::enabled!(target: "raft", tracing::Level::DEBUG),
            _ => false,
        }
    }
}

pub(super) fn logger() -> Logger {
    Logger::root(ToTracing, slog::o!())
}
