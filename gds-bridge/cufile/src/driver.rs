//! What this process has open: the driver, connections, files, memory.

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
    found::{self, Found, Kind},
    params::Set,
    policy,
    real::{Range, Real},
    set,
    stats::Stats,
    wrong::{Done, Wrong, caught, say},
};

/// How long the end of the process waits for connections to be closed.
const AT_EXIT: Duration = Duration::from_secs(5);
/// No address of the process: nobody takes it for one.
const FIRST_ID: u64 = 1 << 62;

/// A file that a program registered.
pub enum Handle {
    Ours(Box<OurFile>),
    Real(Foreign),
}

/// A file of the real library's.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// Its word for it.
    word: usize,
    fd: Option<c_int>,
}

impl Foreign {
    pub fn word(&self) -> *mut c_void {
        self.word as *mut c_void
    }

    /// So many bytes from there on.
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
    /// `None`: it was let go, and a call that still has it opens nothing again.
    files: Mutex<Option<BTreeMap<u32, Place>>>,
}

/// A file in the connection that serves one device.
pub type Place = (Arc<Session>, Arc<File>);

/// A file system, by its UUID and the servers that a mount named, and a device.
type Connected = ([u8; 16], String, u32);

/// Open for so many callers, or because something was registered first.
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

/// All of it.
pub struct Driver {
    /// Who opened it first; 0: nobody yet. Threads and connections do not follow a fork(2).
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
    /// Held by who opens the real library's driver, which may never end.
    opening: Mutex<()>,
    /// The real library's driver was opened. Said while the buffers are locked, so that each is
    /// registered there once, by whoever comes second.
    real: AtomicBool,
    pub stats: Stats,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Has [`at_exit`] run once more, before what was registered until now: the end of a library that
/// was just opened and may call this one.
pub fn ends_before() {
    // SAFETY: the function is there until the process ends.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    let Some(d) = DRIVER.get().filter(|d| d.pid.load(SeqCst) == std::process::id()) else { return };
    match d.opened.try_lock() {
        // What comes after this finds nothing open.
        Some(mut o) if o.uses() > 0 => *o = Opened::default(),
        _ => return,
    }
    d.write_stats();
    // On a thread of its own: this one's is past the end of what threads keep.
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
    // GPU memory is never cached here, and nvidia-fs never used: what it supports is nothing.
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

/// Counts a call, or an entry of a batch, while it lives.
pub struct Active(&'static AtomicUsize);

/// The driver, which stays open as long as this lives.
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
    /// This process's. In a child after a fork there is none, if it was open before.
    pub fn get() -> Done<&'static Driver> {
        let new = || {
            // SAFETY: the function is there until the process ends.
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
                real: AtomicBool::new(false),
                stats: Stats::default(),
            }
        };
        let d = DRIVER.get_or_init(new);
        if ![0, std::process::id()].contains(&d.pid.load(SeqCst)) {
            return Err(Wrong::Op(abi::DRIVER_NOT_INITIALIZED));
        }
        Ok(d)
    }

    /// The same, if it is open. It is counted first and then looked at: whoever closes it looks at
    /// the count.
    pub fn open_one() -> Done<Working> {
        let driver = Driver::get()?;
        let working = Working { driver, _active: driver.active() };
        if driver.uses() == 0 { Err(Wrong::Op(abi::DRIVER_NOT_INITIALIZED)) } else { Ok(working) }
    }

    /// The same, and opened if it was not, as registering does.
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

    /// A new number that nothing of this process has.
    pub fn new_id(&self) -> u64 {
        self.next.fetch_add(16, SeqCst)
    }

