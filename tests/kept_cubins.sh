#!/usr/bin/env bash
# Stands before the tile compiler in the tests and keeps what it makes, by the digest of what it was given.
#
#   TILEIRAS   the compiler itself
#   CUBINS     where they are kept; empty: nothing is
#
# Called as tilekern calls the compiler: SOURCE -o CUBIN OPTION...
set -euo pipefail
if [ -z "${CUBINS:-}" ] || [ "${2:-}" != -o ]; then
    exec "$TILEIRAS" "$@"
fi
source=$1 cubin=$3
read -r digest _ < <({ cat "$source"; printf '%s\n' "$(stat -Lc %s.%Y "$TILEIRAS")" "${@:4}"; } | sha256sum)
kept="$CUBINS/$digest"
if [ -e "$kept" ]; then
    cp "$kept" "$cubin"
    exit
fi
"$TILEIRAS" "$@"
cp "$cubin" "$kept.$$"
mv "$kept.$$" "$kept"
