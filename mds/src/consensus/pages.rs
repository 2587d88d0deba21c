//! The bytes of a Raft log segment: a header page, then batches of 4 KiB pages. Pure functions; see
//! `docs/formats.md`, "Raft log".
//!
//! Each page has its own checksum and names its batch. So a page that was never written (all
//! zeros), a page of an unfinished batch and a damaged page can be told apart.

use strake_proto::{Code, Error, Result, checksum::crc32c};

pub const PAGE: usize = 4096;
pub(super) const HEAD: usize = 32;
/// Payload bytes of a page.
pub(super) const BODY: usize = PAGE - HEAD;
const MAGIC: &[u8; 8] = b"STRKRAFT";
const VERSION: u32 = 1;
const FIRST: u8 = 1;
const LAST: u8 = 2;

/// The contents of a segment's header page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    pub cluster: [u8; 16],
    pub member: u64,
    /// 1, 2, ..., in the order of use.
    pub segment: u64,
    /// Number of the segment's first batch.
    pub first_batch: u64,
    /// Random, the same in all pages of one log.
    pub stamp: u64,
    /// Members of the group at index 0.
    pub voters: Vec<u64>,
}

/// Most members that a header can hold.
pub(super) const MAX_VOTERS: usize = 64;

pub fn encode_header(h: &SegmentHeader) -> [u8; PAGE] {
    let mut p = [0; PAGE];
    p[0..8].copy_from_slice(MAGIC);
    p[8..12].copy_from_slice(&VERSION.to_le_bytes());
    p[12..16].copy_from_slice(&(h.voters.len() as u32).to_le_bytes());
    p[16..32].copy_from_slice(&h.cluster);
    for (i, v) in [h.member, h.segment, h.first_batch, h.stamp]
        .iter()
        .chain(h.voters.iter().take(MAX_VOTERS))
        .enumerate()
    {
        p[32 + i * 8..40 + i * 8].copy_from_slice(&v.to_le_bytes());
    }
    let crc = crc32c(&p[..PAGE - 4]);
    p[PAGE - 4..].copy_from_slice(&crc.to_le_bytes());
    p
}

pub fn decode_header(p: &[u8]) -> Result<SegmentHeader> {
    let bad = |m: &str| Error::new(Code::Corrupt, m);
    let Some((p, _)) = p.split_first_chunk::<PAGE>() else {
        return Err(bad("its header is incomplete"));
    };
    let u32_at = |i: usize| u32::from_le_bytes([p[i], p[i + 1], p[i + 2], p[i + 3]]);
    let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
    if p[..8] != MAGIC[..] {
        return Err(bad("it does not start like a raft log segment"));
    }
    if crc32c(&p[..PAGE - 4]) != u32_at(PAGE - 4) {
        return Err(bad("its header does not match its checksum"));
    }
    if u32_at(8) != VERSION {
        let m =
            format!("it is of format version {}; this program knows version {VERSION}", u32_at(8));
        return Err(Error::new(Code::OpNotSupp, m));
    }
    let voters = u32_at(12) as usize;
    if voters > MAX_VOTERS {
        return Err(bad("its header names too many members"));
    }
    // Refuses counters that no log reaches, so that counting on from here cannot overflow.
    if u64_at(40).max(u64_at(48)) > u64::MAX / 2 {
        return Err(bad("its header has invalid numbers"));
    }
    let mut cluster = [0; 16];
    cluster.copy_from_slice(&p[16..32]);
    Ok(SegmentHeader {
        cluster,
        member: u64_at(32),
        segment: u64_at(40),
        first_batch: u64_at(48),
        stamp: u64_at(56),
        voters: (0..voters).map(|i| u64_at(64 + i * 8)).collect(),
    })
}

