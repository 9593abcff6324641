"""What README and docs say can be followed: links lead somewhere, files are there, commands run
with the flags they show, and --help explains every flag. Imports no torch.
"""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ragen_mega.commands.program import COMMANDS
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import DEFAULT_RECIPE
from ragen_mega.config.sections.section import flag_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "kernels").rglob("*.md")),
]
TOOLS = [
    path
    for folder in ("tools", "tools/benchmarks", "ragen_mega/commands")
    for path in sorted((ROOT / folder).glob("*.py"))
]
ABOUT_OTHERS = {"comparison.md"}
"""Pages that name the files of other projects."""
FOREIGN_FLAGS = {
    "--help": "of every command",
    "--no-build-isolation": "of pip",
    "--nproc-per-node": "of torchrun",
    "--numa-binding": "of torchrun",
    "--nnodes": "of torchrun",
    "--node-rank": "of torchrun",
    "--master-addr": "of torchrun",
    "--master-port": "of torchrun",
    "--local-addr": "of torchrun",
    "--log-dir": "of torchrun",
    "--rdzv-backend": "of torchrun",
    "--rdzv-endpoint": "of torchrun",
    "--signal": "of sbatch",
    "--requeue": "of sbatch",
    "--nodes": "of sbatch",
    "--sleep-on-idle": "of SGLang",
    "--mem-fraction-static": "of SGLang",
    "--cuda-graph-max-bs-decode": "of SGLang",
    "--sampling-defaults": "of SGLang",
    "--generation-config": "of vLLM",
    "--max-lora-rank": "of SGLang and vLLM",
    "--api-key": "of SGLang and vLLM",
    "--tool-call-parser": "of SGLang and vLLM",
    "--enable-auto-tool-choice": "of vLLM",
    "--repo-type": "of hf",
    "--local-dir": "of hf",
    "--chat-template": "of SGLang and vLLM",
    "--dist": "of pytest-xdist",
    "--no-python": "of torchrun",
    "--init": "of docker",
    "--shm-size": "of docker",
    "--gpus": "of docker",
    "--ipc": "of docker",
    "--time": "of docker and sbatch",
    "--build-arg": "of docker",
}
TRAINING = "examples/pretrain_starpo.sh"
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
COMMAND = re.compile(r"\s*([\w./-]*/)?(bash|python|torchrun|ragen-mega)\s")
PROGRAM = {name: module for of in COMMANDS.values() for name, (module, _) in of.items()}
TRAINING_FLAGS = {
    flag
    for section in fields(StarPOConfig)
    for item in fields(section.default_factory)
    for flag in (flag_of(item.name), flag_of(item.name).replace("--", "--no-", 1))
} | {"--recipe", "--agent", "--tasks", "--score", "--mcp", "--help"}


@dataclass(frozen=True)
class Command:
    """A command of the documentation: where it stands, its script, what follows the script."""

    place: str
    script: str
    words: tuple[str, ...]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path, kind: str) -> Iterator[Token]:
    """Links, images, or pieces of code inside the text."""
    for token in tokens(page):
        yield from (child for child in token.children or () if child.type == kind)


def anchors(page: Path) -> set[str]:
    """The names by which GitHub makes the headings of a page reachable."""
    headings = [
        after.content
        for token, after in zip(tokens(page), tokens(page)[1:], strict=False)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    targets = [str(link.attrs["href"]) for link in inline(page, "link_open")]
    targets += [str(picture.attrs["src"]) for picture in inline(page, "image")]
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT) and file.exists(), f"{name_of(page)}: no file {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)}: no heading {target}"


