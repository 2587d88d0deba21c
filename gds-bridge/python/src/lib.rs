//! The bridge in Python: tensors of PyTorch, CuPy, JAX, NumPy and others, by the protocols that
//! they share. This is a thin layer over `strake_gds::session`.

mod dlpack;
mod dtype;
mod tensor;

use std::{collections::BTreeMap, sync::Arc};

use pyo3::{
    exceptions::{PyOSError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict, PyList, PyString},
};
use strake_client::File;
use strake_fabric::Use;
use strake_gds::{
    Direction, Failed, Policy, Report, Transfer,
    session::{Content, KEY, Memory, Session, Setup, Started, Stripes, TensorFile},
    tensors::New,
};
use strake_proto::Error;
use tensor::{Block, Device, Given, Tensor};

/// The exception for an error: an OSError with its errno, from which Python makes FileNotFoundError
/// and so on.
pub(crate) fn failed(e: Error) -> PyErr {
    PyOSError::new_err((e.code.errno(), e.message))
}

fn from_json<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}

fn to_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyAny>> {
    from_json(py, &serde_json::to_string(report).map_err(|e| PyValueError::new_err(e.to_string()))?)
}

/// The report, or an exception that has it as `report`.
fn told<'py>(py: Python<'py>, outcome: Result<Report, Failed>) -> PyResult<Bound<'py, PyAny>> {
    match outcome {
        Ok(report) => to_dict(py, &report),
        Err(f) => {
            let e = failed(f.error);
            e.value(py).setattr("report", to_dict(py, &f.report)?)?;
            Err(e)
        }
    }
}

fn policy(text: &str) -> PyResult<Policy> {
    text.parse().map_err(failed)
}

/// A client of a cluster, and a device: see docs/gds.md.
///
/// `pinned_limit`: limit, in bytes, of the host memory that all bridges of the process have pinned;
/// this bridge pins no more beyond it. Default: half of RLIMIT_MEMLOCK, or 512 MiB for this bridge
/// where that is unlimited. `local`: folder with copies of sealed files on this node, for the tier
/// local-gds. `policy`: a policy that every call must meet in addition to its own.
///
/// `mds`: metadata servers, "HOST[:PORT],...". `memory`: "cuda:N", or "host" for host memory in
/// place of a device. `fabric`: "auto", "tcp" or "rdma". `verify_on_gpu`: the device computes
/// checksums of its side of every copy, and they are compared; reports say where that was not
/// possible (`not_on_gpu`). `local`: folder with copies of sealed files on this node (`strake gds
/// stage`). All calls except `start_load` block, and let other threads of Python run meanwhile. Do
/// not use a bridge in a child after fork: make a new one there.
#[pyclass(frozen, module = "strake_gds")]
struct Bridge {
    device: std::sync::Mutex<Option<Arc<Device>>>,
}

impl Bridge {
    fn device(&self) -> PyResult<Arc<Device>> {
        let device = self.device.lock().unwrap_or_else(|e| e.into_inner()).clone();
        device.ok_or_else(|| PyValueError::new_err("the bridge is closed"))
    }
}

/// The files of a call: each path is opened once, and all are closed at the end.
struct Files {
    session: Arc<Session>,
    open: BTreeMap<String, Arc<File>>,
}

impl Files {
    fn of(device: &Device) -> Files {
        Files { session: device.session.clone(), open: BTreeMap::new() }
    }

    fn get(&mut self, path: &str) -> Result<Arc<File>, Error> {
        if let Some(f) = self.open.get(path) {
            return Ok(f.clone());
        }
        let f = Arc::new(self.session.open_file(path, 0, 0)?);
        self.open.insert(path.into(), f.clone());
        Ok(f)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for f in std::mem::take(&mut self.open).into_values() {
            // The file was only read, so an error of the close loses nothing.
            let _ = self.session.close(File::clone(&f));
        }
    }
}

/// Path, offset, tensor.
type Item<'py> = (String, u64, Bound<'py, PyAny>);
type GivenItem = (String, u64, Given);

fn given(device: &Arc<Device>, items: Vec<Item<'_>>) -> PyResult<Vec<GivenItem>> {
    items
        .into_iter()
        .map(|(path, offset, x)| Ok((path, offset, Given::of(device, &x, true)?)))
        .collect()
}

