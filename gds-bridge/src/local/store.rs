//! Copies of sealed files in a folder of this node: two files each, one with the bytes and one with
//! the checksums of their blocks. Format: `docs/formats.md`.

use std::{
    fs::{self, File, Metadata},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FallocateFlags, fallocate, linkat},
    io::Errno,
};
use serde::Serialize;
use strake_fabric::BufMut;
use strake_proto::{
    Code, Error, Result,
    checksum::{BLOCK, block_sums, crc32c},
    layout::MAX_FILE_SIZE,
    seal::{DIGEST, Digest},
};

/// Magic number of checksum files.
const MAGIC: [u8; 8] = *b"STRKCOPY";
const VERSION: u32 = 1;
/// The header takes one block, with its own checksum at the end.
const HEADER: usize = BLOCK;
const SUM_AT: usize = HEADER - 4;
const PATH_AT: usize = 120;
/// Maximum length of a path in the header.
const LONGEST_PATH: usize = SUM_AT - PATH_AT;

/// File name ending of the bytes.
const COPY: &str = "copy";
/// File name ending of their checksums.
const SUMS: &str = "sums";
/// File name ending of bytes that do not match their checksums and were put aside.
const DAMAGED: &str = "damaged";

/// A sealed file according to its manifest: its content never changes until the seal is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// UUID of the file system.
    pub fs: [u8; 16],
    /// Inode.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Digest of the content.
    pub sha256: Digest,
    /// Root digest of the manifest.
    pub root: Digest,
}

impl Sealed {
    /// The name of its copies, without the ending. It is unique to this file and this content.
    pub fn name(&self) -> String {
        format!("{}-{:016x}-{}", hex::encode(self.fs), self.ino, hex::encode(self.root))
    }

    /// Blocks of its copy; the last one is padded with zeros.
    pub fn blocks(&self) -> u64 {
        self.size.div_ceil(BLOCK as u64)
    }
}

/// The header of a checksum file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The file of which this is a copy.
    pub sealed: Sealed,
    /// When it was made, ns since 1970.
    pub staged_ns: u64,
    /// The path under which it was read then, for people; truncated if it is too long.
    pub path: String,
}

impl Header {
    fn encode(&self) -> Vec<u8> {
        let mut to = vec![0; HEADER];
        let mut end = self.path.len().min(LONGEST_PATH);
        while !self.path.is_char_boundary(end) {
            end -= 1;
        }
        let s = &self.sealed;
        let mut put = |at: usize, bytes: &[u8]| to[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &(end as u32).to_le_bytes());
        put(16, &s.fs);
        put(32, &s.ino.to_le_bytes());
        put(40, &s.size.to_le_bytes());
        put(48, &s.sha256);
        put(80, &s.root);
        put(112, &self.staged_ns.to_le_bytes());
        put(PATH_AT, &self.path.as_bytes()[..end]);
        let sum = crc32c(&to[..SUM_AT]);
        to[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        to
    }

    /// `EINVAL` for something that is not such a header, `EOPNOTSUPP` for one of a later version,
    /// `EIO` for a damaged one.
    pub fn decode(from: &[u8]) -> Result<Header> {
        let bad = |m: &str| Error::new(Code::Inval, m.to_string());
        if from.len() < HEADER || from[..8] != MAGIC {
            return Err(bad("has no header with a copy's checksums"));
        }
        let u32_at =
            |at: usize| u32::from_le_bytes(from[at..at + 4].try_into().expect("four bytes"));
        let u64_at =
            |at: usize| u64::from_le_bytes(from[at..at + 8].try_into().expect("eight bytes"));
        // Before its checksum is checked: a later version may compute that in another way.
        if u32_at(8) != VERSION {
            let m = format!(
                "is of version {}, but this program knows {VERSION}: stage the file again",
                u32_at(8)
            );
            return Err(Error::new(Code::OpNotSupp, m));
        }
        if u32_at(SUM_AT) != crc32c(&from[..SUM_AT]) {
            return Err(Error::new(Code::Corrupt, "has a damaged header"));
        }
        let digest =
            |at: usize| -> Digest { from[at..at + DIGEST].try_into().expect("as many bytes") };
        let path =
            from[PATH_AT..SUM_AT].get(..u32_at(12) as usize).and_then(|p| str::from_utf8(p).ok());
        let path = path.ok_or_else(|| bad("has an invalid path"))?.to_string();
        let fs = from[16..32].try_into().expect("sixteen bytes");
        let sealed =
            Sealed { fs, ino: u64_at(32), size: u64_at(40), sha256: digest(48), root: digest(80) };
        if sealed.size > MAX_FILE_SIZE {
            return Err(bad("has more bytes than a file can have"));
        }
        Ok(Header { sealed, staged_ns: u64_at(112), path })
    }
}

/// Whether a folder or a file in it can be trusted: anyone else who can write there could put
/// anything into the device.
fn trusted(m: &Metadata) -> std::result::Result<(), String> {
    let me = rustix::process::geteuid().as_raw();
    if m.uid() != me && m.uid() != 0 {
        return Err(format!("belongs to user {}, neither root nor user {me}", m.uid()));
    }
    if m.mode() & 0o022 != 0 {
        return Err("can be written by other users than its owner: run chmod go-w on it".into());
    }
    Ok(())
}

fn named(path: &Path) -> impl Fn(io::Error) -> Error {
    move |e| match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::new(
            Code::NoSpc,
            format!("'{}': there is no space left on its file system", path.display()),
        ),
        _ => Error::from(e).context(format!("'{}'", path.display())),
    }
}

