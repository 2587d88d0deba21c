//! Parses the `device` of a target on SPDK: `spdk:`, SPDK's own transport id, and two keys of ours,
//! `ns` and `cores`.

use std::{fmt, net::IpAddr, str::FromStr};

use strake_proto::{Code, Error, Result};

/// Prefix of every device that SPDK drives.
pub const PREFIX: &str = "spdk:";
/// Longest NVMe qualified name.
const MOST_NQN: usize = 223;
/// Most cores of a device.
const MOST_CORES: usize = 64;

/// A PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = ();
    /// `DDDD:BB:DD.F`, or without the domain.
    fn from_str(s: &str) -> Result<PciAddress, ()> {
        let hex = |s: &str, digits| match s.len() {
            1.. if s.len() <= digits && s.bytes().all(|b| b.is_ascii_hexdigit()) => {
                u32::from_str_radix(s, 16).map_err(drop)
            }
            _ => Err(()),
        };
        let (rest, function) = s.rsplit_once('.').ok_or(())?;
        let (rest, device) = rest.rsplit_once(':').ok_or(())?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let (device, function) = (hex(device, 2)? as u8, hex(function, 1)? as u8);
        if device > 31 || function > 7 {
            return Err(());
        }
        Ok(PciAddress { domain: hex(domain, 8)?, bus: hex(bus, 2)? as u8, device, function })
    }
}

/// How a controller is reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// NVMe in this machine.
    Pcie(PciAddress),
    /// NVMe over TCP.
    Tcp(Remote),
    /// NVMe over RDMA.
    Rdma(Remote),
}

/// A controller of another machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Remote {
    /// Where it listens.
    pub address: IpAddr,
    /// Where it listens.
    pub port: u16,
    /// Its NVMe qualified name.
    pub subsystem: String,
}

/// A namespace, how it is reached, and the CPUs that drive it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportId {
    /// How its controller is reached.
    pub transport: Transport,
    /// Its number, from 1.
    pub namespace: u32,
    /// CPUs with a reactor each. If empty: the last CPU that this process may use.
    pub cores: Vec<usize>,
}

impl fmt::Display for TransportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{} ns:{}", self.of_spdk(), self.namespace)
    }
}

impl TransportId {
    /// In SPDK's format.
    pub fn of_spdk(&self) -> String {
        let remote = |kind: &str, r: &Remote| {
            let family = if r.address.is_ipv4() { "IPv4" } else { "IPv6" };
            let Remote { address, port, subsystem } = r;
            format!(
                "trtype:{kind} adrfam:{family} traddr:{address} trsvcid:{port} subnqn:{subsystem}"
            )
        };
        match &self.transport {
            Transport::Pcie(at) => format!("trtype:PCIe traddr:{at}"),
            Transport::Tcp(r) => remote("TCP", r),
            Transport::Rdma(r) => remote("RDMA", r),
        }
    }

    /// Parses all of `text`, which begins with [`PREFIX`]. `Inval` with what is wrong.
    pub fn parse(text: &str) -> Result<TransportId> {
        let example = "spdk:trtype:TCP traddr:192.0.2.7 trsvcid:4420 subnqn:nqn.2024-01.org.example:disk1, or spdk:trtype:PCIe traddr:0000:3b:00.0";
        let bad = |m: String| {
            Error::new(Code::Inval, format!("device '{text}': {m}; expected for example {example}"))
        };
        let rest =
            text.strip_prefix(PREFIX).ok_or_else(|| bad("it does not begin with spdk:".into()))?;
        let keys = ["trtype", "adrfam", "traddr", "trsvcid", "subnqn", "ns", "cores"];
        let mut values: [Option<&str>; 7] = [None; 7];
        for word in rest.split_whitespace() {
            let (key, value) = word
                .split_once([':', '='])
                .ok_or_else(|| bad(format!("'{word}' is not KEY:VALUE")))?;
            let at = keys.iter().position(|k| k.eq_ignore_ascii_case(key));
            let at = at.ok_or_else(|| bad(format!("unknown key '{key}'")))?;
            if value.is_empty() || values[at].replace(value).is_some() {
                return Err(bad(format!("'{key}' must be given once, with a value")));
            }
        }
        let [kind, family, address, port, subsystem, ns, cores] = values;
        let need = |name: &str, value: Option<&'_ str>| {
            value.map(str::to_string).ok_or_else(|| bad(format!("{name} is missing")))
        };
        let address = need("traddr", address)?;
        let kind = need("trtype", kind)?.to_ascii_uppercase();
        let transport = match &kind[..] {
            "PCIE" => {
                if [family, port, subsystem].iter().any(Option::is_some) {
                    return Err(bad("PCIe takes traddr only".into()));
                }
                let wrong =
                    |()| bad(format!("'{address}' is not a PCI address (as lspci -D prints it)"));
                Transport::Pcie(address.parse().map_err(wrong)?)
            }
            "TCP" | "RDMA" => {
                let address: IpAddr = address
                    .parse()
                    .map_err(|_| bad(format!("'{address}' is not an IP address")))?;
                let said = if address.is_ipv4() { "IPv4" } else { "IPv6" };
                if family.is_some_and(|f| !f.eq_ignore_ascii_case(said)) {
                    return Err(bad(format!("{address} is {said}")));
                }
                let port = need("trsvcid", port)?;
                let port = port
                    .parse()
                    .ok()
                    .filter(|p| *p > 0)
                    .ok_or_else(|| bad(format!("'{port}' is not a port")))?;
                let subsystem = need("subnqn", subsystem)?;
                if !subsystem.starts_with("nqn.") || subsystem.len() > MOST_NQN {
                    return Err(bad(format!("'{subsystem}' is not an NVMe qualified name")));
                }
                let remote = Remote { address, port, subsystem };
                if kind == "TCP" { Transport::Tcp(remote) } else { Transport::Rdma(remote) }
            }
            other => return Err(bad(format!("trtype '{other}' is not PCIe, TCP or RDMA"))),
        };
        let namespace = ns.unwrap_or("1").parse().ok().filter(|n| (1..u32::MAX).contains(n));
        let namespace = namespace.ok_or_else(|| bad("ns must be a number from 1".into()))?;
        let cores = cores.map_or(Some(Vec::new()), list);
        let cores = cores.ok_or_else(|| bad("cores must be CPU numbers, as in 2,4-5".into()))?;
        Ok(TransportId { transport, namespace, cores })
    }
}

