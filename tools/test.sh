#!/usr/bin/env bash
# Set up as the examples do, with what the tests need, and run the tests: bash tools/test.sh [pytest arguments]
# Tests that take minutes or need a GPU are left out; add -m slow or -m gpu for them. A worker per core and one more: -n 0 for none.
# Without arguments tools/style.sh runs as well, and the command fails if that does.
set -e
unset PYTHONDONTWRITEBYTECODE # or every process would compile what it imports
. "$(dirname "$0")/setup_env.sh"
setup_env test
cd "$REPOSITORY"
style=
if [ $# = 0 ]; then # beside the compilers below; its findings come before the tests
    bash tools/style.sh &
    style=$!
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the layouts under test start several ranks
"$PYTHON" tests/fake_cuda/build.py & # once for each version of torch; says why where it cannot
builder=$!
compiled=ragen_mega/__pycache__/compiled # once for each clone; numba's cache is in the user's home
if [ ! -e "$compiled" ]; then
    "$PYTHON" -m tests.support.compile
    mkdir -p "${compiled%/*}" && touch "$compiled"
fi
wait "$builder"
# Each worker takes the next file, in the order of tests/conftest.py.
tests=("$PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@")
if [ -n "$style" ] && ! wait "$style"; then
    "${tests[@]}" || true
    echo "style: tools/style.sh has failed; what it found is above the tests" >&2
    exit 1
fi
exec "${tests[@]}"
