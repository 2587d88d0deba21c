//! The Raft log on disk: preallocated segment files, one durable write per batch, and strict rules
//! for what counts as damage.
//!
//! The folder holds `member` (made once; it proves that a log existed), segments `log-NNNNNNNN` and
//! at times `spare.tmp`. A crash can leave a last batch with some pages never written: that batch
//! is dropped. Anything else that does not fit may mean that something this member acknowledged is
//! lost, and [`DiskLog::open`] refuses it. Format: `docs/formats.md`, "Raft log".

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::mpsc,
    thread::JoinHandle,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use tokio::sync::oneshot;

use super::{
    log::{LogImage, LogOp, LogStore, decode_ops, encode_op},
    pages::{self, MAX_VOTERS, PAGE, SegmentHeader},
};

/// Last batch of a full segment: names the next one.
const END: u8 = 7;
/// Start of a segment's first batch: the state of the log when the segment was made.
const CHECKPOINT: u8 = 8;
const MARKER: &str = "member";
const SPARE: &str = "spare.tmp";

#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Size of a segment file, bytes.
    pub segment_bytes: usize,
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        DiskOptions { segment_bytes: 64 << 20 }
    }
}

type Job = (Vec<LogOp>, oneshot::Sender<Result<()>>);

/// See the module. The calls only pass work on to one thread.
pub struct DiskLog {
    image: LogImage,
    jobs: Mutex<Option<mpsc::SyncSender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The error of a member that does not start because its log is not whole.
pub fn refusal(cause: impl std::fmt::Display) -> Error {
    let m = format!(
        "the raft log of this metadata server is damaged: {cause}. Acknowledged entries may be \
         lost, so it must not vote again: replace it under a new id (docs/operations.md, \
         'Changing the group of metadata servers')"
    );
    Error::new(Code::Corrupt, m)
}

fn at(path: &Path, e: impl Into<Error>) -> Error {
    e.into().context(path.display())
}

impl DiskLog {
    /// Opens the log of `member` of `cluster` in `dir`, or makes it if the folder has never held
    /// one. `voters` (the group's first members, empty for a member that joins later) and `stamp`
    /// (random) are used only for a new log.
    pub fn open(
        dir: &Path,
        cluster: [u8; 16],
        member: u64,
        voters: &[u64],
        stamp: u64,
        options: DiskOptions,
    ) -> Result<DiskLog> {
        if voters.len() > MAX_VOTERS {
            return Err(Error::new(
                Code::Inval,
                format!("more than {MAX_VOTERS} metadata servers"),
            ));
        }
        fs::create_dir_all(dir).map_err(|e| at(dir, e))?;
        let _ = fs::remove_file(dir.join(SPARE));
        let wanted = SegmentHeader {
            cluster,
            member,
            segment: 0,
            first_batch: 0,
            stamp,
            voters: voters.to_vec(),
        };
        let marker = read_marker(dir, &wanted)?;
        let segments = list_segments(dir)?;
        let (header, segments) = match marker {
            Some(found) if segments.is_empty() => {
                return Err(refusal(format!(
                    "member {} has no segment in {}",
                    found.member,
                    dir.display()
                )));
            }
            Some(found) => (found, segments),
            None => {
                let image = LogImage::new(wanted.voters.clone(), stamp);
                (wanted.clone(), create(dir, &wanted, &segments, &image, &options)?)
            }
        };
        let writer =
            Recovery::run(dir, &header, &segments, true)?.into_writer(dir, &header, options)?;
        let image = writer.image.clone();
        let (tx, rx) = mpsc::sync_channel(64);
        let thread =
            std::thread::Builder::new().name("raft-log".into()).spawn(move || serve(writer, &rx));
        let thread = thread.map_err(|e| at(dir, e))?;
        Ok(DiskLog { image, jobs: Mutex::new(Some(tx)), thread: Mutex::new(Some(thread)) })
    }

