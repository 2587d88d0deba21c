"""What the GPU bridge reaches on this machine, beside what the device can do at all and what people use today: one run, every figure from it.

Needs no network and builds nothing: `--pack` makes what it needs on another machine. A step that cannot run here is skipped and says why; it never
counts as passed. Ends with 1 if a step failed, with 77 if the bridge could not be measured here, else with 0, whatever the figures are."""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKED = ROOT / "target" / "gpu"
MIB = 1 << 20
# All that goes to the machine may have.
MOST_PACKED = 60 * MIB
# As local.py calls it.
READ_AND_COPY = "read 1 MiB, copy, wait; the file in the page cache"
# What, the steps that it needs, the figure, and what it is to be at least.
GOALS = [
    ("load from memory, of the ceiling", {"memory"}, lambda s: best(s, "memory", "load") / s["memory"]["ceiling"]["load"], 0.85),
    ("load from memory, of the pageable loop", {"memory"}, lambda s: best(s, "memory", "load") / s["memory"]["pageable_loop"]["load"], 4.0),
    ("load from memory, of read() and copy of a local file", {"memory", "local"}, lambda s: best(s, "memory", "load") / s["local"]["figures"][READ_AND_COPY], 4.0),
    ("save to memory, of the ceiling", {"memory"}, lambda s: best(s, "memory", "save") / s["memory"]["ceiling"]["save"], 0.85),
    ("save to memory, of the pageable loop", {"memory"}, lambda s: best(s, "memory", "save") / s["memory"]["pageable_loop"]["save"], 4.0),
]


def arguments():
    p = argparse.ArgumentParser(prog="cluster-tests/gpu/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pack", action="store_true", help=f"only build the programs that a run needs, stripped, into {PACKED.relative_to(ROOT)}")
    p.add_argument("--memory", default="cuda", choices=["cuda", "host"], help="host: this machine's host memory in place of a GPU; the figures say nothing about a GPU")
    p.add_argument("--device", type=int, default=0, help="the GPU's number (default: 0)")
    p.add_argument("--mib", type=int, default=4096, help="bytes of each measurement, MiB (default: 4096)")
    p.add_argument("--threads", default="1,2,4,8", help="workers of the bridge's rows (default: 1,2,4,8)")
    p.add_argument("--policy", default="require:bounce-tcp", help="policy of the measured calls (default: require:bounce-tcp)")
    p.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder on a disk (default: the temporary folder)")
    p.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="folder in memory (default: /dev/shm)")
    p.add_argument("--strake", type=Path, help="the program (default: the packed one, else a release build)")
    p.add_argument("--limit", type=int, default=400, help="seconds for all steps (default: 400)")
    p.add_argument("--out", type=Path, help="write figures.json and figures.md there")
    p.add_argument("--json", action="store_true", help="print the figures as JSON, not as tables")
    return p.parse_args()


# --- what a run needs, from where there is a compiler and a network


