//! The results of a bench as a table for people, as Markdown, and as JSON.

use serde_json::{Value, json};
use strake_term::table;

use super::{
    scale::{JOBS, MIB, Scale},
    series::{Row, Series, Unit},
    stats,
};

pub struct Report {
    pub cores: usize,
    /// Cores, kernel, file system.
    pub machine: String,
    /// Copies of each byte written.
    pub copies: u32,
    pub scale: Scale,
    pub runs: usize,
    /// Caches could not be dropped before reads.
    pub warm: bool,
    /// Transports with which the mount rows were measured, ours first; empty: the cluster's mount.
    pub transports: Vec<&'static str>,
    pub rows: Vec<Row>,
    /// Pattern, our own device figure, fio's; bytes per second.
    pub fio: Vec<(&'static str, f64, f64)>,
}

fn rate(unit: Unit, v: f64) -> String {
    if unit == Unit::Bytes { format!("{:.0} MB/s", v / 1e6) } else { format!("{v:.0} /s") }
}

fn cpu(unit: Unit, v: f64) -> String {
    if unit == Unit::Bytes { format!("{v:.2} s/GB") } else { format!("{v:.0} us/op") }
}

impl Series {
    fn rate(&self) -> f64 {
        stats::median(&self.rates)
    }
    fn cpu(&self) -> f64 {
        stats::median(&self.cpu)
    }
    fn json(&self) -> Value {
        let (lo, hi) = stats::interval(&self.rates);
        json!({ "name": self.name, "runs": self.rates, "median": self.rate(), "interval": [lo, hi],
            "cpu": { "runs": self.cpu, "median": self.cpu() } })
    }
}

impl Row {
    /// Ours divided by the other, for each run, so that the machine's drift cancels out.
    fn ratios(&self, other: &Series) -> Vec<f64> {
        self.ours.rates.iter().zip(&other.rates).map(|(a, b)| a / b).collect()
    }

    /// Rows of the table of transports.
    fn beside(&self) -> impl Iterator<Item = Vec<String>> {
        self.others.iter().map(|other| {
            let ratios = self.ratios(other);
            let show = |s: &Series| {
                let (lo, hi) = stats::interval(&s.rates);
                format!(
                    "{} [{} .. {}]",
                    rate(self.unit, s.rate()),
                    rate(self.unit, lo),
                    rate(self.unit, hi)
                )
            };
            let (lo, hi) = stats::interval(&ratios);
            vec![
                self.ours.name.into(),
                show(&self.ours),
                show(other),
                format!("{:.2}", stats::median(&ratios)),
                format!("[{lo:.2} .. {hi:.2}]"),
                cpu(self.unit, self.ours.cpu()),
                cpu(self.unit, other.cpu()),
            ]
        })
    }

    /// The lowest limit on this machine and its rate: one of the limits, or all cores busy with the
    /// CPU time of all limits.
    fn binding(&self, cores: usize) -> (&'static str, f64) {
        let unit = if self.unit == Unit::Bytes { 1e9 } else { 1e6 };
        let cpu = ("all cores", cores as f64 / self.floor() * unit);
        self.limits
            .iter()
            .map(|l| (l.name, l.rate()))
            .chain([cpu])
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or(cpu)
    }

    /// CPU time of all limits together: every byte or operation passes each of them, so no design
    /// with these steps costs less.
    fn floor(&self) -> f64 {
        self.limits.iter().map(Series::cpu).sum()
    }

    fn cells(&self, cores: usize) -> Vec<String> {
        let ours = self.ours.rate();
        let (lo, hi) = stats::interval(&self.ours.rates);
        let (name, limit, ratio) = match self.limits.first() {
            Some(s) => {
                (s.name.to_string(), rate(self.unit, s.rate()), format!("{:.2}", ours / s.rate()))
            }
            None => Default::default(),
        };
        let (binding, most) = self.binding(cores);
        vec![
            self.ours.name.into(),
            rate(self.unit, ours),
            format!("[{} .. {}]", rate(self.unit, lo), rate(self.unit, hi)),
            name,
            limit,
            ratio,
            binding.into(),
            format!("{:.2}", ours / most),
            cpu(self.unit, self.ours.cpu()),
            cpu(self.unit, self.floor()),
        ]
    }

