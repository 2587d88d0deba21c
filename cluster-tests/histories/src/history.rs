//! A history: what clients asked for, what they were answered, and when. And its file format.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

/// An inode number, as the file system reports it.
pub type Ino = u64;

/// One operation on the namespace. It names directories and inodes by number, so that it is one
/// step; walking a path would be several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// open(2) with `O_CREAT`, and `O_EXCL` if `exclusive`. A new file has the mode [`NEW_FILE`].
    Create { dir: Ino, name: String, exclusive: bool },
    /// A new directory has the mode [`NEW_DIR`].
    Mkdir { dir: Ino, name: String },
    /// Looks up the inode of a name.
    Lookup { dir: Ino, name: String },
    /// The attributes of an inode.
    Getattr { ino: Ino },
    /// open(2) of an existing inode.
    Open { ino: Ino },
    /// Sets the permission bits: a value that can be read back.
    Chmod { ino: Ino, mode: u32 },
    /// Gives a file one more name.
    Link { ino: Ino, dir: Ino, name: String },
    /// Removes a name of a file.
    Unlink { dir: Ino, name: String },
    /// Removes an empty directory.
    Rmdir { dir: Ino, name: String },
    /// renameat2(2).
    Rename { dir: Ino, name: String, to_dir: Ino, to_name: String, how: How },
    /// All names of a directory and their inodes, in one answer.
    Readdir { dir: Ino },
}

/// Permission bits of a file as [`Op::Create`] makes it.
pub const NEW_FILE: u32 = 0o644;
/// Permission bits of a new directory.
pub const NEW_DIR: u32 = 0o755;

/// What a rename does if the new name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    Replace,
    NoReplace,
    Exchange,
}

impl Op {
    /// Whether it changes nothing, whatever its outcome.
    pub fn is_read(&self) -> bool {
        matches!(
            self,
            Op::Lookup { .. } | Op::Getattr { .. } | Op::Open { .. } | Op::Readdir { .. }
        )
    }
}

/// Attributes that the model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    pub dir: bool,
    pub nlink: u32,
    /// Permission bits.
    pub mode: u32,
}

/// The result of a successful operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Only that it is done.
    Done,
    /// An inode, and its attributes if they came in the same answer.
    Inode { ino: Ino, attr: Option<Attr> },
    /// Names in any order, without "." and "..".
    Names(Vec<(String, Ino)>),
}

/// Errors that the model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Errno {
    #[serde(rename = "EPERM")]
    Perm,
    #[serde(rename = "ENOENT")]
    NoEnt,
    #[serde(rename = "EEXIST")]
    Exist,
    #[serde(rename = "ENOTDIR")]
    NotDir,
    #[serde(rename = "EISDIR")]
    IsDir,
    #[serde(rename = "EINVAL")]
    Inval,
    #[serde(rename = "ENOTEMPTY")]
    NotEmpty,
    /// The inode no longer exists; or Linux could not follow a directory that was moved, because
    /// another operation was at work in its old place. Nothing was done, and it says nothing about
    /// the inode.
    #[serde(rename = "ESTALE")]
    Stale,
}

impl Errno {
    /// `None` for an error that leaves open whether the operation ran, or that faults cause.
    pub fn from_raw(errno: i32) -> Option<Errno> {
        Some(match errno {
            libc::EPERM => Errno::Perm,
            libc::ENOENT => Errno::NoEnt,
            libc::ESTALE => Errno::Stale,
            libc::EEXIST => Errno::Exist,
            libc::ENOTDIR => Errno::NotDir,
            libc::EISDIR => Errno::IsDir,
            libc::EINVAL => Errno::Inval,
            libc::ENOTEMPTY => Errno::NotEmpty,
            _ => return None,
        })
    }
}

/// What a client knows about the end of its operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Done(Answer),
    Failed(Errno),
    /// It ran, will run, or never runs: the client died, gave up, or was told that the outcome is
    /// unknown. The text says why.
    Unknown(String),
}

/// One operation of one client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub client: u32,
    /// When it was called and when it was answered, on one clock for all clients: an operation
    /// precedes another if its `reply` is less than the other's `call`. Only the order matters.
    pub call: u64,
    /// Without meaning if the outcome is unknown.
    pub reply: u64,
    pub op: Op,
    pub outcome: Outcome,
}

/// All operations that were done below some directories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    pub head: Head,
    pub records: Vec<Record>,
}

/// The origin of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// A text: a seed, a command.
    pub source: String,
    /// Directories that existed and were empty at the beginning, with the mode [`NEW_DIR`]. They
    /// are never renamed or removed.
    pub roots: Vec<Ino>,
    /// Some operations came through Linux. It looks up both names of a rename first, at two
    /// moments, and does nothing if it finds the same inode twice: two names of one file, or a file
    /// that another mount renames in between.
    pub kernel: bool,
}

impl History {
    /// Writes the head and then each operation as a line of JSON.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        writeln!(to, "{}", serde_json::to_string(&self.head)?)?;
        for r in &self.records {
            writeln!(to, "{}", serde_json::to_string(r)?)?;
        }
        to.flush()
    }

    /// Reads what [`History::write`] wrote.
    pub fn read(from: impl BufRead) -> io::Result<History> {
        let mut lines = from.lines();
        let head = lines
            .next()
            .ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "an empty file"))??;
        let mut history = History { head: serde_json::from_str(&head)?, records: Vec::new() };
        for line in lines {
            history.records.push(serde_json::from_str(&line?)?);
        }
        Ok(history)
    }

    /// The share of operations that overlap an operation of another client, 0 to 1.
    pub fn overlap(&self) -> f64 {
        let end = |r: &Record| {
            if matches!(r.outcome, Outcome::Unknown(_)) { r.reply.max(r.call) } else { r.reply }
        };
        let meets = |a: &Record| {
            self.records
                .iter()
                .any(|b| a.client != b.client && a.call <= end(b) && b.call <= end(a))
        };
        let overlapping = self.records.iter().filter(|r| meets(r)).count();
        overlapping as f64 / self.records.len().max(1) as f64
    }
}
