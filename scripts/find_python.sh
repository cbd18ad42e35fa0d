#!/usr/bin/env bash
# Prints the first Python on this machine that pdserve supports (3.11 or 3.12), or says what is missing.
set -u
for python in python3 python3.11 python3.12; do
  if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
    command -v "$python"
    exit 0
  fi
done
echo "pdserve needs Python 3.11 or 3.12; install one, or run 'make PYTHON=/path/to/python …'" >&2
exit 1
