//! What a process left in handover memory, as the tests look at it.

use std::sync::Arc;

use strake_client::{Handover as _, Operation};
use strake_fabric::Buf;
use strake_fuse::{HandoverMemory, LeftRequest};

/// The memory that a process left, as the next one finds it.
pub fn next(keep: &HandoverMemory) -> Arc<HandoverMemory> {
    HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap()
}

/// What the requests that a process left are to the client.
pub fn operations(left: &[LeftRequest]) -> Vec<Operation> {
    left.iter().map(|r| r.operation.clone()).collect()
}

/// Bytes as a mount passes them on: in handover memory.
pub fn kept(keep: &HandoverMemory, byte: u8, len: usize) -> Vec<Buf> {
    let mut b = keep.pool().get_now(len);
    b.fill(byte);
    vec![b.freeze()]
}
