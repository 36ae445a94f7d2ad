"""A process that asks a server without pause, and prints each wait: of /health, of a plain request, and of a control
(`--control`), which computes for `WORK_SECONDS` each time; what it takes beyond these is the machine's doing. The
process imports little, so that it is awake as soon as the machine lets it.

    python -I -S watcher.py --control                    listens; prints its port
    python -I -S watcher.py PORT CONTROL_PORT PROMPT     prints "name began seconds status", a line an answer
"""

import json
import socket
import sys
import threading
import time

WORK_SECONDS = 0.1  # of a processor
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
PLAIN = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)


def control() -> None:
    """Answers whatever comes, after some work."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client = listening.accept()[0]
            begin = time.thread_time()
            while time.thread_time() < begin + WORK_SECONDS:
                pass
            with client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


def watch(name: str, port: int, asked: bytes, pause: float) -> None:
    """Asks again and again."""
    while True:
        began, answer = time.time(), b""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=100) as client:
                client.sendall(asked)
                while piece := client.recv(1 << 16):
                    answer += piece
        except OSError as error:
            answer = answer or f"- {type(error).__name__}".encode()
        sys.stdout.write(f"{name} {began} {time.time() - began} {answer.split()[1].decode() if answer else 'none'}\n")
        sys.stdout.flush()
        time.sleep(pause)


def main() -> None:
    """Watches until the process is ended."""
    port, other, prompt = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "seed": 1}).encode()
    for name, at, asked, pause in (
        ("health", port, HEALTH, 0.02),
        ("control", other, HEALTH, 0.4),
        ("plain", port, PLAIN % (len(body), body), 0.05),
    ):
        threading.Thread(target=watch, args=(name, at, asked, pause)).start()


if __name__ == "__main__":
    control() if sys.argv[1] == "--control" else main()
