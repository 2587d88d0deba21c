//! Libraries that are opened at run time; the search for NVIDIA's cuFile among them, for the tier
//! and for StrakeFS's own library of that interface.

use std::{
    error::Error,
    ffi::{CStr, OsString, c_void},
    path::{Path, PathBuf},
    ptr,
    sync::OnceLock,
};

use libloading::os::unix;

/// The file names under which it is installed.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];
/// Folders to search when the plain name finds nothing or something else.
const PLACES: [&str; 5] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
];

/// Whether the program has more rights than the user who started it (set-user-ID, file
/// capabilities).
pub fn privileged() -> bool {
    // SAFETY: reads a number that the kernel gave the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// An environment variable that is set and not empty. A [`privileged`] program ignores all of them:
/// they could make it load any library.
pub fn variable(name: &str) -> Option<OsString> {
    if privileged() { None } else { std::env::var_os(name).filter(|v| !v.is_empty()) }
}

/// Candidates in the order in which they are tried: what `STRAKE_CUFILE_REAL` names, or else what
/// the loader finds, and then full paths.
pub fn candidates() -> Vec<PathBuf> {
    if let Some(named) = variable("STRAKE_CUFILE_REAL") {
        return vec![named.into()];
    }
    let path = variable("LD_LIBRARY_PATH").unwrap_or_default();
    let places = std::env::split_paths(&path)
        .filter(|p| p.is_absolute())
        .chain(PLACES.iter().map(PathBuf::from));
    let whole = places.flat_map(|p| NAMES.map(|n| p.join(n))).filter(|p| p.exists());
    NAMES.iter().map(PathBuf::from).chain(whole).collect()
}

/// A library that is open, and stays so until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Library(&'static unix::Library);

impl Library {
    /// Opens cuFile: a library that has a `cuFileRead` and is not our own; otherwise returns why
    /// not.
    pub fn open(name: &Path) -> Result<Library, String> {
        let library = Library::load(name)?;
        let shown = name.display();
        if library.is_ours() {
            return Err(format!("{shown} is StrakeFS's own library of that interface"));
        }
        if library.symbol(c"cuFileRead").is_null() {
            return Err(format!("{shown} has no cuFileRead"));
        }
        Ok(library)
    }

    /// Opens any library; otherwise returns what the loader says.
    pub(crate) fn load(name: &Path) -> Result<Library, String> {
        // SAFETY: opening runs its initialisers; those of the driver and of cuFile only set up
        // memory of their own, on any thread.
        let opened = unsafe { unix::Library::open(Some(name), unix::RTLD_NOW | unix::RTLD_LOCAL) };
        let library = opened.map_err(|e| e.source().map_or(e.to_string(), ToString::to_string))?;
        Ok(Library(Box::leak(Box::new(library))))
    }

    /// All libraries that the program has loaded.
    pub fn program() -> Library {
        static PROGRAM: OnceLock<unix::Library> = OnceLock::new();
        // SAFETY: the loader knows this handle. It is never closed.
        Library(PROGRAM.get_or_init(|| unsafe { unix::Library::from_raw(libc::RTLD_DEFAULT) }))
    }

    /// Whether it contains StrakeFS's own library of that interface.
    pub fn is_ours(self) -> bool {
        !self.symbol(c"strake_cufile").is_null()
    }

    /// The address of a symbol; null if there is none.
    pub fn symbol(self, name: &CStr) -> *mut c_void {
        // SAFETY: only the address is used.
        unsafe { self.0.get::<*mut c_void>(name) }.map_or(ptr::null_mut(), |s| s.into_raw())
    }

    /// A function by its name; `None` if there is none.
    ///
    /// # Safety
    /// `F` is the type of a function pointer, and that of the function of this name.
    pub unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        // SAFETY: the caller's promise. A pointer to a function is never null, so `None` is.
        unsafe { self.0.get::<Option<F>>(name) }.ok().and_then(|s| *s)
    }
}
