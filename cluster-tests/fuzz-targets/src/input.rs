//! Reads choices from a fuzz input. A short input gives zeros, so that every input means something.

/// The rest of an input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.0.len());
        out[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        out
    }
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Mostly a small number, sometimes any: for indices, versions and ids.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            255 => self.u64(),
            254 => u64::MAX - u64::from(self.u8()),
            n => u64::from(n),
        }
    }

    /// Up to `len` bytes.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }
    /// Bytes after their length: one byte, or two more after 255.
    pub fn bytes(&mut self) -> &'a [u8] {
        let len = match self.u8() {
            255 => usize::from(self.u16()),
            n => usize::from(n),
        };
        self.take(len)
    }
}
