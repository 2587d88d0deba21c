"""For `messages`: counts what two mounts send."""
import json, mmap, os, subprocess, sys, time

one, two = sys.argv[1:]
strake = os.environ["STRAKE"]


def run(*args): return subprocess.run([strake, *args], capture_output=True, text=True)


def stats(at):
    """Requests about files to metadata servers, and all to storage servers; and the rest."""
    all = json.loads(run("stats", "--json", at).stdout)
    return (all["operations"], all["data_requests"]), all


def check(ok, *what):
    if not ok: raise AssertionError(what)


def get(path):
    with open(path, "rb") as f: return f.read()


def put(path, data):
    with open(path, "wb") as f: f.write(data)


def free(at, what, work):
    """`work` is done without any message. Leases may run out on a machine that stands still for a second: it is tried again."""
    for _ in range(10):
        work()
        time.sleep(1)  # what was begun by that: releases of files that were written
        before, _ = stats(at)
        for _ in range(50): work()
        after, all = stats(at)
        if after == before: return all
    check(False, what, at, before, after)


os.mkdir(one + "/d")
small = os.urandom(10_000)
large = os.urandom(20 << 20)
put(one + "/d/small", small)
put(one + "/d/large", large)


def whole_small(at):
    check(get(at + "/d/small") == small, "other bytes")
    check(os.stat(at + "/d/small").st_size == len(small))


def places(at):
    with open(at + "/d/large", "rb", buffering=0) as f:
        for i in range(50):
            place = i * 399_989
            check(os.pread(f.fileno(), 3000, place) == large[place:place + 3000], "other bytes")


def whole_large(at): check(get(at + "/d/large") == large, "other bytes")


for at in one, two:
    free(at, "open, read, close", lambda: whole_small(at))
    all = free(at, "reads of some places", lambda: places(at))
    check(all["cached_opens"] and all["cached_bytes"], all)
    free(at, "a whole file", lambda: whole_large(at))

# A change is seen at once, and after it there is peace again.
for at, other in (one, two), (two, one):
    for i in range(20):
        small = os.urandom(10_000 + i)
        put(at + "/d/small", small)
        check(get(other + "/d/small") == small, "old bytes")
    free(other, "open, read, close", lambda: whole_small(other))


def locks():
    """Entries of locks that the log has now."""
    servers = json.loads(run("status", "--dir", os.environ["CLUSTER"], "--json").stdout)["servers"]
    return max(s.get("locks") or 0 for s in servers)


# A file that both write, and one that a mount maps for itself: neither takes a lock of pages, and 200 writes and stores cost no request
# about the file but reports of its size now and then.
put(one + "/d/both", bytes(1 << 20)); put(one + "/d/mapped", bytes(1 << 20))
fds = [os.open(at + "/d/both", os.O_RDWR) for at in (one, two)]
own = os.open(one + "/d/mapped", os.O_RDWR)
m = mmap.mmap(own, 0)
m[:]
before, began = [stats(at)[0][0] for at in (one, two)], time.monotonic()
for i in range(200):
    for k in range(2): os.pwrite(fds[k], b"x" * 100, 100 * (2 * i + k))
    m[i * 4096] = 1
sent = [stats(at)[0][0] - n for at, n in zip((one, two), before)]
check(max(sent) < 20 + 5 * (time.monotonic() - began), "requests of 200 writes", sent)
check(locks() == 0, "locks while nobody else maps", locks())
# When another one maps it, it is locked.
with open(two + "/d/both", "r+b") as f, mmap.mmap(f.fileno(), 0) as shared:
    shared[0] = 1
    check(locks() > 0, "locks when both have a file and one maps it")
check(os.pread(fds[0], 1, 0) == b"\1", "what was stored")
for fd in (own, *fds): os.close(fd)
m.close()

check("operations" in run("stats", one).stdout)
gone = run("stats", "/")
check(gone.returncode != 0 and "is not a StrakeFS mount" in gone.stderr, gone)
print("all of it without a message")
