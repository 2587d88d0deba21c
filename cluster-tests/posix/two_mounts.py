#!/usr/bin/env python3
"""What programs on two mounts see of each other, on the kernel that runs this. Each check prints a line.

usage: two_mounts.py FIRST SECOND [--old-kernel]   (the mounts use only what kernels before 6.6 offer)
"""
import errno, mmap, os, subprocess, sys, time

A, B = sys.argv[1:3]
KERNEL = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
NEWER = KERNEL >= (6, 6) and "--old-kernel" not in sys.argv
failed = []


def check(name, right, seen=""):
    print(f"{'ok     ' if right else 'FAILED '} {name} {seen}".rstrip(), flush=True)
    if not right:
        failed.append(name)


def whole(path):
    with open(path, "rb") as f:
        return f.read()


def reads():
    """A descriptor that stays open shows what the other mount wrote, also what it has read before."""
    size = 64 << 10
    with open(f"{A}/reads", "wb") as f:
        f.write(b"a" * size)
    seen = os.open(f"{B}/reads", os.O_RDONLY)
    old = 0
    os.pread(seen, size, 0)
    with open(f"{A}/reads", "r+b", buffering=0) as f:
        for i in range(50):
            f.seek(4096 * (i % 16))
            f.write(bytes([i]) * 100)
            old += os.pread(seen, 100, 4096 * (i % 16)) != bytes([i]) * 100
        f.truncate(10)
        check("a read is as short as the file that the other mount cut", len(os.pread(seen, size, 0)) == 10)
    check("a read shows the other mount's write", old == 0, f"{50 - old} of 50")
    os.close(seen)


def own_writes():
    """On one mount: a descriptor for reading, with pages in the kernel, and another for writing."""
    with open(f"{A}/own", "wb") as f:
        f.write(bytes(1 << 20))
    r, w = os.open(f"{A}/own", os.O_RDONLY), os.open(f"{A}/own", os.O_RDWR)
    m = mmap.mmap(r, 1 << 20, prot=mmap.PROT_READ)
    sum(m[::4096])
    old = 0
    for i in range(200):
        at, b = (i * 5003) % ((1 << 20) - 600), bytes([i % 255 + 1]) * 600
        os.pwrite(w, b, at)
        old += os.pread(r, 600, at) != b or m[at : at + 600] != b
    check("read(2) and a mapping show this mount's own writes", old == 0, f"{200 - old} of 200")


def appends():
    """What one write(2) appends lies in one piece, unless it takes more than half a second (docs/posix.md)."""
    size, rounds = (1 << 20) + 1, 10
    open(f"{A}/appends", "w").close()
    children = []
    for letter, mount in ((b"a", A), (b"b", B)):
        child = os.fork()
        if child == 0:
            fd = os.open(f"{mount}/appends", os.O_WRONLY | os.O_APPEND)
            slow = 0
            for _ in range(rounds):
                began = time.monotonic()
                assert os.write(fd, letter * (size - 1) + b"\n") == size
                slow += time.monotonic() - began > 0.4
            os._exit(slow)
        children.append(child)
    slow = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
    data = whole(f"{B}/appends")
    torn = [i for i in range(0, len(data), size) if len(set(data[i : i + size])) != 2]
    right = len(data) == 2 * rounds * size and all(0 <= n <= rounds for n in slow) and len(torn) <= 2 * sum(slow)
    check("appends of two mounts lie in one piece", right, f"{2 * rounds - len(torn)} of {2 * rounds}, {sum(slow)} took too long")


def mappings():
    """A read-only mapping shows the other mount's writes; one that can be stored to works or is refused."""
    with open(f"{A}/mapped", "wb") as f:
        f.write(bytes(8192))
    fd = os.open(f"{B}/mapped", os.O_RDONLY)
    m = mmap.mmap(fd, 8192, prot=mmap.PROT_READ)
    old = 0
    with open(f"{A}/mapped", "r+b", buffering=0) as f:
        for i in range(20):
            assert m[4096] == i
            f.seek(4096)
            f.write(bytes([i + 1]))
            end = time.monotonic() + 2
            while m[4096] != i + 1 and time.monotonic() < end:
                time.sleep(0.001)
            old += m[4096] != i + 1
            if old:
                break
    check("a mapping shows the other mount's write", old == 0)
    fd = os.open(f"{B}/mapped", os.O_RDWR)
    try:
        stores = mmap.mmap(fd, 8192)
        stores[0:1] = b"x"
        stores.flush()
        check("a shared mapping can be stored to", NEWER and whole(f"{A}/mapped")[:1] == b"x")
    except OSError as e:
        check("a shared mapping of a file that is open for writing is refused", not NEWER and e.errno == errno.ENODEV)
    private = mmap.mmap(fd, 8192, flags=mmap.MAP_PRIVATE)
    private[0:1] = b"p"
    check("a private mapping can be stored to", private[0:1] == b"p" and whole(f"{A}/mapped")[:1] != b"p")


def programs():
    with open("/bin/true", "rb") as f, open(f"{A}/program", "wb") as g:
        g.write(f.read())
    os.chmod(f"{A}/program", 0o755)
    check("a program that the other mount wrote runs", subprocess.run([f"{B}/program"]).returncode == 0)


for part in (reads, own_writes, appends, mappings, programs):
    part()
sys.exit(1 if failed else 0)
