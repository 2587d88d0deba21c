//! Search for NVIDIA's cuFile library, and opening it; for the tier and for StrakeFS's own library
//! of that interface.

use std::{
    ffi::{CStr, CString, OsString, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

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
pub struct Library(*mut c_void);

// SAFETY: what the loader calls it by; any thread may give that to dlsym(3), and nobody closes it.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens a library that has a `cuFileRead` and is not our own; otherwise returns why not.
    pub fn open(name: &Path) -> Result<Library, String> {
        let shown = name.display();
        let file = CString::new(name.as_os_str().as_bytes())
            .map_err(|_| format!("{shown}: a zero byte"))?;
        // SAFETY: opening runs its initialisers; those of cuFile only set up memory of their own.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: the last error of this thread, or null; copied before any other call of the
            // loader.
            let why = unsafe {
                libc::dlerror().as_ref().map(|e| CStr::from_ptr(e).to_string_lossy().into_owned())
            };
            return Err(why.unwrap_or_else(|| format!("{shown} cannot be opened")));
        }
        let library = Library(handle);
        if library.is_ours() {
            return Err(format!("{shown} is StrakeFS's own library of that interface"));
        }
        if library.symbol(c"cuFileRead").is_null() {
            return Err(format!("{shown} has no cuFileRead"));
        }
        Ok(library)
    }

    /// All libraries that the program has loaded.
    pub fn program() -> Library {
        Library(libc::RTLD_DEFAULT)
    }

    /// Whether it contains StrakeFS's own library of that interface.
    pub fn is_ours(self) -> bool {
        !self.symbol(c"strake_cufile").is_null()
    }

    /// The address of a symbol; null if there is none.
    pub fn symbol(self, name: &CStr) -> *mut c_void {
        // SAFETY: looks a name up in a library that is open, or in all that the program has.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }
}
