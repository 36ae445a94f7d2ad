"""The form of an answer on the command line: from options and files to a request, and refusals in its own words."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from smcjax.cli.form_options import add_form_options, check_form, form_from
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.structured.automaton_child import MAX_CALLS
from tests.cli.conftest import Command


def form(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_form_options(parser)
    return form_from(parser.parse_args(words))


def test_options(tmp_path: Path) -> None:
    assert form() is None
    assert form("--regex", "a+") == {"type": "regex", "regex": "a+"}
    assert form("--json-object") == {"type": "json_object"}
    (tmp_path / "s.json").write_text('{"type": "null"}')
    asked = form("--json-schema", str(tmp_path / "s.json"))
    assert asked == {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
    with pytest.raises(SystemExit):
        form("--json-object", "--regex", "a")
    file = tmp_path / "g.lark"
    file.write_text('start: "a"')
    assert form("--grammar", str(file)) == {"type": "grammar", "grammar": 'start: "a"'}
    assert form("--grammar", str(file), "--max-depth", "2")["max_depth"] == 2
    with pytest.raises(
        ValueError, match="--max-depth is 2, and there is no --grammar whose nesting it limits; give one"
    ):
        form("--regex", "a", "--max-depth", "2")
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(ValueError, match=r"s.json is no JSON \(Expecting .* in line 1\); mend it"):
        form("--json-schema", str(tmp_path / "s.json"))
    (tmp_path / "s.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is nested too deeply"):
        form("--json-schema", str(tmp_path / "s.json"))


def test_an_answer_and_refusals(smcjax: Command, models: list[str], tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    file = tmp_path / "s.json"
    file.write_text(json.dumps(schema))
    common = ("generate", "ab", *models[:2], *models[4:], "--decoding", "autoregressive")
    done = smcjax(*common, "--json-schema", str(file), "--max-tokens", "20")
    assert done.code == 0, done.err
    assert json.loads(done.out)["a"] in ("x", "y")
    rules = tmp_path / "g.gbnf"
    rules.write_text('root ::= "(" root ")" | "x"')
    done = smcjax(*common, "--grammar", str(rules), "--max-depth", "1", "--max-tokens", "20")
    assert done.code == 0, done.err
    assert done.out.strip() in ("x", "(x)")
    for words, said in (
        (("--json-schema", str(file), "--max-tokens", "3"), "and --max-tokens and --max-model-len leave 3"),
        (("--regex", "a", "--stop", "x"), "and the form of the answer says where an answer ends"),
        (("--grammar", str(rules), "--max-depth", "101"), "--max-depth must be an integer from 0 to 100, got 101"),
    ):
        refused = smcjax(*common, *words)
        assert refused.code == 2
        assert said in refused.err
        assert refused.err.strip().count("\n") == 0


BAD_FORMS = {
    "(a": "no regular expression that has an automaton ('(a': missing ), unterminated subpattern",
    "a{100000}": "has an automaton of over 32000 states; simplify it.",
    "[^\\s\\S]": "matches no text at all; mend it.",
}


def test_forms_are_read_before_models(
    smcjax: Command, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a file of requests, and before what reads them is asked for in vain."""
    monkeypatch.setattr("smcjax.engine.llm.LLM", lambda *arguments, **more: pytest.fail("a model is loaded"))
    (tmp_path / "s.json").write_text('{"type": "strin"}')
    (tmp_path / "g.lark").write_text("{")
    (tmp_path / "i.jsonl").write_text(
        '{"prompt": "a"}\n{"prompt": "a", "response_format": {"type": "regex", "regex": "("}}'
    )
    forms = [("--regex", regex) for regex in BAD_FORMS]
    forms += [("--json-schema", str(tmp_path / "s.json")), ("--grammar", str(tmp_path / "g.lark"))]
    said = [*BAD_FORMS.values(), "has a JSON schema that has the type 'strin'", "a grammar that goes beyond Lark's"]
    for form, words in zip(forms, said, strict=True):
        refused = smcjax("generate", "ab", *models, *form)
        assert refused.code == 2
        assert refused.err.startswith("smcjax: error: the form of the answer ")
        assert words in refused.err
        assert refused.err.count("\n") == 1
    refused = smcjax("generate", *models, "--input-file", str(tmp_path / "i.jsonl"))
    assert refused.code == 2
    assert "i.jsonl line 2: response_format is no regular expression" in refused.err
    (tmp_path / "g.lark").write_text('start: "a"')
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lark" else find(name))
    asked = {"prompt": "a", "response_format": {"type": "grammar", "grammar": 'start: "a"'}}
    (tmp_path / "i.jsonl").write_text(json.dumps(asked))
    for source in (["ab", "--grammar", str(tmp_path / "g.lark")], ["--input-file", str(tmp_path / "i.jsonl")]):
        refused = smcjax("generate", *models, *source)
        assert refused.code == 1, "the code of every missing extra"
        assert "the form of the answer needs lark, which is not installed; run 'uv run --extra struct" in refused.err


def test_a_form_of_much_nesting_is_read_like_in_the_process_that_compiles_it() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "null"}] * 300, "items": False}
    check_form(SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": schema}}))
    assert sys.getrecursionlimit() < MAX_CALLS
