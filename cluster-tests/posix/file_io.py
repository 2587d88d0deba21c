#!/usr/bin/env python3
"""Ways to read, write and map one file that local programs count on. usage: file_io.py FOLDER [SAME-FOLDER-OF-ANOTHER-MOUNT]

Every case runs in a folder of its own; what fails is named, the last line counts.
"""
import ctypes, errno, fcntl, mmap, multiprocessing, os, random, select, shutil, signal, socket, stat, struct, subprocess, sys, traceback

CASES = []
libc = ctypes.CDLL(None, use_errno=True)


def case(f):
    CASES.append(f)
    return f


def second(path):
    """The same file through the other mount."""
    return SECOND + path[len(FOLDER):] if SECOND else path


def fails(number, f, *a, **k):
    try:
        got = f(*a, **k)
    except OSError as e:
        assert e.errno == number, f"{errno.errorcode[e.errno]}, wanted {errno.errorcode[number]}"
    else:
        raise AssertionError(f"{got!r}, wanted {errno.errorcode[number]}")


def together(n, f, *a):
    """Runs f(0..n-1, ...) in processes; all must end well."""
    all_ = [multiprocessing.Process(target=f, args=(i, *a)) for i in range(n)]
    [p.start() for p in all_]
    [p.join(120) for p in all_]
    assert [p.exitcode for p in all_] == [0] * n, [p.exitcode for p in all_]


def in_child(f, *a):
    """How a child that runs f ends: its exit status, or minus the signal."""
    if (pid := os.fork()) == 0:
        try:
            f(*a)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def contents(path):
    with open(path, "rb") as f:
        return f.read()


def buffer(data, skew):
    """`data` in anonymous memory, `skew` bytes behind a page's start."""
    m = mmap.mmap(-1, len(data) + skew + 4096)
    m[skew:skew + len(data)] = data
    return memoryview(m)[skew:skew + len(data)]


def name_it(fd, path):
    """Links what is open at fd. (os.link does not follow links.) The errno, or 0."""
    at_fdcwd, follow = -100, 0x400
    ok = libc.linkat(at_fdcwd, os.fsencode(f"/proc/self/fd/{fd}"), at_fdcwd, os.fsencode(path), follow) == 0
    return 0 if ok else ctypes.get_errno()


# ---- O_DIRECT ----

@case
def direct_aligned(d):
    data = random.randbytes(3 << 20)
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.pwrite(fd, buffer(data, 0), 0) == len(data)
    back = buffer(bytes(len(data)), 0)
    assert os.preadv(fd, [back], 0) == len(data) and bytes(back) == data
    os.close(fd)
    assert contents(second(f"{d}/f")) == data


@case
def direct_any_buffer_offset_and_length(d):
    model, r = bytearray(1 << 20), random.Random(7)
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.ftruncate(fd, len(model))
    for _ in range(150):
        at, n, skew = r.randrange(900_000), r.randrange(1, 120_000), r.randrange(4096)
        data = r.randbytes(n)
        assert os.pwrite(fd, buffer(data, skew), at) == n
        model[at:at + n] = data
        at, n = r.randrange(900_000), r.randrange(1, 120_000)
        back = buffer(bytes(n), r.randrange(4096))
        assert os.preadv(fd, [back], at) == n and bytes(back) == model[at:at + n]
    assert contents(f"{d}/f") == model


@case
def direct_and_buffered_see_each_other(d):
    a, b = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT), os.open(f"{d}/f", os.O_RDWR | os.O_DIRECT)
    for i in range(64):
        page = bytes([i + 1]) * 4096
        w, r = (a, b) if i % 2 else (b, a)
        os.pwrite(w, buffer(page, 0), i * 4096)
        back = buffer(bytes(4096), 0)
        assert os.preadv(r, [back], i * 4096) == 4096 and bytes(back) == page, i
    os.close(a), os.close(b)