fn refused(path: &Path, why: &str) -> Error {
    Error::new(Code::Perm, format!("'{}' {why}", path.display()))
}

/// Checks a folder for copies. `ENOTDIR`; `EPERM` where others may write to it; or errors of the
/// system.
pub fn check_folder(dir: &Path) -> Result<()> {
    let m = fs::metadata(dir).map_err(named(dir))?;
    if !m.is_dir() {
        return Err(Error::new(Code::NotDir, format!("'{}' is not a folder", dir.display())));
    }
    trusted(&m).map_err(|why| refused(dir, &why))
}

/// An existing copy, open.
#[derive(Debug)]
pub struct Copy {
    /// The file of which this is a copy.
    pub sealed: Sealed,
    /// For messages, and to put it aside.
    path: PathBuf,
    /// The bytes, opened to bypass the kernel's cache.
    bytes: File,
    sums: File,
}

impl Copy {
    /// Opens the copy of a sealed file, if it exists. An error: it exists and cannot be used.
    pub fn open(dir: &Path, of: &Sealed) -> Result<Option<Copy>> {
        check_folder(dir)?;
        let at = |ending: &str| dir.join(format!("{}.{ending}", of.name()));
        let path = at(COPY);
        let bytes = match open_direct(&path) {
            Err(e) if e.code == Code::NoEnt => return Ok(None),
            r => r?,
        };
        let sums = File::options()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(at(SUMS))
            .map_err(named(&at(SUMS)))?;
        for (file, path) in [(&bytes, &path), (&sums, &at(SUMS))] {
            let m = file.metadata().map_err(named(path))?;
            trusted(&m).map_err(|why| refused(path, &why))?;
        }
        let header =
            read_header(&sums).map_err(|e| e.context(format!("'{}'", at(SUMS).display())))?;
        if header.sealed != *of {
            return Err(Error::new(
                Code::Corrupt,
                format!("'{}' belongs to another file than its name says", path.display()),
            ));
        }
        let copy = Copy { sealed: header.sealed, path, bytes, sums };
        copy.check_sizes()?;
        Ok(Some(copy))
    }

    fn check_sizes(&self) -> Result<()> {
        let blocks = self.sealed.blocks();
        let size = |f: &File| f.metadata().map(|m| m.len()).map_err(named(&self.path));
        if (size(&self.bytes)?, size(&self.sums)?)
            != (blocks * BLOCK as u64, HEADER as u64 + 4 * blocks)
        {
            let m = format!("'{}' or its checksums have a wrong size", self.path.display());
            return Err(Error::new(Code::Corrupt, m));
        }
        Ok(())
    }

    /// Its location, for people.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checksums of blocks.
    pub fn sums(&self, first: u64, count: usize) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * count];
        self.sums.read_exact_at(&mut bytes, HEADER as u64 + 4 * first)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Reads blocks from the disk and compares them with their checksums. An error gives the first
    /// byte that does not match.
    pub fn read(&self, first: u64, count: usize) -> std::result::Result<BufMut, (u64, String)> {
        let at = first * BLOCK as u64;
        let failed = |e: io::Error| (at, e.to_string());
        let mut to = BufMut::unpooled(count * BLOCK);
        self.bytes.read_exact_at(&mut to, at).map_err(failed)?;
        let want = self.sums(first, count).map_err(failed)?;
        match block_sums(0, [&to[..]]).iter().zip(&want).position(|(is, want)| is != want) {
            Some(n) => Err((at + (n * BLOCK) as u64, "its bytes and their checksum differ".into())),
            None => Ok(to),
        }
    }

    /// Takes it out of use for everyone. False: it could not be renamed.
    pub fn put_aside(&self) -> bool {
        match fs::rename(&self.path, self.path.with_extension(DAMAGED)) {
            Ok(()) => true,
            // Another process was faster, or removed it.
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        }
    }
}

impl AsFd for Copy {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bytes.as_fd()
    }
}

