//! `strake scrub`: has storage targets read everything they hold, and shows their progress and the
//! damage found, by path.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use strake_client::{Client, Creds};
use strake_proto::{Code, Error, Ino, Result, layout::StripeMap, pb};
use strake_runtime::ClientKey;
use strake_term::{Progress, size, span, table};

use crate::{
    address::Address,
    admin, mount,
    servers::{Silent, storage_admin},
};

#[derive(Args)]
pub struct ScrubArgs {
    /// What to do.
    #[arg(value_enum, default_value = "status")]
    what: What,
    /// Only these targets, by number. May be given several times.
    #[arg(long)]
    target: Vec<u32>,
    /// Show progress until no pass is running, then the status.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    address: Address,
    /// Admin addresses of the storage servers, HOST:PORT, where no metadata server can be asked.
    #[arg(long, value_delimiter = ',', conflicts_with = "dir")]
    admin: Vec<String>,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Show the progress of the targets and the damage found.
    Status,
    /// Start a pass at the first chunk now, at the full configured rate.
    Start,
    /// Stop the pass. No other one starts until `start`, `resume` or a restart of the server.
    Stop,
    /// Continue a stopped pass.
    Resume,
}

/// Exit status: something is lost, or could not be checked.
const LOST: u8 = 4;
/// Exit status: a server did not answer.
const SILENT: u8 = 2;
const POLL: Duration = Duration::from_millis(300);
/// How long the metadata servers may take to name the paths.
const PATHS: Duration = Duration::from_secs(20);

/// The storage servers, and the key for their administration.
struct Servers {
    addrs: Vec<String>,
    key: [u8; 32],
}

/// The servers' answers: address and targets.
#[derive(Default)]
struct Answers {
    targets: Vec<(String, pb::ScrubStatus)>,
    silent: Vec<(String, Error)>,
}

/// The file in which a damaged chunk lies.
struct Place {
    path: String,
    map: StripeMap,
}

type Places = BTreeMap<Ino, Result<Place>>;

pub fn scrub(args: &ScrubArgs) -> Result<ExitCode> {
    crate::run(1, async {
        let (addrs, mut unknown, mds, key) = find(args).await?;
        let servers = Servers { addrs, key };
        let mds = (!mds.is_empty()).then(|| (mds, ClientKey::of(&key)));
        let action = match args.what {
            What::Status => 0,
            What::Start => 1,
            What::Stop => 2,
            What::Resume => 3,
        };
        let mut answers = look(&servers, &args.target).await?;
        if action != 0 {
            answers = tell(answers, &key, action).await;
        }
        if args.wait {
            answers = until_done(&servers, &args.target).await?;
        }
        answers.silent.append(&mut unknown);
        let places = name(&answers, mds).await;
        if args.json {
            println!("{:#}", as_json(&answers, &places));
        } else {
            print(&answers, &places);
        }
        Ok(ExitCode::from(verdict(&answers)))
    })
}

/// Admin addresses of storage servers, those without one, metadata servers, and the key.
async fn find(args: &ScrubArgs) -> Result<(Vec<String>, Silent, Vec<String>, [u8; 32])> {
    if args.admin.is_empty() {
        let place = args.address.find()?;
        let (addrs, unknown) = storage_admin(&place).await?;
        return Ok((addrs, unknown, place.mds, place.key));
    }
    let key = admin::key_for(args.address.cluster_key.as_deref(), None)?;
    Ok((args.admin.clone(), Vec::new(), args.address.mds.clone(), key))
}

/// Known damage, in lines for people.
#[derive(Default)]
pub(crate) struct Damage {
    /// Damage of which no replica in sync has a good copy.
    pub lost: Vec<String>,
    /// Why the damage is not known everywhere.
    pub unknown: Vec<String>,
}

