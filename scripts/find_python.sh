#!/bin/sh
# Prints a Python 3.12 interpreter: python3.12 on the PATH that runs, else the newest 3.12 of pyenv.
set -eu
works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" && { echo "$PYTHON"; exit 0; }
    echo "error: PYTHON=$PYTHON is not a Python 3.12 with venv" >&2
    exit 1
fi
candidate=$(command -v python3.12 || true)
if [ -n "$candidate" ] && works "$candidate"; then echo "$candidate"; exit 0; fi
for candidate in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 2>/dev/null | sort -rV); do
    if works "$candidate"; then echo "$candidate"; exit 0; fi
done
echo "error: no Python 3.12 found (looked for python3.12 on the PATH and under pyenv); install it, or set PYTHON=/path/to/python3.12" >&2
exit 1
