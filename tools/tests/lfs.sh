#!/bin/bash
# lfs on a mount. $1: the strake binary, $2: the mountpoint, of a file system of 4 OSTs with a pool "flash" of OST 0 and 1.
set -u
STRAKE=$1 M=$2
lfs() { "$STRAKE" lfs "$@"; }
ok() { echo "ok: $1"; }
fail() { echo "FAILED: $1"; shift; printf '%s\n' "$@"; exit 1; }
# is WHAT WANT GOT
is() { if [ "$2" = "$3" ]; then ok "$1"; else fail "$1" "wanted: $2" "got:    $3"; fi; }
# status WHAT CODE COMMAND...
status() { local what=$1 want=$2; shift 2; "$@" > /dev/null 2> /tmp/lfs.err.$$; local got=$?; is "$what" "$want" $got; rm -f /tmp/lfs.err.$$; }
# says WHAT TEXT COMMAND...: the error names it
says() { local what=$1 text=$2; shift 2; case "$("$@" 2>&1 >/dev/null)" in *"$text"*) ok "$what" ;; *) fail "$what" "no '$text'" ;; esac; }

lfs setstripe -c 2 -S 1M -i 1 "$M/f" || fail "setstripe of a new file"
is "count" 2 "$(lfs getstripe -c "$M/f")"
is "size" 1048576 "$(lfs getstripe -S "$M/f")"
is "index" 1 "$(lfs getstripe -i "$M/f")"
is "pattern" raid0 "$(lfs getstripe -L "$M/f")"
is "it is empty" 0 "$(stat -c %s "$M/f")"
is "header" "$(printf '%s\nlmm_stripe_count:  2\nlmm_stripe_size:   1048576\nlmm_pattern:       raid0' "$M/f")" "$(lfs getstripe "$M/f" | head -4)"
is "objects" "1 2" "$(lfs getstripe "$M/f" | awk '/^\t +[0-9]/{print $1}' | xargs)"
is "a blank line ends it" "" "$(lfs getstripe "$M/f" | tail -1)"
status "setstripe of a written file" 17 bash -c "echo x > '$M/f'; '$STRAKE' lfs setstripe -c 1 '$M/f'"
lfs setstripe -o 3,0 "$M/list" && is "explicit list" "3 0" "$(lfs getstripe "$M/list" | awk '/^\t +[0-9]/{print $1}' | xargs)"
lfs setstripe -p flash -c -1 "$M/pool" && is "pool" flash "$(lfs getstripe --pool "$M/pool")"
is "all OSTs of a pool" "0 1" "$(lfs getstripe "$M/pool" | awk '/^\t +[0-9]/{print $1}' | sort | xargs)"
lfs setstripe -C 8 "$M/over" && is "overstriping" "8 raid0,overstriped" "$(lfs getstripe -c "$M/over") $(lfs getstripe -L "$M/over")"
status "a bad size" 22 lfs setstripe -S 65537 "$M/bad"
status "an unknown pool" 22 lfs setstripe -p nope "$M/bad"
says "which pool" "pool 'lfstest.nope' not found" lfs setstripe -p nope "$M/bad"
says "which OST" "no OST with index 99" lfs setstripe -i 99 "$M/bad"
status "and no file is left" 2 lfs getstripe "$M/bad"
status "an OST that is not there" 22 lfs setstripe -i 99 "$M/bad"
status "a layout of Lustre's" 95 lfs setstripe -E 1M -c 1 "$M/bad"

mkdir "$M/d"
is "the file system's default" "stripe_count:  1 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1" "$(lfs getstripe -d "$M/d")"
lfs setstripe -c 3 -S 128K "$M/d"
is "a directory's default" "stripe_count:  3 stripe_size:   131072 pattern:       raid0 stripe_offset: -1" "$(lfs getstripe -d "$M/d")"
touch "$M/d/new"; mkdir "$M/d/sub"
is "inherited by files" "3 131072" "$(lfs getstripe -c "$M/d/new") $(lfs getstripe -S "$M/d/new")"
is "inherited by folders" 3 "$(lfs getstripe -c "$M/d/sub")"
is "a listing has folder and entries" "$M/d $M/d/new $M/d/sub" "$(lfs getstripe "$M/d" | grep "^$M" | sort | xargs)"
lfs setstripe -d "$M/d" && is "deleted" "1" "$(lfs getstripe -c "$M/d")"

