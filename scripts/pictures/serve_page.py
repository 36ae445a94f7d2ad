"""Makes docs/images/serve_page.png: the server's page in Chromium, behind an answer of 16 particles.

.ci/browser FOLDER; NODE_PATH=FOLDER/node_modules uv run --extra serve python scripts/pictures/serve_page.py
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "serve_page.png"
DRIVER = Path(__file__).with_suffix(".cjs")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SERVER = ("-m", "smcjax", "serve", "-N", "16", "-K", "8", "--port", "0")


def photograph(url: str, file: Path, *, prompt: str, seed: int, max_tokens: int) -> None:
    """Asks the server's page and stores how it looks at the end, the genealogy at a quarter of the run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    told = (url, browser, str(file), prompt, str(seed), str(max_tokens))
    subprocess.run(["node", str(DRIVER), *told], check=True, timeout=900)


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the bundled pair for as long as the picture takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=10, help="of the answer (10)")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE, metavar="FILE", help="the PNG")
    args = parser.parse_args(argv)
    with subprocess.Popen([sys.executable, *SERVER], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"open (http\S+) in a browser", line)))
            photograph(url, args.output, prompt="One day Grace", seed=args.seed, max_tokens=128)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
