//! Notifications to the kernel: their bodies. Pure.

use super::abi;

/// A notification: its code and its body.
pub type Notice = (i32, Vec<u8>);

/// The kernel forgets the inode's attributes and, from `offset` on (negative: none), its pages; a
/// `len` of 0 means to the end.
pub fn inode_changed(ino: u64, offset: i64, len: i64) -> Notice {
    let mut body = ino.to_ne_bytes().to_vec();
    body.extend_from_slice(&offset.to_ne_bytes());
    body.extend_from_slice(&len.to_ne_bytes());
    (abi::NOTIFY_INVAL_INODE, body)
}

/// The kernel forgets which inode a name refers to.
pub fn name_changed(parent: u64, name: &[u8]) -> Notice {
    let mut body = parent.to_ne_bytes().to_vec();
    body.extend_from_slice(&(name.len() as u32).to_ne_bytes());
    body.extend_from_slice(&0u32.to_ne_bytes());
    body.extend_from_slice(name);
    body.push(0);
    (abi::NOTIFY_INVAL_ENTRY, body)
}

/// The kernel sends requests again that were read and never answered.
pub fn resend() -> Notice {
    (abi::NOTIFY_RESEND, Vec::new())
}

/// The kernel looks up every name again before it uses it next.
pub fn names_changed() -> Notice {
    (abi::NOTIFY_INC_EPOCH, Vec::new())
}
