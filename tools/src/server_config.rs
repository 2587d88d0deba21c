//! The configuration files of servers.

use std::path::PathBuf;

use serde::Deserialize;
use strake_proto::Result;

use crate::config::{self, Overrides};

/// The configuration file of a metadata server.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MdsFile {
    pub cluster_key: PathBuf,
    #[serde(default = "default_log")]
    pub log: String,
    #[serde(default)]
    pub threads: usize,
    pub mds: strake_mds::server::Config,
}

/// The configuration file of a storage server.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OssFile {
    pub cluster_key: PathBuf,
    #[serde(default = "default_log")]
    pub log: String,
    #[serde(default)]
    pub threads: usize,
    pub oss: strake_oss::server::Config,
}

fn default_log() -> String {
    "info".into()
}

/// Reads a metadata server's configuration and checks it.
pub fn check_mds(text: &str) -> Result<()> {
    config::parse::<MdsFile>("text", text, Overrides::new())?.mds.check()
}

/// Reads a storage server's configuration and checks it.
pub fn check_oss(text: &str) -> Result<()> {
    oss_config("text", text).map(drop)
}

/// The path of the cluster key file in a storage server's configuration.
pub fn cluster_key_of(text: &str) -> Result<PathBuf> {
    Ok(config::parse::<OssFile>("text", text, Overrides::new())?.cluster_key)
}

/// A storage server's configuration, as it would be read from a file.
pub fn oss_config(name: &str, text: &str) -> Result<strake_oss::server::Config> {
    let cfg = config::parse::<OssFile>(name, text, Overrides::new())?.oss;
    cfg.check()?;
    Ok(cfg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storage_server_listens_at_one_endpoint_or_several() {
        let of = |rest: &str| {
            let text =
                format!("cluster_key = '/k'\n[oss]\nname = 'a'\nmds = ['tcp:h:1']\n{rest}\n");
            oss_config("f", &text).map(|c| {
                let said = |l: Vec<strake_fabric::Endpoint>| {
                    l.iter().map(|e| e.to_string()).collect::<Vec<_>>().join(" ")
                };
                (said(c.listen), said(c.advertise))
            })
        };
        let is = |listen: &str, advertise: &str| (listen.to_string(), advertise.to_string());
        assert_eq!(of("listen = 'tcp:h:7'").unwrap(), is("tcp:h:7", ""));
        assert_eq!(of("listen = 'tcp:h:7,rdma:i:8'").unwrap(), is("tcp:h:7 rdma:i:8", ""));
        let both = "listen = ['tcp:0.0.0.0:7', 'rdma:i:8']\nadvertise = ['tcp:h:7', 'rdma:i:8']";
        assert_eq!(of(both).unwrap(), is("tcp:0.0.0.0:7 rdma:i:8", "tcp:h:7 rdma:i:8"));
        assert_eq!(
            of("listen = 'tcp:h:7'\nadvertise = 'tcp:g:7'").unwrap(),
            is("tcp:h:7", "tcp:g:7")
        );
        for bad in [
            "listen = []",
            "listen = ''",
            "listen = 7",
            "listen = ['tcp:h:7', 'ib:h:8']",
            "listen = 'tcp:h:7,'",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