@case
def direct_reads_end_at_the_end(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.pwrite(fd, buffer(bytes(4096), 0), 0)
    os.ftruncate(fd, 1000)
    back = buffer(b"x" * 8192, 0)
    assert os.preadv(fd, [back], 0) == 1000
    assert os.preadv(fd, [back], 4096) == 0


@case
def direct_from_a_mapping_of_the_same_file(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"a" * 8192, 0)
    m = mmap.mmap(fd, 8192)
    direct = os.open(f"{d}/f", os.O_RDWR | os.O_DIRECT)
    assert os.pwrite(direct, memoryview(m)[:4096], 8192) == 4096
    assert os.pread(fd, 4096, 8192) == b"a" * 4096


# ---- mappings ----

@case
def a_shared_mapping_and_read_and_write_agree(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 16)
    m = mmap.mmap(fd, 1 << 16)
    m[5000:5005] = b"hello"
    assert os.pread(fd, 5, 5000) == b"hello", "a store is read at once"
    os.pwrite(fd, b"WORLD", 5000)
    assert m[5000:5005] == b"WORLD", "a write is seen in the mapping"
    other = os.open(f"{d}/f", os.O_RDWR)
    m[100:103] = b"abc"
    assert os.pread(other, 3, 100) == b"abc"
    os.pwrite(other, b"xyz", 200)
    assert m[200:203] == b"xyz"
    m.flush()
    assert contents(second(f"{d}/f"))[100:103] == b"abc"


@case
def random_stores_writes_and_reads_agree(d):
    size, r = 300_000, random.Random(3)
    fd, model = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT), bytearray(size)
    os.ftruncate(fd, size)
    m = mmap.mmap(fd, size)
    for _ in range(2000):
        at, n, data = r.randrange(size - 9000), r.randrange(1, 9000), r.randbytes(8999)
        todo = r.randrange(5)
        if todo == 0:
            m[at:at + n] = data[:n]
            model[at:at + n] = data[:n]
        elif todo == 1:
            os.pwrite(fd, data[:n], at)
            model[at:at + n] = data[:n]
        elif todo == 2:
            assert os.pread(fd, n, at) == model[at:at + n]
        elif todo == 3:
            assert m[at:at + n] == model[at:at + n]
        else:
            m.flush()
    m.close()
    os.close(fd)
    assert contents(second(f"{d}/f")) == model


