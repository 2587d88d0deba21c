//! The answers of a mount to ioctl(2) on an open regular file, with which a library in the program
//! can open the same file itself.
//!
//! Numbers are in the byte order of the machine, as in every ioctl: both ends are on one machine. A
//! reader must check every part of an answer, because any file system may answer the same ioctl
//! number with anything.

use crate::{Code, Error, Ino, Result};

const fn reads(number: u32, bytes: usize) -> u32 {
    2 << 30 | (bytes as u32) << 16 | 0xe7 << 8 | number
}

/// Bytes of the answer to [`FILE`].
pub const FILE_BYTES: usize = 64;
/// Bytes of the answer to [`SERVERS`].
pub const SERVERS_BYTES: usize = 4096;
/// Asks for the file and its file system: `_IOR(0xe7, 1, 64 bytes)`.
pub const FILE: u32 = reads(1, FILE_BYTES);
/// Asks for the metadata servers: `_IOR(0xe7, 2, 4096 bytes)`.
pub const SERVERS: u32 = reads(2, SERVERS_BYTES);

const MAGIC: [u8; 8] = *b"strakeio";
const VERSION: u32 = 1;
/// Length of the head: magic, version, length, UUID.
const HEAD: usize = 32;

/// The answer to [`FILE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedFile {
    /// UUID of the file system.
    pub uuid: [u8; 16],
    /// Inode ids are never reused, so this identifies the file for good.
    pub ino: Ino,
    /// The open(2) flags that the mount has for the descriptor.
    pub flags: u32,
}

/// The answer to [`SERVERS`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Servers {
    /// UUID of the file system.
    pub uuid: [u8; 16],
    /// Endpoints of the metadata servers, separated by commas.
    pub endpoints: String,
}

fn head(uuid: [u8; 16], bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_ne_bytes());
    out.extend_from_slice(&(bytes as u32).to_ne_bytes());
    out.extend_from_slice(&uuid);
    out
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// The UUID in an answer, if the answer is valid.
fn check(answer: &[u8], bytes: usize) -> Result<[u8; 16]> {
    let not_ours = || Error::new(Code::Inval, "this is not an answer of a StrakeFS mount");
    if answer.len() < bytes || answer[..8] != MAGIC {
        return Err(not_ours());
    }
    let (version, size) =
        (u32::from_ne_bytes(array(answer, 8)), u32::from_ne_bytes(array(answer, 12)));
    if version != VERSION || size as usize != bytes {
        let m = format!(
            "the mount answers in version {version} with {size} bytes; this program knows version \
             {VERSION} with {bytes} bytes"
        );
        return Err(Error::new(Code::OpNotSupp, m));
    }
    Ok(array(answer, 16))
}

impl OpenedFile {
    /// [`FILE_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = head(self.uuid, FILE_BYTES);
        out.extend_from_slice(&self.ino.to_ne_bytes());
        out.extend_from_slice(&self.flags.to_ne_bytes());
        out.resize(FILE_BYTES, 0);
        out
    }

    /// `EINVAL`: not an answer of a mount; `EOPNOTSUPP`: an answer of another version.
    pub fn decode(answer: &[u8]) -> Result<OpenedFile> {
        let uuid = check(answer, FILE_BYTES)?;
        let (ino, flags) =
            (u64::from_ne_bytes(array(answer, HEAD)), u32::from_ne_bytes(array(answer, HEAD + 8)));
        Ok(OpenedFile { uuid, ino, flags })
    }
}

impl Servers {
    /// [`SERVERS_BYTES`] bytes, with as many endpoints as fit.
    pub fn encode(uuid: [u8; 16], endpoints: &[String]) -> Vec<u8> {
        const ROOM: usize = SERVERS_BYTES - HEAD - 8;
        let mut text = String::new();
        for e in endpoints {
            if text.len() + 1 + e.len() > ROOM {
                break;
            }
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(e);
        }
        let mut out = head(uuid, SERVERS_BYTES);
        out.extend_from_slice(&(text.len() as u32).to_ne_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(text.as_bytes());
        out.resize(SERVERS_BYTES, 0);
        out
    }

    /// Errors as for [`OpenedFile::decode`].
    pub fn decode(answer: &[u8]) -> Result<Servers> {
        let uuid = check(answer, SERVERS_BYTES)?;
        let len = u32::from_ne_bytes(array(answer, HEAD)) as usize;
        let text = answer[HEAD + 8..SERVERS_BYTES].get(..len);
        let text = text.and_then(|t| std::str::from_utf8(t).ok());
        let text = text.ok_or_else(|| {
            Error::new(Code::Inval, "the mount's list of metadata servers is not text")
        })?;
        Ok(Servers { uuid, endpoints: text.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_macro() {
        assert_eq!([FILE, SERVERS], [0x8040_e701, 0x9000_e702]);
    }

    #[test]
    fn answers_are_read_as_they_are_written() {
        let file =
            OpenedFile { uuid: *b"0123456789abcdef", ino: 0x1122_3344_5566_7788, flags: 0o100_002 };
        let bytes = file.encode();
        assert_eq!((bytes.len(), OpenedFile::decode(&bytes)), (FILE_BYTES, Ok(file)));
        assert_eq!(&bytes[..8], b"strakeio");
        assert_eq!(&bytes[16..32], b"0123456789abcdef");
        let all = ["tcp:a:1".to_string(), "rdma:b:2".into()];
        let bytes = Servers::encode([7; 16], &all);
        let want = Servers { uuid: [7; 16], endpoints: "tcp:a:1,rdma:b:2".into() };
        assert_eq!((bytes.len(), Servers::decode(&bytes)), (SERVERS_BYTES, Ok(want)));
        assert_eq!(Servers::decode(&Servers::encode([0; 16], &[])).unwrap().endpoints, "");
        // More endpoints than fit: only whole ones are included.
        let many: Vec<String> = (0..500).map(|n| format!("tcp:server{n}:7400")).collect();
        let s = Servers::decode(&Servers::encode([0; 16], &many)).unwrap();
        let kept: Vec<&str> = s.endpoints.split(',').collect();
        assert!(
            kept.len() > 200 && kept.len() < 500 && kept.iter().zip(&many).all(|(a, b)| a == b)
        );
    }

    /// Answers that another file system may give.
    #[test]
    fn anything_else_is_an_error() {
        let file = OpenedFile { uuid: [1; 16], ino: 5, flags: 0 }.encode();
        let servers = Servers::encode([1; 16], &["tcp:a:1".into()]);
        for len in 0..FILE_BYTES {
            assert_eq!(OpenedFile::decode(&file[..len]).unwrap_err().code, Code::Inval);
        }
        assert!(
            OpenedFile::decode(&[0; FILE_BYTES]).is_err()
                && OpenedFile::decode(&[0xff; 5000]).is_err()
        );
        assert!(OpenedFile::decode(&servers).is_err() && Servers::decode(&file).is_err());
        for at in 0..16 {
            let (mut f, mut s) = (file.clone(), servers.clone());
            f[at] ^= 1;
            s[at] ^= 1;
            assert!(OpenedFile::decode(&f).is_err() && Servers::decode(&s).is_err(), "byte {at}");
        }
        for len in [SERVERS_BYTES as u32, u32::MAX] {
            let mut s = servers.clone();
            s[32..36].copy_from_slice(&len.to_ne_bytes());
            assert!(Servers::decode(&s).is_err());
        }
        let mut s = servers.clone();
        s[41] = 0xff;
        assert!(Servers::decode(&s).is_err(), "not UTF-8");
    }
}
