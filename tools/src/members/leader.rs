//! Connects to the leader of a group of metadata servers, with the cluster key.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use clap::Args;
use prost::Message as _;
use strake_fabric::{Endpoint, Message};
use strake_links::LeaderFinder;
use strake_proto::{Code, Error, Result, map::MapView, opcode, pb};
use strake_term::Progress;

use crate::{
    address::{Address, Place},
    servers::Servers,
};
use pb::members_request::Change;

#[derive(Args)]
pub(crate) struct Reach {
    #[command(flatten)]
    pub address: Address,
    /// Print the outcome as JSON.
    #[arg(long)]
    pub json: bool,
    /// How long to wait for servers, and for new ones to catch up, in seconds [default: 600, for
    /// lists 10].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    timeout: Option<u64>,
}

/// Time limit of one attempt at one server.
const CALL: Duration = Duration::from_secs(5);
/// How long a command waits where no time is given: one that changes something, and one that lists.
const CHANGE: Duration = Duration::from_secs(600);
const LIST: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);
/// Number of servers that one attempt asks: each may name another leader.
const HOPS: usize = 3;
/// Exit status: not finished, or not in order, although the command is correct.
pub(crate) const UNFINISHED: u8 = 2;

/// The connection to the group's leader.
pub(crate) struct Group {
    servers: Servers,
    /// The cluster that it is a part of.
    pub place: Place,
    pub(super) finder: LeaderFinder,
    pub(super) deadline: Instant,
    progress: Progress,
    /// Addresses of servers that were to be added, by id.
    pub(super) taught: BTreeMap<u64, String>,
    /// Whether answers are to say which feature level each process knows.
    pub asks_levels: bool,
}

/// The leader according to a metadata server that does not lead.
fn leader_of(r: &pb::MembersReply) -> Option<Endpoint> {
    r.members.iter().find(|m| m.id == r.leader && r.leader != r.id)?.endpoint.parse().ok()
}

/// Parses a server's address as people write it.
pub(super) fn address(text: &str) -> Result<Endpoint> {
    let full = if text.starts_with("tcp:") { text.to_string() } else { format!("tcp:{text}") };
    full.parse().map_err(|_| {
        Error::new(
            Code::Inval,
            format!("'{text}' is neither a member's id nor an address; expected tcp:HOST:PORT"),
        )
    })
}

impl Group {
    /// For a command that changes something.
    pub fn new(reach: &Reach) -> Result<Group> {
        Group::within(reach, CHANGE)
    }

    /// For a command that only lists.
    pub fn to_list(reach: &Reach) -> Result<Group> {
        Group::within(reach, LIST)
    }

    fn within(reach: &Reach, usual: Duration) -> Result<Group> {
        let place = reach.address.find()?;
        let mds = place.mds.iter().map(|m| address(m)).collect::<Result<Vec<Endpoint>>>()?;
        let limit = reach.timeout.map_or(usual, Duration::from_secs);
        Ok(Group {
            servers: Servers::new(&place.key),
            place,
            finder: LeaderFinder::new(mds),
            deadline: Instant::now() + limit,
            progress: Progress::new(),
            taught: BTreeMap::new(),
            asks_levels: false,
        })
    }

    pub fn say(&mut self, line: String) {
        self.progress.say(line);
    }

    /// Ends the progress output.
    pub fn done(mut self) {
        self.progress.done();
    }

    async fn call(&self, at: &Endpoint, message: Message) -> Result<bytes::Bytes> {
        let answer = self.servers.call(at, message, CALL).await;
        answer.map_err(|e| e.context(format_args!("metadata server {at}")))
    }

    /// The cluster map as the leader has it.
    pub async fn map(&mut self) -> Result<MapView> {
        loop {
            self.ask(None).await?;
            let Some(at) = self.finder.whom() else { continue };
            let request =
                Message::new(opcode::MAP, pb::MapRequest { have: 0, latest: true }.encode_to_vec());
            match self.call(&at, request).await {
                Ok(body) => {
                    let r = pb::MapReply::decode(body)
                        .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
                    return MapView::new(r.map.unwrap_or_default());
                }
                Err(e) if passes(&e) => self.pause(&e.message).await?,
                Err(e) => return Err(e),
            }
        }
    }

