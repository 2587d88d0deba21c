"""Stores through memory mappings beside all other changes of the same file, on one mount. Nobody changes the bytes of another one, so
all of them must be there in the end. Run in a folder of the mount; arguments: names of cases."""
import ctypes, mmap, os, signal, sys, threading, time, traceback

libc = ctypes.CDLL(None, use_errno=True)
PAGE, MIB = 4096, 1 << 20
PUNCH, ZERO = 3, 0x10 | 1


def fallocate(fd, mode, at, n):
    if libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(n)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def same(got, want, what=""):
    if got != want:
        raise AssertionError(f"{what}: {got[:40]!r} instead of {want[:40]!r}" if isinstance(got, bytes) else f"{what}: {got} for {want}")


def new(size, fill=b"."):
    name = f"f{os.getpid()}.{time.monotonic_ns()}"
    fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, fill * size) if size else None
    return name, fd


class Storing:
    """Programs that store to bytes of a file through mappings of their own for as long as this lasts. Then what they stored last is there."""

    def __init__(self, name, places, programs=1, also_read=()):
        self.name, self.places = name, places
        self.last = mmap.mmap(-1, max(PAGE, len(places)))
        self.ready, self.children = mmap.mmap(-1, PAGE), []
        for k in range(programs):
            child = os.fork()
            if child == 0:
                self.store(k, programs, also_read)
            self.children.append(child)
        while any(self.ready[k] == 0 for k in range(programs)): time.sleep(0.001)

    def store(self, k, programs, also_read):
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        fd = os.open(self.name, os.O_RDWR)
        m, n = mmap.mmap(fd, 0), 0
        mine = list(enumerate(self.places))[k::programs]
        while not stop:
            n = n % 255 + 1
            for i, at in mine:
                m[at] = n
                self.last[i] = n
            for at in also_read: m[at]
            self.ready[k] = 1
        os._exit(0)

    def __enter__(self): return self

    def __exit__(self, kind, *_):
        for c in self.children: os.kill(c, signal.SIGTERM)
        for c in self.children: same(os.waitpid(c, 0)[1], 0, "a program that stores")
        if kind is None:
            fd = os.open(self.name, os.O_RDWR)
            os.fsync(fd)
            for i, at in enumerate(self.places):
                same(os.pread(fd, 1, at), bytes([self.last[i]]), f"what was stored at {at}")
            os.close(fd)


def check(fd, writes):
    """All of `writes`, by place, are there."""
    os.fsync(fd)
    lost = [at for at, data in writes.items() if os.pread(fd, len(data), at) != data]
    same(lost, [], f"lost of {len(writes)}")


def small_writes():
    """Each is there at once and at the end."""
    name, fd = new(PAGE)
    with Storing(name, [0]):
        writes = {at: b"%08d" % at for at in range(8, PAGE, 8)}
        for at, data in writes.items():
            os.pwrite(fd, data, at)
            same(os.pread(fd, 8, at), data, f"read back at {at}")
        check(fd, writes)


def by_other_handles():
    name, fd = new(2 * PAGE)
    others = [os.open(name, os.O_WRONLY), os.open(name, os.O_RDWR | os.O_DIRECT), os.open(name, os.O_WRONLY | os.O_DSYNC)]
    with Storing(name, [0, PAGE + 9]):
        writes = {at: b"%08d" % at for at in range(16, 2 * PAGE - 8, 24)}
        for i, (at, data) in enumerate(writes.items()):
            try: os.pwrite(others[i % 3], data, at)
            except OSError: os.pwrite(fd, data, at)  # elsewhere O_DIRECT wants whole sectors
        check(fd, writes)


def by_two_programs():
    name, fd = new(PAGE)
    writes = {at: b"%08d" % at for at in range(8, PAGE, 8)}
    with Storing(name, [0, 1], programs=2):
        if (child := os.fork()) == 0:
            for at in range(8, PAGE, 16): os.pwrite(fd, writes[at], at)
            os._exit(0)
        for at in range(16, PAGE, 16): os.pwrite(fd, writes[at], at)
        same(os.waitpid(child, 0)[1], 0)
        check(fd, writes)


def large_writes():
    """Of 1 MiB, whose first and last pages are stored to beside them; the pages between are read."""
    name, fd = new(MIB + 2 * PAGE)
    with Storing(name, [0, MIB + PAGE], also_read=range(PAGE, MIB, 16 * PAGE)):
        for n in range(12):
            data = bytes([65 + n]) * MIB
            os.pwrite(fd, data, 100)
            same(os.pread(fd, MIB, 100) == data, True, f"write {n}")
        check(fd, {100: data})