is "osts" "$(printf 'OBDS:\n0: lfstest-OST0000_UUID ACTIVE\n1: lfstest-OST0001_UUID ACTIVE\n2: lfstest-OST0002_UUID ACTIVE\n3: lfstest-OST0003_UUID ACTIVE')" "$(lfs osts "$M")"
is "mdts" "$(printf 'MDTS:\n0: lfstest-MDT0000_UUID ACTIVE')" "$(lfs mdts "$M")"
is "df" "9" "$(lfs df "$M" | wc -l)"
is "df of a target" "lfstest-OST0002_UUID 1073741824 0 1073741824 0% $M[OST:2]" "$(lfs df "$M" | grep OST0002 | xargs)"
is "df of a pool" "2" "$(lfs df -p lfstest.flash "$M" | grep -c OST)"
status "df elsewhere" 95 lfs df /proc
is "check" 5 "$(lfs check all "$M" | grep -c active)"
is "pools" "$(printf 'Pools from lfstest:\nlfstest.flash')" "$(lfs pool_list lfstest)"
is "a pool" "$(printf 'Pool: lfstest.flash\nlfstest-OST0000_UUID\nlfstest-OST0001_UUID')" "$(lfs pool_list lfstest.flash)"

exec 3> "$M/open"
status "setstripe on a file that is being written" 16 lfs setstripe -c 2 "$M/open"
echo kept >&3
exec 3>&-
is "what was written meanwhile" kept "$(cat "$M/open")"
touch "$M/closed"
status "setstripe on a file that was just closed" 0 lfs setstripe -c 2 "$M/closed"

# Sealed files; `sha256sum` is the judge.
S=$M/seal; mkdir "$S"; head -c 9000000 /dev/urandom > "$S/big"; echo small > "$S/small"; : > "$S/empty"; truncate -s 6M "$S/hole"
odd=$S/$'a\\b\nc'; echo odd > "$odd"
is "the sums of sealed files" "$(sha256sum "$S"/* | sort)" "$(lfs seal -r "$S" | sort)"
is "and once more" "$(sha256sum "$S/big")" "$(lfs seal "$S/big")"
lfs seal --sums -r "$S" | sha256sum -c --strict --quiet && ok "sha256sum agrees"
is "status" "9000000 3" "$(lfs seal --status "$S/big" | awk '/size|extents/{print $2}' | xargs)"
is "verified" 5 "$(lfs verify "$S" | grep -c ': OK$')"
status "all of them" 0 lfs verify "$S"
status "written" 1 bash -c "echo x >> '$S/big' || exit 1"
status "truncated" 1 truncate -s 1 "$S/big"
status "removed" 1 rm -f "$S/big"
status "renamed" 1 mv "$S/big" "$S/other"
status "replaced" 1 mv "$M/pool" "$S/big"
status "linked" 1 ln "$S/big" "$S/link"
status "chmod" 1 chmod 777 "$S/small"
status "touched" 1 touch "$S/small"
is "it is what it was" "$(lfs seal --sums "$S/small")" "$(sha256sum "$S/small")"
(cd "$S" && sha256sum -b big small empty hole a*) > /tmp/lfs.sums.$$
status "a file of sha256sum" 0 lfs verify --sums /tmp/lfs.sums.$$ "$S"
(cd "$S" && status "from its folder" 0 lfs verify -s - < /tmp/lfs.sums.$$) || exit 1
echo loose > "$S/loose"
status "a file that is not sealed" 61 lfs verify "$S"
is "which one" "$S/loose: not sealed" "$(lfs verify -q "$S" 2> /dev/null)"
sha256sum "$S/loose" | sed 's/^./f/;s/^\(.\)./\1e/' > /tmp/lfs.wrong.$$
status "a sum that is wrong" 74 lfs verify --sums /tmp/lfs.wrong.$$
printf 'garbage\n%s\n' "$(sha256sum "$S/small")" > /tmp/lfs.wrong.$$
status "a line that is none" 22 lfs verify --sums /tmp/lfs.wrong.$$
says "which line" "lfs.wrong.$$:1: not a line" lfs verify --sums /tmp/lfs.wrong.$$
is "the others are compared" "$S/small: OK" "$(lfs verify --sums /tmp/lfs.wrong.$$ 2> /dev/null)"
sha256sum "$S/small" | sed 's/small/gone/' > /tmp/lfs.wrong.$$
status "a file that is not there" 2 lfs verify --sums /tmp/lfs.wrong.$$
(cd "$S" && sha256sum ../f) > /tmp/lfs.wrong.$$
says "a file that lies outside" "outside of the directory" lfs verify --sums /tmp/lfs.wrong.$$ "$S"
sha256sum /proc/self/cmdline > /tmp/lfs.wrong.$$
status "a file that is elsewhere" 95 lfs verify --sums /tmp/lfs.wrong.$$
: > /tmp/lfs.wrong.$$
says "no file at all" "names no file" lfs verify --sums /tmp/lfs.wrong.$$
rm -f /tmp/lfs.wrong.$$ /tmp/lfs.sums.$$
exec 3>> "$S/loose"
status "a file that is open for writing" 16 lfs seal "$S/loose"
says "why" "open for writing" lfs seal "$S/loose"
exec 3>&-
status "and closed" 0 lfs seal -q "$S/loose"
status "a directory" 21 lfs seal "$S"
status "undone" 0 lfs seal --undo "$S/loose"
status "it can be written" 0 bash -c "echo more >> '$S/loose'"
status "it is not sealed" 61 lfs seal --undo "$S/loose"
if python3 -c 'import os; os.setxattr' 2> /dev/null; then
    # The first step alone, as a run leaves it that is killed: an encoded Seal { begin }.
    step() { python3 -c 'import os,sys; os.setxattr(sys.argv[1], "system.strake.seal", b"\x1a\x00")' "$S/loose"; }
    step || fail "the first step alone"
    status "immutable without a manifest" 1 rm -f "$S/loose"
    status "which is not verified" 61 lfs verify "$S/loose"
    says "in words" "1 unfinished" lfs verify "$S/loose"
    is "completed" "$(sha256sum "$S/loose")" "$(lfs seal "$S/loose")"
    status "verified" 0 lfs verify "$S/loose"
