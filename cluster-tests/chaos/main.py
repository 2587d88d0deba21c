"""The command ./cluster."""
import argparse, os, signal, sys

sys.dont_write_bytecode = True
from cluster import Cluster
from engine import fail

ROOT = os.path.realpath(f"{os.path.dirname(__file__)}/../..")


def arguments():
    p = argparse.ArgumentParser(prog="./cluster", description="A cluster of StrakeFS in containers on this machine: 3 metadata servers, 4 storage "
                                "servers in two racks, 2 clients. Needs root, or an engine that runs and may be used.")
    p.add_argument("--dir", default=f"{ROOT}/.strake-cluster", help="folder for all files of the cluster [.strake-cluster in this tree]")
    p.add_argument("--name", default="strake", help="name of its network, and prefix of its containers' names [strake]")
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = sub.add_parser("up", help="create the cluster, or start it again; wait until it is in service")
    up.add_argument("--image", help="use this image instead of one made from STRAKE or from a release build of this tree")
    up.add_argument("--subnet", default="10.89", metavar="A.B", help="the network is A.B.0.0/16 [10.89]")
    up.add_argument("--target-mib", type=int, default=1024, help="size of each of the eight targets, in MiB [1024]")
    up.add_argument("--timeout", type=int, default=120, help="how long to wait for service, in seconds [120]")

    sub.add_parser("down", help="remove the whole cluster with its data; stop the engine if `up` started it")

    status = sub.add_parser("status", help="containers, mounts, and `strake status` from within",
                            description="Exit status: 0 all is well, 1 nobody answers, 2 something is missing.")
    status.add_argument("--json", action="store_true")

    shell = sub.add_parser("shell", help="run a shell or a command in a node")
    shell.add_argument("node")
    shell.add_argument("command_", nargs=argparse.REMAINDER, metavar="COMMAND")

    logs = sub.add_parser("logs", help="show the log of a node")
    logs.add_argument("node")
    logs.add_argument("-f", "--follow", action="store_true")
    logs.add_argument("--tail", default="all", metavar="N", help="only the last N lines")

    chaos = sub.add_parser("chaos", help="run a verifying workload on both clients while nodes, links and disks fail and bytes are damaged",
                           description="Exit status: 0 nothing lost, nothing stale, all healed; 1 otherwise. See docs/testing.md.")
    chaos.add_argument("--minutes", type=float, default=60, help="minutes with faults; healing and the last verification come afterwards [60]")
    chaos.add_argument("--seed", type=int, help="seed of the schedule and the workload [random, and printed]")
    chaos.add_argument("--only", metavar="KIND,...", help="only these kinds of faults (--list)")
    chaos.add_argument("--list", action="store_true", help="list the kinds of faults, with the reason if one is not possible here")
    chaos.add_argument("--json", action="store_true", help="print the summary as JSON")
    # Whether an engine answers or can be started here; for cluster-tests/chaos/run.
    sub.add_parser("probe")
    return p.parse_args()


def main():
    args = arguments()
    cluster = Cluster(args.dir, args.name)
    if args.command == "shell":
        args.command, args.command_ = args.command_, None
        return cluster.shell(args)
    if args.command == "chaos":
        from chaos import chaos
        return chaos(cluster, args)
    return getattr(cluster, args.command)(args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(main())
    except RuntimeError as e:
        fail(e)