    fn json(&self, cores: usize) -> Value {
        let (bytes, ours) = (self.unit == Unit::Bytes, self.ours.rate());
        let mut v = self.ours.json();
        v["unit"] = if bytes { "bytes/s" } else { "ops/s" }.into();
        v["cpu"]["unit"] = if bytes { "s/GB" } else { "us/op" }.into();
        v["cpu"]["floor"] = self.floor().into();
        let beside = |o: &Series| {
            let (mut v, ratios) = (o.json(), self.ratios(o));
            let (lo, hi) = stats::interval(&ratios);
            v["ratio"] =
                json!({ "runs": ratios, "median": stats::median(&ratios), "interval": [lo, hi] });
            v
        };
        v["others"] = self.others.iter().map(beside).collect();
        v["limits"] = self.limits.iter().map(Series::json).collect();
        v["ratio"] = self.limits.first().map(|l| ours / l.rate()).into();
        let (binding, most) = self.binding(cores);
        v["binding"] = json!({ "name": binding, "rate": most, "ratio": ours / most });
        v
    }
}

const HEAD: [&str; 10] = [
    "row",
    "StrakeFS",
    "95 % interval",
    "limit",
    "limit's rate",
    "ratio",
    "what binds",
    "ratio to it",
    "CPU",
    "limits' CPU",
];

fn lines(head: Vec<String>, mut rows: Vec<Vec<String>>, markdown: bool) -> String {
    rows.insert(0, head);
    if markdown { strake_term::markdown(&rows) + "\n" } else { table(&rows) }
}

impl Report {
    pub fn text(&self, markdown: bool) -> String {
        let s = self.scale;
        let mut out = format!(
            "{}; medians of {} runs; {} MiB files in {} copies, {} files, {} random reads, {JOBS} jobs; CPU of the whole \
             machine{}\n\n",
            self.machine,
            self.runs,
            s.bytes / MIB,
            self.copies,
            s.files,
            s.random_ops,
            if self.warm { "; caches were not dropped before reads (that needs root)" } else { "" }
        );
        let head = HEAD.map(String::from).to_vec();
        out += &lines(head, self.rows.iter().map(|r| r.cells(self.cores)).collect(), markdown);
        if let [first, second] = self.transports[..] {
            let ratio = format!("{first}/{second}");
            let cpu = |t| format!("CPU {t}");
            let head: [&str; 7] =
                ["row", first, second, &ratio, "95 % interval", &cpu(first), &cpu(second)];
            out += "Transports, in turn in every run:\n\n";
            let rows = self.rows.iter().flat_map(Row::beside).collect();
            out += &lines(head.map(String::from).to_vec(), rows, markdown);
        }
        for (name, ours, theirs) in &self.fio {
            out += &format!(
                "check: device {name}: {:.0} MB/s here, {:.0} MB/s by fio (medians, in turn, on 4 KiB pages)\n",
                ours / 1e6,
                theirs / 1e6
            );
        }
        if self.fio.is_empty() {
            out += "check skipped: fio is not installed\n";
        }
        out
    }

    pub fn json(&self) -> Value {
        let s = self.scale;
        let fio: Vec<Value> =
            self.fio.iter().map(|(n, o, f)| json!({ "pattern": n, "ours": o, "fio": f })).collect();
        json!({ "version": env!("CARGO_PKG_VERSION"), "machine": self.machine, "copies": self.copies, "runs": self.runs,
            "bytes": s.bytes, "files": s.files, "random_ops": s.random_ops,
            "cores": self.cores, "transports": self.transports, "caches_dropped": !self.warm,
            "rows": self.rows.iter().map(|r| r.json(self.cores)).collect::<Vec<_>>(), "fio": fio })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &'static str, rate: f64, cpu: f64) -> Series {
        Series { name, rates: vec![rate], cpu: vec![cpu] }
    }

    #[test]
    fn what_binds_is_named_and_the_floor_adds_up() {
        let limits = vec![series("FUSE from memory", 4e9, 0.2), series("device read", 1e9, 0.05)];
        let row = Row {
            unit: Unit::Bytes,
            ours: series("mount: read 1 MiB", 8e8, 0.5),
            others: vec![],
            limits,
        };
        let v = row.json(2);
        assert_eq!(v["ratio"], 0.2);
        assert_eq!(v["cpu"]["floor"], 0.25);
        assert_eq!(
            (&v["binding"]["name"], v["binding"]["ratio"].as_f64()),
            (&"device read".into(), Some(0.8))
        );
        assert_eq!(row.binding(1), ("device read", 1e9));
        let slow = Row { limits: vec![series("socket copy", 3e9, 2.0)], ..row };
        assert_eq!(slow.binding(1), ("all cores", 5e8));
        let scale = Scale { bytes: MIB, files: 1, random_ops: 1 };
        let mut other = series("fuser", 4e8, 1.0);
        let mut beside = Row {
            others: vec![],
            limits: vec![],
            ours: series("mount: write 1 MiB", 8e8, 0.5),
            unit: Unit::Bytes,
        };
        // For each run: the medians alone would give 2.
        beside.ours.rates = vec![8e8, 2e8, 9e8];
        other.rates = vec![2e8, 4e8, 6e8];
        beside.others = vec![other];
        let rows = vec![slow, beside];
        let transports = vec!["dev", "fuser"];
        let r = Report {
            cores: 1,
            transports,
            machine: "m".into(),
            copies: 2,
            scale,
            runs: 1,
            warm: true,
            rows,
            fio: vec![],
        };
        let text = r.text(true);
        assert!(text.contains("| --- | ---"), "{text}");
        assert!(text.contains("caches were not dropped"), "{text}");
        assert_eq!(r.json()["caches_dropped"], false);
        let line = "| 800 MB/s | [800 MB/s .. 800 MB/s] | socket copy | 3000 MB/s | 0.27 | all cores | 1.60 | 0.50 s/GB | 2.00 s/GB |";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("| dev/fuser | 95 % interval |"), "{text}");
        assert!(text.contains("| 1.50 | [0.50 .. 4.00] | 0.50 s/GB | 1.00 s/GB |"), "{text}");
        assert_eq!(r.json()["rows"][1]["others"][0]["ratio"]["median"], 1.5);
    }
}
