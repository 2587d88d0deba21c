"""Files that lie there while things fail: so that targets are full enough to be unevenly so, and that what nobody touches is looked at, too."""
import os, random

PIECE = 1 << 20
# Of each target's capacity, so much.
PART = 0.2
COPIES = 2


class Ballast:
    def __init__(self, seed, capacity, files=64):
        self.seed, self.files = seed, files
        self.pieces = max(1, int(PART * capacity / COPIES / files / PIECE))

    def bytes_total(self):
        return self.files * self.pieces * PIECE

    def content(self, n):
        source = random.Random(f"{self.seed}/ballast/{n}")
        return (source.randbytes(PIECE) for _ in range(self.pieces))

    def write(self, folder):
        os.mkdir(folder)
        for n in range(self.files):
            with open(f"{folder}/{n}", "xb", buffering=0) as f:
                for piece in self.content(n):
                    if f.write(piece) != PIECE:
                        raise OSError(f"{folder}/{n}: a short write")
                os.fsync(f.fileno())

    def verify(self, folder):
        """What is wrong, in words."""
        for n in range(self.files):
            try:
                with open(f"{folder}/{n}", "rb", buffering=0) as f:
                    # Not what the kernel remembers.
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    for at, piece in enumerate(self.content(n)):
                        have = f.read(PIECE)
                        if have != piece:
                            first = next((i for i, (a, b) in enumerate(zip(have, piece)) if a != b), len(have))
                            yield f"{folder}/{n}: {len(have)} bytes at {at * PIECE}, wrong from {at * PIECE + first} on"
                            break
                    else:
                        if f.read(1):
                            yield f"{folder}/{n} is too long"
            except OSError as e:
                yield f"{folder}/{n}: {e.strerror}"
