"""The verifying workload: processes that write, read and rename through both mounts while things fail."""
import errno, multiprocessing, os, queue, random, time
from blocks import BLOCK, MAX_BLOCKS, Files, Wrong, make, read
from cluster import MOUNT
from slow import LIMIT

CLIENTS, WRITERS, FILES, SLOTS = 2, 2, 4, 40
TOP = "chaos"
# What programs on a client that was killed may be told; elsewhere each of these is a failure.
GONE = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE, errno.EBADF, errno.ENOENT, errno.ENODEV, errno.ENOTDIR, errno.ESRCH}


def owner(f):
    """Client and number of the writer of a file."""
    return f // FILES // WRITERS, f // FILES % WRITERS


def path_of(f):
    client, writer = owner(f)
    return f"{TOP}/w{client}{writer}/f{f % FILES}"


class Shared:
    """What the schedule of faults and all processes of the workload know of each other."""

    def __init__(self):
        self.files = Files(CLIENTS * WRITERS * FILES)
        self.pids = multiprocessing.RawArray("i", CLIENTS)          # each client's first process
        self.hit = multiprocessing.RawArray("d", CLIENTS)           # until then its programs may be told so
        self.full = multiprocessing.RawArray("d", 1)                # until then ENOSPC is right
        self.stop = multiprocessing.Event()
        self.out = multiprocessing.Queue()
        workers = CLIENTS * (WRITERS + 2)
        self.calls = multiprocessing.RawArray("Q", workers)
        self.blocks = multiprocessing.RawArray("Q", workers)
        self.looks = multiprocessing.RawArray("Q", workers)
        self.errors = multiprocessing.RawArray("Q", workers)
        self.since = multiprocessing.RawArray("d", workers)         # when its present call began, 0: none
        # The longest call of each, without those on a client that was hit itself: seconds, and when it ended.
        self.longest = multiprocessing.RawArray("d", workers)
        self.longest_at = multiprocessing.RawArray("d", workers)

    def root(self, client):
        return f"/proc/{self.pids[client]}/root{MOUNT}"


class Excused(Exception):
    """A call failed as it may, for what was done to its client or its disks."""


class Worker:
    def __init__(self, shared, number, client, name, seed):
        self.s, self.number, self.client, self.name = shared, number, client, name
        self.random = random.Random(f"{seed}/{name}")
        self.parent = os.getpid()

    def call(self, client, what, f, *args, **kw):
        """One call on a mount, timed. What nobody may be told is a broken promise."""
        s, n, began = self.s, self.number, time.monotonic()
        s.since[n] = began
        try:
            return f(*args, **kw)
        except OSError as e:
            if s.hit[client] >= began and e.errno in GONE or s.full[0] >= began and e.errno == errno.ENOSPC:
                s.errors[n] += 1
                raise Excused(f"{what}: {e.strerror}") from e
            if e.errno in (errno.ENOENT, errno.EEXIST) and what.startswith("look"):
                raise
            raise Wrong(f"{what} on client{client + 1}: {errno.errorcode.get(e.errno)} {e.strerror}, {time.monotonic() - began:.1f} s") from e
        finally:
            took, s.since[n] = time.monotonic() - began, 0
            s.calls[n] += 1
            if took > s.longest[n] and s.hit[client] < began:
                s.longest[n], s.longest_at[n] = took, time.time()
            if took > LIMIT and s.hit[client] < began:
                s.out.put(("slow", f"{self.name}: {what}", f"client{client + 1}", began, began + took))

    def run(self):
        """Until it is told to stop, whatever is found on the way."""
        while not self.s.stop.is_set() and os.getppid() == self.parent:
            try:
                self.step()
            except Excused:
                time.sleep(0.2)
            except Wrong as e:
                self.s.out.put(("wrong", f"{self.name}: {e}"))
                time.sleep(1)
            except Exception as e:  # a mistake of this program counts as a failure, too
                self.s.out.put(("wrong", f"{self.name}: {type(e).__name__}: {e}"))
                time.sleep(1)
        self.s.out.put(("done", self.name, self.end()))

    def end(self):
        return None

    def verify(self, f, client, first=0, count=MAX_BLOCKS):
        files = self.s.files
        least = files.known(f)
        if not least[0]:
            return
        path, direct = f"{self.s.root(client)}/{path_of(f)}", self.random.random() < 0.4
        try:
            size, data = self.call(client, f"read {path_of(f)}", read, path, first, count, direct)
            self.s.blocks[self.number] += files.check(f, least, size, first, data)
        except Wrong as e:
            if self.s.hit[client] < time.monotonic():
                raise Wrong(f"client{client + 1}, direct={direct}: {e}") from e


