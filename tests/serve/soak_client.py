"""Clients in a process that a soak kills: `python soak_client.py URL '[{"path": …, "body": …, "pause": …}, …]'`.

Each request has a thread and a connection; what became of it is one JSON line on standard output.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any


def ask(url: str, path: str, body: dict[str, Any], pause: float = 0.0) -> dict[str, Any]:
    """Send a request and hear it out.

    Args:
        url: of the server.
        path: of the endpoint.
        body: of the request; `stream` is read event by event.
        pause: seconds between two events, as of somebody who reads slowly.

    Returns:
        status: of HTTP, 0 = no answer.
        ids: choice -> the tokens that arrived.
        whole: whether the answer came to its end.
        code, retry_after: of an error.
        cached: prompt tokens that the server has skipped.
    """
    heard: dict[str, Any] = {"status": 0, "ids": {}, "whole": False, "code": None, "retry_after": None, "cached": 0}
    host, _, port = url.rpartition("/")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        heard["status"], heard["retry_after"] = response.status, response.headers.get("retry-after")
        if response.status != 200 or not body.get("stream"):
            _hear(json.loads(response.read()), heard)
            heard["whole"] = response.status == 200
            return heard
        for line in response:
            if line == b"data: [DONE]\n":
                heard["whole"] = True
            elif line.startswith(b"data: "):
                _hear(json.loads(line[6:]), heard)
                time.sleep(pause)
    except (OSError, http.client.HTTPException, ValueError):
        heard["status"] = heard["status"] if heard["ids"] else 0
    finally:
        connection.close()
    return heard


def _hear(value: dict[str, Any], heard: dict[str, Any]) -> None:
    if "error" in value:
        heard["code"] = value["error"]["code"]
    for choice in value.get("choices", ()):
        heard["ids"].setdefault(str(choice["index"]), []).extend(choice.get("token_ids") or ())
    if value.get("usage"):
        heard["cached"] = value["usage"]["prompt_tokens_details"]["cached_tokens"]


def main(url: str, requests: list[dict[str, Any]]) -> None:
    """Ask everything at once."""

    def one(number: int) -> None:
        heard = ask(url, **requests[number])
        sys.stdout.write(json.dumps({"number": number} | heard) + "\n")
        sys.stdout.flush()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
