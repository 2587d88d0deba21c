//! A data request that decodes encodes to the same bytes, but for reserved ones.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strake_proto::data::DataRequest;

fuzz_target!(|data: &[u8]| {
    if let Ok(r) = DataRequest::decode(data) {
        let again = r.encode();
        assert_eq!(again.len(), data.len());
        assert_eq!(again[..92], data[..92]);
        assert_eq!(again[96..], data[96..]);
        assert_eq!(DataRequest::decode(&again).unwrap(), r);
    }
});
