#!/usr/bin/env bash
""":" # For Bash these lines are a program that becomes torchrun on ranks; for Python they are a string.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started by another shell, as by sh
. "$(dirname "$0")/../tools/setup_env.sh" && setup_env
exec "$PYTHON" -P -m ragen_mega.commands.program train "$@"
":"""

# Train an agent by StarPO:     bash examples/pretrain_starpo.sh [--recipe NAME] [flags]     (NPROC_PER_NODE ranks;
#                               default: one per GPU; without GPUs two, if there are two cores)
#                            or torchrun [--nproc-per-node N] examples/pretrain_starpo.sh [--recipe NAME] [flags]
# A recipe is a file of flags in ragen_mega/config/recipes; flags of the command line win. Without one: frozen_lake.

if __name__ == "__main__":  # checkpoint writers start processes that import this file
    import signal
    import sys

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error while modules are imported

    from ragen_mega.commands.train import run_rank

    run_rank(sys.argv[1:])
