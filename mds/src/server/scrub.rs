//! Reads all of this server's state once in a while, so that damage is found before somebody needs
//! what it is in: the store compares checksums as it reads, and what it finds is noted
//! (`namespace::watched`). Every member does it for itself.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use super::member::Member;

/// Bytes read at once.
const PAGE: usize = 256 << 10;
/// A server that has just been started has other things to do.
const FIRST: Duration = Duration::from_secs(60);

pub(super) async fn run(member: Arc<Member>) {
    let every = Duration::from_secs(member.cfg.scrub_every_s);
    if every.is_zero() {
        return;
    }
    sleep(FIRST).await;
    loop {
        let began = member.env.boot();
        let mut after = None;
        loop {
            // What is wrong was noted; what is damaged is replaced as a whole, and read from its
            // beginning the next time.
            let Ok((read, last)) = member.machine.namespace.scrub(after.as_ref(), PAGE) else {
                break;
            };
            let pause = (read as u64 * 1000).checked_div(member.cfg.scrub_rate).unwrap_or(0);
            sleep(Duration::from_millis(pause)).await;
            after = last;
            if after.is_none() {
                tracing::debug!("all metadata here was read, none of it is damaged");
                break;
            }
        }
        let took = member.env.boot().saturating_sub(began);
        sleep(every.saturating_sub(took).max(Duration::from_secs(1))).await;
    }
}
