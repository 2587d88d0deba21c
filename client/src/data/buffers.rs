//! Lists of buffers as one run of bytes, sliced without copying.

use strake_fabric::{Buf, BufMut, Pool, Transport};

pub(crate) fn total(bufs: &[Buf]) -> usize {
    bufs.iter().map(Buf::len).sum()
}

/// `len` bytes from `start`, sharing memory; fewer when the list is shorter.
pub(crate) fn cut(bufs: &[Buf], mut start: usize, mut len: usize) -> Vec<Buf> {
    let mut out = Vec::new();
    for b in bufs {
        if len == 0 {
            break;
        }
        if start >= b.len() {
            start -= b.len();
            continue;
        }
        let n = len.min(b.len() - start);
        out.push(b.slice(start..start + n));
        start = 0;
        len -= n;
    }
    out
}

/// What an update writes.
#[derive(Clone)]
pub(crate) enum Content {
    Bytes(Vec<Buf>),
    /// A punch: so many zeros that are not stored.
    Hole(u32),
}

impl Content {
    /// Bytes of the file that it covers.
    pub fn span(&self) -> u64 {
        match self {
            Content::Bytes(b) => total(b) as u64,
            Content::Hole(len) => u64::from(*len),
        }
    }
    /// The bytes; none for a hole.
    pub fn bytes(&self) -> &[Buf] {
        match self {
            Content::Bytes(b) => b,
            Content::Hole(_) => &[],
        }
    }
    /// `len` bytes of it from `start`, which it must have.
    pub fn cut(&self, start: usize, len: usize) -> Content {
        match self {
            Content::Bytes(b) => Content::Bytes(cut(b, start, len)),
            Content::Hole(_) => Content::Hole(len as u32),
        }
    }
}

/// A private copy in one buffer.
pub(crate) fn copy(pool: &Pool, bufs: &[Buf]) -> Buf {
    fill(pool.get_now(total(bufs)), bufs)
}

/// The transport by which all of the bytes came, if it was a single one.
pub(crate) fn transport(bufs: &[Buf]) -> Option<Transport> {
    let first = bufs.first()?.transport();
    bufs.iter().all(|b| b.transport() == first).then_some(first)
}

/// A copy in one buffer that belongs to no pool. It keeps the transport by which the bytes came, if
/// that was a single one.
pub(crate) fn detached(bufs: &[Buf]) -> Buf {
    let mut to = BufMut::unpooled(total(bufs));
    to.came_by(transport(bufs).unwrap_or_default());
    fill(to, bufs)
}

fn fill(mut out: BufMut, bufs: &[Buf]) -> Buf {
    let mut at = 0;
    for b in bufs {
        out[at..at + b.len()].copy_from_slice(b);
        at += b.len();
    }
    out.freeze()
}

/// Appends `len` zeros as slices of `zero`.
pub(crate) fn push_zeros(out: &mut Vec<Buf>, zero: &Buf, mut len: usize) {
    while len > 0 {
        let n = len.min(zero.len());
        out.push(zero.slice(0..n));
        len -= n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_the_same_bytes() {
        let data: Vec<u8> = (0..100).collect();
        let bufs = [
            Buf::copy_from(&data[..10]),
            Buf::copy_from(&[]),
            Buf::copy_from(&data[10..77]),
            Buf::copy_from(&data[77..]),
        ];
        for start in 0..=100 {
            for len in 0..=100 {
                let got: Vec<u8> = cut(&bufs, start, len).iter().flat_map(|b| b.to_vec()).collect();
                assert_eq!(got, data[start..(start + len).min(100)]);
            }
        }
        assert_eq!(&copy(&Pool::default(), &bufs)[..], &data[..]);
        assert_eq!(&detached(&bufs)[..], &data[..]);
        let by = |transport| {
            let mut b = BufMut::unpooled(10);
            b.came_by(transport);
            b.freeze()
        };
        let (one, two) = (
            [by(Transport::Rdma), by(Transport::Rdma).slice(3..7)],
            [by(Transport::Rdma), by(Transport::Tcp)],
        );
        assert_eq!(
            (transport(&one), transport(&two), transport(&[])),
            (Some(Transport::Rdma), None, None)
        );
        assert_eq!(
            (detached(&one).transport(), copy(&Pool::default(), &one).transport()),
            (Transport::Rdma, Transport::Local)
        );
        let mut z = Vec::new();
        push_zeros(&mut z, &Buf::copy_from(&[0; 8]), 21);
        assert_eq!(total(&z), 21);
    }
}
