#!/bin/bash
# overlayfs with its upper and work folder in $1, in a mount namespace of its own; the lower folder is on a local file system.
set -u
check() { local what=$1; shift; if "$@"; then echo "ok: $what"; else echo "FAILED: $what"; exit 1; fi; }
O=$1/overlay L=$(mktemp -d)
trap 'umount "$O/m" 2>/dev/null; rm -rf "$L"' EXIT
mkdir -p "$O"/{u,w,m} "$L"/{kept,gone,full} && touch "$L"/{kept,gone,full}/f && echo lower > "$L/file" && echo moved > "$L/moves"
start() { mount -t overlay overlay -o "lowerdir=$L,upperdir=$O/u,workdir=$O/w" "$O/m"; }
check "an overlay starts" start
cd "$O/m" || exit 1
rm file && check "a file of the lower folder is removed" test ! -e file
check "by a whiteout" test -c "$O/u/file"
mv moves moved && check "and renamed" test "$(cat moved)" = moved -a ! -e moves
check "which leaves a whiteout" test -c "$O/u/moves"
echo upper >> kept/f && check "changed" test "$(cat kept/f)" = upper
rm -r gone && mkdir gone && check "a folder made in the place of another is empty" test -z "$(ls gone)"
echo new > gone/new; ln gone/new link; ln -s link soft; mkfifo fifo; chmod 600 full/f; setfattr -n user.a -v b full 2>/dev/null
touch opened && exec 5<>opened && rm opened && echo x >&5 && exec 5>&-
cd / && umount "$O/m" && start || exit 1
check "all is there when it starts again" test "$(cd "$O/m" && echo *)" = "fifo full gone kept link moved soft"
check "as it was" test "$(cat "$O/m/soft" "$O/m/kept/f" "$O/m/moved" | tr '\n' ' ')$(stat -c %a "$O/m/full/f")" = "new upper moved 600"
check "and is removed" rm -r "$O/m/full" "$O/m/kept" "$O/m/gone"
check "the lower folder is untouched" test "$(cd "$L" && find . -type f | sort | tr '\n' ' ')" = "./file ./full/f ./gone/f ./kept/f ./moves "
umount "$O/m" && rm -rf "$O"
