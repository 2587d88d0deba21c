//! The table of cuFile's functions against a stand-in of NVIDIA's library, which is compiled here:
//! names, types and counters fit together as the interface describes them. The real library is not
//! tested.

use std::{
    ffi::{c_int, c_void},
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::standin::{compile, own};
use strake_gds::{
    Unavailable,
    local::{Counters, CuFile, Nvidia},
};

/// A file that exists everywhere, in place of `/proc/modules`, which kernels without modules lack.
const MODULES: &str = "/proc/version";

/// Each build has its own file name, because dlopen(3) does not load an open file again.
fn standin(dir: &Path, flags: &[&str]) -> Option<PathBuf> {
    let to = dir.join(format!("libcufile{}.so.0", flags.concat().replace('/', "")));
    compile("libcufile.c", to, &[&["-Wno-unused"], flags].concat())
}

type Opened = Result<Arc<dyn CuFile>, Unavailable>;

fn open(dir: &Path, flags: &[&str]) -> Option<(PathBuf, Opened)> {
    let library = standin(dir, flags)?;
    let opened = Nvidia::open_library(&library, Path::new(MODULES));
    Some((library, opened))
}

#[test]
fn reads_arrive_and_counters_tell_their_transport_in_each_version() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<u8> = (0..32_768u32).map(|i| (i * 7 + i / 251) as u8).collect();
    std::fs::write(dir.path().join("f"), &data).unwrap();
    let file = File::open(dir.path().join("f")).unwrap();
    for version in ["-DVERSION=1150", "-DVERSION=1160", "-DVERSION=1200"] {
        let Some((library, opened)) = open(dir.path(), &[version]) else { return };
        let cufile = opened.unwrap_or_else(|e| panic!("{e}"));
        // SAFETY: the functions of these names have these types; they take any number, or no
        // argument.
        let (trick, registered) = unsafe {
            (
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(own(
                    &library,
                    "strake_standin_trick",
                )),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(own(
                    &library,
                    "strake_standin_registered",
                )),
            )
        };
        assert_eq!(cufile.counters().unwrap(), Counters::default());
        let handle = cufile.register(file.as_fd()).unwrap();
        let mut to = vec![0u8; 8192];
        let addr = to.as_mut_ptr().expose_provenance() as u64;
        assert_eq!(cufile.read(handle, addr, 8192, 4096), 8192);
        assert!(to == data[4096..][..8192]);
        assert_eq!(
            cufile.counters().unwrap(),
            Counters { posix: 0, straight: 1, bytes: 8192 },
            "{version}"
        );
        // SAFETY: as above.
        unsafe { trick(1) };
        assert_eq!(cufile.read(handle, addr, 4096, 0), 4096);
        assert_eq!(
            cufile.counters().unwrap(),
            Counters { posix: 1, straight: 1, bytes: 12_288 },
            "{version}"
        );
        for (n, said) in [(2, 5006), (3, -1)] {
            // SAFETY: as above.
            unsafe { trick(n) };
            assert_eq!(cufile.read(handle, addr, 4096, 0), said);
        }
        cufile.deregister(handle);
        // SAFETY: as above.
        assert_eq!(unsafe { registered() }, 0);
    }
}

#[test]
fn what_cannot_be_used_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let why = |flags: &[&str]| Some(open(dir.path(), flags)?.1.err().unwrap());
    let Some(old) = why(&["-DNO_STATS"]) else { return };
    assert!(
        matches!(&old, Unavailable::OldCuFile { symbol, .. } if symbol == "cuFileSetStatsLevel"),
        "{old}"
    );
    let said = |flags: &[&str], kind: &str, words: &str| {
        let why = why(flags).unwrap();
        assert!(why.kind() == kind && why.to_string().contains(words), "{why}");
    };
    said(
        &["-DSTALE"],
        "cufile",
        "its compatibility mode stays on: cuFileSetParameterBool failed with 5026",
    );
    said(
        &["-DNO_DRIVER"],
        "cufile",
        "cuFileDriverOpen failed with 5011: the CUDA driver returned 999",
    );
    // Our own library, under whatever name it is found.
    said(&["-DOURS"], "no-cufile", "is StrakeFS's own library");
    let gone =
        Nvidia::open_library(&standin(dir.path(), &[]).unwrap(), Path::new("/nowhere/modules"))
            .err()
            .unwrap();
    assert_eq!(gone.kind(), "no-modules");
    std::fs::write(dir.path().join("garbage"), b"not a library").unwrap();
    let e = Nvidia::open_library(&dir.path().join("garbage"), Path::new(MODULES)).err().unwrap();
    assert_eq!(e.kind(), "no-cufile");
}
