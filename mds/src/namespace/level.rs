//! Feature levels: which level each command and rule needs, and how the cluster's level changes.
//! See `docs/feature-levels.md`.

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{Code, Error, FEATURE_LEVEL, Result, level::too_old, pb};

use pb::log_command::Command;

/// States with a feature level. Programs from before levels refuse them.
pub(super) const FORMAT: u32 = 8;

/// The newest rules for entries ([`super::RULES`]) at each level.
const RULES: [u32; FEATURE_LEVEL as usize + 1] = [4, 4];

/// The rules by which the leader of a cluster of this level has entries applied.
pub(crate) fn rules(level: u32) -> u32 {
    RULES[RULES.len().min(level as usize + 1) - 1]
}

/// The name of a command, and the level from which on it may be proposed.
const fn needs(command: &Command) -> (&'static str, u32) {
    match command {
        Command::Format(_) => ("Format", 0),
        Command::Meta(_) => ("Meta", 0),
        Command::SessionOpen(_) => ("SessionOpen", 0),
        Command::SessionEnd(_) => ("SessionEnd", 0),
        Command::Register(_) => ("Register", 0),
        Command::MapUpdate(_) => ("MapUpdate", 0),
        Command::GcDone(_) => ("GcDone", 0),
        Command::TrimDone(_) => ("TrimDone", 0),
        Command::FreeOrphans(_) => ("FreeOrphans", 0),
        Command::MdsNodes(_) => ("MdsNodes", 0),
        Command::PoolChange(_) => ("PoolChange", 0),
        Command::Recover(_) => ("Recover", 0),
        Command::GiveUp(_) => ("GiveUp", 0),
        Command::TargetChange(_) => ("TargetChange", 0),
        Command::Repair(_) => ("Repair", 0),
        Command::EndFound(_) => ("EndFound", 0),
        Command::Settings(_) => ("Settings", 0),
        Command::ChainsAnew(_) => ("ChainsAnew", 0),
        // What it needs is that all members know the level that it leads to.
        Command::RaiseLevel(_) => ("RaiseLevel", 0),
    }
}

/// `OpNotSupp` for a command that a cluster of this level must not have in its log.
pub(crate) fn check_proposal(command: &Command, level: u32) -> Result<()> {
    allow(needs(command), level)
}

fn allow((name, needed): (&str, u32), level: u32) -> Result<()> {
    if needed <= level {
        return Ok(());
    }
    let m = format!(
        "{name} needs feature level {needed}, and this cluster has level {level}: upgrade all its members, then run `strake upgrade finish`"
    );
    Err(Error::new(Code::OpNotSupp, m))
}

/// The level that a member must know to be sent this entry. An entry that cannot be read needs
/// none: it is no command, or one that only a newer leader can have proposed.
pub(crate) fn needed_by(data: &Bytes) -> u32 {
    match pb::LogCommand::decode(data.clone()).ok().and_then(|c| c.command) {
        Some(Command::RaiseLevel(r)) => r.to,
        Some(Command::Format(f)) => f.level,
        Some(c) => needs(&c).1,
        None => 0,
    }
}

/// `Protocol` for a state, or an entry, of a level that a program does not know.
pub(super) fn check_known(level: u32, knows: u32) -> Result<()> {
    if level <= knows {
        return Ok(());
    }
    Err(too_old(knows, level, Code::Protocol, "this metadata server"))
}

/// `Corrupt` for a state of a lower level than others have as of the same entry: a program from
/// before levels skipped the entry that raised it.
pub(super) fn check_same(own: u32, others: u32) -> Result<()> {
    if own >= others {
        return Ok(());
    }
    let m = format!(
        "an older program applied the log: feature level {others} of the others is missing"
    );
    Err(Error::new(Code::Corrupt, m))
}

/// Sets the level, at log entry `index`. Setting it once more changes nothing. `Inval`: it is not
/// one above the present level.
pub(super) fn raise(map: &mut pb::ClusterMap, to: u32, index: u64) -> Result<()> {
    if to != 0 && to == map.level {
        return Ok(());
    }
    if map.level.checked_add(1) != Some(to) {
        let m = format!("feature level {to} does not follow level {}", map.level);
        return Err(Error::new(Code::Inval, m));
    }
    (map.level, map.level_index) = (to, index);
    map.version += 1;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_refused_below_its_level() {
        let e = allow(("Settings", 3), 2).unwrap_err();
        assert_eq!(e.code, Code::OpNotSupp);
        for word in ["Settings", "level 3", "level 2", "strake upgrade finish"] {
            assert!(e.message.contains(word), "{e}");
        }
        allow(("Settings", 3), 3).unwrap();
        allow(("Settings", 3), 4).unwrap();
        check_proposal(&Command::RaiseLevel(pb::RaiseLevel { to: 1 }), 0).unwrap();
    }

    #[test]
    fn the_newest_rules_are_those_of_the_newest_level() {
        assert_eq!(rules(FEATURE_LEVEL), super::super::RULES);
        assert!(RULES.is_sorted());
        assert_eq!((rules(0), rules(FEATURE_LEVEL + 1)), (4, super::super::RULES));
    }

    #[test]
    fn an_entry_says_what_its_receiver_must_know() {
        let entry = |command| pb::LogCommand { now_ns: 1, command }.encode_to_vec().into();
        let raise = |to| entry(Some(Command::RaiseLevel(pb::RaiseLevel { to })));
        assert_eq!(needed_by(&raise(7)), 7);
        let format = pb::Format { level: 2, ..Default::default() };
        assert_eq!(needed_by(&entry(Some(Command::Format(format)))), 2);
        assert_eq!(needed_by(&entry(Some(Command::GcDone(pb::GcDone::default())))), 0);
        assert_eq!((needed_by(&entry(None)), needed_by(&Bytes::from_static(b"\xff"))), (0, 0));
    }
}
