//! Determines which requests belong to one write(2). The kernel does not say, but it counts the
//! finished writes of each thread.

use std::{fs, time::Duration};

use strake_client::File;

use super::types::MAX_REQUEST;

/// Most bytes of a request.
const MAX_WRITE: usize = MAX_REQUEST as usize;
/// How many bytes fewer a piece that is not the last one may have. A request takes 256 pages, and
/// each memory segment that does not begin at a page boundary, of which a writev(2) has many, takes
/// one more.
const SLACK: usize = 64 * 4096;
/// How often to check whether a call has returned.
const LOOK: Duration = Duration::from_millis(1);
/// How long the next piece of a call is waited for where this process cannot see whether the call
/// has returned.
const UNSEEN: Duration = Duration::from_millis(20);

/// Whether the kernel may have split a write so that this is not its last piece.
pub(super) fn may_be_cut(len: usize) -> bool {
    len > MAX_WRITE - SLACK
}

/// How many calls such as write(2) and writev(2) of this thread have returned. `None`: the thread
/// is gone, or this process must not read it.
pub(super) fn writes(tid: u32) -> Option<u64> {
    if tid == 0 {
        return None;
    }
    parse(&fs::read_to_string(format!("/proc/{tid}/task/{tid}/io")).ok()?)
}

fn parse(io: &str) -> Option<u64> {
    io.lines().find_map(|l| l.strip_prefix("syscw:"))?.trim().parse().ok()
}

/// Keeps the end of a file for the next piece of a call until the call has returned. `before`: the
/// value of [`writes`] during the call.
pub(super) async fn watch(file: File, kept: u64, tid: u32, before: Option<u64>) {
    let Some(before) = before else {
        tokio::time::sleep(UNSEEN).await;
        file.end_append(kept);
        return;
    };
    while file.kept_end() == Some(kept) {
        tokio::time::sleep(LOOK).await;
        // On newer kernels, this read waits while the thread starts a program, which in turn may
        // wait for this daemon.
        let now = tokio::task::spawn_blocking(move || writes(tid)).await.ok().flatten();
        if now != Some(before) {
            file.end_append(kept);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_the_kernel_counts() {
        assert_eq!(
            parse("rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 18446744073709551615\n"),
            Some(u64::MAX)
        );
        for odd in ["", "syscw", "syscw:", "syscw: -1", "syscw: x", "xsyscw: 1"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
        assert!(
            may_be_cut(MAX_WRITE)
                && may_be_cut(MAX_WRITE - 63 * 4096)
                && !may_be_cut(MAX_WRITE / 2)
        );
    }

    #[test]
    fn a_write_counts_when_it_has_returned() {
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let Some(before) = writes(me) else {
            println!("skipped: this kernel does not count");
            return;
        };
        assert_eq!(writes(me), Some(before), "reading does not count");
        tempfile::tempfile().unwrap().write_all(b"x").unwrap();
        assert_eq!(writes(me), Some(before + 1));
        std::thread::spawn(|| tempfile::tempfile().unwrap().write_all(b"x").unwrap())
            .join()
            .unwrap();
        assert_eq!(writes(me), Some(before + 1), "another thread's do not");
        assert_eq!((writes(0), writes(u32::MAX)), (None, None));
    }
}
