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
def report(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("compile")
    files = "--json", str(out / "report.json"), "--markdown", str(out / "report.md")
    process = run_python("tools/benchmarks/bench_kernels.py", "--compile-only", *files)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((out / "report.json").read_text()) | {
        "markdown": (out / "report.md").read_text()
    }


def test_every_kernel_is_within_its_budget(report):
    over = {row["name"]: row["violations"] for row in report["kernels"] if row["violations"]}
    assert not over


def test_the_published_table_is_the_present_one(report):
    """Names whatever the versions; every number where triton is the one that the table was written
    with.
    """
    folder = ROOT / "docs" / "benchmarks"
    published = json.loads((folder / "kernels_sm90_static.json").read_text())
    assert [row["name"] for row in published["kernels"]] == [
        row["name"] for row in report["kernels"]
    ]
    if published["versions"]["triton"] == report["versions"]["triton"]:
        assert published["kernels"] == report["kernels"]
        page = (folder / "kernels_sm90_static.md").read_text()
        assert page.partition("| kernel")[2] == report["markdown"].partition("| kernel")[2]


def kernels_of_the_package() -> set[str]:
    sources = "".join(
        path.read_text() for path in (ROOT / "kernels" / "ragen_kernels").glob("triton_*.py")
    )
    return {line.split("[(")[0].split()[-1] for line in sources.splitlines() if "_kernel[(" in line}


def test_every_kernel_of_the_package_is_compiled(report):
    assert kernels_of_the_package() == {row["kernel"] for row in report["kernels"]}


@pytest.fixture(scope="module")
def compiled_again(report) -> dict:
    """`code`: Triton's intermediate code of the kernels over rows by name of the configuration,
    which Triton has cached from `report`; `violations` of a kernel that is left too few registers.
    """
    program = """
import json
from benchmarks.budgets import all_configs
rows = {config.name: config for config in all_configs() if "stride" in config.kernel.arg_names}
starved = rows["policy_row bf16, everything"]
print(json.dumps({
    "code": {name: config.compile().asm["ttir"] for name, config in rows.items()},
    "violations": starved.budget.violations(starved.analyse(starved.compile(max_registers=32))),
}))
"""
    process = run_python("-c", program)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_spilling_kernel_exceeds_its_budget(compiled_again):
    assert any("spill instructions" in text for text in compiled_again["violations"])


@pytest.fixture
def intermediate_code(compiled_again) -> dict[str, str]:
    return compiled_again["code"]


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
