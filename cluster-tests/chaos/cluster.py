"""The cluster: which nodes there are, the files that configure them, and `up`, `down`, `status`, `shell`, `logs`."""
import fcntl, hmac, json, os, resource, secrets, shutil, subprocess, sys, time
from engine import Engine, fail, import_image, say, until

IMAGE = "strake:local"
FABRIC, ADMIN = 7400, 7401
MIB = 1 << 20
MOUNT = "/mnt/strake"


class Node:
    """A container. `rack` is a subnet of the cluster's network, a label, and for storage servers where copies are kept apart."""

    def __init__(self, name, role, number, rack):
        self.name, self.role, self.number, self.rack = name, role, number, rack


def memlock():
    """How much memory a process may lock here, in bytes; -1: any amount. A container gets no more."""
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return -1 if most == resource.RLIM_INFINITY else most


def plan(mds=3, oss=4, clients=2):
    """Odd ones in rack a, even ones in rack b; so either rack alone lacks a majority or has one."""
    counts = (("mds", mds), ("oss", oss), ("client", clients))
    return [Node(f"{role}{n}", role, n, "ab"[(n + 1) % 2]) for role, count in counts for n in range(1, count + 1)]


class Cluster:
    def __init__(self, folder, name):
        self.folder, self.name = os.path.abspath(folder), name
        self.file = f"{self.folder}/cluster.json"
        self.engine = Engine(self.folder)
        self.nodes = {n.name: n for n in plan()}
        self.saved = {"subnet": "10.89", "limited": False, "ids": {}}
        # Names of nodes that commands are better not run on just now.
        self.avoid = set
        if os.path.exists(self.file):
            with open(self.file) as f:
                self.saved = json.load(f)
            self.name = self.saved["name"]

    # What is where.

    def of(self, *roles):
        return [n for n in self.nodes.values() if n.role in roles]

    def node(self, name):
        if name not in self.nodes:
            fail(f"no node {name}; there are {', '.join(self.nodes)}")
        return self.nodes[name]

    def container(self, node):
        return f"{self.name}-{node.name}"

    def address(self, node):
        return f"{self.saved['subnet']}.{1 if node.rack == 'a' else 2}.{ {'mds': 10, 'oss': 20, 'client': 30}[node.role] + node.number}"

    def subnet_of(self, rack):
        return f"{self.saved['subnet']}.{1 if rack == 'a' else 2}.0/24"

    def volume(self, node):
        """The folder of this machine that is the node's /var/lib/strake."""
        return f"{self.folder}/volumes/{node.name}"

    def config(self, node):
        return f"{self.folder}/config/{node.name}"

    def save(self):
        self.saved["name"] = self.name
        with open(self.file + ".new", "w") as f:
            json.dump(self.saved, f, indent=1)
        os.rename(self.file + ".new", self.file)

    def must_be_up(self):
        if not os.path.exists(self.file):
            fail("no cluster is up; make one with ./cluster up")
        if not self.engine.answers():
            fail("the container engine does not answer; ./cluster up starts it again")

    # Configuration, as an administrator would write it (docs/operations.md).

    def mds_id(self, node):
        return self.saved["ids"].get(node.name, node.number)

    def write_mds(self, node, join=False):
        peers = [f"{self.mds_id(m)}=tcp:{m.name}:{FABRIC}" for m in self.of("mds")]
        self.put(node, "mds.toml", f"""cluster_key = "/etc/strake/cluster.key"

[mds]
id = {self.mds_id(node)}
name = "{node.name}"
dir = "/var/lib/strake/mds"
listen = "tcp:0.0.0.0:{FABRIC}"
advertise = "tcp:{node.name}:{FABRIC}"
admin = "0.0.0.0:{ADMIN}"
peers = {json.dumps(peers)}
join = {"true" if join else "false"}
default_copies = 2
expect_targets = {2 * len(self.of("oss"))}
""")

    def write_oss(self, node):
        targets = "".join(f'\n[[oss.targets]]\npath = "/var/lib/strake/target{t}"\nsize = {self.saved["target_bytes"]}\n' for t in (0, 1))
        self.put(node, "oss.toml", f"""cluster_key = "/etc/strake/cluster.key"

[oss]
name = "{node.name}"
rack = "{node.rack}"
listen = "tcp:0.0.0.0:{FABRIC}"
advertise = "tcp:{node.name}:{FABRIC}"
admin = "0.0.0.0:{ADMIN}"
mds = {json.dumps([f"tcp:{m.name}:{FABRIC}" for m in self.of("mds")])}
{targets}""")

    def write_mount(self, node):
        self.put(node, "mount.toml", f"""client_key = "/etc/strake/client.key"

[mount]
mds = {json.dumps([f"{m.name}:{FABRIC}" for m in self.of("mds")])}
mountpoint = "{MOUNT}"
""")

    def put(self, node, name, text, mode=0o644):
        path = f"{self.config(node)}/{name}"
        with open(path + ".new", "w") as f:
            f.write(text)
        os.chmod(path + ".new", mode)
        os.rename(path + ".new", path)

    def write_configs(self):
        key = secrets.token_bytes(32)
        for node in self.nodes.values():
            os.makedirs(self.config(node))
            if node.role != "client":
                self.put(node, "cluster.key", key.hex() + "\n", 0o600)
                self.put(node, "admin.toml", f"mds = {json.dumps([f'{m.name}:{FABRIC}' for m in self.of('mds')])}\n")
                {"mds": self.write_mds, "oss": self.write_oss}[node.role](node)
        client_key = self.client_key(key)
        for node in self.of("client"):
            self.write_mount(node)
            self.put(node, "client.key", client_key, 0o600)

    def client_key(self, key):
        """All that a mount needs, and nothing that a server could be made of."""
        r = self.engine.docker("run", "--rm", "-v", f"{self.config(self.of('mds')[0])}:/etc/strake:ro", self.saved["image"],
                               "client-key", "--cluster-key", "/etc/strake/cluster.key", check=False)
        # A program of a former version does not know the command. As docs/formats.md has it, servers cannot be told by it.
        return r.stdout if r.returncode == 0 else hmac.new(key, b"strake client v1", "sha256").hexdigest() + "\n"

    # Volumes: each an ext4 of its own, so that one can be full; plain folders where no loop device is to be had.

    def make_volumes(self, gib):
        limited = os.geteuid() == 0
        for node in self.of("mds", "oss"):
            at, image = self.volume(node), f"{self.folder}/volumes/{node.name}.img"
            os.makedirs(at)
            if limited:
                with open(image, "w") as f:
                    f.truncate((gib if node.role == "oss" else 2) << 30)
                made = subprocess.run(f"mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1 '{image}' && mount -o loop '{image}' '{at}'",
                                      shell=True, capture_output=True, text=True)
                if made.returncode:
                    say(f"volumes are plain folders: {made.stderr.strip()}")
                    limited = False
                    os.unlink(image)
        self.saved["limited"] = limited

    def mount_volumes(self):
        """Again after this machine was restarted."""
        for node in self.of("mds", "oss"):
            if self.saved["limited"] and not os.path.ismount(self.volume(node)):
                r = subprocess.run(["mount", "-o", "loop", f"{self.volume(node)}.img", self.volume(node)], capture_output=True, text=True)
                if r.returncode:
                    fail(f"{node.name}: its volume cannot be mounted: {r.stderr.strip()}")

    # Containers.

    def run(self, node):
        hosts = [f"--add-host={n.name}:{self.address(n)}" for n in self.nodes.values()]
        command = ["run", "-d", "--name", self.container(node), "--hostname", node.name, "--restart", "always",
                   "--network", self.name, "--ip", self.address(node), *hosts,
                   "--label", f"strake.cluster={self.name}", "--label", f"strake.rack={node.rack}",
                   "--security-opt", "seccomp=unconfined", "--log-opt", "max-size=64m",
                   "--ulimit", f"memlock={memlock()}", "-v", f"{self.config(node)}:/etc/strake"]
        if node.role == "client":
            command += ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor=unconfined", self.saved["image"],
                        "mount", "--config", "/etc/strake/mount.toml", "--foreground", "-o", "retry=10"]
        else:
            command += ["-v", f"{self.volume(node)}:/var/lib/strake", self.saved["image"],
                        node.role, "--config", f"/etc/strake/{node.role}.toml"]
        self.engine.docker(*command)

    def pid(self, node):
        """The node's first process, in this machine's numbers; 0 when it does not run."""
        r = self.engine.docker("inspect", "-f", "{{.State.Pid}}", self.container(node), check=False)
        return int(r.stdout.strip() or 0) if r.returncode == 0 else 0

    def exec(self, node, *command, timeout=120):
        return self.engine.docker("exec", self.container(node), *command, check=False, timeout=timeout)

    def strake(self, *command, timeout=120):
        """A command of the program within a metadata server's container that runs, if possible of one that is not cut off."""
        r, avoid = None, self.avoid()
        for node in sorted(self.of("mds"), key=lambda n: n.name in avoid):
            try:
                r = self.exec(node, "strake", *command, timeout=timeout)
            except subprocess.TimeoutExpired:
                continue
            if r.returncode in (0, 1, 2, 3, 4) and "is not running" not in r.stderr and "is paused" not in r.stderr:
                return r
        return r

    def admin(self):
        return ",".join(f"{n.name}:{ADMIN}" for n in self.of("mds", "oss"))

    def servers_status(self):
        """`strake status --json` and its exit status; nothing when nobody could be asked."""
        r = self.strake("status", "--json", "--admin", self.admin())
        try:
            return (json.loads(r.stdout), r.returncode)
        except (AttributeError, ValueError):
            return (None, 1)

    def status_text(self):
        """What `strake status` shows."""
        r = self.strake("status", "--admin", self.admin())
        return r.stdout + r.stderr if r else "nobody answers"

    def is_mounted(self, node):
        pid = self.pid(node)
        try:
            with open(f"/proc/{pid}/mounts") as f:
                return any(line.split()[1] == MOUNT for line in f)
        except OSError:
            return False

    def all_in_service(self):
        return self.servers_status()[1] == 0 and all(self.is_mounted(c) for c in self.of("client"))

    # Commands.

    def probe(self, _args):
        os.makedirs(self.folder)
        try:
            self.engine.ensure()
        finally:
            self.engine.stop()

    def up(self, args):
        if os.path.exists(self.file):
            say("starting the cluster that is there, with the image it was made with; ./cluster down removes it")
            # First: an engine that starts begins its containers, and their servers would take the bare folders for new ones.
            self.mount_volumes()
            self.engine.ensure()
            for node in self.nodes.values():
                self.engine.docker("start", self.container(node), timeout=300)
        else:
            self.create(args)
        say("waiting for service")
        began = time.monotonic()
        until("the cluster is not in service (./cluster status, ./cluster logs NODE)", self.all_in_service, args.timeout)
        say(f"in service after {time.monotonic() - began:.1f} s: 3 metadata servers, 4 storage servers, 2 clients with {MOUNT}")
        print("./cluster status | shell NODE | logs NODE | chaos | down")
        print("in a node of a server: ./cluster shell mds1 strake status, strake target list, and so on")
        if self.engine.own:
            print(f"for docker itself: DOCKER_HOST=unix://{self.engine.run_dir}/docker.sock")

    def create(self, args):
        if os.path.exists(self.folder) and os.listdir(self.folder):
            if set(os.listdir(self.folder)) - {"engine", "engine.json", "engine.log"}:
                fail(f"{self.folder} holds a cluster that was not made whole; ./cluster down takes it away")
        if args.target_mib < 256:
            fail("--target-mib: at least 256")
        os.makedirs(self.folder, exist_ok=True)
        # Volumes are sparse. Half of all targets is more than a run of chaos writes; the rest is tables, logs and the image.
        need, free = (4 * args.target_mib << 20) + (2 << 30), shutil.disk_usage(self.folder).free
        if free < need:
            fail(f"{free / (1 << 30):.1f} GiB are free in {self.folder}, and {need / (1 << 30):.1f} are needed: make room, or choose a smaller "
                 "--target-mib, or another folder (--dir before the command)")
        self.engine.ensure()
        if args.image:
            self.saved["image"] = args.image
        else:
            if not os.environ.get("STRAKE"):
                fail("STRAKE names no program")
            self.saved["image"] = IMAGE
            import_image(self.engine, os.environ["STRAKE"], IMAGE)
        self.saved.update(subnet=args.subnet, target_bytes=args.target_mib * MIB)
        self.saved["ids"] = {n.name: n.number for n in self.of("mds")}
        say("writing configuration files and volumes")
        self.write_configs()
        # Room for two targets in whole, and their tables.
        self.make_volumes(2 * args.target_mib // 1024 + 2)
        say(f"making the network {self.name}: {args.subnet}.0.0/16, rack a is {self.subnet_of('a')}, rack b {self.subnet_of('b')}")
        self.engine.docker("network", "create", "--subnet", f"{args.subnet}.0.0/16", "--label", f"strake.cluster={self.name}", self.name)
        for node in self.nodes.values():
            say(f"starting {node.name} (rack {node.rack}, {self.address(node)})")
            self.run(node)
        self.save()

    def down(self, _args):
        if not os.path.exists(self.folder):
            say("no cluster here")
            return
        held = self.hold()
        if self.engine.own and not self.engine.runs():
            # Killed: only it knows how to take its containers away.
            self.engine.ensure()
        if self.engine.answers():
            ids = self.engine.docker("ps", "-aq", "--filter", f"label=strake.cluster={self.name}").stdout.split()
            if ids:
                say(f"removing {len(ids)} containers")
                # The ones that are paused or stopped go, too.
                for i in ids:
                    self.engine.docker("unpause", i, check=False)
                self.engine.docker("rm", "-f", *ids, check=False, timeout=300)
            self.engine.docker("network", "rm", self.name, check=False)
        say("removing volumes")
        for node in self.of("mds", "oss"):
            if os.path.ismount(self.volume(node)):
                subprocess.run(["umount", self.volume(node)], check=False)
            if os.path.ismount(self.volume(node)):
                subprocess.run(["umount", "-l", self.volume(node)], check=True)
        self.engine.stop()
        shutil.rmtree(self.folder)
        held.close()
        say("the cluster is gone")

    def hold(self):
        """Keeps chaos, and the end of the cluster, off each other until the result goes."""
        lock = open(f"{self.folder}/chaos.lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail("chaos runs on this cluster; end it first")
        return lock

    def status(self, args):
        self.must_be_up()
        rows = []
        for node in self.nodes.values():
            r = self.engine.docker("inspect", "-f", "{{.State.Status}} {{.RestartCount}} {{.State.StartedAt}}", self.container(node), check=False)
            state, restarts, since = (r.stdout.split() + ["missing", "0", "-"])[:3] if r.returncode == 0 else ("missing", "0", "-")
            mounted = (MOUNT if self.is_mounted(node) else "not mounted") if node.role == "client" else ""
            rows.append({"node": node.name, "rack": node.rack, "address": self.address(node), "state": state,
                         "restarts": int(restarts), "since": since[:19], "mount": mounted})
        report, code = self.servers_status()
        lost = [r["node"] for r in rows if r["state"] != "running" or r["mount"] == "not mounted"]
        if args.json:
            print(json.dumps({"containers": rows, "status": report}, indent=1))
        else:
            print(f"{'NODE':9}{'RACK':6}{'ADDRESS':14}{'STATE':12}{'RESTARTS':10}{'SINCE (UTC)':21}MOUNT")
            for r in rows:
                print(f"{r['node']:9}{r['rack']:6}{r['address']:14}{r['state']:12}{r['restarts']:<10}{r['since']:21}{r['mount']}")
            print()
            print(self.status_text().rstrip())
        return 2 if lost else code

    def shell(self, args):
        self.must_be_up()
        command = args.command or ["/bin/sh"]
        flags = ["-it"] if sys.stdin.isatty() else ["-i"]
        os.execvp(self.engine.command[0], [*self.engine.command, "exec", *flags, "-w", MOUNT if args.node.startswith("client") else "/",
                                           self.container(self.node(args.node)), *command])

    def logs(self, args):
        self.must_be_up()
        os.execvp(self.engine.command[0], [*self.engine.command, "logs", *(["-f"] if args.follow else []),
                                           "--tail", str(args.tail), self.container(self.node(args.node))])
