"""Every kernel compiled to an sm_90 cubin, without a GPU, within its budget of registers and
instructions.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="compiling needs triton, which CPU-only torch does not bring along",
)

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str) -> subprocess.CompletedProcess:
    """Another process: in this one, kernels may be functions to interpret."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def report() -> dict:
    """What each kernel exceeds, by configuration, the names of the kernels, `code`: Triton's
    intermediate code of the kernels over rows, and `starved`: what a kernel that is left too few
    registers exceeds.
    """
    program = """
import json
from concurrent.futures import ThreadPoolExecutor
from tests.kernels.budgets import all_configs
configs = {config.name: config for config in all_configs()}
compiled = {name: config.compile() for name, config in configs.items()}
with ThreadPoolExecutor() as pool:
    found = pool.map(lambda name: configs[name].analyse(compiled[name]), configs)
starved = configs["policy_row bf16, everything"]
print(json.dumps({
    "violations": {
        name: config.budget.violations(one) for (name, config), one in zip(configs.items(), found)
    },
    "kernels": [config.kernel.fn.__name__ for config in configs.values()],
    "code": {
        name: compiled[name].asm["ttir"]
        for name, config in configs.items() if "stride" in config.kernel.arg_names
    },
    "starved": starved.budget.violations(starved.analyse(starved.compile(max_registers=32))),
}))
"""
    process = run_python("-c", program)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout)


def test_every_kernel_is_within_its_budget(report: dict) -> None:
    assert not {name: over for name, over in report["violations"].items() if over}


def kernels_of_the_package() -> set[str]:
    sources = "".join(
        path.read_text() for path in (ROOT / "kernels" / "ragen_kernels").glob("triton_*.py")
    )
    return {line.split("[(")[0].split()[-1] for line in sources.splitlines() if "_kernel[(" in line}


def test_every_kernel_of_the_package_is_compiled(report):
    assert kernels_of_the_package() == {*report["kernels"]}


def test_a_spilling_kernel_exceeds_its_budget(report: dict) -> None:
    assert any("spill instructions" in text for text in report["starved"])


@pytest.fixture
def intermediate_code(report: dict) -> dict[str, str]:
    return report["code"]


def test_rows_are_addressed_in_64_bits(intermediate_code):
    """Row 14 134 of 151936 columns is element 2^31; the interpreter has no memory for it."""
    products = {
        name: re.findall(r"arith\.muli .*", code) for name, code in intermediate_code.items()
    }
    narrow = {
        name: [x for x in found if re.search(r"stride.* : i32", x)]
        for name, found in products.items()
    }
    assert not {name: found for name, found in narrow.items() if found}
    assert all(any(" : i64" in x for x in found) for found in products.values())


def test_only_a_row_that_is_read_twice_stays_in_the_cache(intermediate_code):
    reads = {name: code.count("evict_last") for name, code in intermediate_code.items()}
    assert all((count == 2) == name.startswith("policy_row") for name, count in reads.items()), (
        reads
    )


def test_a_row_is_overwritten_between_barriers(intermediate_code):
    """The label's logit is read by all threads before any stores, and its gradient is stored after
    the row's.
    """
    writers = [name for name in intermediate_code if name.startswith(("gradient", "policy_row"))]
    counts = {
        name: len(re.findall(r"^\s*\w+\.barrier\b", intermediate_code[name], re.M))
        for name in writers
    }
    assert writers and set(counts.values()) == {2}, counts


def test_no_kernel_is_compiled_per_length():
    """By Triton's own cache key, over lengths and starts of slices of every alignment."""
    process = run_python("-m", "tests.kernels.launch_variants")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == dict.fromkeys(kernels_of_the_package(), 1)
