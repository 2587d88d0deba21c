"""What somebody runs who knows cuFile and not this file system: a file of MOUNT into a GPU's memory, changed there, and back."""

import ctypes
import os

cufile, cuda = ctypes.CDLL("libcufile.so.0"), ctypes.CDLL("libcuda.so.1")
LENGTH = 1_000_003


class Error(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cuda", ctypes.c_int)]


class Descriptor(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handle", ctypes.c_uint64), ("operations", ctypes.c_void_p)]


for f in (cufile.cuFileDriverOpen, cufile.cuFileHandleRegister):
    f.restype = Error
for f in (cufile.cuFileRead, cufile.cuFileWrite):
    f.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
    f.restype = ctypes.c_ssize_t


def ok(code):
    assert code == 0, f"the driver says {code}"


context, memory = ctypes.c_void_p(), ctypes.c_uint64()
ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(LENGTH)))
assert cufile.cuFileDriverOpen().err == 0

data = os.urandom(LENGTH)
path = os.path.join(os.environ["MOUNT"], "weights")
with open(path, "wb") as f:
    f.write(data)
with open(path, "rb+") as f:
    handle = ctypes.c_void_p()
    said = cufile.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, f.fileno())))
    assert said.err == 0, f"registering: {said.err}"
    got = cufile.cuFileRead(handle, memory.value, LENGTH, 0, 0)
    assert got == LENGTH, f"reading: {got}"
    ok(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), ctypes.c_size_t(100)))
    wrote = cufile.cuFileWrite(handle, memory.value, LENGTH, 0, 0)
    assert wrote == LENGTH, f"writing: {wrote}"
    cufile.cuFileHandleDeregister(handle)
with open(path, "rb") as f:
    assert f.read() == bytes([7] * 100) + data[100:]
cufile.cuFileDriverClose_v2()