    /// The leader's status.
    pub async fn leader_status(&mut self) -> Result<pb::StatusReply> {
        loop {
            self.ask(None).await?;
            let Some(at) = self.finder.whom() else { continue };
            match self.servers.status(&[at], false).await {
                Err(e) if passes(&e) => self.pause(&e.message).await?,
                r => return r,
            }
        }
    }

    /// One attempt at one server.
    pub(super) async fn try_at(
        &mut self,
        at: &Endpoint,
        change: Option<Change>,
    ) -> Result<pb::MembersReply> {
        let request = pb::MembersRequest { change, levels: self.asks_levels };
        let request = Message::new(opcode::MEMBERS, request.encode_to_vec());
        let body = self.call(at, request).await?;
        pb::MembersReply::decode(body)
            .map_err(|e| Error::new(Code::Protocol, format!("metadata server {at}: {e}")))
    }

    /// Learns the members from an answer, and which server to ask next.
    fn note(&mut self, r: &pb::MembersReply) {
        self.finder
            .learn(r.members.iter().filter(|m| m.voter).filter_map(|m| m.endpoint.parse().ok()));
        if let Some(at) = leader_of(r) {
            self.finder.hint(at);
        }
    }

    /// Has the leader make the change, or only list the members. Waits while errors are temporary;
    /// `Busy` is one of them.
    pub async fn ask(&mut self, change: Option<Change>) -> Result<pb::MembersReply> {
        loop {
            match self.ask_once(change.clone()).await {
                Err(e) if passes(&e) => self.pause(&e.message).await?,
                r => return r,
            }
        }
    }

    /// One attempt, at the leader if the first server asked knows it.
    pub async fn ask_once(&mut self, change: Option<Change>) -> Result<pb::MembersReply> {
        let none = || Error::new(Code::Inval, "no metadata server is given");
        let mut at = self.finder.whom().ok_or_else(none)?;
        for _ in 0..HOPS {
            let mut asked = self.try_at(&at, change.clone()).await;
            // Only the leader makes changes. Any member can list, and then names the leader.
            let refused =
                change.is_some() && asked.as_ref().is_err_and(|e| e.code == Code::NotLeader);
            if refused {
                asked = self.try_at(&at, None).await;
            }
            let r = asked.inspect_err(|_| self.finder.failed(&at))?;
            if !refused && (change.is_some() || r.id == r.leader) {
                self.finder.found(&at);
                self.note(&r);
                return Ok(r);
            }
            self.finder.failed(&at);
            self.note(&r);
            match leader_of(&r).filter(|next| *next != at) {
                Some(next) => at = next,
                None => break,
            }
        }
        Err(Error::new(Code::NotLeader, "no metadata server leads"))
    }

    /// `TimedOut`, with what it waits for, when the time is over.
    pub async fn pause(&mut self, why: &str) -> Result<()> {
        self.progress.say(why);
        if Instant::now() >= self.deadline {
            return Err(Error::new(Code::TimedOut, format!("the timeout is over ({why})")));
        }
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }
}

/// Whether an error is temporary.
pub(crate) fn passes(e: &Error) -> bool {
    matches!(
        e.code,
        Code::NotLeader | Code::Disconnected | Code::TimedOut | Code::Overloaded | Code::Busy
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_give_them() {
        for (text, full) in
            [("tcp:h:1", "tcp:h:1"), ("h:1", "tcp:h:1"), ("10.0.0.1:7400", "tcp:10.0.0.1:7400")]
        {
            assert_eq!(address(text).unwrap().to_string(), full);
        }
        for bad in ["", "h", "tcp:", "x y", "7400"] {
            assert_eq!(address(bad).unwrap_err().code, Code::Inval, "{bad}");
        }
    }
}
