"""Seeds on all cores: one process of `strake-sim --mixed --jsonl` per core, each with a few seeds at a time, because a run
keeps some of its memory until its process ends. Called by ./simulate."""

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

# Seeds that one process runs at most.
BLOCK = 200
# Without an end that is given, seeds go on until the time is over.
ENDLESS = 1 << 62


def seeds(text):
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"'{text}' is not FROM..TO, as in 1..1000 (both included)")
    return int(match[1]), int(match[2])


def positive(kind):
    def parse(text):
        n = kind(text)
        if n <= 0:
            raise argparse.ArgumentTypeError("must be above 0")
        return n

    return parse


def arguments():
    p = argparse.ArgumentParser(prog="./simulate", description="Run the deterministic simulator over many seeds, on all cores.")
    limit = p.add_mutually_exclusive_group(required=True)
    limit.add_argument("--hours", type=positive(float), help="stop after so many hours")
    limit.add_argument("--minutes", type=positive(float), help="stop after so many minutes")
    limit.add_argument("--seeds", type=seeds, metavar="FROM..TO", help="run these seeds, both included")
    p.add_argument("--from", dest="first", type=positive(int), help="with a time: the first seed (default: from the clock)")
    p.add_argument("--jobs", type=positive(int), default=len(os.sched_getaffinity(0)), help="processes (default: one per core)")
    p.add_argument("--keep", type=Path, default=Path("target/simulate"), help="where seeds that fail are kept, and summary.json")
    p.add_argument("--json", action="store_true", help="print the summary as JSON")
    p.add_argument("--binary", type=Path, default=Path("target/release/strake-sim"), help=argparse.SUPPRESS)
    return p.parse_args()


class Worker:
    """One process with a block of seeds."""

    def __init__(self, args, first, count):
        self.next, self.end = first, first + count
        command = [args.binary, "--mixed", "--jsonl", "--seed", str(first), "--count", str(count), "--keep", args.keep]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.rest = b""

    def lines(self):
        """What came since, as values, and whether that was all."""
        data = self.process.stdout.read()
        if data is None:
            return [], False
        *full, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in full if line], data == b""


class Sum:
    """Of all seeds so far."""

    def __init__(self):
        self.begun = time.monotonic()
        self.seeds = self.counted = 0
        self.modes, self.faults, self.rows, self.failures = {}, {}, {}, []

    def add(self, line):
        if "rows" in line:
            for table, rows in line["rows"].items():
                mine = self.rows.setdefault(table, {})
                for row, n in rows.items():
                    mine[row] = mine.get(row, 0) + n
            return
        self.seeds += 1
        self.counted += line["counted"]
        mode = self.modes.setdefault(line["mode"], {"seeds": 0, "counted": 0, "failed": 0})
        mode["seeds"] += 1
        mode["counted"] += line["counted"]
        mode["failed"] += bool(line["violations"])
        for kind, (made, counted) in line["faults"].items():
            of = self.faults.setdefault(kind, {"made": 0, "counted": 0})
            of["made"] += made
            of["counted"] += counted
        if line["violations"]:
            failure = {k: line[k] for k in ("seed", "mode", "violations", "kept")}
            self.failures.append(failure)

    def value(self, first, last):
        seconds = time.monotonic() - self.begun
        return {
            "seeds": self.seeds, "first_seed": first, "last_seed": last, "seconds": round(seconds, 1),
            "seeds_per_hour": round(self.seeds / seconds * 3600), "counted": self.counted,
            "counted_per_hour": round(self.counted / seconds * 3600), "failed": len(self.failures), "modes": self.modes,
            "faults": self.faults, "rows": self.rows, "failures": self.failures,
        }  # fmt: skip


