//! Keys of the metadata state. One prefix byte, then big-endian integers, so that the store's order
//! is the order we list in. The values are the records of `proto/schema/log.proto`;
//! `docs/formats.md`, "Metadata state", has the table.

use bytes::{BufMut, Bytes, BytesMut};
use siphasher::sip::SipHasher24;
use strake_proto::{Ino, SessionId, pb};

pub(super) const HEADER: &[u8] = b"H";
pub(super) const MAP: &[u8] = b"M";
pub(super) const DENTRY: u8 = b'd';
pub(super) const INODE: u8 = b'i';
pub(super) const XATTR: u8 = b'x';
pub(super) const SESSION: u8 = b's';
pub(super) const REPLY: u8 = b'r';
pub(super) const ORPHAN: u8 = b'o';
pub(super) const GC: u8 = b'g';
pub(super) const TRIM: u8 = b't';
pub(super) const EVICTED: u8 = b'e';
pub(super) const WRITER: u8 = b'w';
pub(super) const LOCK: u8 = b'l';
pub(super) const LOCK_TOTAL: u8 = b'k';
pub(super) const LOCK_INDEX: u8 = b'j';
pub(super) const EXTENTS: u8 = b'm';

/// Most names of one directory whose hashes collide; a 257th is refused with `ENOSPC` (too unlikely
/// in any directory).
pub(super) const SLOTS: u64 = 256;
/// Reserved for directories that are split over shards.
const BUCKET: u16 = 0;

/// `prefix | number`: inodes, sessions, orphans, gc, trims, evictions, and the prefix of records
/// that belong to a number.
pub(super) fn numbered(prefix: u8, number: u64) -> Bytes {
    let mut b = BytesMut::with_capacity(9);
    b.put_u8(prefix);
    b.put_u64(number);
    b.freeze()
}

pub(super) fn xattr(ino: Ino, name: &[u8]) -> Bytes {
    let mut b = BytesMut::with_capacity(9 + name.len());
    b.put_u8(XATTR);
    b.put_u64(ino);
    b.put_slice(name);
    b.freeze()
}

pub(super) fn reply(session: SessionId, seq: u64) -> Bytes {
    let mut b = BytesMut::with_capacity(17);
    b.put_u8(REPLY);
    b.put_u64(session);
    b.put_u64(seq);
    b.freeze()
}

/// A file that a session may write; the value is the log index of its last open, big-endian.
pub(super) fn writer(session: SessionId, ino: Ino) -> Bytes {
    let mut b = BytesMut::with_capacity(17);
    b.put_u8(WRITER);
    b.put_u64(session);
    b.put_u64(ino);
    b.freeze()
}

/// What an owner has locked in a file. The first 17 bytes are the prefix of all of a session's
/// owners there, the first 9 that of all owners.
pub(super) fn lock(ino: Ino, session: SessionId, owner: u64, kind: pb::LockKind) -> Bytes {
    let mut b = BytesMut::with_capacity(26);
    b.put_u8(LOCK);
    b.put_u64(ino);
    b.put_u64(session);
    b.put_u64(owner);
    b.put_u8(kind as u8);
    b.freeze()
}

/// The part of a lock's key up to and including its owner.
pub(super) const LOCK_OWNER: usize = 26;

/// A range that an owner has locked in a file, by its last byte.
pub(super) fn lock_range(
    ino: Ino,
    session: SessionId,
    owner: u64,
    kind: pb::LockKind,
    end: u64,
) -> Bytes {
    let mut b = BytesMut::with_capacity(LOCK_OWNER + 8);
    b.put_slice(&lock(ino, session, owner, kind));
    b.put_u64(end);
    b.freeze()
}

/// The owner that a key below [`LOCK`] belongs to: inode, session, owner and kind.
pub(super) fn parse_lock(key: &[u8]) -> Option<(Ino, SessionId, u64, pb::LockKind)> {
    if !matches!(key.len(), LOCK_OWNER | 34) {
        return None;
    }
    Some((
        number(key, 1)?,
        number(key, 9)?,
        number(key, 17)?,
        pb::LockKind::try_from(i32::from(key[25])).ok()?,
    ))
}

fn number(key: &[u8], at: usize) -> Option<u64> {
    key.get(at..at + 8).and_then(last_number)
}

/// The part of a key of the lock index up to the range's last byte.
pub(super) const LOCK_INDEX_END: usize = 20;

/// A locked range among all ranges of a file with its kind, type and class.
pub(super) fn lock_index(
    ino: Ino,
    kind: pb::LockKind,
    (write, class): (bool, u8),
    end: u64,
    session: SessionId,
    owner: u64,
) -> Bytes {
    let mut b = BytesMut::with_capacity(LOCK_INDEX_END + 16);
    b.put_u8(LOCK_INDEX);
    b.put_u64(ino);
    b.put_slice(&[kind as u8, u8::from(write), class]);
    b.put_u64(end);
    b.put_u64(session);
    b.put_u64(owner);
    b.freeze()
}