/// The damage of all targets that answer; and notes about servers that do not.
pub(crate) async fn without_good_copy(
    addrs: Vec<String>,
    mds: Vec<String>,
    key: [u8; 32],
) -> Damage {
    let mut answers = match look(&Servers { addrs, key }, &[]).await {
        Ok(answers) => answers,
        Err(e) => return Damage { unknown: vec![format!("  {e}")], ..Damage::default() },
    };
    answers.targets.iter_mut().for_each(|(_, t)| t.findings.retain(|f| state(f) == "lost"));
    let places = name(&answers, Some((mds, ClientKey::of(&key)))).await;
    let (mut damage, mut left_out) = (Damage::default(), 0);
    for (_, t) in &answers.targets {
        damage
            .lost
            .extend(t.findings.iter().map(|f| format!("  {}", sentence(t.target, f, &places))));
        left_out += t.findings_left_out;
    }
    if left_out > 0 {
        damage.unknown.push(format!("  {left_out} older findings are not listed"));
    }
    damage.unknown.extend(answers.silent.iter().map(|(_, e)| format!("  {e}")));
    damage
}

/// Asks one server.
async fn ask(
    addr: &str,
    key: &[u8; 32],
    action: u32,
    targets: Vec<u32>,
) -> Result<Vec<pb::ScrubStatus>> {
    let failed = |m: &str| Error::new(Code::Disconnected, format!("{addr}: {m}"));
    let call = async {
        let request = pb::ScrubRequest { action, targets };
        match admin::connect(addr, key).await?.scrub(request).await {
            Ok(r) => Ok(r.into_inner().targets),
            // A caller that names all servers of the cluster need not know which is which.
            Err(e) if e.message().starts_with("this is a metadata server") => Ok(Vec::new()),
            Err(e) => Err(failed(e.message())),
        }
    };
    tokio::time::timeout(admin::PATIENCE, call).await.map_err(|_| failed("no answer in 2 s"))?
}

/// The state of these targets, or of all. An error if there is none, or one is missing.
async fn look(servers: &Servers, targets: &[u32]) -> Result<Answers> {
    let mut answers = Answers::default();
    for addr in &servers.addrs {
        match ask(addr, &servers.key, 0, Vec::new()).await {
            Ok(all) => answers.targets.extend(all.into_iter().map(|t| (addr.clone(), t))),
            Err(e) => answers.silent.push((addr.clone(), e)),
        }
    }
    if let (true, Some((_, e))) = (answers.targets.is_empty(), answers.silent.first()) {
        return Err(e.clone().context("no storage server answers"));
    }
    answers.targets.sort_by_key(|(_, t)| t.target);
    if let Some(missing) =
        targets.iter().find(|m| answers.targets.iter().all(|(_, t)| t.target != **m))
    {
        let known: Vec<String> =
            answers.targets.iter().map(|(_, t)| t.target.to_string()).collect();
        let m =
            format!("no server that answers has target {missing}; there are {}", known.join(", "));
        return Err(Error::new(Code::NoEnt, m));
    }
    answers.targets.retain(|(_, t)| targets.is_empty() || targets.contains(&t.target));
    Ok(answers)
}

/// Sends an action to these targets.
async fn tell(answers: Answers, key: &[u8; 32], action: u32) -> Answers {
    let mut by_server: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (addr, t) in &answers.targets {
        by_server.entry(addr.clone()).or_default().push(t.target);
    }
    let mut now = Answers { silent: answers.silent, ..Answers::default() };
    for (addr, targets) in by_server {
        match ask(&addr, key, action, targets).await {
            Ok(all) => now.targets.extend(all.into_iter().map(|t| (addr.clone(), t))),
            Err(e) => now.silent.push((addr, e)),
        }
    }
    now.targets.sort_by_key(|(_, t)| t.target);
    now
}

