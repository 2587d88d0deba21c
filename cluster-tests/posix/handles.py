#!/usr/bin/env python3
"""Files by handle: name_to_handle_at(2) and open_by_handle_at(2), as NFS servers and backups use them.
usage: handles.py FOLDER [COMMAND...]      COMMAND restarts what serves the folder
"""
import ctypes, errno, os, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
MAX = 128


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * MAX)]


def handle(path):
    h, mount = Handle(bytes=MAX), ctypes.c_int()
    if libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(h), ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return h


def opened(top, h, flags=os.O_RDONLY):
    fd = libc.open_by_handle_at(top, ctypes.byref(h), flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def gone(top, h):
    try:
        os.close(opened(top, h))
    except OSError as e:
        return e.errno == errno.ESTALE
    return False


def forget():
    """The kernel forgets what it knows of inodes that nobody uses."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as f:
        f.write("2")


failed = passed = 0


def check(what, ok):
    global failed, passed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"FAILED  {what}", flush=True)


def main():
    folder, restart = sys.argv[1], sys.argv[2:]
    os.makedirs(f"{folder}/a/b")
    os.mkdir(f"{folder}/other")
    with open(f"{folder}/a/b/file", "w") as f:
        f.write("contents")
    os.symlink("target", f"{folder}/a/link")
    top = os.open(folder, os.O_RDONLY)
    file, directory, root = handle(f"{folder}/a/b/file"), handle(f"{folder}/a/b"), handle(folder)

    def all_open(when):
        fd = opened(top, file, os.O_RDWR)
        check(f"{when}: a file", os.pread(fd, 20, 0) == b"contents")
        os.pwrite(fd, b"contents", 0)
        os.close(fd)
        fd = opened(top, directory, os.O_RDONLY | os.O_DIRECTORY)
        check(f"{when}: a directory", os.listdir(fd) == ["file"])
        # A directory that came by handle is put in its place by way of its parents.
        here = os.readlink(f"/proc/self/fd/{fd}")
        check(f"{when}: its path", here == f"{folder}/a/b" or here == f"{folder}/other/b")
        check(f"{when}: its parent", os.path.samestat(os.stat("..", dir_fd=fd), os.stat(os.path.dirname(here))))
        os.close(fd)
        fd = opened(top, root)
        check(f"{when}: the top", os.path.samestat(os.fstat(fd), os.stat(folder)))
        os.close(fd)

    all_open("while known")
    forget()
    all_open("after the kernel forgot")
    os.rename(f"{folder}/a/b", f"{folder}/other/b")
    forget()
    all_open("after a rename")
    if restart:
        subprocess.run(restart, check=True)
        forget()
        all_open("after a restart")
    link = handle(f"{folder}/a/link")
    fd = opened(top, link, os.O_PATH)
    check("a symbolic link", os.readlink("", dir_fd=fd) == "target")
    check("the same handle again", bytes(handle(f"{folder}/other/b/file")) == bytes(file))
    os.link(f"{folder}/other/b/file", f"{folder}/second")
    os.unlink(f"{folder}/other/b/file")
    forget()
    fd = opened(top, file)
    check("a file that lost its first name", os.read(fd, 20) == b"contents")
    os.close(fd)
    os.unlink(f"{folder}/second")
    os.rmdir(f"{folder}/other/b")
    forget()
    check("a removed file is ESTALE", gone(top, file))
    check("a removed directory is ESTALE", gone(top, directory))
    with open(f"{folder}/new", "w"):
        check("a new file is not taken for it", bytes(handle(f"{folder}/new")) != bytes(file) and gone(top, file))
    for i in range(len(bytes(file)) - 100):
        bad = Handle.from_buffer_copy(bytes(root))
        bad.data[i % root.bytes] ^= 0x5A
        check(f"a forged handle, byte {i}", gone(top, bad))
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
