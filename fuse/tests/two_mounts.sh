#!/bin/bash
# Two mounts of one file system. $1, $2: the mountpoints.
set -u
fail() { echo "FAILED: $1"; exit 1; }
# Kernel caches and the size of a file are believed for up to a second.
within() { local what=$1; shift; for _ in $(seq 1 40); do "$@" && { echo "ok: $what"; return; }; sleep 0.1; done; fail "$what"; }
A=$1 B=$2
head -c 3000000 /dev/urandom > "$A/shared"
within "a closed file is seen" cmp -s "$A/shared" "$B/shared"
echo more >> "$B/shared"
within "an append is seen" cmp -s "$A/shared" "$B/shared"
# What a name stood for is gone: the name is looked up again, whatever is believed.
echo old > "$A/replaced"; within "a new file is seen" test -f "$B/replaced"
for i in 1 2 3 4 5; do
    test -f "$B/replaced"
    echo "$i" > "$A/next"; mv "$A/next" "$A/replaced"
    test "$(cat "$B/replaced")" = "$i" || fail "a name whose file was replaced leads to the new one"
done
echo "ok: a name whose file was replaced leads to the new one"
mv "$A/shared" "$A/moved"
within "a rename is seen" test -f "$B/moved"
within "the old name goes" bash -c "! test -e '$B/shared'"
chmod 600 "$B/moved"
within "a chmod is seen" bash -c "test \$(stat -c %a '$A/moved') = 600"
rm "$B/moved"
within "a removal is seen" bash -c "! test -e '$A/moved'"
exit 0
