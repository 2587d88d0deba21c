//! Which rows of the tables in `docs/leases.md`, `docs/locks.md` and `docs/replication.md` the runs
//! of this thread have taken.

use strake_client::rows::Holder;
use strake_mds::{
    cluster::rows::Membership,
    leases::rows::{Checking, Leader, Reporting},
};
use strake_oss::chain::rows::{Copies, Epoch, Event, Progress, Reads};

/// A table's name, its rows and how often each was taken.
pub type Counts = Vec<(&'static str, Vec<(&'static str, u64)>)>;

/// Rows of chains: too rare to be counted on in a few seeds.
const RARE: &str = "rare; more seeds (./simulate), oss/src/chain/tests.rs, the explorer's chains";

/// Rows of copies that are not in sync.
const DECAY: &str =
    "nothing decays in these seeds; sim/tests/it/decay.rs, oss/src/server/tests/copies.rs";

/// Rows that the standard seeds do not take, and why or where they are taken instead.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("looked-again", "reading is one step in one thread; the explorer puts changes in between"),
    ("not-renewed", "who has no leases is told so before the table is asked; unit tests"),
    ("ended-alive", "not in these seeds; mds/src/server/tests/leases.rs"),
    ("given-up", "not in these seeds; mds/src/server/tests/leases.rs"),
    (
        "end-sought",
        "nobody who is evicted has a file open there that others write; sim/tests/it/writeback.rs",
    ),
    ("end-found", "likewise"),
    ("end-moved", "a file must change within a look; mds/src/namespace/tests/writers.rs"),
    ("own-given-up", "these clients never give up; histories do, and the explorer"),
    ("over", "connections are given up before; the explorer"),
    (
        "no-leases",
        "the same server must be elected again while a connection lives; client/tests/it/cache.rs",
    ),
    (
        "report-asked-to-write",
        "nobody writes what another has open there; sim/tests/it/writeback.rs",
    ),
    ("report-sent-again", "not in these seeds; unit tests"),
    ("report-excused", "a cut must take five seconds; mds/src/server/tests/leases.rs"),
    ("gap", "must never happen"),
    ("anew", "no target is lost for good; mds/src/server/tests/anew.rs"),
    ("client-refused", RARE),
    ("client-expired", "nothing is given up there; sim/tests/it/late.rs (--rivals)"),
    ("client-gone", RARE),
    ("client-overtaken", RARE),
    ("queue-full", RARE),
    ("forward-refused", RARE),
    ("forward-gone", RARE),
    ("forward-forgotten", RARE),
    ("forward-joins", RARE),
    ("forward-queues", RARE),
    ("staging-failed", RARE),
    ("failed-head", RARE),
    ("failed-middle", RARE),
    ("failed-asks", RARE),
    ("failed-behind", RARE),
    ("refused", RARE),
    ("commit-failed", RARE),
    ("epoch-kept", RARE),
    ("epoch-dropped", RARE),
    ("read-tail", RARE),
    ("read-shown", RARE),
    ("read-not-serving", RARE),
    ("drops", RARE),
    ("device-failed", RARE),
    ("copy-same", DECAY),
    ("copy-version", DECAY),
    ("copy-other", DECAY),
    ("fill-keeps", DECAY),
    ("vouch-mended", DECAY),
    ("vouch-refused", DECAY),
    ("former-waits", DECAY),
];

/// The tables of all pages.
pub fn counts() -> Counts {
    [leases(), chains(), locks()].concat()
}

/// The tables of `docs/leases.md`.
pub fn leases() -> Counts {
    vec![
        ("leader", Leader::counts()),
        ("client", Holder::counts()),
        ("reports", Reporting::counts()),
    ]
}

/// The table of `docs/locks.md`.
pub fn locks() -> Counts {
    vec![("locks", Checking::counts())]
}

/// The tables of `docs/replication.md`.
pub fn chains() -> Counts {
    vec![
        ("members", Membership::counts()),
        ("events", Event::counts()),
        ("progress", Progress::counts()),
        ("epochs", Epoch::counts()),
        ("reads", Reads::counts()),
        ("copies", Copies::counts()),
    ]
}

pub fn reset() {
    Leader::reset();
    Holder::reset();
    Reporting::reset();
    Checking::reset();
    Membership::reset();
    Event::reset();
    Progress::reset();
    Epoch::reset();
    Reads::reset();
    Copies::reset();
}

/// Rows that were not taken and are not in [`ELSEWHERE`].
pub fn missing(counts: &Counts) -> Vec<&'static str> {
    let all = counts.iter().flat_map(|t| &t.1);
    all.filter(|(row, n)| *n == 0 && ELSEWHERE.iter().all(|e| e.0 != *row))
        .map(|(row, _)| *row)
        .collect()
}

/// A table to print.
pub fn text(counts: &Counts) -> String {
    let mut out = String::new();
    for (table, rows) in counts {
        for (row, n) in rows {
            let why = ELSEWHERE
                .iter()
                .find(|e| e.0 == *row)
                .map_or(String::new(), |e| format!("  ({})", e.1));
            out.push_str(&format!("{table:8} {row:22} {n:>9}{why}\n"));
        }
    }
    out
}

/// `{"leader": {"elected": 3, ...}, ...}`
pub fn value(counts: &Counts) -> serde_json::Value {
    let rows =
        |rows: &[(&str, u64)]| rows.iter().map(|(row, n)| (row.to_string(), (*n).into())).collect();
    counts
        .iter()
        .map(|(table, r)| (table.to_string(), serde_json::Value::Object(rows(r))))
        .collect()
}

/// The same as text.
pub fn json(counts: &Counts) -> String {
    format!("{:#}\n", value(counts))
}

/// The rows of the tables in a document: those whose head begins with `row`.
pub fn documented(text: &str) -> Vec<&str> {
    let (mut rows, mut within) = (Vec::new(), false);
    for line in text.lines() {
        let first = line.strip_prefix("| ").and_then(|l| l.split(" | ").next());
        match first {
            None => within &= line.starts_with('|'),
            Some("row") => within = true,
            Some(row) if within => rows.push(row.trim_matches('`')),
            Some(_) => {}
        }
    }
    rows
}
