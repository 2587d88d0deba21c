//! What the commands print for people at a terminal: progress lines, sizes, times, tables.

#![warn(missing_docs)]

use std::io::{IsTerminal, Write};

/// Bytes as people read them, binary units: `3.4 GiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A time as people read it, in its two largest units: `2 d 3 h`.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// A line on stderr that is rewritten in place on a terminal and printed once per change elsewhere.
#[derive(Default)]
pub struct Progress {
    live: bool,
    last: String,
}

impl Progress {
    /// Nothing is shown yet.
    pub fn new() -> Progress {
        Progress { live: std::io::stderr().is_terminal(), last: String::new() }
    }

    /// Shows a line in place of the one before. The same line again shows nothing.
    pub fn say(&mut self, line: impl Into<String>) {
        let line = line.into();
        if line == self.last {
            return;
        }
        let mut err = std::io::stderr();
        // Progress is a courtesy: a closed stderr must not stop the work.
        let _ = if self.live { write!(err, "\r\x1b[K{line}") } else { writeln!(err, "{line}") };
        let _ = err.flush();
        self.last = line;
    }

    /// Clears the line on a terminal, so that something else can be printed.
    pub fn clear(&mut self) {
        if self.live && !self.last.is_empty() {
            eprint!("\r\x1b[K");
            self.last.clear();
        }
    }

    /// Leaves the last line on the terminal, and starts a new one.
    pub fn done(&mut self) {
        if self.live && !self.last.is_empty() {
            eprintln!();
        }
    }
}

/// Rows with columns padded to their widest cell, two blanks apart.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, w) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<w$}  "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// The same rows as a table in Markdown; the first row is its head.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut out = String::new();
    for (i, row) in rows.iter().enumerate() {
        out.push_str(&line(row));
        if i == 0 {
            out.push_str(&line(&vec!["---".into(); columns]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_tables() {
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(3 << 30), "3.0 GiB");
        assert_eq!(
            [59, 3599, 7260, 266_400].map(span),
            ["59 s", "59 min 59 s", "2 h 1 min", "3 d 2 h"]
        );
        let rows = vec![vec!["a".into(), "b".into()], vec!["long".into(), "c".into()]];
        assert_eq!(table(&rows), "a     b\nlong  c\n");
        assert_eq!(markdown(&rows), "| a | b |\n| --- | --- |\n| long | c |\n");
        assert_eq!((table(&[]), markdown(&[])), (String::new(), String::new()));
    }
}
