//! NVIDIA's library, opened at run time: declarations of our own, names and numbers as of versions
//! 1.15 to 1.20.

use std::{
    ffi::{CStr, c_int, c_void},
    fs::File,
    mem::offset_of,
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use parking_lot::Mutex;

use super::{
    cufile::{Counters, CuFile},
    library::{Library, candidates, privileged},
    probe,
    rounds::Rounds,
};
use crate::{Unavailable, fault::Fault};

/// Must be readable: otherwise opening the driver never ends.
const MODULES: &str = "/proc/modules";

/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const ALLOW_COMPAT_MODE: c_int = 1;
/// The level of counters that distinguishes direct reads from others.
const BY_GPU: c_int = 3;
/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_int = 1;
/// `CU_FILE_CUDA_DRIVER_ERROR`.
const CUDA_DRIVER_ERROR: c_int = 5011;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    err: c_int,
    cu_err: c_int,
}

impl Status {
    fn check(self, call: &'static str) -> Result<(), Fault> {
        match (self.err, self.cu_err) {
            (0, _) => Ok(()),
            (CUDA_DRIVER_ERROR, code) => Err(Fault::Driver {
                call,
                code: CUDA_DRIVER_ERROR,
                name: format!("the CUDA driver returned {code}"),
            }),
            (code, _) => Err(Fault::Driver { call, code, name: "an error code of cuFile".into() }),
        }
    }
}

/// `CUfileDescr_t`; of its union only the descriptor is used.
#[repr(C)]
struct Descriptor {
    kind: c_int,
    padding: c_int,
    fd: c_int,
    rest: c_int,
    operations: *const c_void,
}

const _: () = assert!(
    size_of::<Descriptor>() == 24
        && offset_of!(Descriptor, fd) == 8
        && offset_of!(Descriptor, operations) == 16
);

