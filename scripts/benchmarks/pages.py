"""Figures of the pages, from the records in `results/` that `--save FILE` of the benchmarks writes.

    python scripts/benchmarks/pages.py            # writes them into the pages, and the picture of a cycle
    python scripts/benchmarks/pages.py --check    # names what is stale, and exits with code 1; the tests do the same

A table stands between two comments, of which the first says what makes it of which records:

    <!-- figures: cycles table_h200 compare_h200 -->
    <!-- end -->

A number in a sentence has a comment behind it with record, row, field and format. Another row makes it a ratio:

    846<!--compare_h200 0 tokens_per_second ,.0f--> tokens/s, 1.7<!--compare_h200 2/0 ms .1f--> times

Of a record whose rows are cells, the field is a column, or a column and which number of its cell: `3.1` is 465 of
"1.10 (465)" in the fourth one.

Records whose `raw` is null were transcribed from the pages when those had figures of their own; their raw windows are
lost. Tables that are `plain` or `dated` show their rows cell by cell. A new run's file takes the place of a record, and
this script does the rest.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cycle_picture import draw_cycle

from smcjax.device import KNOWN
from smcjax.markdown import table

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs" / "images" / "cycle.svg"
PROFILE = "profile_h200"
BLOCK = re.compile(r"(<!-- figures: (\w+) ([\w ]+) -->\n).*?(\n?<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[^\s(|*\[]+?<!--(\w+) (-?\d+)(?:/(\d+))? ([\w.]+) ([^ ]+)-->")
Record = dict[str, Any]


@functools.cache
def record(name: str) -> Record:
    """Reads a record by its file's name."""
    read: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def share(fraction: float | None) -> str:
    """A fraction as a percentage; "–" where there is none."""
    return "–" if fraction is None else f"{100 * fraction:.1f}%"


def run_of(made: Record) -> str:
    """The line below a table: what ran where and when, and the command."""
    machine, commit = made["machine"], (made["commit"] or "no commit") + (" and changes" if made["dirty"] else "")
    count = f"{machine['devices']} × " if machine["devices"] > 1 else ""
    return f"*{count}{machine['device']}, JAX {machine['jax']}, {made['date']}, {commit}: `{made['command']}`*"


def runs_of(*records: Record) -> str:
    """The line below tables: `run_of` the first one, with the commands of others that ran likewise."""
    runs = [run_of(made) for made in records]
    begins = {line[: line.index("`")] for line in runs}
    if len(begins) > 1:
        return "\n\n".join(runs)
    return begins.pop() + ", ".join(line[line.index("`") : -1] for line in runs) + "*"


def cycles(timed: Record, compared: Record) -> str:
    """Cases of `bench table`, and the contenders of `bench cycle --compare`."""
    rows = []
    for row in timed["rows"]:
        requests = "1 request" if row["groups"] == 1 else f"{row['groups']} requests"
        private = f", {row['private']:,} of them private" if row["private"] else ""
        rows.append((f"{row['described']}, {requests}, {row['context']:,}{private}", *_cells(row)))
    rows += [
        (f"{row['contender']}, {row['groups']} request, {row['context']:,}", *_cells(row))
        for row in compared["rows"]
        if "not_run" not in row
    ]
    heads = ["case, tokens of context", "ms a cycle", "tokens/s", "of the weight roofline", "of the whole roofline"]
    return "\n\n".join([table(heads, rows), run_of(timed), run_of(compared)])


def _cells(row: Record) -> tuple[str, ...]:
    several = row["groups"] > 1  # a batch is bound by FLOPs as well
    weights = None if several else row["weight_roofline_fraction"]
    return f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}", share(weights), share(row.get("roofline_fraction"))


def decoders(made: Record) -> str:
    """Decoders of `bench decoders`, each beside the first one."""
    rows = []
    for number, row in enumerate(made["rows"]):
        low, middle, high = (100 * row[name] for name in ("difference_low", "difference", "difference_high"))
        ess = "–" if row["mean_ess"] is None else f"{row['mean_ess']:.2f}"
        difference = f"{middle:+.1f} ({low:+.1f}, {high:+.1f})" if number else "–"
        rows.append((row["decoder"], share(row["accuracy"]), difference, f"{row['tokens_per_cycle']:.2f}", ess))
    heads = ["decoder", "accuracy", "minus the first row, points", "tokens a cycle", "mean ESS"]
    return f"{table(heads, rows)}\n\n{run_of(made)}"


def plain(made: Record) -> str:
    """Rows as they are."""
    return table(made["heads"], made["rows"])


def dated(made: Record) -> str:
    """Rows as they are, and what ran."""
    return f"{plain(made)}\n\n{run_of(made)}"


