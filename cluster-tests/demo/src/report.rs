//! The table that the demo prints at the end.

use std::time::Duration;

#[derive(Default)]
pub struct Report {
    rows: Vec<(String, u64, Duration)>,
    verified: u64,
    longest_stall: Duration,
}

impl Report {
    pub fn row(&mut self, what: &str, bytes: u64, took: Duration) {
        println!("    {what}: {}", rate(bytes, took));
        self.rows.push((what.to_string(), bytes, took));
    }
    pub fn verified(&mut self, bytes: u64) {
        self.verified += bytes;
    }
    pub fn stall(&mut self, d: Duration) {
        self.longest_stall = self.longest_stall.max(d);
    }

    pub fn print(&self, total: Duration) {
        let row = |what: &str, mb: String, seconds: String, rate: String| {
            let numbers = [format!("{mb:>9}"), format!("{seconds:>8}"), format!("{rate:>8}")];
            [&[what.to_string()][..], &numbers].concat()
        };
        let mut rows = vec![row("what was done", "MB".into(), "seconds".into(), "MB/s".into())];
        for (what, bytes, took) in &self.rows {
            let (mb, s) = (*bytes as f64 / 1e6, took.as_secs_f64());
            let or_dash = |n: f64| if *bytes > 0 { format!("{n:.0}") } else { "-".into() };
            rows.push(row(what, or_dash(mb), format!("{s:.1}"), or_dash(mb / s)));
        }
        print!("\n{}", strake_term::table(&rows));
        println!("\nlongest time without service  {:.2} s", self.longest_stall.as_secs_f64());
        println!("bytes verified by SHA-256     {:.0} MB", self.verified as f64 / 1e6);
        println!("total time                    {:.0} s", total.as_secs_f64());
    }
}

fn rate(bytes: u64, took: Duration) -> String {
    let s = took.as_secs_f64();
    if bytes == 0 {
        format!("{s:.1} s")
    } else {
        format!("{:.0} MB in {s:.1} s, {:.0} MB/s", bytes as f64 / 1e6, bytes as f64 / 1e6 / s)
    }
}
