//! `lfs df`.

use std::{ffi::OsString, fmt::Write as _, path::Path};

use strake_proto::{map::MapView, pb};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, lacking, opt, parse},
    fs as mount,
    targets::{mdt_uuid, ost_uuid},
};

pub const USAGE: &str =
    "lfs df [-i] [-h|-H] [-l] [-m[INDEX]] [-o[INDEX]] [-N] [-s] [-v] [-p FSNAME[.POOL]] [PATH]\n";

const OPTIONS: &[Opt] = &[
    opt('i', "inodes", Nothing),
    opt('h', "human-readable", Nothing),
    opt('H', "si", Nothing),
    opt('l', "lazy", Nothing),
    opt('m', "mdt", Optional),
    opt('o', "ost", Optional),
    opt('N', "no-header", Nothing),
    opt('s', "only-summary", Nothing),
    opt('v', "verbose", Nothing),
    opt('p', "pool", Value),
    lacking('u', "output", Value),
];

/// How numbers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Inodes as plain numbers, bytes in KiB.
    Plain,
    /// Powers of 1024, or of 1000.
    Human(u64),
}

/// One row: a target or the summary. Its numbers are bytes or inodes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    name: String,
    /// `MDT:0`; empty for the summary.
    index: String,
    total: u64,
    used: u64,
    available: u64,
    /// Its server does not answer: the numbers are the last known.
    old: bool,
}

/// How the table is printed, according to the options.
#[derive(Clone, Copy, Debug)]
struct Style {
    inodes: bool,
    unit: Unit,
    header: bool,
    only_summary: bool,
}

/// The text for these arguments and one mount with this map and space.
pub fn read(
    args: Vec<OsString>,
    map: &MapView,
    space: &pb::StatfsReply,
) -> Result<String, Failure> {
    let p = parse("df", OPTIONS, args)?;
    let style = style(&p);
    let lines = lines(&p, map, space, "", style.inodes)?;
    Ok(table(Path::new("/mnt"), &lines, style))
}

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("df", OPTIONS, args)?;
    let pool = p.text("pool");
    let (fs, pool) = match pool.as_deref().map(|p| p.split_once('.').unwrap_or((p, ""))) {
        None => (None, ""),
        Some((fs, pool)) => (Some(fs), pool),
    };
    let style = style(&p);
    let mut shown = 0;
    for m in mount::chosen(&p.operands, fs)? {
        let map = mount::map(&m)?;
        if fs.is_some_and(|f| f != map.map.fs_name) {
            continue;
        }
        let space = mount::statfs(&m)?;
        let lines = lines(&p, &map, &space, pool, style.inodes)?;
        out.print(&table(&m, &lines, style));
        shown += 1;
    }
    match fs {
        Some(fs) if shown == 0 => {
            Err(Failure::new(libc::ENODEV, format!("file system '{fs}' is not mounted here")))
        }
        _ => Ok(()),
    }
}

fn style(p: &Parsed) -> Style {
    Style {
        inodes: p.has("inodes"),
        unit: match (p.has("human-readable"), p.has("si")) {
            (true, _) => Unit::Human(1024),
            (_, true) => Unit::Human(1000),
            _ => Unit::Plain,
        },
        header: !p.has("no-header"),
        only_summary: p.has("only-summary"),
    }
}

