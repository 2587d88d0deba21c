//! What this process has open: the driver, connections, files, memory.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
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
    real::Real,
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
    /// The real library's word for it.
    Real(usize),
}

/// A file of one of our mounts, opened by this library.
pub struct OurFile {
    pub found: Found,
    fd: c_int,
    servers: String,
    pub policy: Policy,
    /// The device whose bridge moves host memory.
    pub home: u32,
    files: Mutex<BTreeMap<u32, Place>>,
}

/// A file in the connection that serves one device.
pub type Place = (Arc<Session>, Arc<File>);

/// A file system, by its UUID, and a device.
type Connected = ([u8; 16], u32);

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
    /// Threads and connections do not follow a fork(2).
    pid: u32,
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
    /// The real library's driver was opened.
    real: Mutex<bool>,
    pub stats: Stats,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

extern "C" fn at_exit() {
    let Some(d) = DRIVER.get().filter(|d| d.pid == std::process::id()) else { return };
    d.write_stats();
    // On a thread of its own: this one's is past the end of what threads keep.
    let (done, ended) = mpsc::channel();
    let close = std::thread::Builder::new().spawn(move || {
        let _ = caught(|| {
            d.let_go();
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

/// Counts a call that moves bytes.
pub struct Active<'a>(&'a AtomicUsize);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Driver {
    /// This process's. In a child after a fork there is none.
    pub fn get() -> Done<&'static Driver> {
        let new = || {
            // SAFETY: the function is there until the process ends.
            unsafe { libc::atexit(at_exit) };
            Driver {
                pid: std::process::id(),
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
                real: Mutex::new(false),
                stats: Stats::default(),
            }
        };
        let d = DRIVER.get_or_init(new);
        if d.pid != std::process::id() {
            return Err(Wrong::Op(abi::DRIVER_NOT_INITIALIZED));
        }
        Ok(d)
    }

    /// The same, if it is open.
    pub fn open_one() -> Done<&'static Driver> {
        let d = Driver::get()?;
        if d.uses() == 0 { Err(Wrong::Op(abi::DRIVER_NOT_INITIALIZED)) } else { Ok(d) }
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
        self.let_go();
        self.write_stats();
        Ok(())
    }

    fn let_go(&self) {
        let batches = std::mem::take(&mut *self.batches.write());
        batches.into_values().for_each(|b| b.destroy());
        let handles = std::mem::take(&mut *self.handles.write());
        handles.into_values().for_each(|h| self.close_file(&h));
        self.buffers.lock().clear();
        self.streams.lock().clear();
        let sessions = std::mem::take(&mut *self.sessions.lock());
        drop(sessions);
        self.cuda.lock().clear();
        if std::mem::take(&mut *self.real.lock())
            && let Some(real) = Real::known()
        {
            // SAFETY: takes nothing.
            let _ = real.control(real.driver_close, |f| unsafe { f() });
        }
    }

    /// Where `STRAKE_GDS_STATS` says.
    fn write_stats(&self) {
        let Some(to) = std::env::var_os("STRAKE_GDS_STATS").filter(|to| !to.is_empty()) else { return };
        if let Err(e) = std::fs::write(&to, format!("{}\n", self.stats.json())) {
            say(|| format!("{}: {e}", to.display()));
        }
    }

    /// The call counts as under way while the value lives.
    pub fn active(&self) -> Active<'_> {
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
        let again = |h: &Arc<Handle>| matches!(&**h, Handle::Ours(o) if o.fd == fd && o.found.id == found.id);
        if self.handles.read().values().any(again) {
            return Err(Wrong::Op(abi::HANDLE_ALREADY_REGISTERED));
        }
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let policy = set("STRAKE_GDS_POLICY").map_or(Ok(Policy::Prefer), |p| p.parse());
        let policy = policy.map_err(|e| {
            say(|| format!("STRAKE_GDS_POLICY: {e}"));
            Wrong::Op(abi::INVALID_VALUE)
        })?;
        let Some(servers) = set("STRAKE_GDS_MDS").or_else(|| found::servers(fd, &found)) else {
            say(|| format!("descriptor {fd}: its mount names no metadata server, and STRAKE_GDS_MDS is not set"));
            return Err(Wrong::Op(abi::IO_NOT_SUPPORTED));
        };
        let (home, _) = self.cuda_of_thread()?;
        let ours = OurFile { found, fd, servers, policy, home, files: Mutex::default() };
        // Now and not at the first read: whoever may not open it is told here.
        self.place(&ours, home)?;
        Ok(ours)
    }

    fn register_real(&self, of: &mut Descriptor, regular: bool) -> Done<Handle> {
        let real = match self.real() {
            Err(Wrong::Op(abi::IO_NOT_SUPPORTED)) if !regular => return Err(Wrong::Op(abi::INVALID_FILE_TYPE)),
            real => real?,
        };
        let mut to = std::ptr::null_mut();
        // SAFETY: writes one pointer; the descriptor is the program's own.
        real.control(real.handle_register, |f| unsafe { f(&mut to, of) })?;
        self.stats.passed_on("handles");
        Ok(Handle::Real(to as usize))
    }

    /// The real library with its driver open.
    pub fn real(&self) -> Done<&'static Real> {
        let mut open = self.real.lock();
        let real = Real::get()?;
        if !*open {
            self.params.lock().pass_on(real);
            // SAFETY: takes nothing.
            let opened = real.control(real.driver_open, |f| unsafe { f() });
            opened.inspect_err(|w| say(|| format!("the driver of {}: {w:?}", real.place())))?;
            *open = true;
            // Those that were registered before it was needed; without them its bytes take another buffer, that is all.
            for (addr, len) in self.buffers.lock().iter() {
                // SAFETY: the program's memory, which it said is there.
                let _ = real.control(real.buf_register, |f| unsafe { f(*addr as *const c_void, *len, 0) });
            }
        }
        Ok(real)
    }

    /// The same, if it was needed before.
    pub fn real_if_open(&self) -> Option<&'static Real> {
        Real::known().filter(|_| *self.real.lock())
    }

    pub fn deregister(&self, id: *mut c_void) -> Done<()> {
        let found = self.handles.write().remove(&(id as u64));
        let handle = found.ok_or(Wrong::Op(abi::HANDLE_NOT_REGISTERED))?;
        self.close_file(&handle);
        Ok(())
    }

    fn close_file(&self, handle: &Handle) {
        match handle {
            Handle::Ours(o) => {
                for (session, file) in std::mem::take(&mut *o.files.lock()).into_values() {
                    if let Err(e) = session.close(File::clone(&file)) {
                        say(|| format!("closing inode {:#x}: {e}", o.found.ino));
                    }
                }
            }
            Handle::Real(h) => {
                if let Some(real) = Real::known() {
                    // SAFETY: a handle of its own, which nobody can name any more.
                    let _ = real.call(real.handle_deregister, |f| unsafe { f(*h as *mut c_void) });
                }
            }
        }
    }

    /// The file in the connection of a device, opened when that is first needed.
    pub fn place(&self, of: &OurFile, device: u32) -> Done<Place> {
        let mut files = of.files.lock();
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
        let id = (of.found.uuid, device);
        if let Some(s) = all.get(&id) {
            return Ok(s.clone());
        }
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let mut setup = Setup::new(&of.servers, Memory::Cuda(device));
        setup.key = set("STRAKE_GDS_KEY").unwrap_or_else(|| KEY.into()).into();
        setup.roads = match set("STRAKE_GDS_FABRIC").as_deref() {
            None | Some("auto") => Use::Best,
            Some("tcp") => Use::Tcp,
            Some("rdma") => Use::Rdma,
            Some(other) => {
                say(|| format!("STRAKE_GDS_FABRIC is '{other}'; auto, tcp and rdma are known"));
                return Err(Wrong::Op(abi::INVALID_VALUE));
            }
        };
        setup.options.verify_on_gpu = set("STRAKE_GDS_VERIFY_ON_GPU").is_some_and(|v| v != "0");
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
