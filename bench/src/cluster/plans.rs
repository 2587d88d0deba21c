//! The rows: what each does, through mounts or by the client, and which limits it is compared with.

use std::cell::Cell;

use strake_proto::Result;
use tokio::runtime::Runtime;

use super::{
    machine,
    series::Unit::{self, Bytes, Ops},
    through_client::ByClient,
    through_mount::Mounted,
};

pub const SOCKET: &str = "socket copy";
pub const SOCKET_WRITE: &str = "socket copy, all copies";
pub const DEVICE_READ: &str = "device read";
pub const DEVICE_WRITE: &str = "device write, all copies";
pub const DEVICE_RANDOM: &str = "device 4 KiB random";
pub const FUSE_READ: &str = "FUSE from memory";
pub const FUSE_READ_4: &str = "FUSE from memory, 4 readers";
pub const FUSE_WRITE: &str = "FUSE to memory";
pub const FUSE_RANDOM: &str = "FUSE from memory, 4 KiB random";
pub const APPENDS: &str = "synced appends";
pub const ROUND_TRIPS: &str = "socket round trips";

/// The limits that need a mount which answers from memory. It uses the crate fuser.
pub const OF_FUSE: [&str; 4] = [FUSE_READ, FUSE_READ_4, FUSE_WRITE, FUSE_RANDOM];

/// Does the work and returns its amount, in bytes or operations.
pub type Work<'a> = Box<dyn FnMut() -> Result<f64> + 'a>;

pub struct Plan<'a> {
    pub name: &'static str,
    pub unit: Unit,
    /// One for each mount; the limits apply to the first.
    pub variants: Vec<Variant<'a>>,
    pub limits: &'static [&'static str],
}

/// The work of a row, on one mount or by the client library.
pub struct Variant<'a> {
    /// Before each run; not timed.
    pub prepare: Work<'a>,
    pub work: Work<'a>,
}

/// All rows.
pub fn plans<'a>(
    mounted: &'a [Mounted],
    client: &'a ByClient,
    runtime: &'a Runtime,
    warm: &'a Cell<bool>,
) -> Vec<Plan<'a>> {
    let mut all = through_mounts(mounted, warm);
    all.extend(through_client(client, runtime, warm));
    all
}

fn nothing<'a>() -> Work<'a> {
    Box::new(|| Ok(0.0))
}

/// The caches of server and kernel are cold, and the file exists. Sets `warm` if they could not be
/// emptied.
fn cold<'a>(warm: &'a Cell<bool>, ensure: impl Fn() -> Result<()> + 'a) -> Work<'a> {
    Box::new(move || {
        ensure()?;
        if !machine::drop_caches() {
            warm.set(true);
        }
        Ok(0.0)
    })
}

fn through_mounts<'a>(mounted: &'a [Mounted], warm: &'a Cell<bool>) -> Vec<Plan<'a>> {
    type OnMount<'a> = fn(&'a Mounted, &'a Cell<bool>) -> Work<'a>;
    let on_mounts = |name, unit, prepare: OnMount<'a>, work: OnMount<'a>, limits| Plan {
        name,
        unit,
        variants: mounted
            .iter()
            .map(|m| Variant { prepare: prepare(m, warm), work: work(m, warm) })
            .collect(),
        limits,
    };
    let cold: OnMount<'a> = |m, warm| cold(warm, || m.ensure_large());
    vec![
        on_mounts(
            "mount: write 1 MiB",
            Bytes,
            |_, _| nothing(),
            |m, _| Box::new(|| m.write()),
            &[DEVICE_WRITE, FUSE_WRITE, SOCKET_WRITE],
        ),
        on_mounts(
            "mount: read 1 MiB",
            Bytes,
            cold,
            |m, _| Box::new(|| m.read(1)),
            &[FUSE_READ, DEVICE_READ, SOCKET],
        ),
        on_mounts(
            "mount: read 1 MiB, 4 readers",
            Bytes,
            cold,
            |m, _| Box::new(|| m.read(4)),
            &[FUSE_READ_4, DEVICE_READ, SOCKET],
        ),
        on_mounts(
            "mount: read 4 KiB random",
            Ops,
            cold,
            |m, _| Box::new(|| m.random_read()),
            &[DEVICE_RANDOM, FUSE_RANDOM, ROUND_TRIPS],
        ),
        on_mounts(
            "mount: create",
            Ops,
            |m, _| Box::new(|| m.unlink_all()),
            |m, _| Box::new(|| m.create()),
            &[APPENDS],
        ),
        on_mounts(
            "mount: stat",
            Ops,
            |m, _| Box::new(|| m.ensure_files()),
            |m, _| Box::new(|| m.stat()),
            &[ROUND_TRIPS],
        ),
        on_mounts(
            "mount: unlink",
            Ops,
            |m, _| Box::new(|| m.ensure_files()),
            |m, _| Box::new(|| m.unlink_all()),
            &[APPENDS],
        ),
    ]
}

fn through_client<'a>(c: &'a ByClient, rt: &'a Runtime, warm: &'a Cell<bool>) -> Vec<Plan<'a>> {
    fn plan<'a>(
        name: &'static str,
        unit: Unit,
        prepare: Work<'a>,
        work: Work<'a>,
        limits: &'static [&'static str],
    ) -> Plan<'a> {
        Plan { name, unit, variants: vec![Variant { prepare, work }], limits }
    }
    let cold = || cold(warm, || rt.block_on(c.ensure_large()));
    vec![
        plan(
            "client: write 1 MiB",
            Bytes,
            nothing(),
            Box::new(|| rt.block_on(c.write())),
            &[DEVICE_WRITE, SOCKET_WRITE],
        ),
        plan(
            "client: read 1 MiB",
            Bytes,
            cold(),
            Box::new(|| rt.block_on(c.read())),
            &[SOCKET, DEVICE_READ],
        ),
        plan(
            "client: read 4 KiB random",
            Ops,
            cold(),
            Box::new(|| rt.block_on(c.random_read())),
            &[DEVICE_RANDOM, ROUND_TRIPS],
        ),
        plan(
            "client: create",
            Ops,
            Box::new(|| rt.block_on(c.unlink_all())),
            Box::new(|| rt.block_on(c.create())),
            &[APPENDS],
        ),
        plan(
            "client: stat",
            Ops,
            Box::new(|| rt.block_on(c.ensure_files())),
            Box::new(|| rt.block_on(c.stat())),
            &[ROUND_TRIPS],
        ),
        plan(
            "client: unlink",
            Ops,
            Box::new(|| rt.block_on(c.ensure_files())),
            Box::new(|| rt.block_on(c.unlink_all())),
            &[APPENDS],
        ),
    ]
}
