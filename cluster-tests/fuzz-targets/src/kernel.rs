//! Requests as they could come from `/dev/fuse`.

use strake_fuse::fuzzing::read_request;

use crate::input::Input;

/// The first byte says whether SETXATTR has its longer form; the rest is a request.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let ext = i.u8() % 2 == 1;
    read_request(i.0, ext);
}