    /// Reads the log of `member` of `cluster` in `dir` without changing anything. Refuses what
    /// [`DiskLog::open`] refuses, and a folder without a log.
    pub fn peek(dir: &Path, cluster: [u8; 16], member: u64) -> Result<LogImage> {
        let wanted = SegmentHeader {
            cluster,
            member,
            segment: 0,
            first_batch: 0,
            stamp: 0,
            voters: Vec::new(),
        };
        let none = || refusal(format!("{} is missing or holds no log", dir.display()));
        if !dir.is_dir() {
            return Err(none());
        }
        let header = read_marker(dir, &wanted)?.ok_or_else(none)?;
        Recovery::run(dir, &header, &list_segments(dir)?, false).map(|f| f.image)
    }

    /// Makes the log of a member that begins with a state as of entry `base` (index and term) and
    /// holds no entries. Deletes what is in `dir`. If it is interrupted, it can be called again for
    /// the same folder.
    pub fn begin(
        dir: &Path,
        cluster: [u8; 16],
        member: u64,
        stamp: u64,
        base: (u64, u64),
        options: DiskOptions,
    ) -> Result<()> {
        if dir.exists() {
            fs::remove_dir_all(dir).map_err(|e| at(dir, e))?;
        }
        fs::create_dir(dir).map_err(|e| at(dir, e))?;
        let header = SegmentHeader {
            cluster,
            member,
            segment: 0,
            first_batch: 0,
            stamp,
            voters: Vec::new(),
        };
        let mut image = LogImage::new(Vec::new(), stamp);
        image.base = base;
        (image.hard.term, image.hard.commit) = (base.1, base.0);
        create(dir, &header, &[], &image, &options)?;
        sync_dir(dir.parent().unwrap_or(dir))
    }
}

impl Drop for DiskLog {
    fn drop(&mut self) {
        self.jobs.lock().take();
        if let Some(t) = self.thread.lock().take() {
            let _ = t.join();
        }
    }
}

fn serve(mut writer: Writer, jobs: &mpsc::Receiver<Job>) {
    while let Ok((ops, done)) = jobs.recv() {
        let _ = done.send(writer.write(&ops));
    }
}

#[async_trait]
impl LogStore for DiskLog {
    async fn load(&self) -> Result<LogImage> {
        Ok(self.image.clone())
    }

    async fn write(&self, ops: &[LogOp]) -> Result<()> {
        let (tx, rx) = oneshot::channel();
        let sent =
            self.jobs.lock().as_ref().is_some_and(|jobs| jobs.try_send((ops.to_vec(), tx)).is_ok());
        let gone = || Error::new(Code::Io, "the raft log's writer has stopped");
        if !sent {
            return Err(gone());
        }
        rx.await.unwrap_or_else(|_| Err(gone()))
    }
}

fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("log-{number:08}"))
}

fn list_segments(dir: &Path) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| at(dir, e))? {
        let name = entry.map_err(|e| at(dir, e))?.file_name();
        found.extend(
            name.to_str().and_then(|n| n.strip_prefix("log-")).and_then(|n| n.parse::<u64>().ok()),
        );
    }
    found.sort_unstable();
    Ok(found)
}

fn check_owner(found: &SegmentHeader, wanted: &SegmentHeader, path: &Path) -> Result<()> {
    let path = path.display();
    if found.cluster != wanted.cluster {
        return Err(Error::new(
            Code::Inval,
            format!("{path} belongs to another cluster; give this server its own folder"),
        ));
    }
    if found.member != wanted.member {
        let (found, wanted) = (found.member, wanted.member);
        let m = format!(
            "{path} is the log of metadata server {found}, not of {wanted}; give each server its own folder"
        );
        return Err(Error::new(Code::Inval, m));
    }
    Ok(())
}

fn read_marker(dir: &Path, wanted: &SegmentHeader) -> Result<Option<SegmentHeader>> {
    let path = dir.join(MARKER);
    let bytes = match fs::read(&path) {
        Ok(b) => b,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(at(&path, e)),
    };
    let found = pages::decode_header(&bytes).map_err(|e| in_file(&path, e))?;
    check_owner(&found, wanted, &path)?;
    Ok(Some(found))
}

/// A newer format is not damage, so only `Corrupt` becomes a refusal.
fn in_file(path: &Path, e: Error) -> Error {
    if e.code == Code::Corrupt {
        refusal(format!("{}: {}", path.display(), e.message))
    } else {
        at(path, e)
    }
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| at(dir, e))
}

