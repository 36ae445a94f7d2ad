"""The process around a command: streams that are closed or go away, no home, Ctrl-C. One sentence, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A command that answers at once, run as the entry point runs it.
QUICK = """
import sys
from smcjax.cli import process
from smcjax.cli.commands import generate
def run(args):
    print("remark", file=sys.stderr)
    print("answer", flush=True)
    {more}
    return 0
generate.run = run
sys.argv = ["smcjax", "generate", "hello"]
sys.exit(process.main())
"""
SMALL = ["generate", "Tom has 3 apples.", "-N", "2", "-K", "2", "--max-tokens", "4"]


def quick(more: str = "") -> list[str]:
    return [sys.executable, "-c", QUICK.format(more=more)]


def ended(command: list[str], redirections: str = "", **kwargs: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    shell = ["bash", "-c", f'"$@" {redirections}', "bash", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=240, check=False, **kwargs)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def test_a_plugin_that_jax_cannot_use_is_one_line(tmp_path: Path) -> None:
    """As where the extras cuda12 and cuda13 are installed side by side: JAX logs a traceback for each."""
    for name in ("xla_one", "xla_two"):
        (tmp_path / "jax_plugins" / name).mkdir(parents=True)
        broken = 'def initialize():\n    raise RuntimeError("Unable to load cuDNN.\\nIs it installed?")\n'
        (tmp_path / "jax_plugins" / name / "__init__.py").write_text(broken)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code, out, err = ended([sys.executable, "-m", "smcjax", "doctor"], env=environment)
    assert code == 0
    assert out.startswith("ok    versions")
    lines = err.splitlines()
    assert len(lines) == 2
    for name, line in zip(("xla_one", "xla_two"), sorted(lines), strict=True):
        assert line.startswith("Jax plugin configuration error: Exception when calling jax_plugins.")
        assert line.endswith(
            f"{name}.initialize() (Unable to load cuDNN. Is it installed?); 'smcjax doctor' says more."
        )


def test_errors_that_xla_logs_are_not_shown() -> None:
    """As "Very slow compile?" two minutes into a program; here a dump of programs that XLA cannot write.

    Where the environment says which lines to show, that holds.
    """
    compiling = quick("import jax; jax.jit(lambda x: x + 1)(1)")
    environment = {**os.environ, "XLA_FLAGS": "--xla_dump_to=/proc/nowhere"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    assert ended(compiling, env=environment) == (0, "answer\n", "remark\n")
    code, out, err = ended(compiling, env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"})
    assert (code, out) == (0, "answer\n")
    assert "Could not create directory: /proc/nowhere" in err


CLOSED = "smcjax: error: standard output is closed; redirect it, to /dev/null if need be.\n"
FULL = "remark\nsmcjax: error: standard output cannot be written (No space left on device).\n"


@pytest.mark.parametrize(
    ("redirections", "expected"),
    [
        ("", (0, "answer\n", "remark\n")),
        ("<&-", (0, "answer\n", "remark\n")),
        ("2>&-", (0, "answer\n", "")),
        ("2>/dev/full", (0, "answer\n", "")),
        ("2> >(exec true)", (0, "answer\n", "")),
        (">&-", (1, "", CLOSED)),
        ("<&- >&-", (1, "", CLOSED)),
        ("<&- >&- 2>&-", (1, "", "")),
        (">/dev/full", (1, "", FULL)),
    ],
)
def test_streams_that_are_closed_or_full(redirections: str, expected: tuple[int, str, str]) -> None:
    assert ended(quick(), redirections) == expected


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    """A file opened while stderr is closed does not get descriptor 2, where XLA's messages would land in it."""
    assert ended(quick("import tempfile; assert tempfile.TemporaryFile().fileno() > 2"), "2>&- <&-") == (
        0,
        "answer\n",
        "",
    )


def test_a_reader_that_goes_away_in_between_is_no_traceback() -> None:
    more = "import time; time.sleep(0.5); print('x' * 100_000)"
    assert ended(quick(more), "| head -1; exit ${PIPESTATUS[0]}") == (1, "answer\n", "remark\n")


def smcjax(*argv: str) -> list[str]:
    return [sys.executable, "-m", "smcjax", *argv]


def test_chat_without_standard_input() -> None:
    code, out, err = ended(smcjax("chat"), "<&-")
    assert (code, out) == (1, "")
    assert err.startswith("smcjax: error: standard input is closed")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("text", "reason"), [(b"\n", "that is empty"), (b"caf\xe9", "must be utf-8 text, got byte 3")])
def test_a_prompt_from_standard_input_is_checked(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "prompt").write_bytes(text)
    code, out, err = ended(smcjax("generate", "-"), f"< {tmp_path / 'prompt'}")
    assert (code, out) == (2, "")
    assert reason in err
    assert len(err.splitlines()) == 1