def pack():
    PACKED.mkdir(parents=True, exist_ok=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run(["cargo", "build", "--release", "--locked", "-p", "strake-tools"], cwd=ROOT, check=True)
    subprocess.run(["strip", "-o", PACKED / "strake", target / "release" / "strake"], check=True)
    maturin = shutil.which("maturin") or target / "python" / "bin" / "maturin"
    if Path(maturin).exists():
        for old in PACKED.glob("strake_gds-*.whl"):
            old.unlink()
        module = ROOT / "gds-bridge" / "python"
        environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
        subprocess.run([maturin, "build", "--release", "--locked", "--strip", "-o", PACKED], cwd=module, env=environment, check=True)
    else:
        print("the Python module is left out: there is no maturin (gds-bridge/python/test installs it)")
    size = sum(f.stat().st_size for f in PACKED.iterdir())
    print(f"{PACKED.relative_to(ROOT)}: {size / MIB:.1f} MiB")
    if size > MOST_PACKED:
        sys.exit(f"more than {MOST_PACKED // MIB} MiB")


# --- steps


class Skipped(Exception):
    """A step cannot run here."""


class Failed(Exception):
    """A step went wrong."""


class Run:
    def __init__(self, args):
        self.args, self.end = args, time.monotonic() + args.limit
        self.strake = args.strake or next((p for p in (PACKED / "strake", ROOT / "target/release/strake") if p.exists()), None)
        if self.strake is None:
            sys.exit("there is no program to run: cluster-tests/gpu/run --pack makes it, --strake names it")
        self.steps = {}

    def missing(self):
        """Why there is no device to measure, if there is none."""
        look = [self.strake, "gds", "status", "--json", "--memory", self.args.memory, "--device", str(self.args.device)]
        r = subprocess.run(look, capture_output=True, text=True, timeout=60)
        try:
            found = json.loads(r.stdout)
        except ValueError:
            sys.exit(f"{self.strake} ended with {r.returncode}: {r.stderr.strip()}")
        return None if found["device"] else next(t["why"] for t in found["tiers"] if t["tier"] == "pageable")

    def left(self):
        left = self.end - time.monotonic()
        if left < 1:
            raise Skipped(f"the {self.args.limit} s are over")
        return left

    def step(self, name, what, work):
        begun = time.monotonic()
        print(f"==> {what}", file=sys.stderr, flush=True)
        try:
            self.left()
            figures = {"outcome": "ran", **work()}
        except Skipped as e:
            figures = {"outcome": "skipped", "why": str(e)}
        except Failed as e:
            figures = {"outcome": "failed", "why": str(e)}
        if figures["outcome"] != "ran":
            print(f"    {figures['outcome']}: {figures['why']}", file=sys.stderr, flush=True)
        self.steps[name] = {**figures, "seconds": round(time.monotonic() - begun, 1)}

    def call(self, command, env=None):
        """What a command says on standard output, which is JSON. 77 is the end of one that cannot run here."""
        try:
            r = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=self.left(), env={**os.environ, **(env or {})})
        except subprocess.TimeoutExpired:
            raise Failed(f"{Path(str(command[0])).name} had not ended when the {self.args.limit} s were over") from None
        said = (r.stderr.strip() or r.stdout.strip())[-2000:]
        if r.returncode == 77:
            raise Skipped(said)
        if r.returncode < 0:
            said = f"{signal.Signals(-r.returncode).name} {said}"
        try:
            answer = json.loads(r.stdout)
        except ValueError:
            raise Failed(f"{Path(str(command[0])).name} ended with {r.returncode}: {said}") from None
        if r.returncode != 0:
            raise Failed(answer.get("refused") or answer.get("error") or said)
        return answer

    # A cluster of one copy: what is measured is the path to the device, not replication.
    @contextlib.contextmanager
    def cluster(self, folder):
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise Skipped(f"{folder} is no folder that can be written")
        need = self.args.mib * MIB * 4
        if shutil.disk_usage(folder).free < need:
            raise Skipped(f"{folder} has less than {need // MIB} MiB free")
        work = Path(tempfile.mkdtemp(prefix="strake-gpu-", dir=folder))
        # The file lies on all four; room for the bytes that it is overwritten with.
        gib = max(1, -(-self.args.mib * 3 // 4 // 1024))
        up = ["up", "--dir", work, "--mount=none", "--mds=1", "--oss=4", "--targets-per-oss=1", "--mirror=1", f"--target-gib={gib}"]
        try:
            limit = min(120, self.left())
            try:
                r = subprocess.run([self.strake, *up], capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                raise Failed(f"strake up had not ended after {limit:.0f} s") from None
            if r.returncode != 0:
                raise Failed(f"strake up: {r.stderr.strip()[-1000:]}")
            port = re.search(r"^ports = \[\s*(\d+)", (work / "cluster.toml").read_text(), re.M)[1]
            yield f"127.0.0.1:{port}", work / "client.key"
        finally:
            try:
                subprocess.run([self.strake, "down", "--dir", work], capture_output=True, timeout=30)
            except subprocess.TimeoutExpired:
                print(f"    strake down had not ended after 30 s; {work} is removed all the same", file=sys.stderr, flush=True)
            shutil.rmtree(work, ignore_errors=True)

    def bench(self, folder, *more):
        with self.cluster(folder) as (mds, key):
            a = self.args
            return self.call(
                [self.strake, "gds", "bench", mds, "--client-key", key, "--json", "--memory", a.memory, "--device", a.device]
                + ["--mib", a.mib, "--threads", a.threads, "--policy", a.policy, "--strict", *more]
            )

    def verified(self):
        figures = self.bench(self.args.ram, "--verify-on-gpu")
        for r in figures["rows"] if self.args.memory == "cuda" else []:
            for way in ("loaded", "saved"):
                if r[way]["checksums"] != "gpu":
                    raise Failed(f"{r['threads']} threads, {way}: not verified on the device: {r[way]['not_on_gpu']}")
        return figures

    def disk(self):
        kind = subprocess.run(["stat", "-f", "-c", "%T", self.args.disk], capture_output=True, text=True).stdout.strip()
        if kind in ("tmpfs", "ramfs"):
            raise Skipped(f"{self.args.disk} is memory ({kind}): --disk names a folder on a disk")
        return self.bench(self.args.disk)

    def local(self):
        if self.args.memory != "cuda":
            raise Skipped("cuFile and the CUDA driver are for GPUs")
        return self.call([sys.executable, HERE / "local.py", self.args.disk, self.args.device, self.args.mib])

    def loaders(self):
        a = self.args
        with self.cluster(a.ram) as (mds, key):
            wheel = next(iter(PACKED.glob("strake_gds-*.whl")), "")
            device = a.device if a.memory == "cuda" else "host"
            return self.call([sys.executable, HERE / "loaders.py", a.ram, device, a.mib, mds, key, a.policy, wheel])


def machine(args):
    found = {
        "date": datetime.date.today().isoformat(),
        "kernel": platform.release(),
        "processor": next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
    }
    if args.memory == "cuda":
        query = ["nvidia-smi", f"--id={args.device}", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip().split(", ")
            found |= dict(zip(("gpu", "driver", "pcie_generation", "pcie_lanes"), said))
    return found


# --- tables


def best(steps, name, way):
    return max(r["rates"][way] for r in steps[name]["rows"])


def goals(steps):
    out = []
    ran = {name for name, s in steps.items() if s["outcome"] == "ran"}
    for what, needed, value, least in GOALS:
        if needed <= ran:
            n = value(steps)
            out.append({"what": what, "goal": least, "reached": round(n, 3), "met": n >= least})
        else:
            out.append({"what": what, "goal": least, "reached": None, "met": None})
    return out


def gb(n):
    return f"{n / 1e9:.2f}"


def tables(f):
    lines = ["| machine | |", "|---|---|"] + [f"| {k} | {v} |" for k, v in f["machine"].items()]
    if not f["gpu"]:
        lines += ["", "**No GPU: host memory is in its place, and nothing here says anything of one.**"]
    for name, s in f["steps"].items():
        lines += ["", f"**{name}**: {s['outcome']}, {s['seconds']} s" + (f": {s['why']}" if "why" in s else "")]
        if s["outcome"] != "ran":
            continue
        lines.append("")
        if "rows" in s:
            c = s["ceiling"]
            lines += [
                f"Ceiling (pinned, one stream): {gb(c['load'])} GB/s to the device, {gb(c['save'])} from it. Read 1 MiB, copy, wait: {gb(s['pageable_loop']['load'])} GB/s; the other way {gb(s['pageable_loop']['save'])}.",
                "",
                "| threads | load GB/s | of ceiling | × the loop | save GB/s | of ceiling | × the loop | save + fsync GB/s | bytes by tier | checksums |",
                "|---|---|---|---|---|---|---|---|---|---|",
            ]
            for r in s["rows"]:
                tiers = ", ".join(f"{t} {n}" for t, n in r["loaded"]["by_tier"].items() if n)
                cells = [r["threads"]]
                for way in ("load", "save"):
                    cells += [gb(r["rates"][way]), f"{r['of_ceiling'][way]:.2f}", f"{r['of_pageable_loop'][way]:.2f}"]
                cells += [gb(r["save_and_fsync"]), tiers, r["loaded"]["checksums"]]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
        else:
            lines += ["| what | GB/s | × the first |", "|---|---|---|"]
            first = next(iter(s["figures"].values()))
            lines += [f"| {k} | {v} | |" if isinstance(v, str) else f"| {k} | {gb(v)} | {v / first:.2f} |" for k, v in s["figures"].items()]
    lines += ["", "| goal | at least | reached |", "|---|---|---|"]
    lines += [f"| {g['what']} | {g['goal']} | {'not run' if g['reached'] is None else g['reached']} |" for g in f["goals"]]
    return "\n".join(lines)


def main():
    args = arguments()
    if args.pack:
        return pack()
    run = Run(args)
    if missing := run.missing():
        print(f"skipped: {missing}", file=sys.stderr)
        sys.exit(77)
    run.step("memory", "the bridge, storage servers in memory", lambda: run.bench(args.ram))
    run.step("verified", "the same, verified on the device", run.verified)
    run.step("disk", "the bridge, storage servers on a disk", run.disk)
    run.step("loaders", "safetensors and fastsafetensors", run.loaders)
    run.step("local", "a local file: read and copy, and cuFile", run.local)
    figures = {"machine": machine(args), "gpu": args.memory == "cuda", "steps": run.steps, "goals": goals(run.steps)}
    text = tables(figures)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        (args.out / "figures.md").write_text(text + "\n")
    print(json.dumps(figures, indent=1) if args.json else text)
    if any(s["outcome"] == "failed" for s in run.steps.values()):
        sys.exit(1)
    if run.steps["memory"]["outcome"] != "ran":
        print(f"skipped: the bridge was not measured: {run.steps['memory']['why']}", file=sys.stderr)
        sys.exit(77)


main()
