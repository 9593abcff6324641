"""Every kernel compiled to an sm_90 cubin, without a GPU, within its budget of registers and instructions."""

import importlib.util
import json
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
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("compile") / "report.json"
    process = run_python("tools/bench_kernels.py", "--compile-only", "--json", str(out))
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(out.read_text())


def test_every_kernel_is_within_its_budget(report):
    over = {row["name"]: row["violations"] for row in report["kernels"] if row["violations"]}
    assert not over


def test_every_kernel_of_the_package_is_compiled(report):
    sources = "".join(path.read_text() for path in (ROOT / "kernels" / "ragen_kernels").glob("triton_*.py"))
    launched = {line.split("[(")[0].split()[-1] for line in sources.splitlines() if "_kernel[(" in line}
    assert launched == {row["kernel"] for row in report["kernels"]}


def test_a_spilling_kernel_exceeds_its_budget():
    program = """
from ragen_kernels.kernel_budgets import row_configs
config = next(c for c in row_configs() if c.name == "policy_row bf16, everything")
print(config.budget.violations(config.report(max_registers=32)))
"""
    process = run_python("-c", program)
    assert "spill instructions" in process.stdout, process.stderr
