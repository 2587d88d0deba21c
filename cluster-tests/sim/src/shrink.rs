//! Shrinks a run that breaks a promise: fewer faults, less time and fewer clients, as long as the
//! same promise is broken.

use std::time::Duration;

use strake_proto::{Result, opcode};

use crate::{
    draw,
    faults::Timed,
    nodes::{CLIENTS, called},
    run::{Outcome, run_with},
    scenario::{Scenario, TASKS},
};

/// How many events of the trace are shown before the broken promise was found.
const SHOWN: usize = 60;

/// The result of shrinking.
pub struct Short {
    pub scenario: Scenario,
    pub faults: Vec<Timed>,
    pub outcome: Outcome,
    /// How many faults there were at first.
    pub of: usize,
    /// How many runs it took.
    pub runs: usize,
}

/// Which promise a violation is about: its text without the numbers.
pub fn promise(violation: &str) -> String {
    let mut out = String::new();
    for c in violation.chars() {
        match c {
            c if c.is_ascii_digit() && out.ends_with('#') => {}
            c if c.is_ascii_digit() => out.push('#'),
            c => out.push(c),
        }
    }
    out.chars().take(48).collect()
}

struct Search<'a> {
    promise: String,
    runs: usize,
    most: usize,
    /// The last run that broke the same promise.
    failed: Outcome,
    progress: &'a mut dyn FnMut(&str),
}

impl Search<'_> {
    /// Whether the same promise is broken with this scenario and these faults.
    fn fails(&mut self, s: Scenario, faults: &[Timed]) -> Result<bool> {
        if self.runs >= self.most {
            return Ok(false);
        }
        self.runs += 1;
        let o = run_with(s, faults)?;
        let same = o.violations.iter().any(|v| promise(v) == self.promise);
        if same {
            self.failed = o;
        }
        (self.progress)(&format!(
            "run {}: {} faults in {:?}: {}",
            self.runs,
            faults.len(),
            s.length,
            if same { "fails" } else { "holds" }
        ));
        Ok(same)
    }

    /// Drops ranges of faults, long ones first, until no single fault can be dropped.
    fn fewer(&mut self, s: Scenario, faults: &mut Vec<Timed>) -> Result<()> {
        let mut size = faults.len();
        while size > 0 {
            let (mut at, before) = (0, faults.len());
            while at < faults.len() {
                let end = (at + size).min(faults.len());
                let rest = [&faults[..at], &faults[end..]].concat();
                if self.fails(s, &rest)? {
                    *faults = rest;
                } else {
                    at = end;
                }
            }
            size = if size == 1 && faults.len() < before { 1 } else { size / 2 };
        }
        Ok(())
    }

    fn shorter(&mut self, s: &mut Scenario, faults: &mut Vec<Timed>) -> Result<()> {
        for part in [0.1, 0.25, 0.5, 0.75] {
            let length = s.length.mul_f64(part);
            let rest: Vec<Timed> = faults.iter().filter(|t| t.at < length).cloned().collect();
            let short = Scenario { length, ..*s };
            if self.fails(short, &rest)? {
                (*s, *faults) = (short, rest);
                return Ok(());
            }
        }
        Ok(())
    }

    fn alone(&mut self, s: &mut Scenario, faults: &[Timed]) -> Result<()> {
        let tasks = if s.wide { TASKS } else { TASKS - 1 };
        for task in 0..tasks {
            let fewer = Scenario { without: s.without | 1 << task, ..*s };
            if fewer.without != s.without && self.fails(fewer, faults)? {
                *s = fewer;
            }
        }
        Ok(())
    }
}

/// Shrinks a run, in at most `most` runs. `None`: the run breaks no promise.
pub fn shrink(s: Scenario, most: usize, progress: &mut dyn FnMut(&str)) -> Result<Option<Short>> {
    let mut faults = draw::draw(&s);
    let (mut scenario, of) = (s, faults.len());
    let failed = run_with(s, &faults)?;
    let Some(first) = failed.violations.first() else { return Ok(None) };
    let mut search =
        Search { promise: promise(first), runs: 1, most, failed: failed.clone(), progress };
    search.shorter(&mut scenario, &mut faults)?;
    search.alone(&mut scenario, &faults)?;
    search.fewer(scenario, &mut faults)?;
    search.shorter(&mut scenario, &mut faults)?;
    search.alone(&mut scenario, &faults)?;
    Ok(Some(Short { scenario, faults, outcome: search.failed, of, runs: search.runs }))
}