    /// `asked`: by the program; otherwise because it is needed, which counts as one open.
    pub fn open(&self, asked: bool) -> Done<()> {
        let mut o = self.opened.lock();
        if o.uses() == 0 {
            Cuda::of_thread().map_err(|why| {
                say(|| format!("opening the driver: {why}"));
                Wrong::from(&why)
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
            0 => return Err(Wrong::Op(abi::DRIVER_NOT_INITIALIZED)),
            1 => {}
            _ => {
                o.explicit -= 1;
                return Ok(());
            }
        }
        if self.active.load(SeqCst) > 0 {
            return Err(Wrong::Op(abi::DRIVER_CLOSING));
        }
        *o = Opened::default();
        self.let_go(true);
        self.write_stats();
        Ok(())
    }

    /// `real`: of the real library, too. At the end of the process its own end may be over.
    fn let_go(&self, real: bool) {
        let batches = std::mem::take(&mut *self.batches.write());
        batches.into_values().for_each(|b| b.destroy(real));
        let handles = std::mem::take(&mut *self.handles.write());
        handles.into_values().for_each(|h| self.close_file(&h, real));
        self.buffers.lock().clear();
        self.streams.lock().clear();
        let sessions = std::mem::take(&mut *self.sessions.lock());
        drop(sessions);
        self.cuda.lock().clear();
        let opened = self.real.swap(false, SeqCst);
        if opened
            && real
            && let Some(real) = Real::known()
        {
            // SAFETY: takes nothing.
            let _ = real.control(real.driver_close, |f| unsafe { f() });
        }
    }

    /// Where `STRAKE_GDS_STATS` says.
    fn write_stats(&self) {
        let Some(to) = set::os("STRAKE_GDS_STATS") else { return };
        let to = to.to_string_lossy().replace("%p", &std::process::id().to_string());
        if let Err(e) = std::fs::write(&to, format!("{}\n", self.stats.json())) {
            say(|| format!("{to}: {e}"));
        }
    }

    /// Something counts as under way while the value lives: the driver is not closed.
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
            Wrong::from(&why)
        })?;
        all.insert(device, c.clone());
        Ok(c)
    }

    /// The device that the calling thread uses.
    pub fn cuda_of_thread(&self) -> Done<(u32, Cuda)> {
        let device = Cuda::of_thread().map_err(|why| Wrong::from(&why))?;
        Ok((device, self.cuda(device)?))
    }

    pub fn handle(&self, id: *mut c_void) -> Done<Arc<Handle>> {
        let found = self.handles.read().get(&(id as u64)).cloned();
        found.ok_or(Wrong::Op(abi::HANDLE_NOT_REGISTERED))
    }

    /// Registers a file and gives its number.
    pub fn register(&self, of: &mut Descriptor) -> Done<u64> {
        let handle = match (of.kind, of.kind == abi::OPAQUE_FD) {
            (_, true) => match found::look(of.fd())? {
                Kind::Ours(f) => Handle::Ours(Box::new(self.open_ours(of.fd(), f)?)),
                Kind::Other(regular) => self.register_real(of, regular)?,
            },
            // A file system in the program, or of another system: nothing of ours.
            (2 | 3, _) => self.register_real(of, true)?,
            _ => return Err(Wrong::Op(abi::INVALID_VALUE)),
        };
        let id = self.new_id();
        self.handles.write().insert(id, Arc::new(handle));
        Ok(id)
    }

    fn open_ours(&self, fd: c_int, found: Found) -> Done<OurFile> {
        // A number that was closed and means another file by now is another registration.
        let again =
            |h: &Arc<Handle>| matches!(&**h, Handle::Ours(o) if o.fd == fd && o.found == found);
        if self.handles.read().values().any(again) {
            return Err(Wrong::Op(abi::HANDLE_ALREADY_REGISTERED));
        }
        let policy = policy::of(&found)?;
        let servers = match set::text("STRAKE_GDS_MDS") {
            None => found::servers(fd, &found)?,
            named => named,
        };
        let Some(servers) = servers else {
            say(|| {
                format!(
                    "descriptor {fd}: its mount names no metadata server, and STRAKE_GDS_MDS is not set"
                )
            });
            return Err(Wrong::Op(abi::IO_NOT_SUPPORTED));
        };
        let (home, _) = self.cuda_of_thread()?;
        let ours =
            OurFile { found, fd, servers, policy, home, files: Mutex::new(Some(BTreeMap::new())) };
        // Now and not at the first read: whoever may not open it is told here.
        self.place(&ours, home)?;
        Ok(ours)
    }

    fn register_real(&self, of: &mut Descriptor, regular: bool) -> Done<Handle> {
        let real = match self.real() {
            Err(Wrong::Op(abi::IO_NOT_SUPPORTED)) if !regular => {
                return Err(Wrong::Op(abi::INVALID_FILE_TYPE));
            }
            real => real?,
        };
        let mut to = std::ptr::null_mut();
        // SAFETY: writes one pointer; the descriptor is the program's own.
        real.control(real.handle_register, |f| unsafe { f(&mut to, of) })?;
        self.stats.passed_on("handles");
        Ok(Handle::Real(Foreign {
            word: to as usize,
            fd: (of.kind == abi::OPAQUE_FD).then(|| of.fd()),
        }))
    }

    /// The real library with its driver open.
    pub fn real(&self) -> Done<&'static Real> {
        let real = Real::get()?;
        if self.real.load(SeqCst) {
            return Ok(real);
        }
        let _one = self.opening.lock();
        if !self.real.load(SeqCst) {
            self.params.lock().pass_on(real);
            // SAFETY: takes nothing.
            let opened = real.control(real.driver_open, |f| unsafe { f() });
            opened.inspect_err(|w| say(|| format!("the driver of {}: {w:?}", real.place())))?;
            let buffers = self.buffers.lock();
            self.real.store(true, SeqCst);
            // Those that were registered before it was needed; without them its bytes take another
            // buffer, that is all.
            for (addr, len) in buffers.iter() {
                // SAFETY: the program's memory, which it said is there.
                let _ = real
                    .control(real.buf_register, |f| unsafe { f(*addr as *const c_void, *len, 0) });
            }
        }
        Ok(real)
    }

    /// The same, if it was needed before. Waits for nobody who opens it now: what is not of its
    /// files has nothing to do with that.
    pub fn real_if_open(&self) -> Option<&'static Real> {
        Real::known().filter(|_| self.real.load(SeqCst))
    }

    pub fn deregister(&self, id: *mut c_void) -> Done<()> {
        let found = self.handles.write().remove(&(id as u64));
        let handle = found.ok_or(Wrong::Op(abi::HANDLE_NOT_REGISTERED))?;
        self.close_file(&handle, true);
        Ok(())
    }

    fn close_file(&self, handle: &Handle, real: bool) {
        match handle {
            Handle::Ours(o) => {
                let files = o.files.lock().take().unwrap_or_default();
                for (session, file) in files.into_values() {
                    if let Err(e) = session.close(File::clone(&file)) {
                        say(|| format!("closing inode {:#x}: {e}", o.found.ino));
                    }
                }
            }
            Handle::Real(h) => {
                if let Some(real) = Real::known().filter(|_| real) {
                    // SAFETY: a handle of its own, which nobody can name any more.
                    let _ = real.call(real.handle_deregister, |f| unsafe { f(h.word()) });
                }
            }
        }
    }

    /// The file in the connection of a device, opened when that is first needed.
    pub fn place(&self, of: &OurFile, device: u32) -> Done<Place> {
        let mut files = of.files.lock();
        let files = files.as_mut().ok_or(Wrong::Op(abi::HANDLE_NOT_REGISTERED))?;
        if let Some((session, file)) = files.get(&device) {
            return Ok((session.clone(), file.clone()));
        }
        let session = self.session(of, device)?;
        let file = session.open_inode(of.found.ino, of.found.flags).map_err(|e| {
            say(|| format!("opening inode {:#x}: {e}", of.found.ino));
            Wrong::of_open(&e)
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
        setup.roads = match set::text("STRAKE_GDS_FABRIC").as_deref() {
            None | Some("auto") => Use::Best,
            Some("tcp") => Use::Tcp,
            Some("rdma") => Use::Rdma,
            Some(other) => {
                say(|| format!("STRAKE_GDS_FABRIC is '{other}'; auto, tcp and rdma are known"));
                return Err(Wrong::Op(abi::INVALID_VALUE));
            }
        };
        setup.options.verify_on_gpu =
            set::text("STRAKE_GDS_VERIFY_ON_GPU").is_some_and(|v| v != "0");
        let failed = |e: strake_proto::Error| {
            say(|| format!("connecting to {}: {e}", of.servers));
            Wrong::of_open(&e)
        };
        let session = Session::open(&setup).map_err(failed)?;
        let uuid = session.fs_uuid().map_err(failed)?;
        if uuid != of.found.uuid {
            say(|| format!("the file system at {} is not the one that is mounted", of.servers));
            return Err(Wrong::Op(abi::IO_NOT_SUPPORTED));
        }
        if let Some(notice) = session.notice() {
            say(|| notice.to_string());
        }
        let session = Arc::new(session);
        all.insert(id, session.clone());
        Ok(session)
    }
}
