"""What the workload writes: blocks that say what they are; and what is known of them, shared by all of its processes."""
import mmap, multiprocessing, os, struct, zlib

BLOCK = 4096
MAGIC = b"STRKCHAO"
HEAD = struct.Struct("<8sIIQQ")  # magic, file, generation, block of the file, version
MAX_BLOCKS = 384
ZEROS = bytes(BLOCK)


def make(file, generation, index, version):
    """A block: its header again and again, so that no sector of another block can pass for one of it, and a checksum of all that."""
    head = HEAD.pack(MAGIC, file, generation, index, version)
    body = (head * (BLOCK // HEAD.size + 1))[:BLOCK - 4]
    return body + struct.pack("<I", zlib.crc32(body))


def inside(block):
    """What a block that is none is made of: runs of (offset, file, generation, block, version), or of bytes."""
    runs = []
    for at in range(0, BLOCK - HEAD.size, HEAD.size):
        magic, *what = HEAD.unpack_from(block, at)
        what = tuple(what) if magic == MAGIC else block[at:at + HEAD.size].hex()
        if not runs or runs[-1][1] != what:
            runs.append((at, what))
    return ", ".join(f"{at}: {what}" for at, what in runs[:6]) + f"; the last bytes {block[-8:].hex()}"


class Wrong(Exception):
    """A promise that was broken."""


class Files:
    """Of each file, in blocks and versions: what an answered fsync covers (`acked`), and what was ever handed to write (`tried`). Versions
    of a file only grow, over all its generations; a generation is a new file renamed over the old one, never shorter."""

    def __init__(self, count):
        self.count = count
        self.acked = multiprocessing.RawArray("Q", count * MAX_BLOCKS)
        self.tried = multiprocessing.RawArray("Q", count * MAX_BLOCKS)
        self.size = multiprocessing.RawArray("Q", count)
        self.size_tried = multiprocessing.RawArray("Q", count)
        self.generation = multiprocessing.RawArray("Q", count)
        self.generation_tried = multiprocessing.RawArray("Q", count)

    def known(self, f):
        """What every look that begins now must find at least: size, generation, versions."""
        return self.size[f], self.generation[f], self.acked[f * MAX_BLOCKS:(f + 1) * MAX_BLOCKS]

    def check(self, f, least, size, first, data):
        """`data` from block `first` on, of a file that was found `size` bytes long, against what was known before (`least`)."""
        blocks, generation, acked = least
        if size % BLOCK or size < blocks * BLOCK or size > self.size_tried[f] * BLOCK:
            raise Wrong(f"file {f}: {size} bytes long, synced were {blocks * BLOCK}, written {self.size_tried[f] * BLOCK}")
        whole = min(size // BLOCK - first, len(data) // BLOCK)
        seen = set()
        for n in range(max(whole, 0)):
            index, block = first + n, data[n * BLOCK:(n + 1) * BLOCK]
            synced = acked[index] if index < blocks else 0
            if block == ZEROS and not synced:
                continue  # the hole before a block that nobody synced
            magic, file, g, at, version = HEAD.unpack_from(block)
            where = f"file {f} block {index}"
            if magic != MAGIC or block != make(file, g, at, version):
                kind = "zeros" if block == ZEROS else f"torn or foreign: {inside(block)}"
                raise Wrong(f"{where}: {kind}; version {synced} was synced")
            if (file, at) != (f, index):
                raise Wrong(f"{where}: has block {at} of file {file}")
            if version < synced or version > self.tried[f * MAX_BLOCKS + index]:
                raise Wrong(f"{where}: version {version}, synced was {synced}, written {self.tried[f * MAX_BLOCKS + index]}")
            seen.add(g)
        if len(seen) > 1 or any(g < generation or g > self.generation_tried[f] for g in seen):
            raise Wrong(f"file {f}: generations {sorted(seen)}, renamed was {generation}, tried {self.generation_tried[f]}")
        return whole


def read(path, first, count, direct=False):
    """Size and bytes by one open file; the size from fstat before the read. Into whole pages: the kernel cuts a long read into requests
    by pages, and a block that two of them share may be half old, half new when it is being written."""
    f = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        size = os.fstat(f).st_size
        want = max(0, min(count * BLOCK, size - first * BLOCK))
        with mmap.mmap(-1, max(want, BLOCK)) as buffer:
            got = os.preadv(f, [memoryview(buffer)[:want]], first * BLOCK) if want else 0
            return size, buffer[:got]
    finally:
        os.close(f)
