//! What this process has open: the driver, connections, files and registered memory.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use strake_client::File;
use strake_fabric::Use;
use strake_gds::{
    Cuda, Policy,
    session::{KEY, Memory, Session, Setup},
};

use crate::{
    abi::{self, Descriptor, Properties},
    batch::Batch,
    errors::{CallError, Done, caught, say},
    mount_detection::{self, Found, Kind},
    params::Set,
    policy, set,
    stats::Stats,
    vendor::{Range, Vendor},
};

/// How long the exit of the process waits for connections to close.
const AT_EXIT: Duration = Duration::from_secs(5);
/// The first handle number. No address of a process is this large, so a handle cannot be mistaken
/// for one.
const FIRST_ID: u64 = 1 << 62;

/// A file that a program registered.
pub enum Handle {
    Ours(Box<OurFile>),
    Vendor(Foreign),
}

/// A file that the real library has registered.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// The real library's handle.
    word: usize,
    fd: Option<c_int>,
}

impl Foreign {
    pub fn word(&self) -> *mut c_void {
        self.word as *mut c_void
    }

    /// A range of at most `most` bytes from `offset` on.
    pub fn range(&self, offset: i64, most: usize) -> Range {
        Range { fd: self.fd, offset, most }
    }
}

/// A file of one of our mounts, opened by this library.
pub struct OurFile {
    pub found: Found,
    fd: c_int,
    servers: String,
    pub policy: Policy,
    /// The device whose bridge moves host memory.
    pub home: u32,
    /// `None`: the file was deregistered, so a call that still holds it opens nothing again.
    files: Mutex<Option<BTreeMap<u32, Place>>>,
}

/// A file in the connection that serves one device.
pub type Place = (Arc<Session>, Arc<File>);

/// Key of a connection: the file system's UUID, the servers that the mount named, and the device.
type Connected = ([u8; 16], String, u32);

/// How often the program has opened the driver (`explicit`), or whether a registration opened it
/// (`implicit`).
#[derive(Default)]
struct Opened {
    explicit: i64,
    implicit: bool,
}

impl Opened {
    fn uses(&self) -> i64 {
        self.explicit + i64::from(self.implicit)
    }
}

/// The state of the library in this process.
pub struct Driver {
    /// The process that opened the driver; 0: none yet. Threads and connections do not survive a
    /// fork(2).
    pid: AtomicU32,
    opened: Mutex<Opened>,
    /// Calls under way that move bytes.
    active: AtomicUsize,
    next: AtomicU64,
    cuda: Mutex<BTreeMap<u32, Cuda>>,
    sessions: Mutex<BTreeMap<Connected, Arc<Session>>>,
    handles: RwLock<BTreeMap<u64, Arc<Handle>>>,
    pub batches: RwLock<BTreeMap<u64, Arc<Batch>>>,
    pub buffers: Mutex<BTreeMap<u64, usize>>,
    pub streams: Mutex<BTreeMap<usize, u32>>,
    pub params: Mutex<Set>,
    pub properties: Mutex<Properties>,
    /// Held while the real library's driver is being opened, which may hang forever.
    opening: Mutex<()>,
    /// Whether the real library's driver is open. Set while `buffers` is locked, so that each
    /// buffer is registered there once: either when the driver opens or when the program registers
    /// it, whichever comes second.
    vendor: AtomicBool,
    pub stats: Stats,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Registers [`at_exit`] again, so that it runs before the exit handlers registered so far: those
/// of a library that was just opened, which may call this one.
fn ends_before() {
    // SAFETY: the function exists until the process ends.
    unsafe { libc::atexit(at_exit) };
}

/// The real library, whether its driver is open or not.
pub fn real() -> Done<&'static Vendor> {
    Vendor::get(ends_before)
}

extern "C" fn at_exit() {
    let Some(d) = DRIVER.get().filter(|d| d.pid.load(SeqCst) == std::process::id()) else { return };
    match d.opened.try_lock() {
        // Later calls find the driver closed.
        Some(mut o) if o.uses() > 0 => *o = Opened::default(),
        _ => return,
    }
    d.write_stats();
    // On a new thread: the thread-local storage of this one may be gone already.
    let (done, ended) = mpsc::channel();
    let close = std::thread::Builder::new().spawn(move || {
        let _ = caught(|| {
            d.let_go(false);
            Ok(())
        });
        let _ = done.send(());
    });
    if close.is_ok() && d.active.load(SeqCst) == 0 {
        let _ = ended.recv_timeout(AT_EXIT);
    }
}

