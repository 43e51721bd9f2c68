#!/bin/sh
# Make or renew the virtual environment; a call that finds it up to date installs nothing.
#
#     scripts/make_venv.sh .venv
#
# On Python 3.11 it holds everything. PyTorch is pinned for 3.11 alone, so on newer versions the
# environment is for JAX alone, rather than with a PyTorch of a release nobody tested.
# The file complete, written last, holds the checksum of what was installed and the extras: an
# environment without it is one whose installation was interrupted, and is made anew.
set -eu

cd "$(dirname "$0")/.."
venv=${1:?"usage: scripts/make_venv.sh DIRECTORY"}
stamp=$venv/complete
marker=$venv/made-by-make-venv
checksum=$(cat pyproject.toml constraints.txt scripts/make_venv.sh | cksum)

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

up_to_date() {
    [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$checksum" ] && same_python
}

# Does the environment run, on the version of PYTHON if that is set?
same_python() {
    have=$(version "$venv/bin/python")
    [ -n "$have" ] && { [ -z "${PYTHON:-}" ] || [ "$have" = "$(version "$PYTHON")" ]; }
}

up_to_date && exit

# One at a time. The link's target is the process that holds it, so that one left behind by a
# process that was killed is seen as such.
lock=$venv.lock
until ln -sn $$ "$lock" 2>/dev/null; do
    kill -0 "$(readlink "$lock")" 2>/dev/null || { rm -f "$lock"; continue; }
    sleep 1
done
trap 'rm -f "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
up_to_date && exit

if [ -e "$venv" ] && [ ! -e "$marker" ]; then
    echo "$venv exists, but was not made by this Makefile: remove it, or choose another" \
        "with VENV=..." >&2
    exit 1
fi

if [ ! -f "$stamp" ] || ! same_python; then
    python=$(scripts/find_python.sh 3.11 3.12 3.13 3.14)
    echo "== $venv: Python $(version "$python"), from $python (some minutes, once)"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$marker"
    "$python" -m venv "$venv"
else
    echo "== $venv: pyproject.toml or constraints.txt changed"
fi
rm -f "$stamp"

extras=checkpoint,dev
if [ "$(version "$venv/bin/python")" = 3.11 ]; then extras=crosscheck,$extras; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
install() { "$venv/bin/python" -m pip install --quiet --constraint constraints.txt "$@"; }
install hatchling editables
install --no-build-isolation --editable ".[$extras]"
printf '%s\n' "$checksum" "$extras" >"$stamp"
