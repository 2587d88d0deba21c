//! A data reply that decodes survives another round.
#![no_main]

use libfuzzer_sys::fuzz_target;
use strake_proto::data::DataReply;

fuzz_target!(|data: &[u8]| {
    if let Ok(r) = DataReply::decode(data) {
        let again = r.encode();
        assert_eq!(again.len(), data.len());
        assert_eq!(DataReply::decode(&again).unwrap(), r);
    }
});