/// Makes the first segment and then the marker. A crash here leaves segments without a marker; they
/// hold nothing yet.
fn create(
    dir: &Path,
    h: &SegmentHeader,
    found: &[u64],
    image: &LogImage,
    options: &DiskOptions,
) -> Result<Vec<u64>> {
    for number in found {
        let path = segment_path(dir, *number);
        let bytes = fs::read(&path).map_err(|e| at(&path, e))?;
        let header = pages::decode_header(&bytes).map_err(|e| in_file(&path, e))?;
        check_owner(&header, h, &path)?;
        let scan =
            pages::scan(&bytes, header.first_batch, header.stamp).map_err(|e| in_file(&path, e))?;
        if *number != 1 || scan.batches.len() != 1 || scan.torn_to.is_some() {
            return Err(refusal(format!(
                "{} holds a log, but the file '{MARKER}' beside it is missing",
                path.display()
            )));
        }
        fs::remove_file(&path).map_err(|e| at(&path, e))?;
    }
    make_segment(
        dir,
        &SegmentHeader { segment: 1, first_batch: 1, ..h.clone() },
        image,
        options.segment_bytes,
    )?;
    let tmp = dir.join("member.tmp");
    let written = File::create(&tmp)
        .and_then(|f| f.write_all_at(&pages::encode_header(h), 0).and_then(|()| f.sync_all()));
    written.and_then(|()| fs::rename(&tmp, dir.join(MARKER))).map_err(|e| at(&tmp, e))?;
    sync_dir(dir)?;
    Ok(vec![1])
}

/// A file of zeros with all blocks allocated, so that later writes change no metadata.
fn make_spare(dir: &Path, size: usize) -> io::Result<()> {
    let path = dir.join(SPARE);
    let made = (|| {
        let f = File::create(&path)?;
        let zeros = vec![0u8; size.min(1 << 20)];
        for offset in (0..size).step_by(zeros.len()) {
            f.write_all_at(&zeros[..zeros.len().min(size - offset)], offset as u64)?;
        }
        f.sync_all()
    })();
    if made.is_err() {
        let _ = fs::remove_file(&path);
    }
    made
}

/// The segment appears whole, with header and checkpoint, or not at all. Returns it and where its
/// next batch goes.
fn make_segment(
    dir: &Path,
    h: &SegmentHeader,
    image: &LogImage,
    size: usize,
) -> Result<(File, usize)> {
    let spare = dir.join(SPARE);
    let mut start = pages::encode_header(h).to_vec();
    start.extend(pages::encode_batch(h.first_batch, h.stamp, &encode_checkpoint(image)));
    if fs::metadata(&spare).is_ok_and(|m| m.len() < size as u64) {
        let _ = fs::remove_file(&spare);
    }
    let made = (|| {
        if !spare.exists() {
            make_spare(dir, size)?;
        }
        let f = OpenOptions::new().read(true).write(true).open(&spare)?;
        f.write_all_at(&start, 0)?;
        f.sync_all()?;
        fs::rename(&spare, segment_path(dir, h.segment))?;
        Ok::<_, io::Error>(f)
    })();
    let f = made.map_err(|e| at(&spare, e))?;
    sync_dir(dir)?;
    Ok((f, start.len()))
}

fn encode_checkpoint(image: &LogImage) -> Vec<u8> {
    let last = image.last();
    let mut out = vec![CHECKPOINT];
    out.extend_from_slice(&32u32.to_le_bytes());
    for w in [image.base.0, image.base.1, last, image.term(last).unwrap_or(0)] {
        out.extend_from_slice(&w.to_le_bytes());
    }
    image.checkpoint().iter().for_each(|op| encode_op(op, &mut out));
    out
}

/// Base and last entry (index, term) at the checkpoint, and the rest of it.
fn decode_checkpoint(b: &[u8]) -> Option<([u64; 4], Vec<LogOp>)> {
    let rest = b.strip_prefix(&[CHECKPOINT, 32, 0, 0, 0])?;
    let (words, rest) = rest.split_at_checked(32)?;
    let mut out = [0; 4];
    for (w, c) in out.iter_mut().zip(words.as_chunks::<8>().0) {
        *w = u64::from_le_bytes(*c);
    }
    Some((out, decode_ops(rest).ok()?))
}

