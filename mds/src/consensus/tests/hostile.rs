//! What no correct peer sends and no correct disk holds; found by fuzzing.

use std::collections::BTreeMap;

use raft::eraftpb::{Entry, Message, MessageType};
use strake_proto::{Code, checksum::crc32c};

use super::super::{
    Config, LogImage, LogOp,
    core::Core,
    disk_log::read_segment,
    pages::{PAGE, SegmentHeader, encode_header},
};

fn member() -> Core {
    let cfg = Config::new(1, [1; 16], BTreeMap::new());
    Core::new(&cfg, LogImage::new(vec![1, 2, 3], 7), (0, 0), &[], 42).unwrap()
}

fn settle(core: &mut Core) {
    while let Some(out) = core.ready() {
        core.persisted(out.number);
        if let Some(last) = out.committed.last() {
            core.applied(last.index, last.term);
        }
    }
}

fn append(index: u64, log_term: u64, entries: Vec<Entry>, commit: u64) -> Message {
    let mut m = Message { from: 2, to: 1, term: 2, index, log_term, commit, ..Default::default() };
    m.set_msg_type(MessageType::MsgAppend);
    m.set_entries(entries.into());
    m
}

fn entry(index: u64, term: u64) -> Entry {
    Entry { index, term, ..Default::default() }
}

#[test]
fn entries_without_a_term_are_dropped() {
    for m in [
        append(0, 0, vec![entry(1, 0), entry(2, 2)], 1),
        append(100, 0, vec![entry(101, 2)], 101),
        append(0, 0, vec![entry(1, 0)], 1),
    ] {
        let mut core = member();
        core.step(m);
        settle(&mut core);
        assert_eq!((core.image().last(), core.committed()), (0, 0));
        core.step(append(0, 0, vec![entry(1, 2), entry(2, 2)], 2));
        settle(&mut core);
        assert_eq!(
            (core.image().last(), core.committed()),
            (2, 2),
            "it goes on with a proper message"
        );
    }
}

#[test]
fn indices_beyond_every_log_are_refused() {
    let mut image = LogImage::new(vec![1], 1);
    for index in [u64::MAX, u64::MAX / 2 + 1] {
        assert_eq!(image.apply(&LogOp::Reset { index, term: 1 }).unwrap_err().code, Code::Corrupt);
    }
    let mut m = append(0, 0, vec![], 0);
    m.set_msg_type(MessageType::MsgSnapshot);
    let meta = m.mut_snapshot().mut_metadata();
    (meta.index, meta.term) = (u64::MAX, 1);
    meta.mut_conf_state().set_voters(vec![1, 2]);
    let mut core = member();
    core.step(m);
    settle(&mut core);
    assert_eq!(core.committed(), 0);
}

#[test]
fn a_segment_with_impossible_numbers_is_refused() {
    for (segment, first_batch) in [(u64::MAX, 1), (1, u64::MAX)] {
        let h = SegmentHeader {
            cluster: [1; 16],
            member: 1,
            segment,
            first_batch,
            stamp: 7,
            voters: vec![1],
        };
        let page = encode_header(&h);
        assert_eq!(crc32c(&page[..PAGE - 4]).to_le_bytes(), page[PAGE - 4..]);
        assert_eq!(read_segment(&page).unwrap_err().code, Code::Corrupt);
    }
}
