//! The content of files: finds the files, reads each once without the kernel's cache, and computes
//! the hashes of the file and its extents.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use strake_proto::seal::{self, Digest, Leaf};
use strake_term::{Progress, size};

use super::Failure;

/// Size of one read in bytes. Extent sizes are multiples of it.
const PIECE: u64 = seal::EXTENT;
/// Number of pieces of one file that are read concurrently, each by a thread of its own.
const READERS: usize = 4;
/// Work that takes longer than this shows its progress.
const SILENT: Duration = Duration::from_secs(2);

/// Where a part of a file could not be read.
#[derive(Debug)]
pub struct Unread {
    pub offset: u64,
    pub why: io::Error,
}

#[derive(Debug)]
pub struct Content {
    /// `None`: not all of it could be read.
    pub sha256: Option<Digest>,
    pub extents: Vec<Result<Digest, Unread>>,
}

/// Opens a file for [`read`].
pub fn open(path: &Path) -> io::Result<File> {
    let open = |flags| File::options().read(true).custom_flags(flags).open(path);
    // The kernel's cached bytes prove nothing about what is stored.
    match open(libc::O_DIRECT | libc::O_CLOEXEC) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => open(libc::O_CLOEXEC),
        r => r,
    }
}

/// Reads the first `size` bytes of a file in extents of `extent_size`, a multiple of [`PIECE`].
/// `done` is called with the number of bytes read so far.
pub fn read(file: &File, size: u64, extent_size: u64, mut done: impl FnMut(u64)) -> Content {
    let pieces = size.div_ceil(PIECE);
    let (each, readers) = (extent_size / PIECE, READERS.min(pieces as usize).max(1));
    let mut whole = Some(Sha256::new());
    let (mut leaf, mut hashed, mut bad) = (Leaf::default(), None, None);
    let mut extents = Vec::new();
    thread::scope(|s| {
        let start = |first: u64| {
            let (tx, rx) = mpsc::sync_channel(1);
            s.spawn(move || {
                for n in (first..pieces).step_by(readers) {
                    if tx.send(piece(file, n * PIECE, size, each == 1)).is_err() {
                        return;
                    }
                }
            });
            rx
        };
        let arriving: Vec<_> = (0..readers as u64).map(start).collect();
        for n in 0..pieces {
            let stopped = || {
                Err(Unread {
                    offset: n * PIECE,
                    why: io::Error::other("the reader of its data stopped"),
                })
            };
            match arriving[n as usize % readers].recv().unwrap_or_else(|_| stopped()) {
                Ok((bytes, digest)) => {
                    whole.iter_mut().for_each(|w| w.update(&bytes));
                    hashed = digest;
                    if each > 1 {
                        leaf.update(&bytes);
                    }
                }
                Err(unread) => {
                    whole = None;
                    bad = bad.take().or(Some(unread));
                }
            }
            if (n + 1) % each == 0 || n + 1 == pieces {
                let digest = std::mem::take(&mut leaf).finish();
                extents.push(bad.take().map_or(Ok(hashed.take().unwrap_or(digest)), Err));
            }
            done(size.min((n + 1) * PIECE));
        }
    });
    Content { sha256: whole.map(|w| w.finalize().into()), extents }
}

/// The bytes of a piece, and its digest if it is an extent.
fn piece(
    file: &File,
    at: u64,
    size: u64,
    extent: bool,
) -> Result<(Vec<u8>, Option<Digest>), Unread> {
    let mut bytes = vec![0; (size - at).min(PIECE) as usize];
    let mut have = 0;
    while have < bytes.len() {
        let offset = at + have as u64;
        match file.read_at(&mut bytes[have..], offset) {
            Ok(0) => return Err(Unread { offset, why: io::Error::other("the file ends here") }),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(Unread { offset, why }),
        }
    }
    let digest = extent.then(|| {
        let mut leaf = Leaf::default();
        leaf.update(&bytes);
        leaf.finish()
    });
    Ok((bytes, digest))
}

pub fn failed(path: &Path, e: &io::Error) -> Failure {
    Failure::os(format_args!("'{}'", path.display()), Errno::from_io_error(e).unwrap_or(Errno::IO))
}

