"""What the docs site has beside the pages of docs/: a hook of mkdocs.yml.

The README, the tables of results, the API reference, and a page for each source file and folder
that a page links to. Links out of docs/ lead to these pages. A link that leads nowhere is left as
it is, and mkdocs refuses it.
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
# Pages outside docs/, by their place in the repository.
OUTSIDE = {"README.md": "overview.md", "bench/results/TABLES.md": "tables.md"}
# The host calls, which are public by their module.
HOST_CALLS = ("interface._flash_attn_fwd", "interface._flash_attn_bwd")
HOST_CALLS += ("interface.FwdConfig", "interface.BwdConfig")
# Doors into other libraries, which their users import by module.
DOORS = tuple(f"integrations.torch.{x}" for x in ("register", "sdpa", "kernels_run", "Ran"))
# What modules of `__all__` have from their own modules.
OF_MODULES = ("parallel.planning.plan", "parallel.planning.Plan", "parallel.planning.Load")
OF_MODULES += ("parallel.attention.context_parallel_attention", "parallel.sharding.sharded")
OF_MODULES += ("masks.draft_tree.draft_tree", "masks.draft_tree.DraftTree")
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
    """The API reference, as directives that mkdocstrings fills from docstrings."""
    names = [*public_names(), *OF_MODULES, *HOST_CALLS, *DOORS]
    return "# API reference\n\n" + "\n\n".join(f"::: {PACKAGE}.{name}" for name in names) + "\n"


def page_of(place: str) -> str | None:
    """The page of the site for a file or folder outside docs/, None if there is no such file."""
    if place in OUTSIDE:
        return OUTSIDE[place]
    return f"source/{place}.md" if (ROOT / place).exists() else None


def target_of(page: str, link: str) -> str:
    """A link of a page, whose place is given from the root on, in the site."""
    if "://" in link:
        return link
    place = normpath(str(PurePosixPath(page).parent / link))
    own = OUTSIDE.get(page, page.removeprefix("docs/"))
    if place.startswith("docs/"):
        target: str | None = place.removeprefix("docs/")
    else:
        target = page_of(place)
    return link if target is None else relpath(target, str(PurePosixPath(own).parent))


def with_links(page: str, text: str) -> str:
    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(lambda m: m[1] + target_of(page, m[2]) + (m[3] or "") + m[4], parts[i])
    return "".join(parts)


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
    return found - OUTSIDE.keys()


def on_files(files: Files, config: Any) -> Files:
    pages = {
        f"docs/{p.relative_to(ROOT / 'docs')}": p.read_text()
        for p in sorted((ROOT / "docs").rglob("*.md"))
    }
    pages |= {place: (ROOT / place).read_text() for place in OUTSIDE}
    for place, name in OUTSIDE.items():
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
