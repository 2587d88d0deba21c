"""Runs the simulator with one mistake at a time until it is noticed, and prints a table. Called by the script beside it."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Seeds that one process runs.
BLOCK = 20


def seeds(args, mutant, first, count, until):
    """The lines of so many seeds, as they come."""
    env = {k: v for k, v in os.environ.items() if k != "STRAKE_MUTANT"}
    if mutant:
        env["STRAKE_MUTANT"] = mutant
    with tempfile.TemporaryDirectory() as keep:
        command = [args.binary, "--mixed", "--jsonl", "--seed", str(first), "--count", str(count), "--keep", keep]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        try:
            for text in process.stdout:
                line = json.loads(text)
                if "seed" in line:
                    yield line
                if time.monotonic() > until:
                    return
        finally:
            process.kill()
            process.wait()


def hunt(args, mutant, limit):
    """The first seed that fails, if one does in time, and how many were run."""
    until, run, first = time.monotonic() + limit, 0, args.first
    while time.monotonic() < until:
        before = run
        for line in seeds(args, mutant, first, BLOCK, until):
            run += 1
            if line["violations"]:
                return line, run
        if run == before and time.monotonic() < until:
            return {"seed": first, "mode": "?", "violations": ["the simulator ended"]}, run
        first += BLOCK
    return None, run


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--binary", required=True)
    p.add_argument("--patches", type=Path, required=True)
    p.add_argument("--seconds", type=float, required=True)
    p.add_argument("--from", dest="first", type=int, required=True)
    p.add_argument("names", nargs="+")
    args = p.parse_args()
    missed, most = [], 0
    print("| mistake | what it is | noticed by seed | after seeds | broken promise |\n|---|---|---|---|---|", flush=True)
    for name in args.names:
        what = (args.patches / f"{name}.patch").read_text().splitlines()[0]
        found, run = hunt(args, name, args.seconds)
        most = max(most, run)
        if found:
            how = found["violations"][0].replace("|", "/")[:160]
            print(f"| `{name}` | {what} | {found['seed']} ({found['mode']}) | {run} | {how} |", flush=True)
        else:
            missed.append(name)
            print(f"| `{name}` | {what} | **not noticed** | {run} | |", flush=True)
    found, run = hunt(args, None, args.seconds)
    if found:
        print(f"without any mistake seed {found['seed']} ({found['mode']}) broke a promise: {found['violations'][0]}")
    else:
        print(f"without any mistake {run} seeds from {args.first} on broke no promise")
    failed = len(missed) + bool(found)
    print(f"{len(args.names) + 1 - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