fn properties() -> Properties {
    // This library never caches GPU memory and never uses nvidia-fs, so nvidia-fs's features are
    // all off.
    Properties {
        poll_thresh_size: 4,
        max_direct_io_size: 16384,
        dcontrolflags: 1 << 1,
        fflags: 1 << 1 | 1 << 2,
        max_device_cache_size: 131_072,
        per_buffer_cache_size: 1024,
        max_device_pinned_mem_size: 33_554_432,
        max_batch_io_size: 128,
        ..Properties::default()
    }
}

/// Counts a call or a batch entry as under way while the value lives.
pub struct Active(&'static AtomicUsize);

/// The driver; it stays open as long as the value lives.
pub struct Working {
    driver: &'static Driver,
    _active: Active,
}

impl std::ops::Deref for Working {
    type Target = &'static Driver;

    fn deref(&self) -> &&'static Driver {
        &self.driver
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Driver {
    /// The driver of this process. An error in a forked child whose parent had the driver open.
    pub fn get() -> Done<&'static Driver> {
        let new = || {
            // SAFETY: the function exists until the process ends.
            unsafe { libc::atexit(at_exit) };
            Driver {
                pid: AtomicU32::new(0),
                opened: Mutex::default(),
                active: AtomicUsize::new(0),
                next: AtomicU64::new(FIRST_ID),
                cuda: Mutex::default(),
                sessions: Mutex::default(),
                handles: RwLock::default(),
                batches: RwLock::default(),
                buffers: Mutex::default(),
                streams: Mutex::default(),
                params: Mutex::default(),
                properties: Mutex::new(properties()),
                opening: Mutex::default(),
                vendor: AtomicBool::new(false),
                stats: Stats::default(),
            }
        };
        let d = DRIVER.get_or_init(new);
        if ![0, std::process::id()].contains(&d.pid.load(SeqCst)) {
            return Err(CallError::Op(abi::DRIVER_NOT_INITIALIZED));
        }
        Ok(d)
    }

    /// The driver, if it is open. The call is counted before the check, because closing looks at
    /// the count.
    pub fn open_one() -> Done<Working> {
        let driver = Driver::get()?;
        let working = Working { driver, _active: driver.active() };
        if driver.uses() == 0 {
            Err(CallError::Op(abi::DRIVER_NOT_INITIALIZED))
        } else {
            Ok(working)
        }
    }

    /// The driver; opens it if it is not open, as registering a file does.
    pub fn opened() -> Done<Working> {
        let driver = Driver::get()?;
        let working = Working { driver, _active: driver.active() };
        if driver.uses() == 0 {
            driver.open(false)?;
        }
        Ok(working)
    }

    pub fn uses(&self) -> i64 {
        self.opened.lock().uses()
    }

    /// A new handle number, unique in this process.
    pub fn new_id(&self) -> u64 {
        self.next.fetch_add(16, SeqCst)
    }

    /// Opens the driver. `asked`: the program asked for it; otherwise a registration needs it,
    /// which counts as one open.
    pub fn open(&self, asked: bool) -> Done<()> {
        let mut o = self.opened.lock();
        if o.uses() == 0 {
            Cuda::of_thread().map_err(|why| {
                say(|| format!("opening the driver: {why}"));
                CallError::from(&why)
            })?;
            self.pid.store(std::process::id(), SeqCst);
        }
        match asked {
            true => *o = Opened { explicit: o.explicit + 1, implicit: false },
            false => o.implicit = o.explicit == 0,
        }
        Ok(())
    }

    pub fn close(&self) -> Done<()> {
        let mut o = self.opened.lock();
        match o.uses() {
            0 => return Err(CallError::Op(abi::DRIVER_NOT_INITIALIZED)),
            1 => {}
            _ => {
                o.explicit -= 1;
                return Ok(());
            }
        }
        if self.active.load(SeqCst) > 0 {
            return Err(CallError::Op(abi::DRIVER_CLOSING));
        }
        *o = Opened::default();
        self.let_go(true);
        self.write_stats();
        Ok(())
    }

    /// Releases everything. `vendor`: in the real library, too. That is not safe at the exit of the
    /// process, when the real library may have ended already.
    fn let_go(&self, vendor: bool) {
        let batches = std::mem::take(&mut *self.batches.write());
        batches.into_values().for_each(|b| b.destroy(vendor));
        let handles = std::mem::take(&mut *self.handles.write());
        handles.into_values().for_each(|h| self.close_file(&h, vendor));
        self.buffers.lock().clear();
        self.streams.lock().clear();
        let sessions = std::mem::take(&mut *self.sessions.lock());
        drop(sessions);
        self.cuda.lock().clear();
        let opened = self.vendor.swap(false, SeqCst);
        if opened
            && vendor
            && let Some(vendor) = Vendor::known()
        {
            // SAFETY: takes nothing.
            let _ = vendor.control(vendor.driver_close, |f| unsafe { f() });
        }
    }

    /// Writes the statistics to the file that `STRAKE_GDS_STATS` names.
    fn write_stats(&self) {
        let Some(to) = set::os("STRAKE_GDS_STATS") else { return };
        let to = to.to_string_lossy().replace("%p", &std::process::id().to_string());
        if let Err(e) = std::fs::write(&to, format!("{}\n", self.stats.json())) {
            say(|| format!("{to}: {e}"));
        }
    }

    /// Marks a call as under way while the value lives, which keeps the driver from being closed.
    pub fn active(&'static self) -> Active {
        self.active.fetch_add(1, SeqCst);
        Active(&self.active)
    }

    pub fn cuda(&self, device: u32) -> Done<Cuda> {
        let mut all = self.cuda.lock();
        if let Some(c) = all.get(&device) {
            return Ok(c.clone());
        }
        let c = Cuda::open(device).map_err(|why| {
            say(|| format!("device {device}: {why}"));
            CallError::from(&why)
        })?;
        all.insert(device, c.clone());
        Ok(c)
    }

    /// The device that the calling thread uses.
    pub fn cuda_of_thread(&self) -> Done<(u32, Cuda)> {
        let device = Cuda::of_thread().map_err(|why| CallError::from(&why))?;
        Ok((device, self.cuda(device)?))
    }

    pub fn handle(&self, id: *mut c_void) -> Done<Arc<Handle>> {
        let found = self.handles.read().get(&(id as u64)).cloned();
        found.ok_or(CallError::Op(abi::HANDLE_NOT_REGISTERED))
    }

    /// Registers a file and returns its handle number.
    pub fn register(&self, of: &mut Descriptor) -> Done<u64> {
        let handle = match (of.kind, of.kind == abi::OPAQUE_FD) {
            (_, true) => match mount_detection::look(of.fd())? {
                Kind::Ours(f) => Handle::Ours(Box::new(self.open_ours(of.fd(), f)?)),
                Kind::Other(regular) => self.register_with_vendor(of, regular)?,
            },
            // A user-space file system of the program, or a Windows handle: never a file of ours.
            (2 | 3, _) => self.register_with_vendor(of, true)?,
            _ => return Err(CallError::Op(abi::INVALID_VALUE)),
        };
        let id = self.new_id();
        self.handles.write().insert(id, Arc::new(handle));
        Ok(id)
    }

    fn open_ours(&self, fd: c_int, found: Found) -> Done<OurFile> {
        // A descriptor that was closed and now means another file may be registered again.
        let again =
            |h: &Arc<Handle>| matches!(&**h, Handle::Ours(o) if o.fd == fd && o.found == found);
        if self.handles.read().values().any(again) {
            return Err(CallError::Op(abi::HANDLE_ALREADY_REGISTERED));
        }
        let policy = policy::of(&found)?;
        let servers = match set::text("STRAKE_GDS_MDS") {
            None => mount_detection::servers(fd, &found)?,
            named => named,
        };
        let Some(servers) = servers else {
            say(|| {
                format!(
                    "descriptor {fd}: its mount names no metadata server, and STRAKE_GDS_MDS is not set"
                )
            });
            return Err(CallError::Op(abi::IO_NOT_SUPPORTED));
        };
        let (home, _) = self.cuda_of_thread()?;
        let ours =
            OurFile { found, fd, servers, policy, home, files: Mutex::new(Some(BTreeMap::new())) };
        // Open now and not at the first read, so that the program learns of missing permissions
        // here.
        self.place(&ours, home)?;
        Ok(ours)
    }

    fn register_with_vendor(&self, of: &mut Descriptor, regular: bool) -> Done<Handle> {
        let vendor = match self.vendor() {
            Err(CallError::Op(abi::IO_NOT_SUPPORTED)) if !regular => {
                return Err(CallError::Op(abi::INVALID_FILE_TYPE));
            }
            vendor => vendor?,
        };
        let mut to = std::ptr::null_mut();
        // SAFETY: writes one pointer; the descriptor is the program's own.
        vendor.control(vendor.handle_register, |f| unsafe { f(&mut to, of) })?;
        self.stats.passed_on("handles");
        Ok(Handle::Vendor(Foreign {
            word: to as usize,
            fd: (of.kind == abi::OPAQUE_FD).then(|| of.fd()),
        }))
    }

    /// The real library; opens its driver if necessary.
    pub fn vendor(&self) -> Done<&'static Vendor> {
        let vendor = real()?;
        if self.vendor.load(SeqCst) {
            return Ok(vendor);
        }
        let _one = self.opening.lock();
        if !self.vendor.load(SeqCst) {
            self.params.lock().pass_on(vendor);
            // SAFETY: takes nothing.
            let opened = vendor.control(vendor.driver_open, |f| unsafe { f() });
            opened.inspect_err(|w| say(|| format!("the driver of {}: {w:?}", vendor.place())))?;
            let buffers = self.buffers.lock();
            self.vendor.store(true, SeqCst);
            // Register the buffers from before the driver was open. If that fails, the library only
            // uses another buffer for their bytes.
            for (addr, len) in buffers.iter() {
                // SAFETY: the program has registered this memory, so it exists.
                let _ = vendor.control(vendor.buf_register, |f| unsafe {
                    f(*addr as *const c_void, *len, 0)
                });
            }
        }
        Ok(vendor)
    }

    /// The real library, if its driver is open already. Does not wait for a thread that is opening
    /// it: only files of the real library depend on that.
    pub fn vendor_if_open(&self) -> Option<&'static Vendor> {
        Vendor::known().filter(|_| self.vendor.load(SeqCst))
    }

    pub fn deregister(&self, id: *mut c_void) -> Done<()> {
        let found = self.handles.write().remove(&(id as u64));
        let handle = found.ok_or(CallError::Op(abi::HANDLE_NOT_REGISTERED))?;
        self.close_file(&handle, true);
        Ok(())
    }

    fn close_file(&self, handle: &Handle, vendor: bool) {
        match handle {
            Handle::Ours(o) => {
                let files = o.files.lock().take().unwrap_or_default();
                for (session, file) in files.into_values() {
                    if let Err(e) = session.close(File::clone(&file)) {
                        say(|| format!("closing inode {:#x}: {e}", o.found.ino));
                    }
                }
            }
            Handle::Vendor(h) => {
                if let Some(vendor) = Vendor::known().filter(|_| vendor) {
                    // SAFETY: a handle of the real library, which cannot be named any more.
                    let _ = vendor.call(vendor.handle_deregister, |f| unsafe { f(h.word()) });
                }
            }
        }
    }

    /// The file in the connection for a device. Opened at the first use.
    pub fn place(&self, of: &OurFile, device: u32) -> Done<Place> {
        let mut files = of.files.lock();
        let files = files.as_mut().ok_or(CallError::Op(abi::HANDLE_NOT_REGISTERED))?;
        if let Some((session, file)) = files.get(&device) {
            return Ok((session.clone(), file.clone()));
        }
        let session = self.session(of, device)?;
        let file = session.open_inode(of.found.ino, of.found.flags).map_err(|e| {
            say(|| format!("opening inode {:#x}: {e}", of.found.ino));
            CallError::of_open(&e)
        })?;
        let place = (session, Arc::new(file));
        files.insert(device, place.clone());
        Ok(place)
    }

    fn session(&self, of: &OurFile, device: u32) -> Done<Arc<Session>> {
        let mut all = self.sessions.lock();
        let id = (of.found.uuid, of.servers.clone(), device);
        if let Some(s) = all.get(&id) {
            return Ok(s.clone());
        }
        let mut setup = Setup::new(&of.servers, Memory::Cuda(device));
        setup.key = set::text("STRAKE_GDS_KEY").unwrap_or_else(|| KEY.into()).into();
        setup.transports = match set::text("STRAKE_GDS_FABRIC").as_deref() {
            None | Some("auto") => Use::Best,
            Some("tcp") => Use::Tcp,
            Some("rdma") => Use::Rdma,
            Some(other) => {
                say(|| format!("STRAKE_GDS_FABRIC is '{other}'; expected auto, tcp or rdma"));
                return Err(CallError::Op(abi::INVALID_VALUE));
            }
        };
        setup.options.verify_on_gpu =
            set::text("STRAKE_GDS_VERIFY_ON_GPU").is_some_and(|v| v != "0");
        let failed = |e: strake_proto::Error| {
            say(|| format!("connecting to {}: {e}", of.servers));
            CallError::of_open(&e)
        };
        let session = Session::open(&setup).map_err(failed)?;
        let uuid = session.fs_uuid().map_err(failed)?;
        if uuid != of.found.uuid {
            say(|| format!("the file system at {} is not the mounted one", of.servers));
            return Err(CallError::Op(abi::IO_NOT_SUPPORTED));
        }
        if let Some(notice) = session.notice() {
            say(|| notice.to_string());
        }
        let session = Arc::new(session);
        all.insert(id, session.clone());
        Ok(session)
    }
}
