"""Pages: links lead somewhere, named files exist, commands parse, and sentences are short."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from smcjax.cli.main import make_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "dev" / "LOG.md",
    *(ROOT / "studies").rglob("*.md"),
]
GENERATED = ["docs/reference/cli.md"]  # by docs/hooks.py, as the site is built
MAX_WORDS, MAX_SENTENCE = 30_000, 35
LINK = re.compile(r"(!?)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]*)\)")
VAGUE = re.compile(r"\b(nobody|whoever|somebody)\b", re.IGNORECASE)
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:smcjax|tests|scripts|studies|examples|docs)/[\w./-]*)`")


def anchors(text: str) -> set[str]:
    """Returns the names that links to a page may have behind #: its headings, as the site and GitHub write them."""
    headings = re.findall(r"^#+ +(.*)$", CODE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for _, link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if str(file.relative_to(ROOT)) in GENERATED:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
            broken.append(link)
    return broken


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables and headings; a point of a list begins one."""
    text = CODE.sub("\n", text)
    kept: list[str] = []
    for line in text.splitlines():
        if re.match(r" *(\||#|>|<)| {4,}\S", line) and not (kept and kept[-1] and line.startswith("    ")):
            kept.append("")
        elif point := re.match(r" *(?:[-*]|\d+\.) +(.*)", line):
            kept += ["", point[1]]
        else:
            kept.append(line.strip())
    found = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(kept)):
        one = re.sub(r"`[^`]*`", "code", " ".join(paragraph.split()))
        one = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", one)
        one = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one)
        found += re.split(r"(?<=[.!?])[”\"*)]*\s+", one)
    return found


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())


def test_a_broken_link_is_seen() -> None:
    text = "[a](README.md#two-commands) [b](README.md#no-such) ![c](no/such.svg)"
    assert broken_links(ROOT / "README.md", text) == ["README.md#no-such", "no/such.svg"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    assert not [name for name in FILE.findall(page.read_text()) if "NAME" not in name and not (ROOT / name).exists()]


def commands(text: str) -> list[list[str]]:
    """The arguments of `smcjax` in blocks of code and in tables."""
    blocks = "\n".join(re.sub(r"^ *```.*$", "", block, flags=re.MULTILINE) for block in CODE.findall(text))
    lines = blocks.replace("\\\n", " ").splitlines() + re.findall(r"^\| `([^`|]*)` \|", text, re.MULTILINE)
    found = (
        re.search(r"(?:^|&& |\| |\s)(?:uv run [^&|\"]*?)?\bsmcjax (.*)$", line)
        for line in lines
        if "import" not in line
    )
    split = (shlex.split(one[1], comments=True) for one in found if one and "…" not in one[1])
    return [[each for word in command for each in expanded(word)] for command in split]


def expanded(word: str) -> list[str]:
    """The words that bash makes of a decoder with numbers in braces: `SMC(gamma={4,8})` is two."""
    parts = re.split(r"\{([\d.,]+)\}", word) if re.fullmatch(r"\w+\(.*\)", word) else [word]
    choices = (part.split(",") if number % 2 else [part] for number, part in enumerate(parts))
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page.read_text()):
        if "--help" not in command:
            make_parser().parse_args(command)


def test_a_wrong_command_is_seen() -> None:
    found = commands("```\nuv run smcjax bench cycle --windows 2\n```\n\n| `smcjax generate x --no-such` | |\n")
    assert found == [["bench", "cycle", "--windows", "2"], ["generate", "x", "--no-such"]]
    assert commands("```\nsmcjax eval 'SMC(gamma='{4,8}')' '{1,2}'\n```\n") == [
        ["eval", "SMC(gamma=4)", "SMC(gamma=8)", "{1,2}"]
    ]
    with pytest.raises(SystemExit):
        make_parser().parse_args(found[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_and_name_their_subject(page: Path) -> None:
    text = page.read_text()
    assert not [sentence for sentence in sentences(text) if words(sentence) > MAX_SENTENCE]
    assert not VAGUE.findall(text)


def test_a_long_sentence_is_seen() -> None:
    long = "A b. " + "word " * 36 + "end.\n\n| " + "cell " * 40 + "|\n\n```\n" + "code " * 40 + "\n```\n\n- One point."
    assert [words(sentence) for sentence in sentences(long) if words(sentence) > MAX_SENTENCE] == [37]
    assert VAGUE.search("Nobody reads it.")


def test_pages_are_few_words() -> None:
    """The limit moves trials to dev/LOG.md. It counts as `wc -w` does: bars of tables and comments too."""
    assert sum(len(page.read_text().split()) for page in PAGES) <= MAX_WORDS
