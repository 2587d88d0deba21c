"""Locks through two mounts of one file system, each held by processes of their own. Arguments: the mountpoints, and `flock` if
flock(2) holds between them. Ends with 0 if all is as fcntl(2) and flock(2) say."""

import errno, fcntl, os, signal, struct, subprocess, sys, time

A, B = sys.argv[1], sys.argv[2]
FLOCKS = "flock" in sys.argv[3:]
# struct flock of 64-bit Linux: type, whence, start, len, pid.
FLOCK = "hhqqi4x"
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
R, W, U = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK


def lock(fd, cmd, kind, start=0, length=0):
    out = fcntl.fcntl(fd, cmd, struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0))
    return struct.unpack(FLOCK, out)


def code(f, *args):
    """The errno of a call, 0 if it succeeds."""
    try:
        f(*args)
        return 0
    except OSError as e:
        return e.errno


# A process that does what it is told, one line each, and answers with a line.
CHILD = r"""
import errno, fcntl, os, struct, sys
path, flags = sys.argv[1], int(sys.argv[2])
fd = os.open(path, flags)
others = {}
print("open", flush=True)
for line in sys.stdin:
    cmd, *args = line.split()
    args = [int(a) for a in args]
    try:
        if cmd == "fcntl":
            out = struct.unpack("hhqqi4x", fcntl.fcntl(fd, args[0], struct.pack("hhqqi4x", args[1], 0, args[2], args[3], 0)))
            print(out[0], out[2], out[3], out[4], flush=True)
        elif cmd == "flock":
            fcntl.flock(fd, args[0])
            print("ok", flush=True)
        elif cmd == "open":
            others[args[0]] = os.open(path, args[1])
            print("ok", flush=True)
        elif cmd == "close":
            os.close(others.pop(args[0]))
            print("ok", flush=True)
        elif cmd == "fork":
            pid = os.fork()
            if pid == 0:
                os.read(0, 0)
                import time
                time.sleep(1000)
            print(pid, flush=True)
    except OSError as e:
        print("errno", e.errno, flush=True)
"""


class Process:
    def __init__(self, path, flags=os.O_RDWR):
        args = [sys.executable, "-c", CHILD, path, str(flags)]
        self.p = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "open"

    def tell(self, *words):
        self.p.stdin.write(" ".join(str(w) for w in words) + "\n")
        self.p.stdin.flush()

    def answer(self):
        return self.p.stdout.readline().strip()

    def do(self, *words):
        self.tell(*words)
        return self.answer()

    def waits(self):
        """In a system call that does not come back: seen twice in the same one."""
        seen = 0
        for _ in range(2000):
            with open(f"/proc/{self.p.pid}/stat") as f:
                state = f.read().rsplit(") ", 1)[1][0]
            with open(f"/proc/{self.p.pid}/wchan") as f:
                where = f.read()
            seen = seen + 1 if state in "SD" and "pipe" not in where and "anon" not in where else 0
            if seen == 20:
                return
            time.sleep(0.005)
        raise AssertionError("it does not wait")

    def kill(self):
        self.p.kill()
        assert self.p.wait(timeout=20) == -signal.SIGKILL


def ok(answer):
    assert not answer.startswith("errno"), answer


def refused(answer, number=errno.EAGAIN):
    assert answer == f"errno {number}", f"{answer}, not errno {number}"


def same(got, want):
    assert got == want, f"{got}, not {want}"


def said(name):
    print("ok:", name, flush=True)


def fresh(name):
    with open(f"{A}/{name}", "w") as f:
        f.write("0123456789" * 10)
    return f"{A}/{name}", f"{B}/{name}"


def ranges(setlk, getlk):
    a, b = (Process(p) for p in fresh(f"ranges{setlk}"))
    ok(a.do("fcntl", setlk, W, 10, 10))
    refused(b.do("fcntl", setlk, R, 19, 1))
    ok(b.do("fcntl", setlk, W, 20, 0))
    refused(a.do("fcntl", setlk, R, 0, 0))
    # Who is in the way: type, start, length; the process of another mount is unknown here.
    # Open-file-description locks have no process.
    posix = getlk == fcntl.F_GETLK
    unknown = 0 if posix else -1
    same(b.do("fcntl", getlk, R, 0, 0), f"{W} 10 10 {unknown}")
    same(a.do("fcntl", getlk, R, 15, 0), f"{W} 20 0 {unknown}")
    c = Process(f"{A}/ranges{setlk}")
    same(c.do("fcntl", getlk, W, 0, 15), f"{W} 10 10 {a.p.pid if posix else -1}")
    # Downgrade, split, merge.
    ok(a.do("fcntl", setlk, R, 12, 2))
    ok(b.do("fcntl", setlk, R, 12, 2))
    refused(b.do("fcntl", setlk, R, 11, 1))
    refused(a.do("fcntl", setlk, W, 12, 1))
    ok(b.do("fcntl", setlk, U, 0, 15))
    ok(a.do("fcntl", setlk, W, 10, 10))
    ok(a.do("fcntl", setlk, U, 0, 0))
    same(b.do("fcntl", getlk, W, 0, 20).split()[0], str(U))
    for p in (a, b, c):
        p.kill()


