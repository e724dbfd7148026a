"""A server with OpenAI's streaming API that answers from a script, and keeps what it was sent."""

import contextlib
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Delta = dict[str, Any]
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 20},
}


class ChatServer:
    """`answers` are given one after the other: lists of deltas, or (status, body). `key`: what must
    be sent. With `holds` a stream stays open after its deltas, until its reader goes away."""

    def __init__(self) -> None:
        self.answers: list[list[Delta] | tuple[int, bytes]] = []
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.info: dict[str, Any] | None = {"has_image_understanding": True, "max_context": 500}
        self.not_ready: list[str] = []
        self.finish = "stop"
        self.holds = self.breaks = False
        self.left = threading.Event()
        """Set when a reader went away."""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Generator["ChatServer"]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if not self._knows_key():
                return
            if self.path == "/v1/models":
                self._json(200, {"data": [{"id": "scripted", "max_model_len": 400}]})
            elif self.path == "/health/ready" and server.not_ready:
                self._json(503, {"status": "unavailable", "reason": server.not_ready.pop(0)})
            elif self.path == "/get_model_info" and server.info is not None:
                self._json(200, server.info)
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self._knows_key():
                return
            assert self.path == "/v1/chat/completions"
            server.bodies.append(json.loads(body))
            answer = server.answers.pop(0)
            if isinstance(answer, tuple):
                self._send(answer[0], answer[1])
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the reader may go away
                self._stream(answer)

        def _stream(self, deltas: list[Delta]) -> None:
            for delta in ({"role": "assistant", "content": ""}, *deltas):
                error = delta.get("error")
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                self._event({"error": error} if error else {"choices": [choice]})
            if server.holds:
                self.connection.settimeout(60)
                assert self.rfile.read(1) == b""
                server.left.set()
            elif not server.breaks:
                end = {"index": 0, "delta": {}, "finish_reason": server.finish}
                self._event({"choices": [end], "usage": None})
                self._event({"choices": [], "usage": USAGE})
                self.wfile.write(b": a comment\r\n\r\ndata: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def _knows_key(self) -> bool:
            sent = self.headers.get("Authorization")
            if server.key is not None and sent != f"Bearer {server.key}":
                self._json(401, {"error": {"message": "wrong key"}})
                return False
            return True

        def _json(self, status: int, content: dict[str, Any]) -> None:
            self._send(status, json.dumps(content).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
