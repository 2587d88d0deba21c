#!/usr/bin/env python3
"""Works on an NFS export by libnfs. usage: nfs_client.py URL FOLDER RESTART-COMMAND...

FOLDER is what the URL exports; what one side writes the other must see. The command restarts what serves the folder.
"""
import ctypes, os, subprocess, sys

lib = ctypes.CDLL("libnfs.so.13")
P, S, I, U = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64
for name, result, arguments in [
    ("nfs_init_context", P, []), ("nfs_get_error", S, [P]), ("nfs_parse_url_dir", P, [P, S]), ("nfs_mount", I, [P, S, S]),
    ("nfs_creat", I, [P, S, I, P]), ("nfs_open", I, [P, S, I, P]), ("nfs_close", I, [P, P]), ("nfs_fsync", I, [P, P]),
    ("nfs_pwrite", I, [P, P, U, U, S]), ("nfs_pread", I, [P, P, U, U, P]), ("nfs_mkdir", I, [P, S]), ("nfs_rmdir", I, [P, S]),
    ("nfs_rename", I, [P, S, S]), ("nfs_unlink", I, [P, S]), ("nfs_symlink", I, [P, S, S]), ("nfs_link", I, [P, S, S]),
    ("nfs_opendir", I, [P, S, P]), ("nfs_readdir", P, [P, P]), ("nfs_truncate", I, [P, S, U]), ("nfs_chmod", I, [P, S, I]),
]:
    f = getattr(lib, name)
    f.restype, f.argtypes = result, arguments


class Url(ctypes.Structure):
    _fields_ = [("server", S), ("path", S), ("file", S)]


class Entry(ctypes.Structure):
    _fields_ = [("next", P), ("name", S)]


class Nfs:
    def __init__(self, url):
        self.c = lib.nfs_init_context()
        u = lib.nfs_parse_url_dir(self.c, url.encode())
        assert u, self.error()
        u = ctypes.cast(u, ctypes.POINTER(Url))[0]
        self.mounted = lib.nfs_mount(self.c, u.server, u.path) == 0

    def error(self):
        return lib.nfs_get_error(self.c).decode()

    def do(self, name, *a):
        n = getattr(lib, "nfs_" + name)(self.c, *[x.encode() if isinstance(x, str) else x for x in a])
        if n < 0:
            raise OSError(-n, f"{name}: {self.error()}")
        return n

    def handle(self, name, *a):
        fh = P()
        self.do(name, *a, ctypes.byref(fh))
        return fh

    def read(self, fh, n, at):
        data = ctypes.create_string_buffer(n)
        done = self.do("pread", fh, at, n, data)
        return data.raw[:done]

    def names(self, path):
        d, found = self.handle("opendir", path), set()
        while e := lib.nfs_readdir(self.c, d):
            found.add(ctypes.cast(e, ctypes.POINTER(Entry))[0].name.decode())
        return found - {".", ".."}


def main():
    url, folder, restart = sys.argv[1], sys.argv[2], sys.argv[3:]
    nfs = Nfs(url)
    if not nfs.mounted:
        sys.exit(f"not mounted: {nfs.error()}")
    passed = 0

    def check(what, ok):
        nonlocal passed
        assert ok, what
        passed += 1

    local = lambda p: open(f"{folder}/{p}", "rb").read()
    nfs.do("mkdir", "/d")
    fh = nfs.handle("creat", "/d/f", 0o644)
    data = os.urandom(1 << 20)
    for i in range(4):
        done = 0
        while done < len(data):
            piece = data[done:done + 65536]
            done += nfs.do("pwrite", fh, i * len(data) + done, len(piece), piece)
    nfs.do("fsync", fh)
    check("written by NFS", local("d/f") == data * 4)
    subprocess.run(restart, check=True)
    check("read after the restart", nfs.read(fh, 60000, 1 << 20) == data[:60000])
    nfs.do("pwrite", fh, 5, 5, b"after")
    nfs.do("close", fh)
    check("written after the restart", local("d/f")[5:10] == b"after")
    os.rename(f"{folder}/d", f"{folder}/e")
    with open("/proc/sys/vm/drop_caches", "w") as f:
        f.write("2")
    with open(f"{folder}/e/g", "wb") as f:
        f.write(b"local")
    fh = nfs.handle("open", "/e/g", os.O_RDWR)
    check("read what is written here", nfs.read(fh, 10, 0) == b"local")
    nfs.do("close", fh)
    nfs.do("rename", "/e/g", "/h")
    nfs.do("symlink", "e/f", "/s")
    nfs.do("link", "/e/f", "/e/f2")
    nfs.do("truncate", "/e/f2", 7)
    nfs.do("chmod", "/e/f2", 0o600)
    check("names", set(os.listdir(folder)) == {"e", "h", "s"} and nfs.names("/e") == {"f", "f2"})
    check("a link, a cut", os.stat(f"{folder}/e/f").st_nlink == 2 and os.stat(f"{folder}/s").st_size == 7)
    for i in range(300):
        nfs.do("mkdir", f"/e/d{i}")
    subprocess.run(restart, check=True)
    check("a folder", nfs.names("/e") == {"f", "f2"} | {f"d{i}" for i in range(300)})
    for i in range(300):
        nfs.do("rmdir", f"/e/d{i}")
    for p in ["/e/f", "/e/f2", "/s", "/h"]:
        nfs.do("unlink", p)
    nfs.do("rmdir", "/e")
    check("all removed", os.listdir(folder) == [])
    print(f"{passed} passed, 0 failed")


main()
