//! What was measured in the runs of a row.

use super::machine::Cost;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Ops,
}

/// The results of several runs of one measurement.
#[derive(Default)]
pub struct Series {
    pub name: &'static str,
    /// Bytes or operations per second.
    pub rates: Vec<f64>,
    /// CPU of the whole machine: seconds per GB, or microseconds per operation.
    pub cpu: Vec<f64>,
}

pub struct Row {
    pub unit: Unit,
    pub ours: Series,
    /// The same through mounts with the other transports, in the same runs as ours, named after the
    /// transport.
    pub others: Vec<Series>,
    /// The limit that the row is compared with first, then the others that every byte or operation
    /// passes.
    pub limits: Vec<Series>,
}

impl Series {
    /// Adds a run.
    pub fn add(&mut self, unit: Unit, amount: f64, cost: &Cost) {
        self.rates.push(amount / cost.seconds);
        self.cpu.push(cost.cpu_seconds / amount * if unit == Unit::Bytes { 1e9 } else { 1e6 });
    }
}