def span(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Progress:
    """A line that is written over where there is a terminal, and a line a minute where there is none."""

    def __init__(self):
        self.terminal, self.last = sys.stderr.isatty(), 0.0

    def show(self, total, left, force=False):
        now = time.monotonic()
        if not force and now - self.last < (1 if self.terminal else 60):
            return
        self.last = now
        seconds = max(now - total.begun, 0.001)
        eta = "?" if left is None else span(left)
        text = (
            f"{span(seconds)}  {total.seeds} seeds, {total.counted} faults counted, {len(total.failures)} failed, "
            f"{total.seeds / seconds * 3600:.0f} seeds/h, {total.counted / seconds * 3600:.0f} faults/h, {eta} left"
        )
        end = "\r" if self.terminal and not force else "\n"
        print(f"\r{text}\x1b[K" if self.terminal else text, end=end, file=sys.stderr, flush=True)


def run(args, total):
    """Runs the seeds; the first, the last and whether a process failed otherwise than by a broken promise."""
    limit = (args.hours or 0) * 3600 + (args.minutes or 0) * 60
    until = total.begun + limit if limit else None
    first, last = args.seeds or (args.first or int(time.time()) * 1000, ENDLESS)
    # Small blocks where there are few seeds, so that all cores have some.
    block = min(BLOCK, max(1, (last - first + 1) // (args.jobs * 4)))
    progress, workers, following, died = Progress(), [], first, []
    while True:
        over = until is not None and time.monotonic() >= until
        while not over and following <= last and len(workers) < args.jobs:
            count = min(block, last - following + 1)
            workers.append(Worker(args, following, count))
            following += count
        if over:
            for w in workers:
                w.process.kill()
        if not workers:
            break
        select.select([w.process.stdout for w in workers], [], [], 0.5)
        for w in list(workers):
            lines, ended = w.lines()
            for line in lines:
                total.add(line)
                w.next = max(w.next, line.get("seed", 0) + 1)
                if line.get("violations"):
                    print(f"\nseed {line['seed']} ({line['mode']}): {line['violations'][0]}", file=sys.stderr)
            if ended:
                workers.remove(w)
                status = w.process.wait()
                if status not in (0, 1) and not over:
                    died.append(f"seed {w.next} ended its process with status {status}")
                    print(f"\n{died[-1]}", file=sys.stderr)
                    if w.next + 1 < w.end:
                        workers.append(Worker(args, w.next + 1, w.end - w.next - 1))
        done = total.seeds / (last - first + 1)
        spent = time.monotonic() - total.begun
        left = max(until - time.monotonic(), 0) if until else (spent / done - spent if done else None)
        progress.show(total, left)
    progress.show(total, 0, force=True)
    return first, min(following - 1, last), died


def text(v):
    out = [f"{v['seeds']} seeds ({v['first_seed']} to {v['last_seed']}) in {span(v['seconds'])}, {v['seeds_per_hour']} an hour"]
    out += [f"  {m:8} {c['seeds']:9} seeds, {c['counted']:10} faults counted, {c['failed']} failed" for m, c in v["modes"].items()]
    out += [f"{v['counted']} faults counted, {v['counted_per_hour']} an hour:"]
    out += [f"  {kind:16} {c['counted']:10} of {c['made']} made" for kind, c in v["faults"].items()]
    missing = [row for rows in v["rows"].values() for row, n in rows.items() if n == 0]
    rows = sum(len(rows) for rows in v["rows"].values())
    out += [f"{rows - len(missing)} of {rows} rows of the tables taken" + (f"; not: {', '.join(missing)}" if missing else "")]
    for f in v["failures"]:
        out += [f"FAILED seed {f['seed']} ({f['mode']}): {f['violations'][0]}", f"  kept as {f['kept']}"]
    out += [f"{v['seeds'] - v['failed']} passed, {v['failed'] + len(v['died'])} failed"]
    return "\n".join(out)


def main():
    args = arguments()
    if not args.binary.exists():
        sys.exit(f"{args.binary} is not there; ./simulate builds it")
    args.keep.mkdir(parents=True, exist_ok=True)
    total = Sum()
    first, last, died = run(args, total)
    value = total.value(first, last) | {"died": died}
    (args.keep / "summary.json").write_text(json.dumps(value, indent=1) + "\n")
    print(json.dumps(value, indent=1) if args.json else text(value))
    sys.exit(2 if died else 1 if total.failures else 0)


if __name__ == "__main__":
    main()
