"""A lock has one holder, and is gone when close(2) returns. Arguments: two mountpoints of one file system, which may be the same, and `flock`
if flock(2) holds between them. Ends with 0 if all is as fcntl(2) and flock(2) say."""

import ctypes, errno, fcntl, mmap, os, signal, struct, sys, time

A, B = sys.argv[1], sys.argv[2]
ROUNDS = 60
FLOCK = "hhqqi4x"
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38
R, W, U = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK


def record(cmd, kind):
    return lambda fd: struct.unpack(FLOCK, fcntl.fcntl(fd, cmd, struct.pack(FLOCK, kind, os.SEEK_SET, 0, 10, 0)))


class Kind:
    def __init__(self, name, take, drop):
        self.name, self.take, self.drop = name, take, drop

    def can(self, fd):
        """Tries it, and gives it back."""
        try:
            self.take(fd)
        except OSError as e:
            assert e.errno in (errno.EAGAIN, errno.EACCES), e
            return False
        self.drop(fd)
        return True


flock = Kind("flock", lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN))
ofd = Kind("ofd", record(F_OFD_SETLK, W), record(F_OFD_SETLK, U))
posix = Kind("posix", record(fcntl.F_SETLK, W), record(fcntl.F_SETLK, U))
OF_FILES = [ofd] + [flock] * ("flock" in sys.argv[3:])


def fresh(name):
    path = f"{A}/{name}"
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))
    return path, f"{B}/{name}"


def rw(path):
    return os.open(path, os.O_RDWR)


def elsewhere(path, kind):
    """Whether another process, which opens the file now, can have the lock."""
    child = os.fork()
    if child == 0:
        os._exit(0 if kind.can(rw(path)) else 1)
    return os.waitpid(child, 0)[1] == 0


def times(kind, what, f):
    bad = sum(not f() for _ in range(ROUNDS))
    assert bad == 0, f"{kind.name}: {what}: wrong {bad} of {ROUNDS} times"


def closed_is_gone(kind):
    path, other = fresh(f"closed.{kind.name}")
    probe = rw(other)

    def once():
        fd = rw(path)
        kind.take(fd)
        os.close(fd)
        return kind.can(probe)

    def asked():
        fd = rw(path)
        kind.take(fd)
        os.close(fd)
        return record(F_OFD_GETLK, W)(probe)[0] == U

    times(kind, "free after the last close", once)
    if kind is ofd:
        times(kind, "F_GETLK after the last close", asked)
    os.close(probe)


def reopened_holds(kind):
    """The kernel gives the next open file the former one's address."""
    path, other = fresh(f"reopened.{kind.name}")
    probe = rw(other)

    def once():
        fd = rw(path)
        kind.take(fd)
        os.close(fd)
        fd = rw(path)
        kind.take(fd)
        time.sleep(0.003)
        refused = not kind.can(probe)
        os.close(fd)
        return refused

    def refused_before():
        kind.take(probe)
        fd = rw(path)
        refused = not kind.can(fd)
        kind.drop(probe)
        os.close(fd)
        fd = rw(path)
        kind.take(fd)
        time.sleep(0.003)
        refused = refused and not kind.can(probe)
        kind.drop(fd)
        os.close(fd)
        return refused

    times(kind, "held after it was closed and taken again", once)
    times(kind, "held after a refused try was closed", refused_before)
    os.close(probe)


def copies_hold(kind):
    """dup(2), fork(2) and mmap(2) keep the open file, and the last of them lets go."""
    path, other = fresh(f"copies.{kind.name}")
    probe = rw(other)
    os.pwrite(probe, bytes(4096), 0)
    for _ in range(5):
        fd = rw(path)
        kind.take(fd)
        twin = os.dup(fd)
        os.close(fd)
        assert not kind.can(probe), "dup"
        child = os.fork()
        if child == 0:
            signal.pause()
        os.close(twin)
        assert not kind.can(probe), "fork"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert kind.can(probe), "killed"
        fd = rw(path)
        kind.take(fd)
        m = mmap.mmap(fd, 4096)
        m[0] = 1
        os.close(fd)
        # Python's mapping has a descriptor of its own, until it is closed, too.
        assert not kind.can(probe), "mmap"
        m.close()
        assert kind.can(probe), "munmap"
    os.close(probe)


def ended_processes():
    path, other = fresh("ended")
    for how in (lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)):
        for kind in [posix] + OF_FILES:
            def once():
                child = os.fork()
                if child == 0:
                    kind.take(rw(path))
                    how()
                os.waitpid(child, 0)
                return elsewhere(other, kind)

            times(kind, "free once its process has ended", once)


def posix_goes_with_any_descriptor():
    path, other = fresh("any")
    held = rw(path)

    def once():
        posix.take(held)
        if elsewhere(other, posix):
            return False
        os.close(os.open(path, os.O_RDONLY))
        return elsewhere(other, posix)

    times(posix, "free after another descriptor was closed", once)
    os.close(held)


def interrupted_waits():
    """A wait that a signal ended has got nothing, whenever that was."""
    path, other = fresh("interrupted")
    held, probe = rw(path), rw(other)
    # Python would begin the call again.
    fcntl_ = ctypes.CDLL(None, use_errno=True).fcntl
    wait = ctypes.create_string_buffer(struct.pack(FLOCK, W, os.SEEK_SET, 0, 10, 0))
    signal.signal(signal.SIGALRM, lambda *_: None)
    ended = 0
    for i in range(40):
        ofd.take(probe)
        child = os.fork()
        if child == 0:
            time.sleep(0.01)
            ofd.drop(probe)
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0.006 + i % 10 / 500)
        if fcntl_(held, F_OFD_SETLKW, wait) == 0:
            ofd.drop(held)
        else:
            assert ctypes.get_errno() == errno.EINTR, ctypes.get_errno()
            ended += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.waitpid(child, 0)
        assert ofd.can(probe), f"round {i}"
    print(f"{ended} of 40 waits were ended by a signal")
    for fd in (held, probe):
        os.close(fd)


for k in OF_FILES:
    closed_is_gone(k)
    reopened_holds(k)
    copies_hold(k)
    print("ok:", k.name, flush=True)
ended_processes()
posix_goes_with_any_descriptor()
interrupted_waits()
print("ok: processes that end, and waits")
