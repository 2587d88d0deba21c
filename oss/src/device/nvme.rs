//! The parts of the NVMe specification (Base 2.0, NVM Command Set 1.0) that devices here need, for
//! the kernel's passthrough and for SPDK alike.

use strake_proto::{Code, Error, Result};

use super::api::BLOCK;

/// I/O commands.
pub const FLUSH: u8 = 0x00;
/// Write.
pub const WRITE: u8 = 0x01;
/// Read.
pub const READ: u8 = 0x02;

/// Bytes that Identify returns.
pub const IDENTIFY: usize = 4096;

/// A namespace's size and format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Logical blocks.
    pub blocks: u64,
    /// A logical block has `1 << shift` bytes.
    pub shift: u32,
}

impl Format {
    /// From the data of Identify Namespace (CNS 0). `OpNotSupp`: a format that targets cannot use.
    pub fn parse(data: &[u8; IDENTIFY]) -> Result<Format> {
        let blocks = data.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        let flbas = data[26];
        let index = usize::from(flbas & 0xf) | usize::from(flbas >> 5 & 3) << 4;
        let at = 128 + 4 * index;
        let (metadata, shift) =
            (u16::from_le_bytes([data[at], data[at + 1]]), u32::from(data[at + 2]));
        Format::new(blocks, shift, metadata.into())
    }

    /// A format of `blocks` blocks of `1 << shift` bytes, each with `metadata` bytes of metadata.
    pub fn new(blocks: u64, shift: u32, metadata: u32) -> Result<Format> {
        let refused = |what: String| {
            let m =
                "format it with blocks of 512 or 4096 bytes and no metadata (nvme format --lbaf)";
            Err(Error::new(Code::OpNotSupp, format!("{what}; {m}")))
        };
        if metadata != 0 {
            return refused(format!("its blocks have {metadata} bytes of metadata each"));
        }
        if !(9..=BLOCK.trailing_zeros()).contains(&shift) {
            return refused(format!("its blocks have 2^{shift} bytes"));
        }
        if blocks == 0 || blocks.leading_zeros() < shift {
            return Err(Error::new(
                Code::NoDev,
                format!("it is not an active namespace ({blocks} blocks)"),
            ));
        }
        Ok(Format { blocks, shift })
    }

    /// Bytes, whole blocks of [`BLOCK`].
    pub fn capacity(&self) -> u64 {
        (self.blocks << self.shift) / BLOCK * BLOCK
    }

    /// First logical block and number of blocks for a range of whole blocks.
    pub fn range(&self, offset: u64, len: u64) -> (u64, u32) {
        (offset >> self.shift, (len >> self.shift) as u32)
    }
}

/// How a command ended: status code type and status code, as `SCT << 8 | SC`, without the bits
/// above (More, Do Not Retry).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    /// From the status field without its phase bit.
    pub fn new(field: u16) -> Status {
        Status(field & 0x7ff)
    }

    /// The command was carried out.
    pub fn is_success(self) -> bool {
        self.0 == 0
    }

    /// The command may not have run, and may succeed when repeated after a while: the controller
    /// was reset, the path was lost, or the namespace was not ready.
    pub fn is_transient(self) -> bool {
        matches!(self.0, 0x07 | 0x08 | 0x21 | 0x82 | 0x300..=0x303 | 0x360 | 0x370 | 0x371)
    }

    /// As a device error: [`Code::Io`], or `NoSpc` if there is no space.
    pub fn error(self) -> Error {
        let code = if self.0 == 0x81 { Code::NoSpc } else { Code::Io };
        Error::new(code, format!("{} (NVMe status {:#05x})", self.text(), self.0))
    }

    fn text(self) -> &'static str {
        match self.0 {
            0x01 => "the controller does not know the command",
            0x02 => "the controller refuses a field of the command",
            0x04 => "the data could not be transferred",
            0x06 => "internal error of the controller",
            0x07 | 0x08 => "aborted, because the controller or its queue was reset",
            0x0b => "the namespace is gone or its format has changed",
            0x20 => "the namespace is write protected",
            0x80 => "beyond the end of the namespace",
            0x81 => "the namespace has no space left",
            0x82 => "the namespace is not ready",
            0x83 => "reserved by another host",
            0x280 => "the medium could not be written",
            0x281 => "the medium could not be read",
            0x282..=0x284 => "the data do not match their protection information",
            0x286 => "access denied",
            0x287 => "read of blocks that were never written, which this namespace does not allow",
            0x300..=0x3ff => "the path to the controller is lost",
            0x200..=0x2ff => "error of the medium",
            _ => "the command failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identify(blocks: u64, flbas: u8, index: usize, format: [u8; 4]) -> [u8; IDENTIFY] {
        let mut d = [0; IDENTIFY];
        d[..8].copy_from_slice(&blocks.to_le_bytes());
        d[26] = flbas;
        d[128 + 4 * index..132 + 4 * index].copy_from_slice(&format);
        d
    }

    #[test]
    fn formats() {
        let f = Format::parse(&identify(1025, 0, 0, [0, 0, 9, 0])).unwrap();
        assert_eq!((f, f.capacity()), (Format { blocks: 1025, shift: 9 }, 128 * 4096));
        assert_eq!(f.range(8192, 4096), (16, 8));
        // The seventeenth format, whose index is in two parts.
        let f = Format::parse(&identify(7, 0x20, 16, [0, 0, 12, 2])).unwrap();
        assert_eq!((f.capacity(), f.range(8192, 4096)), (7 * 4096, (2, 1)));
        for (blocks, format, says) in [
            (100, [8, 0, 9, 0], "8 bytes of metadata"),
            (100, [0, 0, 13, 0], "2^13 bytes"),
            (100, [0, 0, 0, 0], "2^0 bytes"),
            (100, [0, 0, 255, 0], "2^255 bytes"),
            (0, [0, 0, 9, 0], "not an active namespace"),
            (u64::MAX, [0, 0, 9, 0], "not an active namespace"),
        ] {
            let e = Format::parse(&identify(blocks, 0, 0, format)).unwrap_err();
            assert!(e.message.contains(says), "{e}");
        }
    }

    #[test]
    fn statuses() {
        // The bits More and Do Not Retry do not count.
        assert_eq!(Status::new(0x4281).error().code, Code::Io);
        assert!(
            Status::new(0x4281).error().message.contains("could not be read (NVMe status 0x281)")
        );
        assert!(Status::new(0x4000).is_success() && !Status::new(0x280).is_success());
        assert_eq!(Status::new(0x81).error().code, Code::NoSpc);
        for transient in [0x07, 0x08, 0x82, 0x371] {
            assert!(Status::new(transient).is_transient());
        }
        for field in 0..0x800 {
            let s = Status::new(field);
            assert!(matches!(s.error().code, Code::Io | Code::NoSpc));
            assert!(
                !(s.is_transient() && (0x200..0x300).contains(&field)),
                "a medium does not heal"
            );
        }
    }
}
