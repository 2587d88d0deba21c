//! Shares out a listener's connections. Anybody can connect, so connections whose handshake is not
//! finished only take each other's places, the oldest first. Connections that have finished it are
//! shared between machines, with some reserved for servers.
//!
//! A pure table with a lock around it: nothing here waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use strake_proto::{Code, Error, Result};
use tokio::sync::oneshot;

use crate::{Role, conn::Options};

/// A handshake keeps its place for at least this long before another one may take it.
const LEAST: Duration = Duration::from_secs(1);

struct Half {
    from: IpAddr,
    since: Instant,
    _push: oneshot::Sender<()>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// Handshakes under way in order of arrival; those of each machine; and machines by the number
    /// of their handshakes.
    half: BTreeMap<u64, Half>,
    half_of: BTreeMap<IpAddr, BTreeSet<u64>>,
    most: BTreeSet<(usize, IpAddr)>,
    clients: BTreeMap<IpAddr, usize>,
    /// Number of open connections: clients, servers.
    open: (usize, usize),
}

/// See the module. Clones share one table.
#[derive(Clone)]
pub struct Places {
    table: Arc<Mutex<Table>>,
    half_open: usize,
    connections: usize,
}

/// The place of a handshake.
pub struct HalfOpen {
    places: Places,
    id: u64,
    /// Ends when another handshake has taken the place.
    pub pushed: oneshot::Receiver<()>,
}

/// The place of a connection.
pub struct Place {
    places: Places,
    role: Role,
    from: IpAddr,
}

impl Places {
    /// Limits connections by the process's descriptors, leaving some for other files.
    pub fn new(options: &Options) -> Places {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let files = usize::try_from(files).unwrap_or(usize::MAX) / 4;
        let (half_open, connections) = (options.max_half_open, options.max_connections);
        Places {
            table: Arc::default(),
            half_open: half_open.min(files).max(1),
            connections: connections.min(files * 2).max(1),
        }
    }

    /// A place for a handshake. When all are taken, takes another one's place. An error says how
    /// long until one may be taken.
    pub fn enter(&self, from: IpAddr, now: Instant) -> std::result::Result<HalfOpen, Duration> {
        let mut t = self.table.lock();
        if t.half.len() >= self.half_open
            && let Some(oldest) = t.oldest_of_most()
        {
            let age = t.half.get(&oldest).map_or(LEAST, |h| now.saturating_duration_since(h.since));
            if age < LEAST {
                return Err(LEAST - age);
            }
            t.leave(oldest);
        }
        let id = t.next;
        t.next += 1;
        let (push, pushed) = oneshot::channel();
        t.begin(id, Half { from, since: now, _push: push });
        Ok(HalfOpen { places: self.clone(), id, pushed })
    }

    /// The place of a connection that proved its role. `Overloaded`: the limit is reached, with the
    /// reason.
    pub fn admit(&self, role: Role, from: IpAddr) -> Result<Place> {
        let mut t = self.table.lock();
        let all = self.connections;
        let for_clients = all - all / 8;
        let share = (all / 2).max(1);
        let (clients, servers) = t.open;
        let full = |m: String| Err(Error::new(Code::Overloaded, m));
        if clients + servers >= all || role == Role::Client && clients >= for_clients {
            return full(format!("this server has too many connections ({all}); try again later"));
        }
        match role {
            Role::Client => {
                let own = t.clients.entry(from).or_default();
                if *own >= share {
                    return full(format!(
                        "{share} connections come from {from}, which is the limit for one machine"
                    ));
                }
                *own += 1;
                t.open.0 += 1;
            }
            Role::Server => t.open.1 += 1,
        }
        Ok(Place { places: self.clone(), role, from })
    }
}

impl Table {
    /// The oldest handshake of the machine that has the most.
    fn oldest_of_most(&self) -> Option<u64> {
        let (_, most) = self.most.last()?;
        self.half_of.get(most)?.first().copied()
    }

    fn begin(&mut self, id: u64, half: Half) {
        self.count(half.from, |ids| {
            ids.insert(id);
        });
        self.half.insert(id, half);
    }

    fn leave(&mut self, id: u64) {
        if let Some(half) = self.half.remove(&id) {
            self.count(half.from, |ids| {
                ids.remove(&id);
            });
        }
    }

