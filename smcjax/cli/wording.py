"""Errors of the library in the words of the command line: options where it names arguments.

    power is 2 and the draft …; use decoding=Rejection(), or lower draft_temperature
    --power is 2 and the draft …; use --decoding rejection, or lower draft_temperature

A name with an underscore is no English word and is replaced wherever it stands; `power` or `control` are words too, and
are replaced where a sentence treats them as arguments: first in it, with a value, or in what it says to do. Options
that a decoder is written with, as `SMC(draft_temperature=2)`, keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_WHOLE = r"(?<![\w/.=-]){}(?![\w/(-])"
# Options of another name than the argument.
_RENAMED = {"n_candidates": "n_particles"}
_DECODERS = {"SMC": "smc", "Rejection": "rejection", "Autoregressive": "autoregressive", "Auto": "auto"}
_CALL = re.compile(rf"\b(?:decoding=)?({'|'.join(_DECODERS)})\((\w+=[\w.]+)?\)")
_NONE = {", or None, got": ", got", ", or None to": ", or be left out to"}  # where an option is given or is not


def in_options(text: str, options: Collection[str]) -> str:
    """The sentence with `options`, names such as "max_tokens" of a command that has --max-tokens, in place of names."""
    if " has no argument " in text:  # of a decoder that is written as in Python
        return text
    renamed = {name: option for name, option in _RENAMED.items() if option in options}
    if "json_schema" in options:
        text = re.sub(r"\bresponse_format\b", "the form of the answer", text)
    for theirs, ours in _NONE.items():
        text = text.replace(theirs, ours)
    if "decoding" in options:
        text = _CALL.sub(_called, text)
        text = re.sub(r"(--decoding \w+) or --decoding ", r"\1 or ", text)
    for name in sorted({*options, *renamed}):
        option = "--" + renamed.get(name, name).replace("_", "-")
        text = re.sub(rf"(?<![\w-]){name}=True\b", option, text)
        text = re.sub(rf"(?<![\w-]){name}='?(\w+(?:\.\d+)?)'?", rf"{option} \1", text)
        if "_" in name:
            text = re.sub(_WHOLE.format(name), option, text)
        else:
            text = re.sub(rf"^{name}(?= (must|is|are|has|holds|needs|/) )", option, text)
            text = re.sub(
                rf"(?<!\w)(leave|lower|raise|set|give|and|or|to share|/) {name}(?=[,.;]| out\b| is | [\d']| without)",
                rf"\1 {option}",
                text,
            )
    return text


def _called(match: re.Match[str]) -> str:
    """`Rejection(gamma=4)` as options."""
    return f"--decoding {_DECODERS[match[1]]}" + (f" with {match[2]}" if match[2] else "")
