//! The measured figures, beside the expected ones.

use std::{fs, time::Duration};

use serde_json::{Value, json};

use crate::Args;

struct Row {
    what: String,
    expected: &'static str,
    measured: String,
    /// The measured figure in its base unit: seconds, bytes, percent or a number.
    value: f64,
}

pub struct Report {
    head: String,
    rows: Vec<Row>,
}

pub fn ms(t: Duration) -> String {
    let ms = t.as_secs_f64() * 1e3;
    if ms >= 1000.0 { format!("{:.2} s", ms / 1e3) } else { format!("{ms:.1} ms") }
}

pub fn mib(bytes: f64) -> String {
    format!("{:.2} MiB", bytes / (1 << 20) as f64)
}

/// The time that this percentage of the sorted times does not exceed.
pub fn percentile(sorted: &[Duration], of_hundred: usize) -> Duration {
    let rank = (sorted.len() * of_hundred).div_ceil(100).max(1) - 1;
    sorted.get(rank).copied().unwrap_or_default()
}

/// p50, p99 and the longest of sorted times.
pub fn spread(sorted: &[Duration]) -> String {
    let at = |n| ms(percentile(sorted, n));
    format!("p50 {}, p99 {}, longest {}", at(50), at(99), at(100))
}

impl Report {
    pub fn new(args: &Args) -> Report {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let head = format!(
            "{cores} cores, Linux {}; 3 metadata servers, {} storage servers with {} targets in all, {} sessions in one process",
            kernel.trim(),
            args.oss,
            args.oss * args.targets_per_oss,
            args.clients
        );
        Report { head, rows: Vec::new() }
    }

    pub fn row(
        &mut self,
        what: impl Into<String>,
        expected: &'static str,
        measured: impl Into<String>,
        value: f64,
    ) {
        let row = Row { what: what.into(), expected, measured: measured.into(), value };
        eprintln!("{}: {} (expected {})", row.what, row.measured, row.expected);
        self.rows.push(row);
    }

    /// A row of sorted times; its value is the p99 in seconds.
    pub fn times(&mut self, what: impl Into<String>, expected: &'static str, sorted: &[Duration]) {
        self.row(what, expected, spread(sorted), percentile(sorted, 99).as_secs_f64());
    }

    pub fn text(&self, markdown: bool) -> String {
        let mut rows = vec![["what", "expected", "measured"].map(String::from).to_vec()];
        rows.extend(
            self.rows.iter().map(|r| vec![r.what.clone(), r.expected.into(), r.measured.clone()]),
        );
        let table = if markdown { strake_term::markdown(&rows) } else { strake_term::table(&rows) };
        format!("{}\n\n{table}", self.head)
    }

    pub fn json(&self) -> Value {
        let row = |r: &Row| json!({ "what": r.what, "expected": r.expected, "measured": r.measured, "value": r.value });
        json!({ "setting": self.head, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_seen() {
        let t: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        let at = |n| percentile(&t, n).as_millis();
        assert_eq!((at(50), at(99), at(100)), (100, 198, 200));
        assert_eq!((percentile(&t[..1], 99).as_millis(), percentile(&[], 50)), (1, Duration::ZERO));
        assert_eq!(
            spread(&[Duration::from_millis(3), Duration::from_secs(2)]),
            "p50 3.0 ms, p99 2.00 s, longest 2.00 s"
        );
    }
}
