"""A small server that speaks the protocol of judges."""

import contextlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Replies with what `reply(model, first, second, count)` returns: a text, a status, or the whole body as bytes."""

    def __init__(self, reply):
        self.reply, self.asked, self.bodies = reply, Counter(), []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                images = [part["image_url"]["url"] for part in body["messages"][0]["content"] if "image_url" in part]
                owner.bodies.append(body)
                owner.asked[(body["model"], *images)] += 1
                result = owner.reply(body["model"], *images, sum(owner.asked.values()))
                status = result if isinstance(result, int) else 200
                content = None if isinstance(result, bytes) else result
                text = json.dumps(
                    {"error": {"message": "no"}}
                    if status != 200
                    else {
                        "id": "1",
                        "object": "chat.completion",
                        "created": 0,
                        "model": body["model"],
                        "choices": [
                            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
                        ],
                    }
                ).encode()
                text, kind = (result, "text/html") if isinstance(result, bytes) else (text, "application/json")
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client may have gone
                    self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def answer(letter):
    """A reply that chooses a grid."""
    return json.dumps({"reason_a": "x", "reason_b": "y", "answer": letter})
