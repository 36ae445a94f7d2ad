"""Wrong usage and failures on the command line: exit codes, one line on stderr, no traceback unless --debug."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smcjax import LLM, SMC
from smcjax.bench import shapes
from smcjax.cli import bench_options, main, options
from smcjax.cli.commands import generate
from smcjax.engine.requests.sampling_params import MAX_SEED
from smcjax.model.files.checkpoint import weights_dtype
from smcjax.quantization import QUANTIZATIONS, check_quantization
from tests.checkpoints import Pair
from tests.cli.conftest import Command, Result

GENERATE = ["generate", "hello", "--max-tokens", "3"]
WRITTEN = [*GENERATE, "--decoding"]
BENCH = ["bench", "cycle", "--target-shape", "tiny-target", "--draft-shape", "tiny-draft"]

USAGE: list[tuple[list[str], str]] = [
    (
        ["frobnicate"],
        "'frobnicate' is not one of generate, chat, serve, eval, bench, profile, tune-draft, tune-twist, viz, doctor; "
        "see smcjax --help",
    ),
    (["generat", "hello"], "did you mean generate? See smcjax --help."),
    (["--verison"], "unrecognized option --verison; did you mean --version?"),
    ([*GENERATE, "another"], "another"),
    ([*GENERATE, "--best-of", "3"], "unrecognized option --best-of; see smcjax generate --help."),
    ([*GENERATE, "--temprature=0.5"], "unrecognized option --temprature; did you mean --temperature?"),
    (["generate", "--hlep"], "did you mean --help?"),
    (["bench", "cycle", "--gama", "3"], "did you mean --gamma? See smcjax bench cycle --help."),
    ([*GENERATE, "-x"], "unrecognized arguments: -x; see smcjax generate --help."),
    ([*GENERATE, "--max-tokens", "4"], "argument --max-tokens: given twice"),
    ([*GENERATE, "-N", "3", "--n-particles", "4"], "argument -N/--n-particles: given twice"),
    ([*GENERATE, "--max-tok", "3"], "--max-tok"),
    ([*GENERATE, "-N", "eight"], "-N/--n-particles"),
    ([*GENERATE, "-N", "0"], "error: --n-particles must be a whole number from 1 to 1024"),
    ([*GENERATE, "--temperature", "nan"], "error: --temperature must be 0 (greedy) or from 0.001 to 1000, got nan"),
    ([*GENERATE, "--decoding", "smc", "--temperature", "0"], "use --decoding rejection or autoregressive, whose"),
    ([*WRITTEN, "SMC(draft_temperature=0)"], "draft_temperature must be a number from 0.01 to 1000, or be left out"),
    ([*GENERATE, "--control", "2"], "--control must be a number from 0 to 1"),
    ([*GENERATE, "--decoding", "rejection", "--control", "1"], "--control is an option of --decoding smc"),
    ([*WRITTEN, "SMC(selct='best')"], "SMC has no argument selct; did you mean select?"),
    ([*WRITTEN, "SMC(gamma=2)", "-K", "3"], "--gamma is given and --decoding says it too; leave one of them out."),
    ([*WRITTEN, "SMC(8)"], "argument --decoding: must have its options as name=value, got '8' without a name; see"),
    ([*WRITTEN, "SMC(select=print)"], "has select='print', which is no literal of Python; give a number, a text"),
    (["eval", "--context", "512"], "--context is an option of --task recall, got --task words; leave it out."),
    (["eval", "--task", "recal"], "did you mean recall?"),
    (["eval", "--task", "recall", "--model", "m", "--context", "100"], "--context must be at least 256"),
    ([*GENERATE, "--draft-quantization", "q4"], "is not one of int8, float8"),
    ([*WRITTEN, "Rejection(tree=(4, 2))", "-K", "4"], "--gamma is 4 and the tree is 2 deep; leave --gamma out."),
    ([*WRITTEN, "Rejection(tree=(4, 2))", "-N", "2"], "--n-particles is 2 and a tree drafts for one row"),
    ([*WRITTEN, "SMC(sparse=SparseVerification(schedule=2))"], "this target has no layer that selects any; leave it"),
    ([*GENERATE, "--seed", "9" * 5000], "--seed: must be a whole number from 0 to 4294967295, got 9999"),
    (["generate", "hello", "--max-tokens", "0"], "--max-tokens must be a whole number of at least 1, got"),
    ([*GENERATE, "--decoding", "beam"], "--decoding"),
    ([*GENERATE, "--decoding", "auto", "-N", "2", "--temperature", "0"], "--temperature is 0, where every draft"),
    ([*GENERATE, "--decoding", "autoregressive", "--power", "2"], "--power is an option of --decoding smc"),
    ([*GENERATE, "--decoding", "autoregressive", "--trace", "x.json"], "--trace needs a population"),
    ([*GENERATE, "--trace", "/no/such/place/x.json"], "--trace must lie in a directory"),
    ([*GENERATE, "--trace", "/dev/null"], "--trace must be a file, got '/dev/null', which is none"),
    ([*GENERATE, "--stop", ""], "argument --stop: must not be empty"),
    ([*GENERATE, "--input-file", "x"], "prompt and --input-file are given, each with what to answer; leave one"),
    (["generate", "--input-file", "/no/such/file"], "--input-file /no/such/file cannot be read (No such file"),
    (["generate", "--input-file", "x", "--output-file", "/no/such/place/y"], "--output-file must lie in a directory"),
    (["generate", "--input-file", __file__, "--output-file", __file__], "--output-file must not be the file that is"),
    (["profile", "--input-file", __file__, "--output", __file__], "--output must not be the file that is read, got"),
    (["generate", "--input-file", "x", "--trace", "y"], "--trace is of one prompt, got --input-file; leave one of"),
    ([*GENERATE, "--output-file", "x"], "--output-file goes with --input-file, which is not given; leave it out."),
    ([*GENERATE, "--max-num-seqs", "2"], "--max-num-seqs goes with --input-file"),
    (["generate", ""], "argument prompt: must not be empty; give at least one character"),
    (["generate", "a" * 5000], "has 5000 tokens"),
    (["generate", "caf\udce9"], "must be valid Unicode, got a byte of another encoding at position 3"),
    (["eval", "-n", "0"], "argument -n/--num-problems: must be a whole number from 1 to 1000000, got 0"),
    (["bench", "width"], "'width'"),
    ([*BENCH, "--requests", "0"], "--requests: must be"),
    ([*BENCH, "--context", "2000"], "context 2000"),
    ([*BENCH, "--bandwidth", "nan"], "--bandwidth: must be a number above 0 and at most 1e+06"),
    ([*BENCH, "--target-shape", "gpt-9"], "'gpt-9' is not one of llama-3.2-1b"),
    ([*BENCH, "--implementation", "mosaic"], "--implementation mosaic needs a Hopper GPU"),
    ([*GENERATE, "--implementation", "triton"], "implementation triton needs an NVIDIA GPU of compute capability 8.0"),
]


def assert_one_sentence(result: Result) -> None:
    """Whatever was logged before (loading takes a while), the error is the last line and there is no traceback."""
    *_, last = result.err.splitlines()
    assert last.startswith("smcjax: error: ")
    assert "Traceback" not in result.err
    assert result.err.count("smcjax: error") == 1
    assert result.out == ""


@pytest.mark.parametrize(("argv", "reason"), USAGE, ids=[" ".join(argv)[-50:] for argv, _ in USAGE])
def test_wrong_usage_is_2(smcjax: Command, models: list[str], argv: list[str], reason: str) -> None:
    if argv[:1] in (["generate"], ["eval"]):
        options = {name: value for name, value in zip(models[::2], models[1::2], strict=True) if name not in argv}
        argv = [*argv, *(word for option in options.items() for word in option)]
    result = smcjax(*argv)
    assert result.code == 2
    assert reason in result.err
    assert_one_sentence(result)


def broken(pair: Pair, directory: Path, kind: str) -> str:
    if kind == "missing":
        return str(directory / "nothing")
    if kind == "hub":
        return "no-such-org/no-such-model"
    shutil.copytree(pair.target, directory / kind)
    weights = directory / kind / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif kind == "pickle":
        weights.rename(weights.with_name("pytorch_model.bin"))
    else:
        (directory / kind / "config.json").write_text("{")
    return str(directory / kind)


def test_a_task_has_no_target_for_somebody_elses_draft(smcjax: Command) -> None:
    result = smcjax("eval", "--task", "recall", "--draft-model", "smollm2")
    assert (result.code, result.out) == (2, "")
    assert "--draft-model is given and --model is not; give both" in result.err
    assert_one_sentence(result)


@pytest.mark.parametrize(
    ("kind", "command"),
    [*((kind, "generate") for kind in ("hub", "truncated", "pickle", "corrupt")), ("missing", "eval"), ("hub", "chat")],
)
def test_a_directory_that_cannot_be_used_is_1(
    smcjax: Command, pair: Pair, tmp_path: Path, kind: str, command: str
) -> None:
    path = broken(pair, tmp_path, kind)
    prompt = ["hello"] if command == "generate" else []
    for models in (["--model", path, "--draft-model", pair.draft], ["--model", pair.target, "--draft-model", path]):
        result = smcjax(command, *prompt, *models)
        assert result.code == 1
        assert_one_sentence(result)
        assert path in result.err


def test_half_a_pair(smcjax: Command, pair: Pair) -> None:
    for option, other in (("--model", "--draft-model"), ("--draft-model", "--model")):
        result = smcjax(*GENERATE, option, pair.target, "--decoding", "smc")
        assert result.code == 2
        assert f"{other} is not" in result.err
    assert "--model is not" in smcjax(*GENERATE, "--draft-model", pair.target).err
    few = smcjax(*GENERATE, "-N", "4", "--model", pair.target)
    assert "--n-particles is an option of --decoding smc, which needs a draft; give --draft-model" in few.err
    assert "this decoder drafts" in smcjax(*GENERATE, "--model", pair.target, "--trace", "t.json").err


@pytest.mark.parametrize("argv", [["--debug", *GENERATE], [*GENERATE, "--debug"]])
def test_debug_keeps_the_traceback(smcjax: Command, argv: list[str]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        smcjax(*argv, "--model", "/nowhere", "--draft-model", "/nowhere")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (FloatingPointError("invalid value (nan) encountered in jit(step)"), 1),
        (KeyError("x"), 1),
        (AssertionError(), 1),
        (ValueError("of a library, so not of an argument"), 1),
        (RuntimeError("RESOURCE_EXHAUSTED: out\nof   memory"), 1),
        (MemoryError(), 1),
        (OSError(28, "No space left"), 1),
        (ValueError("x" * 10_000), 1),
    ],
)
def test_whatever_fails_ends_in_one_line(
    smcjax: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(generate, "run", fail)
    result = smcjax("generate", "hello")
    assert result.code == code
    assert len(result.err.splitlines()) == 1
    assert len(result.err) < 600


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["eval"], ["bench", "cycle"], ["viz"]])
def test_help(smcjax: Command, command: list[str]) -> None:
    result = smcjax(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: smcjax")


def run_python(code: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload]
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, **kwargs
    )


def test_help_is_fast_because_jax_is_not_imported() -> None:
    code = (
        "import sys; from smcjax.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'transformers', 'matplotlib', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    result = run_python(code)
    assert result.stderr.strip() == "[]"
    assert "usage: smcjax" in result.stdout


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """A command whose stdout has lost its reader, like in `smcjax … | head -1`, exits with 1 and an empty stderr."""
    code = (
        "import sys; from smcjax.cli.commands import generate\n"
        "def run(args):\n"
        "    for _ in range(5): print('x' * 10000)\n"
        "    return 0\n"
        "generate.run = run\n"
        "from smcjax.cli.main import main; sys.exit(main(['generate', 'hello']))"
    )
    for write_later in (False, True):
        script = code.replace("'x' * 10000", "'x'") if write_later else code  # small output fails at the flush only
        read_end, write_end = os.pipe()
        os.close(read_end)
        process = subprocess.run(
            [sys.executable, "-c", script],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        os.close(write_end)
        assert process.stderr == ""
        assert process.returncode == 1


def test_an_ascii_terminal_still_gets_its_answer() -> None:
    code = (
        "import sys; from smcjax.cli.commands import generate\n"
        "generate.run = lambda args: print('caf\\u00e9') or 0\n"
        "from smcjax.cli.main import main; sys.exit(main(['generate', 'hello']))"
    )
    result = run_python(code, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stdout) == (0, "caf?\n")


def test_arguments_are_refused_before_jax_is_imported() -> None:
    """Neither does the time that takes pass, nor is anything read: all of them in one process."""
    needs_jax = ("--implementation", "--context")  # what the machine is, and what a case needs
    of_target = [*WRITTEN, "SMC(sparse=SparseVerification(schedule=2))"]  # what its layers are
    argvs = [argv for argv, _ in USAGE if argv[-1] != "a" * 5000 and not {*needs_jax} & {*argv} and argv != of_target]
    argvs += [[*GENERATE, "--model", path, "--draft-model", "/"] for path in NOWHERE]
    argvs += [
        [*GENERATE, "--decoding", "smc", "--model", "org/name"],
        ["bench", "cycle", "--compare", "--decoding", "rejection"],
        ["bench", "cycle", "--compare", "--decoding", "SMC(defer_bonus=False)"],
    ]
    argvs += [["bench", "cycle", "--compare", "--attention", "nsa"]]
    assert len(argvs) > 50
    code = (
        "import json, sys; from smcjax.cli.main import main\n"
        "for argv in json.load(sys.stdin):\n"
        "    try: code = main(argv)\n"
        "    except SystemExit as ended: code = ended.code\n"
        "    if code not in (1, 2) or 'jax' in sys.modules: sys.exit(f'{argv} gave {code}')\n"
    )
    result = run_python(code, input=json.dumps(argvs))
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == len(argvs)


NOWHERE = ("/no/such/place", "./nothing", "~nosuchuser", "~/no/such/place", "a/b/c", "/etc/passwd/x")


@pytest.mark.parametrize("path", NOWHERE)
def test_a_path_that_leads_nowhere_is_named(smcjax: Command, path: str) -> None:
    for models in (["--model", path, "--draft-model", "/"], ["--model", "/", "--draft-model", path]):
        result = smcjax(*GENERATE, *models)
        assert result.code == 1
        assert f" {path} does not exist" in result.err
        assert_one_sentence(result)


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_without_a_command_the_help_is_shown(smcjax: Command, command: list[str]) -> None:
    result = smcjax(*command)
    assert (result.code, result.err) == (0, "")
    assert result.out == smcjax(*command, "--help").out


def test_choices_are_those_of_the_library(pair: Pair) -> None:
    """The library takes every choice of the command line, and both refuse values outside of the library's ranges."""
    assert set(bench_options.SHAPES) == set(shapes.SHAPES)
    assert set(bench_options.ATTENTIONS) == set(shapes.ATTENTIONS)
    assert tuple(QUANTIZATIONS) == options.QUANTIZATIONS
    for quantization in options.QUANTIZATIONS:
        check_quantization("quantization", quantization)
    for dtype in options.DTYPES:
        weights_dtype(dtype)
    asked: dict[str, list[object]] = {
        "dtype": ["float16", "int8"],
        "quantization": ["int4"],
        "admission": ["never"],
        "implementation": ["mosaic"],
        "max_model_len": [1, (1 << 20) + 1],
        "page_size": [0, 129],
        "num_pages": [1, (1 << 30) + 1],
        "max_num_seqs": [0, 4097],
        "seed": [-1, MAX_SEED + 1],
    }
    parser = main.make_parser()
    for name, wrong in asked.items():
        for value in wrong:
            with pytest.raises(ValueError, match=name):
                LLM(pair.target, draft_model=pair.draft, **{name: value})
            with pytest.raises(SystemExit):
                parser.parse_args(["serve", f"--{name.replace('_', '-')}", str(value)])
    for argv in (
        *(["--admission", admission] for admission in options.ADMISSIONS),
        *(["--max-model-len", str(length)] for length in (2, 1 << 20)),
        *(["--page-size", str(size)] for size in (1, 128)),
        *(["--num-pages", str(pages)] for pages in (2, 1 << 30)),
        *(["--max-num-seqs", str(batch)] for batch in (1, 4096)),
        *(["--seed", str(seed)] for seed in (0, MAX_SEED)),
    ):
        parser.parse_args(["serve", *argv])


def test_stop_strings_at_another_power_are_left_to_who_knows_the_tokenizer() -> None:
    """A stop string may name a special token, which is exact at any power; other options are checked at once."""
    parser = argparse.ArgumentParser()
    options.add_sampling_options(parser, max_tokens=8)
    powered = SMC(power=2.0)
    params = options.sampling_from(parser.parse_args(["--stop", "<|im_end|>"]), powered)
    assert params.stop_strings == ("<|im_end|>",)
    with pytest.raises(ValueError, match="temperature is 0"):
        options.sampling_from(parser.parse_args(["--stop", "x", "--temperature", "0"]), powered)