impl Files {
    fn transfers(&mut self, items: &[GivenItem]) -> Result<Vec<Transfer>, Error> {
        let transfer = |(path, offset, g): &GivenItem| {
            Ok(Transfer { file: self.get(path)?, offset: *offset, gpu: g.address, len: g.len })
        };
        items.iter().map(transfer).collect()
    }
}

/// Waits for a stream of the program, or for all streams.
fn settle(device: &Device, stream: Option<u64>) -> Result<(), Error> {
    let device = device.session.device();
    match stream {
        // SAFETY: the caller vouches for the stream.
        Some(stream) => unsafe { device.before(stream) }.and_then(|before| before.wait())?,
        None => device.settle()?,
    }
    Ok(())
}

/// A started call. Dropping the last reference to it waits for its end.
#[pyclass(frozen, module = "strake_gds")]
struct Call {
    going: std::sync::Mutex<Option<Going>>,
}

/// The fields are dropped in this order.
struct Going {
    started: Started,
    _files: Files,
    _items: Vec<GivenItem>,
}

#[pymethods]
impl Call {
    /// Whether `finish` would return at once.
    #[getter]
    fn done(&self) -> bool {
        let going = self.going.lock().unwrap_or_else(|e| e.into_inner());
        going.as_ref().is_none_or(|g| g.started.is_done())
    }

    /// Waits for the end, and returns the report or raises what a blocking call would have raised.
    /// Can be called once.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let going = self.going.lock().unwrap_or_else(|e| e.into_inner()).take();
        let Going { started, _files, _items } =
            going.ok_or_else(|| PyValueError::new_err("the call is finished"))?;
        let outcome = py.detach(|| {
            let outcome = started.finish();
            drop(_files);
            outcome
        });
        told(py, outcome)
    }
}

fn close_all(session: &Session, files: Vec<TensorFile>) {
    for f in files {
        let _ = session.close(File::clone(&f.file));
    }
}

fn open_all(session: &Session, paths: &[String]) -> PyResult<Vec<TensorFile>> {
    let mut files = Vec::new();
    for p in paths {
        match session.open_tensors(p) {
            Ok(f) => files.push(f),
            Err(e) => {
                close_all(session, files);
                return Err(failed(e));
            }
        }
    }
    Ok(files)
}

fn paths_of(x: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if x.is_instance_of::<PyString>() { Ok(vec![x.extract()?]) } else { x.extract() }
}

