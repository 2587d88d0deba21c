//! A header that decodes encodes to the same bytes (reserved ones aside) and keeps its limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strake_proto::{
    checksum::crc32c,
    frame::{HEADER_LEN, Header, MAX_BODY, MAX_PAYLOAD},
};

fuzz_target!(|data: &[u8]| {
    let Some(bytes) = data.first_chunk::<HEADER_LEN>() else { return };
    // Once as it is, once with magic and checksum made right, so that the fields behind them are reached.
    let mut right = *bytes;
    right[0..4].copy_from_slice(b"STRK");
    let crc = crc32c(&right[..60]);
    right[60..].copy_from_slice(&crc.to_le_bytes());
    for b in [bytes, &right] {
        if let Ok(h) = Header::decode(b) {
            assert!(h.body_len <= MAX_BODY && h.payload_len <= MAX_PAYLOAD);
            assert_eq!(h.encode()[..48], b[..48]);
        }
    }
});
