"""Many requests from a file: JSONL in, JSONL out, a line each and in order.

A line of input is an object with "prompt" (text) or "messages" (a conversation, through the chat template), and
optionally "id" and the fields of `SamplingParams` in `FIELDS`, which override the command's options. A line of output:

    {"id": …, "text": …, "finish_reason": …, "prompt_tokens": …, "generated_tokens": …, "decoding": …,
     "log_evidence": …}

with "id" the line's number where there was none, "log_evidence" and perhaps "warning" where there is a population, and
"error" where the request failed as it ran.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from smcjax.auto import Choice
from smcjax.checks import did_you_mean, is_unicode, short
from smcjax.cli.failures import InputLineError, refuses
from smcjax.cli.form_options import check_form
from smcjax.cli.stdin import read_file, read_stdin
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.errors import ExtraMissing
from smcjax.files import MIB, write_atomically

if TYPE_CHECKING:
    from smcjax.engine.llm import LLM
    from smcjax.engine.requests.requests import Prompt
    from smcjax.engine.results.outputs import RequestOutput

INPUT_BYTES = 1024 * MIB  # of a file, at most
FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "control", "response_format"),
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One request: where it stands, and what it asks."""

    number: int  # in the file, from 1
    id: str | int
    content: str | list[dict[str, Any]]  # a prompt, or messages
    params: SamplingParams


def read_lines(path: str, params: SamplingParams, decoding: Choice, *, option: str = "--input-file") -> list[Line]:
    """The requests of the file that `option` names, "-" for standard input, with `params` where a line says no more.

    Raises ValueError for a file that cannot be read or holds none, and its kind InputLineError, with the line's number,
    for a request that `decoding` cannot run.
    """
    text = read_stdin(f"{option} -") if path == "-" else read_file(option, path, INPUT_BYTES)
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(_line(number, line, params, decoding))
            except ExtraMissing:  # which is not the line's fault
                raise
            except ValueError as error:
                raise InputLineError(f"{option} {path} line {number}: {error}") from None
    if not lines:
        raise ValueError(f"{option} {path} holds no request; write one a line.")
    return lines


def _line(number: int, line: str, params: SamplingParams, decoding: Choice) -> Line:
    try:
        asked = json.loads(line, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error.msg} at character {error.colno}); write one object.") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply; write one flat object.") from None
    if not isinstance(asked, dict):
        raise ValueError(f"it must be an object, got {short(asked)}.")
    unknown = sorted({*asked} - {"prompt", "messages", "id", *FIELDS})
    if unknown:
        known = ("prompt", "messages", "id", *FIELDS)
        listed = did_you_mean(unknown[0], known) or f", and {', '.join(known)} are known."
        raise ValueError(f"it has the unknown field {short(unknown[0])}{listed}")
    if ("prompt" in asked) == ("messages" in asked):
        raise ValueError("it must have one of prompt and messages; give one, and only one.")
    name = asked.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f"id must be text or a whole number, got {short(name)}.")
    content: Any = asked.get("prompt", asked.get("messages"))
    if "prompt" in asked:
        _check_prompt(content)
    else:
        _check_messages(content)
    chosen = {field: value for field, value in asked.items() if field in FIELDS}
    own = dataclasses.replace(params, **chosen)
    decoding.check(dataclasses.replace(own, stop=None))
    check_form(own)
    return Line(number, name, content, own)


def _check_prompt(prompt: object) -> None:
    if not isinstance(prompt, str) or not prompt or not is_unicode(prompt):
        raise ValueError(f"prompt must be valid Unicode of at least one character, got {short(prompt)}.")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of objects with role and content, got {short(messages)}.")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages must be objects with role and content, got {short(message)}.")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}, which is no JSON; write a number.")


def answer_lines(llm: LLM, path: str, lines: list[Line], *, progress: bool) -> list[RequestOutput]:
    """Answers the requests, side by side. Raises InputLineError for one that the model cannot take."""
    prompts: list[Prompt] = []
    for line in lines:
        try:
            prompts.append(line.content if isinstance(line.content, str) else llm.chat_prompt(line.content))
        except ValueError as error:
            raise InputLineError(f"--input-file {path} line {line.number}: {error}") from None
    try:
        return llm.generate(prompts, [line.params for line in lines], use_tqdm=progress)
    except ValueError as error:
        named = re.match(r"request (\d+): ", str(error))
        if named is None or not refuses(error):
            raise
        number = lines[int(named[1])].number
        raise InputLineError(f"--input-file {path} line {number}: {str(error)[named.end() :]}") from None


def write_results(path: str | None, lines: list[Line], outputs: list[RequestOutput]) -> None:
    """Writes a line for each request, to standard output or to a file, which is never half there."""
    text = "".join(json.dumps(_result(*each), ensure_ascii=False) + "\n" for each in zip(lines, outputs, strict=True))
    if path is None:
        sys.stdout.write(text)
        return
    write_atomically(path, text.encode(errors="replace"))


def _result(line: Line, output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    result: dict[str, Any] = {
        "id": line.id,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "generated_tokens": output.metrics.generated_tokens,
        "decoding": output.decoding,
    }
    if output.smc is not None and output.error is None:
        result["log_evidence"] = output.smc.log_evidence
        if output.smc.warning is not None:
            result["warning"] = output.smc.warning
    if output.error is not None:
        result["error"] = output.error
    return result