def test_a_directory_that_is_gone() -> None:
    gone = f'd=$(mktemp -d); cd "$d"; rmdir "$d"; {sys.executable} -m smcjax generate hello'
    done = subprocess.run(["bash", "-c", gone], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "smcjax: error: the current directory no longer exists; change to another one.\n"


NO_HOME = """
import os, pwd
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
os.environ.pop("HOME", None); os.environ.pop("XDG_CACHE_HOME", None)
"""
CACHE = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import jax
from smcjax.engine.run.programs import enable_compilation_cache
enable_compilation_cache(); enable_compilation_cache()
print(jax.config.jax_compilation_cache_dir)
from smcjax.cli.main import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize("lack", ["no home", "no place"])
def test_without_a_place_for_compiled_programs_they_are_not_kept(tmp_path: Path, lack: str) -> None:
    (tmp_path / "file").touch()
    place = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    script = (NO_HOME if lack == "no home" else "") + CACHE
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, env=place
    )
    remark, directory, *report = done.stdout.splitlines()
    reason = "there is no home directory" if lack == "no home" else f"{tmp_path / 'file'}"
    assert remark.startswith(f"Compiled programs are not kept for the next start ({reason}")
    assert directory == "None"
    assert "note  compilation cache  none  (no place for it: every start compiles)" in report
    assert done.stderr == ""


def interrupted(command: list[str], moments: list[float], said: str = "") -> tuple[int, str, float]:
    """Exit code, stderr and the seconds that it took to end, of Ctrl-C so long after this line.

    Without a line they are counted from the thread on that listens: before, Python alone is there to take a Ctrl-C. The
    tests themselves may run in the background, where SIGINT is ignored and children inherit that.
    """
    command = ["env", "--default-signal=INT", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while said and process.stdout.readline().strip() not in (said, ""):
            pass
        while not said and process.poll() is None and len(os.listdir(f"/proc/{process.pid}/task")) == 1:
            time.sleep(0.01)
        for moment in moments:
            time.sleep(moment)
            sent = time.monotonic()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        return process.returncode, err, time.monotonic() - sent
    finally:
        process.kill()


OUTSIDE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


def test_ctrl_c_ends_what_does_not_return_to_python() -> None:
    """Ctrl-C ends C code that, like XLA's compiler, does not return to Python: here a hash that takes hours."""
    code, err, seconds = interrupted(quick(OUTSIDE), [0.3, 0.001], "answer")
    assert (code, err) == (130, "remark\nsmcjax: interrupted\n")
    assert seconds < 2  # 0.1 where nothing else runs


HELD = """from smcjax.tokenizer.files import _without_panic_messages
    with _without_panic_messages(): print("held", flush=True) or time.sleep(60)"""


def test_ctrl_c_says_its_word_while_stderr_is_held_back() -> None:
    """As where a tokenizer of a stranger is tried: what it writes to stderr goes to a file until it has ended."""
    command = [sys.executable, "-c", "import time\n" + QUICK.format(more=HELD)]
    code, err, seconds = interrupted(command, [0.1], "held")
    assert (code, err) == (130, "remark\nsmcjax: interrupted\n")
    assert seconds < 2


@pytest.mark.slow
@pytest.mark.parametrize("moments", [[0.0], [0.6], [3.4, 0.02]])
def test_ctrl_c_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: list[float]) -> None:
    """While JAX is imported, models are read, programs are compiled (none is there yet)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, err, seconds = interrupted(smcjax(*SMALL), moments)
    assert code == 130
    assert err.splitlines()[-1] == "smcjax: interrupted"
    assert err.count("interrupted") == 1
    assert "Traceback" not in err
    assert seconds < 2


def test_a_background_job_is_not_meant_by_ctrl_c() -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + QUICK.format(more="time.sleep(0.5)")
    code, err, _ = interrupted([sys.executable, "-c", "import time\n" + ignored], [0.1], "answer")
    assert (code, err) == (0, "remark\n")


SETTINGS = [
    ("JAX_DEBUG_NANS", "1", "FloatingPointError: "),
    ("JAX_DEBUG_NANS", "maybe", "invalid truth value 'maybe'"),
]
JAX = "import jax.numpy as n; n.int32(1) + n.ones(3, bool); n.ones((2, 3)) + n.ones(3); n.log(n.float32(-1))"


@pytest.mark.parametrize(("name", "value", "reason"), SETTINGS, ids=["=".join(each[:2]) for each in SETTINGS])
def test_a_debug_setting_of_jax_is_not_wrong_usage(name: str, value: str, reason: str) -> None:
    code, _, err = ended(quick(JAX), env={**os.environ, name: value})
    assert code == 1
    *_, last = err.splitlines()
    assert last.startswith("smcjax: error: ")
    assert reason in last
    assert f"(the environment sets {name}={value})" in last
    assert "Traceback" not in err
