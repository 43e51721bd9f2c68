#!/bin/sh
# Print a Python that can make an environment: the first usable one of the versions asked for.
#
#     scripts/find_python.sh 3.11 3.12 3.13
#
# PYTHON, when set, is the only candidate. Otherwise each version is looked for on PATH and
# among pyenv's. A candidate counts only if it runs (a pyenv shim may not), is of that version
# and can make virtual environments (Debian's, without python3-venv, cannot). Otherwise one
# line says what to install, and the exit status is 1.
set -eu

probe='import sys; print("%d.%d" % sys.version_info[:2]); import ensurepip, venv'
without_venv='' too_old=''

# Is $1 a Python of version $2 (any from 3.11 on when empty), with venv?
usable() {
    status=0
    version=$("$1" -c "$probe" 2>/dev/null) || status=$?
    case $version in
        2.* | 3.[0-9] | 3.10) too_old="${too_old:-$1 is Python $version}"; return 1 ;;
        3.*) ;;
        *) return 1 ;;
    esac
    [ -z "$2" ] || [ "$version" = "$2" ] || return 1
    [ "$status" -eq 0 ] || { without_venv=${without_venv:-$version}; return 1; }
}

if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON" ''; then echo "$PYTHON"; exit; fi
    [ -n "$without_venv$too_old" ] || too_old="PYTHON=$PYTHON does not run"
else
    for wanted in "$@"; do
        for candidate in "python$wanted" python3 python \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$wanted"*/bin/python; do
            command -v "$candidate" >/dev/null 2>&1 || continue
            if usable "$candidate" "$wanted"; then command -v "$candidate"; exit; fi
        done
    done
fi

if [ -n "$without_venv" ]; then
    echo "Python $without_venv is here, but its venv module is not complete:" \
        "install it (Debian, Ubuntu: apt install python$without_venv-venv) and run this again." >&2
else
    echo "Python 3.11 or newer is needed (${too_old:-none found}):" \
        "install it (Debian, Ubuntu: apt install python3.11 python3.11-venv)," \
        "or say where one is: make PYTHON=/path/to/python3.11 ..." >&2
fi
exit 1
