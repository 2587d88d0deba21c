"""A local file into GPU memory: by read() and a copy from ordinary memory, one thread, 1 MiB at a time; and by cuFile in its compatibility mode, by 1 and
8 threads. Called by main.py: local.py FOLDER DEVICE MIB. JSON on standard output; 77 where there is no driver or no GPU. Only C interfaces, by ctypes, so
that nothing but the driver and libcufile is needed. cuFile is known to hang: it is called by a process of its own (with FILE as a fourth argument), which
has a limit."""

import ctypes
import json
import os
import site
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from ctypes import byref, c_int, c_longlong, c_size_t, c_ssize_t, c_uint64, c_void_p
from pathlib import Path

MIB = 1 << 20
PIECE = 4 * MIB
# Seconds that cuFile may take.
LIMIT = 60
CUFILE = "cuFile, compatibility mode, {} thread(s)"


class Error(ctypes.Structure):
    _fields_ = [("err", c_int), ("cu_err", c_int)]


class Descriptor(ctypes.Structure):
    """CUfileDescr_t: the kind of handle (1: a file descriptor), the handle, operations (none)."""

    _fields_ = [("kind", c_int), ("fd", c_uint64), ("operations", c_void_p)]


def skip(why):
    print(why, file=sys.stderr)
    sys.exit(77)


def library(*names):
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    return None


class Cuda:
    def __init__(self, device):
        self.lib = library("libcuda.so.1")
        if self.lib is None:
            skip("there is no CUDA driver (libcuda.so.1)")
        if self.lib.cuInit(0) != 0:
            skip("the CUDA driver finds no device")
        d, self.context = c_int(), c_void_p()
        self.check("cuDeviceGet", self.lib.cuDeviceGet(byref(d), device))
        self.check("cuDevicePrimaryCtxRetain", self.lib.cuDevicePrimaryCtxRetain(byref(self.context), d))
        self.enter()

    def check(self, what, code):
        if code != 0:
            sys.exit(f"{what} failed: {code}")

    def enter(self):
        self.check("cuCtxSetCurrent", self.lib.cuCtxSetCurrent(self.context))

    def alloc(self, n):
        p = c_uint64()
        self.check("cuMemAlloc", self.lib.cuMemAlloc_v2(byref(p), c_size_t(n)))
        return p.value

    def free(self, at):
        self.check("cuMemFree", self.lib.cuMemFree_v2(c_uint64(at)))

    def to_device(self, at, data, n):
        self.check("cuMemcpyHtoD", self.lib.cuMemcpyHtoD_v2(c_uint64(at), data, c_size_t(n)))

    def clear(self, at, n):
        self.check("cuMemsetD8", self.lib.cuMemsetD8_v2(c_uint64(at), ctypes.c_ubyte(0), c_size_t(n)))

    def is_equal(self, at, path, n):
        """Whether what is at the address is what the file has."""
        block = ctypes.create_string_buffer(PIECE)
        with open(path, "rb") as f:
            for offset in range(0, n, PIECE):
                self.check("cuMemcpyDtoH", self.lib.cuMemcpyDtoH_v2(block, c_uint64(at + offset), c_size_t(PIECE)))
                if f.read(PIECE) != block.raw:
                    return False
        return True


def read_and_copy(cuda, path, gpu, n):
    block = bytearray(MIB)
    source = (ctypes.c_char * MIB).from_buffer(block)
    begun = time.monotonic()
    with open(path, "rb", buffering=0) as f:
        for at in range(0, n, MIB):
            if f.readinto(block) != MIB:
                sys.exit("the file is too short")
            cuda.to_device(gpu + at, source, MIB)
    return n / (time.monotonic() - begun)


def what_it_logged():
    """The errors in cuFile's log of this process, in the folder it runs in."""
    lines = []
    for log in Path(".").glob("cufile*.log"):
        with suppress(OSError):
            lines += [line.strip() for line in log.read_text(errors="replace").splitlines() if "ERROR" in line]
    return f" ({'; '.join(lines[-3:])[-400:]})" if lines else ""


