"""The tasks. Each uses commands of docs/ within the nodes of a `./cluster`, and ends in a verified tree and `strake wait --healthy`."""
import contextlib, hashlib, json, os, shutil, subprocess, sys, threading, time, traceback

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, f"{HERE}/../chaos")
sys.dont_write_bytecode = True
from cluster import FABRIC, MIB, MOUNT, Cluster, Node, memlock

TREE = 24


class Failed(Exception):
    pass


def check(what, is_so, detail=""):
    if not is_so:
        raise Failed(f"{what}{': ' if detail else ''}{detail}")


class Admin:
    def __init__(self, folder, name):
        self.c = Cluster(folder, name)
        self.desk = self.c.node("mds1")
        self.client, self.other = self.c.of("client")[:2]
        self.trees = []

    # Commands.

    def at(self, node, *command, want=0, timeout=400):
        """A command in a node; fails unless it ends with `want` (None: anything)."""
        r = self.c.exec(node, *command, timeout=timeout)
        if want is not None and r.returncode != want:
            raise Failed(f"{node.name}: {' '.join(command)}: ended with {r.returncode}, not {want}\n{r.stdout}{r.stderr}")
        return r

    def sh(self, node, script, **kw):
        return self.at(node, "sh", "-c", script, **kw)

    def strake(self, *command, **kw):
        """As an administrator types it: /etc/strake/admin.toml says which cluster."""
        return self.at(self.desk, "strake", *command, **kw)

    def json(self, *command, **kw):
        return json.loads(self.strake(*command, "--json", **kw).stdout)

    def codes(self):
        return [r["code"] for r in self.json("status", want=None)["health"]["reasons"]]

    def healthy(self, limit=240):
        self.strake("wait", "--healthy", "--timeout", str(limit))
        check("status is OK then", self.strake("status").stdout.startswith("OK\n"))

    def redundant(self, limit=240):
        self.strake("wait", "--redundant", "--timeout", str(limit))

    def until(self, what, call, limit=120):
        end = time.monotonic() + limit
        while True:
            try:
                result = call()
            except subprocess.TimeoutExpired:
                result = None
            if result:
                return result
            check(f"{what} within {limit} s", time.monotonic() < end)
            time.sleep(0.5)

    # Nodes, as with a switch or a hand.

    def stop(self, node):
        self.c.engine.docker("stop", "-t", "20", self.c.container(node), timeout=60)

    def start(self, node):
        self.c.engine.docker("start", self.c.container(node), timeout=60)

    # Trees with checksums.

    def tree(self, name, where=None):
        where = where or f"{MOUNT}/{name}"
        self.sh(self.client, f"mkdir -p {where} && cd {where} && for i in $(seq {TREE}); do head -c $((i * 40000)) /dev/urandom > f$i || exit 1; done"
                             f" && sha256sum f* > sums && sync")
        self.trees.append(where)
        return where

    def verify(self):
        for where in self.trees:
            for node in (self.client, self.other):
                self.sh(node, f"cd {where} && sha256sum -c sums > /dev/null")

    @contextlib.contextmanager
    def busy(self, reads=False):
        """A program on the other client that writes, syncs and reads back, or reads a tree, all the time. Any error fails the task."""
        stop, wrong, rounds = threading.Event(), [], [0]
        where = f"{MOUNT}/busy"
        write = (f"mkdir -p {where} && cd {where} && head -c 700000 /dev/urandom > new && sync new && sha256sum new > new.sum && mv new w && "
                 "sed s/new/w/ new.sum > w.sum && sha256sum -c w.sum > /dev/null")
        read = " && ".join(f"cd {t} && sha256sum -c sums > /dev/null" for t in self.trees) or "true"

        def work():
            while not stop.is_set() and not wrong:
                try:
                    r = self.c.exec(self.other, "sh", "-c", read if reads else write, timeout=100)
                except Exception as e:
                    wrong.append(repr(e))
                    return
                if r.returncode:
                    wrong.append(r.stdout + r.stderr)
                rounds[0] += 1

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            yield
        finally:
            stop.set()
            worker.join(110)
        check("the program on the other client saw no error", not wrong, "".join(wrong))
        check("it did something", rounds[0] > 0)

    # Targets.

    def targets(self):
        return self.json("target", "list")["targets"]

    def targets_of(self, node):
        return [t["target"] for t in self.targets() if t["server"] == node.name]

    def folders(self, node):
        """The folder of each target of a node, below /var/lib/strake."""
        servers = self.json("status", want=None)["servers"]
        server = next(s for s in servers if s.get("name") == node.name)
        return {t["id"]: t["device"].split("/var/lib/strake/")[-1].split("/")[0] for t in server["targets"]}

    def configured(self, node, paths):
        """The node's configuration with targets in these folders of /var/lib/strake."""
        self.c.write_oss(node)
        path = f"{self.c.config(node)}/oss.toml"
        with open(path) as f:
            head = f.read().split("\n[[oss.targets]]")[0]
        size = self.c.saved["target_bytes"]
        self.c.put(node, "oss.toml", head + "".join(f'\n[[oss.targets]]\npath = "/var/lib/strake/{p}"\nsize = {size}\n' for p in paths))

    # The tasks.

    def task_up(self):
        """A cluster is up: what it says, and from any server."""
        self.healthy()
        for node in self.c.of("mds"):
            s = json.loads(self.at(self.desk, "strake", "status", "--mds", node.name, "--json").stdout)
            check("all servers are seen", len(s["servers"]) == 7 and all(x["reachable"] for x in s["servers"]))
        check("two clients", len(self.json("client", "list")["clients"]) == 2)

    def task_striping(self):
        """A striped folder, a pool, two copies."""
        d = f"{MOUNT}/striped"
        self.at(self.client, "mkdir", d)
        self.at(self.client, "lfs", "setstripe", "-c", "2", "-S", "1M", d)
        self.tree("striped")
        check("two stripes", self.at(self.client, "lfs", "getstripe", "-c", f"{d}/f1").stdout == "2\n")
        two = [self.targets_of(self.c.node(n))[0] for n in ("oss1", "oss2")]
        self.strake("pool", "new", "fast", *map(str, two))
        p = f"{MOUNT}/pooled"
        self.at(self.client, "mkdir", p)
        self.until("the pool takes files", lambda: self.at(self.client, "lfs", "setstripe", "-p", "fast", "--copies", "2", p, want=None).returncode == 0)
        self.tree("pooled")
        shown = self.at(self.client, "lfs", "getstripe", "--copies", f"{p}/f1").stdout
        copies = shown.strip().rsplit("\t", 1)[1].strip().split(",")
        check("both copies are in the pool", sorted(map(int, copies)) == sorted(two), shown)
        small = self.strake("pool", "new", "small", str(two[0])).stdout
        check("a pool on one server is noted", "note: pool small has targets on 1 storage servers" in small, small)
        self.until("it is refused for two copies",
                   lambda: "1 storage servers" in self.at(self.client, "lfs", "setstripe", "-p", "small", p, want=22).stderr)
        self.strake("pool", "destroy", "small")

    def task_killed_server(self):
        """A storage server is killed under a reader."""
        self.tree("read")
        node = self.c.node("oss3")
        with self.busy(reads=True):
            self.c.engine.docker("kill", self.c.container(node))
            said = self.strake("wait", "--redundant", "--timeout", "8", want=2).stdout
            check("what is wrong is said", "server-silent: oss3" in said and "copies-missing: " in said, said)
            self.start(node)
            self.redundant()

    def task_targets(self):
        """A target is drained, removed, added and balanced under a writer."""
        node = self.c.node("oss4")
        old = next(t for t, folder in self.folders(node).items() if folder == "target1")
        with self.busy():
            self.strake("target", "drain", str(old))
            self.configured(node, [f for t, f in self.folders(node).items() if t != old])
            self.stop(node)
            self.start(node)
            self.until("it can be removed", lambda: self.strake("target", "remove", str(old), want=None).returncode == 0)
            size = str(self.c.saved["target_bytes"] >> 30 or 1)
            self.at(node, "strake", "target", "add", "--config", "/etc/strake/oss.toml", "--path", "/var/lib/strake/target2", "--size-gib", size)
            self.strake("target", "wait")
        new = [t for t in self.targets_of(node) if t != old]
        check("the new one holds replicas", all(t["replicas"] > 0 for t in self.targets() if t["target"] in new))

    def task_blank_disk(self):
        """The disk of a target is swapped for a blank one."""
        node = self.c.node("oss2")
        self.tree("blank")
        before = set(self.targets_of(node))
        self.stop(node)
        shutil.rmtree(f"{self.c.volume(node)}/target1")
        with self.busy():
            self.start(node)
            now = self.until("a new target is there", lambda: set(self.targets_of(node)) - before)
            dead = self.until("the old one is dead", lambda: [t["target"] for t in self.targets() if t["target"] in before and not t["alive"]])
            check("one target is dead", len(dead) == 1 and len(now) == 1, f"{before} {now} {dead}")
            check("and named", "target-dead" in self.codes())
            self.strake("target", "give-up", str(dead[0]))
            self.until("it can be removed", lambda: self.strake("target", "remove", str(dead[0]), want=None).returncode == 0)
            self.redundant()

    def task_metadata(self):
        """A metadata server is replaced; two of three are lost, and the group is recovered."""
        lost = self.c.node("mds3")
        with self.busy():
            self.stop(lost)
            for name in os.listdir(self.c.volume(lost)):
                path = f"{self.c.volume(lost)}/{name}"
                shutil.rmtree(path) if os.path.isdir(path) and name != "lost+found" else None
            old = self.c.mds_id(lost)
            self.c.saved["ids"][lost.name] = old + 10
            self.c.write_mds(lost, join=True)
            self.start(lost)
            self.until("it is replaced", lambda: self.strake("mds", "replace", str(old), f"tcp:{lost.name}:{FABRIC}", want=None).returncode == 0)
            self.c.save()
        self.healthy()
        # Only mds1 survives.
        for name in ("mds2", "mds3"):
            self.stop(self.c.node(name))
        said = self.strake("wait", "--healthy", "--timeout", "10", want=2).stdout
        check("there is no leader", "no-leader: " in said and said.startswith("ERROR"), said)
        self.stop(self.desk)
        image, volume, config = self.c.saved["image"], self.c.volume(self.desk), self.c.config(self.desk)
        off = ["run", "--rm", "-v", f"{volume}:/var/lib/strake", "-v", f"{config}:/etc/strake", image, "mds"]
        shown = json.loads(self.c.engine.docker(*off, "inspect", "--json", "/var/lib/strake/mds").stdout)
        check("the survivor's state is shown", shown, str(shown))
        self.c.engine.docker(*off, "recover", "--dir", "/var/lib/strake/mds", "--id", "30", "--accept-loss")
        self.c.saved["ids"]["mds1"] = 30
        self.c.write_mds(self.desk)
        path = f"{self.c.config(self.desk)}/mds.toml"
        with open(path) as f:
            text = f.read()
        alone = "".join(f'peers = ["30=tcp:mds1:{FABRIC}"]\n' if line.startswith("peers = ") else line for line in text.splitlines(True))
        self.c.put(self.desk, "mds.toml", alone)
        self.start(self.desk)
        for n, name in enumerate(("mds2", "mds3")):
            node = self.c.node(name)
            for entry in os.listdir(self.c.volume(node)):
                if entry != "lost+found":
                    shutil.rmtree(f"{self.c.volume(node)}/{entry}")
            self.c.saved["ids"][name] = 20 + n
        for name in ("mds2", "mds3"):
            self.c.write_mds(self.c.node(name), join=True)
            self.start(self.c.node(name))
        self.c.save()
        self.until("the survivor leads", lambda: self.strake("mds", "list", "--mds", f"mds1:{FABRIC}", want=None).returncode == 0)
        self.until("the others are in", lambda: self.strake("mds", "add", f"tcp:mds2:{FABRIC}", f"tcp:mds3:{FABRIC}", "--mds", f"mds1:{FABRIC}",
                                                            want=None).returncode == 0)

    def task_client(self):
        """A client is evicted, cut off, and comes back."""
        host = self.client.name
        before = [x["id"] for x in self.json("client", "list")["clients"] if x["hostname"] == host]
        check("it has a session", len(before) == 1, str(before))
        self.strake("client", "evict", host)
        self.until("it comes back", lambda: self.sh(self.client, f"echo back > {MOUNT}/back", want=None, timeout=60).returncode == 0)
        now = [x["id"] for x in self.json("client", "list")["clients"] if x["hostname"] == host]
        check("with another session", len(now) == 1 and now != before, f"{before} {now}")
        log = self.c.engine.docker("logs", self.c.container(self.client))
        check("its log says why", "was evicted by an administrator" in log.stdout + log.stderr)
        self.c.engine.docker("network", "disconnect", self.c.name, self.c.container(self.client))
        self.until("it is thrown out", lambda: not [x for x in self.json("client", "list")["clients"] if x["hostname"] == host])
        self.c.engine.docker("network", "connect", "--ip", self.c.address(self.client), self.c.name, self.c.container(self.client))
        self.until("it is back", lambda: self.sh(self.client, f"echo again > {MOUNT}/back", want=None, timeout=60).returncode == 0)

    def task_full(self):
        """The file system is full, and is freed."""
        d = f"{MOUNT}/full"
        r = self.sh(self.client, f"mkdir -p {d} && cd {d} && i=0; while dd if=/dev/zero of=f$i bs=1M count=20; do i=$((i + 1)); done", want=None, timeout=900)
        check("no space is said", "No space left" in r.stderr, r.stderr[-300:])
        self.until("status says so", lambda: {"target-full", "nearly-full"} & set(self.codes()))
        self.sh(self.client, f"rm -r {d}")

    def task_restarts(self):
        """Every node is restarted in turn under a writer."""
        with self.busy():
            for node in [*self.c.of("oss"), *self.c.of("mds")]:
                self.c.engine.docker("restart", "-t", "20", self.c.container(node), timeout=90)
                self.redundant()

    def task_flipped(self):
        """A byte is flipped in each copy in turn, with another server away."""
        d = f"{MOUNT}/flipped"
        self.at(self.client, "mkdir", d)
        marks = [f"StrakeFS admin flipped {n} ".encode() * 3000 for n in range(4)]
        for n, mark in enumerate(marks):
            self.sh(self.client, f"i=0; while [ $i -lt 3000 ]; do printf 'StrakeFS admin flipped {n} '; i=$((i + 1)); done > {d}/m{n} && sync {d}/m{n}")
        shown = {n: self.at(self.client, "lfs", "getstripe", "--copies", f"{d}/m{n}").stdout.strip().rsplit("\t", 1)[1].strip().split(",")
                 for n in range(4)}
        servers = {t["target"]: t["server"] for t in self.targets()}
        for copy in (0, 1):
            for n in range(2):
                node = self.c.node(servers[int(shown[n][copy])])
                away = next(x for x in self.c.of("oss") if x is not node and x.name not in [servers[int(t)] for t in shown[n]])
                self.stop(away)
                found = self.flip(node, f"StrakeFS admin flipped {n} ".encode())
                check(f"bytes of m{n} are on {node.name}", found)
                self.strake("scrub", "start", "--wait", want=None, timeout=300)
                got = self.sh(self.other, f"echo 3 > /proc/sys/vm/drop_caches 2>/dev/null; sha256sum < {d}/m{n}").stdout.split()[0]
                check(f"m{n} is right", got == hashlib.sha256(marks[n]).hexdigest())
                self.start(away)
                self.redundant()

    def flip(self, node, mark):
        """Changes a byte in the node's data where `mark` stands."""
        found = False
        for name in os.listdir(self.c.volume(node)):
            path = f"{self.c.volume(node)}/{name}/data"
            if not os.path.exists(path):
                continue
            with open(path, "r+b") as f:
                at, keep = 0, b""
                while block := f.read(8 * MIB):
                    i = (keep + block).find(mark)
                    if i >= 0:
                        f.seek(at - len(keep) + i + 5)
                        f.write(b"?")
                        f.flush()
                        os.fsync(f.fileno())
                        found = True
                        break
                    at, keep = at + len(block), block[-len(mark):]
        return found

    def task_three_hosts(self):
        """Three hosts by hand, as the README says."""
        hosts = [Node(f"hand{n}", "mds", 60 + n, "a") for n in (1, 2, 3)]
        names = [h.name for h in hosts]
        docker, image = self.c.engine.docker, self.c.saved["image"]
        began = time.monotonic()
        try:
            for h in hosts:
                also = [f"--add-host={x.name}:{self.c.address(x)}" for x in hosts]
                docker("run", "-d", "--name", self.c.container(h), "--hostname", h.name, "--network", self.c.name, "--ip", self.c.address(h), *also,
                       "--label", f"strake.cluster={self.c.name}", "--security-opt", "seccomp=unconfined", "--ulimit", f"memlock={memlock()}",
                       "--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor=unconfined",
                       "--entrypoint", "/bin/sh", image, "-c", "while :; do sleep 1000; done")
                self.sh(h, "mkdir -p /var/lib/strake /srv/strake /mnt/ai")
            init = ["strake", "init", "--mds", ",".join(names), "--target", "/srv/strake/target0=1"]
            r = self.at(hosts[1], *init, want=1)
            check("the second host is told to wait for the key", "first" in r.stderr, r.stderr)
            self.at(hosts[0], *init)
            keys = {k: self.at(hosts[0], "cat", f"/etc/strake/{k}.key").stdout for k in ("cluster", "client")}
            for h in hosts[1:]:
                for k, text in keys.items():
                    self.sh(h, f"umask 077; printf '%s' '{text}' > /etc/strake/{k}.key")
                self.at(h, *init)
            for n, h in enumerate(hosts, 1):
                # In the place of systemctl: the ExecStart of the units.
                for unit in ("mds", "oss"):
                    docker("exec", "-d", self.c.container(h), "strake", unit, "--config", f"/etc/strake/{unit}-{n}.toml")
            for h in hosts:
                said = self.at(h, "strake", "wait", "--healthy", "--timeout", "60").stdout
                check("it is healthy", said.startswith("OK\n"), said)
            took = time.monotonic() - began
            for h in hosts:
                self.at(h, "strake", "mount", ",".join(names) + ":/", "/mnt/ai")
            self.sh(hosts[0], "head -c 3000000 /dev/urandom > /mnt/ai/f && sync /mnt/ai/f && sha256sum /mnt/ai/f > /mnt/ai/sum")
            for h in hosts:
                self.sh(h, "sha256sum -c /mnt/ai/sum")
            print(f"     up {took:.0f} s after the first command")
        finally:
            for h in hosts:
                docker("rm", "-f", self.c.container(h), check=False)

    def task_help(self):
        """Help, exit statuses and JSON of all commands."""
        top = self.strake("--help").stdout
        commands = [line.split()[0] for line in top.split("Commands:")[1].split("Options:")[0].strip().splitlines() if line.startswith("  ") and line[2] != " "]
        check("commands are listed", len(commands) > 15, top)
        for name in commands:
            if name not in ("help", "lfs"):
                text = self.strake(name, "--help").stdout
                check(f"help of {name}", "Usage: strake" in text, text)
        for line in self.strake("lfs", "--list-commands").stdout.split():
            check(f"help of lfs {line}", "usage: lfs" in self.strake("lfs", line, "--help").stdout)
        for words in ("status", "scrub status", "target list", "node list", "pool list", "mds list", "client list", "upgrade status"):
            check(f"{words} --json", isinstance(self.json(*words.split(), want=None), dict))
        for words in ("status --mds nowhere.invalid", "target list --mds nowhere.invalid --timeout 1", "wait --healthy --mds nowhere.invalid --timeout 1"):
            r = self.strake(*words.split(), want=None)
            check(f"{words} fails and says why", r.returncode in (1, 2) and (r.stderr or "no-answer" in r.stdout), f"{r.returncode} {r.stdout}{r.stderr}")
        r = self.strake("nonsense", want=2)
        check("a wrong command is told", "unrecognized subcommand" in r.stderr, r.stderr)


TASKS = [n[5:] for n in dir(Admin) if n.startswith("task_")]
ORDER = ["up", "striping", "killed_server", "targets", "blank_disk", "metadata", "client", "full", "restarts", "three_hosts", "flipped", "help"]
assert sorted(TASKS) == sorted(ORDER)


def main(folder, name, *wanted):
    names = [ORDER[int(w) - 1] if w.isdigit() else w for w in wanted] or ORDER
    admin, failed = Admin(folder, name), []
    for n in names:
        task = getattr(admin, f"task_{n}")
        began = time.monotonic()
        try:
            task()
            admin.healthy()
            admin.verify()
            print(f"ok   {n}: {task.__doc__} {time.monotonic() - began:.0f} s", flush=True)
        except Exception as e:
            failed.append(n)
            text = str(e) if isinstance(e, Failed) else traceback.format_exc()
            print(f"FAIL {n}: {task.__doc__}\n{text}\n{admin.c.status_text()}", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} tasks done" + (f", not: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        for i, n in enumerate(ORDER, 1):
            print(f"{i:2} {n:14} {getattr(Admin, f'task_{n}').__doc__}")
    else:
        sys.exit(main(*sys.argv[1:]))
