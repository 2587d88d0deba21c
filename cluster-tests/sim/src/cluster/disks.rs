//! Disks that are slow or full, fail or decay.

use std::time::Duration;

use strake_oss::device::mem::Op;
use strake_proto::{Code, Error};

use super::{Cluster, LOG_LATENCY};
use crate::{faults::Harm, ledger::Kind};

/// Counters of a node's disk when a fault of the disk began.
#[derive(Clone, Copy)]
pub(super) struct Harmed {
    what: Harm,
    kind: Kind,
    /// Operations so far (of a metadata server: writes of its log), and those that had failed or
    /// returned wrong data.
    done: u64,
    failed: u64,
    /// An operation was under way at the node when the fault began.
    busy: bool,
}

impl Cluster {
    /// Breaks a node's disk in some way until [`Cluster::mend_disk`]. A metadata server's disk can
    /// only be full or slow.
    pub fn harm_disk(&mut self, node: u32, what: Harm, dice: u64) {
        self.mend_disk(node);
        let kind = match what {
            Harm::Slow(_) | Harm::Crawl(_) => Kind::DiskSlow,
            Harm::Full | Harm::Filled => Kind::DiskFull,
            Harm::Error => Kind::DiskError,
            Harm::Corrupt => Kind::DiskCorrupt,
        };
        let busy = self.net.is_busy(node);
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node) {
            match what {
                Harm::Slow(by) | Harm::Crawl(by) => m.log.set_latency(LOG_LATENCY + by),
                Harm::Full | Harm::Filled => {
                    m.log.set_fault(Some(Error::new(Code::NoSpc, "injected fault")))
                }
                Harm::Error | Harm::Corrupt => return,
            }
            m.disk =
                Some(Harmed { what, kind, done: m.log.writes(), failed: m.log.refused(), busy });
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node) {
            let c = o.device.counters();
            o.disk = Some(Harmed {
                what,
                kind,
                done: c.reads + c.writes + c.flushes,
                failed: c.failed,
                busy,
            });
            o.harmed |= !matches!(what, Harm::Slow(_) | Harm::Crawl(_));
            match what {
                Harm::Slow(by) => o.device.set_latency(&[Op::Write, Op::Flush], by),
                Harm::Crawl(by) => o.device.set_latency(&[Op::Read, Op::Write, Op::Flush], by),
                Harm::Full => (0..5).for_each(|n| o.device.fail(Op::Write, n, Code::NoSpc)),
                Harm::Filled => {
                    o.device.fill_up();
                    o.table.fail_next(strake_store::mem::Fault::Commit, u64::MAX, Code::NoSpc);
                }
                Harm::Error => o.device.fail(Op::Write, 0, Code::Io),
                Harm::Corrupt => o.device.corrupt_read(dice),
            }
        }
        self.net.note(&format!("disk of {node}: {what:?}"));
        self.net.made(kind, false);
    }

    /// From now on a block of a storage server's disk that another disk has, too, is stored with a
    /// wrong bit, whether the server is up or not.
    pub fn decay(&mut self, node: u32, dice: u64) {
        let Some(o) = self.oss.iter().find(|o| o.node == node) else { return };
        let elsewhere = |b: &[u8]| self.oss.iter().any(|o| o.node != node && o.device.holds(b));
        let Some(at) = o.device.pick(dice, |b| is_written(b) && elsewhere(b)) else { return };
        o.device.flip_bit(at + dice % 4096, (dice >> 40) as u8);
        self.net.note(&format!("block {at} of {node} decays"));
        self.net.made(Kind::Decay, self.nodes().iter().any(|n| self.net.is_busy(*n)));
    }

    /// Ends the fault of a node's disk. The fault counts if an operation of the disk met it, and an
    /// operation of the node was under way when it began or ends. Returns whether the server must
    /// be restarted to serve again.
    pub fn mend_disk(&mut self, node: u32) -> bool {
        let busy = self.net.is_busy(node);
        let counts = |h: Harmed, done: u64, failed: u64| {
            let met = match h.what {
                Harm::Slow(_) | Harm::Crawl(_) => done > h.done,
                _ => failed > h.failed,
            };
            met && (h.busy || busy)
        };
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node)
            && let Some(h) = m.disk.take()
        {
            if counts(h, m.log.writes(), m.log.refused()) {
                self.net.counts(h.kind);
            }
            m.log.set_fault(None);
            m.log.set_latency(LOG_LATENCY);
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
            && let Some(h) = o.disk.take()
        {
            let c = o.device.counters();
            if counts(h, c.reads + c.writes + c.flushes, c.failed) {
                self.net.counts(h.kind);
            }
            o.device.end_faults();
            o.table.fail_next(strake_store::mem::Fault::Commit, 0, Code::NoSpc);
            o.device.set_latency(&[Op::Read, Op::Write, Op::Flush], Duration::ZERO);
            return o.harmed;
        }
        false
    }
}

/// Whether a block begins with a pattern that clients write.
fn is_written(block: &[u8]) -> bool {
    let word = |at: usize| block[at..].first_chunk().map_or(0, |w| u64::from_le_bytes(*w));
    word(0) != 0 && word(8) == word(0).wrapping_add(1)
}