struct Segment {
    number: u64,
    /// Highest index of an entry in it; 0: none that matters.
    max_index: u64,
}

/// Replays segments from the oldest one left.
struct Recovery {
    image: LogImage,
    /// Entries up to the image's base were in segments that are deleted. That is fine only if a
    /// later cut covers them.
    gap: bool,
}

/// A log that was read.
struct Found {
    image: LogImage,
    segments: VecDeque<Segment>,
    /// The last segment, where its next batch goes, and how far an unfinished batch reaches.
    path: PathBuf,
    end: usize,
    torn_to: Option<usize>,
    next_batch: u64,
}

impl Recovery {
    /// `repair`: remove what a crash left unfinished.
    fn run(dir: &Path, header: &SegmentHeader, numbers: &[u64], repair: bool) -> Result<Found> {
        let mut r =
            Recovery { image: LogImage::new(header.voters.clone(), header.stamp), gap: false };
        let mut segments: VecDeque<Segment> = VecDeque::new();
        let mut next_batch = None;
        for (i, number) in numbers.iter().enumerate() {
            let path = segment_path(dir, *number);
            let bytes = fs::read(&path).map_err(|e| at(&path, e))?;
            let h = pages::decode_header(&bytes).map_err(|e| in_file(&path, e))?;
            check_owner(&h, header, &path)?;
            let refused = |m: &str| refusal(format!("{}: {m}", path.display()));
            let expected = next_batch.unwrap_or(h.first_batch);
            if h.segment != *number || h.stamp != header.stamp || h.first_batch != expected {
                return Err(refused("another segment belongs here"));
            }
            let scan =
                pages::scan(&bytes, h.first_batch, h.stamp).map_err(|e| in_file(&path, e))?;
            let mut batches = scan.batches.iter();
            let Some((base, ops)) = batches.next().and_then(|b| decode_checkpoint(b)) else {
                return Err(refused("its first batch is not a checkpoint"));
            };
            r.checkpoint(base, &ops, i == 0).map_err(|e| refused(&e.message))?;
            let mut segment = Segment { number: *number, max_index: 0 };
            let mut end = None;
            for b in batches {
                match end_of(b) {
                    _ if end.is_some() => return Err(refused("there are batches after its end")),
                    Some(next) => end = Some(next),
                    None => {
                        r.batch(b, &mut segments, &mut segment).map_err(|e| refused(&e.message))?
                    }
                }
            }
            segments.push_back(segment);
            next_batch = Some(h.first_batch + scan.batches.len() as u64);
            if end.is_some() && scan.torn_to.is_some() {
                return Err(refused("there are pages after its end"));
            }
            match (end, numbers.get(i + 1)) {
                (Some(next), Some(there)) if next == *there => {}
                (Some(next), _) => {
                    return Err(refusal(format!(
                        "segment {} is missing",
                        segment_path(dir, next).display()
                    )));
                }
                (None, following) => {
                    drop_unused(dir, number + 1, &numbers[i + 1..], following, repair)?;
                    if r.gap {
                        let to = r.image.base.0;
                        return Err(refusal(format!(
                            "entries up to {to} are in a segment that is missing"
                        )));
                    }
                    let (end, torn_to, next_batch) =
                        (scan.end, scan.torn_to, next_batch.unwrap_or(1));
                    return Ok(Found { image: r.image, segments, path, end, torn_to, next_batch });
                }
            }
        }
        Err(refusal("the last segment is missing"))
    }

    fn checkpoint(&mut self, base: [u64; 4], ops: &[LogOp], oldest: bool) -> Result<()> {
        let [index, term, last, last_term] = base;
        if oldest {
            // This also refuses an index that no log can reach.
            self.image.apply(&LogOp::Reset { index: last, term: last_term })?;
            self.gap = last > index;
        } else if !self.gap && (self.image.base != (index, term) || self.image.last() != last) {
            return Err(Error::new(
                Code::Corrupt,
                "its checkpoint does not continue the segment before it",
            ));
        }
        ops.iter().try_for_each(|op| self.image.apply(op))
    }