    /// Changes the handshakes of a machine, and its rank.
    fn count(&mut self, of: IpAddr, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let ids = self.half_of.entry(of).or_default();
        self.most.remove(&(ids.len(), of));
        change(ids);
        match ids.len() {
            0 => {
                self.half_of.remove(&of);
            }
            n => {
                self.most.insert((n, of));
            }
        }
    }
}

impl Drop for HalfOpen {
    fn drop(&mut self) {
        self.places.table.lock().leave(self.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut t = self.places.table.lock();
        match self.role {
            Role::Server => t.open.1 -= 1,
            Role::Client => {
                t.open.0 -= 1;
                if let Some(own) = t.clients.get_mut(&self.from) {
                    *own -= 1;
                    if *own == 0 {
                        t.clients.remove(&self.from);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u8) -> IpAddr {
        [10, 0, 0, n].into()
    }
    fn places(max_half_open: usize, max_connections: usize) -> Places {
        Places::new(&Options { max_half_open, max_connections, ..Options::default() })
    }
    fn is_pushed(h: &mut HalfOpen) -> bool {
        h.pushed.try_recv() != Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn the_oldest_handshake_of_the_busiest_makes_place() {
        let (p, t0) = (places(4, 100), Instant::now());
        let ms = |n| t0 + Duration::from_millis(n);
        let mut quiet = p.enter(at(1), t0).ok().unwrap();
        let mut flood: Vec<_> = (0..3).map(|i| p.enter(at(2), ms(i)).ok().unwrap()).collect();
        assert_eq!(
            p.enter(at(3), ms(100)).err(),
            Some(Duration::from_millis(900)),
            "each has a moment"
        );
        let mut new = p.enter(at(2), ms(1000)).ok().unwrap();
        assert!(is_pushed(&mut flood[0]) && !is_pushed(&mut flood[1]) && !is_pushed(&mut quiet));
        let _last = p.enter(at(3), ms(1001)).ok().unwrap();
        assert!(is_pushed(&mut flood[1]) && !is_pushed(&mut new) && !is_pushed(&mut quiet));
        drop(flood);
        drop(quiet);
        // The finished handshake has given its place back: one of the flood is left.
        let _more = p.enter(at(2), ms(1002)).ok().unwrap();
        assert_eq!(p.table.lock().half.len(), 3);
    }

    #[test]
    fn who_has_most_is_known_after_any_coming_and_going() {
        let (p, mut now, mut halves, mut seed) =
            (places(20, 100), Instant::now(), Vec::new(), 3u64);
        for _ in 0..3000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pick = seed >> 33;
            match p.enter(at((pick % 5) as u8), now) {
                Ok(half) => halves.push(half),
                Err(wait) => now += wait,
            }
            if pick % 3 == 0 && !halves.is_empty() {
                halves.swap_remove(pick as usize % halves.len());
            }
            let t = p.table.lock();
            let mut of: BTreeMap<IpAddr, BTreeSet<u64>> = BTreeMap::new();
            for (id, h) in &t.half {
                of.entry(h.from).or_default().insert(*id);
            }
            assert_eq!(t.half_of, of);
            assert_eq!(t.most, of.iter().map(|(from, ids)| (ids.len(), *from)).collect());
        }
        drop(halves);
        let t = p.table.lock();
        assert!(t.half.is_empty() && t.half_of.is_empty() && t.most.is_empty());
    }

    #[test]
    fn machines_share_and_servers_have_places_of_their_own() {
        let p = places(4, 16);
        let mine: Vec<_> = (0..8).map(|_| p.admit(Role::Client, at(1)).unwrap()).collect();
        let e = p.admit(Role::Client, at(1)).err().unwrap();
        assert!(e.code == Code::Overloaded && e.message.contains("one machine"), "{e}");
        let _theirs: Vec<_> = (0..6).map(|_| p.admit(Role::Client, at(2)).unwrap()).collect();
        assert!(p.admit(Role::Client, at(3)).err().unwrap().message.contains("too many"));
        let _servers: Vec<_> = (0..2).map(|_| p.admit(Role::Server, at(1)).unwrap()).collect();
        assert!(p.admit(Role::Server, at(1)).is_err());
        drop(mine);
        p.admit(Role::Client, at(1)).unwrap();
        assert_eq!(p.table.lock().clients.len(), 1);
    }
}