/// The pages of one batch.
pub fn encode_batch(batch: u64, stamp: u64, payload: &[u8]) -> Vec<u8> {
    let count = payload.len().div_ceil(BODY).max(1);
    let mut out = vec![0; count * PAGE];
    for (i, page) in out.as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
        let part = &payload[i * BODY..payload.len().min((i + 1) * BODY)];
        page[4..6].copy_from_slice(&(part.len() as u16).to_le_bytes());
        page[6] = if i == 0 { FIRST } else { 0 } | if i + 1 == count { LAST } else { 0 };
        page[8..12].copy_from_slice(&(i as u32).to_le_bytes());
        page[16..24].copy_from_slice(&batch.to_le_bytes());
        page[24..32].copy_from_slice(&stamp.to_le_bytes());
        page[HEAD..HEAD + part.len()].copy_from_slice(part);
        let crc = crc32c(&page[4..]);
        page[0..4].copy_from_slice(&crc.to_le_bytes());
    }
    out
}

enum Page<'a> {
    /// Zeros, or incomplete: not written.
    Absent,
    Bad,
    Good {
        batch: u64,
        number: u32,
        last: bool,
        body: &'a [u8],
    },
}

fn classify(p: &[u8], stamp: u64) -> Page<'_> {
    if p.len() < PAGE || p.iter().all(|b| *b == 0) {
        return Page::Absent;
    }
    let u32_at = |i: usize| u32::from_le_bytes([p[i], p[i + 1], p[i + 2], p[i + 3]]);
    let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
    let len = usize::from(u16::from_le_bytes([p[4], p[5]]));
    let (flags, number) = (p[6], u32_at(8));
    let well_formed = len <= BODY
        && flags <= 3
        && p[7] == 0
        && u32_at(12) == 0
        && (flags & FIRST != 0) == (number == 0);
    if crc32c(&p[4..]) != u32_at(0) || !well_formed || u64_at(24) != stamp {
        return Page::Bad;
    }
    Page::Good { batch: u64_at(16), number, last: flags & LAST != 0, body: &p[HEAD..HEAD + len] }
}

/// The batches of a segment.
#[derive(Debug, PartialEq, Eq)]
pub struct Scan {
    /// Payloads of the complete batches, in order.
    pub batches: Vec<Vec<u8>>,
    /// Where the next batch goes (bytes from the start of the segment).
    pub end: usize,
    /// Pages of an unfinished batch are from `end` on, up to here; they must be cleared before the
    /// next batch is written.
    pub torn_to: Option<usize>,
}

/// Reads a segment's pages after its header. `Corrupt` unless they are: complete batches numbered
/// from `first`, then at most part of one more batch with at least one page never written, then
/// nothing.
pub fn scan(bytes: &[u8], first: u64, stamp: u64) -> Result<Scan> {
    let mut scan = Scan { batches: Vec::new(), end: PAGE, torn_to: None };
    let damaged =
        |at: usize, m: &str| Err(Error::new(Code::Corrupt, format!("page at byte {at} {m}")));
    // Payload of the batch being read; `None` once a page of it is missing.
    let mut open = Some(Vec::new());
    let mut at = PAGE;
    while at < bytes.len() {
        let page = &bytes[at..bytes.len().min(at + PAGE)];
        let next = first + scan.batches.len() as u64;
        match classify(page, stamp) {
            Page::Bad => return damaged(at, "does not match its checksum"),
            Page::Absent => {
                open = None;
                // A page that the end of the file cuts off must be cleared, too.
                if page.len() < PAGE {
                    scan.torn_to = Some(at + PAGE);
                }
            }
            Page::Good { batch, .. } if batch != next => {
                return damaged(
                    at,
                    &format!(
                        "belongs to batch {batch}, but batch {next} is not complete before it"
                    ),
                );
            }
            Page::Good { number, last, body, .. } => {
                let place = (at - scan.end) / PAGE;
                if number as usize != place {
                    return damaged(
                        at,
                        &format!("is page {number} of its batch, at the place of page {place}"),
                    );
                }
                scan.torn_to = Some(at + PAGE);
                if let Some(payload) = &mut open {
                    payload.extend_from_slice(body);
                    if last {
                        scan.batches.push(std::mem::take(payload));
                        (scan.end, scan.torn_to) = (at + PAGE, None);
                    }
                }
            }
        }
        at += PAGE;
    }
    Ok(scan)
}