/// The regular files at and below a path, in order of their names. Skips links and special files in
/// folders.
pub fn walk(path: &Path, each: &mut dyn FnMut(Result<PathBuf, Failure>)) {
    let meta = match fs::metadata(path) {
        Ok(m) => m,
        Err(e) => return each(Err(failed(path, &e))),
    };
    if meta.is_file() {
        return each(Ok(path.to_path_buf()));
    }
    if !meta.is_dir() {
        return each(Err(Failure::invalid(format!(
            "'{}' is neither a regular file nor a directory",
            path.display()
        ))));
    }
    let list = || {
        let mut found = Vec::new();
        for e in fs::read_dir(path)? {
            let e = e?;
            let kind = e.file_type()?;
            found.extend((kind.is_file() || kind.is_dir()).then(|| e.path()));
        }
        found.sort();
        io::Result::Ok(found)
    };
    match list() {
        Ok(found) => found.iter().for_each(|p| walk(p, each)),
        Err(e) => each(Err(failed(path, &e))),
    }
}

/// Shows the progress of long work on files.
pub struct Meter {
    progress: Progress,
    began: Instant,
    /// When it was last shown.
    said: Instant,
    files: u64,
    /// Bytes of finished files.
    bytes: u64,
}

impl Meter {
    pub fn new() -> Meter {
        let now = Instant::now();
        Meter { progress: Progress::new(), began: now, said: now, files: 0, bytes: 0 }
    }

    /// Reports that `done` of `whole` bytes of a file are read.
    pub fn at(&mut self, path: &Path, done: u64, whole: u64) {
        if self.said.elapsed() > SILENT {
            let rate = (self.bytes + done) as f64 / self.began.elapsed().as_secs_f64();
            let (done, whole, rate) = (size(done), size(whole), size(rate as u64));
            let path = path.display();
            self.progress
                .say(format!("{} files done; {path}: {done} of {whole}, {rate}/s", self.files));
            self.said = Instant::now();
        }
    }

    pub fn file_done(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }

    /// To be called before anything else is printed.
    pub fn clear(&mut self) {
        self.progress.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(bytes: &[u8], extent: usize) -> (Digest, Vec<Digest>) {
        let leaf = |e: &[u8]| Sha256::new_with_prefix([0]).chain_update(e).finalize().into();
        (Sha256::digest(bytes).into(), bytes.chunks(extent).map(leaf).collect())
    }

    #[test]
    fn reading_in_parallel_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let p = PIECE as usize;
        for len in [0, 1, p - 1, p, p + 1, 5 * p, 9 * p + 77] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 4099) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            for each in [1, 2, 4] {
                let mut seen = 0;
                let c = read(&File::open(&path).unwrap(), len as u64, each * PIECE, |n| seen = n);
                let (whole, extents) = naive(&bytes, each as usize * p);
                assert_eq!(c.sha256, Some(whole), "{len} bytes in extents of {each}");
                assert_eq!(c.extents.into_iter().map(Result::unwrap).collect::<Vec<_>>(), extents);
                assert_eq!(seen, len as u64);
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_named_and_the_rest_is_hashed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, vec![7; PIECE as usize + 10]).unwrap();
        for each in [1, 2] {
            let c = read(&File::open(&path).unwrap(), 4 * PIECE, each * PIECE, |_| ());
            assert_eq!((c.sha256, c.extents.len() as u64), (None, 4 / each));
            let good = c.extents.iter().filter(|e| e.is_ok()).count();
            assert_eq!(good, usize::from(each == 1), "the first extent, if it ends before the gap");
            let bad = c.extents.iter().find_map(|e| e.as_ref().err()).unwrap();
            assert_eq!(bad.offset, PIECE + 10);
        }
    }

    #[test]
    fn a_walk_is_in_order_and_passes_links_over() {
        let dir = tempfile::tempdir().unwrap();
        for d in ["b", "b/c"] {
            fs::create_dir(dir.path().join(d)).unwrap();
        }
        for f in ["z", "b/y", "b/c/x", "a"] {
            fs::write(dir.path().join(f), "").unwrap();
        }
        std::os::unix::fs::symlink("a", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("..", dir.path().join("b/up")).unwrap();
        let (mut names, mut failures) = (vec![], vec![]);
        let mut each = |r: Result<PathBuf, Failure>| match r {
            Ok(p) => names.push(p.strip_prefix(dir.path()).unwrap().display().to_string()),
            Err(f) => failures.push(f),
        };
        walk(dir.path(), &mut each);
        walk(&dir.path().join("gone"), &mut each);
        walk(Path::new("/dev/null"), &mut each);
        assert_eq!(names, ["a", "b/c/x", "b/y", "z"]);
        assert_eq!(
            failures.iter().map(|f| f.code).collect::<Vec<_>>(),
            [libc::ENOENT, libc::EINVAL]
        );
    }
}
