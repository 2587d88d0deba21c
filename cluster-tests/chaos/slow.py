"""Calls that took long: which faults held them, and whether a majority could have answered all the same."""

# What users are promised of any one thing that fails, seconds.
LIMIT = 5.0
# A fault that has ended counts for so long: what it left is being put right.
AFTER = 10.0
# The servers are there, and answer as fast as these let them.
WEAK = {"slow_link", "lossy_link", "late_link"}
# Both ends are there, and others reach both: no more than one server is missed, and no client.
ONE_LINK = {"cut_pair"}


class Fault:
    """`nodes`: the names of all that it hits."""

    def __init__(self, kind, hit, nodes, began):
        self.kind, self.hit, self.nodes, self.began, self.ended = kind, hit, set(nodes), began, None

    def held(self, began, ended):
        return self.began <= ended and (self.ended is None or self.ended + AFTER >= began)


def judge(client, began, ended, faults, servers):
    """The faults that may have held a call, and why nobody could have answered it in time; no reason: somebody could. `servers`: name,
    role and rack of each. Copies lie in different racks."""
    held = [f for f in faults if f.held(began, ended)]
    if any(client in f.nodes and f.kind not in ONE_LINK for f in held):
        return held, "its client was hit itself"
    if any(f.kind in WEAK for f in held):
        return held, "a weak link"
    hit = set()
    for f in held:
        there = sorted(f.nodes.intersection(name for name, _, _ in servers))
        hit.update(there[:1] if f.kind in ONE_LINK else there)
    mds = [name for name, role, _ in servers if role == "mds"]
    if 2 * len(hit.intersection(mds)) >= len(mds):
        return held, "no majority of the metadata servers"
    if len({rack for name, role, rack in servers if role == "oss" and name in hit}) > 1:
        return held, "storage servers of both racks"
    return held, None
