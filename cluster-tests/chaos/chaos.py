"""`./cluster chaos`: the schedule, the report, and the verdict."""
import collections, contextlib, datetime, json, os, random, secrets, signal, subprocess, sys, time
from ballast import Ballast
from cluster import FABRIC, MOUNT
from engine import fail, say
from faults import Faults, NotRun
from slow import LIMIT, Fault, judge
from workload import CLIENTS, TOP, Workload

# How long until all is in service again after a fault, before that counts as not healed.
HEALED = 120
# How long until what is out of place has moved, at the end.
BALANCED = 180


class Chaos:
    def __init__(self, cluster, args):
        self.c, self.args = cluster, args
        self.seed = args.seed if args.seed is not None else secrets.randbelow(1_000_000)
        self.random = random.Random(self.seed)
        self.load = Workload(cluster, self.seed)
        self.faults = Faults(cluster, self.load.s, self.random, self.broken)
        self.kinds, self.cannot = self.faults.kinds()
        self.not_yet = self.random.sample(list(self.kinds), len(self.kinds))
        self.done, self.not_run, self.healed = collections.Counter(), collections.Counter(), []
        self.wrong, self.events, self.began = [], [], time.monotonic()
        # All faults there were, and the calls that took long.
        self.had, self.slow = {}, []
        self.last_progress = time.monotonic()
        self.started = {}
        # Not in service, and that was told.
        self.out = False

    # Telling.

    def line(self, text):
        seconds = time.monotonic() - self.began
        print(f"{int(seconds) // 60:3}:{seconds % 60:04.1f}  {text}", file=sys.stderr, flush=True)

    def broken(self, text):
        self.wrong.append(text)
        self.line(f"BROKEN  {text}")

    def progress(self, every=15.0):
        for text in self.load.take():
            self.wrong.append(text)
            self.line(f"BROKEN  {text}")
        self.slow_calls()
        if time.monotonic() - self.last_progress >= every:
            self.last_progress = time.monotonic()
            n = self.load.counts()
            self.line(f"...     {n['calls']} calls, {n['blocks_verified']} blocks and {n['names_verified']} names verified, longest call "
                      f"{n['longest_call_s']} s, one waits {n['waiting_s']} s, {len(self.wrong)} broken")

    def slow_calls(self):
        """Tells of each with the faults that may have held it. One that a majority could have answered is a broken promise."""
        servers = [(n.name, n.role, n.rack) for n in self.c.of("mds", "oss")]
        while self.load.slow:
            what, client, began, ended = self.load.slow.pop(0)
            held, excuse = judge(client, began, ended, self.had.values(), servers)
            faults = "; ".join(f"{f.kind} {f.hit}" for f in held) or "no fault"
            text = f"{what} took {ended - began:.1f} s, begun at {began - self.began:.1f} s: {faults}"
            self.slow.append({"call": what, "client": client, "at": round(began - self.began, 1), "took_s": round(ended - began, 1),
                              "faults": [f"{f.kind} {f.hit}" for f in held], "excuse": excuse})
            if excuse:
                self.line(f"SLOW    {text} ({excuse})")
            else:
                self.broken(f"{text}; a majority could have answered within {LIMIT:g} s")

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.progress()
            time.sleep(min(left, 0.5))

    # Faults.

    def begin(self, kind):
        """Starts a fault; what is left of it, or nothing if it could not be had now."""
        fault, began = getattr(self.faults, kind)(), time.monotonic()
        busy = set(self.faults.busy)
        # What is held before it has begun to the end is its, too.
        of_fault = self.had[fault] = Fault(kind, "", (), began)
        try:
            what, seconds = next(fault)
            of_fault.hit, of_fault.nodes = what, self.faults.busy - busy
        except NotRun as e:
            of_fault.nodes, of_fault.ended = self.faults.busy - busy, time.monotonic()
            self.faults.busy = busy
            self.not_run[f"{kind}: {e}"] += 1
            self.line(f"        {kind}: not now: {e}")
            fault.close()
            return None
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            self.broken(f"{kind}: {e}")
            of_fault.nodes, of_fault.ended = self.faults.busy - busy, time.monotonic()
            return None
        cut = [n for n in self.c.of("client") if seconds and n.name in self.faults.busy - busy]
        self.clients_are_hit(cut, time.monotonic() - began + seconds, seconds)
        self.done[kind] += 1
        self.events.append({"at": round(time.monotonic() - self.began, 1), "kind": kind, "hit": what, "seconds": seconds})
        self.line(f"{kind:16}{what}" + (f", for {seconds} s" if seconds else ""))
        return fault, time.monotonic() + seconds, cut, began

    def clients_are_hit(self, nodes, silent, left):
        """A writer that is silent for 3.5 s while somebody looks at its files is evicted, and told so (docs/client.md). How long these
        really are, and for how much longer: to begin and to end a fault takes its time, where much else runs."""
        for node in nodes:
            if silent > 2.5:
                self.faults.client_is_hit(node, left + 6)

    def any_kind(self):
        return self.random.choices(list(self.kinds), self.kinds.values())[0]

    def round(self):
        first = self.any_kind()
        # Each kind once before chance decides; a first one finds no other at work.
        if self.not_yet:
            first = self.not_yet.pop()
        active = [self.begin(first)]
        if self.random.random() < 0.3:
            self.sleep(self.random.uniform(0, 1.5))
            active.append(self.begin(self.any_kind()))
        self.heal([a for a in active if a])
        self.faults.busy.clear()
        if first == "bit_flips" and active[0]:
            self.replicas("after the flips")
        if self.random.random() < 0.7:
            self.in_service()
            self.nobody_else_ended()
        self.sleep(self.random.uniform(0.5, 4))

    def heal(self, active):
        """Each when it is due; one that takes long does not hold up another."""
        while active:
            active.sort(key=lambda a: a[1])
            fault, until, cut, began = active.pop(0)
            self.sleep(until - time.monotonic())
            # As soon as it ends they are told.
            self.clients_are_hit(cut, time.monotonic() - began + 1, 2)
            try:
                again = next(fault, None)
            except (NotRun, RuntimeError, OSError, subprocess.TimeoutExpired) as e:
                self.broken(f"healing: {e}")
                continue
            self.clients_are_hit(cut, time.monotonic() - began, 0)
            if again is None:
                self.had[fault].ended = time.monotonic()
            else:
                active.append((fault, time.monotonic() + again, [], began))

    def in_service(self, limit=HEALED):
        """Waits for it. What keeps it from service is told once, not again by each round that follows."""
        began = time.monotonic()
        while not self.c.all_in_service():
            if self.out or time.monotonic() - began > limit:
                if not self.out:
                    self.broken(f"not in service {limit} s after the last fault ended:\n{self.c.status_text()}")
                self.out = True
                return
            self.progress()
            time.sleep(0.2)
        self.out = False
        self.healed.append(time.monotonic() - began)

    def nobody_else_ended(self):
        """Whose process was not ended by a fault is still the same one; what was ended has started by itself."""
        for node in self.c.nodes.values():
            now = self.c.engine.docker("inspect", "-f", "{{.State.Running}} {{.State.StartedAt}}", self.c.container(node)).stdout.strip()
            if self.started.get(node.name, now) != now and node.name not in self.faults.ended:
                self.broken(f"{node.name} ended by itself; see ./cluster logs {node.name}")
            self.started[node.name] = now
        self.faults.ended.clear()

    @contextlib.contextmanager
    def replica_mount(self, client, number):
        """A mount that reads from one replica of each chain only."""
        at = f"/tmp/replica{number}"
        self.c.exec(client, "mkdir", "-p", at)
        r = self.c.exec(client, "strake", "mount", "--config", "/etc/strake/mount.toml", "--read-only", "--read-replica", str(number), at)
        if r.returncode:
            raise NotRun(f"mount of replica {number}: {r.stderr.strip()}")
        try:
            yield f"/proc/{self.c.pid(client)}/root{at}"
        finally:
            self.c.exec(client, "strake", "umount", "--timeout", "10", at)

    def replicas(self, label):
        """All there is, from each replica alone. That finds and repairs every bad block."""
        blocks = 0
        for number in (0, 1):
            with self.replica_mount(self.c.of("client")[0], number) as root:
                wrong, some, _ = self.load.verify_all(root, f"{label}, replica {number}")
                wrong += self.lies_there(root)
            blocks += some
            for text in wrong:
                self.broken(text)
        return blocks

    def lies_there(self, root):
        return list(self.ballast.verify(f"{root}/{TOP}/ballast"))

    def fills(self):
        """Enough that targets can be unevenly full."""
        targets = self.c.servers_status()[0]["map"]["targets"]
        self.ballast = Ballast(self.seed, sum(t["capacity"] for t in targets))
        say(f"writing {self.ballast.bytes_total() >> 20} MiB that are to lie there")
        self.ballast.write(f"{self.load.s.root(0)}/{TOP}/ballast")

    # The end.

    def last(self):
        say("waiting until every chain is in sync")
        # Before anything is started by hand: all faults have ended, and what they ended has to come back by itself.
        self.out = False
        self.in_service(180)
        self.nobody_else_ended()
        self.faults.heal_everything()
        self.out = False
        self.in_service(180)
        self.nobody_else_ended()
        for name in self.load.stop(60):
            self.broken(f"{name}: a call has not come back 60 s after all was healed")
        self.slow_calls()
        for text in self.load.wrong[len([w for w in self.wrong if w in self.load.wrong]):]:
            self.broken(text)
        self.load.find_clients()
        say("verifying everything from both clients and from each replica alone")
        blocks = names = 0
        for c in range(CLIENTS):
            wrong, some, more = self.load.verify_all(self.load.s.root(c), f"at the end, client{c + 1}")
            wrong += self.lies_there(self.load.s.root(c))
            blocks, names = blocks + some, names + more
            for text in wrong:
                self.broken(text)
        blocks += self.replicas("at the end")
        say("strake fsck --read-data")
        findings = self.fsck()
        for finding in findings:
            self.broken(f"fsck: {finding}")
        r = self.c.strake("mds", "list", "--mds", ",".join(f"tcp:{m.name}:{FABRIC}" for m in self.c.of("mds")), "--cluster-key", "/etc/strake/cluster.key")
        if not r or r.returncode:
            self.broken(f"strake mds list: {r.stdout + r.stderr if r else 'nobody answers'}")
        for node in self.c.nodes.values():
            log = self.c.engine.docker("logs", self.c.container(node))
            for line in (log.stdout + log.stderr).splitlines():
                if "panicked at" in line:
                    self.broken(f"{node.name}: {line}")
        return {"blocks": blocks, "names": names, "fsck_clean": not findings, "fill_percent": self.fill()}

    def fill(self):
        """How full the emptiest and the fullest target are, when they differ by at most five points; what is out of place moves by itself."""
        end = time.monotonic() + BALANCED
        while True:
            status, _ = self.c.servers_status()
            targets = ((status or {}).get("map") or {}).get("targets") or []
            full = sorted(100 * t["used"] / t["capacity"] for t in targets if t["chains"] and t["capacity"])
            if full and full[-1] - full[0] <= 5:
                return [round(full[0], 1), round(full[-1], 1)]
            if time.monotonic() > end:
                self.broken(f"targets are not evenly full {BALANCED} s after the end: {[round(f, 1) for f in full]} percent")
                return [round(f, 1) for f in full]
            time.sleep(2)

    def fsck(self):
        """Removed files are deleted some seconds later; so it is asked again for a while."""
        end = time.monotonic() + 90
        while True:
            r = self.c.strake("fsck", "--read-data", "--json", "--mds", ",".join(f"tcp:{m.name}:{FABRIC}" for m in self.c.of("mds")),
                              "--cluster-key", "/etc/strake/cluster.key", timeout=300)
            try:
                found = json.loads(r.stdout)
                if found["clean"]:
                    return []
                findings = found["findings"] or ["not clean"]
            except (ValueError, KeyError, AttributeError):
                findings = [f"{r.stderr.strip() if r else 'nobody answers'}"]
            if time.monotonic() > end:
                return findings
            time.sleep(3)

    def corrupt_seen(self):
        """Bad blocks that storage servers have told of."""
        return sum(1 for n in self.c.of("oss") for line in self.c.engine.docker("logs", self.c.container(n)).stderr.splitlines() if "checksum" in line)

    def run(self):
        say(f"chaos for {self.args.minutes:g} min, seed {self.seed}")
        for kind, why in self.cannot.items():
            say(f"not run: {kind}: {why}")
        if not self.kinds:
            fail("no kind of fault is left")
        self.in_service()
        self.load.start()
        self.fills()
        self.nobody_else_ended()
        self.sleep(3)
        end = time.monotonic() + 60 * self.args.minutes
        while time.monotonic() < end:
            self.round()
        last = self.last()
        summary = {"seed": self.seed, "minutes": self.args.minutes, "faults": dict(self.done), "not_run": self.cannot, "not_now": dict(self.not_run),
                   **self.load.counts(), "last": last, "flipped_bits": self.faults.flipped, "bad_blocks_told": self.corrupt_seen(),
                   "in_service_again_s": {"median": middle(self.healed), "worst": round(max(self.healed), 1)},
                   "slow": self.slow, "broken": self.wrong, "events": self.events}
        self.tell(summary)
        return 1 if self.wrong else 0

    def tell(self, s):
        if self.args.json:
            print(json.dumps(s, indent=1))
            return
        print(f"seed {s['seed']}, {s['minutes']:g} min, {sum(s['faults'].values())} faults:")
        for kind, count in sorted(s["faults"].items(), key=lambda k: -k[1]):
            print(f"  {kind:18}{count}")
        for kind, why in s["not_run"].items():
            print(f"  {kind:18}not run: {why}")
        at = datetime.datetime.fromtimestamp(s["longest_call_at"]).strftime("%H:%M:%S")
        print(f"{s['calls']} calls, {s['blocks_verified']} blocks and {s['names_verified']} names verified meanwhile, {s['errors_told']} errors told where they may be")
        print(f"longest call {s['longest_call_s']} s (ended at {at}); in service again after median {s['in_service_again_s']['median']} s, "
              f"worst {s['in_service_again_s']['worst']} s")
        excused = [c for c in s["slow"] if c["excuse"]]
        print(f"{len(s['slow'])} calls above {LIMIT:g} s, {len(excused)} of them such as nobody could have answered")
        for c in excused:
            print(f"  {c['call']} took {c['took_s']} s, begun at {c['at']} s: {'; '.join(c['faults'])} ({c['excuse']})")
        print(f"{s['flipped_bits']} bits flipped, {s['bad_blocks_told']} bad blocks told of")
        last = s["last"]
        print(f"at the end: {last['blocks']} blocks, {last['names']} names, fsck {'clean' if last['fsck_clean'] else 'NOT CLEAN'}, "
              f"targets {' to '.join(f'{p:g}' for p in last['fill_percent'])} % full")
        print(f"{len(s['broken'])} broken promises" + ("" if s["broken"] else ": nothing lost, nothing stale"))
        for text in s["broken"][:50]:
            print(f"  {text}")


