#!/usr/bin/env bash
""":" # For Bash these lines are a program that becomes torchrun on this file; for Python they are a string.
. "$(dirname "$0")/../tools/setup_env.sh" && setup_env
ranks="${NPROC_PER_NODE:-$(default_ranks)}"
"$PYTHON" -m ragen_mega.run.check "$ranks" "$@" || { code=$?; exit $((code == 100 ? 0 : code)); } # 100: nothing is left to do
exec "$PYTHON" "$REPOSITORY/tools/launch.py" --nproc-per-node "$ranks" "$0" "$@"
":"""

# Train an agent by StarPO:     bash examples/pretrain_starpo.sh [--recipe NAME] [flags]     (NPROC_PER_NODE ranks;
#                               default: one per GPU; without GPUs two, if there are two cores)
#                            or torchrun [--nproc-per-node N] examples/pretrain_starpo.sh [--recipe NAME] [flags]
# A recipe is a file of flags in ragen_mega/config/recipes; flags of the command line win. Without one: frozen_lake.

if __name__ == "__main__":  # checkpoint writers start processes that import this file
    import os
    import signal
    import sys

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error while modules are imported

    from ragen_mega.config.cli import DEFAULT_RECIPE
    from ragen_mega.run.check import check_flags

    check_flags(
        sys.argv[1:],
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )

    from ragen_mega.train import main

    main(sys.argv[1:], recipe=DEFAULT_RECIPE)