async fn until_done(servers: &Servers, targets: &[u32]) -> Result<Answers> {
    let mut progress = Progress::new();
    loop {
        let now = look(servers, targets).await?;
        let busy: Vec<&pb::ScrubStatus> = now
            .targets
            .iter()
            .map(|(_, t)| t)
            .filter(|t| t.running || (t.under_way && !t.paused))
            .collect();
        if busy.is_empty() {
            progress.done();
            return Ok(now);
        }
        let (bytes, total) = busy.iter().fold((0, 0), |(b, t), s| (b + s.bytes, t + s.bytes_total));
        let eta = busy.iter().map(|s| s.eta_s).max().unwrap_or(0);
        let left = if eta > 0 { format!(", {} left", span(eta)) } else { String::new() };
        progress.say(format!(
            "{} targets are being scrubbed, {} of {} read{left}",
            busy.len(),
            size(bytes),
            size(total)
        ));
        tokio::time::sleep(POLL).await;
    }
}

/// Finds the files of the findings. Without metadata servers, or without an answer, there are no
/// places.
async fn name(answers: &Answers, mds: Option<(Vec<String>, ClientKey)>) -> Places {
    let mut places = Places::new();
    let inos = answers.targets.iter().flat_map(|(_, t)| t.findings.iter().map(|f| f.ino));
    let mut inos: Vec<Ino> = inos.collect();
    inos.sort_unstable();
    inos.dedup();
    let Some((mds, key)) = mds.filter(|_| !inos.is_empty()) else { return places };
    let all = async {
        let client = mount::connect(&mds, key).await?;
        for ino in inos {
            places.insert(ino, place(&client, ino).await);
        }
        client.close().await
    };
    match tokio::time::timeout(PATHS, all).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => eprintln!("strake: cannot look up paths: {e}"),
        Err(_) => eprintln!(
            "strake: some paths are missing: the metadata servers took longer than {PATHS:?}"
        ),
    }
    places
}

async fn place(client: &Client, ino: Ino) -> Result<Place> {
    let creds = Creds { uid: 0, gid: 0, groups: vec![] };
    let path = String::from_utf8_lossy(&client.path_of(&creds, ino).await?).into_owned();
    let layout = client.layouts().get(&creds, ino).await?.layout;
    let layout = layout.ok_or_else(|| Error::new(Code::Io, "the file has no layout"))?;
    Ok(Place { path, map: StripeMap::resolve(ino, &layout, &client.servers().map())? })
}

/// A finding relative to its file: path, and first byte and length. Unknown values are `None`.
fn locate(f: &pb::DamageFinding, places: &Places) -> (Option<String>, Option<(u64, u64)>) {
    let Some(Ok(place)) = places.get(&f.ino) else { return (None, None) };
    // The finding is of data that the file had before.
    if place.map.data != f.data_id {
        return (None, None);
    }
    let at = place.map.place_of(f.index).map(|(start, most)| {
        if f.len == 0 { (start, most) } else { (start + u64::from(f.offset), u64::from(f.len)) }
    });
    (Some(place.path.clone()), at)
}

fn state(f: &pb::DamageFinding) -> &'static str {
    match (f.repaired, f.lost, f.gone) {
        (true, ..) => "repaired",
        (_, true, _) => "lost",
        (.., true) => "gone",
        _ => "damaged",
    }
}

fn verdict(answers: &Answers) -> u8 {
    let bad = |t: &pb::ScrubStatus| t.lost > 0 || !t.trouble.is_empty();
    match answers.targets.iter().any(|(_, t)| bad(t)) {
        true => LOST,
        false if !answers.silent.is_empty() => SILENT,
        false => 0,
    }
}

/// Progress of the pass, in percent.
fn percent(t: &pb::ScrubStatus) -> f64 {
    match (t.under_way, t.bytes_total) {
        (false, _) => 100.0,
        (true, 0) => 0.0,
        (true, total) => 100.0 * t.bytes as f64 / total as f64,
    }
}