    fn batch(&mut self, b: &[u8], older: &mut VecDeque<Segment>, this: &mut Segment) -> Result<()> {
        for op in decode_ops(b)? {
            match &op {
                LogOp::Append(e) => {
                    this.max_index = this.max_index.max(e.index);
                    if self.gap && e.index <= self.image.base.0 && e.index > 0 {
                        // This overwrites entries in deleted segments; the cut that deleted them
                        // will cover it.
                        let restoring = self.image.restoring;
                        self.image.apply(&LogOp::Reset { index: e.index - 1, term: 0 })?;
                        self.image.restoring = restoring;
                    }
                }
                LogOp::Cut { index, term } if self.gap && *index >= self.image.base.0 => {
                    self.gap = false;
                    if *index == self.image.base.0 {
                        self.image.base.1 = *term;
                    }
                }
                LogOp::Reset { .. } => {
                    self.gap = false;
                    older.iter_mut().for_each(|s| s.max_index = 0);
                    this.max_index = 0;
                }
                _ => {}
            }
            self.image.apply(&op)?;
        }
        Ok(())
    }
}

/// A segment after one that was not ended was made just before a crash and holds nothing.
fn drop_unused(
    dir: &Path,
    expected: u64,
    rest: &[u64],
    following: Option<&u64>,
    repair: bool,
) -> Result<()> {
    let Some(number) = following else { return Ok(()) };
    let path = segment_path(dir, *number);
    let bytes = fs::read(&path).map_err(|e| at(&path, e))?;
    let h = pages::decode_header(&bytes).map_err(|e| in_file(&path, e))?;
    let scan = pages::scan(&bytes, h.first_batch, h.stamp).map_err(|e| in_file(&path, e))?;
    if *number != expected || rest.len() != 1 || scan.batches.len() != 1 || scan.torn_to.is_some() {
        return Err(refusal(format!("segments before {} are incomplete", path.display())));
    }
    if !repair {
        return Ok(());
    }
    fs::remove_file(&path).map_err(|e| at(&path, e))?;
    sync_dir(dir)
}

impl Found {
    /// Clears what a crash left of an unfinished batch, and continues there.
    fn into_writer(
        self,
        dir: &Path,
        header: &SegmentHeader,
        options: DiskOptions,
    ) -> Result<Writer> {
        let path = &self.path;
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| at(path, e))?;
        let mut size = file.metadata().map_err(|e| at(path, e))?.len() as usize;
        if let Some(to) = self.torn_to {
            tracing::info!(file = %path.display(), at = self.end, "cut an incomplete batch off the raft log");
            let clear = || {
                file.write_all_at(&vec![0; to - self.end], self.end as u64)?;
                file.sync_all()
            };
            clear().map_err(|e| at(path, e))?;
            size = size.max(to);
        }
        Ok(Writer {
            dir: dir.to_path_buf(),
            header: SegmentHeader { segment: 0, first_batch: 0, ..header.clone() },
            image: self.image,
            segments: self.segments,
            file,
            size,
            end: self.end,
            next_batch: self.next_batch,
            options,
            spare: None,
            broken: None,
        })
    }
}

fn end_of(b: &[u8]) -> Option<u64> {
    b.strip_prefix(&[END, 8, 0, 0, 0]).and_then(|w| w.try_into().ok()).map(u64::from_le_bytes)
}

struct Writer {
    dir: PathBuf,
    header: SegmentHeader,
    image: LogImage,
    segments: VecDeque<Segment>,
    file: File,
    size: usize,
    end: usize,
    next_batch: u64,
    options: DiskOptions,
    spare: Option<JoinHandle<io::Result<()>>>,
    /// After a failed write or flush the contents of the disk are unknown.
    broken: Option<Error>,
}

