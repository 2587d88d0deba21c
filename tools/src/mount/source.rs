//! The source of a mount: `HOST[:PORT][,HOST[:PORT]...]:/SUBTREE`, or servers alone. Pure.

use strake_fabric::{Endpoint, endpoint::MDS_PORT};
use strake_proto::{Code, Error, Result};

/// Longest path of Linux, bytes.
const LONGEST: usize = 4095;

/// A source's parts.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Metadata servers with ports; empty: those of the configuration file.
    pub mds: Vec<String>,
    /// The folder to be mounted as the root; `None` if the source names servers only.
    pub subtree: Option<String>,
}

fn bad(m: String) -> Error {
    Error::new(Code::Inval, m)
}

impl Source {
    /// Parses a source. `EINVAL` says what is wrong with it.
    pub fn parse(text: &str) -> Result<Source> {
        let (servers, subtree) = match text.split_once(":/") {
            Some((servers, path)) => (servers, Some(subtree(&format!("/{path}"))?)),
            None => (text, None),
        };
        let form = || bad(format!("'{text}' is not HOST[:PORT][,HOST[:PORT]...]:/SUBTREE"));
        let mds = match servers {
            "" if subtree.is_some() => Vec::new(),
            _ => servers.split(',').map(|s| server(s).ok_or_else(form)).collect::<Result<_>>()?,
        };
        Ok(Source { mds, subtree })
    }
}

/// Adds the port. `None`: this is no address.
pub fn server(text: &str) -> Option<String> {
    let host = text.strip_prefix("tcp:").unwrap_or(text);
    let has_port = if host.starts_with('[') { host.contains("]:") } else { host.contains(':') };
    let whole = if has_port { host.to_string() } else { format!("{host}:{MDS_PORT}") };
    let ok = matches!(whole.parse::<Endpoint>(), Ok(Endpoint::Tcp(..)));
    ok.then_some(whole)
}

/// Normalizes a path of the file system: from the root, without `.`, empty parts and a trailing
/// slash.
pub fn subtree(path: &str) -> Result<String> {
    let refuse = |why: &str| Err(bad(format!("subtree '{path}': {why}")));
    if !path.starts_with('/') {
        return refuse("must begin with '/', the root of the file system");
    }
    if path.len() > LONGEST {
        return refuse("is longer than a path can be");
    }
    let parts: Vec<&str> = path.split('/').filter(|p| !matches!(*p, "" | ".")).collect();
    if parts.contains(&"..") {
        return refuse("must not contain '..'");
    }
    Ok(format!("/{}", parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let of = |text: &str| Source::parse(text).map(|s| (s.mds.join(" "), s.subtree)).unwrap();
        let some = |s: &str| Some(s.to_string());
        assert_eq!(of("m1:/"), ("m1:7400".into(), some("/")));
        assert_eq!(of("m1,m2:1,tcp:m3:2:/a/b"), ("m1:7400 m2:1 m3:2".into(), some("/a/b")));
        assert_eq!(
            of("[::1],[fe80::2]:9:/a//./b/"),
            ("[::1]:7400 [fe80::2]:9".into(), some("/a/b"))
        );
        assert_eq!(of(":/x"), (String::new(), some("/x")));
        assert_eq!(of("m1:5,m2"), ("m1:5 m2:7400".into(), None));
        assert_eq!(of("m1:/a:/b"), ("m1:7400".into(), some("/a:/b")));
        assert_eq!(of("m1:/mit Leerzeichen, und Komma").1, some("/mit Leerzeichen, und Komma"));
    }

    #[test]
    fn mistakes() {
        for text in [
            "",
            ",",
            "m1,",
            "m1::/",
            "m1:99999:/",
            "m1:x:/",
            "::1:/",
            "a b:/",
            "m1:",
            "m1/x",
            "sim:1:/",
            "[::1:/",
        ] {
            let e = Source::parse(text).unwrap_err();
            assert!(e.code == Code::Inval && e.message.contains("HOST[:PORT]"), "{text}: {e}");
        }
        assert!(Source::parse("m:/a/../b").unwrap_err().message.contains("'..'"));
        assert!(
            Source::parse(&format!("m:/{}", "x".repeat(5000)))
                .unwrap_err()
                .message
                .contains("longer")
        );
        assert!(subtree("a").unwrap_err().message.contains("begin with '/'"));
    }
}
