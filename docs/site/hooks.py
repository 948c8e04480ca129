"""What MkDocs does beside building docs/.

- It adds the repository's other pages, with a place in the navigation, and makes links work in both places.
- It inserts `--help` of each command, and describes each page for search engines.
- It fails the build if a page would load something from another host.

The pages are written for the repository, where a link leads to a file beside the page. The site has the same files:
those of docs/ at its root, README.md as its index, and the others at the same path as in the repository.
"""

import html
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
# Pages with other names in the site: file systems that ignore case hold one security.html.
_SITE_NAMES = {"README.md": "index.md", "SECURITY.md": "security-policy.md"}
_REPOSITORY_NAMES = {there: here for here, there in _SITE_NAMES.items()}
# Where pages outside the navigation belong: a folder or a page, and the page of the navigation that is open beside it.
_PLACES = {
    "benchmarks/": "benchmarks/README.md",
    "decisions/": "decisions/README.md",
    "examples/": "tutorials/train-and-decode.md",
    "native/": "architecture.md",
    "security-policy.md": "security.md",
    "training/": "src/onward/demo/README.md",
}
_RESULTS = "benchmarks/results/"
_DESCRIPTION, _LABEL = 200, 60  # characters at most
_PROGRAM = "from onward.cli.main import main; main()"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\ssrc="(?P<url>(?:https?:)?//[^"]*)"""
    r"""|<link\b(?![^>]*rel="canonical")[^>]*\shref="(?P<link>(?:https?:)?//[^"]*)"""
)
_PAGE = re.compile(r"(?<![\w/\"])docs/([\w/-]+)\.md")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
# <!-- help: generate --> stands for what `onward generate --help` prints.
_HELP = re.compile(r"^<!-- help:(?P<command>[ a-z-]*) -->$", re.MULTILINE)


def on_files(files, config):
    from mkdocs.structure.files import File

    for path in other_files():
        name = path.relative_to(ROOT).as_posix()
        if name.endswith(".py"):
            text = f"# {name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, site_path(name), content=text))
        else:
            files.append(File.generated(config, site_path(name), abs_src_path=str(path)))
    return files


def other_files() -> list[Path]:
    """The files outside docs/ that the site holds."""
    return sorted(path for pattern in _OTHERS for path in ROOT.glob(pattern))


def on_nav(nav, config, files):
    """Pages outside the navigation get a place in it: the section and the sidebar that they are shown with."""
    pages = {page.file.src_uri: page for page in nav.pages}
    for file in files.documentation_pages():
        place = place_of(file.src_uri)
        if file.src_uri not in pages and place is not None:
            file.page.parent = pages[place]


def on_page_markdown(markdown, page, config, files):
    description = description_of(markdown) or f"{page.title}. {config.site_description}"
    page.meta.setdefault("description", html.escape(description))
    if page.file.src_uri.startswith(_RESULTS):
        page.meta["search"] = {"exclude": True}
    return with_help(with_site_links(markdown, page.file.src_uri))


def on_page_content(content, page, config, files):
    """Docstrings name pages by their files, as sources do: here the names are links."""

    def link(match: re.Match[str]) -> str:
        if not (ROOT / match[0]).is_file():
            return match[0]
        target = posixpath.relpath(f"{match[1]}.html", posixpath.dirname(page.file.dest_uri) or ".")
        return f'<a href="{target}">{match[0]}</a>'

    return _PAGE.sub(link, content) if "doc-object" in content else content


def on_post_page(output, page, config):
    return with_own_worker(output, posixpath.relpath("assets/worker.js", posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output, template_name, config):
    return with_own_worker(output, "/assets/worker.js")  # 404.html is shown at any address


def on_post_build(config):
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for url in loaded_from_elsewhere(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(config.site_dir)} loads {url}: put the file into docs/assets")


def with_own_worker(output: str, ours: str) -> str:
    """The theme would fetch its workaround for pages opened from a folder; assets/worker.js is ours."""
    return output.replace("https://unpkg.com/iframe-worker/shim", ours)


def loaded_from_elsewhere(output: str) -> list[str]:
    """The addresses on other hosts that a browser would load for a page."""
    return [match["url"] or match["link"] for match in _LOADED.finditer(output)]


def site_path(name: str) -> str:
    """Where the site has a file of the repository."""
    if name in _SITE_NAMES:
        return _SITE_NAMES[name]
    if name.endswith(".py"):
        return f"{name}.md"
    return name.removeprefix("docs/")


def repository_path(uri: str) -> str:
    """The file of the repository that is the site's page `uri`."""
    if uri in _REPOSITORY_NAMES:
        return _REPOSITORY_NAMES[uri]
    if uri.startswith("examples/"):
        return uri.removesuffix(".md")
    return uri if (ROOT / uri).is_file() else f"docs/{uri}"


def place_of(uri: str) -> str | None:
    """The page of the navigation that a page outside it belongs to."""
    return next((place for start, place in _PLACES.items() if uri.startswith(start)), None)


def description_of(markdown: str) -> str:
    """The first sentences of a page's first paragraph, as plain text; "" if it has none."""
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", markdown)):
        text = " ".join(paragraph.split())
        if re.match(r"$|[#<>|!:]|[*+-]\s|\[!|\d+\.\s", text):  # a heading, a comment, a table, a list, a badge …
            continue
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"[`*]", "", text)
        if text.endswith(":") and len(text) < _LABEL:  # of the block of code that follows
            continue
        text = text.rstrip(":")
        if len(text) <= _DESCRIPTION:
            return text
        end = max(text.rfind(stop, 0, _DESCRIPTION) for stop in (". ", "? ", ": "))
        return text[: end + 1].rstrip(":") if end > 0 else f"{text[: text.rfind(' ', 0, _DESCRIPTION)]} …"
    return ""


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
