"""Hooks of mkdocs: the page of the command line, from its parsers; pages that fetch nothing."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

os.environ["COLUMNS"] = "100"  # which argparse breaks lines at
PAGE = "reference/cli.md"
INTRODUCTION = """# Command line

Generated from the parsers. Answers go to standard output, everything else to standard error. Exit codes: 0 done, 1
failed, 2 wrong usage, 130 after Ctrl-C. An error is one line that names options; `--debug` shows the traceback.
"""


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands, depth first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in dict.fromkeys(action.choices.values()):
                yield from commands(one)


def command_line() -> str:
    from smcjax.cli.main import make_parser

    pages = [f"\n## {one.prog}\n\n```text\n{one.format_help().strip()}\n```\n" for one in commands(make_parser())]
    return INTRODUCTION + "".join(pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=command_line()))
    return files


@event_priority(-100)  # behind the plugin of notebooks, which adds it to every page
def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Without the script that fetches MathJax: no page has formulas, and nothing is fetched as a page is read."""
    return re.sub(r"<script data-mkdocs-jupyter-mathjax=.*?</script>\s*", "", output, flags=re.DOTALL)
