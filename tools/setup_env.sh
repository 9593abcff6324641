# To be sourced by Bash. `setup_env [EXTRA]` leaves in PYTHON an interpreter that has this repository and everything it
# needs (and the extra of setup.py): the active one if it is complete, else that of .venv, which is made if necessary.

SAID=9 # exit code of what has said in one line why it failed
REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

setup_env() {
    local extra="${1:-}" venv="$REPOSITORY/.venv" missing
    local -x PYTHONSAFEPATH=1 # no file of the working directory may stand in for a module
    if PYTHON="$(command -v python)" && missing="$(_missing_from "$PYTHON" "$extra")"; then
        return
    fi
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ "${VIRTUAL_ENV:-}" != "$venv" ]; then
        echo "setup: the active environment lacks ${missing:-python}; using $venv" >&2
    fi
    PYTHON="$venv/bin/python"
    if ! _is_complete "$venv" "$extra"; then
        # A separate process: Bash ignores `set -e` in whatever stands before a `||`.
        bash -ec '. "$1"; _install "$2" "$3"' setup "${BASH_SOURCE[0]}" "$venv" "$extra" || {
            [ $? = "$SAID" ] ||
                echo "error: setup failed; the message above says why. Run the command again to continue" >&2
            exit 1
        }
    fi
}

# Print the first requirement that interpreter $1 does not meet, and fail; print nothing if there is none.
_missing_from() {
    "$1" - "$REPOSITORY" "$2" 2>/dev/null <<'PYTHON' || { [ $? = 3 ] || echo "ragen-mega"; return 1; }
import sys

sys.path = [entry for entry in sys.path if entry]  # before 3.11 the working directory is in it all the same
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

repository, extra = Path(sys.argv[1]).resolve(), sys.argv[2]
found = Path(find_spec("ragen_mega").origin).resolve().parents[1]
if found != repository:
    print(f"this clone (its ragen-mega is that of {found})")
    sys.exit(3)
from packaging.requirements import Requirement

for requirement in map(Requirement, requires("ragen-mega")):
    if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
        try:
            met = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            print(requirement.name + str(requirement.specifier))
            sys.exit(3)
PYTHON
}

# What an installation depends on: the place of the repository (it is installed in place), requirements and pins.
_fingerprint() {
    { echo "$REPOSITORY"; cat "$REPOSITORY/setup.py" "$REPOSITORY/pyproject.toml" "$REPOSITORY/constraints.txt"; } | cksum
}

_is_complete() {
    [ -x "$1/bin/python" ] && [ "$(cat "$1/.installed${2:+-$2}" 2>/dev/null)" = "$(_fingerprint)" ]
}

# Two commands in a fresh clone must not install at the same time: the lock ends with this process. Needs `set -e`: the file
# that marks the installation as complete is written after everything has succeeded, the check of what is there included.
_install() {
    local venv="$1" extra="$2" python="$1/bin/python" base="" torch missing name
    mkdir -p "$venv"
    exec 9>"$venv/.lock"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        echo "setup: another command installs into $venv; waiting for it" >&2
        flock 9
    fi
    if _is_complete "$venv" "$extra"; then return; fi

    if ! "$python" -m pip --version >/dev/null 2>&1; then base="$(_base_python)"; fi
    torch="$(grep '^torch==' "$REPOSITORY/constraints.txt")"
    echo "setup: installing $torch and the versions of constraints.txt into $venv (once, some minutes)" >&2
    if [ -n "$base" ]; then "$base" -m venv "$venv"; fi
    if [ -t 2 ]; then # pip says nothing meanwhile
        # not beyond this process, and without its lock
        (while kill -0 $$ 2>/dev/null; do
            printf '\rsetup: %s MB installed' "$(du -sm "$venv" | cut -f1)" >&2
            sleep 3
        done) 9>&- &
        trap "kill $! 2>/dev/null; echo >&2" EXIT
    fi
    _install_torch "$python" "$torch"
    _pip_install "$python" \
        --editable "$REPOSITORY${extra:+[$extra]}" --constraint "$REPOSITORY/constraints.txt"
    missing="$(_missing_from "$python" "$extra")" || {
        echo "error: $venv still lacks $missing though pip has succeeded; delete $venv and run the command again" >&2
        return "$SAID"
    }
    for name in "" ${extra:+"-$extra"}; do _fingerprint >"$venv/.installed$name"; done
}

# Most of pip's time goes to compiling every module. Python compiles those that it imports, unless it must not write them.
_pip_install() {
    local python="$1" when=(--no-compile)
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then when=(--compile); fi
    "$python" -m pip install --quiet --disable-pip-version-check "${when[@]}" "${@:2}"
}

# Without a GPU torch is the CPU's build, 0.2 GB and not several, unless pip is set up for another index.
_install_torch() {
    local cpu=https://download.pytorch.org/whl/cpu install=(_pip_install "$@")
    if [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null &&
        ! "$1" -m pip config list 2>/dev/null | grep -qE '^[^=]*(index|find-links)='; then
        "${install[@]}" --index-url "$cpu" && return
    fi
    "${install[@]}"
}

_base_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys; sys.path = sys.path[1:]; import venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11, 3.12 or 3.13 with its venv module is needed, and PATH offers" \
        "$(python3 --version 2>/dev/null || echo none); install python3.11 and python3.11-venv" >&2
    return "$SAID"
}
