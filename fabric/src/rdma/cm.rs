//! The RDMA connection manager's ids and events, as futures.

use std::{
    ffi::c_int,
    net::{IpAddr, SocketAddr},
    os::fd::RawFd,
    ptr::null_mut,
};

use strake_proto::{Code, Error, Result};
use tokio::io::unix::AsyncFd;

use super::{
    greeting::Greeting,
    verbs::{self, CmChannel, CmEvent, CmId, ConnParam, Lib, event, os_error},
};

/// A channel of events.
pub struct Events {
    lib: &'static Lib,
    raw: *mut CmChannel,
    /// Dropped before the channel is.
    fd: Option<AsyncFd<RawFd>>,
}

// SAFETY: the library allows any thread.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

/// An event, copied and acknowledged.
pub struct Event {
    pub kind: c_int,
    pub status: c_int,
    /// For a connection request: the new id.
    pub id: *mut CmId,
    pub private: Vec<u8>,
    /// Concurrent READs that this end is asked to serve, and that it may issue.
    pub reads: (u8, u8),
}

// SAFETY: the id is only a name here.
unsafe impl Send for Event {}

pub fn non_blocking(fd: RawFd) -> Result<AsyncFd<RawFd>> {
    // SAFETY: plain calls on an open descriptor.
    let rc = unsafe {
        libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK)
    };
    if rc < 0 {
        return Err(os_error("a descriptor that does not block"));
    }
    // SAFETY: callers drop the result before they close the descriptor, see `Events` and `Queue`.
    let registered = unsafe { AsyncFd::register(fd) };
    registered
        .map_err(|e| Error::from(std::io::Error::from(e)).context("a descriptor of RDMA events"))
}

/// Checks that the connection manager is available. An error is a sentence.
pub fn see(lib: &'static Lib) -> Result<()> {
    let raw = open_channel(lib)?;
    // SAFETY: just made, and nothing is on it.
    unsafe { (lib.rdma_destroy_event_channel)(raw) };
    Ok(())
}

fn open_channel(lib: &Lib) -> Result<*mut CmChannel> {
    // SAFETY: no arguments.
    let raw = unsafe { (lib.rdma_create_event_channel)() };
    if raw.is_null() {
        let e = std::io::Error::last_os_error();
        return Err(verbs::missing(format!(
            "the connection manager cannot be opened ({e}); load its module (modprobe rdma_ucm) \
             and make sure that /dev/infiniband/rdma_cm can be read and written"
        )));
    }
    Ok(raw)
}

impl Events {
    pub fn new(lib: &'static Lib) -> Result<Events> {
        let raw = open_channel(lib)?;
        let mut events = Events { lib, raw, fd: None };
        // SAFETY: a channel just made.
        events.fd = Some(non_blocking(unsafe { (*raw).fd })?);
        Ok(events)
    }

    pub fn try_next(&self) -> Result<Option<Event>> {
        let mut raw: *mut CmEvent = null_mut();
        // SAFETY: an open channel; a success gives an event that is valid until it is acknowledged.
        unsafe {
            if (self.lib.rdma_get_cm_event)(self.raw, &raw mut raw) != 0 {
                let e = std::io::Error::last_os_error();
                return match e.kind() {
                    std::io::ErrorKind::WouldBlock => Ok(None),
                    _ => Err(Error::from(e).context("events of RDMA connections")),
                };
            }
            let e = &*raw;
            let private = match e.conn.private_data_len {
                n if n > 0 && !e.conn.private_data.is_null() => {
                    std::slice::from_raw_parts(e.conn.private_data.cast::<u8>(), usize::from(n))
                        .to_vec()
                }
                _ => Vec::new(),
            };
            let reads = (e.conn.responder_resources, e.conn.initiator_depth);
            let event = Event { kind: e.event, status: e.status, id: e.id, private, reads };
            (self.lib.rdma_ack_cm_event)(raw);
            Ok(Some(event))
        }
    }