def cufile_rate(cuda, cufile, path, gpu, n, threads):
    """By so many threads, each with its part of the file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    handle, description = c_void_p(), Descriptor(1, fd, None)
    e = cufile.cuFileHandleRegister(byref(handle), byref(description))
    if e.err != 0:
        os.close(fd)
        return f"cuFileHandleRegister said {e.err}{what_it_logged()}"
    wrong, share = [], n // threads

    def part(k):
        cuda.enter()
        for at in range(k * share, (k + 1) * share, PIECE):
            got = cufile.cuFileRead(handle, c_void_p(gpu), c_size_t(PIECE), c_longlong(at), c_longlong(at))
            if got != PIECE:
                wrong.append(f"cuFileRead said {got}")
                return

    begun = time.monotonic()
    all_of_them = [threading.Thread(target=part, args=(k,)) for k in range(threads)]
    for t in all_of_them:
        t.start()
    for t in all_of_them:
        t.join()
    took = time.monotonic() - begun
    cufile.cuFileHandleDeregister(handle)
    os.close(fd)
    return wrong[0] if wrong else n / took


def main():
    folder, device, mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    n = mib * MIB // (8 * PIECE) * 8 * PIECE
    if n == 0:
        skip(f"{mib} MiB are less than {8 * PIECE // MIB}")
    cuda = Cuda(device)
    gpu = cuda.alloc(n)
    if len(sys.argv) > 4:
        return print(json.dumps(by_cufile(cuda, sys.argv[4], gpu, n)))
    figures = {}
    with tempfile.NamedTemporaryFile(dir=folder) as f:
        pattern = os.urandom(MIB)
        for at in range(0, n, MIB):
            f.write(at.to_bytes(8, "little") + pattern[8:])
        f.flush()
        os.fsync(f.fileno())
        figures["read 1 MiB, copy, wait; the file in the page cache"] = read_and_copy(cuda, f.name, gpu, n)
        if not cuda.is_equal(gpu, f.name, n):
            sys.exit("read and copy: what arrived differs")
        # Its own file of settings, so that this machine's do not matter.
        with tempfile.NamedTemporaryFile("w", suffix=".json") as settings:
            json.dump({"properties": {"allow_compat_mode": True, "force_compat_mode": True}, "execution": {}}, settings)
            settings.flush()
            os.environ["CUFILE_ENV_PATH_JSON"] = settings.name
            cuda.free(gpu)
            figures |= in_a_process_of_its_own(f.name)
    print(json.dumps({"bytes": n, "figures": figures}))


def in_a_process_of_its_own(path):
    try:
        r = subprocess.run([sys.executable, *sys.argv, path], capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {CUFILE.format(1): f"not run: cuFile had not ended after {LIMIT} s"}
    with suppress(ValueError):
        return json.loads(r.stdout.strip().rpartition("\n")[2])
    if r.returncode >= 0:
        sys.exit(f"cuFile: {(r.stderr or r.stdout).strip()[-1000:]}")
    return {CUFILE.format(1): f"not run: signal {-r.returncode} ended cuFile"}


def by_cufile(cuda, path, gpu, n):
    named = os.environ.get("STRAKE_CUFILE_REAL")
    # Wheels of pip have it where no loader looks.
    wheels = [str(f) for folder in site.getsitepackages() + [site.getusersitepackages()] for f in Path(folder).glob("nvidia/*/lib/libcufile.so.0")]
    usual = ["libcufile.so.0", "libcufile.so", *wheels, "/usr/local/cuda/lib64/libcufile.so.0"]
    cufile = library(*([named] if named else usual))
    if cufile is None:
        return {CUFILE.format(1): "not run: there is no libcufile"}
    try:
        open("/proc/modules").close()
    except OSError:
        return {CUFILE.format(1): "not run: this kernel has no /proc/modules, where libcufile waits for ever"}
    cufile.cuFileDriverOpen.restype = cufile.cuFileHandleRegister.restype = Error
    cufile.cuFileRead.restype = c_ssize_t
    e = cufile.cuFileDriverOpen()
    if e.err != 0:
        return {CUFILE.format(1): f"not run: cuFileDriverOpen said {e.err}"}
    figures = {}
    for threads in (1, 8):
        cuda.clear(gpu, n)
        rate = cufile_rate(cuda, cufile, path, gpu, n, threads)
        if not isinstance(rate, str) and not cuda.is_equal(gpu, path, n):
            sys.exit("cuFile: what arrived differs")
        figures[CUFILE.format(threads)] = rate
    return figures


main()
