"""Hook of MkDocs: a site from documents that are written for a code host.

Links of the documents are those of the repository. Here a document outside of docs/ becomes a page, so does each file
of the source that a document names, and each link is rewritten to the page of its target.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "AGENTS.md": "AGENTS.md",
    "kernels/README.md": "kernels/README.md",
    "kernels/emulator/README.md": "kernels/emulator/README.md",
}
"""Documents that are no page of docs/, or one of another name, with their pages."""
PYTHON = "PYTHON.md"
SOURCE = "source"
LANGUAGES = {
    **{".py": "python", ".toml": "toml", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".cpp": "cpp"},
    **{".cu": "cuda", ".cuh": "cuda", ".h": "cpp", ".md": "markdown", ".jinja": "jinja", ".txt": "text"},
}
"""Suffixes of source that is shown, with the names by which it is coloured."""
LINK = re.compile(r"(\]\()([^)\s#]+)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside of docs/, the page of the API and the source that documents name."""
    files.remove(files.src_uris["README.md"])
    texts = {document: (ROOT / document).read_text(encoding="utf-8") for document in OUTSIDE}
    pages = {OUTSIDE[document]: text for document, text in texts.items()} | {PYTHON: _python()}
    documents = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    texts |= {document: (ROOT / document).read_text(encoding="utf-8") for document in documents}
    for path in sorted(_named(texts)):
        pages |= _source(path)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point the links of a document to the pages of their targets."""
    uri = page.file.src_uri
    if uri.startswith(f"{SOURCE}/") or uri == PYTHON:
        return markdown
    document = {page_uri: name for name, page_uri in OUTSIDE.items()}.get(uri, f"docs/{uri}")
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], document, uri), fence[0]]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], document, uri)])


def _linked(text: str, document: str, uri: str) -> str:
    """Text of a document, its links rewritten to the pages of their targets, as they are seen from its own page."""
    folder = posixpath.dirname(uri) or "."

    def rewritten(link: re.Match[str]) -> str:
        target = _target(document, link[2])
        return link[0] if target is None else link[1] + posixpath.relpath(_page_of(target), folder)

    return LINK.sub(rewritten, text)


def _target(document: str, link: str) -> str | None:
    """The path in the repository that a link of a document leads to, None for another server."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _named(texts: dict[str, str]) -> set[str]:
    """Files and folders outside of docs/ that documents link to."""
    targets = {
        target
        for document, text in texts.items()
        for link in LINK.findall(FENCE.sub("", text))
        if (target := _target(document, link[1])) is not None and (ROOT / target).exists()
    }
    return {target for target in targets if target not in OUTSIDE and not _is_in_site(target)}


def _is_in_site(target: str) -> bool:
    """Whether MkDocs itself takes a file into the site: all of docs/ except scripts."""
    return target.startswith("docs/") and not target.endswith(".py")


def _page_of(target: str) -> str:
    """The page of the site, or file in it, of a path in the repository."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    if _is_in_site(target):
        return target.removeprefix("docs/")
    return f"{SOURCE}/{target}/index.md" if (ROOT / target).is_dir() else f"{SOURCE}/{target}.md"


def _source(path: str) -> dict[str, str]:
    """The page of a file, or those of a folder and of the files in it."""
    if not (ROOT / path).is_dir():
        return {} if path in OUTSIDE else {_page_of(path): _page_of_file(path)}
    inside = [each for each in sorted((ROOT / path).iterdir()) if not each.name.startswith(("_", "."))]
    files = [f"{path}/{each.name}" for each in inside if each.is_file() and each.suffix in LANGUAGES]
    folders = [each.name for each in inside if each.is_dir()]
    here = posixpath.dirname(_page_of(path))
    rows = [f"| {name}/ | |\n" for name in folders]
    rows += [
        f"| [{Path(file).name}]({posixpath.relpath(_page_of(file), here)}) | {_first_line(file)} |\n" for file in files
    ]
    pages = {_page_of(path): f"{HIDDEN}# {path}/\n\n| in it | what it is |\n| --- | --- |\n{''.join(rows)}"}
    for file in files:
        pages |= _source(file)
    return pages


HIDDEN = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"


def _page_of_file(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        return _notebook(path, json.loads(text))
    return f"{HIDDEN}# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def _notebook(path: str, notebook: dict[str, Any]) -> str:
    """The cells of a notebook as text and code."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"````python\n{source}\n````" if is_code else _linked(source, path, _page_of(path)))
    return "\n\n".join(parts) + "\n"


def _first_line(path: str) -> str:
    """What a module says of itself."""
    if not path.endswith(".py"):
        return ""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("|", "\\|")


def _python() -> str:
    """The page of the public names, each with its signature and docstring."""
    rows = [f"\n::: {module}.{name}\n" for module, name in _public_names()]
    head = "# Python, name by name\n\nAll names are imported from `megatronish`; [API.md](API.md) has examples.\n"
    return head + "".join(rows)


def _public_names() -> Iterator[tuple[str, str]]:
    tree = ast.parse((ROOT / "megatronish" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    names = [(str(node.module), name.name) for node in imports for name in node.names]
    return iter(sorted(names, key=lambda each: each[1].lower()))