    pub async fn next(&self) -> Result<Event> {
        let fd = self
            .fd
            .as_ref()
            .ok_or_else(|| Error::new(Code::Disconnected, "a closed event channel"))?;
        loop {
            if let Some(e) = self.try_next()? {
                return Ok(e);
            }
            let mut ready = fd.readable().await?;
            // An event that arrives between the check above and this one is found by this check or
            // wakes it again.
            if let Some(e) = self.try_next()? {
                return Ok(e);
            }
            ready.clear_ready();
        }
    }

    /// The next event, which must be of this kind.
    pub async fn expect(&self, kind: c_int, to: &str) -> Result<Event> {
        expected(self.next().await?, kind, to)
    }
}

/// An event that must be of this kind.
pub fn expected(e: Event, kind: c_int, to: &str) -> Result<Event> {
    if e.kind == kind { Ok(e) } else { Err(refused(&e, to)) }
}

/// The error for an unexpected event. `Protocol` only for an answer of a peer that does not speak
/// this protocol. A listener that goes away is not such a peer: its kernel rejects the connections
/// that it had not answered, without private data.
fn refused(e: &Event, to: &str) -> Error {
    if e.kind == event::REJECTED
        && e.status == verbs::REJ_BY_LISTENER
        && !Greeting::is_none(&e.private)
    {
        return match Greeting::decode(&e.private) {
            Ok(g) => {
                let code = if g.status == 0 {
                    Code::Disconnected
                } else {
                    Code::from_wire(u32::from(g.status))
                };
                let why = match code {
                    Code::Overloaded => "it has too many connections",
                    Code::NoMem => "it has no memory for another connection",
                    Code::Io => "it cannot use its device",
                    Code::Protocol => "it does not speak this version of the RDMA greeting",
                    _ => "for another reason",
                };
                Error::new(code, format!("{to} refused the connection: {why} ({code:?})"))
            }
            Err(e) => e.context(to.to_string()),
        };
    }
    let why = match e.kind {
        event::REJECTED if e.status == verbs::REJ_NO_LISTENER => "nobody listens there".into(),
        event::REJECTED if e.status == verbs::REJ_BY_LISTENER => {
            "it closed before it answered".into()
        }
        event::REJECTED => format!("rejected (reason {})", e.status),
        event::ADDR_ERROR => "no RDMA device has a route to that address".into(),
        event::ROUTE_ERROR => "no route".into(),
        event::UNREACHABLE | event::CONNECT_ERROR => format!("unreachable ({})", e.status),
        event::DISCONNECTED => "the other end closed the connection".into(),
        event::DEVICE_REMOVAL => "the device was removed".into(),
        k => format!("event {k} ({})", e.status),
    };
    Error::new(Code::Disconnected, format!("cannot connect to {to}: {why}"))
}

impl Drop for Events {
    fn drop(&mut self) {
        self.fd = None;
        // SAFETY: made by the library; ids on it are dropped before it, see `Id`.
        unsafe { (self.lib.rdma_destroy_event_channel)(self.raw) }
    }
}

/// An id of the connection manager, with its event channel.
pub struct Id {
    lib: &'static Lib,
    pub raw: *mut CmId,
    pub events: Events,
}