#[pymethods]
impl Bridge {
    #[new]
    #[pyo3(signature = (mds, *, key = None, memory = "cuda:0", fabric = "auto", pinned_limit = None, workers = None, slots = None, slot_bytes = None,
        accept_oss_checksum = false, verify_on_gpu = false, local = None, policy = "prefer"))]
    #[allow(clippy::too_many_arguments, reason = "they are named in Python")]
    fn new(
        py: Python<'_>,
        mds: &str,
        key: Option<&str>,
        memory: &str,
        fabric: &str,
        pinned_limit: Option<u64>,
        workers: Option<usize>,
        slots: Option<usize>,
        slot_bytes: Option<usize>,
        accept_oss_checksum: bool,
        verify_on_gpu: bool,
        local: Option<std::path::PathBuf>,
        policy: &str,
    ) -> PyResult<Bridge> {
        let memory = memory.parse().map_err(failed)?;
        let mut setup = Setup::new(mds, memory);
        setup.key = key.unwrap_or(KEY).into();
        setup.transports = match fabric {
            "auto" => Use::Best,
            "tcp" => Use::Tcp,
            "rdma" => Use::Rdma,
            other => {
                return Err(PyValueError::new_err(format!(
                    "fabric is '{other}'; expected auto, tcp or rdma"
                )));
            }
        };
        let o = &mut setup.options;
        o.pinned_limit = pinned_limit;
        o.workers = workers.unwrap_or(o.workers);
        o.slots = slots.unwrap_or(o.slots);
        o.slot_bytes = slot_bytes.unwrap_or(o.slot_bytes);
        o.accept_oss_checksum = accept_oss_checksum;
        o.verify_on_gpu = verify_on_gpu;
        o.local = local;
        o.policy = crate::policy(policy)?;
        let session = py.detach(|| Session::open(&setup)).map_err(failed)?;
        Ok(Bridge {
            device: std::sync::Mutex::new(Some(Arc::new(Device {
                session: Arc::new(session),
                memory,
            }))),
        })
    }

    /// Closes the bridge. The session ends when the last tensor of the bridge is gone, too. A
    /// second call does nothing.
    fn close(&self, py: Python<'_>) {
        let device = self.device.lock().unwrap_or_else(|e| e.into_inner()).take();
        py.detach(|| drop(device));
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _error: Py<PyAny>, _trace: Py<PyAny>) {
        self.close(py);
    }

    /// The device, a notice if resources are smaller than requested, and the tiers: which are
    /// available, and why the others are not.
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let d = self.device()?;
        let tiers = d.session.tiers().map_err(failed)?;
        let all = serde_json::json!({ "device": d.session.device().name(), "notice": d.session.notice(), "tiers": tiers });
        from_json(py, &all.to_string())
    }

    /// Where the memory is: "cuda:N" or "host".
    #[getter]
    fn memory(&self) -> PyResult<String> {
        Ok(match self.device()?.memory {
            Memory::Host => "host".into(),
            Memory::Cuda(n) => format!("cuda:{n}"),
        })
    }

    /// A new tensor on the device, with undefined contents.
    #[pyo3(signature = (shape, dtype = "U8"))]
    fn alloc(&self, shape: Vec<usize>, dtype: &str) -> PyResult<Tensor> {
        let kind = dtype::by_name(dtype)
            .ok_or_else(|| PyValueError::new_err(format!("'{dtype}' is not a type")))?;
        let bits =
            shape.iter().try_fold(kind.bitsize(), |n, d| n.checked_mul(*d)).filter(|n| n % 8 == 0);
        let len = bits
            .ok_or_else(|| PyValueError::new_err("the size is not a whole number of bytes"))?
            as u64
            / 8;
        Ok(Tensor::new(&Block::new(&self.device()?, len)?, 0, len, kind, shape))
    }

    /// Fills tensors from files, all in one call: `items` are (path, offset, tensor). Returns the
    /// report.
    ///
    /// Here and in all other calls a tuple (address, bytes) can replace a tensor: memory of the
    /// bridge's kind that the caller vouches for. An address on a GPU is checked, one with
    /// `memory="host"` is not.
    ///
    /// `stream`, here and in other calls: the stream with work that may still use the tensors
    /// (`torch.cuda.current_stream().cuda_stream`; 0 is the default stream). The call waits for it.
    /// Without `stream` it waits for all streams of the device.
    #[pyo3(signature = (items, policy = "prefer", stream = None))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        items: Vec<Item<'py>>,
        policy: &str,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (device, policy) = (self.device()?, crate::policy(policy)?);
        let items = given(&device, items)?;
        let outcome = py.detach(|| {
            let mut files = Files::of(&device);
            let all = files.transfers(&items)?;
            settle(&device, stream)?;
            Ok(device.session.load(&all, policy))
        });
        told(py, outcome.map_err(failed)?)
    }

    /// As `load`, but returns at once. The load begins when the earlier work of `stream` is done,
    /// and overlaps with later work. Later work may use the tensors only after `finish()` of the
    /// returned call has returned.
    #[pyo3(signature = (items, policy = "prefer", stream = 0))]
    fn start_load(
        &self,
        py: Python<'_>,
        items: Vec<Item<'_>>,
        policy: &str,
        stream: u64,
    ) -> PyResult<Call> {
        let (device, policy) = (self.device()?, crate::policy(policy)?);
        let items = given(&device, items)?;
        let started = py.detach(|| {
            let mut files = Files::of(&device);
            let all = files.transfers(&items)?;
            // SAFETY: the caller vouches for the stream.
            let started = unsafe { device.session.start(Direction::Load, all, policy, stream) }?;
            Ok((started, files))
        });
        let (started, files) = started.map_err(failed)?;
        Ok(Call {
            going: std::sync::Mutex::new(Some(Going { started, _files: files, _items: items })),
        })
    }

    /// Fills one tensor from a file, from `offset` on.
    #[pyo3(signature = (tensor, path, offset = 0, policy = "prefer", stream = None))]
    fn load_into<'py>(
        &self,
        py: Python<'py>,
        tensor: Bound<'py, PyAny>,
        path: String,
        offset: u64,
        policy: &str,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.load(py, vec![(path, offset, tensor)], policy, stream)
    }

    /// Saves a tensor, or a list of tensors one behind the other, as a file. The file is written
    /// under another name, made stable (fsync) and then renamed to `path`, replacing an existing
    /// file. Returns the report.
    #[pyo3(signature = (tensors, path, policy = "prefer", mode = 0o644, stream = None))]
    fn save_from<'py>(
        &self,
        py: Python<'py>,
        tensors: Bound<'py, PyAny>,
        path: String,
        policy: &str,
        mode: u32,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (device, policy) = (self.device()?, crate::policy(policy)?);
        let all: Vec<Bound<'py, PyAny>> = match tensors.cast::<PyList>() {
            Ok(list) => list.iter().collect(),
            Err(_) => vec![tensors],
        };
        let all = all.iter().map(|x| Given::of(&device, x, false)).collect::<PyResult<Vec<_>>>()?;
        let outcome = py.detach(|| {
            settle(&device, stream)?;
            let ranges: Vec<(u64, u64)> = all.iter().map(|g| (g.address, g.len)).collect();
            Ok(device.session.replace(&path, mode, Content { head: &[], device: &ranges }, policy))
        });
        told(py, outcome.map_err(failed)?)
    }

    /// A file's size in bytes, and `length` of its bytes from `offset` on (fewer only at its end)
    /// in ordinary memory. For headers and other small reads; it uses no tier and makes no report.
    #[pyo3(signature = (path, offset = 0, length = 0))]
    fn peek<'py>(
        &self,
        py: Python<'py>,
        path: String,
        offset: u64,
        length: usize,
    ) -> PyResult<(u64, Bound<'py, PyBytes>)> {
        let device = self.device()?;
        let session = &device.session;
        let seen = py.detach(|| {
            let f = session.open_file(&path, 0, 0)?;
            // Never more than the file has, even if a damaged header gave a large `length`.
            let read = session.size(&f).and_then(|size| {
                let len = size.saturating_sub(offset).min(length as u64) as usize;
                Ok((size, session.read(&f, offset, len)?))
            });
            // The file was only read, so an error of the close loses nothing.
            let _ = session.close(f);
            read
        });
        let (size, bytes) = seen.map_err(failed)?;
        Ok((size, PyBytes::new(py, &bytes)))
    }

    /// The header of a safetensors file: name, type and shape of each tensor, and its metadata.
    fn header<'py>(&self, py: Python<'py>, path: String) -> PyResult<Bound<'py, PyAny>> {
        let device = self.device()?;
        let f = py.detach(|| device.session.open_tensors(&path)).map_err(failed)?;
        let tensors = f.header.tensors.iter().map(|t| {
            let about = serde_json::json!({ "dtype": dtype::name(t.dtype), "shape": t.shape, "bytes": t.len });
            (t.name.clone(), about)
        });
        let tensors: serde_json::Map<_, _> = tensors.collect();
        let all = serde_json::json!({ "tensors": tensors, "metadata": f.header.notes });
        py.detach(|| close_all(&device.session, vec![f]));
        from_json(py, &all.to_string())
    }

    /// Loads safetensors files (a path or a list), all in one call, each into one new piece of the
    /// device's memory. Returns a dict of the tensors by their names, and the report. `ValueError`
    /// if two files have a tensor of the same name.
    #[pyo3(signature = (paths, policy = "prefer"))]
    fn load_safetensors<'py>(
        &self,
        py: Python<'py>,
        paths: Bound<'py, PyAny>,
        policy: &str,
    ) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyAny>)> {
        let (device, policy, paths) = (self.device()?, crate::policy(policy)?, paths_of(&paths)?);
        let session = &device.session;
        let (tensors, outcome) = py.detach(|| {
            let files = open_all(session, &paths)?;
            let loaded = (|| {
                let mut tensors = BTreeMap::new();
                let mut all = Vec::new();
                for f in &files {
                    let (places, bytes) = f.header.layout();
                    let block = Block::new(&device, bytes)?;
                    all.extend(f.to_block(block.address));
                    for (t, at) in f.header.tensors.iter().zip(places) {
                        let made = Tensor::new(&block, at, t.len, t.dtype, t.shape.clone());
                        if tensors.insert(t.name.clone(), made).is_some() {
                            return Err(PyValueError::new_err(format!(
                                "two files have a tensor '{}'",
                                t.name
                            )));
                        }
                    }
                }
                Ok((tensors, session.load(&all, policy)))
            })();
            close_all(session, files);
            loaded
        })?;
        let report = told(py, outcome)?;
        let named = PyDict::new(py);
        for (name, t) in tensors {
            named.set_item(name, Py::new(py, t)?)?;
        }
        Ok((named, report))
    }

    /// Loads safetensors files into tensors that exist, by their names, all in one call. A tensor
    /// of the files that is not named is not loaded; a name that no file has is a `KeyError`.
    /// Returns the report.
    #[pyo3(signature = (tensors, paths, policy = "prefer"))]
    fn load_safetensors_into<'py>(
        &self,
        py: Python<'py>,
        tensors: Bound<'py, PyDict>,
        paths: Bound<'py, PyAny>,
        policy: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (device, policy, paths) = (self.device()?, crate::policy(policy)?, paths_of(&paths)?);
        let mut to = BTreeMap::new();
        for (name, x) in tensors.iter() {
            to.insert(name.extract::<String>()?, Given::of(&device, &x, true)?);
        }
        let session = &device.session;
        let outcome = py.detach(|| {
            let files = open_all(session, &paths)?;
            let loaded = (|| {
                let mut all = Vec::new();
                let mut missing: std::collections::BTreeSet<&str> =
                    to.keys().map(String::as_str).collect();
                for f in &files {
                    all.extend(
                        f.to_places(|n| to.get(n).map(|g| (g.address, g.len))).map_err(failed)?,
                    );
                    for t in &f.header.tensors {
                        missing.remove(&t.name[..]);
                    }
                }
                if let Some(name) = missing.first() {
                    return Err(pyo3::exceptions::PyKeyError::new_err(format!(
                        "no file has a tensor '{name}'"
                    )));
                }
                session.device().settle().map_err(|f| failed(f.into()))?;
                Ok(session.load(&all, policy))
            })();
            close_all(session, files);
            loaded
        })?;
        told(py, outcome)
    }

    /// Sets the stripes of files that are made in a folder from now on: the number of targets per
    /// file (-1: all), and the stripe size in bytes (a multiple of 65,536; 0: the cluster's
    /// default). A file on one target is loaded no faster than that target's server can send.
    #[pyo3(signature = (path, stripe_count = -1, stripe_size = 0))]
    fn stripe_folder(
        &self,
        py: Python<'_>,
        path: String,
        stripe_count: i32,
        stripe_size: u32,
    ) -> PyResult<()> {
        let device = self.device()?;
        let stripes = Stripes { count: stripe_count, size: stripe_size };
        py.detach(|| device.session.stripe_folder(&path, stripes)).map_err(failed)
    }

    /// Saves a dict of tensors as a safetensors file, as `save_from` does. Returns the report.
    #[pyo3(signature = (tensors, path, metadata = None, policy = "prefer", mode = 0o644))]
    fn save_safetensors<'py>(
        &self,
        py: Python<'py>,
        tensors: Bound<'py, PyDict>,
        path: String,
        metadata: Option<BTreeMap<String, String>>,
        policy: &str,
        mode: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (device, policy) = (self.device()?, crate::policy(policy)?);
        let (mut held, mut all) = (Vec::new(), Vec::new());
        for (name, x) in tensors.iter() {
            let (name, own) = (name.extract::<String>()?, x.cast::<Tensor>().ok());
            let g = Given::of(&device, &x, false)?;
            // A tensor of the bridge knows its type better than the protocols do.
            let kind = own.map(|t| t.get().kind).or(g.kind);
            let kind = kind.ok_or_else(|| {
                PyTypeError::new_err(format!("tensor '{name}': safetensors has no such type"))
            })?;
            all.push(New { name, dtype: kind, shape: g.shape.clone(), gpu: g.address });
            held.push(g);
        }
        let outcome = py.detach(|| {
            device.session.device().settle()?;
            Ok(device.session.save_tensors(
                &path,
                mode,
                &all,
                &metadata.unwrap_or_default(),
                policy,
            ))
        });
        drop(held);
        told(py, outcome.map_err(failed)?)
    }

    fn __repr__(&self) -> String {
        match self.device() {
            Ok(d) => format!("<strake_gds.Bridge to {}>", d.session.device().name()),
            Err(_) => "<strake_gds.Bridge, closed>".into(),
        }
    }
}

#[pymodule]
#[pyo3(name = "_native")]
fn native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Bridge>()?;
    m.add_class::<Call>()?;
    m.add_class::<Tensor>()
}
