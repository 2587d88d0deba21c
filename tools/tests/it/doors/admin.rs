//! The administration port of servers: without the cluster key a stranger gets nothing and delays
//! no one.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    time::{Duration, Instant},
};

use strake_proto::{Code, pb};

use super::Doors;
use crate::common::{ok, refused, strake, text};

/// Silent connections of strangers: more than a server lets wait.
const SILENT: usize = 300;

fn bytes_of_log(c: &Doors, server: &str) -> u64 {
    fs::metadata(c.dir().join("logs").join(format!("{server}.log"))).unwrap().len()
}

#[test]
fn admin_needs_the_cluster_key() {
    let c = Doors::new();
    c.up("022", "1", Path::new("none"));
    let client = strake_runtime::keyfile::read_client(&c.key("client.key")).unwrap();
    let cluster = strake_runtime::keyfile::read(&c.key("cluster.key")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for server in ["mds1", "oss1"] {
        let (addr, _) = c.admin(server);
        runtime.block_on(async {
            // Plain gRPC, as any tool sends it.
            let plain = pb::admin_client::AdminClient::connect(format!("http://{addr}")).await;
            if let Ok(mut admin) = plain {
                let pool =
                    pb::PoolChangeRequest { pool: "evil".into(), action: 1, targets: vec![] };
                assert!(
                    admin.pool_change(pool).await.is_err()
                        && admin.status(pb::StatusRequest::default()).await.is_err()
                );
                assert!(
                    admin.scrub(pb::ScrubRequest { action: 1, targets: vec![] }).await.is_err()
                );
            }
            // The handshake with a mount's key, and with an invented one.
            for key in [client.key, [7; 32]] {
                let e = strake_fabric::admin::connect(&addr, &key).await.expect_err("not admitted");
                assert_eq!(e.code, Code::Unauthenticated, "{e}");
            }
            let admin = strake_fabric::admin::connect(&addr, &cluster).await.unwrap();
            let mut admin = pb::admin_client::AdminClient::new(admin);
            assert_eq!(
                admin.status(pb::StatusRequest::default()).await.unwrap().into_inner().name,
                server
            );
        });
        // The cluster key proves nothing at the request port, which takes other keys.
        let port = c.endpoint(server).replace("tcp:", "");
        let e = runtime.block_on(strake_fabric::admin::connect(&port, &cluster)).err().unwrap();
        assert_eq!(e.code, Code::Unauthenticated, "{e}");
    }
    assert!(!text(&c.run(&["pool", "list"]).stdout).contains("evil"));
}

#[test]
fn admin_commands_find_the_key() {
    let c = Doors::new();
    c.up("022", "1", Path::new("none"));
    let (mds, _) = c.admin("mds1");
    let (oss, _) = c.admin("oss1");
    let both = format!("{mds},{oss}");
    let status = |args: &[&str], key: Option<&Path>| {
        let mut s = strake();
        s.args(["status", "--admin", &both]).args(args).env_remove("STRAKE_CLUSTER_KEY");
        // Run in a folder that has no local cluster.
        s.current_dir(c.root.path()).envs(key.map(|k| ("STRAKE_CLUSTER_KEY", k))).output().unwrap()
    };
    let (key, of_clients) = (c.key("cluster.key"), c.key("client.key"));
    ok(&strake().args(["status", "--dir"]).arg(c.dir()).output().unwrap());
    let one = status(&["--cluster-key", key.to_str().unwrap()], None);
    assert!(text(&one.stdout).contains("oss1"), "{}", text(&one.stderr));
    assert!(text(&status(&[], Some(&key)).stdout).contains("oss1"));
    assert!(text(&status(&["--dir", c.dir().to_str().unwrap()], None).stdout).contains("oss1"));
    if !Path::new("/etc/strake/cluster.key").exists() {
        refused(
            &status(&[], None),
            &["needs the cluster key", "--cluster-key", "STRAKE_CLUSTER_KEY"],
        );
    }
    refused(&status(&[], Some(&of_clients)), &["client.key", "a client key"]);
    let other = c.root.path().join("other.key");
    fs::write(&other, "07".repeat(32)).unwrap();
    fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let out = status(&[], Some(&other));
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("needs the cluster key"), "{}", text(&out.stdout));
    let scrub =
        strake().args(["scrub", "--admin", &oss, "--cluster-key"]).arg(&key).output().unwrap();
    assert!(ok(&scrub).contains("oss") || !ok(&scrub).is_empty());
}

#[test]
fn admin_goes_on_while_strangers_hold_connections_and_their_noise_is_a_few_lines() {
    let c = Doors::new();
    c.up("022", "1", Path::new("none"));
    let (addr, pid) = c.admin("mds1");
    let held: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(&addr).unwrap()).collect();
    let start = Instant::now();
    ok(&c.run(&["status"]));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    assert!(open < SILENT, "{open} descriptors while strangers hold {SILENT} connections");
    drop(held);
    // Garbage, at this port and at the request port.
    let before = bytes_of_log(&c, "mds1");
    for at in [&addr, &c.endpoint("mds1").replace("tcp:", "")] {
        for _ in 0..1000 {
            let mut s = TcpStream::connect(at).unwrap();
            s.write_all(&[b'x'; 64]).unwrap();
            let _ = s.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = s.read(&mut [0; 8]);
        }
    }
    let grown = bytes_of_log(&c, "mds1") - before;
    assert!(grown < 16 << 10, "2000 connections made {grown} bytes of log");
    ok(&c.run(&["status"]));
}
