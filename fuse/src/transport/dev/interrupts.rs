//! Requests that may end early: because a signal arrived while their caller waits, or because the
//! caller is dying.
//!
//! The kernel sends INTERRUPT once for a waiting request, at the caller's first signal, whatever
//! that signal is. From then on only the reply to the request releases the caller, even when it is
//! killed. A program on a local disk never sees `EINTR` from a file operation other than waiting
//! for a lock. So a wait for a lock ends at any signal. Everything else goes on until the caller is
//! found to be dying, which is checked from the INTERRUPT on. FLUSH, which is sent when a dying
//! process's descriptors are closed, cannot be interrupted at all: its caller is checked the whole
//! time.

use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// How often a caller that received a signal is checked.
const LOOK: Duration = Duration::from_millis(50);
/// A caller in a process-id namespace that is not visible from here counts as dead this long after
/// its first signal.
const UNSEEN: Duration = Duration::from_secs(1);

/// When a request ends before its work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// When the caller is dying; checked after an interrupt.
    UntilKilled,
    /// At the first signal: waiting for a lock.
    UntilSignal,
    /// When the caller is dying; checked all the time, for requests that the kernel does not
    /// interrupt.
    WhileAlive,
}

/// The requests in progress, by number.
#[derive(Clone, Default)]
pub struct Interrupts {
    waiting: Arc<Mutex<BTreeMap<u64, Arc<Notify>>>>,
}

/// A request in progress; its entry is removed when this is dropped.
pub struct Waiting {
    all: Interrupts,
    unique: u64,
    pid: u32,
    patience: Patience,
    told: Arc<Notify>,
}

impl Interrupts {
    pub fn begin(&self, unique: u64, pid: u32, patience: Patience) -> Waiting {
        let told = Arc::new(Notify::new());
        self.waiting.lock().insert(unique, told.clone());
        Waiting { all: self.clone(), unique, pid, patience, told }
    }

    /// Handles the kernel's INTERRUPT. Returns false if no such request is in progress: it was
    /// answered, or another thread is just reading it. Then the kernel is told to ask again, which
    /// it does not do when the request is over.
    pub fn interrupt(&self, unique: u64) -> bool {
        match self.waiting.lock().get(&unique) {
            Some(told) => {
                told.notify_one();
                true
            }
            None => false,
        }
    }
}

impl Waiting {
    /// Returns when the caller must not wait any longer.
    pub async fn given_up(&self) {
        match self.patience {
            Patience::UntilSignal => self.told.notified().await,
            Patience::UntilKilled => {
                self.told.notified().await;
                if self.pid == 0 {
                    return tokio::time::sleep(UNSEEN).await;
                }
                while !is_dying(self.pid) {
                    tokio::time::sleep(LOOK).await;
                }
            }
            Patience::WhileAlive => loop {
                tokio::time::sleep(LOOK).await;
                if self.pid != 0 && is_dying(self.pid) {
                    return;
                }
            },
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.all.waiting.lock().remove(&self.unique);
    }
}

/// Whether a thread has been killed or is gone. Never true for a thread that may still use an
/// answer.
pub fn is_dying(tid: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{tid}/status")) else { return true };
    if dies_of_signal(&status) {
        return true;
    }
    // On newer kernels, reading `stat` waits while a program starts by execve(2). That may in turn
    // wait for this daemon to answer the close of close-on-exec files. A starting program has
    // memory, an ending one has not.
    !has_memory(&status)
        && fs::read_to_string(format!("/proc/{tid}/stat")).map_or(true, |s| is_exiting(&s))
}

/// From `/proc/TID/status`: whether the thread has memory. Kernel threads have none, nor do threads
/// that are closing their files at their end.
fn has_memory(status: &str) -> bool {
    status.lines().any(|l| l.starts_with("VmSize:"))
}

/// From `/proc/TID/status`: whether a pending signal will end the process. The kernel adds SIGKILL
/// to each thread for every signal that kills without a core dump. Other signals are still pending;
/// they count unless blocked, ignored or handled.
pub fn dies_of_signal(status: &str) -> bool {
    let mask = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok()).unwrap_or(0)
    };
    let bit = |signal: i32| 1u64 << (signal - 1);
    let pending = mask("SigPnd") | mask("ShdPnd");
    if pending & bit(libc::SIGKILL) != 0 {
        return true;
    }
    let harmless = [
        libc::SIGCHLD,
        libc::SIGCONT,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGURG,
        libc::SIGWINCH,
    ];
    let harmless = harmless.into_iter().fold(0, |all, s| all | bit(s));
    pending & !(mask("SigBlk") | mask("SigIgn") | mask("SigCgt") | harmless) != 0
}