fn open_direct(path: &Path) -> Result<File> {
    let flags = libc::O_DIRECT | libc::O_NOFOLLOW;
    File::options().read(true).custom_flags(flags).open(path).map_err(not_direct(path))
}

/// Opens an open file once more.
fn direct_again(f: &File, dir: &Path) -> Result<File> {
    let own = format!("/proc/self/fd/{}", f.as_raw_fd());
    File::options().read(true).custom_flags(libc::O_DIRECT).open(own).map_err(not_direct(dir))
}

fn not_direct(path: &Path) -> impl Fn(io::Error) -> Error {
    move |e| match e.raw_os_error() {
        Some(libc::EINVAL) => {
            let m = format!("'{}' is on a file system without direct I/O", path.display());
            Error::new(Code::OpNotSupp, m)
        }
        _ => named(path)(e),
    }
}

fn read_header(sums: &File) -> Result<Header> {
    let mut bytes = vec![0; HEADER];
    match sums.read_exact_at(&mut bytes, 0) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Header::decode(&[]),
        Err(e) => Err(e.into()),
        Ok(()) => Header::decode(&bytes),
    }
}

/// A copy that is being made: two unnamed files, so that nothing is left of an unfinished one.
pub struct Making {
    dir: PathBuf,
    folder: File,
    header: Header,
    bytes: File,
    sums: File,
    /// Bytes written.
    done: u64,
    /// Checksums not written yet.
    made: Vec<u8>,
    summed: u64,
}

impl Making {
    /// Reserves disk space for all of it. `ENOSPC` if there is not enough, `EOPNOTSUPP` where files
    /// cannot be unnamed.
    pub fn begin(dir: &Path, header: Header) -> Result<Making> {
        check_folder(dir)?;
        let unnamed = || {
            let mut o = File::options();
            o.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
            o.open(dir).map_err(|e| match e.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::EISDIR) => {
                    let m = format!(
                        "'{}': its file system cannot create unnamed files: use ext4 or XFS",
                        dir.display()
                    );
                    Error::new(Code::OpNotSupp, m)
                }
                _ => named(dir)(e),
            })
        };
        let (bytes, sums) = (unnamed()?, unnamed()?);
        // Readers will open it in the same way.
        direct_again(&bytes, dir)?;
        let size = header.sealed.blocks() * BLOCK as u64;
        if size > 0 {
            match fallocate(&bytes, FallocateFlags::empty(), 0, size) {
                // Without fallocate(2), at least sets the final length.
                Err(Errno::OPNOTSUPP) => bytes.set_len(size).map_err(named(dir))?,
                Err(Errno::NOSPC | Errno::DQUOT) => {
                    let m = format!(
                        "'{}': its file system has no space for {size} bytes",
                        dir.display()
                    );
                    return Err(Error::new(Code::NoSpc, m));
                }
                r => r.map_err(|e| named(dir)(e.into()))?,
            }
        }
        sums.write_all_at(&header.encode(), 0).map_err(named(dir))?;
        let folder = File::open(dir).map_err(named(dir))?;
        Ok(Making {
            dir: dir.into(),
            folder,
            header,
            bytes,
            sums,
            done: 0,
            made: Vec::new(),
            summed: 0,
        })
    }

    /// Appends bytes: whole blocks, except at the end of the file.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(self.done.is_multiple_of(BLOCK as u64), "a piece behind the last one");
        assert!(
            bytes.len() as u64 <= self.header.sealed.size - self.done,
            "more than the file has"
        );
        let (whole, rest) = bytes.split_at(bytes.len() / BLOCK * BLOCK);
        let mut last = [0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let last = &last[..if rest.is_empty() { 0 } else { BLOCK }];
        let write = |at: u64, b: &[u8]| self.bytes.write_all_at(b, at).map_err(named(&self.dir));
        write(self.done, whole)?;
        write(self.done + whole.len() as u64, last)?;
        self.made.extend(block_sums(0, [whole, last]).iter().flat_map(|s| s.to_le_bytes()));
        self.done += bytes.len() as u64;
        if self.made.len() >= 1 << 20 { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let at = HEADER as u64 + self.summed;
        self.sums.write_all_at(&self.made, at).map_err(named(&self.dir))?;
        self.summed += self.made.len() as u64;
        self.made.clear();
        Ok(())
    }

    fn complete(&mut self) -> Result<()> {
        assert_eq!(self.done, self.header.sealed.size, "less than the file has");
        self.flush()?;
        self.bytes.sync_all().and_then(|()| self.sums.sync_all()).map_err(named(&self.dir))
    }

    /// Names it, durable on disk. False: a copy exists already, and is left as it is.
    pub fn publish(mut self) -> Result<bool> {
        self.complete()?;
        let at = |ending: &str| format!("{}.{ending}", self.header.sealed.name());
        let link = |f: &File, name: &str| {
            let own = format!("/proc/self/fd/{}", f.as_raw_fd());
            linkat(CWD, own.as_str(), &self.folder, name, AtFlags::SYMLINK_FOLLOW)
        };
        let failed = |e: Errno| named(&self.dir)(e.into());
        // The checksums first: the copy counts only once its bytes are there. Checksums without a
        // copy would be in the way.
        while let Err(e) = link(&self.sums, &at(SUMS)) {
            if e != Errno::EXIST {
                return Err(failed(e));
            }
            if self.dir.join(at(COPY)).exists() {
                return Ok(false);
            }
            match fs::remove_file(self.dir.join(at(SUMS))) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(named(&self.dir)(e)),
                _ => {}
            }
        }
        self.folder.sync_all().map_err(named(&self.dir))?;
        let new = match link(&self.bytes, &at(COPY)) {
            Err(Errno::EXIST) => false,
            r => r.map_err(failed).map(|()| true)?,
        };
        self.folder.sync_all().map_err(named(&self.dir))?;
        Ok(new)
    }

    /// Opens it without naming it: for self-tests.
    pub fn unnamed(mut self) -> Result<Copy> {
        self.complete()?;
        let bytes = direct_again(&self.bytes, &self.dir)?;
        let sums = File::open(format!("/proc/self/fd/{}", self.sums.as_raw_fd()))
            .map_err(named(&self.dir))?;
        let copy = Copy {
            sealed: self.header.sealed,
            path: self.dir.join("of its self-test"),
            bytes,
            sums,
        };
        copy.check_sizes()?;
        Ok(copy)
    }
}

