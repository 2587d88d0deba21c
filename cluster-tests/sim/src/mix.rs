//! The kinds of run, and which kind each seed is in a mixed sweep, which is what `./simulate` runs.

use std::{fmt, time::Duration};

use strake_histories::{explain::explain, search::LIMIT};
use strake_proto::Result;

use crate::{
    baton, draw, histories, lapse, ledger::Ledger, rivals, run, scenario::Scenario,
    shrink::readable,
};

/// How many of the last events of a failing run are kept.
const KEPT: usize = 2000;

/// A kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Plain,
    Harsh,
    Decay,
    Rivals,
    Lapse,
    Wide,
    Baton,
    History,
    Tables,
}

/// How many of 20 seeds in a row are of which kind.
pub const SHARES: [(Mode, u64); 9] = [
    (Mode::Plain, 5),
    (Mode::Harsh, 6),
    (Mode::Decay, 1),
    (Mode::Tables, 1),
    (Mode::Rivals, 1),
    (Mode::Lapse, 1),
    (Mode::Wide, 1),
    (Mode::Baton, 1),
    (Mode::History, 3),
];

impl Mode {
    /// The kind of run that a seed is.
    pub fn of(seed: u64) -> Mode {
        let mut left = seed % SHARES.iter().map(|s| s.1).sum::<u64>();
        for (mode, share) in SHARES {
            match left.checked_sub(share) {
                Some(rest) => left = rest,
                None => return mode,
            }
        }
        Mode::Plain
    }

    pub fn name(self) -> &'static str {
        match self {
            Mode::Plain => "plain",
            Mode::Harsh => "harsh",
            Mode::Decay => "decay",
            Mode::Rivals => "rivals",
            Mode::Lapse => "lapse",
            Mode::Wide => "wide",
            Mode::Baton => "baton",
            Mode::History => "history",
            Mode::Tables => "tables",
        }
    }

    /// The option of `strake-sim` that selects this kind.
    fn option(self) -> &'static str {
        match self {
            Mode::Plain => "",
            Mode::Harsh => " --harsh",
            Mode::Decay => " --decay",
            Mode::Rivals => " --rivals",
            Mode::Lapse => " --lapse",
            Mode::Wide => " --wide",
            Mode::Baton => " --baton",
            Mode::History => " --histories",
            Mode::Tables => " --tables",
        }
    }

    /// The scenario of a seed, if this is a run of files.
    pub fn scenario(self, seed: u64) -> Option<Scenario> {
        match self {
            Mode::Plain => Some(Scenario::new(seed)),
            Mode::Harsh => Some(Scenario::harsh(seed)),
            Mode::Wide => Some(Scenario::wide(seed)),
            Mode::Decay => Some(Scenario::decay(seed)),
            Mode::Tables => Some(Scenario::tables(seed)),
            Mode::Rivals | Mode::Lapse | Mode::Baton | Mode::History => None,
        }
    }
}

/// The result of one seed.
pub struct Done {
    pub mode: Mode,
    pub seed: u64,
    pub trace: [u8; 32],
    pub faults: Ledger,
    pub simulated: Duration,
    pub violations: Vec<String>,
    /// What helps to understand a failure.
    pub details: String,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = hex::encode(&self.trace[..8]);
        let (mode, counted) = (self.mode.name(), self.faults.counted());
        write!(
            f,
            "seed {} {mode}: {counted} faults counted, {:.0?} simulated, trace {hash}",
            self.seed, self.simulated
        )?;
        self.violations.iter().try_for_each(|v| write!(f, "\n  VIOLATION: {v}"))
    }
}

impl Done {
    fn failed(mode: Mode, seed: u64, why: String) -> Done {
        let (trace, faults, simulated) = ([0; 32], Ledger::default(), Duration::ZERO);
        Done { mode, seed, trace, faults, simulated, violations: vec![why], details: String::new() }
    }

    /// The text for the file of a failing seed.
    pub fn text(&self) -> String {
        let how = self.mode.option();
        let shrinks =
            if self.mode.scenario(self.seed).is_some() { " (--shrink makes it short)" } else { "" };
        format!("{self}\nagain: strake-sim{how} --seed {}{shrinks}\n\n{}", self.seed, self.details)
    }
}

/// Runs a seed as a run of this kind.
pub fn one(mode: Mode, seed: u64) -> Done {
    let done = match mode.scenario(seed) {
        Some(s) => of_files(mode, s),
        None if mode == Mode::Baton => of_baton(seed),
        None if mode == Mode::Lapse => of_lapse(seed),
        None if mode == Mode::Rivals => of_rivals(seed),
        None => of_history(seed),
    };
    done.unwrap_or_else(|e| Done::failed(mode, seed, e.to_string()))
}

fn of_files(mode: Mode, s: Scenario) -> Result<Done> {
    let list = draw::draw(&s);
    let o = run::run_with(s, &list)?;
    let mut details = String::new();
    if !o.violations.is_empty() {
        list.iter().for_each(|t| details.push_str(&format!("{t}\n")));
        let end = o.broken_at.unwrap_or(o.events.len()).min(o.events.len());
        details += &last(&o.events[..end]);
    }
    let (trace, faults, simulated, violations) = (o.trace, o.faults, o.simulated, o.violations);
    Ok(Done { mode, seed: s.seed, trace, faults, simulated, violations, details })
}

/// The last events, one per line.
fn last(events: &[String]) -> String {
    events[events.len().saturating_sub(KEPT)..]
        .iter()
        .map(|e| format!("{}\n", readable(e)))
        .collect()
}

fn of_baton(seed: u64) -> Result<Done> {
    let o = baton::run(seed, None)?;
    let (trace, faults, violations, details) = (o.trace, o.faults, o.violations, last(&o.events));
    Ok(Done { mode: Mode::Baton, seed, trace, faults, simulated: o.simulated, violations, details })
}

fn of_lapse(seed: u64) -> Result<Done> {
    let o = lapse::run(seed)?;
    let (trace, faults, violations, details) = (o.trace, o.faults, o.violations, last(&o.events));
    Ok(Done { mode: Mode::Lapse, seed, trace, faults, simulated: o.simulated, violations, details })
}

fn of_rivals(seed: u64) -> Result<Done> {
    let o = rivals::run(seed, None)?;
    let (trace, faults, violations, details) = (o.trace, o.faults, o.violations, last(&o.events));
    Ok(Done {
        mode: Mode::Rivals,
        seed,
        trace,
        faults,
        simulated: o.simulated,
        violations,
        details,
    })
}

fn of_history(seed: u64) -> Result<Done> {
    let r = histories::run(histories::Scenario { seed, plant: None })?;
    let violations: Vec<String> = r.failure().into_iter().collect();
    let details =
        if violations.is_empty() { String::new() } else { explain(&r.history, &r.verdict, LIMIT) };
    let (trace, faults, simulated) = (r.trace, r.faults, r.simulated);
    Ok(Done { mode: Mode::History, seed, trace, faults, simulated, violations, details })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_kept() {
        for (mode, share) in SHARES {
            assert_eq!(
                (1001..1021).filter(|s| Mode::of(*s) == mode).count() as u64,
                share,
                "{mode:?}"
            );
        }
    }
}
