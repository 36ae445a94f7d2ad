# Sourced (`. ./setup.sh`): puts uv on this shell's PATH, and where there is none installs it into .uv beside this file.
# Nothing else changes, so that Pythons which a distribution manages allow it. pip installs it, or a new environment's.
PATH=$PWD/.uv/bin:${HOME:-}/.local/bin:$PATH
uv --version >/dev/null 2>&1 ||
    python3 -m pip install --quiet --target .uv uv 2>/dev/null ||
    { python3 -m venv .uv && .uv/bin/python -m pip install --quiet uv; }
