"""What MkDocs does beside building docs/: the repository's other pages, links that hold in both places, `--help`.

The pages are written for the repository, where a link leads to a file beside the page. The site holds the same files:
those of docs/ at its root, README.md as its index, and the others where the repository has them.
"""

import os
import posixpath
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Pages and pictures outside docs/ that the site holds too.
_OTHERS = (
    "*.md",
    "LICENSE",
    "benchmarks/*.md",
    "benchmarks/results/*",
    "native/*.md",
    "training/*.md",
    "src/onward/demo/*.md",
    "examples/*.py",
)
_PROGRAM = "from onward.cli.main import main; main()"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_PAGE = re.compile(r"(?<![\w/\"])docs/([\w/-]+)\.md")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
# <!-- help: generate --> stands for what `onward generate --help` prints.
_HELP = re.compile(r"^<!-- help:(?P<command>[ a-z-]*) -->$", re.MULTILINE)


def on_config(config):
    """An entry of the navigation such as `Decisions: decisions/*` becomes a list of that folder's pages."""
    for section in config.nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                for title, folder in entry.items() if isinstance(entry, dict) else []:
                    if isinstance(folder, str) and folder.endswith("/*"):
                        pages = sorted(
                            (ROOT / "docs").glob(f"{folder}.md"), key=lambda path: (path.stem != "README", path)
                        )
                        entry[title] = [page.relative_to(ROOT / "docs").as_posix() for page in pages]
    return config


def on_files(files, config):
    from mkdocs.structure.files import File

    for path in sorted(path for pattern in _OTHERS for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        if name.endswith(".py"):
            text = f"# {name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, site_path(name), content=text))
        else:
            files.append(File.generated(config, site_path(name), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    return with_help(with_site_links(markdown, page.file.src_uri))


def on_page_content(html, page, config, files):
    """Docstrings name pages by their files, as sources do: here the names are links."""

    def link(match: re.Match[str]) -> str:
        if not (ROOT / match[0]).is_file():
            return match[0]
        target = posixpath.relpath(f"{match[1]}.html", posixpath.dirname(page.file.dest_uri) or ".")
        return f'<a href="{target}">{match[0]}</a>'

    return _PAGE.sub(link, html) if "doc-object" in html else html


def on_post_page(output, page, config):
    """The theme would fetch its workaround for pages opened from a folder; assets/worker.js is ours."""
    ours = posixpath.relpath("assets/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", ours)


def site_path(name: str) -> str:
    """Where the site has a file of the repository."""
    if name == "README.md":
        return "index.md"
    if name.endswith(".py"):
        return f"{name}.md"
    return name.removeprefix("docs/")


def repository_path(uri: str) -> str:
    """The file of the repository that is the site's page `uri`."""
    if uri == "index.md":
        return "README.md"
    if uri.startswith("examples/"):
        return uri.removesuffix(".md")
    return uri if (ROOT / uri).is_file() else f"docs/{uri}"


def with_site_links(markdown: str, uri: str) -> str:
    """The relative links of a page, as the site needs them; blocks of code stay as they are."""
    folder = posixpath.dirname(repository_path(uri))

    def site_link(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if ":" in target or target.startswith("/"):
            return match[0]
        name = posixpath.normpath(posixpath.join(folder, target, "README.md" if target.endswith("/") else ""))
        link = posixpath.relpath(site_path(name), posixpath.dirname(uri) or ".")
        return f"{before}{link}{anchor or ''}{after}"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(site_link, part) for part in parts)


def with_help(markdown: str) -> str:
    """The page with the output of `onward COMMAND --help` in the place of each mark."""
    return _HELP.sub(lambda match: f"```text\n{help_of(match['command'])}```", markdown)


def help_of(command: str) -> str:
    """What `onward COMMAND --help` prints in a terminal of 80 columns."""
    arguments = [sys.executable, "-c", _PROGRAM, *shlex.split(command), "--help"]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
