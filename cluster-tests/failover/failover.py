"""For `run`: programs on two mounts, servers that are killed, and the times between."""
import datetime, json, multiprocessing, os, random, re, signal, statistics, subprocess, sys, time

STRAKE = os.environ["STRAKE"]
PROGRAMS = 4
# What one `put` writes where storage servers are killed: more than is kept with a name.
SIZE = 64 << 10
# The promise of docs/operations.md for whatever is killed, and how long after a kill a call is put down to it.
MOST, FELT = 5, 10


def put(path, data):
    f = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        while data: data = data[os.write(f, data):]
        os.fsync(f)
    finally: os.close(f)


def get(path):
    with open(path, "rb") as f: return f.read()


def body(name, small):
    """What a file holds that was made by this name."""
    return name.encode() if small else (name.encode() + b" ").ljust(SIZE, name[-1:].encode())


class Program:
    """Makes, renames, links, reads and removes names in a folder of its own. No call may fail, and each may have run once only."""

    def __init__(self, folder, seed, small, calls):
        self.folder, self.random, self.small, self.calls = folder, random.Random(seed), small, calls
        self.names, self.count = {}, 0
        os.mkdir(folder)

    def timed(self, call, *args, **kw):
        began = time.monotonic()
        result = call(*args, **kw)
        self.calls.append((began, time.monotonic()))
        return result

    def step(self):
        at = lambda name: f"{self.folder}/{name}"
        self.count += 1
        new = f"n{self.count}"
        what = self.random.randrange(6) if len(self.names) > 20 else 0
        name = self.random.choice(sorted(self.names)) if self.names else None
        if what <= 1: self.timed(put, at(new), body(new, self.small)); self.names[new] = new
        elif what == 2: self.timed(os.rename, at(name), at(new)); self.names[new] = self.names.pop(name)
        elif what == 3:
            self.timed(os.mkdir, at(new)); self.timed(os.rename, at(name), at(new + "/moved"))
            self.timed(os.rename, at(new + "/moved"), at(name)); self.timed(os.rmdir, at(new))
        elif what == 4: assert self.timed(get, at(name)) == body(self.names[name], self.small), name
        elif len(self.names) > 60: self.timed(os.unlink, at(name)); del self.names[name]
        else: self.timed(os.link, at(name), at(new)); self.names[new] = self.names[name]

    def run(self, stop, out):
        wrong = None
        try:
            while not stop.is_set(): self.step()
            self.compare(self.folder)
        except Exception as e: wrong = f"{self.folder}: {type(e).__name__}: {e}"
        out.put((wrong, self.folder, self.names, self.calls))

    def compare(self, folder):
        differ(folder, self.names, self.small)


def differ(folder, names, small):
    there = set(os.listdir(folder))
    assert there == names.keys(), f"{folder}: missing {sorted(names.keys() - there)}, too much {sorted(there - names.keys())}"
    wrong = [n for n in there if get(f"{folder}/{n}") != body(names[n], small)]
    assert not wrong, f"{folder}: other bytes in {sorted(wrong)}"


def program(folder, seed, small, stop, out): Program(folder, seed, small, []).run(stop, out)


def status(cluster):
    r = subprocess.run([STRAKE, "status", "--json", "--dir", cluster], capture_output=True, text=True)
    try: return r.returncode, [s for s in json.loads(r.stdout)["servers"] if s["reachable"]]
    except (ValueError, KeyError): return 1, []


def servers(cluster): return [s for s in status(cluster)[1] if s["raft"]]


def leader_of(found, newer_than=0):
    """Who says of himself that he leads."""
    for s in found:
        r = s["raft"]
        if r["leader"] == r["id"] and r["term"] > newer_than: return s


def elected(cluster, after):
    """When a leader of a later term came into office, by its log: to ask for the status takes a quarter of a second."""
    said = re.compile(rb"^(\S+)Z +INFO this metadata server is the leader now term=(\d+)$", re.M)
    logs = [get(f"{cluster}/logs/{n}") for n in os.listdir(f"{cluster}/logs") if n.startswith("mds")]
    led = [(int(term), at) for log in logs for at, term in said.findall(log)]
    at = min((term, at) for term, at in led if term > after)[1].decode()
    return datetime.datetime.fromisoformat(at + "+00:00").timestamp()


def until(what, call, limit=60):
    end = time.monotonic() + limit
    while True:
        result = call()
        if result: return result
        if time.monotonic() > end: sys.exit(f"failover: {what}: not within {limit} s")
        time.sleep(0.01)


def in_step(cluster):
    """All servers, if they are up, the members of the metadata group in step, and all replicas in sync."""
    code, found = status(cluster)
    members = [s for s in found if s["raft"]]
    led = leader_of(members)
    good = code == 0 and led and all(s["raft"]["applied"] + 1000 > led["raft"]["committed"] for s in members)
    return found if good else None


def victims(kind, found, pick):
    """Whom to kill, and the metadata leader if he is among them."""
    led, oss = leader_of([s for s in found if s["raft"]]), [s for s in found if s["role"] == "oss"]
    one = {"leader": [led], "mds": [pick.choice([s for s in found if s["raft"]])], "oss": [pick.choice(oss)], "both": [led, pick.choice(oss)]}[kind]
    return one, led if led in one else None


