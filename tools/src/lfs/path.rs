//! `lfs path`: which transports this mount uses to reach the servers that hold a file, by which
//! ones its bytes were read and written, and by which tiers programs of this node moved them
//! between it and GPU memory.

use std::{collections::BTreeSet, ffi::OsString, os::unix::fs::MetadataExt, path::Path};

use rustix::io::Errno;
use serde_json::{Value, json};
use strake_gds::{
    ByTier,
    session::published::{self, Seen as Bridge},
};
use strake_proto::{
    NodeId,
    layout::StripeMap,
    map::{MapView, ROLE_MDS},
    pb,
};
use strake_term::{size, table};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, opt, parse},
    fs as mount,
};

pub const USAGE: &str = "lfs path [--json] PATH...   show the connections of this mount to the \
                         servers that hold a file, and its bytes by transport and by tier of GPU \
                         bridges; of a directory: connections to all servers\n";
const OPTIONS: &[Opt] = &[opt('\0', "json", Nothing)];

pub fn read(args: Vec<OsString>) -> Result<Parsed, Failure> {
    let p = parse("path", OPTIONS, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("path", "no path given".into()));
    }
    Ok(p)
}

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = read(args)?;
    let mut all = Vec::new();
    for path in &p.operands {
        match look(Path::new(path)) {
            Ok(seen) if p.has("json") => {
                let (servers, bytes, bridges) =
                    (as_json(&seen.servers), file_json(&seen.file), bridges_json(&seen.bridges));
                all.push(
                    json!({ "path": path.to_string_lossy(), "servers": servers, "bytes": bytes, "bridges": bridges }),
                );
            }
            Ok(seen) => {
                let text =
                    text(&seen.servers) + &file_text(&seen.file) + &bridges_text(&seen.bridges);
                out.print(&format!("{}\n{text}", path.to_string_lossy()));
            }
            Err(f) => out.fail(f),
        }
    }
    if p.has("json") {
        out.print(&format!("{:#}\n", Value::from(all)));
    }
    Ok(())
}

/// A storage server, and the connections of the mount to it.
struct Server {
    id: NodeId,
    name: String,
    connections: Vec<pb::ConnectionStatus>,
}

struct Seen {
    servers: Vec<Server>,
    /// Traffic of the file itself; empty if the mount does not have it in use.
    file: Vec<pb::FileTransport>,
    /// Running sessions of the GPU bridge on this node that moved bytes of it.
    bridges: Vec<Bridge>,
}

fn look(path: &Path) -> Result<Seen, Failure> {
    let failed = |e: std::io::Error| {
        Failure::os(
            format_args!("cannot read '{}'", path.display()),
            Errno::from_io_error(&e).unwrap_or(Errno::IO),
        )
    };
    let real = path.canonicalize().map_err(failed)?;
    let meta = real.metadata().map_err(failed)?;
    let map = mount::map(&mount::mount_of(&real)?)?;
    let transports = mount::transports(&real)?;
    let nodes = if meta.is_file() {
        holders(meta.ino(), &mount::layout(&real)?, &map)?
    } else {
        storage_servers(&map)
    };
    let file = if meta.is_file() { transports.file.clone() } else { Vec::new() };
    let bridges = if meta.is_file() { bridges(&map.map.fs_uuid, meta.ino()) } else { Vec::new() };
    Ok(Seen { servers: servers(&nodes, &map, &transports), file, bridges })
}

fn bridges(fs_uuid: &[u8], ino: u64) -> Vec<Bridge> {
    published::folders().iter().flat_map(|f| published::look(f, fs_uuid, ino)).collect()
}

/// The nodes with a replica of one of the file's chains.
fn holders(ino: u64, layout: &pb::Layout, map: &MapView) -> Result<BTreeSet<NodeId>, Failure> {
    let stripes = StripeMap::resolve(ino, layout, map)?;
    let chains = stripes.chains.iter().filter_map(|c| map.chain(*c));
    Ok(chains
        .flat_map(|c| &c.replicas)
        .filter_map(|r| map.node_of(r.target))
        .map(|n| n.id)
        .collect())
}

fn storage_servers(map: &MapView) -> BTreeSet<NodeId> {
    map.map.nodes.iter().filter(|n| n.role != ROLE_MDS).map(|n| n.id).collect()
}