fn task(n: u32) -> String {
    match n {
        n if n < CLIENTS => format!("client {} writes, syncs, reads, renames, replaces", n + 1),
        n if n < 2 * CLIENTS => format!("client {} locks", n - CLIENTS + 1),
        n if n < 3 * CLIENTS => format!("client {} counts up and looks", n - 2 * CLIENTS + 1),
        n if n < TASKS - 1 => format!("client {} writes and dies", n - 2 * CLIENTS + 1),
        _ => "onlookers and a stranger".into(),
    }
}

impl Short {
    /// A report to print: what was broken, by which faults, and the trace up to there.
    pub fn text(&self) -> String {
        let (s, o) = (&self.scenario, &self.outcome);
        let mut out = format!(
            "seed {}: shrunk in {} runs from {} faults to {}\n",
            s.seed,
            self.runs,
            self.of,
            self.faults.len()
        );
        o.violations.iter().for_each(|v| out.push_str(&format!("  broken: {v}\n")));
        out.push_str(&format!(
            "  the first fault may come at {:.3} s; after {:?} all is repaired. Who works:\n",
            begin(o).as_secs_f64(),
            s.length
        ));
        let works = (0..TASKS).filter(|t| s.without & 1 << t == 0 && (s.wide || *t != TASKS - 1));
        works.for_each(|t| out.push_str(&format!("    {}\n", task(t))));
        out.push_str("  the faults:\n");
        for t in &self.faults {
            let at = Timed { at: t.at + begin(o), fault: t.fault.clone() };
            out.push_str(&format!("  {at}\n"));
        }
        let end = o.broken_at.unwrap_or(o.events.len()).min(o.events.len());
        let from = end.saturating_sub(SHOWN);
        out.push_str(&format!(
            "  events {from} to {end} of {}, up to where it was noticed:\n",
            o.events.len()
        ));
        o.events[from..end].iter().for_each(|e| out.push_str(&format!("  {}\n", readable(e))));
        out
    }
}

/// When faults began, by the clock of the trace.
fn begin(o: &Outcome) -> Duration {
    let found = o.events.iter().find_map(|e| e.strip_suffix(" the faults begin"));
    Duration::from_nanos(found.and_then(|at| at.parse().ok()).unwrap_or(0))
}

/// An event of a trace, with names instead of numbers.
pub fn readable(event: &str) -> String {
    let Some((at, what)) = event.split_once(' ') else { return event.into() };
    let Ok(ns) = at.parse::<u64>() else { return event.into() };
    let at = ns as f64 / 1e9;
    let message = what.split_once(": opcode 0x").and_then(|(nodes, rest)| {
        let (from, to) = nodes.split_once(" > ")?;
        let (op, sizes) = rest.split_once(", ")?;
        let op = u16::from_str_radix(op, 16).ok()?;
        Some(format!(
            "{} > {}: {}, {sizes}",
            called(from.parse().ok()?),
            called(to.parse().ok()?),
            opcode_name(op)
        ))
    });
    format!("{at:10.6} s  {}", message.unwrap_or_else(|| what.into()))
}

fn opcode_name(op: u16) -> String {
    let name = match op {
        opcode::SESSION_OPEN => "open a session",
        opcode::SESSION_RENEW => "renew",
        opcode::SESSION_CLOSE => "close a session",
        opcode::META => "metadata",
        opcode::MAP => "map",
        opcode::LOCK_WAIT => "wait for locks",
        opcode::RECALL => "recalls",
        opcode::REGISTER => "register",
        opcode::HEARTBEAT => "heartbeat",
        opcode::RAFT => "raft",
        opcode::SNAPSHOT => "snapshot",
        opcode::FRONTIER => "frontier",
        opcode::READ => "read",
        opcode::WRITE => "write",
        opcode::FLUSH => "flush",
        opcode::TRIM => "trim",
        opcode::EXTENTS => "extents",
        opcode::GRANT => "grant",
        opcode::CLOCK => "clock",
        opcode::FORWARD => "forward",
        opcode::FORWARD_FLUSH => "forward flush",
        opcode::SYNC_LIST => "sync list",
        opcode::SYNC_PUT => "sync put",
        other => return format!("opcode {other:#x}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_for_people() {
        assert_eq!(
            readable(
                "1500000000 201 > 101: opcode 0x102, body 90 bytes crc 00c0ffee, payload 4096"
            ),
            "  1.500000 s  client 0 > oss 101: write, body 90 bytes crc 00c0ffee, payload 4096"
        );
        assert_eq!(readable("2000000000 kill 102 power=true"), "  2.000000 s  kill 102 power=true");
    }

    #[test]
    fn a_promise_is_what_is_said_without_numbers() {
        let (a, b) =
            ("client 2: file1: at 512: found tag 7", "client 1: file0: at 1024: found tag 33");
        assert_eq!(promise(a), promise(b));
        assert_ne!(promise(a), promise("client 2: file1: size 7, allowed 8..=9"));
    }
}
