//! For the fuzz targets: parsers of what the kernel says.

use super::{abi, init, interrupts, request};
use crate::vfs::MAX_REQUEST;

/// For the fuzz target `kernel`: reads a request as it could come from `/dev/fuse`. Returns whether
/// it is well formed.
pub(crate) fn read_request(bytes: &[u8], setxattr_ext: bool) -> bool {
    let Ok(head) = request::Head::read(bytes) else { return false };
    let args = &bytes[abi::IN_HEAD..];
    let body = match args.split_at_checked(abi::WRITE_HEAD - abi::IN_HEAD) {
        Some((fixed, data)) if head.opcode == abi::op::WRITE => {
            let mut buf = strake_fabric::BufMut::unpooled(data.len());
            buf.copy_from_slice(data);
            request::write(fixed, buf.freeze())
        }
        _ => request::read(head, args, setxattr_ext),
    };
    if let Ok(request::Body::Init(asked)) = &body
        && let init::Outcome::Agreed(agreed) = init::negotiate(*asked, MAX_REQUEST)
    {
        assert!(
            agreed.flags & !asked.flags == 0
                && agreed.minor <= asked.minor
                && agreed.reply().len() == 64
        );
    }
    body.is_ok()
}

/// For the fuzz target `text`: parses the files that tell whether a caller is dying.
pub(crate) fn is_dying(text: &str) -> bool {
    interrupts::dies_of_signal(text) | interrupts::is_exiting(text)
}
