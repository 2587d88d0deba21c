//! A chunk list that decodes is made of whole entries and survives another round.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strake_proto::data::{LIST_ENTRY, ListEntry};

fuzz_target!(|data: &[u8]| {
    let list = ListEntry::decode_all(data);
    assert_eq!(list.is_ok(), data.len() % LIST_ENTRY == 0);
    if let Ok(list) = list {
        assert_eq!(list.len(), data.len() / LIST_ENTRY);
        assert_eq!(ListEntry::decode_all(&ListEntry::encode_all(&list)).unwrap(), list);
    }
});