/// The requested rows: the MDT's, then each OST's.
fn lines(
    p: &Parsed,
    map: &MapView,
    space: &pb::StatfsReply,
    pool: &str,
    inodes: bool,
) -> Result<Vec<Row>, Failure> {
    let name = &map.map.fs_name;
    let members = match pool {
        "" => None,
        _ => {
            let found = map.map.pools.iter().find(|x| x.name == pool);
            Some(
                &found
                    .ok_or_else(|| {
                        Failure::new(libc::ENOENT, format!("pool '{name}.{pool}' not found"))
                    })?
                    .targets,
            )
        }
    };
    let index = |id: &str| -> Result<Option<u32>, Failure> {
        let bad = |t: String| Failure::invalid(format!("invalid index '{t}'"));
        p.text(id).map(|t| t.parse().map_err(|_| bad(t))).transpose()
    };
    let (mdt, ost) = (index("mdt")?, index("ost")?);
    let (with_mdts, with_osts) = match (p.has("mdt"), p.has("ost")) {
        (false, false) => (true, true),
        both => both,
    };
    let mut lines = Vec::new();
    if with_mdts && mdt.is_none_or(|i| i == 0) {
        // Clients do not know the metadata servers' own disk space, but they know the inodes.
        let (total, used, available) = if inodes {
            (space.inodes.saturating_add(space.free_inodes), space.inodes, space.free_inodes)
        } else {
            (0, 0, 0)
        };
        lines.push(Row {
            name: mdt_uuid(name),
            index: "MDT:0".into(),
            total,
            used,
            available,
            old: false,
        });
    }
    let wanted = |t: &&pb::TargetSpace| {
        with_osts
            && ost.is_none_or(|i| i == t.target)
            && members.is_none_or(|m| m.contains(&t.target))
    };
    for t in space.targets.iter().filter(wanted) {
        // The number of objects is not limited: only the current number is known.
        let (total, used, available) = if inodes {
            (t.inodes, t.inodes, 0)
        } else {
            (t.total, t.total.saturating_sub(t.free), t.free)
        };
        let (name, index) = (ost_uuid(name, t.target), format!("OST:{}", t.target));
        lines.push(Row { name, index, total, used, available, old: !t.alive });
    }
    Ok(lines)
}

/// The summary counts bytes of OSTs and inodes of MDTs.
fn summary(lines: &[Row], inodes: bool) -> Row {
    let counts = if inodes { "MDT" } else { "OST" };
    let name = "filesystem_summary:".into();
    let mut sum = Row { name, index: String::new(), total: 0, used: 0, available: 0, old: false };
    for r in lines.iter().filter(|r| r.index.starts_with(counts)) {
        sum.total = sum.total.saturating_add(r.total);
        sum.used = sum.used.saturating_add(r.used);
        sum.available = sum.available.saturating_add(r.available);
        sum.old |= r.old;
    }
    sum
}

fn table(mount: &Path, lines: &[Row], style: Style) -> String {
    let mut s = String::new();
    if style.header {
        let columns = match (style.inodes, style.unit) {
            (true, _) => ["Inodes", "IUsed", "IFree", "IUse%"],
            (_, Unit::Plain) => ["1K-blocks", "Used", "Available", "Use%"],
            _ => ["bytes", "Used", "Available", "Use%"],
        };
        let [a, b, c, d] = columns;
        // `IUse%` is one character wider than its column, so the blank before it is left out.
        let last = if style.inodes { d.to_string() } else { format!("{d:>4}") };
        let _ = writeln!(s, "{:<20} {a:>11} {b:>11} {c:>11} {last} Mounted on", "UUID");
    }
    if !style.only_summary {
        lines.iter().for_each(|r| row(&mut s, mount, r, style));
        s.push('\n');
    }
    row(&mut s, mount, &summary(lines, style.inodes), style);
    s.push('\n');
    s
}

fn row(s: &mut String, mount: &Path, r: &Row, style: Style) {
    let figure = |n: u64| figure(n, style);
    // Rounded up, as df(1) does.
    let both = u128::from(r.used) + u128::from(r.available);
    let percent = if both == 0 { 0 } else { (u128::from(r.used) * 100).div_ceil(both) };
    let place = if r.index.is_empty() { String::new() } else { format!("[{}]", r.index) };
    let _ = writeln!(
        s,
        "{:<20} {:>11} {:>11} {:>11} {percent:>3}% {}{place}{}",
        r.name,
        figure(r.total),
        figure(r.used),
        figure(r.available),
        mount.display(),
        if r.old { " (inactive device, last known)" } else { "" }
    );
}

