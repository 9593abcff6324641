#!/usr/bin/env bash
# Check the style: ruff's rules and format of all files, mypy's types of the packages and tools. Prints what fails, exits
# with 1 if anything does. The settings are in pyproject.toml.
set -e
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env test
cd "$REPOSITORY"
status=0
"$PYTHON" -m ruff check --quiet || status=1
"$PYTHON" -m ruff format --check --quiet || status=1
"$PYTHON" -m mypy || status=1
if [ "$status" != 0 ]; then
    echo "style: the findings above; ruff check --fix and ruff format mend what they can" >&2
fi
exit "$status"