// SAFETY: the library allows any thread.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    pub fn new(lib: &'static Lib) -> Result<Id> {
        let events = Events::new(lib)?;
        let mut raw = null_mut();
        // SAFETY: an open channel.
        if unsafe { (lib.rdma_create_id)(events.raw, &raw mut raw, null_mut(), verbs::PS_TCP) } != 0
        {
            return Err(os_error("an RDMA connection"));
        }
        Ok(Id { lib, raw, events })
    }

    /// The id of a connection request, moved to a channel of its own. It is destroyed if that
    /// fails.
    pub fn of_request(lib: &'static Lib, raw: *mut CmId) -> Result<Id> {
        let events = Events::new(lib).inspect_err(|_| {
            // SAFETY: an id that is nobody else's.
            unsafe { (lib.rdma_destroy_id)(raw) };
        })?;
        let id = Id { lib, raw, events };
        // SAFETY: an id without events that are not acknowledged.
        if unsafe { (lib.rdma_migrate_id)(raw, id.events.raw) } != 0 {
            return Err(os_error("an RDMA connection's events"));
        }
        Ok(id)
    }

    pub fn verbs(&self) -> *mut verbs::Context {
        // SAFETY: a valid id.
        unsafe { (*self.raw).verbs }
    }

    /// The other end's address.
    pub fn peer(&self) -> String {
        // SAFETY: a valid id holds the address in a `sockaddr_storage`, of the family that it
        // names.
        unsafe {
            let at = &raw const (*self.raw).dst;
            match c_int::from((*at).ss_family) {
                libc::AF_INET => {
                    let a = &*at.cast::<libc::sockaddr_in>();
                    let ip = std::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
                    SocketAddr::from((ip, u16::from_be(a.sin_port))).to_string()
                }
                libc::AF_INET6 => {
                    let a = &*at.cast::<libc::sockaddr_in6>();
                    SocketAddr::from((a.sin6_addr.s6_addr, u16::from_be(a.sin6_port))).to_string()
                }
                _ => "an unknown address".into(),
            }
        }
    }

    /// Finds device, port and path: from the port with the address `from`, or else from the one
    /// that the kernel's routes give.
    pub async fn resolve(
        &self,
        from: Option<IpAddr>,
        to: SocketAddr,
        limit_ms: c_int,
        name: &str,
    ) -> Result<()> {
        let mut at = sockaddr(to);
        let mut from = from.map(|ip| sockaddr(SocketAddr::new(ip, 0)));
        let from = from.as_mut().map_or(null_mut(), |f| (&raw mut *f).cast());
        // SAFETY: a valid id and addresses that outlive the call; without the first one, null.
        let rc =
            unsafe { (self.lib.rdma_resolve_addr)(self.raw, from, (&raw mut at).cast(), limit_ms) };
        let no_way =
            |e: Error| Error::new(Code::Disconnected, format!("cannot connect to {name}: {e}"));
        if rc != 0 {
            return Err(no_way(os_error("no RDMA device has a route to that address")));
        }
        self.events.expect(event::ADDR_RESOLVED, name).await?;
        // SAFETY: a valid id whose address is resolved.
        if unsafe { (self.lib.rdma_resolve_route)(self.raw, limit_ms) } != 0 {
            return Err(no_way(os_error("no route")));
        }
        self.events.expect(event::ROUTE_RESOLVED, name).await.map(|_| ())
    }

    pub fn listen(&self, at: SocketAddr, backlog: c_int) -> Result<u16> {
        let mut at = sockaddr(at);
        // SAFETY: a valid id and address.
        unsafe {
            if (self.lib.rdma_bind_addr)(self.raw, (&raw mut at).cast()) != 0
                || (self.lib.rdma_listen)(self.raw, backlog) != 0
            {
                return Err(os_error("RDMA"));
            }
            Ok(u16::from_be((self.lib.rdma_get_src_port)(self.raw)))
        }
    }

    /// `reads`: how many READs this end serves at a time, and how many it issues.
    fn param(private: &[u8], reads: (u8, u8)) -> ConnParam {
        ConnParam {
            private_data: private.as_ptr().cast(),
            private_data_len: private.len() as u8,
            responder_resources: reads.0,
            initiator_depth: reads.1,
            flow_control: 1,
            retry_count: 7,
            // Retry without limit: a shared receive queue may be empty for a while.
            rnr_retry_count: 7,
            srq: 1,
            qp_num: 0,
        }
    }

    pub fn connect(&self, private: &[u8], reads: (u8, u8)) -> Result<()> {
        let mut p = Id::param(private, reads);
        // SAFETY: a resolved id with a queue pair; the parameters outlive the call.
        match unsafe { (self.lib.rdma_connect)(self.raw, &raw mut p) } {
            0 => Ok(()),
            _ => Err(os_error("an RDMA connection")),
        }
    }

    pub fn accept(&self, private: &[u8], reads: (u8, u8)) -> Result<()> {
        let mut p = Id::param(private, reads);
        // SAFETY: as for `connect`.
        match unsafe { (self.lib.rdma_accept)(self.raw, &raw mut p) } {
            0 => Ok(()),
            _ => Err(os_error("an RDMA connection")),
        }
    }

    pub fn reject(&self, private: &[u8]) {
        // SAFETY: an id of a request. A failure is as good as a rejection: the other end times out.
        unsafe { (self.lib.rdma_reject)(self.raw, private.as_ptr().cast(), private.len() as u8) };
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: all events were acknowledged; the queue pair is gone, see `Queue`. The channel
        // goes after it.
        unsafe { (self.lib.rdma_destroy_id)(self.raw) };
    }
}