fn figure(n: u64, style: Style) -> String {
    let Unit::Human(base) = style.unit else {
        return if style.inodes { n } else { n / 1024 }.to_string();
    };
    let (mut value, mut steps) = (n as f64, 0);
    while value > base as f64 {
        value /= base as f64;
        steps += 1;
    }
    match steps {
        0 => n.to_string(),
        _ => format!("{value:.1}{}", ["", "K", "M", "G", "T", "P", "E"][steps.min(6)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(fs: &str, kib: u64, of: &[(&str, u32, u64, u64, u64)]) -> Vec<Row> {
        let row = |&(kind, i, total, used, available): &(&str, u32, u64, u64, u64)| {
            let name = format!("{fs}-{kind}{i:04x}_UUID");
            let (total, used, available) = (total * kib, used * kib, available * kib);
            Row { name, index: format!("{kind}:{i}"), total, used, available, old: false }
        };
        of.iter().map(row).collect()
    }

    const PLAIN: Style =
        Style { inodes: false, unit: Unit::Plain, header: true, only_summary: false };

    #[test]
    fn tables_print_as_lustre_does() {
        let lines = rows(
            "demo",
            1024,
            &[
                ("MDT", 0, 41_699_840, 3840, 41_693_952),
                ("MDT", 1, 50_019_328, 3584, 50_013_696),
                ("OST", 0, 98_706_432, 5_615_616, 93_088_768),
                ("OST", 1, 100_038_656, 3_591_168, 96_445_440),
            ],
        );
        assert_eq!(
            table(Path::new("/mnt/demo"), &lines, PLAIN),
            include_str!("../../tests/fixtures/lfs/df.txt")
        );

        let human = Style { unit: Unit::Human(1024), ..PLAIN };
        let lines = rows(
            "testfs",
            1 << 10,
            &[("MDT", 0, 1_782_579, 3072, 1_779_507), ("OST", 0, 7_549_747, 3072, 7_546_675)],
        );
        assert_eq!(
            table(Path::new("/mnt/lustre"), &lines, human),
            include_str!("../../tests/fixtures/lfs/df_h.txt")
        );
    }

    #[test]
    fn inode_rows_print_as_lustre_does() {
        let style = Style { inodes: true, ..PLAIN };
        let lines = rows(
            "phoenix",
            1,
            &[
                ("MDT", 0, 4_194_304, 12_280, 4_182_024),
                ("OST", 1, 655_360, 266, 655_094),
                ("OST", 2, 655_360, 265, 655_095),
            ],
        );
        let text = table(Path::new("/lustre"), &lines, style);
        // Lustre's summary includes the OSTs' limit on objects, which StrakeFS does not have.
        let rows_of = |t: &str| t.lines().take(5).map(str::to_string).collect::<Vec<_>>();
        assert_eq!(rows_of(&text), rows_of(include_str!("../../tests/fixtures/lfs/df_i.txt")));
        assert!(
            text.ends_with(
                "filesystem_summary:      4194304       12280     4182024   1% /lustre\n\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn figures() {
        let h = |n| figure(n, Style { unit: Unit::Human(1024), ..PLAIN });
        assert_eq!((h(0), h(1023), h(1025)), ("0".into(), "1023".into(), "1.0K".into()));
        assert_eq!(h(u64::MAX), "16.0E");
        assert_eq!(figure(1_500_000, Style { unit: Unit::Human(1000), ..PLAIN }), "1.5M");
    }

    #[test]
    fn options_choose_rows() {
        let map = pb::ClusterMap {
            fs_name: "strake".into(),
            pools: vec![pb::Pool { name: "p".into(), targets: vec![1] }],
            ..Default::default()
        };
        let map = MapView::new(map).unwrap();
        let target = |target, alive| pb::TargetSpace {
            target,
            total: 10 << 10,
            free: 4 << 10,
            alive,
            ..Default::default()
        };
        let space = pb::StatfsReply {
            targets: vec![target(0, true), target(1, false)],
            ..Default::default()
        };
        let run = |args: &[&str], pool: &str| {
            let p = parse("df", OPTIONS, args.iter().map(OsString::from).collect()).unwrap();
            lines(&p, &map, &space, pool, false)
        };
        assert_eq!(run(&[], "").unwrap().len(), 3);
        assert_eq!(run(&["-m"], "").unwrap().len(), 1);
        for args in [(&["-o1"][..], ""), (&["-o"], "p")] {
            let rows = run(args.0, args.1).unwrap();
            assert!(rows.len() == 1 && rows[0].index == "OST:1" && rows[0].old, "{rows:?}");
        }
        assert_eq!(run(&[], "q").unwrap_err().code, libc::ENOENT);
        assert!(run(&["-ox"], "").is_err());
        let text = table(Path::new("/m"), &run(&["-o"], "").unwrap(), PLAIN);
        assert!(
            text.contains(
                "strake-OST0000_UUID           10           6           4  60% /m[OST:0]\n"
            ),
            "{text}"
        );
        let last = "strake-OST0001_UUID           10           6           4  60% /m[OST:1] (inactive device, last known)\n";
        assert!(text.contains(last), "{text}");
        let sum = "filesystem_summary:           20          12           8  60% /m (inactive device, last known)\n";
        assert!(text.ends_with(&format!("{sum}\n")), "{text}");
    }
}
