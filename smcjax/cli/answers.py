"""Answers as people see them: text as it becomes certain, one line of figures, and a doubt where there is cause."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smcjax.engine.llm import LLM
    from smcjax.engine.requests.requests import Prompt
    from smcjax.engine.requests.sampling_params import SamplingParams
    from smcjax.engine.results.outputs import RequestOutput

# Below these a prompt is not of the bundled pair's kind. Where no draft is rejected: log evidence, in nats a token
# (docs/reference/bundled-pair.md). Where drafts are rejected, evidence hardly falls, and the yield of cycles decides:
# at N = K = 8 and control 0.1 the least of 200 word problems was 0.83, and 12 of 14 other prompts had less than 0.65
# (temperature 1: 0.72, and 10 of 14; K = 4: 0.87 of 60, and 7 of 14).
FOREIGN, FEW = -0.75, 0.65


class Shown:
    """Prints the pieces of a text without the line ends around it: each at once on a terminal, else all at the end."""

    def __init__(self) -> None:
        self._at_once = sys.stdout.isatty()
        self._pieces: list[str] = []
        self._held = ""  # line ends, behind which nothing has come yet

    @property
    def text(self) -> str:
        """The text so far, as printed."""
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        """Takes the next piece."""
        piece = self._held + piece if self._pieces else piece.lstrip("\n")
        body = piece.rstrip("\n")
        self._held = piece[len(body) :] if body or self._pieces else ""
        if body:
            self._pieces.append(body)
            if self._at_once:
                print(body, end="", flush=True)

    def end(self) -> None:
        """Ends the line, before which a text that waits is printed."""
        print("" if self._at_once else self.text, flush=True)


def answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, *, stopped: threading.Event | None = None
) -> tuple[str, RequestOutput | None]:
    """Prints the answer to a prompt and returns it, with its request's output.

    The output is None for an answer that was given up because `stopped` was set; its text is what was certain by then.
    A request that fails prints what was shown of it only where that was on a terminal.
    """
    if stopped is not None:  # to look at it after every cycle, also of those that make no text certain
        params = dataclasses.replace(params, trace=True)
    shown, output = Shown(), None
    chunks = llm.generate_stream(prompt, params)
    for chunk in chunks:
        shown.add(chunk.text)
        output = chunk.output
        if output is None and stopped is not None and stopped.is_set():
            break
    chunks.close()  # type: ignore[attr-defined]
    if output is None or output.error is None or shown.text:
        shown.end()
    return shown.text, output


def summary(output: RequestOutput) -> str:
    """One line of figures about an answer."""
    metrics, answer = output.metrics, output.outputs[0]
    parts = [
        output.decoding,
        f"{metrics.generated_tokens} tokens ({answer.finish_reason})",
        f"{metrics.tokens_per_second:.1f} tokens/s",
        f"{metrics.cycles} cycles",
    ]
    if metrics.mean_accepted_length is not None:
        parts.append(f"{metrics.mean_accepted_length:.2f} drafts accepted a cycle")
    if output.smc is not None:
        mean_ess = "–" if metrics.mean_ess is None else f"{metrics.mean_ess:.2f}"
        parts += [
            f"mean ESS {mean_ess} of {len(output.smc.particles)}",
            f"{metrics.resamples} resamplings",
            f"log evidence {output.smc.log_evidence:.2f}",
        ]
        if output.smc.control:
            parts.append(f"control {output.smc.control:.2f}")
    return "[" + " · ".join(parts) + "]"


def yield_of_cycles(output: RequestOutput) -> float | None:
    """Tokens of the answer over the most that its cycles can bring, K + 1 each; None without a population.

    The last cycle, which the answer's end may have cut, counts as whole. None as well for one or two cycles, of which a
    stop string may have cut both.
    """
    metrics = output.metrics
    if output.smc is None or metrics.cycles < 3:
        return None
    drafts = metrics.drafted / (metrics.cycles * len(output.smc.particles))
    return (metrics.generated_tokens + drafts) / (metrics.cycles * (drafts + 1))


class Doubt:
    """Says once, on standard error, that a prompt is none of the bundled pair's kind."""

    def __init__(self, *, bundled: bool, power: float = 1.0) -> None:
        # At another power the evidence is that of another constant than 1, and other drafts are rejected.
        self._silent = not bundled or power != 1.0

    def consider(self, output: RequestOutput, named: str = "this prompt") -> None:
        """Warns where an answer says so, by its cycles or its evidence; `named` is the prompt in the sentence."""
        reason = None if self._silent else _reason(output)
        if reason is None:
            return
        self._silent = True
        print(
            f"smcjax: warning: {named} does not look like a word problem, which is all that the bundled pair knows "
            f"({reason} or more is usual); choose another pair with --model and --draft-model.",
            file=sys.stderr,
        )


def _reason(output: RequestOutput) -> str | None:
    """Says by what an answer differs from those of word problems, and what they have at least; None if it does not."""
    if output.smc is None:
        return None
    if output.smc.control:
        brought = yield_of_cycles(output)
        few = brought is not None and brought < FEW
        return f"its cycles brought {brought:.0%} of the tokens that they can, and {FEW:.0%}" if few else None
    evidence = output.smc.log_evidence / max(1, output.metrics.generated_tokens)
    return f"log evidence {evidence:.2f} a token, and {FOREIGN:g}" if evidence < FOREIGN else None
