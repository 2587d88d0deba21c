"""For `run`: programs on two mounts, a leader that is killed, and the times between."""
import datetime, json, multiprocessing, os, random, re, signal, statistics, subprocess, sys, time

STRAKE = os.environ["STRAKE"]
PROGRAMS = 4


def put(path, data):
    f = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try: os.write(f, data); os.fsync(f)
    finally: os.close(f)


def get(path):
    with open(path, "rb") as f: return f.read()


class Program:
    """Makes, renames, links, reads and removes names in a folder of its own. No call may fail, and each may have run once only."""

    def __init__(self, folder, seed, calls):
        self.folder, self.random, self.calls = folder, random.Random(seed), calls
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
        if what <= 1: self.timed(put, at(new), new.encode()); self.names[new] = new.encode()
        elif what == 2: self.timed(os.rename, at(name), at(new)); self.names[new] = self.names.pop(name)
        elif what == 3:
            self.timed(os.mkdir, at(new)); self.timed(os.rename, at(name), at(new + "/moved"))
            self.timed(os.rename, at(new + "/moved"), at(name)); self.timed(os.rmdir, at(new))
        elif what == 4: assert self.timed(get, at(name)) == self.names[name], name
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
        differ(folder, self.names)


def differ(folder, names):
    found = {n: get(f"{folder}/{n}") for n in os.listdir(folder)}
    assert found == names, f"{folder}: missing {sorted(names.keys() - found.keys())}, too much {sorted(found.keys() - names.keys())}"


def program(folder, seed, stop, out): Program(folder, seed, []).run(stop, out)


def servers(cluster):
    r = subprocess.run([STRAKE, "status", "--json", "--dir", cluster], capture_output=True, text=True)
    try: return [s for s in json.loads(r.stdout)["servers"] if s["reachable"] and s["raft"]]
    except (ValueError, KeyError): return []


def leader_of(found, newer_than=0):
    """Who says of himself that he leads."""
    for s in found:
        r = s["raft"]
        if r["leader"] == r["id"] and r["term"] > newer_than: return s


def elected(cluster, after):
    """When a leader of a later term came into office, by its log: to ask for the status takes a quarter of a second."""
    said = re.compile(rb"^(\S+)Z +INFO this metadata server leads term=(\d+)$", re.M)
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


def all_follow(cluster):
    found = servers(cluster)
    led = leader_of(found)
    return led and len(found) == 3 and all(s["raft"]["applied"] + 1000 > led["raft"]["committed"] for s in found) and led


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


def main():
    work, one, two, rounds = *sys.argv[1:4], int(sys.argv[4])
    with_client, cluster = "--client" in sys.argv, sys.argv[1] + "/cluster"
    stop, out = multiprocessing.Event(), multiprocessing.Queue()
    running = [multiprocessing.Process(target=program, args=(f"{(one, two)[i % 2]}/p{i}", i, stop, out)) for i in range(PROGRAMS)]
    for p in running: p.start()
    kills, pause = [], random.Random(1)
    try:
        for n in range(rounds):
            led = until("all three members in step", lambda: all_follow(cluster))
            victim = mount(work) if with_client else None
            time.sleep(1 + pause.random())  # some load in between, and kills at any moment of a heartbeat
            began, killed = time.monotonic(), time.time()
            for p in (victim[1] if victim else []): os.kill(p, signal.SIGKILL)
            os.kill(led["pid"], signal.SIGKILL)
            until("another leader", lambda: leader_of(servers(cluster), led["raft"]["term"]))
            kills.append((began, elected(cluster, led["raft"]["term"]) - killed))
            if victim: subprocess.run(["umount", "-l", victim[0]], check=True)
            # Whoever waits for this kill has been answered before the next server moves.
            time.sleep(5 if with_client else 4)
            up = subprocess.run([STRAKE, "up", "--dir", cluster, "--no-mount"], capture_output=True, text=True)
            if up.returncode: raise RuntimeError(f"round {n + 1}: {up.stderr}")
            if sys.stderr.isatty(): print(f"\r{n + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        until("all three members in step", lambda: all_follow(cluster))
    except BaseException:
        for p in running: p.kill()
        raise
    finally: stop.set()
    results = [out.get() for _ in running]
    report(kills, results, one, two)


def report(kills, results, one, two):
    wrong = [w for w, *_ in results if w]
    calls = sorted(c for *_, calls in results for c in calls)
    for _, folder, names, _ in results:
        # What one mount was told the other finds.
        for at in (one, two):
            try: differ(f"{at}/{os.path.basename(folder)}", names)
            except (AssertionError, OSError) as e: wrong.append(str(e))
    felt = [max((end - began for began, end in calls if began < at + 4 and end > at), default=0) for at, _ in kills]
    between = [(b, e) for b, e in calls if not any(at - 0.1 < e and b < at + 4 for at, _ in kills)]
    row = lambda name, times: print(f"{name:<44} median {statistics.median(times):.2f} s, worst {max(times):.2f} s")
    print(f"{len(kills)} times the leader was killed; {len(calls)} calls of {PROGRAMS} programs on two mounts")
    row("another leads, by its own log", [t for _, t in kills])
    row("longest call of a program around each kill", felt)
    row("longest call of a program at other times", [e - b for b, e in between] or [0])
    for w in wrong: print(f"FAILED: {w}")
    late = sum(t >= 1 for _, t in kills), sum(t >= 3 for t in felt)
    print(f"elections of a second or more: {late[0]}; calls of three seconds or more: {late[1]}")
    print(f"failover: {PROGRAMS - len(wrong)} passed, {len(wrong)} failed" if wrong else f"failover: {PROGRAMS} passed, 0 failed")
    sys.exit(bool(wrong))


main()
