"""Locks held and waited for through a mount whose daemon is killed. Arguments: the supervisor's process id, its mountpoint, another
mount's."""

import fcntl, os, signal, subprocess, sys

SUPERVISOR, A, B = int(sys.argv[1]), sys.argv[2], sys.argv[3]
WAITER = "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nprint('open', flush=True)\n%s\nprint('got', flush=True)"


def daemons():
    tasks = os.listdir(f"/proc/{SUPERVISOR}/task")
    return [int(pid) for t in tasks for pid in open(f"/proc/{SUPERVISOR}/task/{t}/children").read().split()]


def waiter(how, path):
    code = WAITER % f"fcntl.{how}(fd, fcntl.LOCK_EX)"
    p = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "open\n"
    return p


def refused(fd):
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    raise AssertionError("the lock was lost")


posix, whole = (os.open(f"{A}/f", os.O_RDWR | os.O_CREAT) for _ in range(2))
fcntl.lockf(posix, fcntl.LOCK_EX)
fcntl.flock(whole, fcntl.LOCK_EX)
there = os.open(f"{B}/g", os.O_RDWR | os.O_CREAT)
fcntl.lockf(there, fcntl.LOCK_EX)
waiters = [waiter("lockf", f"{B}/f"), waiter("flock", f"{B}/f"), waiter("lockf", f"{A}/g")]
(before,) = daemons()
os.kill(before, signal.SIGKILL)
os.pwrite(posix, b"x", 0)
assert daemons() != [before]
probe = os.open(f"{B}/f", os.O_RDWR)
refused(probe)
# The next daemon knows whose locks go with which descriptor.
os.close(os.open(f"{A}/f", os.O_RDONLY))
assert waiters[0].stdout.readline() == "got\n"
assert waiters[1].poll() is None and waiters[2].poll() is None
os.close(whole)
assert waiters[1].stdout.readline() == "got\n"
fcntl.lockf(there, fcntl.LOCK_UN)
assert waiters[2].stdout.readline() == "got\n"
