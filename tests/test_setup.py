"""`setup.sh`: uv comes by pip, by a virtual environment's pip, or is there; else the last command's message stands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "setup.sh"
UV = "#!/bin/sh\necho uv 1\n"
# Stands for a Python: `pip` and `venv` are "yes", or what they say as they fail.
PYTHON = """#!/bin/sh
echo "$*" >> asked
put() {{ mkdir -p .uv/bin && cp uv.sh .uv/bin/uv && chmod +x .uv/bin/uv; }}
case "$*" in
    "-m pip install --quiet --target .uv uv") [ "{pip}" = yes ] || {{ echo "{pip}" >&2; exit 1; }}; put;;
    "-m venv .uv") [ "{venv}" = yes ] || {{ echo "{venv}" >&2; exit 1; }}; mkdir -p .uv/bin; cp python3 .uv/bin/python;;
    "-m pip install --quiet uv") put;;
esac
"""


@pytest.mark.parametrize(
    ("there", "pip", "venv", "asked"),
    [
        (True, "yes", "yes", 0),
        (False, "yes", "no venv", 1),
        (False, "no pip", "yes", 3),
        (False, "no pip", "no venv", 2),
    ],
)
def test_uv_is_found_or_installed(there: bool, pip: str, venv: str, asked: int, tmp_path: Path) -> None:
    (tmp_path / "uv.sh").write_text(UV)
    for name, text in {"python3": PYTHON.format(pip=pip, venv=venv), **({"uv": UV} if there else {})}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "asked").touch()
    command = ["/bin/sh", "-euc", f". {SETUP} && uv"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert len((tmp_path / "asked").read_text().splitlines()) == asked
    if asked == 2:
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "no venv\n")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "uv 1\n", "")