def eight_bits(compared: Record, judged: Record) -> str:
    """Laws and accuracies of `bench_eight_bits.py`: a row a model or decoder, a column a kind of weights."""

    def rows(made: Record, of: str, cell: Callable[[Record], str]) -> str:
        kinds = list(dict.fromkeys(row["weights"] for row in made["rows"]))
        names = list(dict.fromkeys(row[of] for row in made["rows"]))
        cells = {(row[of], row["weights"]): cell(row) for row in made["rows"]}
        return table([of, *kinds], [(name, *(cells.get((name, kind), "–") for kind in kinds)) for name in names])

    def law(row: Record) -> str:
        return f"{row['kl']:.2g} ({share(row['agreement'])})"

    def accuracy(row: Record) -> str:
        return f"{share(row['accuracy'])} ({100 * row['ci_low']:.1f}, {100 * row['ci_high']:.1f})"

    tables = [rows(compared, "model", law), rows(judged, "decoder", accuracy)]
    return "\n\n".join([*tables, runs_of(compared, judged)])


def genlm(made: Record) -> str:
    """Contenders of `genlm_speed.py`."""
    rows = [
        (
            row["contender"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds']:.2f}",
            share(row["satisfied"]),
            f"{row['log_evidence']:.2f} ± {row['half']:.2f}",
        )
        for row in made["rows"]
    ]
    heads = ["", "tokens/s", "seconds", "have the form", "log evidence"]
    return f"{table(heads, rows)}\n\n{run_of(made)}"


def rivals(published: Record) -> str:
    """Published speeds beside ours, and the memory's bandwidth that they come to by the bytes that a token needs."""
    rows = []
    for row in published["rows"]:
        speed, size, read, date = map(row.get, ("tokens_per_second", "bytes_a_token", "read_bandwidth", "date"))
        at = f"[{row['said']}]({row['link']}), " if row["link"] else f"{row['said']}, " if row["said"] else ""
        if "record" in row:
            made = record(row["record"])
            own, date = made["rows"][row["row"]], made["date"]
            speed, size = own["tokens_per_second"], own["weight_bytes"] / (own["gamma"] + 1)
            read = own.get("read_bandwidth") or read
        card = KNOWN[row["card"]]
        used = None if size is None else speed * size / row["devices"]
        rows.append(
            (
                row["models"],
                f"{row['devices']} × {card.kind.removeprefix('NVIDIA ')}",
                row["contender"],
                f"{speed:,.0f}",
                share(used and used / card.bandwidth),
                share(used and read and used / read),
                row["lossless"],
                f"{at}{row['how']}, {date}",
            )
        )
    heads = ["models", "cards", "", "tokens/s", "of the data sheet's bandwidth", "of measured reads", "lossless", "how"]
    return table(heads, rows)


TABLES: dict[str, Callable[..., str]] = {
    "cycles": cycles,
    "decoders": decoders,
    "plain": plain,
    "dated": dated,
    "eight_bits": eight_bits,
    "genlm": genlm,
    "rivals": rivals,
}


def value_of(row: Record | list[str], field: str) -> float:
    """The number that a row has in this field."""
    if isinstance(row, dict):
        return float(row[field])
    column, _, number = field.partition(".")
    return float(re.findall(r"-?[\d,]*\.?\d+", row[int(column)])[int(number or 0)].replace(",", ""))


def figured(text: str) -> str:
    """The page with its figures as the records have them."""

    def block(found: re.Match[str]) -> str:
        made = TABLES[found[2]](*map(record, found[3].split()))
        return f"{found[1]}{made}\n<!-- end -->"

    def number(found: re.Match[str]) -> str:
        name, row, over, field, form = found.groups()
        rows = record(name)["rows"]
        value = value_of(rows[int(row)], field) / (value_of(rows[int(over)], field) if over else 1)
        return f"{value:{form}}{found[0][found[0].index('<!--') :]}"

    return NUMBER.sub(number, BLOCK.sub(block, text))


def pages() -> Iterator[Path]:
    """The README and all pages of the site."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def stale() -> list[Path]:
    """The pages whose figures are not those of the records, and the picture."""
    found = [page for page in pages() if figured(page.read_text()) != page.read_text()]
    drawn = PICTURE.exists() and PICTURE.read_text() == draw_cycle(record(PROFILE)["rows"])
    return found if drawn else [*found, PICTURE]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes figures, or says where they are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    found = stale()
    for page in found:
        print(f"{page.relative_to(ROOT)} {'is stale' if args.check else 'is written'}")
        if not args.check:
            page.write_text(draw_cycle(record(PROFILE)["rows"]) if page == PICTURE else figured(page.read_text()))
    return 1 if found and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
