"""torch.cuda.gds on a mount: what it saves from a GPU and loads again must be the same, and must have gone through cuFile's interface.

MOUNT: a folder of the mount. ELSEWHERE, if set: a folder of another file system, whose files NVIDIA's library must serve or refuse.
The storages are of memory that the driver gave, so that a stand-in of the driver does. It needs STANDIN's cudart.so preloaded as well.
"""

import ctypes
import os

import torch
from torch.cuda import gds

cuda = ctypes.CDLL("libcuda.so.1")
NOTHING = ctypes.c_void_p()


def ok(code):
    assert code == 0, f"the driver says {code}"


class Memory:
    """Bytes of a GPU, and PyTorch's storage of them."""

    def __init__(self, n):
        at = ctypes.c_uint64()
        ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(n)))
        self.at, self.n = at, n
        self.storage = torch._C._construct_storage_from_data_pointer(at.value, torch.device("cuda", 0), n)

    def put(self, data):
        ok(cuda.cuMemcpyHtoDAsync_v2(self.at, data, ctypes.c_size_t(len(data)), NOTHING))
        ok(cuda.cuStreamSynchronize(NOTHING))

    def get(self):
        data = ctypes.create_string_buffer(self.n)
        ok(cuda.cuMemcpyDtoHAsync_v2(data, self.at, ctypes.c_size_t(self.n), NOTHING))
        ok(cuda.cuStreamSynchronize(NOTHING))
        return data.raw


def refused(what, call):
    try:
        call()
    except RuntimeError as e:
        print(f"{what}: {str(e).splitlines()[0]}")
        return
    raise AssertionError(f"{what} was not refused")


ok(cuda.cuInit(0))
context = ctypes.c_void_p()
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
print("PyTorch", torch.__version__)
assert gds.is_available()

n = (5 << 20) + 12345
data = (bytes((i * 2654435761 >> 13) & 255 for i in range(65536)) * (n // 65536 + 1))[:n]
path = os.path.join(os.environ["MOUNT"], "pytorch")
one, two, small = Memory(n), Memory(n), Memory(1001)
one.put(data)
gds.gds_register_buffer(one.storage)
f = gds.GdsFile(path, os.O_CREAT | os.O_RDWR)
f.save_storage(one.storage, offset=0)
f.save_storage(one.storage, offset=n)
with open(path, "rb") as seen:
    assert seen.read() == data + data, "the mount has other bytes"
f.load_storage(two.storage, offset=0)
assert two.get() == data, "loaded"
f.load_storage(small.storage, offset=777)
assert small.get() == data[777:1778], "not aligned to anything"
small.put(bytes(1001))
f.load_storage(small.storage, offset=2 * n - 5)
assert small.get() == data[-5:] + bytes(996), "as far as the file goes, which PyTorch takes for all"
gds.gds_deregister_buffer(one.storage)
refused("let go twice", lambda: gds.gds_deregister_buffer(one.storage))
f.deregister_handle()
f.register_handle()
f.load_storage(two.storage, offset=n)
assert two.get() == data, "registered again"
g = gds.GdsFile(path, os.O_RDONLY)
refused("open for reading only", lambda: g.save_storage(small.storage))
del f, g
if "ELSEWHERE" in os.environ:
    refused("a file of another file system", lambda: gds.GdsFile(os.path.join(os.environ["ELSEWHERE"], "f"), os.O_CREAT | os.O_RDWR))
print("the same bytes")
