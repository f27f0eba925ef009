#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the table in tests/README.md: each row names a case or says "measured", and each named case exists.
#   tests/promises.sh PROGRAM
set -uo pipefail
cases=$("$1" -ltc --no-skip --no-colors) || exit 1
rows=$(grep -E '^\| [a-g][0-9]+ \|' "$(dirname "$0")/README.md")
wrong=$(while IFS='|' read -r _ code _ named; do
  grep -qE '`|measured' <<<"$named" || echo "$code has no case"
  while read -r name; do
    [ -z "$name" ] || grep -qxF -- "$name" <<<"$cases" || echo "$code names a case that does not exist: $name"
  done < <(grep -o '`[^`]*`' <<<"$named" | tr -d '`')
done <<<"$rows")
[ -n "$rows" ] || wrong="no row found"
[ -z "$wrong" ] || sed 's,^,tests/README.md: ,' <<<"$wrong"
[ -z "$wrong" ] && echo "$(wc -l <<<"$rows") promises"