def test_every_page_is_in_the_index() -> None:
    listed = {
        (ROOT / "docs" / str(link.attrs["href"])).resolve()
        for link in inline(ROOT / "docs" / "README.md", "link_open")
    }
    pages = {page for page in PAGES if page.parent == ROOT / "docs"} - {ROOT / "docs/README.md"}
    assert not pages - listed, f"docs/README.md does not name {pages - listed}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ABOUT_OTHERS], ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """A path may begin at any folder: `data/types.py` is ragen_mega/data/types.py. What a command
    writes, and what begins with my_, is the reader's.
    """
    for code in inline(page, "code_inline"):
        if COMMAND.match(code.content):
            continue
        for path in re.findall(r"[\w./-]+\.(?:py|sh|md|flags|svg)\b", code.content):
            known = any(name.endswith(f"/{path}") for name in repository_files())
            assert known or (page.parent / path).exists(), f"{name_of(page)} names {path}"


@cache
def repository_files() -> list[str]:
    folders = ("ragen_mega", "kernels", "tools", "tests", "docs", "examples")
    return [f"/{name_of(path)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]


def commands() -> Iterator[Command]:
    """All that README, docs and the manuals of commands show, in blocks and inside the text."""
    for page in PAGES:
        blocks = [t.content for t in tokens(page) if t.type in ("fence", "code_block")]
        spans = [code.content for code in inline(page, "code_inline")]
        for text in (*blocks, *spans):
            yield from commands_in(text, name_of(page))
    for path in (*TOOLS, *(ROOT / "kernels/benchmarks").glob("*.py")):
        yield from commands_in(ast.get_docstring(ast.parse(path.read_text())) or "", name_of(path))


def commands_in(text: str, place: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        if not COMMAND.match(line):
            continue
        words = shlex.split(line, comments=True)
        if "ragen-mega" in words:
            _, name, *flags = [*words[words.index("ragen-mega") :], ""]
            if name.islower():  # else it stands for any command
                yield Command(place, f"ragen-mega {name}", tuple(flags[:-1]))
            continue
        scripts = [i for i, word in enumerate(words) if re.match(r"(?:\w+/)+\w+\.(?:py|sh)$", word)]
        if scripts and "..." not in words:
            yield Command(place, words[scripts[0]], tuple(words[scripts[0] + 1 :]))


@cache
def flags_of(script: str) -> set[str]:
    """The flags that a script of this repository knows, or a command of the program, read from
    its source: what it declares or takes from another one.
    """
    if script in (TRAINING, "ragen-mega train"):
        return TRAINING_FLAGS
    if script == "ragen-mega launch":
        return {*FOREIGN_FLAGS, *TRAINING_FLAGS}
    if script.startswith("ragen-mega --"):
        return {"--help", "--version"}
    name = script.partition(" ")[2]
    home = f"{PROGRAM[name]}.py" if name else Path(script).name
    moved = ROOT / "ragen_mega" / "commands" / home
    source = (moved if moved.exists() else ROOT / script).read_text()
    if script.endswith(".sh"):
        return {"--help", *re.findall(r"(--[a-z-]+)\)", source)}
    tree = ast.parse(source)
    found = {"--help", *constants(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (path := imported(node.module)).exists():
            theirs = ast.parse(path.read_text())
            for alias in node.names:
                for statement in theirs.body:
                    if isinstance(statement, ast.Assign | ast.AnnAssign) and alias.name in {
                        name.id for name in ast.walk(statement) if isinstance(name, ast.Name)
                    }:
                        found |= constants(statement)
        if isinstance(node, ast.keyword) and node.arg == "takes_others":
            found |= TRAINING_FLAGS
    return found


def imported(module: str | None) -> Path:
    """Where the source of a command or tool would be."""
    path = f"{(module or '').replace('.', '/')}.py"
    here = path.startswith("ragen_mega/commands/")
    return ROOT / (path if here else f"tools/benchmarks/{path}")


def constants(node: ast.AST) -> set[str]:
    """The strings in a syntax tree that are flags; if some are put together (f"--{name}"), also
    what its names would give.
    """
    values = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    words = {value for value in values if isinstance(value, str)}
    if "--" in words:
        words |= {f"--{word.replace('_', '-')}" for word in words if word.isidentifier()}
    return {word for word in words if FLAG.fullmatch(word)}


def test_commands_name_files_and_flags_that_exist() -> None:
    seen = list(commands())
    assert len(seen) > 50
    for command in seen:
        is_ours = command.script.startswith("ragen-mega") or (ROOT / command.script).is_file()
        assert is_ours or command.script.startswith("my_"), command
        used = {word.split("=")[0] for word in command.words if word.startswith("--")} - {"--"}
        if "--" not in command.words:
            assert used <= flags_of(command.script), (command, used - flags_of(command.script))


@pytest.mark.parametrize(
    "command",
    [command for command in commands() if command.script in (TRAINING, "ragen-mega train")],
    ids=lambda command: f"{command.place}: {shlex.join(command.words)}",
)
def test_training_commands_are_accepted(command: Command) -> None:
    """By the parser that trains; one's own parts and data, which are not here, are left out."""
    own = re.compile(r"\bmy?_?\w+:\w+|webshop-data|runs/NAME|my_\w+\.|my\.flags")
    words = [word for word in command.words if word.isascii()]
    if not any(own.search(word) for word in words) and "--help" not in words:
        try:
            parse(words, recipe=DEFAULT_RECIPE)
        except ValueError as error:
            if "which is not installed" not in str(error):
                raise
            pytest.skip(str(error))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_that_are_named_exist(page: Path) -> None:
    scripts = [TRAINING, *map(name_of, (*TOOLS, *(ROOT / "tools").glob("*.sh")))]
    known = set().union(FOREIGN_FLAGS, *map(flags_of, scripts))
    for code in inline(page, "code_inline"):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", code.content):
            assert flag in known, f"{name_of(page)} names {flag}, which no command knows"


