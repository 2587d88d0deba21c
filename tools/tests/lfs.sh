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
