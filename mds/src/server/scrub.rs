//! Reads all of this server's state now and then, so that damage is found before a client needs
//! that data: the store compares checksums as it reads, and notes what it finds
//! (`namespace::watched`). Every member does this for itself.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use super::member::Member;

/// Bytes read at once.
const PAGE: usize = 256 << 10;
/// A server that has just started has other work first.
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
            // The error was noted. A damaged state is replaced as a whole, and read from its
            // beginning the next time.
            let Ok((read, last)) = member.machine.namespace.scrub(after.as_ref(), PAGE) else {
                break;
            };
            let pause = (read as u64 * 1000).checked_div(member.cfg.scrub_rate).unwrap_or(0);
            sleep(Duration::from_millis(pause)).await;
            after = last;
            if after.is_none() {
                tracing::debug!("all metadata here was read; none is damaged");
                break;
            }
        }
        let took = member.env.boot().saturating_sub(began);
        sleep(every.saturating_sub(took).max(Duration::from_secs(1))).await;
    }
}
