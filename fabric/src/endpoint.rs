//! Where a process is reached: `tcp:HOST:PORT`, or `sim:N` in the simulator.

use std::{fmt, str::FromStr};

use strake_proto::{Code, Error};

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Endpoint {
    /// Host name or address, and port.
    Tcp(String, u16),
    /// A node of the simulator.
    Sim(u32),
}

impl FromStr for Endpoint {
    type Err = Error;

    /// `tcp:HOST:PORT`; `tcp:` may be left out. IPv6 addresses stand in brackets.
    fn from_str(s: &str) -> Result<Endpoint, Error> {
        let bad = || Error::new(Code::Inval, format!("'{s}' is not an endpoint; expected tcp:HOST:PORT"));
        if let Some(n) = s.strip_prefix("sim:") {
            return n.parse().map(Endpoint::Sim).map_err(|_| bad());
        }
        let (host, port) = s.strip_prefix("tcp:").unwrap_or(s).rsplit_once(':').ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.is_empty() || (host.contains(':') && !bracketed) || host.contains(['/', ' ']) {
            return Err(bad());
        }
        Ok(Endpoint::Tcp(host.to_string(), port))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(h, p) => write!(f, "tcp:{h}:{p}"),
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
            ("sim:3", "sim:3"),
        ] {
            assert_eq!(s.parse::<Endpoint>().unwrap().to_string(), want);
        }
        for s in ["", "tcp:", "tcp:host", "tcp::7", "tcp:h:70000", "::1:7", "rdma:h:1:2", "sim:x"] {
            assert!(s.parse::<Endpoint>().is_err(), "{s}");
        }
    }
}