def mount(work):
    at = f"{work}/victim"
    os.makedirs(at, exist_ok=True)
    before = set(mounts_of(at))
    subprocess.run([STRAKE, "mount", "--client-key", os.environ["CLIENT_KEY"], os.environ["MDS"], at], check=True, capture_output=True)
    os.listdir(at)
    return at, set(mounts_of(at)) - before


def mounts_of(at):
    for p in os.listdir("/proc"):
        try:
            if p.isdigit() and at in get(f"/proc/{p}/cmdline").decode(errors="replace"): yield int(p)
        except OSError: pass


def kill(kind, cluster, work, pick, with_client):
    """One round: when it was, and how long the next election took if the leader was killed."""
    found = until("all in step and in sync", lambda: in_step(cluster), 180)
    hit, led = victims(kind, found, pick)
    victim = mount(work) if with_client else None
    time.sleep(1 + pick.random())  # some load in between, and kills at any moment of a heartbeat
    began, killed = time.monotonic(), time.time()
    for p in (victim[1] if victim else []): os.kill(p, signal.SIGKILL)
    for s in hit: os.kill(s["pid"], signal.SIGKILL)
    election = None
    if led:
        until("another leader", lambda: leader_of(servers(cluster), led["raft"]["term"]))
        election = elected(cluster, led["raft"]["term"]) - killed
    if victim: subprocess.run(["umount", "-l", victim[0]], check=True)
    # Whoever waits for this kill has been answered before the next server moves.
    time.sleep(5 if with_client or kind in ("oss", "both") else 4)
    up = subprocess.run([STRAKE, "up", "--dir", cluster, "--no-mount"], capture_output=True, text=True)
    if up.returncode: raise RuntimeError(f"strake up: {up.stderr}")
    return began, election


def main():
    work, one, two, rounds, kind = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5]
    with_client, cluster, small = "--client" in sys.argv, sys.argv[1] + "/cluster", kind in ("leader", "mds")
    stop, out = multiprocessing.Event(), multiprocessing.Queue()
    running = [multiprocessing.Process(target=program, args=(f"{(one, two)[i % 2]}/p{i}", i, small, stop, out)) for i in range(PROGRAMS)]
    for p in running: p.start()
    kills, pick = [], random.Random(1)
    try:
        for n in range(rounds):
            kills.append(kill(kind, cluster, work, pick, with_client))
            if sys.stderr.isatty(): print(f"\r{n + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        until("all in step and in sync", lambda: in_step(cluster), 180)
    except BaseException:
        for p in running: p.kill()
        raise
    finally: stop.set()
    results = [out.get() for _ in running]
    report(kind, small, kills, results, one, two, fsck(cluster))


def fsck(cluster):
    """What strake fsck finds once all have stopped: removed files are deleted some seconds later, so it is asked again for a while."""
    end = time.monotonic() + 90
    while True:
        r = subprocess.run([STRAKE, "fsck", "--read-data", "--json", "--dir", cluster], capture_output=True, text=True)
        found = json.loads(r.stdout) if r.returncode in (0, 4) else {"clean": False, "findings": [r.stderr.strip()]}
        if found["clean"] or time.monotonic() > end:
            return [f"fsck: {f}" for f in found["findings"]] if not found["clean"] else []
        time.sleep(2)


def report(kind, small, kills, results, one, two, findings):
    wrong = [w for w, *_ in results if w] + findings
    calls = sorted(c for *_, calls in results for c in calls)
    for _, folder, names, _ in results:
        # What one mount was told the other finds.
        for at in (one, two):
            try: differ(f"{at}/{os.path.basename(folder)}", names, small)
            except (AssertionError, OSError) as e: wrong.append(str(e))
    felt = [max((end - began for began, end in calls if began < at + FELT and end > at), default=0) for at, _ in kills]
    between = [e - b for b, e in calls if not any(at - 0.1 < e and b < at + FELT for at, _ in kills)]
    elections = [t for _, t in kills if t is not None]
    row = lambda name, times: print(f"{name:<44} median {statistics.median(times):.2f} s, worst {max(times):.2f} s")
    what = {"leader": "the metadata leader", "mds": "a metadata server", "oss": "a storage server", "both": "the metadata leader and a storage server"}[kind]
    print(f"{len(kills)} times {what} was killed; {len(calls)} calls of {PROGRAMS} programs on two mounts")
    if elections: row("another leads, by its own log", elections)
    row("longest call of a program around each kill", felt)
    row("longest call of a program at other times", between or [0])
    late = sum(t >= 1 for t in elections), sum(t >= 3 for t in felt)
    print(f"elections of a second or more: {late[0]}; calls of three seconds or more: {late[1]}")
    wrong += [f"kill {n + 1}: a call took {t:.2f} s" for n, t in enumerate(felt) if t >= MOST]
    for w in wrong: print(f"FAILED: {w}")
    print(f"failover: {len(kills)} kills, {len(wrong)} failed" if wrong else f"failover: {len(kills)} kills passed, 0 failed")
    sys.exit(bool(wrong))


main()
