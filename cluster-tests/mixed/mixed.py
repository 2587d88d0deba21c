"""For `run`: a workload on a mount while members change their program one at a time and the feature level is raised."""
import fcntl, json, os, signal, subprocess, sys, threading, time

OLD, NEW, CLUSTER, MOUNT = sys.argv[1:5]
SERVERS = ["mds1", "mds2", "mds3", "oss1", "oss2"]
# A call of the workload may wait for as long as one member's restart lasts.
LIMIT, LONGEST = 120, 60


def fail(why): sys.exit(f"FAILED: {why}")


def until(what, call, limit=LIMIT):
    end = time.monotonic() + limit
    while True:
        result = call()
        if result: return result
        if time.monotonic() > end: fail(f"{what}: not within {limit} s")
        time.sleep(0.1)


def tool(*args, program=NEW):
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=LIMIT)


def admin(*args): return tool(*args, "--dir", CLUSTER)


def pid_file(role): return f"{CLUSTER}/run/{role}.pid"


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as f: return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError: return False


def stop(role):
    with open(pid_file(role)) as f: pid = int(f.read())
    os.kill(pid, signal.SIGTERM)
    until(f"{role} ends", lambda: not runs(pid))


children = {}


def start(role, program):
    command = [program, role.rstrip("0123456789")] + (["--foreground"] if role == "mount" else [])
    with open(f"{CLUSTER}/logs/{role}.log", "ab") as log:
        child = subprocess.Popen(command + ["--config", f"{CLUSTER}/{role}.toml"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 cwd="/", start_new_session=True)
    children[role] = child
    with open(pid_file(role), "w") as f: f.write(f"{child.pid}\n")


def restart(role, program):
    stop(role)
    start(role, program)
    until(f"the cluster is whole after {role} was restarted", whole)


def whole():
    r = admin("status", "--json")
    try: found = json.loads(r.stdout)
    except ValueError: return False
    servers = found["servers"]
    members = [s["raft"] for s in servers if s.get("raft")]
    leads = [m for m in members if m["leader"] == m["id"]]
    return (all(s["reachable"] for s in servers) and found["map"] and found["map"]["whole"] and len(members) == 3 and len(leads) == 1
            and all(m["applied"] + 100 > leads[0]["committed"] for m in members))


class Workload(threading.Thread):
    """Writes, syncs, renames, reads back and locks, until it is stopped or a call fails."""

    def __init__(self):
        super().__init__(daemon=True)
        self.end, self.wrong, self.rounds, self.longest = threading.Event(), None, 0, 0
        self.folder = f"{MOUNT}/work"
        os.makedirs(self.folder, exist_ok=True)

    def run(self):
        try:
            while not self.end.is_set():
                began = time.monotonic()
                self.round(self.rounds)
                self.longest = max(self.longest, time.monotonic() - began)
                self.rounds += 1
        except Exception as e: self.wrong = f"round {self.rounds}: {type(e).__name__}: {e}"

    def round(self, n):
        data = (f"{n} ".encode() * 20000)[:50_000 + n % 7]
        a, b = f"{self.folder}/a{n}", f"{self.folder}/b{n}"
        with open(a, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(a, b)
        with open(b, "rb") as f:
            if f.read() != data: raise AssertionError(f"other bytes in {b}")
        with open(f"{self.folder}/lock", "a+b") as f:
            fcntl.lockf(f, fcntl.LOCK_EX)
            f.write(b".")
            f.flush()
            fcntl.lockf(f, fcntl.LOCK_UN)
        if n >= 20: os.unlink(f"{self.folder}/b{n - 20}")
        if n and not os.path.exists(f"{self.folder}/b{n - 1}"): raise AssertionError(f"b{n - 1} is gone")

    def check(self, what):
        if self.wrong: fail(f"{what}: {self.wrong}")
        before = self.rounds
        until(f"the workload goes on: {what}", lambda: self.wrong or self.rounds > before + 2)
        if self.wrong: fail(f"{what}: {self.wrong}")

    def finish(self):
        self.end.set()
        self.join(LIMIT)
        if self.is_alive(): fail("the workload does not end")
        if self.wrong: fail(self.wrong)
        if os.path.getsize(f"{self.folder}/lock") != self.rounds: fail("an append under a lock is missing, or was made twice")
        for n in range(max(0, self.rounds - 20), self.rounds):
            with open(f"{self.folder}/b{n}", "rb") as f: data = f.read()
            if data != (f"{n} ".encode() * 20000)[:50_000 + n % 7]: fail(f"other bytes in b{n}")
        if self.longest > LONGEST: fail(f"a round took {self.longest:.0f} s")
        print(f"  {self.rounds} rounds, the longest took {self.longest:.1f} s", flush=True)


def step(what):
    print(f"==> {what}", flush=True)


def remount(program):
    r = tool("umount", MOUNT)
    if r.returncode: fail(f"umount: {r.stderr}")
    start("mount", program)
    until("the mount is there", lambda: os.path.ismount(MOUNT))


def upgrade_status():
    r = admin("upgrade", "status", "--json")
    try: return json.loads(r.stdout)
    except ValueError: return None


def to(program, name, workload):
    for role in SERVERS:
        restart(role, program)
        workload.check(f"{role} runs the {name} program")


def is_refused(what, said):
    words = ["feature level", "run a newer strake"]
    lines = [l for l in said.splitlines() if all(w in l for w in words)]
    # A program from before feature levels words a state that it does not know itself.
    lines += [l for l in said.splitlines() if "metadata state has format" in l and words[1] in l]
    if not lines: fail(f"{what} with the old program is not refused in words:\n{said[-2000:]}")
    print(f"  {what}: {lines[-1].strip()}", flush=True)


def refusals():
    for role in ["mds3", "oss2"]:
        stop(role)
        size = os.path.getsize(f"{CLUSTER}/logs/{role}.log")
        start(role, OLD)

        def said():
            with open(f"{CLUSTER}/logs/{role}.log", "rb") as f:
                f.seek(size)
                return f.read().decode(errors="replace")
        until(f"{role} says something", lambda: "newer strake" in said(), 30)
        is_refused(role, said())
        if children[role].poll() is None: stop(role)
        start(role, NEW)
        until(f"the cluster is whole after {role} came back", whole)
    at = f"{CLUSTER}/../refused"
    os.makedirs(at, exist_ok=True)
    r = tool("mount", "--config", f"{CLUSTER}/mount.toml", at, program=OLD)
    if r.returncode == 0:
        tool("umount", at)
        fail("the old program mounts")
    is_refused("a mount", r.stderr)


def main():
    until("the cluster is whole", whole)
    w = Workload()
    w.start()
    w.check("the old program")
    step("each server is restarted with the new program")
    to(NEW, "new", w)
    step("and with the old one again")
    to(OLD, "old", w)
    w.finish()
    step("a mount of the new program, and every other server likewise")
    remount(NEW)
    for role in SERVERS[::2]: restart(role, NEW)
    w = Workload()
    w.folder += "-2"
    os.makedirs(w.folder, exist_ok=True)
    w.start()
    w.check("the mount runs the new program")
    # A leader of the old program knows no levels and has to be restarted first.
    if upgrade_status():
        r = admin("upgrade", "finish")
        if r.returncode == 0: fail("the level was raised while servers run the old program")
        print(f"  {r.stderr.strip().splitlines()[-1]}", flush=True)
    step("all are upgraded, and the level is raised")
    for role in SERVERS[1::2]: restart(role, NEW)
    w.check("all run the new program")
    before = until("the leader knows levels", upgrade_status)
    until("nobody is in the way", lambda: not (upgrade_status() or {"in_the_way": [1]})["in_the_way"])
    r = admin("upgrade", "finish")
    if r.returncode: fail(f"finish: {r.stderr}")
    after = upgrade_status()
    print(f"  level {before['level']} became {after['level']}", flush=True)
    if after["level"] != after["newest"]: fail(f"level {after['level']} of {after['newest']}")
    w.check("the level is raised")
    if before["level"] < after["level"]:
        step("the old program is refused")
        refusals()
    w.check("after the refusals")
    w.finish()
    step("an upgrade without a stop: all is well")


main()