@case
def two_processes_share_a_mapping(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    m = mmap.mmap(fd, 8192)

    def child():
        own = os.open(f"{d}/f", os.O_RDWR)
        c = mmap.mmap(own, 8192)
        assert c[0:2] == b"up"
        c[4096:4100] = b"down"
    m[0:2] = b"up"
    assert in_child(child) == 0
    assert m[4096:4100] == b"down"


@case
def a_private_mapping_keeps_its_stores(d):
    with open(f"{d}/f", "wb") as f:
        f.write(b"a" * 8192)
    fd = os.open(f"{d}/f", os.O_RDWR)
    m = mmap.mmap(fd, 8192, flags=mmap.MAP_PRIVATE)
    m[0:4] = b"mine"
    os.pwrite(fd, b"b" * 4096, 4096)
    assert os.pread(fd, 4, 0) == b"aaaa" and m[0:4] == b"mine"
    m.close()
    assert contents(f"{d}/f") == b"a" * 4096 + b"b" * 4096


@case
def a_read_only_mapping_needs_no_right_to_write(d):
    with open(f"{d}/f", "wb") as f:
        f.write(b"text" * 1000)
    fd = os.open(f"{d}/f", os.O_RDONLY)
    m = mmap.mmap(fd, 4000, prot=mmap.PROT_READ)
    assert m[:] == b"text" * 1000
    try:
        mmap.mmap(fd, 4000, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        raise AssertionError("a file opened for reading was mapped shared for writing")
    except PermissionError:
        pass


@case
def stores_survive_munmap_and_close_without_msync(d):
    for i in range(20):
        fd = os.open(f"{d}/f{i}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 100_000)
        m = mmap.mmap(fd, 100_000)
        os.close(fd)
        m[50_000:50_005] = b"%05d" % i
        m.close()
        assert contents(f"{d}/f{i}")[50_000:50_005] == b"%05d" % i


@case
def beyond_the_last_page_is_sigbus(d):
    with open(f"{d}/f", "wb") as f:
        f.write(b"x" * 5000)
    fd = os.open(f"{d}/f", os.O_RDWR)
    m = mmap.mmap(fd, 5000)
    assert m[4999:5000] == b"x"
    os.ftruncate(fd, 100)
    assert in_child(lambda: m[4500]) == -signal.SIGBUS
    assert m[50:52] == b"xx"


@case
def a_cut_and_grown_file_maps_zeros(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 10_000, 0)
    m = mmap.mmap(fd, 10_000)
    assert m[9_000:9_001] == b"x"
    os.ftruncate(fd, 3_000)
    os.ftruncate(fd, 10_000)
    assert m[2_999:3_001] == b"x\0" and m[3_000:10_000] == bytes(7_000)
    assert os.pread(fd, 7_000, 3_000) == bytes(7_000)


@case
def bytes_stored_behind_the_end_do_not_stay(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 100, 0)
    # A mapping of a whole page over a file of a part of it.
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    at = libc.mmap(None, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    ctypes.memmove(at + 100, b"garbage", 7)
    libc.msync(ctypes.c_void_p(at), 4096, 4)
    os.ftruncate(fd, 4096)
    assert os.pread(fd, 4096, 0) == b"x" * 100 + bytes(3996)


@case
def programs_run_from_the_mount(d):
    for program in ["/bin/true", "/bin/ls", sys.executable]:
        shutil.copy(program, f"{d}/p")
        assert subprocess.run([f"{d}/p", "--version"], stdout=subprocess.DEVNULL).returncode == 0, program
    fd = os.open(f"{d}/p", os.O_RDONLY)
    assert in_child(lambda: os.execve(fd, ["python3", "-c", ""], os.environ)) == 0


@case
def a_program_that_runs_is_not_written(d):
    shutil.copy("/bin/sleep", f"{d}/sleep")
    p = subprocess.Popen([f"{d}/sleep", "60"])
    try:
        # Until it has become the other program.
        while os.readlink(f"/proc/{p.pid}/exe") == os.path.realpath(sys.executable):
            pass
        fails(errno.ETXTBSY, os.open, f"{d}/sleep", os.O_WRONLY)
        os.unlink(f"{d}/sleep")
    finally:
        p.kill()
        p.wait()


# ---- flags of open, vectors, places ----

@case
def appends_of_many_never_overlap(d):
    def work(i, path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for n in range(300):
            os.write(fd, b"%d %05d %s\n" % (i, n, b"." * (n % 100)))

    together(4, work, f"{d}/f")
    lines = contents(f"{d}/f").split(b"\n")[:-1]
    assert len(lines) == 1200
    for i in range(4):
        assert [x for x in lines if x.startswith(b"%d " % i)] == [b"%d %05d %s" % (i, n, b"." * (n % 100)) for n in range(300)]


@case
def long_appends_of_many_stay_whole(d):
    """What the kernel cuts into requests: from pages, from odd memory, in many vectors; beside small ones."""
    MIB = 1 << 20
    kinds = [(MIB + 1, 0), (2 * MIB, 0), (MIB, 48), (5 * MIB // 2, 4095), (64, 0)]

    def record(i, n):
        return bytes([65 + i]) * (kinds[i % 5][0] - 1) + b"\n"

    def work(i, path):
        fd = os.open(path if i % 2 else second(path), os.O_WRONLY | os.O_APPEND)
        for n in range(8):
            data = buffer(record(i, n), kinds[i % 5][1])
            parts = [data[:9], data[9:50], data[50:]]
            assert (os.write(fd, data) if n % 3 else os.writev(fd, parts)) == len(data)

    open(f"{d}/f", "wb").close()
    together(8, work, f"{d}/f")
    got, counts = contents(f"{d}/f"), [0] * 8
    while got:
        i = got[0] - 65
        want = record(i, 0)
        assert got[:len(want)] == want, f"record {sum(counts)}, of {i}, is torn"
        got, counts[i] = got[len(want):], counts[i] + 1
    assert counts == [8] * 8, counts


@case
def the_largest_size(d):
    largest = 1 << 50
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, largest)
    except OSError as e:
        assert e.errno == errno.EFBIG and not SECOND  # another file system's is smaller
        return
    fails(errno.EFBIG, os.ftruncate, fd, largest + 1)
    assert os.pwrite(fd, b"over", largest - 2) == 2, "what fits"
    fails(errno.EFBIG, os.pwrite, fd, b"x", largest)
    assert os.pread(fd, 9, largest - 2) == b"ov" and os.fstat(fd).st_size == largest
    assert os.pwrite(fd, b"y" * 3 * 1048576, largest - 2 * 1048576) == 2 * 1048576
    os.ftruncate(fd, largest - 3)
    log = os.open(f"{d}/f", os.O_WRONLY | os.O_APPEND)
    assert os.write(log, b"append") == 3
    fails(errno.EFBIG, os.write, log, b"x")
    os.ftruncate(fd, 0)


@case
def append_ignores_offsets_and_the_flag_can_be_set_later(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"one")
    assert os.pwrite(fd, b"two", 0) == 3
    assert os.pread(fd, 10, 0) == b"onetwo"
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
    os.pwrite(fd, b"ONE", 0)
    assert contents(f"{d}/f") == b"ONEtwo"
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    os.write(fd, b"end")
    assert contents(f"{d}/f") == b"ONEtwoend"
    assert os.pwritev(os.open(f"{d}/f", os.O_WRONLY), [b"!"], 0, os.RWF_APPEND) == 1
    assert contents(f"{d}/f") == b"ONEtwoend!"


@case
def synchronous_writes_are_seen_by_all(d):
    for n, flag in enumerate([os.O_SYNC, os.O_DSYNC, os.O_SYNC | os.O_DIRECT | os.O_APPEND]):
        fd = os.open(f"{d}/f{n}", os.O_WRONLY | os.O_CREAT | flag)
        for i in range(10):
            os.write(fd, buffer(b"%04095d\n" % i, 0))
            assert contents(second(f"{d}/f{n}")) == b"".join(b"%04095d\n" % j for j in range(i + 1))
    fd = os.open(f"{d}/f0", os.O_WRONLY)
    assert os.pwritev(fd, [b"a", b"bc"], 1, os.RWF_DSYNC) == 3
    os.fdatasync(fd), os.fsync(fd)


@case
def vectors_of_a_thousand_pieces(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    pieces = [bytes([i % 256]) * (i % 50 + 1) for i in range(1024)]
    whole = b"".join(pieces)
    assert os.writev(fd, pieces) == len(whole)
    back = [bytearray(i % 37 + 1) for i in range(1024)]
    n = os.preadv(fd, back, 0)
    assert b"".join(back)[:n] == whole[:n] and n == min(len(whole), sum(map(len, back)))


@case
def one_write_of_many_megabytes(d):
    data = random.randbytes(1 << 20) * 70
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    done = 0
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])
    assert contents(f"{d}/f") == data


@case
def far_places(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    for at in [(1 << 31) - 1, (1 << 32) - 2, 1 << 33, (1 << 40) + 5]:
        os.pwrite(fd, b"here", at)
        assert os.pread(fd, 4, at) == b"here" and os.fstat(fd).st_size == at + 4
    assert os.pread(fd, 10, 5000) == bytes(10)
    fails(errno.EFBIG, os.pwrite, fd, b"x", 1 << 62)
    fails(errno.EINVAL, os.pwrite, fd, b"x", (1 << 63) - 1)
    fails(errno.EINVAL, os.lseek, fd, -1, os.SEEK_SET)


@case
def a_read_sees_a_write_from_the_instant_it_returned(d):
    path = f"{d}/f"
    a, b = os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDWR)
    for i in range(100):
        w, r = (a, b) if i % 2 else (b, a)
        assert os.pwrite(w, b"%06d" % i, i * 3) == 6
        assert os.pread(r, 6, i * 3) == b"%06d" % i, i


@case
def reopened_through_proc(d):
    fd = os.open(f"{d}/f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"text")
    os.unlink(f"{d}/f")
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert os.pread(again, 9, 0) == b"text" and os.fstat(again).st_nlink == 0
    path = os.open(d, os.O_PATH)
    assert stat.S_ISDIR(os.fstat(path).st_mode)
    fails(errno.EBADF, os.pread, os.open(f"{d}", os.O_PATH), 1, 0)


@case
def files_without_a_name_get_one(d):
    fd = os.open(d, os.O_RDWR | os.O_TMPFILE, 0o640)
    os.write(fd, b"text")
    assert os.listdir(d) == []
    assert name_it(fd, f"{d}/f") == 0
    assert contents(second(f"{d}/f")) == b"text" and os.stat(f"{d}/f").st_nlink == 1
    never = os.open(d, os.O_RDWR | os.O_TMPFILE | os.O_EXCL)
    assert name_it(never, f"{d}/g") == errno.ENOENT


@case
def removed_and_renamed_while_open(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"old")
    with open(f"{d}/g", "wb") as g:
        g.write(b"new")
    os.rename(f"{d}/g", f"{d}/f")
    os.write(fd, b"er")
    assert os.pread(fd, 9, 0) == b"older" and contents(f"{d}/f") == b"new"
    assert os.fstat(fd).st_nlink == 0
    os.ftruncate(fd, 100_000)
    os.fchmod(fd, 0o600), os.fsync(fd)


# ---- copies inside the kernel ----

@case
def copy_file_range_within_and_between(d):
    data = random.randbytes(2_000_000)
    with open(f"{d}/a", "wb") as f:
        f.write(data)
    a, b = os.open(f"{d}/a", os.O_RDWR), os.open(f"{d}/b", os.O_RDWR | os.O_CREAT)
    done = 0
    while n := os.copy_file_range(a, b, 2_000_000, done, done):
        done += n
    assert done == len(data) and contents(f"{d}/b") == data
    assert os.copy_file_range(a, a, 1000, 0, 1_500_000) == 1000
    assert os.pread(a, 1000, 1_500_000) == data[:1000]
    fails(errno.EINVAL, os.copy_file_range, a, a, 1000, 0, 500)
    assert os.copy_file_range(a, b, 1000, 5_000_000, 0) == 0


@case
def sendfile_and_splice(d):
    data = random.randbytes(700_000)
    with open(f"{d}/a", "wb") as f:
        f.write(data)
    a, b = os.open(f"{d}/a", os.O_RDONLY), os.open(f"{d}/b", os.O_RDWR | os.O_CREAT)
    done = 0
    while done < len(data):
        done += os.sendfile(b, a, done, len(data) - done)
    assert contents(f"{d}/b") == data
    r, w = os.pipe()
    os.lseek(b, 0, os.SEEK_SET)
    got = b""
    while len(got) < 300_000:
        n = os.splice(b, w, 60_000)
        got += os.read(r, n)
    assert got == data[:len(got)]
    out = os.open(f"{d}/c", os.O_WRONLY | os.O_CREAT)
    os.write(w, b"through a pipe")
    assert os.splice(r, out, 100) == 14 and contents(f"{d}/c") == b"through a pipe"
    x, y = socket.socketpair()
    assert os.sendfile(x.fileno(), a, 10, 5000) == 5000 and y.recv(5000, socket.MSG_WAITALL) == data[10:5010]


# ---- names, times, space ----

@case
def names_of_255_bytes(d):
    name = "ü" * 127 + "x"
    open(f"{d}/{name}", "w").close()
    os.rename(f"{d}/{name}", f"{d}/{'b' * 255}")
    assert os.listdir(d) == ["b" * 255]
    for f in [lambda p: open(p, "w"), os.mkdir, os.stat, lambda p: os.symlink("x", p), os.mkfifo]:
        fails(errno.ENAMETOOLONG, f, f"{d}/{'a' * 256}")
    raw = os.fsencode(d) + b"/\xff\xfe\x01 \n"
    os.mkdir(raw)
    os.rmdir(raw)


@case
def paths_and_link_targets_of_4095_bytes(d):
    here = os.open(d, os.O_PATH)
    deep = 0
    for _ in range(16):
        os.mkdir("d" * 255, dir_fd=here)
        here = os.open("d" * 255, os.O_PATH, dir_fd=here)
    path = d
    while len(os.fsencode(path)) + 256 <= 4095 - 2:
        path += "/" + "d" * 255
    path += "/" + "f" * (4095 - len(os.fsencode(path)) - 1)
    assert len(os.fsencode(path)) == 4095
    open(path, "w").close()
    assert os.stat(path).st_size == 0
    fails(errno.ENAMETOOLONG, os.stat, path + "f")
    os.symlink("t" * 4095, f"{d}/link")
    assert os.readlink(f"{d}/link") == "t" * 4095 and os.lstat(f"{d}/link").st_size == 4095
    fails(errno.ENAMETOOLONG, os.symlink, "t" * 4096, f"{d}/link2")
    fails(errno.ENOENT, os.symlink, "", f"{d}/link3")
    os.symlink("loop", f"{d}/loop")
    fails(errno.ELOOP, os.stat, f"{d}/loop")
    shutil.rmtree(f"{d}/" + "d" * 255)


@case
def times_to_the_nanosecond(d):
    open(f"{d}/f", "w").close()
    for a, m in [(1, 2), (1_700_000_000_123_456_789, 1_600_000_000_987_654_321), (-1, -1_000_000_001), (1 << 33, 0)]:
        os.utime(f"{d}/f", ns=(a, m))
        s = os.stat(f"{d}/f")
        assert (s.st_atime_ns, s.st_mtime_ns) == (a, m), (s.st_atime_ns, s.st_mtime_ns)
    before = os.stat(f"{d}/f").st_ctime_ns
    with open(f"{d}/f", "w") as f:
        f.write("x")
    s = os.stat(f"{d}/f")
    assert s.st_mtime_ns > before and s.st_ctime_ns == s.st_mtime_ns


@case
def a_kept_time_is_not_overtaken_by_earlier_writes(d):
    # cp -p, tar, rsync: write, set the time, close.
    for i in range(30):
        fd = os.open(f"{d}/f{i}", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x" * (1 + i * 40_000))
        os.utime(fd, ns=(5, 1_000_000_000 + i))
        os.close(fd)
        for path in [f"{d}/f{i}", second(f"{d}/f{i}")]:
            assert os.stat(path).st_mtime_ns == 1_000_000_000 + i, (path, i)


@case
def space_is_told(d):
    s = os.statvfs(d)
    assert s.f_blocks >= s.f_bfree >= s.f_bavail > 0 and s.f_namemax == 255 and s.f_files > s.f_ffree > 0


@case
def what_cannot_fit_is_not_allocated(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 5000)
    s = os.statvfs(d)
    fallocate = lambda mode, at, n: libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(n)) and ctypes.get_errno()
    much = 2 * s.f_bavail * s.f_frsize
    if much < 1 << 40:
        fails(errno.ENOSPC, os.posix_fallocate, fd, 0, much)
        assert fallocate(0, 0, much) == errno.ENOSPC and fallocate(1, 5000, much) == errno.ENOSPC
        assert os.fstat(fd).st_size == 5000, "nothing has changed"
    os.posix_fallocate(fd, 0, 5000)
    os.posix_fallocate(fd, 0, 100000)
    assert os.fstat(fd).st_size == 100000 and contents(second(f"{d}/f")) == b"x" * 5000 + b"\0" * 95000


@case
def directories_are_read_from_told_places(d):
    for i in range(500):
        open(f"{d}/{i}", "w").close()
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    libc.telldir.argtypes = libc.readdir.argtypes = libc.rewinddir.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
    at = libc.opendir(os.fsencode(d))

    def name():
        e = libc.readdir(at)
        return ctypes.string_at(e + 19) if e else None

    seen = []
    while True:
        place = libc.telldir(at)
        n = name()
        if n is None:
            break
        seen.append((place, n))
    assert len({n for _, n in seen}) == 502
    for place, n in random.Random(1).sample(seen, 50):
        libc.seekdir(at, place)
        assert name() == n
    libc.rewinddir(at)
    assert sum(1 for _ in iter(name, None)) == 502


@case
def a_removed_working_directory(d):
    def work():
        os.mkdir(f"{d}/w")
        os.chdir(f"{d}/w")
        os.rmdir(f"{d}/w")
        fails(errno.ENOENT, open, "f", "w")
        fails(errno.ENOENT, os.getcwd)
    assert in_child(work) == 0


@case
def changes_are_watched(d):
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(inotify, os.fsencode(d), 0x100 | 0x200 | 0x8) > 0
    with open(f"{d}/f", "w") as f:
        f.write("x")
    os.unlink(f"{d}/f")
    masks, data = [], os.read(inotify, 4096)
    while data:
        _, mask, _, n = struct.unpack_from("iIII", data)
        masks.append(mask)
        data = data[16 + n:]
    assert masks == [0x100, 0x8, 0x200], masks


@case
def special_files(d):
    os.mkfifo(f"{d}/pipe")
    r = os.open(f"{d}/pipe", os.O_RDONLY | os.O_NONBLOCK)
    w = os.open(f"{d}/pipe", os.O_WRONLY)
    os.write(w, b"x")
    assert os.read(r, 9) == b"x"
    s = socket.socket(socket.AF_UNIX)
    os.chdir(d)
    s.bind("sock")
    s.listen()
    c = socket.socket(socket.AF_UNIX)
    c.connect("sock")
    c.send(b"hello")
    assert s.accept()[0].recv(9) == b"hello"
    os.chdir("/")
    assert stat.S_ISSOCK(os.stat(second(f"{d}/sock")).st_mode)
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    assert select.select([fd], [fd], [], 0)[:2] == ([fd], [fd]), "files are always ready"


def main():
    global FOLDER, SECOND
    FOLDER, SECOND = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    failed = 0
    os.umask(0o022)
    for n, f in enumerate(CASES):
        d = f"{FOLDER}/{n}"
        os.mkdir(d)

        def run():
            signal.alarm(120)
            f(d)
        status = in_child(run)
        if status:
            failed += 1
            print(f"FAILED  {f.__name__} ({status})", flush=True)
    print(f"{len(CASES) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