fn servers(nodes: &BTreeSet<NodeId>, map: &MapView, transports: &pb::Transports) -> Vec<Server> {
    let server = |id: &NodeId| Server {
        id: *id,
        name: map.node(*id).map_or_else(|| id.to_string(), |n| n.name.clone()),
        connections: transports.connections.iter().filter(|w| w.node == *id).cloned().collect(),
    };
    nodes.iter().map(server).collect()
}

/// The transport in an endpoint: the part before the colon.
fn transport(w: &pb::ConnectionStatus) -> &str {
    w.endpoint.split_once(':').map_or("", |(transport, _)| transport)
}

fn text(servers: &[Server]) -> String {
    let mut rows = vec![
        ["SERVER", "TRANSPORT", "CONNECTED TO", "SENT", "RECEIVED"].map(String::from).to_vec(),
    ];
    for s in servers {
        rows.extend(s.connections.iter().map(|w| {
            vec![
                s.name.clone(),
                transport(w).into(),
                w.endpoint.clone(),
                size(w.sent),
                size(w.received),
            ]
        }));
        if s.connections.is_empty() {
            rows.push(vec![s.name.clone(), "-".into(), "not connected".into()]);
        }
    }
    table(&rows)
}

fn as_json(servers: &[Server]) -> Value {
    let connection = |w: &pb::ConnectionStatus| json!({ "transport": transport(w), "endpoint": w.endpoint, "sent": w.sent, "received": w.received });
    let one = |s: &Server| {
        let connections: Vec<Value> = s.connections.iter().map(connection).collect();
        json!({ "node": s.id, "name": s.name, "connections": connections })
    };
    servers.iter().map(one).collect()
}

/// Bytes of the file by transport, and in total.
fn file_text(file: &[pb::FileTransport]) -> String {
    let moved: Vec<&pb::FileTransport> = file.iter().filter(|r| r.fetched + r.sent > 0).collect();
    if moved.is_empty() {
        return "no bytes of this file are counted: the mount counts them only while the file is \
                in use\n"
            .into();
    }
    let mut rows = vec![["BYTES OF FILE BY", "FETCHED", "SENT"].map(String::from).to_vec()];
    rows.extend(
        moved.iter().map(|r| vec![r.transport.clone(), r.fetched.to_string(), r.sent.to_string()]),
    );
    let sum = |of: fn(&pb::FileTransport) -> u64| file.iter().map(of).sum::<u64>().to_string();
    rows.push(vec!["together".into(), sum(|r| r.fetched), sum(|r| r.sent)]);
    table(&rows)
}

fn file_json(file: &[pb::FileTransport]) -> Value {
    let of = |of: fn(&pb::FileTransport) -> u64| {
        let by_transport: serde_json::Map<String, Value> =
            file.iter().map(|r| (r.transport.clone(), of(r).into())).collect();
        json!({ "by_transport": by_transport, "together": file.iter().map(of).sum::<u64>() })
    };
    json!({ "fetched": of(|r| r.fetched), "sent": of(|r| r.sent) })
}

/// Bytes by tier of each process, and in total; nothing where no bridge moved any.
fn bridges_text(all: &[Bridge]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut rows = vec![["GPU BRIDGE OF", "TIER", "LOADED", "SAVED"].map(String::from).to_vec()];
    for b in all {
        let moved = b.tiers.loaded.iter().filter(|(t, n)| **n + b.tiers.saved[*t] > 0);
        rows.extend(moved.map(|(t, n)| {
            vec![
                format!("{} ({})", b.pid, b.program),
                t.to_string(),
                n.to_string(),
                b.tiers.saved[t].to_string(),
            ]
        }));
    }
    let sum = |of: fn(&Bridge) -> u64| all.iter().map(of).sum::<u64>().to_string();
    rows.push(vec![
        "together".into(),
        String::new(),
        sum(|b| b.tiers.loaded.sum()),
        sum(|b| b.tiers.saved.sum()),
    ]);
    table(&rows)
}

