use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;

fn sealed(size: u64) -> Sealed {
    Sealed { fs: [0xab; 16], ino: 0x77, size, sha256: [1; 32], root: [2; 32] }
}

fn header(size: u64) -> Header {
    Header { sealed: sealed(size), staged_ns: 5, path: "/models/ä.safetensors".into() }
}

fn bytes(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn made(dir: &Path, size: u64) -> Making {
    let mut m = Making::begin(dir, header(size)).unwrap();
    let all = bytes(size);
    all.chunks(3 * BLOCK).for_each(|piece| m.push(piece).unwrap());
    m
}

#[test]
fn headers_are_read_as_they_were_written_and_nothing_else_is() {
    let good = header(12_345);
    let at = good.encode();
    assert_eq!((at.len(), Header::decode(&at).unwrap()), (HEADER, good));
    let code = |b: &[u8]| Header::decode(b).unwrap_err().code;
    assert_eq!(
        (code(&[]), code(&at[..HEADER - 1]), code(&[0; HEADER])),
        (Code::Inval, Code::Inval, Code::Inval)
    );
    let resealed = |change: fn(&mut [u8])| {
        let mut b = header(12_345).encode();
        change(&mut b);
        let sum = crc32c(&b[..SUM_AT]);
        b[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        Header::decode(&b)
    };
    assert_eq!(resealed(|b| b[8] = 2).unwrap_err().code, Code::OpNotSupp);
    for bad in [
        |b: &mut [u8]| b[12..16].fill(0xff),
        |b: &mut [u8]| b[PATH_AT] = 0xff,
        |b: &mut [u8]| b[47] = 0xff,
    ] {
        assert_eq!(resealed(bad).unwrap_err().code, Code::Inval);
    }
    // Every bit is covered.
    for at_bit in (0..HEADER * 8).step_by(97) {
        let mut b = at.clone();
        b[at_bit / 8] ^= 1 << (at_bit % 8);
        assert!(Header::decode(&b).is_err(), "bit {at_bit}");
    }
    let long = Header { path: "ä".repeat(4000), ..header(0) };
    let cut = Header::decode(&long.encode()).unwrap().path;
    assert!(
        cut.len() <= LONGEST_PATH && cut.len() > LONGEST_PATH - 2 && long.path.starts_with(&cut)
    );
}

proptest! {
    #[test]
    fn no_bytes_make_the_decoder_panic(b in proptest::collection::vec(any::<u8>(), 0..5000)) {
        let _ = Header::decode(&b);
        // Behind the magic and the version.
        let mut known = header(1).encode();
        known.iter_mut().skip(12).zip(&b).for_each(|(to, from)| *to = *from);
        let sum = crc32c(&known[..SUM_AT]);
        known[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        let _ = Header::decode(&known);
    }
}

#[test]
fn copies_count_when_they_are_whole_and_are_found_by_what_they_hold() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for size in [0, 1, BLOCK as u64, 3 * BLOCK as u64 + 5, 9 * BLOCK as u64] {
        let of = sealed(size);
        assert!(Copy::open(at, &of).unwrap().is_none());
        let half = made(at, size);
        // A copy that is dropped leaves nothing, not even while it is made.
        assert_eq!(fs::read_dir(at).unwrap().count(), 0);
        drop(half);
        assert!(made(at, size).publish().unwrap());
        let copy = Copy::open(at, &of).unwrap().unwrap();
        let blocks = of.blocks() as usize;
        let got = copy.read(0, blocks).unwrap();
        assert!(
            got[..size as usize] == bytes(size) && got[size as usize..].iter().all(|b| *b == 0)
        );
        // Another content, inode or file system has another copy.
        let others = [
            Sealed { root: [3; 32], ..of.clone() },
            Sealed { ino: 0x78, ..of.clone() },
            Sealed { fs: [0; 16], ..of.clone() },
        ];
        assert!(others.iter().all(|o| Copy::open(at, o).unwrap().is_none()));
        // Under another file's name it is not trusted.
        for ending in [COPY, SUMS] {
            let (from, to) =
                (format!("{}.{ending}", of.name()), format!("{}.{ending}", others[1].name()));
            fs::copy(at.join(from), at.join(to)).unwrap();
        }
        assert_eq!(Copy::open(at, &others[1]).unwrap_err().code, Code::Corrupt);
        remove_named(at, &others[1].name()).unwrap();
        assert!(!made(at, size).publish().unwrap(), "it is there");
        // Checksums alone belong to an interrupted copy, and are not in the way.
        fs::remove_file(at.join(format!("{}.{COPY}", of.name()))).unwrap();
        assert!(Copy::open(at, &of).unwrap().is_none());
        assert!(made(at, size).publish().unwrap());
        let all = list(at).unwrap();
        assert_eq!(
            (all.len(), all[0].usable, all[0].path.as_deref()),
            (1, true, Some("/models/ä.safetensors"))
        );
        remove(at, &all[0]).unwrap();
        assert_eq!((fs::read_dir(at).unwrap().count(), list(at).unwrap().len()), (0, 0));
        // A process that had it open can still read it.
        assert!(copy.read(0, blocks).is_ok());
    }
}

#[test]
fn a_bit_that_changed_is_found_and_the_copy_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let size = 5 * BLOCK as u64 + 100;
    made(dir.path(), size).publish().unwrap();
    let copy = Copy::open(dir.path(), &sealed(size)).unwrap().unwrap();
    let file = File::options().read(true).write(true).open(copy.path()).unwrap();
    let mut b = [0];
    file.read_exact_at(&mut b, 2 * BLOCK as u64 + 9).unwrap();
    file.write_all_at(&[b[0] ^ 1], 2 * BLOCK as u64 + 9).unwrap();
    assert!(copy.read(0, 2).is_ok() && copy.read(3, 3).is_ok());
    assert_eq!(copy.read(0, 6).unwrap_err().0, 2 * BLOCK as u64);
    assert!(copy.put_aside() && copy.put_aside(), "twice is once");
    assert!(Copy::open(dir.path(), &sealed(size)).unwrap().is_none());
    let all = list(dir.path()).unwrap();
    assert!(!all[0].usable && all[0].why.as_deref().unwrap().contains("set aside"), "{all:?}");
    assert!(made(dir.path(), size).publish().unwrap(), "staged again");
    assert!(list(dir.path()).unwrap()[0].usable);
    remove(dir.path(), &all[0]).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_others_may_write_and_what_has_another_size_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let size = 2 * BLOCK as u64;
    made(dir.path(), size).publish().unwrap();
    let at = |ending: &str| dir.path().join(format!("{}.{ending}", sealed(size).name()));
    let mode = |path: &Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap()
    };
    let code = || Copy::open(dir.path(), &sealed(size)).map(|c| c.is_some()).map_err(|e| e.code);
    assert_eq!(fs::metadata(at(COPY)).unwrap().mode() & 0o777, 0o600);
    for path in [dir.path().to_path_buf(), at(COPY), at(SUMS)] {
        let before = fs::metadata(&path).unwrap().mode();
        mode(&path, before | 0o020);
        assert_eq!(code(), Err(Code::Perm), "{}", path.display());
        mode(&path, before);
    }
    assert_eq!(code(), Ok(true));
    for ending in [COPY, SUMS] {
        let f = File::options().write(true).open(at(ending)).unwrap();
        let len = f.metadata().unwrap().len();
        f.set_len(len - 1).unwrap();
        assert_eq!(code(), Err(Code::Corrupt), "{ending}");
        f.set_len(len).unwrap();
    }
    fs::write(at(SUMS), b"").unwrap();
    assert_eq!(code(), Err(Code::Inval));
    fs::remove_file(at(SUMS)).unwrap();
    assert_eq!(code(), Err(Code::NoEnt));
    assert_eq!(check_folder(&at(COPY)).unwrap_err().code, Code::NotDir);
    assert_eq!(check_folder(Path::new("/none/of/it")).unwrap_err().code, Code::NoEnt);
    let e = Making::begin(dir.path(), header(1 << 49)).err().unwrap();
    assert!(matches!(e.code, Code::NoSpc | Code::FBig), "{e}");
}
