//! The address of a process: `tcp:HOST:PORT`, `rdma:HOST:PORT`, or `sim:N` in the simulator.

use std::{fmt, str::FromStr};

use strake_proto::{Code, Error};

/// Where metadata servers listen unless told otherwise.
pub const MDS_PORT: u16 = 7400;

/// The machine of an address: all of it but the port.
pub fn machine(addr: &str) -> &str {
    addr.rsplit_once([':', '/']).map_or(addr, |(host, _)| host)
}

/// Where a process is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Endpoint {
    /// Host name or address, and port.
    Tcp(String, u16),
    /// Address of an RDMA port (or a name for it), and port of the connection manager.
    Rdma(String, u16),
    /// A node of the simulator.
    Sim(u32),
}

impl FromStr for Endpoint {
    type Err = Error;

    /// `tcp:HOST:PORT` or `rdma:HOST:PORT`; `tcp:` may be left out. IPv6 addresses are written in
    /// brackets.
    fn from_str(s: &str) -> Result<Endpoint, Error> {
        let bad = || {
            Error::new(
                Code::Inval,
                format!("'{s}' is not an endpoint; expected tcp:HOST:PORT or rdma:HOST:PORT"),
            )
        };
        if let Some(n) = s.strip_prefix("sim:") {
            return n.parse().map(Endpoint::Sim).map_err(|_| bad());
        }
        let rdma = s.strip_prefix("rdma:");
        let rest = rdma.or_else(|| s.strip_prefix("tcp:")).unwrap_or(s);
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.is_empty() || (host.contains(':') && !bracketed) || host.contains(['/', ' ']) {
            return Err(bad());
        }
        let host = host.to_string();
        Ok(if rdma.is_some() { Endpoint::Rdma(host, port) } else { Endpoint::Tcp(host, port) })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(h, p) => write!(f, "tcp:{h}:{p}"),
            Endpoint::Rdma(h, p) => write!(f, "rdma:{h}:{p}"),
            Endpoint::Sim(n) => write!(f, "sim:{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        for (s, want) in [
            ("tcp:127.0.0.1:7000", "tcp:127.0.0.1:7000"),
            ("n1:7", "tcp:n1:7"),
            ("tcp:[::1]:7", "tcp:[::1]:7"),
            ("rdma:10.0.0.1:7", "rdma:10.0.0.1:7"),
            ("rdma:[fe80::1]:7", "rdma:[fe80::1]:7"),
            ("sim:3", "sim:3"),
        ] {
            assert_eq!(s.parse::<Endpoint>().unwrap().to_string(), want);
        }
        for s in [
            "",
            "tcp:",
            "tcp:host",
            "tcp::7",
            "tcp:h:70000",
            "::1:7",
            "rdma:h:1:2",
            "rdma:",
            "rdma:h",
            "rdma::7",
            "sim:x",
        ] {
            assert!(s.parse::<Endpoint>().is_err(), "{s}");
        }
    }
}
