#!/bin/bash
# Two mounts of one file system. $1, $2: the mountpoints.
set -u
fail() { echo "FAILED: $1"; exit 1; }
# By the very next call.
now() { local what=$1; shift; "$@" || fail "$what"; echo "ok: $what"; }
A=$1 B=$2
head -c 3000000 /dev/urandom > "$A/shared"
now "a closed file is seen" cmp -s "$A/shared" "$B/shared"
echo more >> "$B/shared"
now "an append is seen" cmp -s "$A/shared" "$B/shared"
echo old > "$A/replaced"; now "a new file is seen" test -f "$B/replaced"
for i in 1 2 3 4 5; do
    test -f "$B/replaced"
    echo "$i" > "$A/next"; mv "$A/next" "$A/replaced"
    test "$(cat "$B/replaced")" = "$i" || fail "a name whose file was replaced leads to the new one"
done
echo "ok: a name whose file was replaced leads to the new one"
mv "$A/shared" "$A/moved"
now "a rename is seen" test -f "$B/moved"
now "the old name goes" bash -c "! test -e '$B/shared'"
chmod 600 "$B/moved"
now "a chmod is seen" bash -c "test \$(stat -c %a '$A/moved') = 600"
rm "$B/moved"
now "a removal is seen" bash -c "! test -e '$A/moved'"
# Those of the cases of two mounts that need no leases.
cases="$(dirname "$0")/../../cluster-tests/coherence/cases.py"
now "names and folders that the other one changes" timeout 100 python3 "$cases" "$A" "$B" claimed_by_rename claimed_within_a_folder \
    tree_removed_by_both removed_open_directory removed_above_an_open_directory renamed_over_an_open_directory
exit 0
