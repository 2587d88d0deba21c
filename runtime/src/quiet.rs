//! Log lines that strangers can cause: a few of each kind are written, then only their number.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines of one kind that are written within [`WINDOW`].
const LINES: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum length of a line in characters: it may contain what strangers send.
const LONGEST: usize = 400;

/// One kind of line.
#[derive(Debug, Default)]
pub struct Quiet(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    since: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Quiet {
    /// A kind of which no line was written yet.
    pub const fn new() -> Quiet {
        Quiet(Mutex::new(State { since: None, written: 0, left_out: 0 }))
    }

    /// Writes a warning if the limit allows. `line` is only called then.
    pub fn warn(&self, line: impl FnOnce() -> String) {
        let Some(left_out) = self.room(Instant::now()) else { return };
        let line = short(line());
        match left_out {
            0 => tracing::warn!("{line}"),
            n => tracing::warn!("{line} ({n} similar lines before it were left out)"),
        }
    }

    /// Whether a line may be written now, and how many were left out since the last one.
    fn room(&self, now: Instant) -> Option<u64> {
        let mut s = self.0.lock();
        if s.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            (s.since, s.written) = (Some(now), 0);
        }
        if s.written == LINES {
            s.left_out += 1;
            return None;
        }
        s.written += 1;
        Some(std::mem::take(&mut s.left_out))
    }
}

fn short(mut line: String) -> String {
    if line.len() > LONGEST {
        let mut at = LONGEST;
        while !line.is_char_boundary(at) {
            at -= 1;
        }
        line.truncate(at);
        line.push_str("...");
    }
    // Keeps it on one line, whatever it contains.
    line.replace(|c: char| c.is_control(), "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_count() {
        let (q, start) = (Quiet::new(), Instant::now());
        let at = |s: u64| start + Duration::from_secs(s);
        let written = (0..10_000).filter(|_| q.room(at(1)).is_some()).count();
        assert_eq!(written, LINES as usize);
        assert_eq!(q.room(at(60)), None, "a minute from the first line on");
        assert_eq!(q.room(at(61)), Some(10_000 - u64::from(LINES) + 1));
        assert_eq!(q.room(at(62)), Some(0), "said once");
    }

    #[test]
    fn a_line_is_one_line_and_not_long() {
        assert_eq!(short("a\nb\u{1b}[31m".into()), "a?b?[31m");
        let long = short("\u{e4}".repeat(100_000));
        assert!(long.len() <= LONGEST + 3 && long.ends_with("..."), "{}", long.len());
    }
}
