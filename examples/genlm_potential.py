"""A potential of genlm-control steers the engine: an answer of one calculation, by a regular expression.

genlm-control's `prefix` values beginnings and its `complete` whole answers, as `TextPotential` has them.

    uv pip install genlm-control        beside this package; it brings PyTorch
    python examples/genlm_potential.py
"""

import threading
from collections.abc import Callable
from typing import Any

from smcjax import LLM, SMC, SamplingParams, TextPotential


def text_potential(
    potential: Any, ask: int | str | None = 1, symbols: Callable[[str], Any] = str.encode, exponent: float = 1.0
) -> TextPotential:
    """A genlm-control `Potential` over bytes as a `TextPotential`; `symbols=list` is for one over characters.

    Calls come one at a time, each in an event loop of its own, since these potentials cache what they have read.
    """
    turn = threading.Lock()

    async def prefix(prompt: str, texts: list[str]) -> Any:
        with turn:
            return await potential.batch_prefix([list(symbols(text)) for text in texts])

    async def complete(prompt: str, texts: list[str]) -> Any:
        with turn:
            return await potential.batch_complete([list(symbols(text)) for text in texts])

    return TextPotential(prefix, ask, complete, exponent)


def main() -> None:
    from genlm.control import BoolFSA

    brief = text_potential(BoolFSA.from_regex(r"\n[^\n=]*=[^\n=]*\n#### [0-9]+"))
    prompt = "Tom has 3 books and buys 2. How many books does Tom have?"
    with LLM(decoding=SMC(n_particles=8, gamma=4)) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=64, temperature=1.5, seed=1, potentials=[brief]))[0]
    print(output.outputs[0].text)
    print(f"A share of about {2.718281828**output.smc.log_evidence:.2f} of the model's answers has this form.")


if __name__ == "__main__":
    main()
