"""Starts `smcjax serve`, and asks it by the official OpenAI client. It needs the extra `serve` and `openai`."""

import socket
import subprocess
import sys
import time

import httpx
import openai

QUESTION = "Tom has 12 apples. He gives 7 apples to Mia. How many apples does Tom have now?"


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "smcjax", "serve", "--port", str(port)])
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        model = client.models.list().data[0].id
        reply = client.completions.create(model=model, prompt=QUESTION, max_tokens=96, seed=1)
        print(reply.choices[0].text.strip())
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str, server: subprocess.Popen) -> None:
    """Returns once the address answers; raises RuntimeError if the server ends before."""
    while server.poll() is None:
        try:
            httpx.get(address).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"The server ended with exit code {server.returncode}.")


if __name__ == "__main__":
    main()
