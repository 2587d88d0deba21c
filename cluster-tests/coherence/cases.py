"""Cases for `run`: each takes a mount that changes (a) and one that looks (b), in a folder of its own."""
import contextlib, ctypes, errno, fcntl, mmap, os, random, shutil, signal, sqlite3, stat, struct, subprocess, sys, threading, time, traceback

libc = ctypes.CDLL(None, use_errno=True)
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
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


def fails(code, call, *others):
    try: call()
    except OSError as e: return same(e.errno in (code, *others), True, errno.errorcode[e.errno])
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


def at_once(*calls):
    """The results, as text, of calls in processes of their own that run at the same time."""
    running = []
    for call in calls:
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try: os.write(w, repr(call()).encode()); code = 0
            except BaseException: traceback.print_exc()
            finally: os._exit(code)
        os.close(w)
        running.append((child, r))
    results = []
    for child, r in running:
        with os.fdopen(r) as f: results.append(f.read())
        same(os.waitpid(child, 0)[1], 0, "exit status")
    return results


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

def made_exclusively(a, b):
    """Of two who make the same name one wins, each time, and the other is told so."""
    for i in range(20):
        first, second = (a, b) if i % 2 else (b, a)
        gone(f"{second}/{i}")
        os.close(os.open(f"{first}/{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        fails(errno.EEXIST, lambda: os.open(f"{second}/{i}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        fails(errno.EEXIST, lambda: os.mkdir(f"{second}/{i}"))

def raced_for(a, b):
    """Two processes on each mount try to make the same names at once: each name has one maker."""
    count = 60
    def race(at):
        won = []
        for i in range(count):
            try: os.mkdir(f"{at}/{i}")
            except FileExistsError: continue
            won.append(i)
        return won
    won = sum((eval(r) for r in at_once(*[lambda at=at: race(at) for at in (a, b, a, b)])), [])
    same(sorted(won), list(range(count)))
    same((len(os.listdir(a)), len(os.listdir(b))), (count, count))

def made_by_opening(a, b):
    gone(b + "/f")
    with open(a + "/f", "wb", 0) as f:
        there(b + "/f"); same(os.stat(b + "/f").st_size, 0)
        f.write(b"x")
        same(get(b + "/f"), b"x")

def made_without_name(a, b):
    f = os.open(a, os.O_TMPFILE | os.O_RDWR, 0o644)
    try:
        os.write(f, b"content"); same(os.listdir(b), []); gone(b + "/f")
        os.link(f"/proc/self/fd/{f}", a + "/f", src_dir_fd=0, follow_symlinks=True)
        same(get(b + "/f"), b"content"); same(os.listdir(b), ["f"])
    finally: os.close(f)

def longest_name(a, b):
    n = "n" * 255
    gone(f"{b}/{n}"); put(f"{a}/{n}"); there(f"{b}/{n}"); same(os.listdir(b), [n])
    os.rename(f"{a}/{n}", f"{a}/{'m' * 255}")
    gone(f"{b}/{n}"); same(os.listdir(b), ["m" * 255])

def deep_tree(a, b):
    path = "/".join("d%d" % i for i in range(30))
    gone(f"{b}/{path}"); os.makedirs(f"{a}/{path}"); put(f"{a}/{path}/f", b"deep")
    same(get(f"{b}/{path}/f"), b"deep")
    os.rename(f"{a}/d0/d1", f"{a}/d0/e1")
    gone(f"{b}/{path}/f"); same(get(f"{b}/{path.replace('/d1/', '/e1/', 1)}/f"), b"deep")

def link_that_dangles(a, b):
    os.symlink("target", a + "/l")
    same(os.path.exists(b + "/l"), False); put(a + "/target", b"1"); same(get(b + "/l"), b"1")
    os.unlink(a + "/target"); fails(errno.ENOENT, lambda: get(b + "/l"))
    os.unlink(a + "/l"); os.symlink("other", a + "/l"); same(os.readlink(b + "/l"), "other")
    os.unlink(a + "/l"); put(a + "/l"); fails(errno.EINVAL, lambda: os.readlink(b + "/l"))


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

def file_becomes_directory(a, b):
    put(a + "/n", b"1"); same(get(b + "/n"), b"1")
    os.unlink(a + "/n"); os.mkdir(a + "/n"); put(a + "/n/f")
    same(os.listdir(b + "/n"), ["f"]); fails(errno.EISDIR, lambda: get(b + "/n"))
    os.unlink(a + "/n/f"); os.rmdir(a + "/n"); put(a + "/n", b"2")
    same(get(b + "/n"), b"2"); fails(errno.ENOTDIR, lambda: os.listdir(b + "/n"))

def removed_tree(a, b):
    for i in range(5):
        os.makedirs(f"{a}/t/{i}/x")
        for j in range(5): put(f"{a}/t/{i}/x/{j}")
    same(sum(len(f) for _, _, f in os.walk(b + "/t")), 25)
    shutil.rmtree(a + "/t")
    gone(b + "/t"); gone(b + "/t/3/x/3")

def not_empty_any_more(a, b):
    os.mkdir(a + "/d"); same(os.listdir(b + "/d"), [])
    put(a + "/d/f"); fails(errno.ENOTEMPTY, lambda: os.rmdir(b + "/d"))
    os.unlink(a + "/d/f"); os.rmdir(b + "/d"); gone(a + "/d")

def removed_open_directory(a, b):
    os.mkdir(a + "/d"); there(b + "/d")
    d = os.open(b + "/d", os.O_RDONLY)
    try:
        same(os.listdir(d), [])
        os.rmdir(a + "/d")
        nothing_in(d)
    finally: os.close(d)

def nothing_in(d):
    """Of the descriptor of a removed directory: as on a local disk."""
    for call in (
        lambda: os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=d), lambda: os.mkdir("f", dir_fd=d), lambda: os.stat("x", dir_fd=d),
        lambda: os.unlink("x", dir_fd=d), lambda: os.rmdir("x", dir_fd=d), lambda: os.open("x", os.O_RDONLY | os.O_DIRECTORY, dir_fd=d),
        lambda: os.rename("x", "y", src_dir_fd=d, dst_dir_fd=d), lambda: os.symlink("to", "f", dir_fd=d)):
        fails(errno.ENOENT, call)
    # By the transport that has no such files it is not asked for.
    fails(errno.ENOENT, lambda: os.open(".", os.O_TMPFILE | os.O_RDWR, dir_fd=d), errno.EOPNOTSUPP)
    same((os.fstat(d).st_nlink, os.stat(".", dir_fd=d).st_nlink, os.listdir(d)), (0, 0, []))
    os.fchmod(d, 0o700); os.utime(d, ns=(5, 6)); os.fsync(d)
    same((os.fstat(d).st_mode & 0o7777, os.fstat(d).st_atime_ns, os.fstat(d).st_mtime_ns), (0o700, 5, 6))
    again = os.open(".", os.O_RDONLY, dir_fd=d)
    same((os.listdir(again), os.fstat(again).st_ino), ([], os.fstat(d).st_ino)); os.close(again)

def removed_above_an_open_directory(a, b):
    """".." of a removed directory leads to what was above it, removed as well."""
    os.makedirs(a + "/d/e/f")
    d, f = os.open(b + "/d", os.O_RDONLY), os.open(b + "/d/e/f", os.O_RDONLY)
    try:
        names = os.listdir(d)
        shutil.rmtree(a + "/d")
        nothing_in(f)
        up = os.open("..", os.O_RDONLY, dir_fd=f)
        same((names, os.listdir(up), os.fstat(up).st_nlink), (["e"], [], 0)); os.close(up)
        nothing_in(d)
        fails(errno.ENOENT, lambda: os.rmdir(b + "/d/e"))
    finally: os.close(d); os.close(f)

def renamed_over_an_open_directory(a, b):
    os.mkdir(a + "/d"); os.mkdir(a + "/e"); put(a + "/e/f")
    d = os.open(b + "/d", os.O_RDONLY)
    try:
        same(os.listdir(d), [])
        os.rename(a + "/e", a + "/d")
        nothing_in(d)
        same(os.listdir(b + "/d"), ["f"])
    finally: os.close(d)

def tree_removed_by_both(a, b):
    """Two programs remove one tree: all of it goes, and neither complains."""
    for deep in ("e", "e/f/g/h/i/j"):
        for i in range(12):
            os.makedirs(f"{a}/t/{i}/{deep}")
            for j in range(12): put(f"{a}/t/{i}/{deep}/{j}")
        rm = lambda at: lambda: subprocess.run(["rm", "-rf", at + "/t"], capture_output=True, text=True)
        for r in at_once(*[lambda at=at: (lambda p: (p.returncode, p.stderr))(rm(at)()) for at in (a, b)]):
            same(eval(r), (0, ""), deep)
        gone(a + "/t"); gone(b + "/t")

def written_after_removal(a, b):
    """Both have the file open; the name goes; what one writes the other reads until the last has closed it."""
    put(a + "/f", b"old")
    with open(a + "/f", "r+b", 0) as x, open(b + "/f", "r+b", 0) as y:
        os.unlink(a + "/f"); gone(b + "/f")
        for i in range(20):
            w, r = (x, y) if i % 2 else (y, x)
            os.pwrite(w.fileno(), b"%03d" % i, 3 * i); same(os.pread(r.fileno(), 3, 3 * i), b"%03d" % i)
            same(os.fstat(r.fileno()).st_size, 3 * i + 3)


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

def not_renamed_over(a, b):
    put(a + "/f", b"1"); gone(b + "/g"); put(b + "/g", b"2")
    fails(errno.EEXIST, lambda: rename2(a + "/f", a + "/g", RENAME_NOREPLACE))
    os.unlink(b + "/g"); rename2(a + "/f", a + "/g", RENAME_NOREPLACE)
    same(get(b + "/g"), b"1"); gone(b + "/f")

def renamed_over_directory(a, b):
    os.mkdir(a + "/d"); os.mkdir(a + "/e"); put(a + "/d/f"); same(os.listdir(b + "/e"), [])
    os.rename(a + "/d", a + "/e")
    same(os.listdir(b + "/e"), ["f"]); gone(b + "/d")
    os.mkdir(a + "/d"); fails(errno.ENOTEMPTY, lambda: os.rename(b + "/d", b + "/e"))

def renamed_while_open(a, b):
    put(a + "/f", b"1")
    with open(b + "/f", "r+b", 0) as f:
        os.rename(a + "/f", a + "/g"); gone(b + "/f")
        os.pwrite(f.fileno(), b"22", 0)
        same((get(a + "/g"), os.stat(a + "/g").st_ino), (b"22", os.fstat(f.fileno()).st_ino))

def claimed_by_rename(a, b):
    """Both rename each file to the same new name: one succeeds, the other is told that it is gone."""
    if os.environ.get("NAMES_ARE_KEPT"): return print("skipped: not told apart where the kernel keeps names (docs/posix.md)")
    count = 150
    for d in "pq": os.mkdir(f"{a}/{d}")
    for i in range(count): put(f"{a}/p/{i}")
    def claim(at):
        won = []
        os.chdir(at)
        for i in range(count):
            try: os.rename(f"p/{i}", f"q/{i}")
            except FileNotFoundError: continue
            won.append(i)
        return won
    won = [eval(r) for r in at_once(lambda: claim(a), lambda: claim(b))]
    same(sorted(won[0] + won[1]), list(range(count)))
    same((os.listdir(b + "/p"), len(os.listdir(b + "/q"))), ([], count))

def claimed_within_a_folder(a, b):
    """Likewise within one folder, over a name that is there, by programs that stand in it."""
    if os.environ.get("NAMES_ARE_KEPT"): return print("skipped: not told apart where the kernel keeps names (docs/posix.md)")
    count = 150
    for i in range(count): put(f"{a}/{i}"); put(f"{a}/{i}.mine")
    def claim(at):
        won = []
        os.chdir(at)
        for i in range(count):
            try: os.stat(f"{i}.mine"); os.rename(f"{i}", f"{i}.mine")
            except FileNotFoundError: continue
            won.append(i)
        return won
    won = [eval(r) for r in at_once(lambda: claim(a), lambda: claim(b))]
    same(sorted(won[0] + won[1]), list(range(count)))

def turned_in_a_circle(a, b):
    """Three names change places for a while, from both mounts: what is behind each is always known to both."""
    for n in "xyz": put(f"{a}/{n}", n.encode())
    held = list("xyz")
    for i in range(30):
        at, other = (a, b) if i % 2 else (b, a)
        p, q = [("x", "y"), ("y", "z"), ("z", "x")][i % 3]
        rename2(f"{at}/{p}", f"{at}/{q}", RENAME_EXCHANGE)
        j, k = "xyz".index(p), "xyz".index(q)
        held[j], held[k] = held[k], held[j]
        same([get(f"{other}/{n}").decode() for n in "xyz"], held)

def atomic_replacement(a, b):
    """A name that is replaced all the time is there all the time, with the whole of one of its contents."""
    put(a + "/f", b"0" * 5000)
    def replace():
        for i in range(150):
            put(a + "/new", b"%d" % (i % 10) * 5000); os.rename(a + "/new", a + "/f")
    def look(at):
        for _ in range(400):
            data = get(at + "/f")
            same((len(data), len(set(data))), (5000, 1))
    at_once(replace, lambda: look(b), lambda: look(b), lambda: look(a))

def link_that_is_replaced(a, b):
    """Likewise a symbolic link."""
    for d in "xy": os.mkdir(f"{a}/{d}"); put(f"{a}/{d}/f", d.encode())
    os.symlink("x", a + "/current")
    def replace():
        for i in range(150): os.symlink("yx"[i % 2], a + "/new"); os.rename(a + "/new", a + "/current")
    def look(at):
        for _ in range(300): same(get(at + "/current/f") in (b"x", b"y"), True); os.stat(at + "/current")
    at_once(replace, lambda: look(b), lambda: look(b), lambda: look(a))


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

def looked_up_by_a_starved_program(a, b):
    """It shares its processor with some that go before it, and takes in late what it was told of a file that its kernel did not have.
    The change may not return before: it is waited for, up to 4 s."""
    cpus, wait, busy = os.sched_getaffinity(0), random.Random(5), []
    cpu = {min(cpus)}
    def all_busy(signal):
        for p in busy: os.kill(p, signal)
    try:
        for _ in range(6):
            busy.append(os.fork())
            if busy[-1] == 0:
                os.sched_setaffinity(0, cpu)
                while True: pass
        for i in range(25):
            all_busy(signal.SIGSTOP)
            os.mknod(f"{a}/f{i}", 0o644)
            r, w = os.pipe()
            child = os.fork()
            if child == 0:
                os.sched_setaffinity(0, cpu); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                os.write(w, b"!")
                fd = os.open(f"{b}/f{i}", os.O_PATH)
                began = time.monotonic()
                os.write(w, f"{began} {os.fstat(fd).st_mode & 0o777:o}".encode())
                os._exit(0)
            os.close(w); os.read(r, 1)
            ended = []
            def change():
                os.chmod(f"{a}/f{i}", 0o600)
                ended.append(time.monotonic())
            changing = threading.Thread(target=change)
            all_busy(signal.SIGCONT)
            time.sleep(wait.uniform(0, 0.01))
            changing.start()
            changing.join(2)
            time.sleep(0.15)
            os.sched_setscheduler(child, os.SCHED_OTHER, os.sched_param(0)); os.sched_setaffinity(child, cpus)
            all_busy(signal.SIGSTOP)
            changing.join()
            os.waitpid(child, 0)
            with os.fdopen(r) as f: began, mode = f.read().split()
            late = float(began) - ended[0]
            same(late < 0 or mode == "600", True, f"file {i} had {mode} {late:.6f} s after the change")
    finally:
        all_busy(signal.SIGKILL)
        for p in busy: os.waitpid(p, 0)

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

def group_is_inherited(a, b):
    os.mkdir(a + "/d"); same(os.stat(b + "/d").st_gid, 0)
    os.chown(a + "/d", 0, 77); os.chmod(a + "/d", 0o2755)
    put(b + "/d/f"); same(os.stat(a + "/d/f").st_gid, 77)

def write_takes_set_uid(a, b):
    put(a + "/f"); os.chmod(a + "/f", 0o6777); os.chmod(a, 0o755); same(os.stat(b + "/f").st_mode & 0o7777, 0o6777)
    same(as_nobody(lambda: open(a + "/f", "ab", 0).write(b"y")), "1")
    same(os.stat(b + "/f").st_mode & 0o7777, 0o777)

def sticky(a, b):
    os.mkdir(a + "/d"); os.chmod(a + "/d", 0o777); os.chmod(a, 0o755); put(a + "/d/f"); put(a + "/d/g")
    same(as_nobody(lambda: os.unlink(b + "/d/g")), "None")
    os.chmod(a + "/d", 0o1777)
    same(as_nobody(lambda: os.unlink(b + "/d/f")), "EPERM")

def read_only_now(a, b):
    put(a + "/f", b"1"); os.chmod(a, 0o755); os.chmod(a + "/f", 0o666)
    look = lambda: open(b + "/f", "r+b").close()
    for _ in range(2): same(as_nobody(look), "None")
    os.chmod(a + "/f", 0o444)
    same(as_nobody(look), "EACCES")

def default_acl(a, b):
    os.mkdir(a + "/d"); os.chmod(a, 0o755); os.chmod(a + "/d", 0o755); put(b + "/d/before"); os.chmod(b + "/d/before", 0o600)
    same(os.system(f"setfacl -d -m u:65534:r '{a}/d'"), 0)
    os.close(os.open(b + "/d/after", os.O_CREAT | os.O_WRONLY, 0o640))
    same((as_nobody(lambda: get(a + "/d/after")), as_nobody(lambda: get(a + "/d/before"))), ("b''", "EACCES"))

def attributes_of_directory(a, b):
    os.mkdir(a + "/d"); same((os.stat(b + "/d").st_mode & 0o777, os.listxattr(b + "/d")), (0o755, []))
    os.chmod(a + "/d", 0o711); os.chown(a + "/d", 3, 4); os.utime(a + "/d", ns=(11, 13)); os.setxattr(a + "/d", "user.k", b"v" * 3000)
    s = os.stat(b + "/d")
    same((s.st_mode & 0o777, s.st_uid, s.st_gid, s.st_mtime_ns, os.getxattr(b + "/d", "user.k")), (0o711, 3, 4, 13, b"v" * 3000))

def links_share_attributes(a, b):
    put(a + "/f", b"1"); os.link(a + "/f", a + "/g"); same((os.stat(b + "/g").st_mode & 0o777, get(b + "/g")), (0o644, b"1"))
    os.chmod(a + "/f", 0o600); same(os.stat(b + "/g").st_mode & 0o777, 0o600)
    with open(a + "/f", "wb", 0) as f: f.write(b"22"); same((os.stat(b + "/g").st_size, get(b + "/g")), (2, b"22"))
    os.unlink(a + "/f"); same((os.stat(b + "/g").st_nlink, get(b + "/g")), (1, b"22"))


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
    def append(at, who):
        with open(at + "/log", "ab", 0) as f:
            for i in range(50): f.write(b"%d %03d %s\n" % (who, i, b"x" * (i * 7 % 90)))
    at_once(*[lambda at=at, who=who: append(at, who) for who, at in enumerate((a, b, a, b))])
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

def emptied_by_opening(a, b):
    put(a + "/f", b"1" * 5000)
    with open(b + "/f", "rb", 0) as r:
        same(len(r.read()), 5000)
        open(a + "/f", "wb").close()
        same(os.fstat(r.fileno()).st_size, 0); r.seek(0); same(r.read(), b"")

def reserved(a, b):
    put(a + "/f", b"1"); same(os.stat(b + "/f").st_size, 1)
    with open(a + "/f", "r+b", 0) as f:
        os.posix_fallocate(f.fileno(), 0, 70000)
        same((os.stat(b + "/f").st_size, get(b + "/f")), (70000, b"1" + bytes(69999)))

def copied_within(a, b):
    put(a + "/f", b"1" * 100000); put(a + "/g", b"2" * 200000); same(get(b + "/g"), b"2" * 200000)
    with open(a + "/f", "rb") as f, open(a + "/g", "r+b") as g:
        same(os.copy_file_range(f.fileno(), g.fileno(), 100000, 0, 50000), 100000)
        same(get(b + "/g"), b"2" * 50000 + b"1" * 100000 + b"2" * 50000)

def mapped(a, b):
    """What one stores in a mapping the other reads after msync."""
    put(a + "/f", bytes(8192)); same(get(b + "/f"), bytes(8192))
    with open(a + "/f", "r+b") as f, mmap.mmap(f.fileno(), 8192) as m:
        for i in range(20):
            m[i * 400:i * 400 + 4] = b"%04d" % i
            m.flush()
            same(get(b + "/f")[i * 400:i * 400 + 4], b"%04d" % i)

def mapped_anew(a, b):
    """What one writes the other sees in a mapping that it makes afterwards."""
    for i in range(20):
        put(a + "/f", b"%04d" % i * 2048)
        with open(b + "/f", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m: same(m[:], b"%04d" % i * 2048)

def mapped_before_it_is_written(a, b):
    """A mapping that was looked at before shows what the other one writes: at once while nobody had the file open for writing, and soon
    in any case."""
    put(a + "/f", bytes(4 * 4096)); time.sleep(0.3)
    with open(b + "/f", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        same(m[:], bytes(4 * 4096))
        with open(a + "/f", "r+b", 0) as w:
            os.pwrite(w.fileno(), b"new!", 4096)
            same(m[4096:4100], b"new!")
            for i in range(10):
                os.pwrite(w.fileno(), b"%04d" % i, 8192)
                end = time.time() + 5
                while m[8192:8196] != b"%04d" % i and time.time() < end: time.sleep(0.02)
                same(m[8192:8196], b"%04d" % i)
        same(m[:8], bytes(8))

def stored_beside_the_others_write(a, b):
    """What one has written into a page, and what the other stores to another part of it afterwards, are both there, though the page was
    mapped before."""
    for i in range(10):
        put(a + "/f", b"." * 4096)
        with open(a + "/f", "r+b") as f, mmap.mmap(f.fileno(), 4096) as m:
            same(m[:3], b"...")
            with open(b + "/f", "r+b", 0) as w:
                os.pwrite(w.fileno(), b"B" * 100, 0); os.fsync(w.fileno())
            m[4000:4003] = b"AAA"; m.flush()
            same(m[:3], b"BBB")
        data = get(b + "/f")
        same((data[:100], data[100:4000], data[4000:4003]), (b"B" * 100, b"." * 3900, b"AAA"))

def halves_of_a_page(a, b):
    """Two fill their own halves of one array through mappings. The border is inside of a page."""
    n, half = 16384, 8292
    put(a + "/f", bytes(n))
    with open(a + "/f", "r+b") as f, open(b + "/f", "r+b") as g, mmap.mmap(f.fileno(), n) as x, mmap.mmap(g.fileno(), n) as y:
        x[:half] = b"a" * half; y[half:] = b"b" * (n - half)
        x.flush(); y.flush()
    for at in (a, b):
        data = get(at + "/f")
        same((data[:half].count(b"a"), data[half:].count(b"b")), (half, n - half))

def stored_and_cut(a, b):
    """A page that one has stored to does not bring back what the other one cut."""
    put(a + "/f", b"." * 20000)
    with open(a + "/f", "r+b") as f:
        m = mmap.mmap(f.fileno(), 20000)
        m[17000] = 65; m[4000] = 66
        os.truncate(b + "/f", 5000)
        same(os.stat(b + "/f").st_size, 5000)
        if (child := os.fork()) == 0:
            m.flush(); os._exit(0)
        os.waitpid(child, 0)
        for at in (b, a): same(os.stat(at + "/f").st_size, 5000)
        for at in (b, a): same((get(at + "/f")[3999:4002], len(get(at + "/f"))), (b".B.", 5000))
        m.close()

def stored_and_read(a, b):
    """read(2) and stat(2) of the other one show what was stored, without msync."""
    put(a + "/f", bytes(8192))
    with open(a + "/f", "r+b") as f, mmap.mmap(f.fileno(), 8192) as m:
        for i in range(20):
            m[i * 400:i * 400 + 4] = b"%04d" % i
            same(get(b + "/f")[i * 400:i * 400 + 4], b"%04d" % i)

def counted_in_a_mapping(a, b):
    """Four programs count in one page, two on each mount, under a lock of the file, each kind in turn: no count is lost."""
    def flock(f, how): fcntl.flock(f, how)
    def posix(f, how): fcntl.lockf(f, how)
    for lock in flock, posix:
        put(a + "/f", bytes(4096))
        def count(at, n):
            with open(at + "/f", "r+b") as f, mmap.mmap(f.fileno(), 4096) as m:
                for _ in range(40):
                    lock(f, fcntl.LOCK_EX)
                    m[:8] = (int.from_bytes(m[:8], "little") + 1).to_bytes(8, "little")
                    m[8 + n] = m[8 + n] + 1
                    lock(f, fcntl.LOCK_UN)
        at_once(*[lambda at=at, n=n: count(at, n) for n, at in enumerate((a, b, a, b))])
        for at in (a, b): same((int.from_bytes(get(at + "/f")[:8], "little"), get(at + "/f")[8:12]), (160, bytes([40] * 4)), lock.__name__)

def mapped_and_written_in_turns(a, b):
    """Random stores, writes, appends, cuts, holes and looks on both mounts, each under a lock of the file: all see what the last one left."""
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    r, most = random.Random(seed), 64 << 10
    put(a + "/f", bytes(most))
    model = bytearray(most)
    fds = [os.open(at + "/f", os.O_RDWR) for at in (a, b)]
    maps = [mmap.mmap(fd, most) for fd in fds]
    try:
        for step in range(250):
            k = r.randrange(2)
            fd, m = fds[k], maps[k]
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = len(model)
            # So far a mapping reaches.
            same(os.fstat(fd).st_size, size, f"size before {step}")
            at = r.randrange(size); n = min(r.choice((1, 30, 5000)), size - at)
            data = bytes([r.randrange(1, 256)]) * n
            what = r.randrange(8)
            if what < 3: m[at:at + n] = data; model[at:at + n] = data
            elif what == 3: os.pwrite(fd, data, at); model[at:at + n] = data
            elif what == 4 and size + n <= most: os.pwrite(fd, data, size); model += data
            elif what == 5:
                new = r.randrange(most // 2, most + 1)
                os.ftruncate(fd, new); model = model[:new].ljust(new, b"\0")
            elif what == 6 and libc.fallocate(fd, 3, ctypes.c_long(at), ctypes.c_long(n)) == 0: model[at:at + n] = bytes(n)
            size = len(model)
            same(os.fstat(fd).st_size, size, f"size at {step}")
            at = r.randrange(size); n = min(20000, size - at)
            same(m[at:at + n] == model[at:at + n], True, f"mapping at step {step}")
            same(os.pread(fd, n, at) == model[at:at + n], True, f"read at step {step}")
            fcntl.flock(fd, fcntl.LOCK_UN)
    except BaseException:
        print(f"    SEED={seed}")
        raise
    finally:
        for m in maps: m.close()
        for fd in fds: os.close(fd)
    for at in (a, b): same(get(at + "/f") == model, True, "at the end")

# Memory mappings of both, without any lock.
LASTS = float(os.environ.get("LASTS", 3))

def for_a_while(*calls, lasts=None):
    """Runs calls, each in a process of its own, again and again for as long as that; they get a rising number. Returns how often each ran."""
    counts, children = mmap.mmap(-1, 4096), []
    for k, call in enumerate(calls):
        child = os.fork()
        if child == 0:
            try:
                end, n = time.time() + (lasts or LASTS), 0
                while time.time() < end:
                    n += 1
                    call(n)
                    counts[8 * k:8 * k + 8] = n.to_bytes(8, "little")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    late = time.time() + (lasts or LASTS) + 120
    while any(os.waitid(os.P_PID, c, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for c in children):
        same(time.time() < late, True, "a program stands still: in time")
        time.sleep(0.02)
    same([os.waitpid(c, 0)[1] for c in children], [0] * len(children), "ends")
    done = [int.from_bytes(counts[8 * k:8 * k + 8], "little") for k in range(len(calls))]
    print("    per second: " + ", ".join(f"{n / (lasts or LASTS):.0f}" for n in done))
    return done

def storing(path, places):
    """A call for `for_a_while` that stores a number into bytes of a file, through a mapping, and finds there what it stored last."""
    state = {}
    def call(n):
        if not state:
            fd = os.open(path, os.O_RDWR)
            state["m"] = mmap.mmap(fd, 0)
        m = state["m"]
        for at in places:
            if n > 1: same(m[at], (n - 1) % 251, f"byte {at} before store {n}")
            m[at] = n % 251
    return call

def stored_by_both(a, b):
    """Two store to alternating bytes of one page, without a lock: each finds what it stored last, and all is there at the end."""
    put(a + "/f", bytes(4096))
    done = for_a_while(storing(a + "/f", range(0, 4096, 64)), storing(b + "/f", range(32, 4096, 64)))
    same(min(done) >= 5 * LASTS, True, f"progress of both: {done}")
    for at in (a, b):
        data = get(at + "/f")
        same((set(data[0::64]), set(data[32::64])), ({done[0] % 251}, {done[1] % 251}), at)

def stored_beside_writes(a, b):
    """One stores, the other writes with write(2) between the bytes that are stored, and reads what it wrote."""
    put(a + "/f", bytes(4096))
    fd = os.open(b + "/f", os.O_RDWR)
    def write(n):
        at = 8 * (n % 500) + 16
        data = n.to_bytes(7, "little")
        os.pwrite(fd, data, at)
        same(os.pread(fd, 7, at), data, f"write {n}")
    done = for_a_while(storing(a + "/f", range(7, 4096, 512)), write)
    same(min(done) >= 5 * LASTS, True, f"progress of both: {done}")
    want = bytearray(4096)
    for n in range(1, done[1] + 1): want[8 * (n % 500) + 16:8 * (n % 500) + 23] = n.to_bytes(7, "little")
    for at in range(7, 4096, 512): want[at] = done[0] % 251
    os.close(fd)
    for at in (a, b): same(get(at + "/f") == want, True, at)

def stored_beside_cuts_and_holes(a, b):
    """One stores to the first page. The other cuts the file behind it, makes it long again, writes there, and makes holes; it finds there
    what it left, never what was cut off."""
    put(a + "/f", bytes(16384))
    fd = os.open(b + "/f", os.O_RDWR)
    def change(n):
        os.ftruncate(fd, 5000)
        same(os.fstat(fd).st_size, 5000)
        os.pwrite(fd, b"end", 12000)
        same(os.pread(fd, 7003, 5000), bytes(7000) + b"end", f"what was cut off at {n}")
        os.pwrite(fd, b"%08d" % n, 4000)
        if n % 5 == 0: same(libc.fallocate(fd, 3, ctypes.c_long(2048), ctypes.c_long(1024)), 0)
    done = for_a_while(storing(a + "/f", range(0, 2000, 100)), change)
    same(min(done) >= 2 * LASTS, True, f"progress of both: {done}")
    os.close(fd)
    for at in (a, b):
        data = get(at + "/f")
        same((len(data), set(data[0:2000:100]), data[4000:4008]), (12003, {done[0] % 251}, b"%08d" % done[1]), at)

def stored_to_pages_that_the_kernel_drops(a, b):
    """Two store to the same pages, and on both mounts the kernel drops these by itself all the time: for want of memory, because the file is
    opened again, written with write(2), or truncated to where it ends. Then they are asked for while they are taken back for the other
    mount."""
    pages = 16
    size = 4096 * pages
    for name in ("dropped", "opened", "written", "cut"):
        paths = [at + "/" + name for at in (a, b)]
        put(paths[0], bytes(size))
        fds = [os.open(p, os.O_RDWR) for p in paths]
        def dropping(k):
            def call(n):
                fd = fds[k]
                if name == "dropped": os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                elif name == "opened": os.close(os.open(paths[k], os.O_RDWR))
                elif name == "written": os.pwrite(fd, n.to_bytes(8, "little"), 4096 * (n % pages) + 200 + 8 * k)
                else: os.ftruncate(fd, size)
                time.sleep(0.001)
            return call
        done = for_a_while(*(storing(paths[k], range(8 * k, size, 512)) for k in (0, 1)), dropping(0), dropping(1))
        same(min(done) >= 2 * LASTS, True, f"{name}: progress of all: {done}")
        for fd in fds: os.close(fd)
        for p in paths:
            data = get(p)
            same([set(data[8 * k::512]) for k in (0, 1)], [{n % 251} for n in done[:2]], p)
            if name == "written":
                for k in (0, 1):
                    for n in range(max(1, done[2 + k] - pages + 1), done[2 + k] + 1):
                        at = 4096 * (n % pages) + 200 + 8 * k
                        same(int.from_bytes(data[at:at + 8], "little"), n, f"write {n} of {k}")

def looked_at_beside_writes(a, b):
    """A mapping that is only read shows what the other mount's write(2) has returned from, at once; the same with what it stores, once
    read(2) shows it."""
    put(a + "/f", bytes(8192))
    asks, answers = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(asks[1])
            with open(b + "/f", "rb", 0) as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                same(m[:8], bytes(8))
                os.write(answers[1], b"r")
                while (line := os.read(asks[0], 1)) == b"?": os.write(answers[1], m[100:108])
                if line:
                    read = os.pread(f.fileno(), 8, 5000)
                    same(m[5000:5008], read, "a mapping and read(2)")
                    os.write(answers[1], read)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    try:
        same(os.read(answers[0], 1), b"r")
        with open(a + "/f", "r+b", 0) as w, mmap.mmap(w.fileno(), 0) as m:
            begin = time.time()
            for n in range(100):
                os.pwrite(w.fileno(), b"%08d" % n, 100)
                os.write(asks[1], b"?")
                same(os.read(answers[0], 8), b"%08d" % n, "the mapping")
            print(f"    {100 / (time.time() - begin):.0f} writes that are seen a second")
            m[5000:5008] = b"stored!!"
            os.write(asks[1], b".")
            same(os.read(answers[0], 8), b"stored!!")
    finally:
        for fd in (asks[0], asks[1], answers[0], answers[1]): os.close(fd)
        same(os.waitpid(child, 0)[1], 0, "who looks")

def appended_beside_stores(a, b):
    """One stores to the last page, to which the other appends, so that the page has to be read again and again."""
    put(a + "/f", bytes(100))
    fd = os.open(b + "/f", os.O_WRONLY | os.O_APPEND)
    done = for_a_while(storing(a + "/f", range(0, 100, 9)), lambda n: os.write(fd, b"%08d" % n))
    os.close(fd)
    same(min(done) >= 5 * LASTS, True, f"progress of both: {done}")
    for at in (a, b):
        data = get(at + "/f")
        same((set(data[0:100:9]), data[100:]), ({done[0] % 251}, b"".join(b"%08d" % n for n in range(1, done[1] + 1))), at)

def databases_with_a_shared_index(a, b):
    """SQLite keeps the index of its write-ahead log in a mapping that all its users share: of two who commit no row is lost."""
    with sqlite3.connect(a + "/db") as c:
        same(c.execute("pragma journal_mode=wal").fetchone(), ("wal",))
        c.execute("create table t(who, n)")
    c.close()
    def commit(at, who):
        c = sqlite3.connect(at + "/db", timeout=60)
        for i in range(25):
            c.execute("insert into t values(?, ?)", (who, i)); c.commit()
        c.close()
    at_once(lambda: commit(a, 1), lambda: commit(b, 2))
    for at in (b, a):
        c = sqlite3.connect(at + "/db")
        same(c.execute("select who, count(*) from t group by who order by who").fetchall(), [(1, 25), (2, 25)])
        same(c.execute("pragma integrity_check").fetchone(), ("ok",))
        c.close()

def direct(a, b):
    put(a + "/f", b"0" * 8192)
    x, y = os.open(a + "/f", os.O_RDWR | os.O_DIRECT), os.open(b + "/f", os.O_RDWR)
    page = mmap.mmap(-1, 4096)
    try:
        for i in range(20):
            os.pwrite(y, b"%04d" % i * 1024, 0); os.preadv(x, [page], 0); same(page[:], b"%04d" % i * 1024)
            page[:] = b"%04d" % (i + 50) * 1024
            os.pwritev(x, [page], 4096); same(os.pread(y, 4096, 4096), b"%04d" % (i + 50) * 1024)
    finally: os.close(x); os.close(y); page.close()

def holes_of_others(a, b):
    with open(a + "/f", "wb", 0) as w:
        os.pwrite(w.fileno(), b"x" * 4096, 8 * MIB)
        with open(b + "/f", "rb", 0) as r:
            same(os.lseek(r.fileno(), 0, os.SEEK_DATA) <= 8 * MIB, True)
            same(os.pread(r.fileno(), 4096, 8 * MIB), b"x" * 4096)
            same(os.pread(r.fileno(), 4096, 4 * MIB), bytes(4096))
            os.pwrite(w.fileno(), b"y" * 4096, 4 * MIB)
            same(os.pread(r.fileno(), 4096, 4 * MIB), b"y" * 4096)
            same(os.lseek(r.fileno(), 4 * MIB, os.SEEK_DATA), 4 * MIB)

def different_parts(a, b):
    """Two on each mount write every fourth block of one file at once."""
    put(a + "/f", b"")
    def write(at, who):
        with open(at + "/f", "r+b", 0) as f:
            for i in range(who, 200, 4): os.pwrite(f.fileno(), b"%03d" % i * 1000, 3000 * i)
    at_once(*[lambda at=at, who=who: write(at, who) for who, at in enumerate((a, b, a, b))])
    want = b"".join(b"%03d" % i * 1000 for i in range(200))
    same(get(a + "/f") == want, True, "first mount"); same(get(b + "/f") == want, True, "second mount")


# Locks.
def whole_file_lock(a, b):
    put(a + "/f")
    with open(a + "/f", "r+b") as x, open(b + "/f", "r+b") as y:
        for _ in range(10):
            fcntl.flock(x, fcntl.LOCK_EX); fails(errno.EAGAIN, lambda: fcntl.flock(y, fcntl.LOCK_SH | fcntl.LOCK_NB))
            fcntl.flock(x, fcntl.LOCK_SH); fcntl.flock(y, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fails(errno.EAGAIN, lambda: fcntl.flock(x, fcntl.LOCK_EX | fcntl.LOCK_NB))
            fcntl.flock(x, fcntl.LOCK_UN); fcntl.flock(y, fcntl.LOCK_UN)

def ranges_locked(a, b):
    put(a + "/f")
    with open(a + "/f", "r+b") as x, open(b + "/f", "r+b") as y:
        fcntl.lockf(x, fcntl.LOCK_EX, 10, 0); fcntl.lockf(y, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 10)
        fails(errno.EAGAIN, lambda: fcntl.lockf(y, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 9))
        fcntl.lockf(x, fcntl.LOCK_UN, 5, 5); fcntl.lockf(y, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5)

def lock_of_closed_file(a, b):
    """A try finds no lock of a file whose last close had returned; nor does one who asks who is in the way."""
    put(a + "/f")
    record = lambda f, cmd, kind: struct.unpack("hhqqi4x", fcntl.fcntl(f, cmd, struct.pack("hhqqi4x", kind, 0, 0, 0, 0)))
    ofd = lambda f: record(f, 37, fcntl.F_WRLCK)
    kinds = [lambda f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB), ofd, lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)]
    with open(b + "/f", "r+b") as y:
        for n in range(60):
            with open(a + "/f", "r+b") as x: kinds[n % 3](x)
            if n % 2: same(record(y, 36, fcntl.F_WRLCK)[0], fcntl.F_UNLCK, "who is in the way")
            kinds[n % 3](y)
            with open(a + "/f", "r+b") as x: fails(errno.EAGAIN, lambda: kinds[n % 3](x))
            fcntl.flock(y, fcntl.LOCK_UN); record(y, 37, fcntl.F_UNLCK); fcntl.lockf(y, fcntl.LOCK_UN)

def lock_of_killed_program(a, b):
    """Somebody waits; the holder is killed; he who waited goes on, and sees what the holder wrote."""
    put(a + "/f", b"old")
    r, w = os.pipe()
    holder = os.fork()
    if holder == 0:
        f = open(a + "/f", "r+b", 0)
        fcntl.lockf(f, fcntl.LOCK_EX); f.write(b"new"); os.write(w, b"!"); signal.pause()
    os.read(r, 1); os.close(r); os.close(w)
    with open(b + "/f", "r+b", 0) as f:
        fails(errno.EAGAIN, lambda: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB))
        os.kill(holder, signal.SIGKILL); os.waitpid(holder, 0)
        fcntl.lockf(f, fcntl.LOCK_EX); same(f.read(), b"new")


# Programs.
def repository(a, b):
    """git writes on one mount and reads on the other."""
    git = lambda at, *args: subprocess.run(["git", "-C", at, "-c", "user.name=n", "-c", "user.email=e", "-c", "safe.directory=*", *args],
                                           check=True, capture_output=True, text=True).stdout
    git(a, "init", "-q")
    for i in range(4):
        at, other = (a, b) if i % 2 else (b, a)
        put(f"{at}/f{i}", b"%d" % i); git(at, "add", "-A"); git(at, "commit", "-qm", str(i))
        same(git(other, "status", "--porcelain"), "")
        same(len(git(other, "log", "--oneline").splitlines()), i + 1)
    git(a, "gc", "-q"); git(b, "fsck", "--strict")

def data_base(a, b):
    """SQLite counts from both mounts at once."""
    with sqlite3.connect(a + "/db") as db: db.execute("create table t (n integer)"); db.execute("insert into t values (0)")
    db.close()
    def count(at):
        db = sqlite3.connect(at + "/db", timeout=60, isolation_level=None)
        for _ in range(20): db.execute("begin immediate"); db.execute("update t set n = n + 1"); db.execute("commit")
        db.close()
    at_once(lambda: count(a), lambda: count(b))
    for at in (a, b):
        db = sqlite3.connect(at + "/db")
        same((db.execute("select n from t").fetchall(), db.execute("pragma integrity_check").fetchall()), ([(40,)], [("ok",)]))
        db.close()


# Mounts that do not answer.
def stopped_mount(a, b):
    """The daemon of b does not run for a while (STOP seconds, 6 unless told): others are held up for a term, not longer, and
    afterwards it tells nothing old."""
    put(a + "/f", b"old"); put(a + "/g"); os.mkdir(a + "/d")
    for _ in range(3): same((get(b + "/f"), os.path.exists(b + "/g"), os.listdir(b + "/d")), (b"old", True, []))
    end = time.monotonic() + float(os.environ.get("STOP", "6"))
    with stopped(b):
        began = time.monotonic()
        put(a + "/f", b"newer"); os.chmod(a + "/f", 0o600); os.unlink(a + "/g"); put(a + "/d/n")
        same(time.monotonic() - began < 5, True, f"held up for {time.monotonic() - began:.1f} s")
        time.sleep(max(0, end - time.monotonic()))
    s = os.stat(b + "/f")
    same((s.st_size, s.st_mode & 0o777, get(b + "/f")), (5, 0o600, b"newer"))
    gone(b + "/g")
    same(os.listdir(b + "/d"), ["n"])
    os.chmod(b + "/f", 0o644); same(os.stat(a + "/f").st_mode & 0o777, 0o644)


def stopped_writer(a, b):
    """The daemon of b does not run while there are bytes that are not synced, and a looks at the files, until b is given up. Afterwards b
    reads what it wrote, or EIO, and a transaction of SQLite is rolled back by the connection that has it."""
    put(a + "/f", b"x" * 4096)
    db = sqlite3.connect(b + "/db", isolation_level=None)
    db.execute("create table t (b blob)"); db.execute("insert into t values (randomblob(3000))")
    f = os.open(b + "/f", os.O_RDWR)
    db.execute("begin immediate"); db.execute("insert into t values (randomblob(30000))")
    os.pwrite(f, b"y" * 4096, 4096)
    with stopped(b): os.stat(a + "/f"); os.stat(a + "/db-journal"); time.sleep(1)
    def got(at):
        try: return os.pread(f, 4096, at)
        except OSError as e: return e.errno
    same(got(0), b"x" * 4096)
    same(got(4096) in (b"y" * 4096, errno.EIO), True, f"what was written there is {got(4096)!r:.20}")
    same(os.fstat(f).st_size, 8192)
    os.pwrite(f, b"z" * 4096, 4096); same(got(4096), b"z" * 4096)
    try: os.fsync(f)
    except OSError as e: same(e.errno, errno.EIO)
    os.fsync(f); os.close(f)
    same(get(a + "/f"), b"x" * 4096 + b"z" * 4096)
    said = []
    for what in ["commit"] + ["select count(*) from t"] * 5:
        try: n = db.execute(what).fetchall()
        except sqlite3.Error as e: said.append(str(e))
    same(n in ([(1,)], [(2,)]), True, f"{n} rows, {said}")
    same(len(said) < 5, True, f"{said}")
    db.execute("insert into t values (1)"); same(db.execute("pragma integrity_check").fetchall(), [("ok",)])
    db.close()


def stopped_while_storing(a, b):
    """The daemon of b does not run while something is stored there that is not written. a writes once b is given up. Then msync(2) or
    fsync(2) on b tells that it is lost, and nothing of it lies over what a wrote."""
    put(a + "/f", b"." * 4096)
    fd = os.open(b + "/f", os.O_RDWR)
    m = mmap.mmap(fd, 4096)
    with open(a + "/f", "r+b", 0) as w:
        os.pwrite(w.fileno(), b"1", 0)
        m[100] = 66; m.flush()
        m[200] = 67
        with stopped(b): os.pwrite(w.fileno(), b"a" * 50, 175)
        said = []
        for sync in m.flush, lambda: os.fsync(fd):
            try: sync()
            except OSError as e: said.append(e.errno)
        same(set(said), {errno.EIO}, "msync and fsync")
        want = bytearray(b"." * 4096); want[0] = 49; want[100] = 66; want[175:225] = b"a" * 50
        for at in (a, b): same(get(at + "/f") == want, True, at)
    m.close(); os.close(fd)
    with open(b + "/f", "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        m[300] = 68; m.flush()
    same(get(a + "/f")[300], 68)


@contextlib.contextmanager
def stopped(b):
    """The daemon of b does not run."""
    mount = os.path.dirname(b)
    daemons = [int(p) for p in os.listdir("/proc") if p.isdigit() and command_line(p).split("\0")[:2][-1] == "mount" and mount in command_line(p)]
    same(len(daemons) > 0, True, "processes of the mount")
    for p in daemons: os.kill(p, signal.SIGSTOP)
    try: yield
    finally:
        for p in daemons: os.kill(p, signal.SIGCONT)


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
