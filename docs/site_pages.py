"""What the docs site has beside the pages of docs/: a hook of mkdocs.yml.

The README as start page, the tables of results, the API reference, and a page for each source file
and folder that a page links to. Links out of docs/ lead to these pages. A link that leads nowhere
is left as it is, and mkdocs refuses it.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from markdown import Extension, Markdown
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).absolute().parents[1]
PACKAGE = "flash_mask_cute"
# Pages that the site has under another name, by their place in the repository.
RENAMED = {
    "README.md": "index.md",
    "docs/README.md": "documentation.md",
    "bench/results/TABLES.md": "tables.md",
}
# The API reference: what it has, in this order, with the names of the package in between.
REFERENCE = {
    "Functions": (
        *("flash_attn_func", "flash_attn_varlen_func", "flashmask_attention", "flex_attention"),
        *("attention_statistics", "attention_statistics_varlen", "explain", "plot"),
    ),
    "Masks": (
        *("ColumnMask", "SelectedBlocks", "BlockSparseTensorsTorch", "create_block_mask"),
        "keep_block_mask",
    ),
    "Builders": ("builders", "masks.draft_tree.draft_tree", "masks.draft_tree.DraftTree"),
    "Mods": ("mod_source", "patch_flex_attention", "compile_count"),
    "Serving": ("flash_attn_with_kvcache", "flash_attn_combine"),
    "Parallel": (
        *("parallel", "parallel.planning.plan", "parallel.planning.Plan"),
        *("parallel.planning.Load", "parallel.attention.context_parallel_attention"),
        "parallel.sharding.sharded",
    ),
    "Integrations": (
        *(f"integrations.transformers.{x}" for x in ("register", "masks_for")),
        *(f"integrations.torch.{x}" for x in ("register", "sdpa", "kernels_run", "Ran")),
        *(f"integrations.trl.{x}" for x in ("register_tree_attention", "tree_attention")),
        "integrations.cuequivariance.triangle_attention",
    ),
    "Host calls": (
        *("interface._flash_attn_fwd", "interface._flash_attn_bwd", "FwdConfig", "BwdConfig"),
    ),
}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]+)?(\))")


class NestedLists(Extension):
    """Lists nest by two spaces, as on code hosts."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(NestedLists())
    return config


def public_names() -> list[str]:
    """`__all__` of the package, without its version."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [x for x in ast.literal_eval(node.value) if not x.startswith("__")]
    raise ValueError("the package has no __all__")


def api_page() -> str:
    """The API reference, as directives that mkdocstrings fills from docstrings.

    Raises ValueError if a name of the package is in no part of it.
    """
    if missing := set(public_names()) - {x for names in REFERENCE.values() for x in names}:
        raise ValueError(f"REFERENCE in docs/site_pages.py lacks {', '.join(sorted(missing))}")
    parts = ["# API reference"]
    for part, names in REFERENCE.items():
        parts += [f"## {part}", *(f"::: {PACKAGE}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def page_of(place: str) -> str | None:
    """The page of the site for a file or folder outside docs/, None if there is no such file."""
    if place in RENAMED:
        return RENAMED[place]
    return f"source/{place}.md" if (ROOT / place).exists() else None


def target_of(page: str, link: str) -> str:
    """A link of a page, whose place is given from the root on, in the site."""
    if "://" in link:
        return link
    place = normpath(str(PurePosixPath(page).parent / link))
    own = page.removeprefix("docs/") if page.startswith("docs/") else f"source/{page}.md"
    own = RENAMED.get(page, own)
    if place.startswith("docs/") and place not in RENAMED:
        target: str | None = place.removeprefix("docs/")
    else:
        target = page_of(place)
    return link if target is None else relpath(target, str(PurePosixPath(own).parent))


def with_links(page: str, text: str) -> str:
    """The text of a page with the links of the site, and with its pipes inside code of tables.

    Code hosts want `a \\| b` in a cell, and show `a | b`. Markdown of the site wants `a | b`.
    """
    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    for i in range(0, len(parts), 2):
        part = LINK.sub(lambda m: m[1] + target_of(page, m[2]) + (m[3] or "") + m[4], parts[i])
        parts[i] = re.sub(r"^\|.*$", lambda row: plain_pipes(row[0]), part, flags=re.M)
    return "".join(parts)


def plain_pipes(row: str) -> str:
    """A row of a table without the backslashes before pipes in its code."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row)


def source_page(place: str) -> str:
    """A file as a block of code, or a folder as a list of its files and what they are."""
    path = ROOT / place
    if path.is_dir():
        rows = [f"# {place}\n"]
        for inner in sorted(path.rglob("*.py")):
            doc = ast.get_docstring(ast.parse(inner.read_text())) or "no docstring"
            first = html.escape(doc.splitlines()[0]).replace("[", "&#91;")
            rows.append(f"- `{inner.relative_to(path)}`: {first}")
        return "\n".join(rows) + "\n"
    if path.suffix == ".md":
        return with_links(place, path.read_text())
    return f"# {place}\n\n````python\n{path.read_text()}\n````\n"


def linked_sources(pages: dict[str, str]) -> set[str]:
    """The places outside docs/ that pages, texts by their place, link to."""
    found = set()
    for page, text in pages.items():
        for match in LINK.finditer(text):
            place = normpath(str(PurePosixPath(page).parent / match[2]))
            if "://" not in match[2] and not place.startswith("docs/") and page_of(place):
                found.add(place)
    return found - RENAMED.keys()


def on_files(files: Files, config: Any) -> Files:
    pages = {
        f"docs/{p.relative_to(ROOT / 'docs')}": p.read_text()
        for p in sorted((ROOT / "docs").rglob("*.md"))
    }
    pages |= {place: (ROOT / place).read_text() for place in RENAMED}
    # the index of docs/ would be the start page, which the README of the project is
    index = files.get_file_from_path("README.md")
    assert index is not None
    files.remove(index)
    for place, name in RENAMED.items():
        files.append(File.generated(config, name, content=with_links(place, pages[place])))
    files.append(File.generated(config, "api.md", content=api_page()))
    for place in sorted(linked_sources(pages)):
        name = f"source/{place}.md"
        files.append(File.generated(config, name, content=source_page(place)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return with_links(f"docs/{page.file.src_uri}", markdown)
