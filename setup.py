"""Packaging: `ragen_mega`, and `ragen_kernels` from the folder `kernels/`.

`kernels/` has no `__init__.py` and is never importable itself: a top-level package of that name
would shadow the `kernels` distribution that transformers and SGLang import. `kernels/benchmarks` is
not installed: tools and tests find it in the repository. Tested versions are in constraints.txt,
which `ragen_mega/config` links to, so that an installed `ragen-mega doctor` knows them.
"""

import itertools
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = Path(__file__).parent / "ragen_mega"
OPTIONAL = {
    # search, stems, similar words, files that are read entry by entry
    "webshop": ["bm25s>=0.3,<0.4", "PyStemmer>=3,<4", "rapidfuzz>=3.10,<4", "ijson>=3.3,<4"],
    "gymnasium": ["gymnasium>=1.0,<2"],
    # clients of an agent; the server that they ask
    "agents": [
        "openai>=2.6,<4",
        "anthropic>=2.11,<3",
        "starlette>=0.45,<2",
        "uvicorn>=0.34,<1",
        "httptools>=0.6,<1",  # uvicorn then reads a request in two thirds of the time
    ],
    "mcp": ["mcp>=2,<3"],  # verifiers 0.4 takes mcp 2.0.0 alone
    "studies": ["matplotlib>=3.10", "scipy>=1.14"],  # plots; intervals and fits
}
"""Extras that the tests need as well."""


def read_version() -> str:
    """`__version__` of the package, read without importing it: torch is not there while this file
    runs.
    """
    for line in (PACKAGE / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise ValueError(f'{PACKAGE / "__init__.py"} must contain a line __version__ = "..."')


setup(
    name="ragen-mega",
    version=read_version(),
    description=(
        "StarPO on Megatron-Core: reinforcement learning of language-model agents over whole"
        " trajectories"
    ),
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["ragen_mega", "ragen_mega.*"]), "ragen_kernels"],
    package_dir={"ragen_kernels": "kernels/ragen_kernels"},
    package_data={
        "ragen_mega": ["py.typed"],
        "ragen_mega.environments.worlds": ["*/boards/*.jsonl"],
        "ragen_mega.config": ["recipes/*.flags", "studies/*.toml", "constraints*.txt"],
        "ragen_mega.planning": ["*.json"],
        "ragen_mega.report.viewer": ["viewer.*"],
    },
    entry_points={"console_scripts": ["ragen-mega = ragen_mega.commands.program:main"]},
    install_requires=[
        "torch>=2.11,<3",  # older ones lack products with float32 results of bfloat16 operands
        "megatron-core>=0.16.1,<0.17",
        "transformers>=5.0,<6",
        "tokenizers>=0.22,<0.24",
        "safetensors>=0.5",
        "gguf>=0.17,<1",  # models in llama.cpp's format
        "numpy>=2.0,<2.4",
        "numba>=0.62,<0.69",  # the embedded engine, training on a CPU; brings llvmlite
        "jsonschema>=4.20,<5",  # calls of tools; brings referencing and attrs
        "regex>=2024.4",  # patterns of schemas with a limit of time; transformers brings it as well
        "httpx2>=2,<3",  # requests to rollout servers; huggingface_hub 2 brings it as well
        "psutil>=6",  # megatron-core's checkpoint writer imports it without requiring it
        "rich>=14",
        "tensorboard>=2.18",
        "plotly>=7,<8",  # its JavaScript goes into the viewer's page
    ],
    # ragen_mega/extensions/extras.py knows which extra a missing module belongs to.
    extras_require={
        **OPTIONAL,
        "test": [
            *itertools.chain(*OPTIONAL.values()),
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "mcp-server-time>=2026.10",  # a server of the protocol's authors
            "ruff==0.17.6",  # tools/style.sh; another version may find more
            "mypy==2.4.1",
            "markdown-it-py>=3",  # to follow the links of the documentation
            "peft>=0.18",  # loads the adapters that a run exports
            "playwright>=1.50",  # drives a Chromium that is there already; tests skip without one
            # To interpret and compile the kernels without a GPU. A CUDA build of torch brings its
            # own, so it is not pinned.
            "triton>=3.6,<3.8; platform_system == 'Linux'",
        ],
        # One set for Hopper GPUs, CUDA 13 and Python 3.12; constraints-h100.txt has all that it
        # resolves to and the commands. Transformer Engine is built against torch, so torch comes
        # first. NVIDIA's apex is not on PyPI (its name there is another project) and not needed:
        # Transformer Engine brings the fused optimizer.
        "h100": [
            "torch==2.11.0",
            "triton==3.6.0",
            "megatron-core==0.16.1",  # asks for transformer-engine>=2.9,<2.12
            "transformer-engine[core_cu13,pytorch]==2.11.0",
            "sglang==0.5.17",  # pins torch and transformers
            "transformers==5.12.1",
            "tokenizers==0.22.2",
            "numpy==2.3.5",
        ],
        # Built from source for an hour or more; needed where cuDNN has no fused attention of packed
        # sequences, on GPUs before Hopper. The newest that Transformer Engine 2.11 takes.
        "flash": ["flash-attn==2.8.3"],
        "wandb": ["wandb>=0.19"],
        # Environments of other libraries (docs/adapters.md), one set each.
        "textarena": ["textarena>=0.7.4,<0.8"],
        "reasoning-gym": ["reasoning-gym>=0.1.23,<0.2"],
        "gem": ["gem-llm>=0.1.0,<0.2"],
        "openenv": ["openenv-core>=0.3.0,<0.4"],
        # Agents of other libraries, for the slow tests of the door.
        "agent-frameworks": [
            "openai-agents>=0.24,<0.25",
            "langgraph>=1.2,<2",
            "langchain-openai>=1.7,<2",
            "smolagents>=1.26,<2",
        ],
        "verifiers": ["verifiers>=0.4,<0.5"],  # brings 55 packages, 120 MB
        "parquet": ["pyarrow>=17"],  # tasks from a file
    },
)
