"""KvikIO on a mount: what it writes from a GPU and reads back must be the same, and must have gone through cuFile's interface.

MOUNT: a folder of the mount. The driver library is found by the loader; without a GPU, a stand-in that KvikIO takes.
"""

import ctypes
import os

import kvikio
import kvikio.cufile_driver
import kvikio.defaults

cuda = ctypes.CDLL("libcuda.so.1")
NOTHING = ctypes.c_void_p()


def ok(code):
    assert code == 0, f"the driver says {code}"


class Memory:
    """Bytes of a GPU, as arrays show them."""

    def __init__(self, n):
        at = ctypes.c_uint64()
        ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(n)))
        self.at, self.n = at.value, n
        self.__cuda_array_interface__ = {"shape": (n,), "typestr": "|u1", "data": (self.at, False), "version": 3}

    def put(self, data):
        ok(cuda.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(self.at), data, ctypes.c_size_t(len(data)), NOTHING))
        ok(cuda.cuStreamSynchronize(NOTHING))

    def get(self, n):
        data = ctypes.create_string_buffer(n)
        ok(cuda.cuMemcpyDtoHAsync_v2(data, ctypes.c_uint64(self.at), ctypes.c_size_t(n), NOTHING))
        ok(cuda.cuStreamSynchronize(NOTHING))
        return data.raw


ok(cuda.cuInit(0))
context = ctypes.c_void_p()
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))

n = (9 << 20) + 12345
data = bytes((i * 2654435761 >> 13) & 255 for i in range(65536)) * (n // 65536 + 1)
data = data[:n]
path = os.path.join(os.environ["MOUNT"], "kvikio")
kvikio.defaults.set({"compat_mode": kvikio.CompatMode.OFF, "num_threads": 4, "task_size": 1 << 20})
print("KvikIO", kvikio.__version__, "cuFile", kvikio.cufile_driver.libcufile_version())

one, two = Memory(n), Memory(n)
one.put(data)
with kvikio.CuFile(path, "w") as f:
    assert f.write(one) == n, "written in parallel tasks"
with open(path, "rb") as f:
    assert f.read() == data, "the mount has other bytes"
with kvikio.CuFile(path, "r") as f:
    assert f.read(two) == n
    assert two.get(n) == data, "read in parallel tasks"
    two.put(bytes(n))
    assert f.pread(two, size=100_001, file_offset=7, task_size=4096).get() == 100_001
    assert two.get(100_001) == data[7:100_008], "not aligned to anything"
    two.put(bytes(n))
    assert f.raw_read(two) == n
    assert two.get(n) == data, "read by one call"
print("the same bytes")
