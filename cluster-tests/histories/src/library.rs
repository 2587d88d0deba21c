//! Operations through the client library.

use std::collections::VecDeque;

use strake_client::{Client, Creds, File, SetAttr};
use strake_proto::Result;

use crate::history::{Answer, Attr, Errno, How, NEW_DIR, NEW_FILE, Op, Outcome};

const RDWR: u32 = 2;
/// Files kept open, so that some lose their last name while they are open.
const HELD: usize = 2;
/// More names than a test makes in a directory, so one page is a whole listing.
const PAGE: u32 = 1000;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;

/// Does the operations of a history through a client.
pub struct Library {
    pub client: Client,
    held: VecDeque<File>,
}

fn root() -> Creds {
    Creds { uid: 0, gid: 0, groups: vec![] }
}

fn inode(a: &strake_client::Attr) -> Answer {
    let attr = Attr { dir: a.mode & S_IFMT == S_IFDIR, nlink: a.nlink, mode: a.mode & 0o7777 };
    Answer::Inode { ino: a.ino, attr: Some(attr) }
}

impl Library {
    pub fn new(client: Client) -> Library {
        Library { client, held: VecDeque::new() }
    }

    /// Does one operation and waits for its end.
    pub async fn perform(&mut self, op: &Op) -> Outcome {
        match self.try_perform(op).await {
            Ok(answer) => Outcome::Done(answer),
            Err(e) => match Errno::from_raw(e.errno()) {
                Some(errno) => Outcome::Failed(errno),
                None => Outcome::Unknown(e.to_string()),
            },
        }
    }

    fn hold(&mut self, file: File) {
        self.held.push_back(file);
        if self.held.len() > HELD {
            // Dropping the last clone closes the file.
            self.held.pop_front();
        }
    }

    async fn try_perform(&mut self, op: &Op) -> Result<Answer> {
        let (c, by) = (self.client.clone(), root());
        let by = &by;
        Ok(match op {
            Op::Create { dir, name, exclusive } => {
                let flags = if *exclusive { RDWR } else { 0 };
                let (file, attr) =
                    c.create(by, *dir, name.as_bytes(), NEW_FILE, flags, *exclusive, None).await?;
                self.hold(file);
                inode(&attr)
            }
            Op::Mkdir { dir, name } => inode(&c.mkdir(by, *dir, name.as_bytes(), NEW_DIR).await?),
            Op::Lookup { dir, name } => inode(&c.lookup(by, *dir, name.as_bytes()).await?),
            Op::Getattr { ino } => inode(&c.getattr(by, *ino).await?),
            Op::Open { ino } => {
                let (file, attr) = c.open(by, *ino, 0).await?;
                self.hold(file);
                inode(&attr)
            }
            Op::Chmod { ino, mode } => inode(
                &c.setattr(by, SetAttr { ino: *ino, mode: Some(*mode), ..Default::default() })
                    .await?,
            ),
            Op::Link { ino, dir, name } => inode(&c.link(by, *ino, *dir, name.as_bytes()).await?),
            Op::Unlink { dir, name } => {
                c.unlink(by, *dir, name.as_bytes()).await.map(|()| Answer::Done)?
            }
            Op::Rmdir { dir, name } => {
                c.rmdir(by, *dir, name.as_bytes()).await.map(|_| Answer::Done)?
            }
            Op::Rename { dir, name, to_dir, to_name, how } => {
                let (from, to) = ((*dir, name.as_bytes()), (*to_dir, to_name.as_bytes()));
                c.rename(by, from, to, rename_flags(*how)).await.map(|()| Answer::Done)?
            }
            Op::Readdir { dir } => {
                let page = c.readdir(by, *dir, 0, PAGE, false).await?;
                let names = page
                    .entries
                    .iter()
                    .map(|e| (String::from_utf8_lossy(&e.name).into_owned(), e.ino));
                Answer::Names(names.collect())
            }
        })
    }
}

/// Flags of renameat2(2).
pub fn rename_flags(how: How) -> u32 {
    match how {
        How::Replace => 0,
        How::NoReplace => 1,
        How::Exchange => 2,
    }
}
