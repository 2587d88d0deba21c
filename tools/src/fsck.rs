//! `strake fsck`: cross-checks metadata and stored chunks while the file system is in use, with
//! [`strake_fsck`].

use std::{process::ExitCode, sync::Arc};

use clap::Args;
use parking_lot::Mutex;
use serde_json::{Value, json};
use strake_fabric::{Endpoint, Identity, Pool, Transports};
use strake_fsck::{Checker, Fate, Outcome, text};
use strake_proto::Result;
use strake_runtime::{ClientKey, Env};
use strake_term::Progress;

use crate::{
    address::{Address, Place},
    mount,
};

#[derive(Args)]
pub struct FsckArgs {
    #[command(flatten)]
    address: Address,
    /// Also read every byte of every file and check its checksums.
    #[arg(long)]
    read_data: bool,
    /// Repair what can be repaired safely while the file system is in use, and check again
    /// afterwards. Repairs: leaked chunks; chunks beyond the end of their file; misplaced chunks
    /// that are beyond the end or that their right chain has, too; tombstones that are no longer
    /// needed; names of inodes that do not exist.
    #[arg(long)]
    repair: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

pub fn fsck(args: &FsckArgs) -> Result<ExitCode> {
    let Place { mds, key, .. } = args.address.find()?;
    crate::run(0, async {
        let identity = Identity::server(&key);
        let client = mount::connect(&mds, ClientKey::of(&key)).await?;
        let fabric =
            Transports::new(Env::system(), identity, None, Pool::default(), Default::default());
        let mds = mds.iter().map(|e| e.parse()).collect::<Result<Vec<Endpoint>>>()?;
        let progress = Arc::new(Mutex::new(Progress::new()));
        let say = progress.clone();
        let mut checker = Checker::new(client, Arc::new(fabric), mds, args.repair, move |line| {
            say.lock().say(line)
        });
        let result = async {
            let outcome = checker.run(args.read_data).await?;
            let fates = if args.repair { Some(checker.repair(&outcome).await?) } else { None };
            Ok((outcome, fates))
        };
        let result: Result<_> = result.await;
        checker.close().await?;
        progress.lock().done();
        let (outcome, fates) = result?;
        report(&outcome, fates.as_deref(), args.json);
        Ok(if left(&outcome, fates.as_deref()) == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(FOUND)
        })
    })
}

/// Exit status: something wrong is left.
const FOUND: u8 = 4;

/// How many findings have not been repaired.
fn left(o: &Outcome, fates: Option<&[Fate]>) -> usize {
    fates.map_or(o.findings.len(), |all| all.iter().filter(|f| !f.is_repaired()).count())
}

fn report(o: &Outcome, fates: Option<&[Fate]>, as_json: bool) {
    let (all, left) = (o.findings.len(), left(o, fates));
    if as_json {
        let list: Vec<String> = o.findings.iter().map(text).collect();
        let mut report = json!({
            "files": o.files, "chunks": o.chunks, "pending_deletion": o.pending, "tombstones": o.tombstones,
            "findings": list, "clean": left == 0
        });
        if let Some(fates) = fates {
            let each = list.iter().zip(fates).map(|(finding, fate)| fate.as_json(finding));
            report["repairs"] = Value::Array(each.collect());
        }
        println!("{report:#}");
        return;
    }
    for (n, f) in o.findings.iter().enumerate() {
        println!("{}", text(f));
        if let Some(fate) = fates.and_then(|all| all.get(n)) {
            println!("  {fate}");
        }
    }
    let verdict = match fates {
        _ if all == 0 => "clean".to_string(),
        None => format!("{all} findings"),
        Some(_) if left == 0 => format!("{all} findings, all repaired"),
        Some(_) => format!("{all} findings, {left} not repaired"),
    };
    let pending =
        if o.pending > 0 { format!(" ({} pending deletion)", o.pending) } else { String::new() };
    if o.tombstones > 0 && fates.is_none() {
        println!(
            "{} tombstones of removed files take some space; --repair removes them",
            o.tombstones
        );
    }
    println!("{} files, {} chunk replicas{pending}: {verdict}", o.files, o.chunks);
}