def whole_pages():
    name, fd = new(3 * PAGE)
    with Storing(name, [PAGE - 1, 2 * PAGE]):
        for n in range(150):
            data = b"%04d" % n * (PAGE // 4)
            os.pwrite(fd, data, PAGE)
            check(fd, {PAGE: data})


def stores_that_never_stop():
    """Four programs store to every page of the range all the time: each write gets through, and the programs go on."""
    name, fd = new(64 * PAGE)
    began = time.time()
    with Storing(name, [PAGE * p for p in range(64)], programs=4):
        writes = {PAGE * p + 1: b"%05d" % p * 800 for p in range(64)}
        for at, data in writes.items(): os.pwrite(fd, data, at)
        check(fd, writes)
    same(time.time() - began < 60, True, "seconds")


def appends():
    """The page where the file ends is mapped; what is appended to it is not undone by stores before the end."""
    name, fd = new(PAGE + 100)
    end = os.open(name, os.O_WRONLY | os.O_APPEND)
    with Storing(name, [PAGE]):
        writes = {PAGE + 100 + 10 * n: b"%09d\n" % n for n in range(450)}
        for data in writes.values(): os.write(end, data)
        same(os.fstat(fd).st_size, PAGE + 4600)
        check(fd, writes)


def holes():
    name, fd = new(2 * PAGE, b"m")
    with Storing(name, [0, PAGE + 5]):
        for n in range(60):
            for mode, at in (PUNCH, 100), (ZERO, PAGE + 100):
                os.pwrite(fd, b"m" * 700, at)
                fallocate(fd, mode, at, 700)
                same(os.pread(fd, 702, at - 1), b"m" + bytes(700) + b"m", f"hole {n}")


def copies():
    """copy_file_range(2) into a mapped file, which the kernel does by reading and writing then."""
    source, s = new(PAGE, b"s")
    name, fd = new(2 * PAGE)
    with Storing(name, [0, PAGE + 1000]):
        for n in range(60):
            os.pwrite(s, b"%06d" % n * 100, 0)
            same(os.copy_file_range(s, fd, 600, 0, PAGE + 10), 600)
            same(os.pread(fd, 600, PAGE + 10), b"%06d" % n * 100, f"copy {n}")


def copies_begun_before_it_is_mapped():
    source, s = new(8 * MIB, b"s")
    for n in range(4):
        name, fd = new(8 * MIB + PAGE)
        copier = threading.Thread(target=lambda: same(os.copy_file_range(s, fd, 8 * MIB, 0, 10), 8 * MIB))
        copier.start()
        time.sleep(0.01 * n)
        with Storing(name, [5, MIB * 8 + 20]): copier.join()
        same(os.pread(fd, 8 * MIB, 10) == b"s" * 8 * MIB, True, "copied")


def cuts():
    """A dirty page beyond a new end does not bring the file back; what is before the end stays."""
    name, fd = new(20_000)
    m = mmap.mmap(fd, 20_000)
    m[17_000], m[4_900], m[5_100] = 65, 66, 67
    os.ftruncate(fd, 5000)
    libc.msync(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), ctypes.c_size_t(20_000), 4)
    os.fsync(fd)
    same(os.fstat(fd).st_size, 5000)
    same(os.pread(fd, 200, 4_900), b"B" + b"." * 99, "before the end")
    os.ftruncate(fd, 20_000)
    same(os.pread(fd, 20_000, 5_000), bytes(15_000), "behind the end")
    with Storing(name, [0]):
        for n in range(40):
            os.pwrite(fd, b"x" * 9000, 3)
            os.ftruncate(fd, 700); os.ftruncate(fd, 9003)
            same(os.pread(fd, 9000, 3), b"x" * 697 + bytes(8303), f"cut {n}")


def opened_anew_and_emptied():
    name, fd = new(3 * PAGE)
    m = mmap.mmap(fd, 3 * PAGE)
    for n in range(40):
        m[0], m[2 * PAGE] = 65, 66
        os.close(os.open(name, os.O_WRONLY | os.O_TRUNC))
        same(os.fstat(fd).st_size, 0)
        os.fsync(fd)
        same(os.fstat(fd).st_size, 0, "after a sync")
        os.pwrite(fd, b"y" * 3 * PAGE, 0)
        same(m[:], b"y" * 3 * PAGE, f"mapped {n}")


def shown_at_once():
    """A mapping shows what write(2) wrote as soon as that returns, whoever pages it in beside it."""
    name, fd = new(4 * PAGE)
    r = os.open(name, os.O_RDONLY)
    m = mmap.mmap(r, 4 * PAGE, prot=mmap.PROT_READ)
    stop = mmap.mmap(-1, PAGE)
    readers = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            while not stop[0]: m[0], m[PAGE], m[3 * PAGE]
            os._exit(0)
        readers.append(child)
    for n in range(300):
        data = b"%08d" % n
        os.pwrite(fd, data * 512 * 3, PAGE - 8)
        same(m[PAGE - 8:PAGE] + m[3 * PAGE:3 * PAGE + 8], data * 2, f"write {n}")
    stop[0] = 1
    for c in readers: os.waitpid(c, 0)


def after_the_last_close():
    """What was stored is there when the last mapping is gone, which is after the last close."""
    for n in range(20):
        name, fd = new(2 * PAGE)
        m = mmap.mmap(fd, 2 * PAGE)
        os.close(fd)
        m[5] = m[PAGE + 5] = 65 + n
        m.close()
        with open(name, "rb") as f: b = f.read()
        same((b[5], b[PAGE + 5]), (65 + n, 65 + n))
        w = os.open(name, os.O_WRONLY)
        os.pwrite(w, b"after", 8); os.close(w)
        with open(name, "rb") as f: same(f.read(13)[8:], b"after")


CASES = [small_writes, by_other_handles, by_two_programs, large_writes, whole_pages, stores_that_never_stop, appends, holes, copies,
         copies_begun_before_it_is_mapped, cuts, opened_anew_and_emptied, shown_at_once, after_the_last_close]

if __name__ == "__main__":
    failed = []
    for case in [c for c in CASES if not sys.argv[1:] or c.__name__ in sys.argv[1:]]:
        began = time.time()
        try: case()
        except Exception: failed.append(case.__name__); traceback.print_exc()
        print(f"{case.__name__} {time.time() - began:.1f} s", flush=True)
    if failed: sys.exit(f"failed: {' '.join(failed)}")
