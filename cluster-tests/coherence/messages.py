"""For `messages`: counts what two mounts send."""
import json, os, subprocess, sys, time

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

check("operations" in run("stats", one).stdout)
gone = run("stats", "/")
check(gone.returncode != 0 and "is not a StrakeFS mount" in gone.stderr, gone)
print("all of it without a message")
