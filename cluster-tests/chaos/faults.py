"""The faults. Each is a generator: it does harm, says what it hit and for how many seconds that is to last, and then heals. While
that takes long it yields in how many seconds it wants to go on, so that a fault beside it ends in time."""
import concurrent.futures, contextlib, mmap, os, shutil, signal, subprocess, threading, time
from blocks import BLOCK, HEAD, MAGIC, MAX_BLOCKS, make
from cluster import ADMIN, FABRIC, MOUNT
from engine import alive
from workload import TOP

# Less than a client's term (30 s): nothing may be told to its programs.
LONGEST_CUT = 14
# How long an emptied storage server may take until its new targets are there, in seconds.
NEW_TARGETS = 60
# How long the space of a removed file may stay taken, in seconds. A metadata leader frees nothing in its first 30: whoever has the file
# open may not have told it yet.
FREED = 300


class NotRun(Exception):
    """Why a fault could not be had just now."""


class Faults:
    def __init__(self, cluster, shared, random, broken):
        """`broken` is told what a fault found that is a broken promise, though it can go on."""
        self.c, self.s, self.random, self.broken = cluster, shared, random, broken
        self.ended = set()      # nodes whose process was ended by a fault since anybody looked
        self.busy = set()
        # A metadata server that lost its disk is not taken in yet.
        self.replacing = False
        # By a file of `full_targets`.
        self.targets_filled = False
        # Who is cut off is no node to run commands on.
        cluster.avoid = lambda: self.busy
        # All flipped bits are on one target, so that never two replicas of a chunk are damaged.
        self.flip_node, self.flip_target = random.choice(cluster.of("oss")), random.randrange(2)
        self.flipped = 0
        self.filling, self.filling_lock = 0, threading.Lock()

    # Helpers.

    def pick(self, *roles):
        free = [n for n in self.c.of(*roles) if n.name not in self.busy]
        if not free:
            raise NotRun("every such node is being hit already")
        node = self.random.choice(free)
        self.busy.add(node.name)
        return node

    def leader(self):
        """The metadata leader, if it is known and free; else some metadata server."""
        report, _ = self.c.servers_status()
        for server in (report or {}).get("servers", []):
            raft = server.get("raft")
            if raft and raft["leader"] == raft["id"]:
                node = next((n for n in self.c.of("mds") if self.c.mds_id(n) == raft["id"]), None)
                if node and node.name not in self.busy:
                    self.busy.add(node.name)
                    return node
        return self.pick("mds")

    def client_is_hit(self, node, seconds):
        """Programs of that client may be told so for that long, and for a while after."""
        self.s.hit[node.number - 1] = time.monotonic() + seconds

    def kill(self, node):
        pid = self.c.pid(node)
        if not pid:
            raise NotRun(f"{node.name} does not run")
        self.ended.add(node.name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def netns(self, node, *command):
        pid = self.c.pid(node)
        r = subprocess.run(["nsenter", "-t", str(pid), "-n", *command], capture_output=True, text=True) if pid else None
        if not r or r.returncode:
            raise NotRun(f"{' '.join(command)} in {node.name}: {r.stderr.strip() if r else 'it does not run'}")
        return r.stdout

    def device(self, node):
        for line in self.netns(node, "ip", "-o", "-4", "addr", "show").splitlines():
            if f" {self.c.address(node)}/" in line:
                return line.split()[1]
        raise NotRun(f"{node.name} has no address")

    def undo(self, node, *command):
        """Takes a rule away. A node that was ended since has none any more; of one that runs it may not stay."""
        before = self.c.pid(node)
        try:
            self.netns(node, *command)
        except NotRun as e:
            if node.name not in self.ended and before and self.c.pid(node) == before:
                raise RuntimeError(f"not undone: {e}") from e

    def seconds(self, low=1.0, high=LONGEST_CUT):
        return round(self.random.uniform(low, high), 1)

    # Processes.

    def sigkill(self):
        """A server's first process, the metadata leader's in three of ten; the engine starts it again."""
        node = self.leader() if self.random.random() < 0.3 else self.pick("mds", "oss")
        self.kill(node)
        yield node.name, 0

    def sigkill_all(self):
        """Every server at once: what any memory held is gone."""
        nodes = self.c.of("mds", "oss")
        if self.busy:
            raise NotRun("another fault is at work")
        self.busy |= {n.name for n in nodes}
        for node in nodes:
            self.kill(node)
        yield "all servers", 0

    def sigkill_mount(self):
        """The mount's daemon; its supervisor starts the next one, and programs must not notice."""
        node = self.pick("client")
        pid = self.c.pid(node)
        daemon = daemon_of(pid)
        if not daemon:
            raise NotRun(f"{node.name} has no daemon")
        os.kill(daemon, signal.SIGKILL)
        yield f"daemon of {node.name}", 0

    def sigkill_client(self):
        """A client with all it has; what was not synced may be lost, and programs are told."""
        node = self.pick("client")
        self.client_is_hit(node, 1e9)
        killed = self.kill(node)
        yield node.name, 0
        end = time.monotonic() + 60
        # The process that was killed may be there, and show its mount, for a while.
        while (self.c.pid(node) == killed or not self.c.is_mounted(node)) and time.monotonic() < end:
            yield 0.1
        self.s.pids[node.number - 1] = self.c.pid(node)
        self.client_is_hit(node, 3)

    def sigstop(self):
        """A node's first process is stopped for a while; its connections stay."""
        node = self.leader() if self.random.random() < 0.2 else self.pick("mds", "oss", "client")
        pid = self.c.pid(node)
        if not pid:
            raise NotRun(f"{node.name} does not run")
        os.kill(pid, signal.SIGSTOP)
        yield node.name, self.seconds()
        if alive(pid):
            os.kill(pid, signal.SIGCONT)

    def pause(self):
        """A container is frozen whole."""
        node = self.pick("mds", "oss", "client")
        for _ in range(5):
            r = self.c.engine.docker("pause", self.c.container(node), check=False)
            if r.returncode == 0:
                break
            # A program waits for a mount whose daemon is frozen already, and cannot be frozen itself while it does.
            self.c.engine.docker("unpause", self.c.container(node), check=False)
            time.sleep(0.5)
        else:
            raise NotRun(f"docker pause {node.name}: {r.stderr.strip()}")
        yield node.name, self.seconds()
        self.c.engine.docker("unpause", self.c.container(node))

    def rolling_restart(self):
        """In order, each when all is in sync."""
        if self.busy:
            raise NotRun("another fault is at work")
        nodes = self.c.of("mds", "oss")
        self.busy |= {n.name for n in nodes}
        for node in nodes:
            end = time.monotonic() + 60
            while self.c.servers_status()[1] != 0:
                if time.monotonic() > end:
                    raise NotRun(f"before {node.name}: not all is in sync")
                time.sleep(0.3)
            self.ended.add(node.name)
            self.c.engine.docker("restart", "-t", "20", self.c.container(node))
        yield "all servers, one after the other", 0

    # Links.

    def disconnect(self):
        """A node is taken off the network."""
        node = self.pick("mds", "oss", "client")
        self.c.engine.docker("network", "disconnect", self.c.name, self.c.container(node))
        yield node.name, self.seconds()
        self.c.engine.docker("network", "connect", "--ip", self.c.address(node), self.c.name, self.c.container(node))

    def one_way(self):
        """All that a node sends, or all that it is sent, is dropped."""
        node, chain = self.pick("mds", "oss", "client"), self.random.choice(("INPUT", "OUTPUT"))
        self.netns(node, "iptables", "-w", "30", "-I", chain, "!", self.random_lo(chain), "lo", "-j", "DROP")
        yield f"{node.name}, {'to' if chain == 'INPUT' else 'from'} it", self.seconds()
        self.undo(node, "iptables", "-w", "30", "-D", chain, "!", self.random_lo(chain), "lo", "-j", "DROP")

    @staticmethod
    def random_lo(chain):
        return "-i" if chain == "INPUT" else "-o"

    def cut_pair(self):
        """Two nodes that cannot reach each other, though everybody else reaches both."""
        one = self.pick("mds", "oss", "client")
        two = self.pick("oss")
        self.netns(one, "iptables", "-w", "30", "-I", "INPUT", "-s", self.c.address(two), "-j", "DROP")
        self.netns(two, "iptables", "-w", "30", "-I", "INPUT", "-s", self.c.address(one), "-j", "DROP")
        yield f"{one.name} and {two.name}", self.seconds()
        self.undo(one, "iptables", "-w", "30", "-D", "INPUT", "-s", self.c.address(two), "-j", "DROP")
        self.undo(two, "iptables", "-w", "30", "-D", "INPUT", "-s", self.c.address(one), "-j", "DROP")

    def cut_racks(self):
        """The link between the racks: neither reaches the other. Rack a has the majority of the metadata servers."""
        if self.busy:
            raise NotRun("another fault is at work")
        nodes = [n for n in self.c.nodes.values() if n.rack == "b"]
        self.busy |= {n.name for n in nodes}
        rule = ["INPUT", "-s", self.c.subnet_of("a"), "-j", "DROP"], ["OUTPUT", "-d", self.c.subnet_of("a"), "-j", "DROP"]
        for node in nodes:
            for r in rule:
                self.netns(node, "iptables", "-w", "30", "-I", *r)
        yield "racks a and b", self.seconds()
        for node in nodes:
            for r in rule:
                self.undo(node, "iptables", "-w", "30", "-D", *r)

    def slow_link(self):
        """What a node sends passes at a low rate, with a short queue."""
        node, rate = self.pick("mds", "oss", "client"), self.random.choice((2, 5, 20))
        device = self.device(node)
        self.netns(node, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms")
        yield f"{node.name}, {rate} Mbit/s", self.seconds()
        self.undo(node, "tc", "qdisc", "del", "dev", device, "root")

    def lossy_link(self):
        """A share of the packets that a node is sent is lost."""
        node, share = self.pick("mds", "oss", "client"), self.random.choice((0.02, 0.1, 0.3))
        rule = ["INPUT", "!", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        self.netns(node, "iptables", "-w", "30", "-I", *rule)
        yield f"{node.name}, {share:.0%} lost", self.seconds()
        self.undo(node, "iptables", "-w", "30", "-D", *rule)

    def late_link(self):
        """Delay, jitter, reordering and doubles, where the kernel has netem."""
        node, ms = self.pick("mds", "oss", "client"), self.random.choice((5, 30, 100))
        device = self.device(node)
        self.netns(node, "tc", "qdisc", "add", "dev", device, "root", "netem", "delay", f"{ms}ms", f"{ms // 2}ms", "duplicate", "1%")
        yield f"{node.name}, {ms} ms", self.seconds()
        self.undo(node, "tc", "qdisc", "del", "dev", device, "root")

    # Disks.

    def full_begins(self):
        """Programs may be told ENOSPC from now on."""
        with self.filling_lock:
            self.filling += 1
            self.s.full[0] = time.monotonic() + 1e9

    def full_ends(self, seconds):
        """And for so long from now on: freed space is noticed a little later."""
        with self.filling_lock:
            self.filling -= 1
            if not self.filling:
                self.s.full[0] = time.monotonic() + seconds

    def space_comes_back(self):
        """Waits for it, while other faults go on. Ends the time of ENOSPC in any case, so that it cannot excuse the rest of the run."""
        is_back, end = False, time.monotonic() + FREED
        try:
            while not is_back and time.monotonic() < end:
                time.sleep(1)
                is_back = self.has_space()
        finally:
            if not is_back:
                self.broken(f"a removed file's space is not back after {FREED} s, or nobody could be asked")
            self.full_ends(10)

    def has_space(self):
        """Whether no target is half full, as far as the metadata servers know."""
        report, _ = self.c.servers_status()
        targets = report["map"]["targets"] if report else []
        return bool(targets) and all(2 * t["used"] < t["capacity"] for t in targets if t["capacity"])

    def fill(self, node):
        filler = f"{self.c.volume(node)}/filler"
        self.full_begins()
        try:
            with open(filler, "wb") as f:
                at, step = 0, 1 << 30
                while step >= BLOCK:
                    try:
                        os.posix_fallocate(f.fileno(), at, step)
                        at += step
                    except OSError:
                        step //= 2
            yield f"{node.name}, {at >> 20} MiB", self.seconds(4, 12)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(filler)
            self.full_ends(10)

    def full_mds_volume(self):
        """A metadata server's volume is filled from outside."""
        yield from self.fill(self.pick("mds"))

    def full_oss_volume(self):
        """An object server's volume is filled from outside: its targets' sparse files and their tables get no more space."""
        yield from self.fill(self.pick("oss"))

    def full_targets(self):
        """A chain's targets are filled by a file: whoever writes there is told ENOSPC."""
        if self.targets_filled:
            raise NotRun("another one is at work")
        client = self.pick("client")
        folder = f"{TOP}/full"
        where = f"{self.s.root(client.number - 1)}/{folder}"
        self.full_begins()
        self.targets_filled = True
        with contextlib.ExitStack() as after:
            after.callback(setattr, self, "targets_filled", False)
            after.callback(threading.Thread(target=self.space_comes_back, daemon=True).start)
            after.callback(shutil.rmtree, where, ignore_errors=True)
            os.mkdir(where)
            report, _ = self.c.servers_status()
            alive_ones = [t["id"] for t in (report or {"map": {"targets": []}})["map"]["targets"] if t["alive"]]
            if not alive_ones:
                raise NotRun("which targets there are is not known")
            ost = self.random.choice(alive_ones)
            r = self.c.exec(client, "lfs", "setstripe", "-c", "1", "-i", str(ost), f"{MOUNT}/{folder}")
            if r.returncode:
                raise NotRun(f"lfs setstripe: {r.stderr.strip()}")
            piece, size = os.urandom(1 << 20), 0
            f = os.open(f"{where}/fill", os.O_WRONLY | os.O_CREAT)
            try:
                end = time.monotonic() + 90
                while time.monotonic() < end:
                    size += os.pwrite(f, piece, size)
                raise NotRun("not full within 90 s")
            except OSError as e:
                if e.errno != 28:
                    raise NotRun(f"filling: {e}") from e
            finally:
                os.close(f)
            yield f"the chain of OST {ost} by {client.name}, {size >> 20} MiB", self.seconds(2, 5)

    def bit_flips(self):
        """Bits of blocks that are in use, on one replica; read back by way of each replica, which repairs them."""
        if self.busy:
            raise NotRun("another fault is at work")
        end = time.monotonic() + 60
        while self.c.servers_status()[1] != 0:
            if time.monotonic() > end:
                raise NotRun("not all is in sync")
            time.sleep(0.5)
        node, files = self.flip_node, self.s.files
        hit, before = set(), self.flipped
        path = f"{self.c.volume(node)}/target{self.flip_target}/data"
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            for at, head in used_blocks(fd, self.random, 4000):
                _, f, generation, index, version = head
                if f < files.count and index < MAX_BLOCKS and files.acked[f * MAX_BLOCKS + index] == version and flip(fd, at, self.random, head):
                    hit.add(f)
                    self.flipped += 1
                    if len(hit) >= 3:
                        break
        finally:
            os.close(fd)
        if not hit:
            raise NotRun(f"{node.name} target{self.flip_target} has no block that is in use")
        yield f"{node.name} target{self.flip_target}, {self.flipped - before} blocks, of files {sorted(hit)}", 0

    # Lost disks.

    def wiped_mds(self):
        """As docs/operations.md says: an empty folder, a new id, `join`, and `strake mds replace`."""
        # Two of three at once nobody survives: the group must have taken in the one before.
        if self.replacing:
            raise NotRun("another metadata server is being replaced")
        self.replacing = True
        try:
            self.wait("not all is in sync", 60, lambda r, code: r if code == 0 else None)
            node = self.pick("mds")
            old, new = self.c.mds_id(node), max(self.c.saved["ids"].values()) + 1
            self.ended.add(node.name)
            self.c.engine.docker("stop", "-t", "0", self.c.container(node))
            shutil.rmtree(f"{self.c.volume(node)}/mds")
            self.c.saved["ids"][node.name] = new
            self.c.save()
            self.c.write_mds(node, join=True)
            self.c.engine.docker("start", self.c.container(node))
            yield f"{node.name}: id {old} becomes {new}", 0
            others = [f"tcp:{m.name}:{FABRIC}" for m in self.c.of("mds") if m is not node]
            end = time.monotonic() + 90
            while True:
                r = yield from self.aside("mds", "replace", str(old), f"tcp:{node.name}:{FABRIC}", "--mds", ",".join(others), "--timeout", "40")
                if r and r.returncode == 0:
                    break
                # It starts, a leader has just been elected, or time was short: the command says so and is repeated.
                if time.monotonic() > end:
                    raise RuntimeError(f"strake mds replace: {r.stderr.strip() if r else 'no answer'}")
                yield 1
        finally:
            self.replacing = False
        for m in self.c.of("mds"):
            self.c.write_mds(m)

    def wiped_oss(self):
        """A storage server loses both its targets. As docs/operations.md says: it starts with empty ones, and the old ones are given up."""
        if self.busy:
            raise NotRun("another fault is at work")
        node = self.random.choice([n for n in self.c.of("oss") if n is not self.flip_node])
        # The copies of what is wiped must be there, and good.
        in_sync = lambda: self.wait("not all is in sync", 60, lambda r, code: r if code == 0 else None)
        in_sync()
        if self.flipped:
            scrub = self.c.strake("scrub", "start", "--wait", "--admin", f"{self.flip_node.name}:{ADMIN}")
            if not scrub or scrub.returncode != 0:
                raise NotRun(f"flipped bits may not be repaired yet: {scrub.stderr.strip() if scrub else 'no answer'}")
        report = in_sync()
        self.busy.add(node.name)
        where = next(n["id"] for n in report["map"]["nodes"] if n["name"] == node.name)
        of_node = lambda r: {t["id"] for t in r["map"]["targets"] if t["node"] == where and t["alive"]}
        old = of_node(report)
        self.ended.add(node.name)
        self.c.engine.docker("stop", "-t", "0", self.c.container(node))
        for t in (0, 1):
            shutil.rmtree(f"{self.c.volume(node)}/target{t}")
        self.c.engine.docker("start", self.c.container(node))
        yield f"{node.name}: targets {sorted(old)}", 0
        came = lambda r, _: r if len(of_node(r) - old) == len(old) else None
        try:
            yield from self.waiting("no new targets", NEW_TARGETS, came)
        except NotRun as e:
            log = self.c.engine.docker("logs", "--tail", "8", self.c.container(node), check=False)
            self.broken(f"healing: {e}\n{self.c.status_text()}\n{node.name} has logged last:\n{log.stdout}{log.stderr}")
            # Once is enough: without them the old ones cannot go, and all that follows would not be in service.
            try:
                yield from self.waiting("still no new targets", 5 * NEW_TARGETS, came)
            except NotRun as e:
                raise RuntimeError(str(e)) from e
        # What they had moves, then they can go; until then the command refuses.
        yield from self.target("give-up", old, 60)
        yield from self.target("remove", old, 300)

    def target(self, what, targets, limit):
        end = time.monotonic() + limit
        while True:
            r = yield from self.aside("target", what, *map(str, sorted(targets)), "--mds", ",".join(f"tcp:{m.name}:{FABRIC}" for m in self.c.of("mds")))
            if r and r.returncode == 0:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"strake target {what}: {r.stderr.strip() if r else 'no answer'}")
            yield 1

    def aside(self, *command):
        """A command that changes the cluster, whose end is waited for while other faults end."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            run = pool.submit(self.c.strake, *command, "--cluster-key", "/etc/strake/cluster.key", timeout=70)
            while not run.done():
                yield 0.1
            return run.result()

    def waiting(self, what, limit, done):
        """What `done` makes of the status, as soon as it makes something of it."""
        began = time.monotonic()
        while True:
            report, code = self.c.servers_status()
            result = done(report, code) if report and report["map"] else None
            if result:
                return result
            if time.monotonic() > began + limit:
                raise NotRun(f"{what} within {limit} s")
            yield 0.5

    def wait(self, what, limit, done):
        """Likewise, and nothing else meanwhile."""
        waiting = self.waiting(what, limit, done)
        while True:
            try:
                time.sleep(next(waiting))
            except StopIteration as e:
                return e.value

    def heal_everything(self):
        """Also after a run that was broken off: whatever is paused, stopped, cut off or full."""
        for node in self.c.nodes.values():
            name = self.c.container(node)
            self.c.engine.docker("unpause", name, check=False)
            self.c.engine.docker("start", name, check=False)
            self.c.engine.docker("network", "connect", "--ip", self.c.address(node), self.c.name, name, check=False)
            pid = self.c.pid(node)
            if pid:
                os.kill(pid, signal.SIGCONT)
                with contextlib.suppress(NotRun):
                    self.netns(node, "iptables", "-w", "30", "-F", "INPUT")
                    self.netns(node, "iptables", "-w", "30", "-F", "OUTPUT")
                    self.netns(node, "tc", "qdisc", "del", "dev", self.device(node), "root")
            filler = f"{self.c.volume(node)}/filler"
            if os.path.exists(filler):
                os.unlink(filler)

    def kinds(self):
        """The kinds of faults with their weights; and those that cannot be had, each with its reason."""
        kinds = {"sigkill": 10, "sigkill_all": 2, "sigkill_mount": 4, "sigkill_client": 3, "sigstop": 6, "pause": 5, "disconnect": 5, "one_way": 6,
                 "cut_pair": 5, "cut_racks": 3, "slow_link": 4, "lossy_link": 5, "late_link": 4, "full_mds_volume": 3, "full_oss_volume": 3, "full_targets": 2,
                 "bit_flips": 4, "rolling_restart": 2, "wiped_mds": 2, "wiped_oss": 2}
        cannot = {}
        node = self.c.of("client")[0]
        for kind, command in (("late_link", ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]),
                              ("slow_link", ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", "64kb", "latency", "1s"]),
                              ("lossy_link", ["iptables", "-w", "30", "-A", "OUTPUT", "-m", "statistic", "--mode", "random", "--probability", "0.5", "-d", "203.0.113.1", "-j", "DROP"])):
            try:
                self.netns(node, *command)
                back = ["tc", "qdisc", "del", "dev", "lo", "root"] if command[0] == "tc" else ["iptables", "-w", "30", "-D", *command[4:]]
                self.netns(node, *back)
            except NotRun as e:
                cannot[kind] = str(e).splitlines()[0]
        if not self.c.saved["limited"]:
            for kind in ("full_mds_volume", "full_oss_volume"):
                cannot[kind] = "no loop devices: the volumes are folders of this machine's disk"
        for kind in cannot:
            kinds.pop(kind, None)
        return kinds, cannot


def daemon_of(pid):
    """The daemon of the client's mount, whose supervisor is `pid`."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            children = f.read().split()
    except OSError:
        return None
    for child in children:
        try:
            with open(f"/proc/{child}/cmdline", "rb") as f:
                command = f.read()
        except OSError:
            continue
        # Not a mount of one replica that was taken away, nor what is left of one.
        if command and b"--read-replica" not in command:
            return int(child)
    return None


def used_blocks(fd, random, tries):
    """Places in a target's data file that hold a block of the workload, in random order, as far as looked for."""
    size = os.fstat(fd).st_size
    runs, at = [], 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        runs.append((begin // BLOCK, at // BLOCK))
    if not runs:
        return
    with mmap.mmap(-1, BLOCK) as page:
        for _ in range(tries):
            begin, end = random.choices(runs, [e - b for b, e in runs])[0]
            at = random.randrange(begin, max(end, begin + 1)) * BLOCK
            if os.preadv(fd, [page], at) == BLOCK and page[:8] == MAGIC:
                yield at, HEAD.unpack_from(page)


def flip(fd, at, random, head):
    """One bit, unless the place has been given to something else meanwhile."""
    with mmap.mmap(-1, BLOCK) as page:
        os.preadv(fd, [page], at)
        if page[:] != make(*head[1:]):
            return False
        bit = random.randrange(BLOCK * 8)
        page[bit // 8] ^= 1 << bit % 8
        return os.pwritev(fd, [page], at) == BLOCK
