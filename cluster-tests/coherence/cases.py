"""Cases for `run`: each takes a mount that changes (a) and one that looks (b), in a folder of its own."""
import ctypes, errno, fcntl, os, random, signal, stat, sys, time, traceback

libc = ctypes.CDLL(None, use_errno=True)
RENAME_EXCHANGE = 2
KIB, MIB = 1 << 10, 1 << 20


def same(got, want, what=""):
    if got != want:
        raise AssertionError(f"{what}: {got!r} instead of {want!r}")


def put(path, data=b"x"):
    with open(path, "wb") as f: f.write(data)


def get(path):
    with open(path, "rb") as f: return f.read()


def gone(path):
    """Asked twice: the second time it is remembered."""
    for _ in range(2): same(os.path.lexists(path), False, path)


def there(path):
    for _ in range(2): same(os.path.lexists(path), True, path)


def fails(code, call):
    try: call()
    except OSError as e: return same(e.errno, code)
    raise AssertionError("it succeeded")


def rename2(old, new, flags):
    if libc.renameat2(-100, old.encode(), -100, new.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def as_nobody(call):
    """The result of a call by a user without rights."""
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        try: text = repr(call())
        except OSError as e: text = errno.errorcode[e.errno]
        os.write(w, text.encode())
        os._exit(0)
    os.close(w)
    text = os.read(r, 1000).decode()
    os.close(r); os.waitpid(child, 0)
    return text


# Names that come.
def made_file(a, b): gone(b + "/f"); put(a + "/f"); there(b + "/f")
def made_directory(a, b): gone(b + "/d"); os.mkdir(a + "/d"); same(os.listdir(b + "/d"), [])
def made_link(a, b): gone(b + "/l"); os.symlink("to", a + "/l"); same(os.readlink(b + "/l"), "to")
def made_fifo(a, b): gone(b + "/p"); os.mkfifo(a + "/p"); same(stat.S_ISFIFO(os.stat(b + "/p").st_mode), True)

def second_name(a, b):
    put(a + "/f"); gone(b + "/g"); same(os.stat(b + "/f").st_nlink, 1)
    os.link(a + "/f", a + "/g")
    same(os.stat(b + "/f").st_nlink, 2, "links of the first name")
    there(b + "/g")

def listed(a, b):
    same(os.listdir(b), [])
    for i in range(20):
        put(f"{a}/{i}")
        same(sorted(os.listdir(b), key=int), [str(n) for n in range(i + 1)])
    for i in range(20):
        os.unlink(f"{a}/{i}")
        same(len(os.listdir(b)), 19 - i)

def listed_with_attributes(a, b):
    for i in range(50): put(f"{a}/{i}", b"y" * i)
    def look(): return {e.name: (e.stat().st_size, e.stat().st_mode & 0o777) for e in os.scandir(b)}
    for _ in range(2): same(look(), {str(i): (i, 0o644) for i in range(50)})
    for i in range(50): os.chmod(f"{a}/{i}", 0o600)
    same(look(), {str(i): (i, 0o600) for i in range(50)})


# Names that go.
def removed_file(a, b): put(a + "/f"); there(b + "/f"); os.unlink(a + "/f"); gone(b + "/f")
def removed_directory(a, b): os.mkdir(a + "/d"); there(b + "/d"); os.rmdir(a + "/d"); gone(b + "/d")

def removed_while_open(a, b):
    put(a + "/f", b"kept")
    with open(b + "/f", "rb") as f:
        same(os.fstat(f.fileno()).st_nlink, 1)
        os.unlink(a + "/f")
        same(os.fstat(f.fileno()).st_nlink, 0, "links of the open file")
        same(f.read(), b"kept")

def removed_and_made_again(a, b):
    for i in range(20):
        put(a + "/f", b"%d" % i)
        same(get(b + "/f"), b"%d" % i)
        os.unlink(a + "/f")
        gone(b + "/f")


# Names that move.
def renamed(a, b):
    put(a + "/f"); there(b + "/f"); gone(b + "/g")
    os.rename(a + "/f", a + "/g")
    gone(b + "/f"); there(b + "/g")

def renamed_elsewhere(a, b):
    os.mkdir(a + "/d"); os.mkdir(a + "/e"); put(a + "/d/f"); there(b + "/d/f"); gone(b + "/e/f")
    os.rename(a + "/d/f", a + "/e/f")
    gone(b + "/d/f"); there(b + "/e/f")

def renamed_over(a, b):
    for i in range(30):
        put(a + "/new", b"%d" % i)
        os.rename(a + "/new", a + "/f")
        same(get(b + "/f"), b"%d" % i)
        same(os.stat(b + "/f").st_ino, os.stat(a + "/f").st_ino)

def renamed_victim(a, b):
    put(a + "/f"); put(a + "/g"); os.link(a + "/g", a + "/h"); same(os.stat(b + "/h").st_nlink, 2)
    os.rename(a + "/f", a + "/g")
    same(os.stat(b + "/h").st_nlink, 1, "links of what was replaced")

def exchanged(a, b):
    put(a + "/f", b"1"); put(a + "/g", b"2"); same((get(b + "/f"), get(b + "/g")), (b"1", b"2"))
    rename2(a + "/f", a + "/g", RENAME_EXCHANGE)
    same((get(b + "/f"), get(b + "/g")), (b"2", b"1"))

def renamed_directory(a, b):
    os.makedirs(a + "/p/q/r"); put(a + "/p/q/r/f"); there(b + "/p/q/r/f"); gone(b + "/p/s/r/f")
    os.rename(a + "/p/q", a + "/p/s")
    gone(b + "/p/q/r/f"); there(b + "/p/s/r/f")

def moved_directory_below(a, b):
    os.makedirs(a + "/d/e"); os.mkdir(a + "/n"); same(os.stat(b + "/n").st_nlink, 2); there(b + "/d/e")
    os.rename(a + "/d/e", a + "/n/e")
    same((os.stat(b + "/n").st_nlink, os.stat(b + "/d").st_nlink), (3, 2))

def working_directory(a, b):
    os.mkdir(a + "/d"); put(a + "/d/f")
    here = os.getcwd()
    os.chdir(b + "/d")
    try:
        there("f"); gone("g")
        os.rename(a + "/d", a + "/e")
        put(a + "/e/g")
        there("g")
        os.unlink(a + "/e/f")
        gone("f")
        there(b + "/e/g")
        same(os.getcwd(), b + "/e")
    finally: os.chdir(here)


# Attributes.
def mode(a, b):
    put(a + "/f")
    for m in [0o600, 0o4755, 0o644, 0o7777]:
        same(os.stat(b + "/f").st_mode == os.stat(b + "/f").st_mode, True)
        os.chmod(a + "/f", m)
        same(os.stat(b + "/f").st_mode & 0o7777, m)

def mode_of_open_file(a, b):
    put(a + "/f")
    with open(b + "/f") as f:
        for m in [0o600, 0o640, 0o644] * 5:
            os.fstat(f.fileno())
            os.chmod(a + "/f", m)
            same(os.fstat(f.fileno()).st_mode & 0o7777, m)

def owner(a, b):
    put(a + "/f"); os.stat(b + "/f"); os.chown(a + "/f", 12, 34)
    s = os.stat(b + "/f"); same((s.st_uid, s.st_gid), (12, 34))

def times(a, b):
    put(a + "/f"); os.stat(b + "/f"); os.utime(a + "/f", ns=(5, 7))
    s = os.stat(b + "/f"); same((s.st_atime_ns, s.st_mtime_ns), (5, 7))
    same(s.st_ctime_ns, os.stat(a + "/f").st_ctime_ns)

def directory_changes(a, b):
    os.mkdir(a + "/d"); before = os.stat(b + "/d").st_mtime_ns
    os.mkdir(a + "/d/e")
    s = os.stat(b + "/d"); same((s.st_nlink, s.st_mtime_ns > before), (3, True))
    same(s.st_mtime_ns, os.stat(a + "/d").st_mtime_ns)

def extended_attributes(a, b):
    put(a + "/f"); same(os.listxattr(b + "/f"), [])
    os.setxattr(a + "/f", "user.k", b"1"); same(os.getxattr(b + "/f", "user.k"), b"1")
    os.setxattr(a + "/f", "user.k", b"2"); same(os.getxattr(b + "/f", "user.k"), b"2")
    os.removexattr(a + "/f", "user.k"); fails(errno.ENODATA, lambda: os.getxattr(b + "/f", "user.k"))

def may_search(a, b):
    os.mkdir(a + "/d", 0o755); put(a + "/d/f")
    os.chmod(a, 0o755)
    look = lambda: os.path.exists(b + "/d/f") or os.stat(b + "/d/f")
    for _ in range(2): same(as_nobody(look), "True")
    os.chmod(a + "/d", 0o700)
    same(as_nobody(look), "EACCES")
    os.chmod(a + "/d", 0o711)
    same(as_nobody(look), "True")

def acl_lets_in(a, b):
    put(a + "/f", b"secret"); os.chmod(a, 0o755); os.chmod(a + "/f", 0o600)
    look = lambda: get(b + "/f")
    for _ in range(2): same(as_nobody(look), "EACCES")
    same(os.system(f"setfacl -m u:65534:r '{a}/f'"), 0)
    same(as_nobody(look), "b'secret'")
    same(os.system(f"setfacl -x u:65534 '{a}/f'"), 0)
    same(as_nobody(look), "EACCES")


# Sizes and bytes, without a close or an fsync in between.
def growing(a, b):
    with open(a + "/f", "wb", 0) as f:
        for i in range(1, 50):
            f.write(b"z" * 100)
            same(os.stat(b + "/f").st_size, 100 * i)

def growing_open(a, b):
    with open(a + "/f", "wb", 0) as w, open(b + "/f", "rb", 0) as r:
        for i in range(50):
            same(r.read(), b"", "at the end")
            w.write(b"%03d" % i)
            same(os.fstat(r.fileno()).st_size, 3 * (i + 1))
            same(r.read(), b"%03d" % i)

def cut(a, b):
    put(a + "/f", b"a" * 9000)
    with open(b + "/f", "rb", 0) as r:
        same(len(r.read()), 9000)
        for n in [5000, 10, 0, 7000]:
            os.truncate(a + "/f", n)
            same(os.stat(b + "/f").st_size, n)
            r.seek(0)
            same(len(r.read()), n)

def overwritten(a, b):
    put(a + "/f", b"0" * 8000)
    with open(a + "/f", "r+b", 0) as w, open(b + "/f", "rb", 0) as r:
        for i in range(50):
            c = b"%d" % (i % 10)
            w.seek(0); w.write(c * 8000)
            r.seek(0); same(r.read(), c * 8000)

def overwritten_read_ahead(a, b):
    put(a + "/f", b"0" * (12 * MIB))
    with open(b + "/f", "rb", 0) as r:
        for _ in range(16): same(r.read(256 * KIB), b"0" * (256 * KIB))
        with open(a + "/f", "r+b", 0) as w: os.pwrite(w.fileno(), b"1" * (8 * MIB), 4 * MIB)
        for _ in range(32): same(r.read(256 * KIB), b"1" * (256 * KIB))

def punched(a, b):
    put(a + "/f", b"1" * 16384); same(get(b + "/f"), b"1" * 16384)
    with open(a + "/f", "r+b") as w:
        same(libc.fallocate(w.fileno(), 3, ctypes.c_long(4096), ctypes.c_long(4096)), 0)
        same(get(b + "/f"), b"1" * 4096 + bytes(4096) + b"1" * 8192)

def modified(a, b):
    put(a + "/f"); last = os.stat(b + "/f").st_mtime_ns
    with open(a + "/f", "r+b", 0) as w:
        for _ in range(10):
            w.seek(0); w.write(b"y")
            now = os.stat(b + "/f").st_mtime_ns
            same(now > last, True, "a write is seen in the time of change")
            same(os.fstat(w.fileno()).st_mtime_ns, now, "both see the same")
            last = now

def written_by_turns(a, b):
    put(a + "/f", b"")
    with open(a + "/f", "r+b", 0) as x, open(b + "/f", "r+b", 0) as y:
        for i in range(40):
            w, r = (x, y) if i % 2 == 0 else (y, x)
            os.pwrite(w.fileno(), b"%02d" % i, 2 * i)
            same(os.fstat(r.fileno()).st_size, 2 * i + 2)
            same(os.pread(r.fileno(), 100, 2 * i), b"%02d" % i)

def appended_by_turns(a, b):
    with open(a + "/f", "ab", 0) as x, open(b + "/f", "ab", 0) as y:
        for i in range(40): (x, y)[i % 2].write(b"%03d\n" % i)
    same(get(b + "/f"), b"".join(b"%03d\n" % i for i in range(40)))

def appended_at_once(a, b):
    """Two programs on each mount append lines to one file: each line is there once and whole."""
    children = []
    for who, at in enumerate([a, b, a, b]):
        child = os.fork()
        if child == 0:
            with open(at + "/log", "ab", 0) as f:
                for i in range(50): f.write(b"%d %03d %s\n" % (who, i, b"x" * (i * 7 % 90)))
            os._exit(0)
        children.append(child)
    for child in children: same(os.waitpid(child, 0)[1], 0)
    lines = get(b + "/log").split(b"\n")
    same(lines.pop(), b"")
    same(sorted(lines), sorted(b"%d %03d %s" % (w, i, b"x" * (i * 7 % 90)) for w in range(4) for i in range(50)))
    for who in range(4):
        mine = [l for l in lines if l.startswith(b"%d " % who)]
        same(mine, sorted(mine), "in the order in which they were written")

def handed_over_by_lock(a, b):
    put(a + "/f", b"%08d" % 0)
    with open(a + "/f", "r+b", 0) as x, open(b + "/f", "r+b", 0) as y:
        for i in range(60):
            f = (x, y)[i % 2]
            fcntl.lockf(f, fcntl.LOCK_EX)
            same(int(os.pread(f.fileno(), 8, 0)), i)
            os.pwrite(f.fileno(), b"%08d" % (i + 1), 0)
            fcntl.lockf(f, fcntl.LOCK_UN)


def stopped_mount(a, b):
    """The daemon of b does not run for a while (STOP seconds, 6 unless told): others are held up for a term, not longer, and
    afterwards it tells nothing old."""
    put(a + "/f", b"old"); put(a + "/g"); os.mkdir(a + "/d")
    for _ in range(3): same((get(b + "/f"), os.path.exists(b + "/g"), os.listdir(b + "/d")), (b"old", True, []))
    mount = os.path.dirname(b)
    daemons = [int(p) for p in os.listdir("/proc") if p.isdigit() and command_line(p).split("\0")[:2][-1] == "mount" and mount in command_line(p)]
    same(len(daemons) > 0, True, "processes of the mount")
    end = time.monotonic() + float(os.environ.get("STOP", "6"))
    for p in daemons: os.kill(p, signal.SIGSTOP)
    try:
        began = time.monotonic()
        put(a + "/f", b"newer"); os.chmod(a + "/f", 0o600); os.unlink(a + "/g"); put(a + "/d/n")
        same(time.monotonic() - began < 5, True, f"held up for {time.monotonic() - began:.1f} s")
        time.sleep(max(0, end - time.monotonic()))
    finally:
        for p in daemons: os.kill(p, signal.SIGCONT)
    s = os.stat(b + "/f")
    same((s.st_size, s.st_mode & 0o777, get(b + "/f")), (5, 0o600, b"newer"))
    gone(b + "/g")
    same(os.listdir(b + "/d"), ["n"])
    os.chmod(b + "/f", 0o644); same(os.stat(a + "/f").st_mode & 0o777, 0o644)


def command_line(pid):
    try: return get(f"/proc/{pid}/cmdline").decode(errors="replace")
    except OSError: return ""


def random_steps(a, b):
    """Against a model: each step through one of the mounts at random, then everything is compared through the other."""
    seed = int(os.environ.get("SEED", time.time()))
    rng, model = random.Random(seed), {}
    try:
        for _ in range(300):
            at, other = (a, b) if rng.random() < 0.5 else (b, a)
            n, m, what = f"n{rng.randrange(6)}", f"n{rng.randrange(6)}", rng.randrange(7)
            if what == 0:
                data = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
                put(f"{at}/{n}", data)
                model[n] = [data, model[n][1] if n in model else 0o644]
            elif what == 1 and n in model: os.unlink(f"{at}/{n}"); del model[n]
            elif what == 2 and n in model: os.rename(f"{at}/{n}", f"{at}/{m}"); model[m] = model.pop(n)
            elif what == 3 and n in model: model[n][1] = rng.choice([0o600, 0o644, 0o711]); os.chmod(f"{at}/{n}", model[n][1])
            elif what == 4 and n in model:
                with open(f"{at}/{n}", "ab") as f: f.write(b"+")
                model[n][0] += b"+"
            elif what == 5 and n in model:
                size = rng.randrange(50)
                os.truncate(f"{at}/{n}", size)
                model[n][0] = model[n][0][:size].ljust(size, b"\0")
            elif what == 6: same(os.path.exists(f"{at}/{n}"), n in model)
            for i in range(6):
                p = f"{other}/n{i}"
                same(os.path.exists(p), f"n{i}" in model, p)
                if f"n{i}" in model:
                    s, (data, mode) = os.stat(p), model[f"n{i}"]
                    same((s.st_size, s.st_mode & 0o777, get(p)), (len(data), mode, data), p)
            same(sorted(os.listdir(other)), sorted(model))
    except BaseException:
        print(f"    SEED={seed}")
        raise


def main():
    one, two, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.umask(0o022)
    os.chmod(one, 0o755)
    cases = [f for n, f in globals().items() if callable(f) and getattr(f, "__code__", None) is not None
             and f.__code__.co_varnames[:2] == ("a", "b") and f.__code__.co_argcount == 2]
    passed = failed = 0
    for f in cases:
        if wanted and f.__name__ not in wanted: continue
        for way, (a, b) in {"1>2": (one, two), "2>1": (two, one)}.items():
            folder = f"/{f.__name__}-{way[0]}"
            try:
                os.mkdir(a + folder)
                f(a + folder, b + folder)
                passed += 1
            except Exception as e:
                failed += 1
                line = traceback.extract_tb(e.__traceback__)
                where = [l.lineno for l in line if l.name == f.__name__]
                print(f"FAILED: {f.__name__} {way} (line {where[-1] if where else '?'}): {e}", flush=True)
    print(f"coherence: {passed} passed, {failed} failed")
    sys.exit(failed != 0)


main()