/// From `/proc/TID/stat`: whether the thread is a zombie, or has `PF_EXITING` in its flags
/// (proc_pid_stat(5), fields 3 and 9).
pub fn is_exiting(stat: &str) -> bool {
    const PF_EXITING: u64 = 4;
    // The second field is a name in parentheses that may itself contain blanks and parentheses.
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let mut fields = rest.split_whitespace();
    let state = fields.next().unwrap_or_default();
    let flags = fields.nth(5).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    matches!(state, "Z" | "X") || flags & PF_EXITING != 0
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn status(pending: u64, shared: u64, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tx\nSigQ:\t0/1\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n\
             SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    fn bit(signal: i32) -> u64 {
        1 << (signal - 1)
    }

    #[test]
    fn signals_that_end_a_process() {
        let (kill, quit, usr1, child) =
            (bit(libc::SIGKILL), bit(libc::SIGQUIT), bit(libc::SIGUSR1), bit(libc::SIGCHLD));
        assert!(!dies_of_signal(&status(0, 0, 0, 0, 0)));
        assert!(dies_of_signal(&status(kill, 0, 0, 0, 0)));
        assert!(dies_of_signal(&status(0, kill, u64::MAX, u64::MAX, u64::MAX)));
        assert!(dies_of_signal(&status(0, quit, 0, 0, 0)), "a core dump waits to be made");
        assert!(!dies_of_signal(&status(0, quit, quit, 0, 0)));
        assert!(!dies_of_signal(&status(usr1, 0, 0, usr1, 0)));
        assert!(!dies_of_signal(&status(usr1, 0, 0, 0, usr1)));
        assert!(!dies_of_signal(&status(child, 0, 0, 0, 0)));
        assert!(!dies_of_signal("nonsense\nSigPnd:\tzz\n"));
    }

    #[test]
    fn exiting_by_its_flags() {
        assert!(is_exiting("1 (a) b) Z 1 2 3 4 5 6 7"));
        assert!(!is_exiting("1 (Z 4) S 1 2 3 4 5 64 7"));
        assert!(is_exiting("1 (x) D 1 2 3 4 5 4194308 7"));
        assert!(!is_exiting("") && !is_exiting("1 (x) S"));
    }

    #[test]
    fn real_processes() {
        let mut child = Command::new("sleep").arg("1000").stdout(Stdio::null()).spawn().unwrap();
        assert!(!is_dying(child.id()));
        child.kill().unwrap();
        // It is a zombie until it is waited for.
        let pid = child.id();
        while !is_dying(pid) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(is_dying(pid), "gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_waiter_ends_at_any_signal_and_others_go_on() {
        let all = Interrupts::default();
        let me = std::process::id();
        let (lock, read) =
            (all.begin(7, me, Patience::UntilSignal), all.begin(9, me, Patience::UntilKilled));
        assert!(all.interrupt(7) && all.interrupt(9) && !all.interrupt(8));
        lock.given_up().await;
        let minute = Duration::from_secs(60);
        assert!(tokio::time::timeout(minute, read.given_up()).await.is_err(), "this process lives");
        let flush = all.begin(11, me, Patience::WhileAlive);
        assert!(tokio::time::timeout(minute, flush.given_up()).await.is_err());
        drop(lock);
        assert!(!all.interrupt(7), "over");
        // It cannot be checked: it is given up a second later.
        let unseen = all.begin(13, 0, Patience::UntilKilled);
        all.interrupt(13);
        unseen.given_up().await;
    }
}
