//! The cluster's feature level in the state.

use std::sync::Arc;

use super::*;

fn raise(to: u32) -> Command {
    Command::RaiseLevel(pb::RaiseLevel { to })
}

fn refused(r: &pb::LogReply) -> Option<Code> {
    code_of(r.status.as_ref())
}

#[test]
fn the_level_rises_one_by_one_and_once() {
    let mut fs = Fs::new();
    assert_eq!((fs.ns.map().map.level, fs.ns.header().format_version), (0, 1));
    for to in [0, 2, u32::MAX] {
        // Levels that this program knows; others stop it, see below.
        if to <= FEATURE_LEVEL {
            assert_eq!(refused(&fs.log(raise(to))), Some(Code::Inval), "{to}");
        }
    }
    let before = fs.ns.map().version();
    assert_eq!(refused(&fs.log(raise(1))), None);
    let map = fs.ns.map();
    assert_eq!(
        (map.map.level, map.map.level_index, map.version()),
        (1, fs.index, before + 1),
        "and every process gets the new map"
    );
    assert_eq!(fs.ns.header().format_version, FORMAT_VERSION);
    assert_eq!(refused(&fs.log(raise(1))), None, "asked for once more");
    assert_eq!((fs.ns.map().version(), fs.ns.map().map.level_index), (before + 1, fs.index - 1));
    assert_eq!(refused(&fs.log(raise(0))), Some(Code::Inval), "it only rises");
    // After a restart.
    fs.ns = Namespace::open(Arc::new(fs.store.clone())).unwrap();
    assert_eq!(fs.ns.map().map.level, 1);
}

#[test]
fn a_new_file_system_has_the_level_that_its_first_entry_says() {
    let Command::Format(f) = format() else { unreachable!() };
    let store = MemStore::new();
    let ns = Namespace::open(Arc::new(store.clone())).unwrap();
    let e = entry(T0, Command::Format(pb::Format { level: 1, ..f }));
    assert_eq!(refused(&ns.apply(&[(5, 1, e)], (5, 1), None).unwrap()[0]), None);
    assert_eq!((ns.map().map.level, ns.map().map.level_index), (1, 5));
    assert_eq!(ns.header().format_version, FORMAT_VERSION);
}

/// A program of level 0 stands for each older one: what it refuses is the number alone.
#[test]
fn an_older_program_stops_at_what_it_does_not_know() {
    let known = |e: strake_proto::Error, code| {
        assert_eq!(e.code, code, "{e}");
        for word in ["feature level 1", "knows level 0", "run a newer strake"] {
            assert!(e.message.contains(word), "{e}");
        }
    };
    let Command::Format(f) = format() else { unreachable!() };
    for command in [raise(1), Command::Format(pb::Format { level: 1, ..f })] {
        let fs = Fs::new();
        let store = match command {
            Command::RaiseLevel(_) => fs.store.clone(),
            _ => MemStore::new(),
        };
        let older = Namespace::open_knowing(Arc::new(store.clone()), 0).unwrap();
        let before = older.header();
        let index = before.applied_index + 1;
        let e = older.apply(&[(index, 1, entry(T0, command))], (index, 1), None).unwrap_err();
        known(e, Code::Protocol);
        assert_eq!(older.header(), before, "nothing was applied");
        assert!(older.damage().is_none(), "and nothing is damaged");
    }
    // Nor does it begin, or go on with a copy, from a state of that level.
    let mut fs = Fs::new();
    let older = Namespace::open_knowing(Arc::new(fs.store.clone()), 0).unwrap();
    assert_eq!(refused(&fs.log(raise(1))), None);
    known(older.reload().unwrap_err(), Code::Protocol);
    let opened = Namespace::open_knowing(Arc::new(fs.store.clone()), 0);
    known(opened.err().unwrap(), Code::Protocol);
}