def test_the_table_of_recipes_repeats_their_plans() -> None:
    rows = []
    for path in (ROOT / "ragen_mega/config/recipes").glob("qwen*.flags"):
        text = path.read_text()
        plan = re.search(r"# Plan: (\d+) GPUs of 80 GiB, (.*), rollout TP (\d+);", text)
        memory = re.search(r"# Memory: (.*) GiB of 80; host (.*) GiB a GPU", text)
        assert plan and memory
        peak = max(map(float, re.findall(r"\d+\.\d", memory[1])))
        products = "FP8" if "--fp8 hybrid" in text else "bfloat16"
        cells = (f"`{path.stem}`", *plan.groups(), products, peak, memory[2])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    shown = re.findall(r"^\| `qwen.*$", (ROOT / "docs/gpu.md").read_text(), re.M)
    assert sorted(shown) == sorted(rows) and len(rows) > 20


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)
    explained = {
        entry.split()[0].rstrip(",")
        for entry in entries
        if len(re.sub(r"[(\[]default.*", "", entry.partition("\n")[2], flags=re.DOTALL).split()) > 2
    }
    missing = {f for f in TRAINING_FLAGS if not f.startswith("--no-")} - explained
    assert missing <= {"--recipe", "--help", "--score", "--mcp"}, (
        f"--help does not explain {missing}"
    )


@pytest.mark.parametrize("path", TOOLS, ids=name_of)
def test_tools_explain_every_flag(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "flag":
            about = node.args[1]
            assert not isinstance(about, ast.Constant) or about.value.strip(), ast.unparse(node)


def test_the_first_run_quotes_its_recording() -> None:
    """Every line that the page shows of a run is in the last screen of the picture."""
    picture = ElementTree.parse(ROOT / "docs/pictures/bandit.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    screen = {
        "".join(span.text or "" for span in row.iter(f"{svg}tspan")).strip()
        for row in picture.iter(f"{svg}text")
        if row.get("visibility") != "hidden"
    }
    quoted = [
        line.strip()
        for token in tokens(ROOT / "docs/first_run.md")
        if token.type == "fence" and token.info == "text" and "<|im_start|>" not in token.content
        for line in token.content.splitlines()
    ]
    assert len(quoted) > 5
    assert not [line for line in quoted if line not in screen]


def test_these_checks_import_no_torch() -> None:
    code = "import sys, tests.test_documentation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
