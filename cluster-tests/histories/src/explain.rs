//! Explains why a history was rejected.

use std::fmt::Write;

use crate::{
    history::{Answer, History, How, Op, Outcome, Record},
    model::Why,
    search::{Deepest, Verdict, check},
};

/// How many of the last operations of the longest possible order are shown.
const SHOWN: usize = 12;

fn op(op: &Op) -> String {
    match op {
        Op::Create { dir, name, exclusive: true } => format!("create {dir}/{name} exclusively"),
        Op::Create { dir, name, exclusive: false } => format!("create {dir}/{name}"),
        Op::Mkdir { dir, name } => format!("mkdir {dir}/{name}"),
        Op::Lookup { dir, name } => format!("look up {dir}/{name}"),
        Op::Getattr { ino } => format!("stat {ino}"),
        Op::Open { ino } => format!("open {ino}"),
        Op::Chmod { ino, mode } => format!("chmod {ino} to {mode:o}"),
        Op::Link { ino, dir, name } => format!("link {ino} as {dir}/{name}"),
        Op::Unlink { dir, name } => format!("unlink {dir}/{name}"),
        Op::Rmdir { dir, name } => format!("rmdir {dir}/{name}"),
        Op::Rename { dir, name, to_dir, to_name, how } => {
            let how = match how {
                How::Replace => "",
                How::NoReplace => " without replacing",
                How::Exchange => ", exchanging",
            };
            format!("rename {dir}/{name} to {to_dir}/{to_name}{how}")
        }
        Op::Readdir { dir } => format!("list {dir}"),
    }
}

fn names(all: &[(String, u64)]) -> String {
    let mut all: Vec<_> = all.iter().map(|(name, ino)| format!("{name} = {ino}")).collect();
    all.sort();
    format!("[{}]", all.join(", "))
}

fn outcome(o: &Outcome) -> String {
    match o {
        Outcome::Done(Answer::Done) => "done".into(),
        Outcome::Done(Answer::Inode { ino, attr: None }) => format!("inode {ino}"),
        Outcome::Done(Answer::Inode { ino, attr: Some(a) }) => {
            let kind = if a.dir { "directory" } else { "file" };
            format!("{kind} {ino}, links {}, mode {:o}", a.nlink, a.mode)
        }
        Outcome::Done(Answer::Names(all)) => names(all),
        Outcome::Failed(e) => format!("{e:?}"),
        Outcome::Unknown(why) => format!("not known ({why})"),
    }
}

/// One operation as one line.
pub fn record(r: &Record) -> String {
    let end =
        if matches!(r.outcome, Outcome::Unknown(_)) { "...".into() } else { r.reply.to_string() };
    format!("client {} [{} {end}] {}: {}", r.client, r.call, op(&r.op), outcome(&r.outcome))
}

fn why(w: &Why) -> String {
    match w {
        Why::Refused(e) => format!("it would be refused: {e:?}"),
        Why::Succeeds => "it would succeed".into(),
        Why::OtherInode(0) => {
            "it would tell another inode, one that was made without an answer".into()
        }
        Why::OtherInode(ino) => format!("it would tell inode {ino}"),
        Why::OtherAttr(a) => format!("it would tell links {}, mode {:o}", a.nlink, a.mode),
        Why::OtherNames(all) => format!("it would list {}", names(all)),
        Why::NotMade(ino) => format!("nothing has made inode {ino}"),
        Why::Made(ino) => format!("inode {ino} was made before"),
        Why::Idle => "it would do nothing".into(),
    }
}

/// The history up to `end`: operations called later are left out, answers given later become
/// unknown.
fn until(history: &History, end: u64) -> History {
    let seen = |r: &Record| match r {
        r if r.call > end => None,
        r if r.reply > end => {
            Some(Record { outcome: Outcome::Unknown("not answered yet".into()), ..r.clone() })
        }
        r => Some(r.clone()),
    };
    History {
        head: history.head.clone(),
        records: history.records.iter().filter_map(seen).collect(),
    }
}

/// The first answer after which no order explains the answers so far: its place among the records,
/// and the history up to then.
pub fn first_impossible(history: &History, limit: u64) -> Option<(usize, History)> {
    let mut ends: Vec<(u64, usize)> =
        history.records.iter().enumerate().map(|(i, r)| (r.reply, i)).collect();
    ends.sort();
    let at = ends.partition_point(|(end, _)| !check(&until(history, *end), limit).is_rejected());
    ends.get(at).map(|(end, i)| (*i, until(history, *end)))
}

/// The verdict in words. For a rejected history: the first impossible answer, the longest possible
/// order, and what blocks it.
pub fn explain(history: &History, verdict: &Verdict, limit: u64) -> String {
    let Verdict::Rejected { .. } = verdict else {
        return match verdict {
            Verdict::Linearizable { steps, .. } => format!("linearizable ({steps} steps)\n"),
            _ => format!("not decided within {limit} steps\n"),
        };
    };
    let mut text = String::from("NOT LINEARIZABLE\n");
    let cut = first_impossible(history, limit);
    if let Some((at, _)) = &cut {
        let _ =
            writeln!(text, "the first answer that cannot be:\n  {}", record(&history.records[*at]));
    }
    let cut = cut.map_or_else(|| history.clone(), |(_, h)| h);
    if let Verdict::Rejected { deepest, .. } = check(&cut, limit) {
        prefix(&mut text, &cut, &deepest);
    }
    text
}

fn prefix(text: &mut String, history: &History, d: &Deepest) {
    let skipped = d.order.len().saturating_sub(SHOWN);
    let _ = writeln!(
        text,
        "the longest order found explains {} operations, the last of them:",
        d.order.len()
    );
    for at in &d.order[skipped..] {
        let _ = writeln!(text, "  {}", record(&history.records[*at]));
    }
    let _ = writeln!(text, "then there is:");
    d.state.lines().iter().for_each(|l| _ = writeln!(text, "  {l}"));
    let _ = writeln!(text, "and one of these must come next:");
    for (at, w) in &d.blocked {
        let _ = writeln!(text, "  {}\n    but {}", record(&history.records[*at]), why(w));
    }
}
