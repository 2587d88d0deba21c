//! No bytes but the sealer's open as a capability.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strake_proto::cap::{CAP_LEN, CapKey, peek};

fuzz_target!(|data: &[u8]| {
    let key = CapKey::from_cluster_key(&[7; 32]);
    assert!(key.open(data, 0).is_err(), "forged");
    if let Some(bytes) = data.first_chunk::<CAP_LEN>() {
        let c = peek(bytes);
        let sealed = key.seal(&c);
        assert_eq!(key.open(&sealed, c.expiry_ms).unwrap(), c);
        assert!(c.expiry_ms == u64::MAX || key.open(&sealed, c.expiry_ms + 1).is_err());
    }
});
