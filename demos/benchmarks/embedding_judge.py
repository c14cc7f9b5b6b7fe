"""A stand-in for judges where there is no vision-language model: it compares grids by the embeddings of their images.

    python demos/benchmarks/embedding_judge.py --port 8123
    elude-steer reproduce judge … --judge toyland@http://127.0.0.1:8123/v1

A small server for this machine that speaks OpenAI's protocol. Of two grids of nine images it answers with the one whose
images are more alike: by the mean cosine of all pairs under a dual encoder, by default toyland's labeller. That is no
opinion of a vision-language model, and its results are no LLM rank: it shows that `reproduce judge` runs from end to
end, and agrees with whatever the encoder sees.
"""

import argparse
import base64
import io
import json
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from PIL import Image

from elude_steer.evaluation.measures.llm_judges import SIDE
from elude_steer.models.dual_encoder import DualEncoder, load_dual_encoder


@torch.inference_mode()
def measure_coherence(encoder: DualEncoder, grid: Image.Image) -> float:
    """The mean cosine of all pairs of a grid's images."""
    width, height = (size // SIDE for size in grid.size)
    corners = [(column * width, row * height) for row in range(SIDE) for column in range(SIDE)]
    vectors = encoder.embed_images([grid.crop((x, y, x + width, y + height)) for x, y in corners]).double()
    count = len(corners)
    return float((vectors.sum(0).square().sum() - vectors.square().sum()) / (count * (count - 1)))


def make_handler(encoder: DualEncoder) -> type[BaseHTTPRequestHandler]:
    """What answers the questions of one server."""

    @lru_cache(maxsize=4096)
    def coherence(address: str) -> float:
        data = base64.b64decode(address.partition(",")[2])
        return measure_coherence(encoder, Image.open(io.BytesIO(data)).convert("RGB"))

    def answer(body: dict[str, Any]) -> str:
        parts = [part for part in body["messages"][0]["content"] if "image_url" in part]
        one, other = (coherence(part["image_url"]["url"]) for part in parts)
        reasons = {"reason_a": f"mean cosine {one:.4f}", "reason_b": f"mean cosine {other:.4f}"}
        return json.dumps({**reasons, "answer": "A" if one > other else "B"})

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": answer(body)}
            choices = [{"index": 0, "finish_reason": "stop", "message": message}]
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
            text = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a run asks thousands of questions."""

    return Handler


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="toyland/labeller", help="a dual encoder")
    parser.add_argument("--port", type=int, default=8123)
    given = parser.parse_args()
    torch.set_num_threads(1)
    server = HTTPServer(("127.0.0.1", given.port), make_handler(load_dual_encoder(given.encoder)))
    print(f"http://127.0.0.1:{given.port}/v1", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
