"""The container engine: the one that runs, or one of our own in a network namespace of its own; and the image."""
import hashlib, io, json, os, shutil, signal, subprocess, sys, tarfile, tempfile, time


def say(text):
    """Progress, on stderr: what a script reads goes to stdout."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"cluster: {text}")


def until(what, call, limit, pause=0.2):
    """Waits for something true; ends the program when it does not come within `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        result = call()
        if result:
            return result
        if time.monotonic() > end:
            fail(f"{what}: not within {limit} s")
        time.sleep(pause)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Engine:
    """`docker` commands, to the machine's engine or to our own. What is kept of it: `engine.json` in the cluster's folder."""

    def __init__(self, folder):
        self.folder, self.file = folder, f"{folder}/engine.json"
        self.run_dir = f"/run/strake-cluster-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
        self.own = None
        if os.path.exists(self.file):
            with open(self.file) as f:
                self.own = json.load(f)["pid"]

    def runs(self):
        """Our own engine is there; a number that has been given to another process since does not count."""
        try:
            with open(f"/proc/{self.own}/cmdline", "rb") as f:
                return b"dockerd" in f.read() and alive(self.own)
        except OSError:
            return False

    @property
    def command(self):
        return ["docker"] + (["-H", f"unix://{self.run_dir}/docker.sock"] if self.own else [])

    def docker(self, *args, check=True, timeout=120, **kw):
        if not shutil.which("docker"):
            fail("docker is not installed; ./cluster up installs docker.io")
        r = subprocess.run([*self.command, *args], capture_output=True, text=True, timeout=timeout, **kw)
        if check and r.returncode != 0:
            raise RuntimeError(f"docker {' '.join(args)}: {r.stderr.strip() or r.stdout.strip()}")
        return r

    def answers(self):
        return self.docker("version", check=False).returncode == 0

    def ensure(self):
        """Uses the engine that runs, else starts the installed one."""
        if not shutil.which("docker"):
            fail("docker is not installed; install docker.io")
        if self.answers():
            say("using the engine that runs" if not self.own else "our own engine runs")
            return
        if os.geteuid() != 0:
            fail("no container engine answers, and only root can start one; start it, or run this as root")
        if not shutil.which("dockerd"):
            fail("no container engine answers, and dockerd is not installed; install docker.io")
        if self.own and self.runs():
            fail(f"our engine (pid {self.own}) does not answer; see {self.folder}/engine.log, or ./cluster down")
        self.start()

    def start(self):
        say("starting a container engine of our own, in a network namespace of its own")
        shutil.rmtree(self.run_dir, ignore_errors=True)
        os.makedirs(self.run_dir, mode=0o700)
        daemon = ["dockerd", "--data-root", f"{self.folder}/engine", "--exec-root", f"{self.run_dir}/exec",
                  "--pidfile", f"{self.run_dir}/docker.pid", "-H", f"unix://{self.run_dir}/docker.sock",
                  "--bridge", "none", "--userland-proxy=false", "--log-level", "warn"]
        with open(f"{self.folder}/engine.log", "a") as log:
            p = subprocess.Popen(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *daemon],
                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.own = p.pid
        with open(self.file, "w") as f:
            json.dump({"pid": p.pid}, f)
        end = time.monotonic() + 60
        while not self.answers():
            if p.poll() is not None or time.monotonic() > end:
                fail(f"the engine did not start; see {self.folder}/engine.log")
            time.sleep(0.2)

    def stop(self):
        """Ends our own engine; the machine's stays."""
        if not self.own:
            return
        say("stopping our engine")
        for sig, limit in ((signal.SIGTERM, 30), (signal.SIGKILL, 5)):
            if not self.runs():
                break
            os.kill(self.own, sig)
            end = time.monotonic() + limit
            while self.runs() and time.monotonic() < end:
                time.sleep(0.1)
        # What the engine leaves mounted when it is killed.
        with open("/proc/mounts") as f:
            left = [line.split()[1] for line in f if line.split()[1].startswith((self.run_dir + "/", f"{self.folder}/engine/"))]
        for at in sorted(left, reverse=True):
            subprocess.run(["umount", "-l", at], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        os.unlink(self.file)
        self.own = None


def libraries(program):
    """Exactly the shared libraries that a program needs, by their paths."""
    r = subprocess.run(["ldd", program], capture_output=True, text=True)
    if "not a dynamic executable" in r.stdout + r.stderr or "statically linked" in r.stdout:
        return []
    paths = [word for line in r.stdout.splitlines() for word in line.split() if word.startswith("/")]
    if r.returncode or "not found" in r.stdout:
        raise RuntimeError(f"ldd {program}: {r.stdout}{r.stderr}")
    return paths


def root_image(program, out):
    """A root file system as a tar archive: the program, its libraries, busybox, and the folders it wants."""
    with tempfile.TemporaryDirectory() as tmp, tarfile.open(fileobj=out, mode="w") as tar:
        slim = f"{tmp}/strake"
        if not shutil.which("strip") or subprocess.run(["strip", "-o", slim, program]).returncode:
            shutil.copy(program, slim)
        busybox = shutil.which("busybox")

        def folder(name, mode=0o755):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)

        def text(name, content):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content.encode()))

        def link(name, to):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, to
            tar.addfile(entry)

        for name in ("bin", "sbin", "usr/local/bin", "etc/strake", "var/lib/strake", "run", "mnt/strake", "proc", "sys", "dev", "root"):
            folder(name)
        folder("tmp", 0o1777)
        text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        text("etc/group", "root:x:0:\n")
        text("etc/nsswitch.conf", "hosts: files dns\n")
        tar.add(slim, "usr/local/bin/strake")
        link("usr/local/bin/lfs", "strake")
        tar.add(busybox, "bin/busybox")
        applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                link(f"bin/{applet}", "busybox")
        for path in sorted({p for binary in (program, busybox) for p in libraries(binary)}):
            tar.add(os.path.realpath(path), path.lstrip("/"))


def import_image(engine, program, tag):
    say(f"making the image {tag} from {program}")
    with tempfile.TemporaryFile() as f:
        root_image(program, f)
        f.seek(0)
        r = subprocess.run([*engine.command, "import", "--change", 'ENV PATH=/usr/local/bin:/bin:/sbin',
                            "--change", 'ENTRYPOINT ["/usr/local/bin/strake"]', "-", tag], stdin=f, capture_output=True, text=True)
    if r.returncode:
        fail(f"docker import: {r.stderr.strip()}")
    size = engine.docker("image", "inspect", "-f", "{{.Size}}", tag).stdout
    say(f"{tag}: {int(size) / 1e6:.0f} MB")