/// An entry of a folder with copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// Its name without the ending, by which it may be removed.
    pub name: String,
    /// The path that it was staged from.
    pub path: Option<String>,
    /// Inode of the file.
    pub inode: Option<u64>,
    /// Bytes of the file.
    pub size: Option<u64>,
    /// When it was staged, ns since 1970.
    pub staged_ns: Option<u64>,
    /// Whether it may be used.
    pub usable: bool,
    /// Why it may not.
    pub why: Option<String>,
}

/// All copies in a folder, sorted by path, including those that cannot be used. Skips files that
/// are not copies.
pub fn list(dir: &Path) -> Result<Vec<Listed>> {
    check_folder(dir)?;
    let mut names = std::collections::BTreeMap::<String, bool>::new();
    for e in fs::read_dir(dir).map_err(named(dir))? {
        let name = e.map_err(named(dir))?.file_name();
        let Some((name, ending)) = name.to_str().and_then(|n| n.rsplit_once('.')) else { continue };
        let is_name = name.len() == 114 && name.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
        if is_name && [COPY, SUMS, DAMAGED].contains(&ending) {
            *names.entry(name.into()).or_default() |= ending == COPY;
        }
    }
    let mut all: Vec<Listed> =
        names.into_iter().map(|(name, has)| listed(dir, name, has)).collect();
    all.sort_by(|a, b| (&a.path, &a.name).cmp(&(&b.path, &b.name)));
    Ok(all)
}

fn listed(dir: &Path, name: String, has: bool) -> Listed {
    let at = dir.join(format!("{name}.{SUMS}"));
    let header = File::open(&at).map_err(Error::from).and_then(|f| read_header(&f));
    let opened = match &header {
        Err(e) => Err(e.message.clone()),
        Ok(_) if dir.join(format!("{name}.{DAMAGED}")).exists() && !has => {
            Err("it was damaged and set aside".into())
        }
        Ok(h) => match Copy::open(dir, &h.sealed) {
            Ok(Some(c)) if c.path.file_stem().is_some_and(|n| *n == *name) => Ok(()),
            Ok(_) => Err("its bytes are missing".to_string()),
            Err(e) => Err(e.message),
        },
    };
    let header = header.ok();
    Listed {
        name,
        path: header.as_ref().map(|h| h.path.clone()),
        inode: header.as_ref().map(|h| h.sealed.ino),
        size: header.as_ref().map(|h| h.sealed.size),
        staged_ns: header.as_ref().map(|h| h.staged_ns),
        usable: opened.is_ok(),
        why: opened.err(),
    }
}

/// Removes a listed copy. A process that has it open can still read it to the end.
pub fn remove(dir: &Path, what: &Listed) -> Result<()> {
    remove_named(dir, &what.name)
}

/// As [`remove`], by the name without an ending.
pub(crate) fn remove_named(dir: &Path, name: &str) -> Result<()> {
    // The bytes first: without them the copy does not count.
    for ending in [COPY, DAMAGED, SUMS] {
        let path = dir.join(format!("{name}.{ending}"));
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(named(&path)(e)),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