def middle(values):
    return round(sorted(values)[len(values) // 2], 1) if values else None


def chaos(cluster, args):
    cluster.must_be_up()
    first = cluster.of("mds")[0]
    if os.geteuid() != 0 or not os.path.exists(f"/proc/{cluster.pid(first)}/root/usr/local/bin/strake"):
        fail("chaos signals the nodes' processes and enters their network namespaces: run it as root on the machine of the engine")
    held = cluster.hold()
    run = Chaos(cluster, args)
    if args.only:
        wanted = args.only.split(",")
        unknown = [k for k in wanted if k not in {**run.kinds, **run.cannot}]
        if unknown:
            fail(f"no such faults: {', '.join(unknown)}; see --list")
        run.kinds = {k: w for k, w in run.kinds.items() if k in wanted}
    if args.list:
        for kind in run.kinds:
            print(f"{kind:18}{(getattr(Faults, kind).__doc__ or '').strip()}")
        for kind, why in run.cannot.items():
            print(f"{kind:18}not run here: {why}")
        return 0
    try:
        cluster.exec(cluster.of("client")[0], "rm", "-rf", f"{MOUNT}/{TOP}")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster: told to end"))
        return run.run()
    except NotRun as e:
        fail(str(e))
    except BaseException:
        say("broken off; healing what was hit")
        run.faults.heal_everything()
        raise
    finally:
        for p in run.load.processes:
            if p.is_alive():
                p.kill()
        held.close()