/// Reads a key below [`LOCK_INDEX`]: kind, whether for writing, last byte, session and owner.
pub(super) fn parse_lock_index(key: &[u8]) -> Option<(pb::LockKind, bool, u64, SessionId, u64)> {
    if key.len() != LOCK_INDEX_END + 16 || key[10] > 1 {
        return None;
    }
    let kind = pb::LockKind::try_from(i32::from(key[9])).ok()?;
    Some((kind, key[10] == 1, number(key, 12)?, number(key, 20)?, number(key, 28)?))
}

/// How much a session has locked in a file; session 0: all sessions, inode 0: all files.
pub(super) fn lock_total(session: SessionId, ino: Ino) -> Bytes {
    let mut b = BytesMut::with_capacity(17);
    b.put_u8(LOCK_TOTAL);
    b.put_u64(session);
    b.put_u64(ino);
    b.freeze()
}

/// A page of a sealed file's manifest: the digests of its extents.
pub(super) fn extents(ino: Ino, page: u64) -> Bytes {
    let mut b = BytesMut::with_capacity(17);
    b.put_u8(EXTENTS);
    b.put_u64(ino);
    b.put_u64(page);
    b.freeze()
}

pub(super) fn dentry(dir: Ino, cookie: u64) -> Bytes {
    let mut b = BytesMut::with_capacity(19);
    b.put_u8(DENTRY);
    b.put_u64(dir);
    b.put_u16(BUCKET);
    b.put_u64(cookie);
    b.freeze()
}

/// The big-endian number in the last eight bytes of a key; `None` for a key that this program never
/// writes.
pub(super) fn last_number(key: &[u8]) -> Option<u64> {
    key.last_chunk::<8>().map(|b| u64::from_be_bytes(*b))
}

/// The cookies of a directory's names. A cookie is 55 bits of keyed hash and an 8-bit slot for
/// names whose hashes collide. It belongs to one name as long as that name exists, so a listing can
/// continue from it whatever others do.
pub(super) struct NameHash {
    sip: SipHasher24,
    mask: u64,
}

impl NameHash {
    /// `mask` reduces the hash so that tests can make collisions; all ones otherwise.
    pub(super) fn new(key: &[u8], mask: u64) -> NameHash {
        let key: [u8; 16] = key.try_into().unwrap_or_default();
        NameHash { sip: SipHasher24::new_with_key(&key), mask }
    }

    /// The first of the [`SLOTS`] cookies a name may have. Never below 256, so 0, 1 and 2 stay free
    /// for "start", "." and "..", and never above 2^63 - 1.
    pub(super) fn first_cookie(&self, name: &[u8]) -> u64 {
        ((self.sip.hash(name) >> 9) & self.mask).max(1) << 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_documented_bytes() {
        assert_eq!(&numbered(INODE, 0x0102)[..], b"i\0\0\0\0\0\0\x01\x02");
        assert_eq!(&xattr(1, b"user.a")[..], b"x\0\0\0\0\0\0\0\x01user.a");
        assert_eq!(&reply(1, 2)[..], b"r\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02");
        assert_eq!(&writer(1, 2)[..], b"w\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02");
        assert_eq!(
            &lock(1, 2, 3, pb::LockKind::LockFlock)[..],
            b"l\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\x01"
        );
        let whose = Some((1, 2, 3, pb::LockKind::LockFlock));
        assert_eq!(parse_lock(&lock(1, 2, 3, pb::LockKind::LockFlock)), whose);
        let range = lock_range(1, 2, 3, pb::LockKind::LockFlock, 4);
        assert_eq!(&range[..26], &lock(1, 2, 3, pb::LockKind::LockFlock)[..]);
        assert_eq!((&range[26..], parse_lock(&range)), (&b"\0\0\0\0\0\0\0\x04"[..], whose));
        let index = lock_index(1, pb::LockKind::LockPosix, (true, 9), 4, 2, 3);
        assert_eq!(
            &index[..],
            b"j\0\0\0\0\0\0\0\x01\0\x01\x09\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03"
        );
        assert_eq!(parse_lock_index(&index), Some((pb::LockKind::LockPosix, true, 4, 2, 3)));
        assert_eq!(&lock_total(1, 2)[..], b"k\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02");
        assert_eq!(&extents(1, 2)[..], b"m\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02");
        assert_eq!(&dentry(3, 0x0500)[..], b"d\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\0\x05\0");
        for (kind, byte) in
            [(SESSION, b's'), (ORPHAN, b'o'), (GC, b'g'), (TRIM, b't'), (EVICTED, b'e')]
        {
            assert_eq!(numbered(kind, 1)[..], [byte, 0, 0, 0, 0, 0, 0, 0, 1]);
        }
        assert_eq!((HEADER, MAP), (&b"H"[..], &b"M"[..]));
        assert_eq!(last_number(&numbered(GC, 77)), Some(77));
    }

    #[test]
    fn cookies_are_fixed_for_ever() {
        let key: Vec<u8> = (0..16).collect();
        let names = NameHash::new(&key, u64::MAX);
        // SipHash-2-4 reference vector: key 00..0f, message 00..0e -> a129ca6149be45e5.
        let message: Vec<u8> = (0..15).collect();
        assert_eq!(names.first_cookie(&message), (0xa129_ca61_49be_45e5_u64 >> 9) << 8);
        assert_eq!(NameHash::new(&key, 0).first_cookie(b"x"), 256);
    }
}
