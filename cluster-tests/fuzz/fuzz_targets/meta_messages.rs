//! Control messages decode or fail, and what decodes survives another round.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use strake_proto::pb;

fn round<M: Message + Default + PartialEq + Clone>(data: &[u8]) {
    if let Ok(m) = M::decode(data) {
        let bytes = m.encode_to_vec();
        // Compared as bytes, because a NaN differs from itself.
        assert_eq!(M::decode(&bytes[..]).expect("what was encoded").encode_to_vec(), bytes);
    }
}

fuzz_target!(|data: &[u8]| {
    round::<pb::MetaRequest>(data);
    round::<pb::MetaReply>(data);
    round::<pb::LogCommand>(data);
    round::<pb::Status>(data);
});