class Writer(Worker):
    """Overwrites, appends and replaces its files; syncs; then looks by the other mount."""

    def __init__(self, *a, first):
        super().__init__(*a)
        self.first = first

    def step(self):
        f = self.first + self.random.randrange(FILES)
        files = self.s.files
        if not files.size[f] or self.random.random() < 0.08:
            self.replace(f)
            span = (0, MAX_BLOCKS)
        else:
            span = self.change(f)
        if self.random.random() < 0.7:
            self.verify(f, 1 - self.client, *span)

    def write(self, fd, f, generation, first, count):
        files = self.s.files
        version = max(files.tried[f * MAX_BLOCKS:(f + 1) * MAX_BLOCKS]) + 1
        for i in range(first, first + count):
            files.tried[f * MAX_BLOCKS + i] = version
        files.size_tried[f] = max(files.size_tried[f], first + count)
        data = b"".join(make(f, generation, i, version) for i in range(first, first + count))
        done = 0
        while done < len(data):
            done += self.call(self.client, f"write {path_of(f)}", os.pwrite, fd, data[done:], first * BLOCK + done)
        return version

    def acked(self, f, first, count, version):
        files = self.s.files
        for i in range(first, first + count):
            files.acked[f * MAX_BLOCKS + i] = version
        files.size[f] = max(files.size[f], first + count)

    def opened(self, path, flags):
        return self.call(self.client, f"open {path}", os.open, f"{self.s.root(self.client)}/{path}", flags, 0o644)

    def closed(self, fd):
        try:
            self.call(self.client, "close", os.close, fd)
        except (Wrong, Excused):
            # A close tells once more of what an fsync has told.
            pass

    def change(self, f):
        files = self.s.files
        size = files.size[f]
        count = self.random.choice((1, 1, 2, 3, 8, 16, 64))
        first = min(self.random.randrange(size + 1), MAX_BLOCKS - count)
        fd = self.opened(path_of(f), os.O_WRONLY)
        try:
            version = self.write(fd, f, files.generation[f], first, count)
            self.call(self.client, f"fsync {path_of(f)}", os.fsync, fd)
            self.acked(f, first, count, version)
        finally:
            self.closed(fd)
        return first, count

    def replace(self, f):
        """As checkpoints are: all anew, synced, renamed over the old one."""
        files = self.s.files
        generation = files.generation_tried[f] + 1
        files.generation_tried[f] = generation
        count = max(files.size_tried[f], self.random.randrange(1, MAX_BLOCKS // 2))
        new = path_of(f) + ".new"
        fd = self.opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            version = self.write(fd, f, generation, 0, count)
            self.call(self.client, f"fsync {new}", os.fsync, fd)
        finally:
            self.closed(fd)
        root = self.s.root(self.client)
        try:
            self.call(self.client, f"rename {new}", os.rename, f"{root}/{new}", f"{root}/{path_of(f)}")
        except Excused:
            self.settle(f, generation, count, version)
            raise
        files.generation[f] = generation
        self.acked(f, 0, count, version)

    def settle(self, f, generation, count, version):
        """Nobody said whether the rename took place: whoever writes next must know which generation the name has."""
        while not self.s.stop.is_set():
            try:
                _, data = self.call(self.client, "look at the generation", read, f"{self.s.root(self.client)}/{path_of(f)}", 0, 1)
            except (Excused, OSError):
                time.sleep(0.3)
                continue
            if data and int.from_bytes(data[12:16], "little") == generation:
                self.s.files.generation[f] = generation
                self.acked(f, 0, count, version)
            return


class Reader(Worker):
    """Reads what the writers of the other client are writing."""

    def step(self):
        others = [f for f in range(self.s.files.count) if owner(f)[0] != self.client]
        self.verify(self.random.choice(others), self.client)
        time.sleep(0.01)


class Namer(Worker):
    """Creates, renames and unlinks names; each change is looked for by the other mount at once."""

    def __init__(self, *a):
        super().__init__(*a)
        self.names = [None] * SLOTS   # the slot's present name; "?" where a call ended without an answer
        self.count = 0

    def at(self, client, name):
        return f"{self.s.root(client)}/{TOP}/n{self.client}/{name}"

    def there(self, client, name):
        try:
            self.call(client, "look at a name", os.lstat, self.at(client, name))
            return True
        except OSError:
            return False

    def step(self):
        i = self.random.randrange(SLOTS)
        name, self.count = self.names[i], self.count + 1
        if name == "?":
            return self.find(i)
        new = f"s{i}-{self.count}" + ("d" if self.random.random() < 0.2 else "")
        self.names[i] = "?"
        before = time.monotonic()
        after = self.change(i, name, new)
        self.names[i] = after
        other = 1 - self.client
        for n, wanted in {(name, name == after), (after, True)}:
            if n and self.there(other, n) != wanted and self.s.hit[other] < before:
                raise Wrong(f"name {n}: {'gone' if wanted else 'still there'} on client{other + 1}")
            self.s.looks[self.number] += 1
        if self.count % 40 == 0:
            self.listed(other)
        time.sleep(0.005)

    def change(self, i, name, new):
        here = self.client
        if name is None:
            if new.endswith("d"):
                self.call(here, f"mkdir {new}", os.mkdir, self.at(here, new))
            else:
                fd = self.call(here, f"create {new}", os.open, self.at(here, new), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                os.close(fd)
            return new
        if self.random.random() < 0.5:
            new = new.rstrip("d") + ("d" if name.endswith("d") else "")
            self.call(here, f"rename {name}", os.rename, self.at(here, name), self.at(here, new))
            return new
        gone = os.rmdir if name.endswith("d") else os.unlink
        self.call(here, f"remove {name}", gone, self.at(here, name))
        return None

    def find(self, i):
        """What became of a slot whose last change ended without an answer."""
        found = [n for n in self.call(self.client, "list", os.listdir, self.at(self.client, "")) if n.startswith(f"s{i}-")]
        if len(found) > 1:
            raise Wrong(f"two names where one was renamed: {found}")
        self.names[i] = found[0] if found else None

    def listed(self, client):
        began = time.monotonic()
        found = {n for n in self.call(client, "list", os.listdir, self.at(client, ""))}
        wanted = {n for n in self.names if n and n != "?"}
        unknown = tuple(f"s{i}-" for i, n in enumerate(self.names) if n == "?")
        if self.s.hit[client] < began and {n for n in found ^ wanted if not n.startswith(unknown or "/")}:
            raise Wrong(f"list on client{client + 1}: missing {sorted(wanted - found)}, too much {sorted(found - wanted)}")
        self.s.looks[self.number] += 1

    def end(self):
        return (self.client, self.names)


class Workload:
    def __init__(self, cluster, seed):
        self.cluster, self.seed, self.s = cluster, seed, Shared()
        self.wrong, self.names, self.processes = [], {}, []
        # Calls that took long, not looked at yet.
        self.slow = []

    def find_clients(self):
        for n, client in enumerate(self.cluster.of("client")):
            self.s.pids[n] = self.cluster.pid(client)

    def workers(self):
        number = 0
        for c in range(CLIENTS):
            for w in range(WRITERS):
                yield Writer(self.s, number, c, f"client{c + 1} writer {w + 1}", self.seed, first=(c * WRITERS + w) * FILES)
                number += 1
            yield Reader(self.s, number, c, f"client{c + 1} reader", self.seed)
            yield Namer(self.s, number + 1, c, f"client{c + 1} names", self.seed)
            number += 2

    def start(self):
        self.find_clients()
        top = f"{self.s.root(0)}/{TOP}"
        os.makedirs(top, exist_ok=False)
        for c in range(CLIENTS):
            os.mkdir(f"{top}/n{c}")
            for w in range(WRITERS):
                os.mkdir(f"{top}/w{c}{w}")
        for worker in self.workers():
            p = multiprocessing.Process(target=worker.run, name=worker.name, daemon=True)
            p.start()
            self.processes.append(p)

    def take(self, wait=0.0):
        """Takes in what the processes said."""
        while True:
            try:
                said = self.s.out.get(timeout=wait) if wait else self.s.out.get_nowait()
            except queue.Empty:
                return
            if said[0] == "wrong":
                self.wrong.append(said[1])
                yield said[1]
            elif said[0] == "slow":
                self.slow.append(said[1:])
            elif said[2]:
                self.names[said[2][0]] = said[2][1]

    def counts(self):
        s = self.s
        now = time.monotonic()
        n = max(range(len(s.longest)), key=lambda i: s.longest[i])
        return {"calls": sum(s.calls), "blocks_verified": sum(s.blocks), "names_verified": sum(s.looks), "errors_told": sum(s.errors),
                "longest_call_s": round(s.longest[n], 2), "longest_call_at": s.longest_at[n],
                "waiting_s": round(max((now - t for t in s.since if t), default=0), 1)}

    def stop(self, limit):
        """Lets every process end its step; says which did not."""
        self.s.stop.set()
        end, stuck = time.monotonic() + limit, []
        while any(p.is_alive() for p in self.processes) and time.monotonic() < end:
            list(self.take(0.2))
        for p in self.processes:
            if p.is_alive():
                stuck.append(p.name)
                p.kill()
            p.join(5)
        list(self.take(0.2))
        return stuck

    def verify_all(self, root, label):
        """Everything, once more; returns what is wrong."""
        wrong, files = [], self.s.files
        blocks = names = 0
        for f in range(files.count):
            least = files.known(f)
            if not least[0]:
                continue
            try:
                size, data = read(f"{root}/{path_of(f)}", 0, MAX_BLOCKS, direct=True)
                blocks += files.check(f, least, size, 0, data)
            except (Wrong, OSError) as e:
                wrong.append(f"{label}: {path_of(f)}: {e}")
        for c, slots in self.names.items():
            try:
                found = set(os.listdir(f"{root}/{TOP}/n{c}"))
            except OSError as e:
                wrong.append(f"{label}: {e}")
                continue
            wanted = {n for n in slots if n and n != "?"}
            unknown = tuple(f"s{i}-" for i, n in enumerate(slots) if n == "?") or ("/",)
            odd = {n for n in found ^ wanted if not n.startswith(unknown)}
            names += len(wanted)
            if odd:
                wrong.append(f"{label}: names of client{c + 1}: missing {sorted(odd - found)}, too much {sorted(odd & found)}")
        return wrong, blocks, names