fn print(answers: &Answers, places: &Places) {
    let head = ["TARGET", "SERVER", "STATE", "PASS", "READ", "CHUNKS", "LEFT", "LAST COMPLETE"];
    let head = head.iter().chain(&["DAMAGED", "REPAIRED", "LOST"]);
    let mut rows = vec![head.map(|h| h.to_string()).collect::<Vec<_>>()];
    let now =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis()
            as u64;
    for (addr, t) in &answers.targets {
        let is = match (t.running, t.under_way, t.paused) {
            (true, ..) => format!("running {:.1} %", percent(t)),
            (_, true, _) => format!("stopped at {:.1} %", percent(t)),
            (_, _, true) => "stopped".into(),
            _ if t.every_s == 0 => "off".into(),
            _ => "idle".into(),
        };
        let ago = |ms: u64| {
            format!("{} ago, took {}", span(now.saturating_sub(ms) / 1000), span(t.took_ms / 1000))
        };
        rows.push(vec![
            t.target.to_string(),
            addr.clone(),
            is,
            t.pass.to_string(),
            format!("{} of {}", size(t.bytes), size(t.bytes_total)),
            format!("{} of {}", t.chunks, t.chunks_total),
            if t.eta_s > 0 { span(t.eta_s) } else { "-".into() },
            if t.ended_ms > 0 { ago(t.ended_ms) } else { "-".into() },
            t.damaged.to_string(),
            t.repaired.to_string(),
            t.lost.to_string(),
        ]);
    }
    print!("{}", table(&rows));
    for (addr, e) in &answers.silent {
        println!("note: {addr} does not answer: {}", e.message);
    }
    for (_, t) in &answers.targets {
        if !t.trouble.is_empty() {
            println!("note: target {}: not everything could be checked: {}", t.target, t.trouble);
        }
        if t.skipped_chains > 0 {
            println!(
                "note: target {}: {} chains were not in sync and are left to the next pass",
                t.target, t.skipped_chains
            );
        }
        t.findings.iter().for_each(|f| println!("{}", sentence(t.target, f, places)));
        if t.findings_left_out > 0 {
            println!("target {}: {} more findings are not listed", t.target, t.findings_left_out);
        }
    }
}

fn sentence(target: u32, f: &pb::DamageFinding, places: &Places) -> String {
    let (path, at) = locate(f, places);
    let chunk = format!("chunk {}.{}.{}", f.ino, f.data_id, f.index);
    let file = match (path, places.get(&f.ino)) {
        (Some(path), _) => path,
        (None, Some(Err(e))) if e.code != Code::NoEnt => format!("inode {} ({})", f.ino, e.message),
        (None, Some(_)) => format!("a file that is deleted (inode {})", f.ino),
        (None, None) => format!("inode {}", f.ino),
    };
    let bytes = match at {
        Some((start, len)) => format!("{len} bytes at {start}"),
        None if f.len == 0 => "all".into(),
        None => format!("{} bytes at {} of the chunk", f.len, f.offset),
    };
    let what = match state(f) {
        "repaired" => match f.repaired_from {
            Some(from) => format!("repaired from target {from}"),
            None => "its record was written again from memory".into(),
        },
        "lost" => format!("LOST: {}", f.cause),
        "gone" => "overwritten or removed since".into(),
        _ => format!("not repaired yet: {}", f.cause),
    };
    format!("{file}: {bytes}, {chunk} on target {target}: {what}")
}

