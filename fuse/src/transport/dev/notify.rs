//! What the kernel is told unasked. Pure: the bodies of notifications.

use super::abi;

/// A notification: its code and its body.
pub type Notice = (i32, Vec<u8>);

/// The kernel forgets the inode's attributes and, from `offset` on (negative: none), its pages;
/// `len` 0 is to the end.
pub fn inode_changed(ino: u64, offset: i64, len: i64) -> Notice {
    let mut body = ino.to_ne_bytes().to_vec();
    body.extend_from_slice(&offset.to_ne_bytes());
    body.extend_from_slice(&len.to_ne_bytes());
    (abi::NOTIFY_INVAL_INODE, body)
}

/// The kernel forgets what a name means.
pub fn name_changed(parent: u64, name: &[u8]) -> Notice {
    let mut body = parent.to_ne_bytes().to_vec();
    body.extend_from_slice(&(name.len() as u32).to_ne_bytes());
    body.extend_from_slice(&0u32.to_ne_bytes());
    body.extend_from_slice(name);
    body.push(0);
    (abi::NOTIFY_INVAL_ENTRY, body)
}

/// The kernel sends again what was taken and never answered.
pub fn resend() -> Notice {
    (abi::NOTIFY_RESEND, Vec::new())
}

/// The kernel looks all names up again before it uses them next.
pub fn names_changed() -> Notice {
    (abi::NOTIFY_INC_EPOCH, Vec::new())
}
