//! DLPack: the structs of its header (versions 0.8 and 1.x). Reads capsules of other libraries and
//! makes capsules for them.

use std::ffi::{CStr, c_void};

use pyo3::{exceptions::PyBufferError, ffi, prelude::*};

/// kDLCPU.
pub const CPU: i32 = 1;
/// kDLCUDA.
pub const CUDA: i32 = 2;
/// kDLCUDAHost: pinned host memory.
pub const CUDA_HOST: i32 = 3;

const OLD: &CStr = c"dltensor";
const NEW: &CStr = c"dltensor_versioned";
/// DLPACK_FLAG_BITMASK_READ_ONLY.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: (i32, i32),
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: (u32, u32),
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// The content of a capsule.
pub struct Seen {
    pub address: u64,
    pub device: i32,
    pub code: u8,
    pub bits: u8,
    pub shape: Vec<usize>,
    pub read_only: bool,
}

/// Reads a capsule without consuming it: its owner frees the tensor with the capsule.
pub fn read(capsule: &Bound<'_, PyAny>) -> PyResult<Seen> {
    let p = capsule.as_ptr();
    // SAFETY: asks any object whether it is a capsule of that name; the pointer of one is the
    // struct of that name, alive as long as the capsule, which is borrowed.
    let (tensor, read_only) = unsafe {
        if ffi::PyCapsule_IsValid(p, NEW.as_ptr()) == 1 {
            let m = ffi::PyCapsule_GetPointer(p, NEW.as_ptr()).cast::<ManagedVersioned>();
            if (*m).version.0 != 1 {
                return Err(PyBufferError::new_err(format!(
                    "DLPack version {} is not supported",
                    (*m).version.0
                )));
            }
            (&(*m).tensor, (*m).flags & READ_ONLY != 0)
        } else if ffi::PyCapsule_IsValid(p, OLD.as_ptr()) == 1 {
            (&(*ffi::PyCapsule_GetPointer(p, OLD.as_ptr()).cast::<Managed>()).tensor, false)
        } else {
            return Err(PyBufferError::new_err("__dlpack__ did not return a DLPack capsule"));
        }
    };
    let n = usize::try_from(tensor.ndim)
        .map_err(|_| PyBufferError::new_err("the number of dimensions is negative"))?;
    // SAFETY: `ndim` values each, unless that is 0 or (strides) the pointer is null.
    let values =
        |p: *const i64| unsafe { if n == 0 { &[][..] } else { std::slice::from_raw_parts(p, n) } };
    let shape: Option<Vec<usize>> =
        values(tensor.shape).iter().map(|d| usize::try_from(*d).ok()).collect();
    let shape = shape.ok_or_else(|| PyBufferError::new_err("a negative dimension"))?;
    if !tensor.strides.is_null() && !is_dense(&shape, values(tensor.strides)) {
        return Err(PyBufferError::new_err(
            "the tensor is not contiguous: call .contiguous() on it first",
        ));
    }
    if tensor.lanes != 1 {
        return Err(PyBufferError::new_err("types with lanes are not supported"));
    }
    Ok(Seen {
        address: tensor.data.addr() as u64 + tensor.byte_offset,
        device: tensor.device.0,
        code: tensor.code,
        bits: tensor.bits,
        shape,
        read_only,
    })
}

/// Whether the elements are contiguous, with the last dimension varying fastest.
pub fn is_dense(shape: &[usize], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut want = 1;
    for (d, s) in shape.iter().zip(strides).rev() {
        if *d != 1 && i128::from(*s) != want {
            return false;
        }
        want *= *d as i128;
    }
    true
}

/// What our capsules keep alive.
struct Kept<T> {
    _owner: T,
    /// Shape, then strides.
    numbers: Vec<i64>,
}

/// Makes a capsule of memory that `owner` keeps alive. `versioned`: DLPack version 1, else the
/// older struct.
pub fn write<'py, T: Send + 'static>(
    py: Python<'py>,
    owner: T,
    address: u64,
    device: (i32, i32),
    (code, bits): (u8, u8),
    shape: &[usize],
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let n = shape.len();
    let mut numbers: Vec<i64> = shape.iter().map(|d| *d as i64).collect();
    let mut strides = vec![1i64; n];
    for i in (1..n).rev() {
        strides[i - 1] = strides[i].saturating_mul(numbers[i]);
    }
    numbers.extend(strides);
    let mut kept = Box::new(Kept { _owner: owner, numbers });
    let shape = kept.numbers.as_mut_ptr();
    let tensor = DlTensor {
        data: std::ptr::without_provenance_mut(address as usize),
        device,
        ndim: n as i32,
        code,
        bits,
        lanes: 1,
        shape,
        strides: shape.wrapping_add(n),
        byte_offset: 0,
    };
    let context = Box::into_raw(kept).cast::<c_void>();
    let (pointer, name, destructor): (
        *mut c_void,
        &CStr,
        unsafe extern "C" fn(*mut ffi::PyObject),
    ) = if versioned {
        let m = ManagedVersioned {
            version: (1, 0),
            context,
            deleter: Some(free_versioned::<T>),
            flags: 0,
            tensor,
        };
        (Box::into_raw(Box::new(m)).cast(), NEW, drop_versioned)
    } else {
        let m = Managed { tensor, context, deleter: Some(free_old::<T>) };
        (Box::into_raw(Box::new(m)).cast(), OLD, drop_old)
    };
    // SAFETY: a new capsule with a constant name; an error is returned as null with an exception
    // set.
    unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)),
        )
    }
}

unsafe extern "C" fn free_old<T>(m: *mut Managed) {
    // SAFETY: made by `write` with the same types, and freed once, by its last owner. Needs no
    // interpreter.
    unsafe {
        let m = Box::from_raw(m);
        drop(Box::from_raw(m.context.cast::<Kept<T>>()));
    }
}

unsafe extern "C" fn free_versioned<T>(m: *mut ManagedVersioned) {
    // SAFETY: as above.
    unsafe {
        let m = Box::from_raw(m);
        drop(Box::from_raw(m.context.cast::<Kept<T>>()));
    }
}

/// Frees a capsule that was never consumed; a consumed one has another name by then.
unsafe extern "C" fn drop_old(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with our capsule; see `free_old`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, OLD.as_ptr()) == 1 {
            let m = ffi::PyCapsule_GetPointer(capsule, OLD.as_ptr()).cast::<Managed>();
            if let Some(free) = (*m).deleter {
                free(m);
            }
        }
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NEW.as_ptr()) == 1 {
            let m = ffi::PyCapsule_GetPointer(capsule, NEW.as_ptr()).cast::<ManagedVersioned>();
            if let Some(free) = (*m).deleter {
                free(m);
            }
        }
    }
}
