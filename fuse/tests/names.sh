#!/bin/bash
# Names, directories and modes on a mount, where they differ most from what is simple. $1: the mountpoint. Prints each check; the first
# that fails ends it.
set -u
M=$1
cd "$M" || exit 1
ok() { echo "ok: $1"; }
fail() { echo "FAILED: $1"; exit 1; }
check() { local what=$1; shift; if "$@"; then ok "$what"; else fail "$what"; fi; }
refused() { local what=$1; shift; if "$@" 2>/dev/null; then fail "$what (was allowed)"; else ok "$what"; fi; }

python3 - <<'PY' && ok "a removed folder that is open" || fail "a removed folder that is open"
import errno, os
def fails(code, call):
    try: call(); assert False, "it succeeded"
    except OSError as e: assert e.errno == code, e
for how in ("rmdir", "rename over"):
    os.mkdir("rm1"); os.mkdir("rm2"); fd = os.open("rm2", os.O_RDONLY)
    if how == "rmdir": os.rmdir("rm2"); os.rmdir("rm1")
    else: os.rename("rm1", "rm2")
    st = os.fstat(fd); assert st.st_nlink == 0 and st.st_mode & 0o170000 == 0o040000, (how, st)
    assert os.listdir(fd) == []
    os.fchmod(fd, 0o700); os.utime(fd, ns=(5, 6)); os.fsync(fd)
    st = os.fstat(fd); assert (st.st_mode & 0o7777, st.st_atime_ns, st.st_mtime_ns) == (0o700, 5, 6), (how, st)
    fails(errno.ENOENT, lambda: os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    fails(errno.ENOENT, lambda: os.mkdir("d", dir_fd=fd))
    os.close(fd)
    if how != "rmdir": os.rmdir("rm2")
os.mkdir("rm3"); here = os.getcwd(); os.chdir("rm3"); os.rmdir("../rm3")
assert os.stat(".").st_nlink == 0 and os.listdir(".") == []
os.chdir(here)
PY
python3 - <<'PY' && ok "rename flags" || fail "rename flags"
import ctypes, os, stat
libc = ctypes.CDLL(None, use_errno=True)
def renameat2(a, b, flags):
    return 0 if libc.renameat2(-100, a.encode(), -100, b.encode(), flags) == 0 else ctypes.get_errno()
for n in "12": open("w" + n, "w").write(n)
assert renameat2("w1", "w2", 5) == 17 and renameat2("w1", "w3", 6) == 22, "a whiteout with other flags"
if os.geteuid() == 0:
    assert renameat2("w1", "w2", 4) == 0 and open("w2").read() == "1"
    left = os.lstat("w1"); assert stat.S_ISCHR(left.st_mode) and left.st_rdev == 0, left
PY
python3 - <<'PY' && ok "names of xattrs that can be listed" || fail "names of xattrs that can be listed"
import os
open("xl", "w").close()
def name(i): return f"user.{i:03}" + "k" * 247
n = 0
try:
    while n < 300: os.setxattr("xl", name(n), b"v"); n += 1
    assert False, "all were taken"
except OSError as e: assert e.errno == 28, e
assert n == 255 and sorted(os.listxattr("xl")) == [name(i) for i in range(n)], n
os.setxattr("xl", name(3), b"w"); os.removexattr("xl", name(4)); os.setxattr("xl", name(n), b"v")
PY

[ "$(id -u)" = 0 ] || exit 0
as() { setpriv --reuid 12345 --regid 12345 --groups 23456 "$@"; }
touch writable && chmod 777 writable
for of in "0 767" "12345 2767" "23456 2767"; do
    set -- $of; chgrp "$1" writable; chmod 2767 writable; as sh -c 'printf x >> writable'
    check "set-group-id without group execution after a write, group $1" test "$(stat -c %a writable)" = "$2"
done
chown 0:0 writable; chmod 2767 writable; exec 5>>writable; as sh -c 'printf x >&5'; exec 5>&-
check "so through root's descriptor" test "$(stat -c %a writable)" = 767
chmod 2767 writable; as truncate -s 1 writable; check "so by truncate" test "$(stat -c %a writable)" = 767
cp "$(type -P true)" program
for of in "0711 99:99" "4711 99:99" "0001 99:99" "0010 99:23456" "0100 12345:99" "0755 99:99"; do
    set -- $of; chown "$2" program; chmod "$1" program
    check "a program of mode $1 runs" as ./program
    [ "$1" = 0755 ] || refused "which cannot be read" as cat program
    check "and keeps its mode" test "$(stat -c %04a program)" = "$1"
done
chmod 0711 program
python3 - <<'PY' && ok "no program can open it as the kernel does" || fail "no program can open it as the kernel does"
import ctypes, errno, os, struct
os.setgroups([]); os.setgid(12345); os.setuid(12345)
FMODE_EXEC, AT_FDCWD, OPENAT2 = 0x20, -100, 437
try: os.open("program", FMODE_EXEC); assert False, "open"
except PermissionError: pass
libc, how = ctypes.CDLL(None, use_errno=True), struct.pack("<QQQ", FMODE_EXEC, 0, 0)
assert libc.syscall(OPENAT2, AT_FDCWD, b"program", how, 24) == -1 and ctypes.get_errno() == errno.EINVAL, "openat2"
PY
chmod 0600 program; refused "one that nobody may run" as ./program
cat > closed-program.sh <<< $'#!/bin/sh\nexit 0'; chmod 711 closed-program.sh; refused "a script that cannot be read" as ./closed-program.sh
if grep -qw overlay /proc/filesystems; then
    check "an upper folder of overlayfs" unshare --mount bash "$(dirname "$0")/overlay.sh" "$M"
fi
