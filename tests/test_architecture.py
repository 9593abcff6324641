"""The rules of the code base that a reader relies on, checked on its syntax trees: imports, sizes,
documentation.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    ("ragen_mega.system",),
    ("ragen_kernels", "ragen_mega.ranks", "ragen_mega.compiled", "ragen_mega.extensions"),
    ("ragen_mega.data",),
    (
        "ragen_mega.algorithm",
        "ragen_mega.environments",
        "ragen_mega.models",
        "ragen_mega.config",
        "ragen_mega.planning.memory",  # by which a run that would not fit is refused
    ),
    ("ragen_mega.agents", "ragen_mega.rollout", "ragen_mega.storage", "ragen_mega.report"),
    ("ragen_mega.megatron", "ragen_mega.engines", "ragen_mega.warm_start"),
    ("ragen_mega.run",),
    ("ragen_mega.train", "ragen_mega.planning", "ragen_mega.studies"),
    ("ragen_mega.commands",),
)
"""Lowest first. A module imports from its own layer and from lower ones, never from a higher one.
"""

QUARANTINE = {
    "megatron": ("ragen_mega.megatron",),
    "transformer_engine": ("ragen_mega.megatron",),
    "sglang": ("ragen_mega.engines.sglang",),
    "triton": ("ragen_kernels",),
    "numba": ("ragen_mega.compiled", "ragen_mega.engines.embedded"),
}
"""Library -> the only packages that may import it."""

MAX_FUNCTION_LINES = 80
MAX_LINE_LENGTH = 100
LONGER: dict[str, str] = {}
"""`path` or `path::function` -> why it may be longer than the limit."""

BROAD_EXCEPT = {
    "ragen_mega/environments/pool.py::guarded": (
        "an environment is anyone's code, and one broken trajectory must not end the rollout"
    ),
    "ragen_mega/extensions/registry.py::Registry._import": (
        "a module of the user may raise anything; the error says which name and what"
    ),
    "ragen_mega/algorithm/tables.py::call": (
        "a function of the user may raise anything; the error says which function and what"
    ),
    "ragen_mega/run/link.py::Link._send_queued": (
        "what ends the thread that sends would be raised nowhere, and both parts would wait"
    ),
    "ragen_mega/extensions/extras.py::lack": (
        "an optional package that is broken may raise anything while it is imported"
    ),
    "ragen_mega/agents/server.py::_answered.answer": (
        "an agent gets an error in the form of its interface, and the log names it"
    ),
    "ragen_mega/rollout/renderer.py::ChatRenderer._rendered": (
        "a chat template is a program, which may raise anything; the error says what"
    ),
    "ragen_mega/models/huggingface.py::load_tokenizer": (
        "tokenizers reports a file that it cannot read, of a newer version too, as a bare Exception"
    ),
    "ragen_mega/storage/gguf_files.py::_tokenizer": (
        "tokenizers reports merges and tokens that contradict each other as a bare Exception"
    ),
    "ragen_mega/storage/model_writers.py::_write": (
        "tokenizers reports a full disk as a bare Exception; any other is raised again"
    ),
    "ragen_mega/storage/checkpoints.py::CheckpointWriter._write": (
        "whatever ends the thread that writes, there is no checkpoint, and the run has to know"
    ),
    "ragen_mega/engines/sglang/weight_loader.py::load": (
        "an exception would end the server; the report says what it was"
    ),
}
"""`path::function` -> why it may catch every exception."""

MIN_DOCUMENTED = 0.95
MAX_ROOT_ENTRIES = 22


@cache
def sources() -> dict[str, Path]:
    """Dotted module name -> file, of everything that is ours and no test."""
    paths = {}
    for base, folder in (
        (ROOT, "ragen_mega"),
        (ROOT / "kernels", "ragen_kernels"),
        (ROOT, "tools"),
    ):
        for path in sorted((base / folder).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def python_files() -> list[Path]:
    """Every Python file of the repository, tests included."""
    others = [
        path
        for folder in ("tests", "kernels/benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [*sources().values(), ROOT / "setup.py", *others]


def imports(name: str) -> Iterator[tuple[str, int]]:
    """(imported module, line) of a module of ours, at any depth; `from package import x` names the
    submodule x.
    """
    path = sources()[name]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join(
                    [*package[: len(package) - node.level + 1], *([base] if base else [])]
                )
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield (submodule if submodule in sources() else base), node.lineno


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer(name: str) -> int:
    """Position in LAYERS; tools stand above all."""
    if within(name, "tools"):
        return len(LAYERS)
    for position, packages in enumerate(LAYERS):
        if any(within(name, package) for package in packages):
            return position
    pytest.fail(f"{name} has no layer; add it to LAYERS")


def is_ours(name: str) -> bool:
    return any(within(name, top) for top in ("ragen_mega", "ragen_kernels", "tools"))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def report(offenders: list[str]) -> None:
    assert not offenders, "\n" + "\n".join(sorted(offenders))


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function, nested ones too."""

    def visit(
        node: ast.AST, prefix: str
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield prefix + child.name, child
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    return visit(tree(path), "")


def decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


@cache
def protocol_methods() -> set[str]:
    """Names of the methods that our protocols declare with a docstring."""
    protocols = (
        node
        for path in sources().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    return {
        member.name
        for node in protocols
        if is_protocol(node)
        for member in node.body
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(member)
    }


def public_definitions(path: Path) -> Iterator[tuple[str, ast.AST, bool]]:
    """(qualified name, node, whether it needs a docstring) of public classes, functions and
    methods.

    None is needed by a property, by a method that a base class or a protocol of ours documents, and
    by the `main` of a tool, whose module docstring is its manual.
    """

    def visit(
        node: ast.AST, prefix: str, in_class: ast.ClassDef | None
    ) -> Iterator[tuple[str, ast.AST, bool]]:
        for child in ast.iter_child_nodes(node):
            is_definition = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if not is_definition or child.name.startswith("_"):
                continue
            is_obvious = "property" in decorators(child) or (
                child.name == "main" and in_class is None
            )
            if in_class is not None and not isinstance(child, ast.ClassDef):
                inherited = [
                    base
                    for base in map(ast.unparse, in_class.bases)
                    if not base.startswith("Protocol")
                ]
                is_obvious |= bool(inherited) or (
                    not is_protocol(in_class) and child.name in protocol_methods()
                )
            yield prefix + child.name, child, not is_obvious
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.", child)

    return visit(tree(path), "", None)


def test_imports_point_down():
    report(
        [
            f"{place(sources()[name], line)} {name} imports {imported}"
            for name in sources()
            if name != "ragen_mega"
            for imported, line in imports(name)
            if is_ours(imported) and imported != "ragen_mega" and layer(imported) > layer(name)
        ]
    )


def test_kernels_import_nothing_of_ours():
    report(
        [
            f"{place(sources()[name], line)} imports {imported}"
            for name in sources()
            if within(name, "ragen_kernels")
            for imported, line in imports(name)
            if is_ours(imported) and not within(imported, "ragen_kernels")
        ]
    )


def test_no_import_cycles():
    edges = {
        name: {imported for imported, _ in imports(name) if imported in sources()} - {name}
        for name in sources()
    }
    cycles, done = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            cycles.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for imported in sorted(edges[name]):
                visit(imported, [*trail, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    report(cycles)


def test_libraries_stay_in_their_place():
    report(
        [
            f"{place(sources()[name], line)} imports {imported}; only {', '.join(homes)} may"
            for name in sources()
            for imported, line in imports(name)
            for library, homes in QUARANTINE.items()
            if within(imported, library) and not any(within(name, home) for home in homes)
        ]
    )


def test_worlds_are_plain_python():
    report(
        [
            f"{place(sources()[name], line)} imports {imported}"
            for name in sources()
            if within(name, "ragen_mega.environments")
            for imported, line in imports(name)
            if any(within(imported, library) for library in ("torch", "transformers"))
            or imported == "ragen_mega.data.types"
        ]
    )


WITH_MORE = {
    "ragen_mega.environments.adapters.verifiers",
    "ragen_mega.environments.adapters.web_guard",
    "ragen_mega.commands.convert_checkpoint",
    "ragen_mega.commands.replayed_step",
}
"""Modules that need an extra, and the work of commands whose flags another module reads."""


@pytest.mark.parametrize("room", ["ragen_mega.environments", "ragen_mega.commands"])
def test_worlds_and_commands_load_without_torch(room: str) -> None:
    """torch takes seconds, in which a command could not say that a flag of it is wrong."""
    light = [name for name in sources() if within(name, room) and name not in WITH_MORE]
    script = (
        f"import sys, {', '.join(light)}; sys.exit('torch' in sys.modules and 'torch was imported')"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def test_the_mathematics_needs_no_configuration_and_no_ranks():
    report(
        [
            f"{place(sources()[name], line)} imports {imported}"
            for name in sources()
            if within(name, "ragen_mega.algorithm")
            for imported, line in imports(name)
            if imported in ("ragen_mega.config", "ragen_mega.ranks.collectives")
            or within(imported, "torch.distributed")
        ]
    )


def test_a_folder_called_kernels_is_no_package():
    assert not (ROOT / "kernels/__init__.py").exists(), (
        "it would shadow the distribution that transformers needs"
    )


def test_names_of_files():
    vague = re.compile(r"^(utils?|misc|helpers?|common|stuff)$")
    report([str(path.relative_to(ROOT)) for path in python_files() if vague.match(path.stem)])


def test_no_broad_except():
    broad = {}
    for path in python_files():
        owners = dict(functions(path))
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)):
                around = [
                    name
                    for name, owner in owners.items()
                    if owner.lineno <= node.lineno <= owner.end_lineno
                ]
                broad[f"{path.relative_to(ROOT)}::{around[-1] if around else node.lineno}"] = place(
                    path, node.lineno
                )
    report(
        [
            f"{where} ({line}) catches everything"
            for where, line in broad.items()
            if where not in BROAD_EXCEPT
        ]
    )
    report(
        [
            f"{where} does not catch everything; drop it from BROAD_EXCEPT"
            for where in BROAD_EXCEPT
            if where not in broad
        ]
    )


def test_no_unfinished_code():
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    report(
        [
            f"{place(path, number)} {line.strip()}"
            for path in sources().values()
            for number, line in enumerate(path.read_text().splitlines(), start=1)
            if marker.search(line)
        ]
    )


def test_lengths():
    too_long = {}
    for path in python_files():
        relative = str(path.relative_to(ROOT))
        lines = path.read_text().splitlines()
        for name, node in functions(path):
            if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                too_long[f"{relative}::{name}"] = (
                    f"has {length} lines, at most {MAX_FUNCTION_LINES}"
                )
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_LENGTH:
                too_long[f"{relative}:{number}"] = (
                    f"has {len(line)} columns, at most {MAX_LINE_LENGTH}"
                )
    report([f"{where} {what}" for where, what in too_long.items() if where not in LONGER])
    report(
        [
            f"{where} is not too long any more; drop it from LONGER"
            for where in LONGER
            if where not in too_long
        ]
    )


def test_source_is_ascii():
    report(
        [
            f"{place(path, number)} {line.strip()}"
            for path in python_files()
            for number, line in enumerate(path.read_text().splitlines(), start=1)
            if not line.isascii()
        ]
    )


def test_every_module_says_what_it_is():
    report(
        [
            str(path.relative_to(ROOT))
            for path in python_files()
            if path.read_text().strip() and not ast.get_docstring(tree(path))
        ]
    )


def test_every_folder_and_module_begins_with_a_sentence():
    """What it is for, in words that a reader takes in at once; folders say it in `__init__.py`."""
    sentence = re.compile(r".{10,250}?[.:](\s|$)", re.DOTALL)
    folders = {path.parent for path in sources().values() if within_package(path)}
    missing = [folder for folder in folders if not (folder / "__init__.py").exists()]
    report([f"{folder.relative_to(ROOT)} has no __init__.py" for folder in missing])
    report(
        [
            str(path.relative_to(ROOT))
            for path in sources().values()
            if not sentence.match(ast.get_docstring(tree(path)) or "")
        ]
    )


def within_package(path: Path) -> bool:
    return path.is_relative_to(ROOT / "ragen_mega")


def test_the_root_of_the_package_fits_a_glance():
    entries = {
        path.relative_to(ROOT / "ragen_mega").parts[0]
        for path in sources().values()
        if within_package(path)
    }
    assert len(entries) <= MAX_ROOT_ENTRIES, sorted(entries)


def test_public_names_are_annotated():
    missing = []
    for path in sources().values():
        for name, node, _ in public_definitions(path):
            compilers = {"triton.jit", "intrinsic"}  # which type the arguments themselves
            if isinstance(node, ast.ClassDef) or compilers & decorators(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [
                arg.arg
                for arg in arguments
                if arg.annotation is None and arg.arg not in ("self", "cls")
            ]
            if bare or node.returns is None:
                missing.append(
                    f"{place(path, node.lineno)} {name}: {', '.join(bare) or 'return type'}"
                )
    report(missing)


def test_public_names_are_documented():
    total, missing = 0, []
    for path in sources().values():
        for name, node, needs_docstring in public_definitions(path):
            if needs_docstring:
                total += 1
                if not ast.get_docstring(node):
                    missing.append(f"{place(path, node.lineno)} {name}")
    documented = 1 - len(missing) / total
    assert documented >= MIN_DOCUMENTED, f"{documented:.1%} documented\n" + "\n".join(missing)


def test_the_checks_see_this_repository():
    assert {"ragen_mega.train", "ragen_mega.data.types", "ragen_kernels"} <= set(sources())
    assert {"ragen_mega.run.build", "ragen_mega.config"} <= {
        name for name, _ in imports("ragen_mega.train")
    }
    assert ("TokenBatch", True) in [
        (name, need) for name, _, need in public_definitions(ROOT / "ragen_mega/data/types.py")
    ]