fi
if [ "$(id -u)" = 0 ] && setpriv --reuid 12345 --clear-groups "$STRAKE" --version > /dev/null 2>&1; then
    user() { setpriv --reuid 12345 --clear-groups "$STRAKE" lfs "$@"; }
    chmod 755 "$M"; echo his > "$S/his"; chown 12345 "$S/his"; chmod 400 "$S/his"
    status "somebody else's file" 1 user seal "$M/list"
    status "his own, that he may not write" 0 user seal "$S/his"
    status "verified by him" 0 user verify "$S/his"
    status "only root goes back" 1 user seal --undo "$S/his"
    status "root may not write it either" 1 bash -c "echo x > '$S/his' || exit 1"
fi

fid=$(lfs path2fid "$M/d/new")
[[ $fid =~ ^\[0x200000400:0x[0-9a-f]+:0x0\]$ ]] || fail "path2fid" "$fid"
is "the root's FID" "[0x200000007:0x1:0x0]" "$(lfs path2fid "$M")"
is "parents" "[0x200000007:0x1:0x0]/f" "$(lfs path2fid --parents "$M/f")"
if [ "$(id -u)" = 0 ]; then
    is "fid2path" "$M/d/new" "$(lfs fid2path "$M" "$fid")"
    is "fid2path by name, without brackets" "$M/d/new" "$(lfs fid2path lfstest "${fid:1:-1}")"
    if setpriv --reuid 12345 --clear-groups "$STRAKE" --version > /dev/null 2>&1; then
        chmod 755 "$M"
        chmod 600 "$M/f"
        status "another user's file" 13 setpriv --reuid 12345 --clear-groups "$STRAKE" lfs getstripe "$M/f"
        status "a user may not set a folder's default" 13 setpriv --reuid 12345 --clear-groups "$STRAKE" lfs setstripe -c 1 "$M/d"
        status "fid2path is root's" 1 setpriv --reuid 12345 --clear-groups "$STRAKE" lfs fid2path "$M" "$fid"
    else
        echo "skipped: what other users may do: they cannot run $STRAKE where it lies"
    fi
fi
status "fid2path of no FID" 22 lfs fid2path "$M" nonsense
lfs mkdir -c 1 -i -1 "$M/made" && ok "mkdir"
status "mkdir on two MDTs" 95 lfs mkdir -c 2 "$M/made2"
is "getdirstripe" "lmv_stripe_count: 0 lmv_stripe_offset: 0 lmv_hash_type: none" "$(lfs getdirstripe "$M/made")"
exit 0
