"""Pages of the site besides docs/: the READMEs, flags and metrics, made when it is built; and the
files elsewhere in the repository that pages link to.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ragen_mega.config import StarPOConfig
from ragen_mega.config.flags import Flag, all_flags
from ragen_mega.config.sections.section import flag_of
from ragen_mega.report.glossary import GLOSSARY

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ADDED = {"overview.md": ROOT / "README.md", "kernels.md": ROOT / "kernels" / "README.md"}
"""Page of the site -> the file elsewhere in the repository that it is."""
SOURCES = "sources"
"""Folder of the site with the other files that pages link to."""
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the pages of `folder/*` and of no section."""
    named = set(_names(config.nav))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}

    def filled(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [{title: _flat(map(filled, part)) for title, part in entry.items()}]
        if not entry.endswith("/*"):
            return [entry]
        folder = entry.removesuffix("/*")
        return sorted(page for page in pages - named if os.path.dirname(page) == folder)

    config.nav = _flat(map(filled, config.nav or ()))
    if rest := sorted(pages - set(_names(config.nav))):
        config.nav.append({"More": rest})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated or lie outside of docs/, and the files that they link to."""
    texts = {name: path.read_text() for name, path in ADDED.items()}
    texts |= {"flags.md": flags_page(), "metrics.md": metrics_page()}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    linked = {
        target
        for page in (*DOCS.rglob("*.md"), *ADDED.values())
        for target in _targets(page, page.read_text())
        if target not in ADDED.values() and not target.is_relative_to(DOCS)
    }
    for target in sorted(linked):
        place = f"{SOURCES}/{target.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links as they hold in the repository into links as they hold in the site."""
    here = page.file.src_uri
    source = ADDED.get(here, DOCS / here)

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_relative_to(DOCS) or not target.is_file():
            place = None if here not in ADDED else target.relative_to(DOCS).as_posix()
        else:
            pages = {path: name for name, path in ADDED.items()}
            place = pages.get(target) or f"{SOURCES}/{target.relative_to(ROOT).as_posix()}"
        if place is None:
            return link[0]
        place = os.path.relpath(place, os.path.dirname(here) or ".")
        return f"{link[1]}{place}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def flags_page() -> str:
    """Return every setting of training, by section."""
    parts = [
        "# Flags of training",
        "What `ragen-mega train` and `examples/pretrain_starpo.sh` take, made from"
        " `ragen_mega/config/sections/`. A switch is turned off by `--no-...`; a later flag wins,"
        " and any flag over the recipe's. `--help` says the same.",
    ]
    for section in fields(StarPOConfig):
        about = " ".join((section.default_factory.__doc__ or "").split())
        rows = [
            _row(flag)
            for flag in all_flags()
            if flag.section == section.name and flag.name != "recipe"
        ]
        head = "| flag | takes | default | |\n|---|---|---|---|"
        title = section.name.replace("_", " ").capitalize()
        parts.append("\n".join((f"## {title}", "", about, "", head, *rows)))
    return "\n\n".join(parts) + "\n"


def _row(flag: Flag) -> str:
    takes = "" if flag.is_switch else f"`{flag.metavar}`"
    default = {True: "on", False: "off", "": "empty"}.get(flag.default, f"`{flag.default}`")
    if flag.default is None and "default" in flag.about:
        default = "as said"
    cells = (f"`{flag_of(flag.name)}`", takes, default, flag.about)
    return f"| {' | '.join(map(_cell, cells))} |"


def metrics_page() -> str:
    """Return every key of metrics.jsonl and its meaning, by stage."""
    parts = [
        "# Metrics",
        "Keys of `metrics.jsonl`, TensorBoard and W&B, as the viewer explains them; made from"
        " `ragen_mega/report/glossary.py`. A key with an environment behind it, such as"
        " `eval/success_sokoban`, means the same.",
    ]
    for stage in dict.fromkeys(key.split("/")[0] for key in GLOSSARY):
        rows = [
            f"| `{key}` | {_cell(about)} |"
            for key, about in GLOSSARY.items()
            if key.split("/")[0] == stage
        ]
        parts.append("\n".join((f"## {stage}", "", "| key | |", "|---|---|", *rows)))
    return "\n\n".join(parts) + "\n"


def _targets(page: Path, text: str) -> Iterator[Path]:
    targets = ((page.parent / link[2]).resolve() for link in LINK.finditer(text))
    return (target for target in targets if target.is_file())


def _names(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries:
        if not isinstance(entries, str):
            yield from _names(entry)


def _flat(lists: Any) -> list[Any]:
    return [entry for part in lists for entry in part]


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")