/// Parses numbers and ranges separated by commas, each number at most once.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut out = Vec::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
        if from > to || to >= libc::CPU_SETSIZE as usize || to - from >= MOST_CORES {
            return None;
        }
        out.extend(from..=to);
    }
    out.sort_unstable();
    let all = out.len();
    out.dedup();
    (out.len() == all && all <= MOST_CORES).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_ids() {
        let t = TransportId::parse(
            "spdk:trtype:tcp traddr:127.0.0.1 trsvcid:4420 subnqn:nqn.2016-06.io.spdk:c1 ns:2 cores:1,3-4",
        )
        .unwrap();
        assert_eq!(
            t.of_spdk(),
            "trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:4420 subnqn:nqn.2016-06.io.spdk:c1"
        );
        assert_eq!((t.namespace, &t.cores[..]), (2, &[1, 3, 4][..]));
        assert_eq!(TransportId::parse(&t.to_string()).unwrap().transport, t.transport);
        let t = TransportId::parse(
            "spdk:trtype=RDMA adrfam=ipv6 traddr=fe80::1 trsvcid=1 subnqn=nqn.x",
        )
        .unwrap();
        assert_eq!(
            (t.of_spdk().as_str(), t.namespace),
            ("trtype:RDMA adrfam:IPv6 traddr:fe80::1 trsvcid:1 subnqn:nqn.x", 1)
        );
        for (given, is) in [
            ("0000:3b:00.0", "0000:3b:00.0"),
            ("3B:1f.7", "0000:3b:1f.7"),
            ("10000:01:00.0", "10000:01:00.0"),
        ] {
            let t = TransportId::parse(&format!("spdk:trtype:PCIe traddr:{given}")).unwrap();
            assert_eq!(t.of_spdk(), format!("trtype:PCIe traddr:{is}"));
        }
    }

    #[test]
    fn mistakes_are_named() {
        let tcp = "spdk:trtype:TCP traddr:127.0.0.1 trsvcid:4420 subnqn:nqn.a";
        let pcie = "spdk:trtype:PCIe traddr:3b:00.0";
        let long =
            format!("spdk:trtype:TCP traddr:127.0.0.1 trsvcid:1 subnqn:nqn.{}", "x".repeat(220));
        for (text, says) in [
            ("/dev/nvme0n1", "does not begin"),
            ("spdk:", "traddr is missing"),
            ("spdk:trtype:TCP", "traddr is missing"),
            ("spdk:traddr:127.0.0.1", "trtype is missing"),
            ("spdk:trtype:FC traddr:x", "not PCIe, TCP or RDMA"),
            ("spdk:trtype:PCIe traddr:", "given once, with a value"),
            ("spdk:trtype:PCIe traddr:*", "not a PCI address"),
            ("spdk:trtype:PCIe traddr:0000:3b:00.8", "not a PCI address"),
            ("spdk:trtype:PCIe traddr:0000:3b:20.0", "not a PCI address"),
            ("spdk:trtype:PCIe traddr:+3b:00.0", "not a PCI address"),
            ("spdk:trtype:TCP traddr:host trsvcid:1 subnqn:nqn.a", "not an IP address"),
            ("spdk:trtype:TCP traddr:127.0.0.1 subnqn:nqn.a", "trsvcid is missing"),
            ("spdk:trtype:TCP traddr:127.0.0.1 trsvcid:0 subnqn:nqn.a", "not a port"),
            ("spdk:trtype:TCP traddr:127.0.0.1 trsvcid:65536 subnqn:nqn.a", "not a port"),
            ("spdk:trtype:TCP traddr:127.0.0.1 trsvcid:1 subnqn:disk", "qualified name"),
            (&long, "qualified name"),
            (&format!("{tcp} adrfam:IPv6"), "is IPv4"),
            (&format!("{tcp} ns:0"), "ns must be"),
            (&format!("{tcp} ns:4294967295"), "ns must be"),
            (&format!("{tcp} cores:"), "given once"),
            (&format!("{tcp} cores:1,1"), "cores must be"),
            (&format!("{tcp} cores:3-1"), "cores must be"),
            (&format!("{tcp} cores:0-9999999999"), "cores must be"),
            (&format!("{tcp} traddr:127.0.0.2"), "given once"),
            (&format!("{tcp} priority:1"), "unknown key"),
            (&format!("{tcp} x"), "not KEY:VALUE"),
            (&format!("{pcie} trsvcid:1"), "traddr only"),
        ] {
            let e = TransportId::parse(text).unwrap_err();
            assert!(e.code == Code::Inval && e.message.contains(says), "{text}: {e}");
        }
    }
}
