//! Checks configuration files of every kind.

use strake_proto::Result;

use crate::{dev, mount, server_config};

/// Reads and checks a configuration file as its program does at its start. `kind` chooses the kind
/// of file.
pub fn read_text(kind: u8, text: &str) -> Result<()> {
    match kind % 4 {
        0 => server_config::check_mds(text),
        1 => server_config::check_oss(text),
        2 => mount::check(text),
        _ => dev::check(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of a configuration table, as listed in the error for an unknown key.
    fn keys(kind: u8, table: &str) -> Vec<String> {
        let e = read_text(kind, &format!("{table}\nno_such_key = 1\n")).unwrap_err();
        let names: Vec<String> =
            e.message.split('`').skip(1).step_by(2).map(String::from).collect();
        assert!(names.len() > 2 && names[0] == "no_such_key", "{e}");
        names[1..].to_vec()
    }

    #[track_caller]
    fn documented(heading: &str, keys: &[String]) {
        let text = include_str!("../../docs/operations.md");
        let section = text
            .split(&format!("\n## {heading}\n"))
            .nth(1)
            .and_then(|t| t.split("\n## ").next())
            .unwrap();
        for k in keys {
            let named = [format!("`{k}`"), format!("`[{k}]`")].iter().any(|n| section.contains(n));
            assert!(named, "`{k}` is not in docs/operations.md, {heading}");
        }
    }

    #[test]
    fn every_key_of_a_metadata_server_is_documented() {
        let heading = "Metadata server configuration";
        documented(heading, &keys(0, ""));
        documented(heading, &keys(0, "[mds]"));
    }

    #[test]
    fn every_key_of_a_storage_server_is_documented() {
        let heading = "Object storage server configuration";
        documented(heading, &keys(1, ""));
        documented(heading, &keys(1, "[oss]"));
        documented(heading, &keys(1, "[[oss.targets]]"));
    }

    #[test]
    fn every_key_of_a_mount_is_documented() {
        let heading = "Mount configuration";
        documented(heading, &keys(2, ""));
        documented(heading, &keys(2, "[mount]"));
    }
}