macro_rules! functions {
    ($($field:ident = $symbol:literal($($arg:ty),*) -> $result:ty;)*) => {
        struct Table {
            $($field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Table {
            fn of(name: &Path, library: Library) -> Result<Table, Unavailable> {
                Ok(Table {
                    // SAFETY: the symbol is a function of cuFile's interface of this very type.
                    $($field: unsafe { library.function($symbol) }.ok_or_else(|| old(name, $symbol))?,)*
                })
            }
        }
    };
}

functions! {
    version = c"cuFileGetVersion"(*mut c_int) -> Status;
    set_bool = c"cuFileSetParameterBool"(c_int, u8) -> Status;
    stats_level = c"cuFileSetStatsLevel"(c_int) -> Status;
    driver_open = c"cuFileDriverOpen"() -> Status;
    stats_start = c"cuFileStatsStart"() -> Status;
    stats = c"cuFileGetStatsL3"(*mut Room) -> Status;
    register = c"cuFileHandleRegister"(*mut *mut c_void, *mut Descriptor) -> Status;
    deregister = c"cuFileHandleDeregister"(*mut c_void) -> ();
    read = c"cuFileRead"(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
}

/// Memory for `CUfileStatsLevel3_t`, which is smaller in all versions.
type Room = [u64; 4096];

/// Positions of its numbers, in words.
struct Layout {
    gpus: usize,
    first: usize,
}

/// Words of one GPU's counters, and the positions of those that are used.
const EACH: usize = 31;
const READ_BYTES: usize = 2;
const P2P_READS: usize = 7;
const NVFS_READS: usize = 8;
const POSIX_READS: usize = 9;
/// Maximum number of GPUs with counters.
const GPUS: usize = 16;
/// The first version whose level 1 counters include calls with vectors.
const VECTORS_SINCE: c_int = 1160;

impl Layout {
    /// The layout of a version of the library.
    fn of(version: c_int) -> Layout {
        let level1 = if version >= VECTORS_SINCE { 624 / 8 } else { 512 / 8 };
        // Level 2 consists of two histograms of 32 sizes.
        let gpus = level1 + 64;
        Layout { gpus, first: gpus + 1 }
    }

    fn counters(&self, room: &Room) -> Counters {
        // The number is in the lower half of its word.
        let gpus = (room[self.gpus] as u32 as usize).min(GPUS);
        let mut all = Counters::default();
        for gpu in 0..gpus {
            let at = |n: usize| room[self.first + gpu * EACH + n];
            all.posix += at(POSIX_READS);
            all.straight += at(P2P_READS) + at(NVFS_READS);
            all.bytes += at(READ_BYTES);
        }
        all
    }
}

/// NVIDIA's library with its driver open. Both stay open until the process ends.
pub struct Nvidia {
    table: Table,
    layout: Layout,
    rounds: Rounds,
}

/// Opened once per process.
static OPENED: Mutex<Option<Arc<Nvidia>>> = Mutex::new(None);

/// It lacks a function that is needed.
fn old(file: &Path, name: &CStr) -> Unavailable {
    Unavailable::OldCuFile {
        library: file.display().to_string(),
        symbol: name.to_string_lossy().into_owned(),
    }
}

/// A reason not to open any library, checked before the first try.
fn forbidden(modules: &Path) -> Option<Unavailable> {
    if let Err(e) = File::open(modules) {
        return Some(Unavailable::NoModules { why: format!("{}: {e}", modules.display()) });
    }
    // Calls that NVIDIA's library makes to itself would lead to our library, and from there back to
    // it.
    Library::program().is_ours().then_some(Unavailable::OwnCuFile)
}

impl Nvidia {
    /// The library, with its driver open. First has `prober` open it in another process: see
    /// [`probe`].
    pub fn open(prober: &Path) -> Result<Arc<Nvidia>, Unavailable> {
        let mut opened = OPENED.lock();
        if let Some(o) = &*opened {
            return Ok(o.clone());
        }
        // First the reasons that are known without it.
        if let Some(why) = forbidden(Path::new(MODULES)) {
            return Err(why);
        }
        if privileged() && prober.components().count() < 2 {
            let why =
                "a program with more privileges than its caller does not search PATH for it".into();
            return Err(Unavailable::NoProbe { program: prober.display().to_string(), why });
        }
        probe::probe(prober, probe::LIMIT)?;
        Ok(opened.insert(Arc::new(Nvidia::open_here()?)).clone())
    }

    /// Opens it in this process, which may never return.
    pub fn open_here() -> Result<Nvidia, Unavailable> {
        Nvidia::open_one_of(&candidates(), Path::new(MODULES))
    }

    /// Opens the first candidate that is not our own library.
    fn open_one_of(names: &[PathBuf], modules: &Path) -> Result<Nvidia, Unavailable> {
        if let Some(why) = forbidden(modules) {
            return Err(why);
        }
        let mut all = Vec::new();
        for name in names {
            match Library::open(name) {
                Ok(library) => return Nvidia::start(name, library),
                Err(why) => all.push(why),
            }
        }
        Err(Unavailable::NoCuFile { why: all.join("; ") })
    }

    /// As [`Nvidia::open_here`], with a library by its path and a file other than `/proc/modules`,
    /// for tests.
    #[doc(hidden)]
    pub fn open_library(library: &Path, modules: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Ok(Arc::new(Nvidia::open_one_of(&[library.into()], modules)?))
    }

    fn start(name: &Path, library: Library) -> Result<Nvidia, Unavailable> {
        let table = Table::of(name, library)?;
        let failed = |f: Fault| Unavailable::CuFile { why: f.to_string() };
        let mut version = 0;
        // SAFETY: the first call writes one number; the others take numbers, or nothing, and are
        // made in the order that the interface asks for.
        unsafe {
            (table.version)(&mut version).check("cuFileGetVersion").map_err(failed)?;
            let off = (table.set_bool)(ALLOW_COMPAT_MODE, 0).check("cuFileSetParameterBool");
            off.map_err(|f| Unavailable::CuFile {
                why: format!("its compatibility mode stays on: {f}"),
            })?;
            (table.stats_level)(BY_GPU).check("cuFileSetStatsLevel").map_err(failed)?;
            (table.driver_open)().check("cuFileDriverOpen").map_err(failed)?;
            (table.stats_start)().check("cuFileStatsStart").map_err(failed)?;
        }
        let opened = Nvidia { table, layout: Layout::of(version), rounds: Rounds::default() };
        opened.counters().map_err(failed)?;
        Ok(opened)
    }
}

impl CuFile for Nvidia {
    fn register(&self, file: BorrowedFd<'_>) -> Result<u64, Fault> {
        let mut handle = ptr::null_mut();
        let fd = file.as_raw_fd();
        let mut descriptor =
            Descriptor { kind: OPAQUE_FD, padding: 0, fd, rest: 0, operations: ptr::null() };
        // SAFETY: writes one handle, and reads the descriptor, which lives through the call.
        let status = unsafe { (self.table.register)(&mut handle, &mut descriptor) };
        status.check("cuFileHandleRegister").map(|()| handle.expose_provenance() as u64)
    }

    fn deregister(&self, handle: u64) {
        // SAFETY: of a file that was registered, once.
        unsafe { (self.table.deregister)(ptr::with_exposed_provenance_mut(handle as usize)) }
    }

    fn read(&self, handle: u64, to: u64, len: usize, offset: u64) -> isize {
        let place = |n: u64| ptr::with_exposed_provenance_mut::<c_void>(n as usize);
        // SAFETY: the handle is of a file that is registered; the library asks the driver what the
        // address is, and writes no more than `len` bytes.
        unsafe { (self.table.read)(place(handle), place(to), len, offset as i64, 0) }
    }

    fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    fn counters(&self) -> Result<Counters, Fault> {
        let mut room: Box<Room> = Box::new([0; 4096]);
        // SAFETY: there is room for more than any version writes.
        unsafe { (self.table.stats)(&mut *room) }.check("cuFileGetStatsL3")?;
        Ok(self.layout.counters(&room))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_where_each_version_has_them() {
        for (version, first) in [(1150, 1032 / 8), (1160, 1144 / 8), (1200, 1144 / 8)] {
            let mut room: Box<Room> = Box::new([0x7777_7777; 4096]);
            // Two GPUs; the upper half of the word is undefined.
            room[first - 1] = 0xdead_beef_0000_0002;
            for gpu in 0..2 {
                for (n, word) in room[first + gpu * EACH..][..EACH].iter_mut().enumerate() {
                    *word = (1000 * gpu + n) as u64;
                }
            }
            let got = Layout::of(version).counters(&room);
            assert_eq!(
                got,
                Counters { posix: 9 + 1009, straight: 7 + 8 + 1007 + 1008, bytes: 2 + 1002 },
                "{version}"
            );
            room[first - 1] = u64::from(u32::MAX);
            Layout::of(version).counters(&room);
        }
    }

    #[test]
    fn nothing_is_opened_where_it_would_hang() {
        let gone = Path::new("/nowhere/modules");
        let r = Nvidia::open_one_of(&["/nowhere/libcufile.so.0".into()], gone).err();
        assert!(matches!(r, Some(Unavailable::NoModules { .. })), "{r:?}");
        let r =
            Nvidia::open_one_of(&["/nowhere/libcufile.so.0".into()], Path::new("/proc/version"))
                .err();
        assert!(
            matches!(&r, Some(Unavailable::NoCuFile { why }) if why.contains("/nowhere/libcufile.so.0")),
            "{r:?}"
        );
    }
}