fn bridges_json(all: &[Bridge]) -> Value {
    let by = |tiers: &ByTier<u64>| json!({ "by_tier": tiers, "together": tiers.sum() });
    let one = |b: &Bridge| json!({ "pid": b.pid, "program": b.program, "loaded": by(&b.tiers.loaded), "saved": by(&b.tiers.saved) });
    all.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_bridges_by_tier_add_up() {
        use strake_gds::{FileTiers, Tier};
        let by = |tier, n| ByTier::new(|t| if t == tier { n } else { 0 });
        let one = |pid, loaded, saved| Bridge {
            pid,
            program: "python3".into(),
            tiers: FileTiers { loaded, saved },
        };
        let mut both = by(Tier::BounceTcp, 10);
        both[Tier::Pageable] = 1;
        let all = [
            one(7, both, by(Tier::BounceTcp, 0)),
            one(12, by(Tier::GpuRdma, 100), by(Tier::GpuRdma, 5)),
        ];
        assert_eq!(
            bridges_text(&all),
            "GPU BRIDGE OF  TIER        LOADED  SAVED\n\
             7 (python3)    bounce-tcp  10      0\n\
             7 (python3)    pageable    1       0\n\
             12 (python3)   gpu-rdma    100     5\n\
             together                   111     5\n"
        );
        let v = bridges_json(&all);
        assert_eq!(
            (&v[0]["loaded"]["by_tier"]["pageable"], &v[0]["loaded"]["together"]),
            (&1.into(), &11.into())
        );
        assert_eq!((v[1]["saved"]["together"].as_u64(), v[1]["pid"].as_u64()), (Some(5), Some(12)));
        assert_eq!((bridges_text(&[]), bridges_json(&[])), (String::new(), json!([])));
    }

    #[test]
    fn servers_of_a_file_and_how_they_are_reached() {
        let node =
            |id, name: &str| pb::Node { id, role: 2, name: name.into(), ..Default::default() };
        let target = |id, node| pb::Target { id, node, ..Default::default() };
        let chain = |id, targets: &[u32]| pb::Chain {
            id,
            replicas: targets.iter().map(|t| pb::Replica { target: *t, state: 1 }).collect(),
            ..Default::default()
        };
        let map = MapView::new(pb::ClusterMap {
            nodes: vec![node(5, "oss1"), node(6, "oss2"), node(7, "oss3")],
            targets: vec![target(0, 5), target(1, 6), target(2, 7)],
            chains: vec![chain(1, &[0, 1]), chain(2, &[2, 1])],
            ..Default::default()
        })
        .unwrap();
        let component = pb::Component {
            end: u64::MAX,
            stripe_size: 65536,
            chains: vec![1],
            ..Default::default()
        };
        let layout = pb::Layout { components: vec![component], ..Default::default() };
        let connection = |endpoint: &str| pb::ConnectionStatus {
            node: 5,
            endpoint: endpoint.into(),
            sent: 2048,
            received: 7,
        };
        let transports = pb::Transports {
            connections: vec![connection("rdma:10.0.0.1:7"), connection("tcp:h:8")],
            ..Default::default()
        };
        let nodes = holders(9, &layout, &map).unwrap();
        assert_eq!(nodes, BTreeSet::from([5, 6]));
        let found = servers(&nodes, &map, &transports);
        assert_eq!(
            text(&found),
            "SERVER  TRANSPORT  CONNECTED TO     SENT     RECEIVED\n\
             oss1    rdma       rdma:10.0.0.1:7  2.0 KiB  7 B\n\
             oss1    tcp        tcp:h:8          2.0 KiB  7 B\n\
             oss2    -          not connected\n"
        );
        let json = as_json(&found);
        assert_eq!(json[0]["connections"][0]["transport"], "rdma");
        assert_eq!(json[1]["connections"], json!([]));
        assert_eq!(storage_servers(&map).len(), 3);
    }

    #[test]
    fn bytes_of_a_file_by_transport_add_up() {
        let transport = |transport: &str, fetched, sent| pb::FileTransport {
            transport: transport.into(),
            fetched,
            sent,
        };
        let file = [
            transport("local", 0, 0),
            transport("tcp", 10, 4096),
            transport("rdma-stream", 0, 0),
            transport("rdma", 1 << 20, 5),
        ];
        assert_eq!(
            file_text(&file),
            "BYTES OF FILE BY  FETCHED  SENT\n\
             tcp               10       4096\n\
             rdma              1048576  5\n\
             together          1048586  4101\n"
        );
        let json = file_json(&file);
        assert_eq!(json["fetched"]["by_transport"]["rdma"], 1 << 20);
        assert_eq!(
            (&json["fetched"]["together"], &json["sent"]["together"]),
            (&1_048_586.into(), &4101.into())
        );
        assert!(
            file_text(&file[..1]).starts_with("no bytes of this file are counted"),
            "a file that was only opened"
        );
    }
}