def closing_gives_up():
    path, other = fresh("closing")
    a, b = Process(path), Process(other)
    ok(a.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    refused(b.do("fcntl", fcntl.F_SETLK, R, 0, 1))
    # Any descriptor of the file, also one that only reads.
    ok(a.do("open", 1, os.O_RDONLY))
    refused(b.do("fcntl", fcntl.F_SETLK, R, 0, 1))
    ok(a.do("close", 1))
    ok(b.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    # An open-file-description lock stays until its own last close.
    ok(b.do("fcntl", fcntl.F_SETLK, U, 0, 0))
    ok(a.do("fcntl", F_OFD_SETLK, W, 0, 0))
    ok(a.do("open", 2, os.O_RDWR))
    ok(a.do("close", 2))
    refused(b.do("fcntl", fcntl.F_SETLK, R, 0, 1))
    child = int(a.do("fork"))
    a.kill()
    refused(b.do("fcntl", fcntl.F_SETLK, R, 0, 1))
    os.kill(child, signal.SIGKILL)
    until(lambda: b.do("fcntl", fcntl.F_SETLK, R, 0, 1))
    b.kill()


def until(f):
    """The killed process is not this one's child, so nobody waits for its end."""
    for _ in range(2000):
        answer = f()
        if not answer.startswith("errno"):
            return
        time.sleep(0.005)
    raise AssertionError(answer)


def waiting(kill_holder):
    path, other = fresh(f"waiting{kill_holder}")
    a, b, c = Process(path), Process(other), Process(path)
    ok(a.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    b.tell("fcntl", fcntl.F_SETLKW, W, 5, 5)
    b.waits()
    c.tell("fcntl", F_OFD_SETLKW, R, 50, 5)
    c.waits()
    if kill_holder:
        a.kill()
    else:
        ok(a.do("fcntl", fcntl.F_SETLK, U, 0, 0))
    ok(b.answer())
    ok(c.answer())
    if not kill_holder:
        refused(a.do("fcntl", fcntl.F_SETLK, R, 0, 0))
        a.kill()
    b.kill()
    c.kill()


def killed_waiters_leave_nothing():
    path, other = fresh("killed")
    a, b, c = Process(path), Process(other), Process(other)
    ok(a.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    b.tell("fcntl", fcntl.F_SETLKW, W, 0, 0)
    b.waits()
    b.kill()
    ok(a.do("fcntl", fcntl.F_SETLK, U, 0, 0))
    ok(c.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    # An alarm interrupts a wait.
    code_ = (
        "import fcntl, os, signal, sys\n"
        "def ring(*_): raise InterruptedError\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "try: fcntl.lockf(fd, fcntl.LOCK_EX)\n"
        "except InterruptedError: print('rang')\n"
    )
    out = subprocess.run([sys.executable, "-c", code_, path], capture_output=True, text=True, timeout=30)
    assert out.stdout == "rang\n", out
    for p in (a, c):
        p.kill()


def deadlock():
    path, other = fresh("deadlock")
    a, b = Process(path), Process(other)
    ok(a.do("fcntl", fcntl.F_SETLK, W, 0, 1))
    ok(b.do("fcntl", fcntl.F_SETLK, W, 1, 1))
    a.tell("fcntl", fcntl.F_SETLKW, W, 1, 1)
    a.waits()
    refused(b.do("fcntl", fcntl.F_SETLKW, W, 0, 1), errno.EDEADLK)
    ok(b.do("fcntl", fcntl.F_SETLK, U, 1, 1))
    ok(a.answer())
    a.kill()
    b.kill()


def many_waiters(n):
    """More than a mount works on at a time: the holder must still be able to let go."""
    path, other = fresh("many")
    a = Process(path)
    ok(a.do("fcntl", fcntl.F_SETLK, W, 0, 0))
    waiters = []
    for i in range(n):
        pid = os.fork()
        if pid == 0:
            fd = os.open(other if i % 2 else path, os.O_RDWR)
            fcntl.lockf(fd, fcntl.LOCK_EX)
            os.write(fd, b"x")
            os._exit(0)
        waiters.append(pid)
    time.sleep(0.5)
    for pid in waiters[: n // 10]:
        os.kill(pid, signal.SIGKILL)
    ok(a.do("fcntl", fcntl.F_SETLK, U, 0, 0))
    ends = [os.waitpid(pid, 0)[1] for pid in waiters]
    assert all(e == 0 or os.WIFSIGNALED(e) for e in ends) and ends[n // 10 :] == [0] * (n - n // 10), ends
    a.kill()


def flocks():
    path, other = fresh("flock")
    a, b = Process(path), Process(other, os.O_RDONLY)
    ok(a.do("flock", fcntl.LOCK_EX))
    refused(b.do("flock", fcntl.LOCK_SH | fcntl.LOCK_NB))
    ok(b.do("fcntl", fcntl.F_SETLK, R, 0, 0))
    ok(a.do("flock", fcntl.LOCK_SH))
    ok(b.do("flock", fcntl.LOCK_SH | fcntl.LOCK_NB))
    refused(a.do("flock", fcntl.LOCK_EX | fcntl.LOCK_NB))
    ok(b.do("flock", fcntl.LOCK_UN))
    ok(a.do("flock", fcntl.LOCK_EX))
    b.tell("flock", fcntl.LOCK_EX)
    b.waits()
    # It belongs to the open file: another descriptor's end changes nothing, the last one's does.
    child = int(a.do("fork"))
    a.kill()
    b.waits()
    os.kill(child, signal.SIGKILL)
    ok(b.answer())
    c = Process(path)
    c.tell("flock", fcntl.LOCK_EX)
    c.waits()
    c.kill()
    b.kill()


ranges(fcntl.F_SETLK, fcntl.F_GETLK)
said("POSIX locks by ranges")
ranges(F_OFD_SETLK, F_OFD_GETLK)
said("open-file-description locks by ranges")
closing_gives_up()
said("closing gives up what it must")
waiting(False)
waiting(True)
said("waiters get the lock when it is given up, or its holder is killed")
killed_waiters_leave_nothing()
said("killed waiters leave nothing")
deadlock()
said("a deadlock across mounts is found")
many_waiters(300)
said("300 waiters do not stop a mount")
if FLOCKS:
    flocks()
    said("flock between mounts")
