//! Device memory as Python tensors, and memory of other libraries that is passed to a call.

use std::{ptr, sync::Arc};

use pyo3::{
    exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use strake_gds::{
    session::{Memory, Session},
    tensors::Dtype,
};

use crate::{dlpack, dtype, failed};

/// A session, and the kind of memory it works with.
pub struct Device {
    pub session: Arc<Session>,
    pub memory: Memory,
}

/// A piece of the device's memory, freed with the last tensor in it.
pub struct Block {
    device: Arc<Device>,
    pub address: u64,
    bytes: u64,
    /// With `memory="host"`: the memory itself, which is lent to [`strake_gds::HostMem`].
    host: Option<Vec<u64>>,
}

impl Block {
    pub fn new(device: &Arc<Device>, bytes: u64) -> PyResult<Arc<Block>> {
        // An empty block gets its own address, too.
        let len = bytes.max(1);
        let (address, host) = match device.session.host() {
            None => (device.session.device().alloc(len).map_err(|f| failed(f.into()))?, None),
            Some(memory) => {
                let mut words = vec![0u64; len.div_ceil(8) as usize];
                let start = words.as_mut_ptr().cast::<u8>();
                // SAFETY: the vector is neither moved nor dropped before `drop` takes it back.
                // Programs must not use a tensor during a call that moves its bytes, as with every
                // such library.
                unsafe { memory.lend(start, words.len() * 8) };
                (start.expose_provenance() as u64, Some(words))
            }
        };
        Ok(Arc::new(Block { device: device.clone(), address, bytes: len, host }))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match (&mut self.host, self.device.session.host()) {
            (Some(words), Some(memory)) => {
                memory.take_back(words.as_mut_ptr().cast(), words.len() * 8)
            }
            // The result is ignored: a context that is gone has freed the memory already.
            _ => drop(self.device.session.device().free(self.address)),
        }
    }
}

/// A tensor in memory of the bridge's device. Other libraries use it without a copy by `__dlpack__`
/// (torch.from_dlpack, numpy.from_dlpack) and, on a GPU, `__cuda_array_interface__`.
#[pyclass(frozen, module = "strake_gds")]
pub struct Tensor {
    block: Arc<Block>,
    address: u64,
    len: u64,
    pub kind: Dtype,
    shape: Vec<usize>,
}

impl Tensor {
    pub fn new(block: &Arc<Block>, at: u64, len: u64, kind: Dtype, shape: Vec<usize>) -> Tensor {
        debug_assert!(at + len <= block.bytes);
        Tensor { block: block.clone(), address: block.address + at, len, kind, shape }
    }

    fn dlpack_device(&self) -> (i32, i32) {
        match self.block.device.memory {
            Memory::Host => (dlpack::CPU, 0),
            Memory::Cuda(n) => (dlpack::CUDA, n as i32),
        }
    }
}

#[pymethods]
impl Tensor {
    /// Element type, as safetensors names it.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::name(self.kind)
    }

    /// Number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len
    }

    /// Its address on the device.
    #[getter]
    fn ptr(&self) -> u64 {
        self.address
    }

    /// A copy of the bytes. Slow; for tests and small tensors.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = vec![0; self.len as usize];
        let got = py.detach(|| self.block.device.session.get(self.address, &mut bytes));
        got.map_err(|f| failed(f.into()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Overwrites the tensor with `bytes`, which must have its size. Slow, as `tobytes`.
    fn frombytes(&self, py: Python<'_>, bytes: Vec<u8>) -> PyResult<()> {
        if bytes.len() as u64 != self.len {
            return Err(PyValueError::new_err(format!(
                "{} bytes for a tensor of {}",
                bytes.len(),
                self.len
            )));
        }
        let put = py.detach(|| self.block.device.session.put(self.address, &bytes));
        put.map_err(|f| failed(f.into()))
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.block.device.memory == Memory::Host {
            return Err(PyAttributeError::new_err("this memory is not on a GPU"));
        }
        let kind = dtype::typestr(self.kind).ok_or_else(|| {
            PyAttributeError::new_err(format!("the array interface has no {}", self.dtype()))
        })?;
        let d = PyDict::new(py);
        d.set_item("version", 3)?;
        d.set_item("shape", self.shape(py)?)?;
        d.set_item("typestr", kind)?;
        d.set_item("data", (self.address, false))?;
        d.set_item("strides", py.None())?;
        // No work on the tensor is pending, so there is no stream to wait for.
        d.set_item("stream", py.None())?;
        Ok(d)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.dlpack_device()
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // The consumer's stream does not matter: the bytes are complete.
        drop(stream);
        if copy == Some(true) || dl_device.is_some_and(|d| d != self.dlpack_device()) {
            return Err(PyBufferError::new_err(
                "a tensor of the bridge is shared in place and cannot be copied",
            ));
        }
        let kind = dtype::dlpack(self.kind)
            .ok_or_else(|| PyBufferError::new_err(format!("DLPack has no {}", self.dtype())))?;
        let versioned = max_version.is_some_and(|v| v.0 >= 1);
        let owner = self.block.clone();
        dlpack::write(py, owner, self.address, self.dlpack_device(), kind, &self.shape, versioned)
    }

    fn __repr__(&self) -> String {
        format!(
            "<strake_gds.Tensor {} {:?} on {}>",
            self.dtype(),
            self.shape,
            self.block.device.session.device().name()
        )
    }
}

/// The memory of any library's tensor, held for the time of a call.
pub struct Given {
    pub address: u64,
    pub len: u64,
    pub kind: Option<Dtype>,
    pub shape: Vec<usize>,
    device: Arc<Device>,
    /// The number of bytes lent to [`strake_gds::HostMem`].
    lent: Option<usize>,
    /// Keeps the memory alive.
    _owner: Py<PyAny>,
}

impl Given {
    /// `TypeError` for an object that is not a tensor, or a tensor in other memory than the
    /// bridge's; `BufferError` for one that is not contiguous, or is read-only and `written`.
    ///
    /// A tuple (address, number of bytes) is accepted as it is.
    pub fn of(device: &Arc<Device>, x: &Bound<'_, PyAny>, written: bool) -> PyResult<Given> {
        let interface = x.getattr_opt("__cuda_array_interface__")?;
        let (seen, kind, owner) = match interface {
            None if x.is_instance_of::<PyTuple>() => {
                (of_address(device, x.extract()?), Some(Dtype::U8), x.clone())
            }
            Some(i) => {
                let (seen, kind) = of_interface(i.cast::<PyDict>()?)?;
                (seen, kind, x.clone())
            }
            None => of_dlpack(x)?,
        };
        let ours = match device.memory {
            Memory::Host => matches!(seen.device, dlpack::CPU | dlpack::CUDA_HOST),
            Memory::Cuda(_) => seen.device == dlpack::CUDA,
        };
        if !ours {
            let name = device.session.device().name();
            return Err(PyTypeError::new_err(format!(
                "the tensor is not in the bridge's memory ({name})"
            )));
        }
        if written && seen.read_only {
            return Err(PyBufferError::new_err("the tensor is read-only"));
        }
        let bits = kind.map_or(usize::from(seen.bits), |k| k.bitsize());
        let len = seen.shape.iter().try_fold(bits, |n, d| n.checked_mul(*d)).filter(|n| n % 8 == 0);
        let len = len.ok_or_else(|| {
            PyBufferError::new_err("the size of the tensor is not a whole number of bytes")
        })? as u64
            / 8;
        let mut given = Given {
            address: seen.address,
            len,
            kind,
            shape: seen.shape,
            device: device.clone(),
            lent: None,
            _owner: owner.unbind(),
        };
        if let (Some(memory), true) = (device.session.host(), len > 0) {
            let start: *mut u8 = ptr::with_exposed_provenance_mut(given.address as usize);
            // SAFETY: the owner promises that the memory exists, and is held as long as this value;
            // for the rule for programs see `Block::new`.
            unsafe { memory.lend(start, len as usize) };
            given.lent = Some(len as usize);
        }
        Ok(given)
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        if let (Some(len), Some(memory)) = (self.lent, self.device.session.host()) {
            memory.take_back(ptr::with_exposed_provenance_mut(self.address as usize), len);
        }
    }
}

/// Memory at an address that the caller vouches for.
fn of_address(device: &Device, (address, len): (u64, usize)) -> dlpack::Seen {
    let kind = match device.memory {
        Memory::Host => dlpack::CPU,
        Memory::Cuda(_) => dlpack::CUDA,
    };
    dlpack::Seen { address, device: kind, code: 1, bits: 8, shape: vec![len], read_only: false }
}

fn of_interface(i: &Bound<'_, PyDict>) -> PyResult<(dlpack::Seen, Option<Dtype>)> {
    let item = |key: &str| {
        let missing = || PyTypeError::new_err(format!("__cuda_array_interface__ has no '{key}'"));
        i.get_item(key)?.ok_or_else(missing)
    };
    let (address, read_only): (u64, bool) = item("data")?.extract()?;
    let shape: Vec<usize> = item("shape")?.extract()?;
    let text: String = item("typestr")?.extract()?;
    let bytes = text.get(2..).and_then(|n| n.parse::<u8>().ok()).filter(|n| (1..=16).contains(n));
    let bytes =
        bytes.ok_or_else(|| PyTypeError::new_err(format!("typestr '{text}' is not supported")))?;
    if let Some(strides) = i.get_item("strides")?.filter(|s| !s.is_none()) {
        let strides: Vec<i64> = strides.extract()?;
        let elements: Vec<i64> = strides.iter().map(|s| s / i64::from(bytes)).collect();
        let whole = strides.iter().all(|s| s % i64::from(bytes) == 0);
        if strides.len() != shape.len() || !whole || !dlpack::is_dense(&shape, &elements) {
            return Err(PyBufferError::new_err(
                "the tensor is not contiguous: call .contiguous() on it first",
            ));
        }
    }
    let seen =
        dlpack::Seen { address, device: dlpack::CUDA, code: 0, bits: bytes * 8, shape, read_only };
    Ok((seen, dtype::by_typestr(&text)))
}

fn of_dlpack<'py>(
    x: &Bound<'py, PyAny>,
) -> PyResult<(dlpack::Seen, Option<Dtype>, Bound<'py, PyAny>)> {
    let Some(export) = x.getattr_opt("__dlpack__")? else {
        let m = "expected a tensor: something with __dlpack__ or __cuda_array_interface__";
        return Err(PyTypeError::new_err(format!("{m}, not {}", x.get_type().name()?)));
    };
    let newer = PyDict::new(x.py());
    newer.set_item("max_version", (1, 0))?;
    let capsule = match export.call((), Some(&newer)) {
        // The exporter is from before 2024 and knows no versions.
        Err(e) if e.is_instance_of::<PyTypeError>(x.py()) => export.call0()?,
        other => other?,
    };
    let seen = dlpack::read(&capsule)?;
    let kind = dtype::by_dlpack(seen.code, seen.bits);
    Ok((seen, kind, capsule))
}
