//! The result of a call.

use std::{fmt, time::Duration};

use serde::{Serialize, Serializer};
use strake_fabric::ByTransport;
use strake_proto::Error;

use crate::{ByTier, Policy, Tier, Unavailable};

/// The direction in which bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From files to the device.
    Load,
    /// From the device to files.
    Save,
}

/// Where CRC32Cs were verified or computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checksum {
    /// By the client, before the copy to the device or after the copy from it.
    AtClient,
    /// By the device, in its memory; bytes that passed through host memory, by the client, too.
    OnGpu,
    /// By the storage server only, or when the copy on this node was made: changes on the way from
    /// there are not detected.
    AtOssOnly,
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Checksum::AtClient => "at the client",
            Checksum::OnGpu => "on the GPU",
            Checksum::AtOssOnly => "at oss only",
        })
    }
}

/// How far every byte of a call was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Checksums {
    /// In host memory: nothing covers the copy between there and the device.
    Host,
    /// In the device's memory.
    Gpu,
    /// Neither, or nothing was moved.
    None,
}

impl From<Option<Checksum>> for Checksums {
    fn from(c: Option<Checksum>) -> Checksums {
        match c {
            Some(Checksum::OnGpu) => Checksums::Gpu,
            Some(Checksum::AtClient) => Checksums::Host,
            Some(Checksum::AtOssOnly) | None => Checksums::None,
        }
    }
}

impl fmt::Display for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Checksums::Host => "host",
            Checksums::Gpu => "gpu",
            Checksums::None => "none",
        })
    }
}

/// A change of tier during a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Switch {
    /// Bytes that the call had moved until then.
    pub after: u64,
    /// The tier that failed.
    pub from: Tier,
    /// The tier that continued; `None`: the policy allowed none.
    pub to: Option<Tier>,
    /// Why it failed.
    #[serde(serialize_with = "in_words")]
    pub why: Unavailable,
}

/// The result of a call, also of a failed one: then it says what was certainly moved; the rest of
/// the destination has undefined content.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The direction.
    pub direction: Direction,
    /// The policy of the call.
    pub policy: Policy,
    /// Bytes of all ranges.
    pub asked: u64,
    /// Bytes that were moved of each range, in the caller's order.
    pub ranges: Vec<u64>,
    /// Bytes moved by each tier.
    pub by_tier: ByTier<u64>,
    /// Of those, bytes that were copied once more in host memory, because the client's buffer was
    /// not of the kind that the tier uses.
    pub staged: u64,
    /// The same bytes by network transport, as reported for each payload. Bytes from the client's
    /// cache count for the transport that brought them there. Bytes copied on the way into or out
    /// of the client's buffers, and zeros of holes, are `local`.
    #[serde(serialize_with = "transports")]
    pub by_transport: ByTransport,
    /// Changes of tier, in order.
    pub switches: Vec<Switch>,
    /// Tiers that the policy allows and that were not available, or not for all files; best first.
    #[serde(serialize_with = "reasons")]
    pub unavailable: Vec<(Tier, Unavailable)>,
    /// Where the bytes were verified; `None`: none were moved.
    pub checksum: Option<Checksum>,
    /// Summary in one word: how far every byte was verified.
    pub checksums: Checksums,
    /// Why nothing was verified on the GPU; `None`: all moved bytes were.
    pub not_on_gpu: Option<String>,
    /// How long the call took.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub took: Duration,
}

fn in_words<S: Serializer>(why: &Unavailable, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(why)
}

fn reasons<S: Serializer>(all: &[(Tier, Unavailable)], s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(all.iter().map(|(t, why)| (t, why.to_string())))
}

fn transports<S: Serializer>(by: &ByTransport, s: S) -> Result<S::Ok, S::Error> {
    s.collect_map(by.iter().map(|(transport, bytes)| (transport.name(), bytes)))
}

fn seconds<S: Serializer>(took: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(took.as_secs_f64())
}

impl Report {
    /// The report of a call that did nothing. Public for tests of code that uses reports.
    #[doc(hidden)]
    pub fn nothing(direction: Direction, policy: Policy, asked: u64, ranges: usize) -> Report {
        Report {
            direction,
            policy,
            asked,
            ranges: vec![0; ranges],
            by_tier: ByTier::default(),
            staged: 0,
            by_transport: ByTransport::default(),
            switches: Vec::new(),
            unavailable: Vec::new(),
            checksum: None,
            checksums: Checksums::None,
            not_on_gpu: None,
            took: Duration::ZERO,
        }
    }

    /// Bytes moved.
    pub fn moved(&self) -> u64 {
        self.by_tier.sum()
    }

    /// Whether every byte asked for was moved, all by this tier.
    pub fn is_all(&self, tier: Tier) -> bool {
        self.by_tier[tier] == self.asked
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.direction == Direction::Load { "loaded" } else { "saved" };
        write!(f, "{what} {} of {} bytes under {}:", self.moved(), self.asked, self.policy)?;
        for (tier, bytes) in self.by_tier.iter().filter(|(_, bytes)| **bytes > 0) {
            write!(f, " {bytes} by {tier},")?;
        }
        write!(f, " {} of them copied once more in host memory", self.staged)?;
        f.write_str("; over the network:")?;
        for (transport, bytes) in self.by_transport.iter().filter(|(_, bytes)| *bytes > 0) {
            write!(f, " {bytes} by {transport},")?;
        }
        if let Some(c) = self.checksum {
            write!(f, "; checksum: {c}")?;
        }
        write!(f, "; checksums: {}", self.checksums)?;
        if let Some(why) = &self.not_on_gpu {
            write!(f, ", not verified on the GPU: {why}")?;
        }
        for s in &self.switches {
            let to = s.to.map_or("nothing", Tier::name);
            write!(f, "; after {} bytes, from {} to {to}: {}", s.after, s.from, s.why)?;
        }
        for (tier, why) in &self.unavailable {
            write!(f, "; {tier}: {why}")?;
        }
        Ok(())
    }
}

/// A call that failed, and what it had done by then.
#[derive(Clone, Debug)]
pub struct Failed {
    /// The cause.
    pub error: Error,
    /// What was moved.
    pub report: Box<Report>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} of {} bytes were moved)",
            self.error,
            self.report.moved(),
            self.report.asked
        )
    }
}

impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