fn as_json(answers: &Answers, places: &Places) -> Value {
    let finding = |f: &pb::DamageFinding| {
        let (path, at) = locate(f, places);
        json!({
            "path": path, "offset": at.map(|a| a.0), "length": at.map(|a| a.1), "ino": f.ino, "data_id": f.data_id,
            "chunk": f.index, "chain": f.chain, "chunk_offset": f.offset, "chunk_length": f.len, "damaged_bytes": f.bytes,
            "record": f.record, "state": state(f), "repaired_from": f.repaired_from, "found_unix_ms": f.unix_ms,
            "cause": f.cause,
        })
    };
    let target = |(addr, t): &(String, pb::ScrubStatus)| {
        json!({
            "target": t.target, "admin": addr, "pass": t.pass, "under_way": t.under_way, "running": t.running,
            "paused": t.paused, "percent": percent(t), "bytes": t.bytes, "bytes_total": t.bytes_total,
            "chunks": t.chunks, "chunks_total": t.chunks_total, "eta_s": t.eta_s, "began_unix_ms": t.began_ms,
            "ended_unix_ms": t.ended_ms, "took_ms": t.took_ms, "skipped_chains": t.skipped_chains,
            "trouble": t.trouble, "damaged": t.damaged, "repaired": t.repaired, "lost": t.lost, "rate": t.rate,
            "every_s": t.every_s, "findings": t.findings.iter().map(finding).collect::<Vec<_>>(),
            "findings_left_out": t.findings_left_out,
        })
    };
    let sum =
        |n: fn(&pb::ScrubStatus) -> u64| answers.targets.iter().map(|(_, t)| n(t)).sum::<u64>();
    json!({
        "targets": answers.targets.iter().map(target).collect::<Vec<_>>(),
        "silent": answers.silent.iter().map(|(a, e)| json!({ "admin": a, "error": e.message })).collect::<Vec<_>>(),
        "damaged": sum(|t| t.damaged), "repaired": sum(|t| t.repaired), "lost": sum(|t| t.lost),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding() -> pb::DamageFinding {
        let lost =
            pb::DamageFinding { lost: true, cause: "no other copy".into(), ..Default::default() };
        pb::DamageFinding {
            ino: 7,
            data_id: 1,
            index: 3,
            offset: 4096,
            len: 8192,
            bytes: 4097,
            ..lost
        }
    }

    fn places() -> Places {
        let map = StripeMap { ino: 7, data: 1, stripe_size: 1 << 20, chains: vec![1, 2] };
        let gone = Err(Error::new(Code::NoEnt, "no such inode"));
        Places::from([(7, Ok(Place { path: "/a/b".into(), map })), (8, gone)])
    }

    #[test]
    fn findings_name_path_and_offset_or_what_is_known() {
        let f = finding();
        assert_eq!(locate(&f, &places()), (Some("/a/b".into()), Some(((3 << 20) + 4096, 8192))));
        let whole = pb::DamageFinding { offset: 0, len: 0, ..finding() };
        assert_eq!(locate(&whole, &places()).1, Some((3 << 20, 1 << 20)));
        let words = sentence(2, &f, &places());
        assert_eq!(
            words,
            "/a/b: 8192 bytes at 3149824, chunk 7.1.3 on target 2: LOST: no other copy"
        );
        for (f, places, word) in [
            (pb::DamageFinding { data_id: 2, ..finding() }, places(), "deleted"),
            (pb::DamageFinding { ino: 8, ..finding() }, places(), "deleted"),
            (finding(), Places::new(), "inode 7: 8192 bytes at 4096 of the chunk"),
        ] {
            let s = sentence(2, &f, &places);
            assert!(s.contains(word), "{s}");
        }
    }

    #[test]
    fn exit_statuses() {
        let target =
            |t: pb::ScrubStatus| Answers { targets: vec![("a".into(), t)], ..Answers::default() };
        let good = || pb::ScrubStatus { damaged: 5, repaired: 5, ..Default::default() };
        assert_eq!(verdict(&target(good())), 0);
        assert_eq!(verdict(&target(pb::ScrubStatus { lost: 1, ..good() })), LOST);
        assert_eq!(verdict(&target(pb::ScrubStatus { trouble: "x".into(), ..good() })), LOST);
        let mut silent = target(good());
        silent.silent.push(("b".into(), Error::new(Code::Disconnected, "x")));
        assert_eq!(verdict(&silent), SILENT);
    }
}
