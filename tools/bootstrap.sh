#!/bin/sh
# Finds a Python that the course can use and hands over to tools/bootstrap.py with the arguments given.
#   PYTHON=...   this interpreter and no other        VENV=...   where the environment lives (default .venv)
# Plain sh: it has to work, and to say what is missing, on a machine with no Python at all.

oldest=10 # Python 3.10: what the package requires
newest=14 # Python 3.14: the newest that torch 2.13.0 has wheels for

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1

stop() {
    printf 'stopped: %s\n' "$1" >&2
    exit 1
}

# "3.11" for a working Python 3, nothing for anything else.
version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

suitable() {
    case $1 in 3.*) ;; *) return 1 ;; esac
    [ "${1#3.}" -ge "$oldest" ] 2>/dev/null && [ "${1#3.}" -le "$newest" ]
}

[ "$(uname -s)" = Linux ] ||
    stop "the course runs on Linux, as Triton has no wheels for other systems: use WSL 2 or a container."

if [ -n "$PYTHON" ]; then
    found=$(version "$PYTHON")
    [ -n "$found" ] || stop "PYTHON=$PYTHON is not a Python 3 that runs: give the path of one, for example PYTHON=python3.12."
    suitable "$found" ||
        stop "PYTHON=$PYTHON is Python $found, and the course needs 3.$oldest to 3.$newest: name another one."
    exec "$PYTHON" "$here/bootstrap.py" "$@"
fi

# An environment made earlier with PYTHON=/somewhere/else stays usable without naming it again.
made=${VENV:-.venv}
case $made in /*) ;; *) made=$(dirname -- "$here")/$made ;; esac

seen=
for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python "$made/bin/python"; do
    found=$(version "$candidate")
    if suitable "$found"; then
        exec "$candidate" "$here/bootstrap.py" "$@"
    fi
    [ -n "$found" ] && [ -z "$seen" ] && seen=$found
done

how="apt install python3 python3-venv, dnf install python3.12, pacman -S python, or conda with environment.yml"
[ -z "$seen" ] || stop "this machine has Python $seen, and the course needs 3.$oldest to 3.$newest: install one ($how) or name one with PYTHON=/path/to/python3."
stop "there is no python3 on this machine: install Python 3.$oldest or newer ($how)."