impl Writer {
    fn write(&mut self, ops: &[LogOp]) -> Result<()> {
        if let Some(e) = &self.broken {
            return Err(e.clone());
        }
        let mut payload = Vec::new();
        ops.iter().for_each(|op| encode_op(op, &mut payload));
        let bytes = pages::encode_batch(self.next_batch, self.header.stamp, &payload);
        if self.end + bytes.len() + PAGE > self.size {
            self.roll(bytes.len())?;
            return self.write(ops);
        }
        self.put(&bytes)?;
        for op in ops {
            self.image.apply(op)?;
            self.note(op);
        }
        self.drop_old();
        self.prepare_spare();
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let put =
            self.file.write_all_at(bytes, self.end as u64).and_then(|()| self.file.sync_data());
        if let Err(e) = put {
            let e = Error::new(Code::Io, format!("raft log in {}: {e}", self.dir.display()));
            self.broken = Some(e.clone());
            return Err(e);
        }
        self.end += bytes.len();
        self.next_batch += 1;
        Ok(())
    }

    fn note(&mut self, op: &LogOp) {
        match op {
            LogOp::Append(e) => {
                if let Some(s) = self.segments.back_mut() {
                    s.max_index = s.max_index.max(e.index);
                }
            }
            LogOp::Reset { .. } => self.segments.iter_mut().for_each(|s| s.max_index = 0),
            _ => {}
        }
    }

    /// Ends the segment and starts the next. If that fails for lack of space, nothing has changed.
    fn roll(&mut self, need: usize) -> Result<()> {
        if let Some(spare) = self.spare.take() {
            let _ = spare.join();
        }
        let number = self.segments.back().map_or(1, |s| s.number + 1);
        // The end of the old segment takes one batch number.
        let h = SegmentHeader {
            segment: number,
            first_batch: self.next_batch + 1,
            ..self.header.clone()
        };
        let checkpoint = encode_checkpoint(&self.image).len() + PAGE;
        let size =
            self.options.segment_bytes.max(need + 4 * PAGE + checkpoint).next_multiple_of(PAGE);
        let (file, end) = make_segment(&self.dir, &h, &self.image, size)?;
        let mut last = vec![END, 8, 0, 0, 0];
        last.extend_from_slice(&number.to_le_bytes());
        self.put(&pages::encode_batch(self.next_batch, self.header.stamp, &last))?;
        (self.file, self.end, self.size) = (file, end, size);
        self.next_batch += 1;
        self.segments.push_back(Segment { number, max_index: 0 });
        Ok(())
    }

    fn drop_old(&mut self) {
        while self.segments.len() > 1
            && self.segments.front().is_some_and(|s| s.max_index <= self.image.base.0)
        {
            let path = self
                .segments
                .front()
                .map(|s| segment_path(&self.dir, s.number))
                .unwrap_or_default();
            if let Err(e) = fs::remove_file(&path) {
                tracing::warn!("cannot remove the old raft log segment {}: {e}", path.display());
                return;
            }
            self.segments.pop_front();
        }
    }

    /// Fills the next file with zeros ahead of time, in parallel with the writes.
    fn prepare_spare(&mut self) {
        if self.end > self.size / 2
            && self.spare.is_none()
            && self.size == self.options.segment_bytes
        {
            let (dir, size) = (self.dir.clone(), self.options.segment_bytes);
            let made = std::thread::Builder::new()
                .name("raft-spare".into())
                .spawn(move || make_spare(&dir, size));
            self.spare = made.ok();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(spare) = self.spare.take() {
            let _ = spare.join();
        }
    }
}

/// Reads bytes as a whole segment, for tests and fuzzing. Returns the changes they hold, checkpoint
/// included, or the reason why they are not valid.
pub fn read_segment(bytes: &[u8]) -> Result<Vec<LogOp>> {
    let h = pages::decode_header(bytes)?;
    let scan = pages::scan(bytes, h.first_batch, h.stamp)?;
    let mut image = LogImage::new(h.voters.clone(), h.stamp);
    let mut ops = Vec::new();
    for (i, b) in scan.batches.iter().enumerate() {
        match decode_checkpoint(b) {
            Some((base, more)) if i == 0 => {
                ops.push(LogOp::Reset { index: base[2], term: base[3] });
                ops.extend(more);
            }
            _ if end_of(b).is_some() => break,
            _ => ops.extend(decode_ops(b)?),
        }
    }
    ops.iter().try_for_each(|op| image.apply(op))?;
    Ok(ops)
}
