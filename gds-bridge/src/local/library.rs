//! Where NVIDIA's cuFile library is looked for, and how it is opened; for the tier and for
//! StrakeFS's own library of that interface.

use std::{
    ffi::{CStr, CString, OsString, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// The names that it is installed by.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];
/// Where it is looked for by its whole name, when the plain one leads nowhere or elsewhere.
const PLACES: [&str; 5] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
];

/// Whether the program has more rights than who started it (set-user-ID, file capabilities).
pub fn privileged() -> bool {
    // SAFETY: reads a number that the kernel gave the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// A variable of the environment that is set to something. Where [`privileged`] none is believed:
/// it could have any library loaded.
pub fn variable(name: &str) -> Option<OsString> {
    if privileged() { None } else { std::env::var_os(name).filter(|v| !v.is_empty()) }
}

/// What may be it, in the order in which it is tried: what `STRAKE_CUFILE_REAL` names, or what the
/// loader finds, and then whole names.
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
    /// One that has a `cuFileRead` and is not our own; otherwise why it is not.
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

    /// All that the program has.
    pub fn program() -> Library {
        Library(libc::RTLD_DEFAULT)
    }

    /// Whether StrakeFS's own library of that interface is in it.
    pub fn is_ours(self) -> bool {
        !self.symbol(c"strake_cufile").is_null()
    }

    /// Where a symbol of it is; null if there is none.
    pub fn symbol(self, name: &CStr) -> *mut c_void {
        // SAFETY: looks a name up in a library that is open, or in all that the program has.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }
}
