//! Detects whether a program that waits in a request received a signal. The fuser crate answers the
//! kernel's INTERRUPT itself, with "not known". So for requests that may take forever, the mount
//! checks the waiting thread's signals.

use std::{fs, time::Duration};

const LOOK: Duration = Duration::from_millis(100);

/// Returns when the thread has a signal that it must act on. Never returns if this process cannot
/// see the thread.
pub(super) async fn sent_to(thread: u32) {
    let path = format!("/proc/{thread}/status");
    loop {
        tokio::time::sleep(LOOK).await;
        match fs::read_to_string(&path) {
            Ok(status) if !has_signal(&status) => {}
            Ok(_) => return,
            Err(_) => std::future::pending().await,
        }
    }
}

/// Parses `/proc/PID/status`. A signal to the whole process counts only if the process has one
/// thread, since another one could act on it. A signal that kills is sent to each thread.
fn has_signal(status: &str) -> bool {
    let field = |name: &str| {
        status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let set = |name| field(name).and_then(|v| u64::from_str_radix(v, 16).ok()).unwrap_or(0);
    let shared = if field("Threads") == Some("1") { set("ShdPnd") } else { 0 };
    (set("SigPnd") | shared) & !set("SigBlk") != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_counts_when_the_thread_must_act_on_it() {
        let status = |threads, own, shared, blocked| {
            format!(
                "Name:\tx\nThreads:\t{threads}\nSigQ:\t1/2\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\n"
            )
        };
        let (none, alarm, kill) = ("0000000000000000", "0000000000002000", "0000000000000100");
        assert!(!has_signal(&status(1, none, none, none)));
        assert!(has_signal(&status(1, none, alarm, none)));
        assert!(!has_signal(&status(2, none, alarm, none)), "another thread may take it");
        assert!(!has_signal(&status(1, alarm, none, alarm)), "blocked");
        assert!(has_signal(&status(9, kill, none, alarm)));
        assert!(!has_signal("nonsense"));
    }
}