fn sockaddr(a: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: all zeros are a value of it, and it has room and alignment for both kinds.
    unsafe {
        let mut s: libc::sockaddr_storage = std::mem::zeroed();
        match a {
            SocketAddr::V4(v4) => {
                let p = &mut *(&raw mut s).cast::<libc::sockaddr_in>();
                p.sin_family = libc::AF_INET as u16;
                p.sin_port = v4.port().to_be();
                p.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                let p = &mut *(&raw mut s).cast::<libc::sockaddr_in6>();
                p.sin6_family = libc::AF_INET6 as u16;
                p.sin6_port = v6.port().to_be();
                p.sin6_addr.s6_addr = v6.ip().octets();
                p.sin6_scope_id = v6.scope_id();
            }
        }
        s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(kind: c_int, status: c_int, private: &[u8]) -> Error {
        let e = Event { kind, status, id: null_mut(), private: private.to_vec(), reads: (0, 0) };
        refused(&e, "rdma:h:1")
    }

    #[test]
    fn who_goes_away_before_he_answers_is_away_and_only_an_answer_is_of_another_protocol() {
        let rejected = |private: &[u8]| says(event::REJECTED, verbs::REJ_BY_LISTENER, private);
        // What a kernel sends for a listener that is killed, ends, or drops a request for lack of
        // memory.
        for none in [&[][..], &[0; 24], &[0; 148]] {
            let e = rejected(none);
            assert!(
                e.code == Code::Disconnected && e.message.contains("closed before it answered"),
                "{e}"
            );
        }
        for (kind, status) in [
            (event::REJECTED, verbs::REJ_NO_LISTENER),
            (event::REJECTED, 4),
            (event::UNREACHABLE, -110),
            (event::CONNECT_ERROR, -22),
            (event::DISCONNECTED, 0),
            (event::DEVICE_REMOVAL, 0),
            (event::ADDR_ERROR, -19),
            (event::ROUTE_ERROR, -110),
        ] {
            assert_eq!(says(kind, status, &[]).code, Code::Disconnected, "event {kind} ({status})");
        }
        let greeting = |code: u16| Greeting { message: 0, credits: 0, status: code }.encode();
        for code in [Code::Overloaded, Code::NoMem, Code::Io, Code::Protocol, Code::Disconnected] {
            let e = rejected(&[&greeting(code as u16)[..], &[0; 124]].concat());
            assert!(
                e.code == code && e.message.starts_with("rdma:h:1 refused the connection: "),
                "{e}"
            );
        }
        let e = rejected(&greeting(Code::Overloaded as u16));
        assert!(e.message.contains("too many connections"), "{e}");
        let well = Greeting { message: 4096, credits: 32, status: 0 }.encode();
        assert_eq!(rejected(&well).code, Code::Disconnected);
        // The answer of some other protocol.
        assert_eq!(rejected(b"HTTP/1.1 400 Bad Request").code, Code::Protocol);
        assert_eq!(rejected(&[0xff; 148]).code, Code::Protocol);
    }
}
