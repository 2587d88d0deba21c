//! Commands that know only one metadata server, a follower.

use std::{path::Path, time::Instant};

use super::Doors;
use crate::common::{ok, strake, text};

#[test]
fn followers_say_who_leads() {
    let c = Doors::new();
    c.up("022", "3", Path::new("none"));
    let status = c.status();
    let mds: Vec<&serde_json::Value> =
        status["servers"].as_array().unwrap().iter().filter(|s| s["role"] == "mds").collect();
    let follower = mds.iter().find(|s| s["raft"]["id"] != s["raft"]["leader"]).unwrap();
    let at = c.endpoint(follower["name"].as_str().unwrap());
    let start = Instant::now();
    for words in [
        &["target", "list"][..],
        &["node", "list"],
        &["mds", "list"],
        &["pool", "new", "fast", "0"],
        &["pool", "list"],
        &["pool", "destroy", "fast"],
        &["target", "keep", "0"],
    ] {
        let mut s = strake();
        s.args(words)
            .args(["--mds", &at, "--timeout", "30", "--cluster-key"])
            .arg(c.key("cluster.key"));
        let out = s.output().unwrap();
        ok(&out);
        let said = text(&out.stderr);
        assert!(!said.contains("no metadata server leads"), "{words:?}: {said}");
    }
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}
