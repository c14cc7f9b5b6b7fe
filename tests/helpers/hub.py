"""A local server with the parts of the Hub's protocol that uploading and downloading a small repository need."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    root: Path

    def log_message(self, *_):
        pass

    def _answer(self, code, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            sent = b""
            while size := int(self.rfile.readline(), 16):
                sent += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        base = f"http://{self.headers['Host']}"
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            self._answer(200, {"url": f"{base}/me/small", "name": "me/small", "id": "1"})
        elif path.endswith("/preupload/main"):
            files = json.loads(sent)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self._answer(200, {"files": modes})
        elif "/commit/" in path:
            repo = self.root / "/".join(path.split("/")[3:5])
            repo.mkdir(parents=True, exist_ok=True)
            for line in sent.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    (repo / entry["value"]["path"]).parent.mkdir(parents=True, exist_ok=True)
                    (repo / entry["value"]["path"]).write_bytes(base64.b64decode(entry["value"]["content"]))
            url = f"{base}/{repo.relative_to(self.root)}"
            self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{url}/commit/{COMMIT}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        else:
            self._answer(404)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = self.root / parts[2] / parts[3]
            if not repo.is_dir():
                self._answer(404, X_Error_Code="RepoNotFound")
                return
            if "tree" in parts:
                self._answer(
                    200,
                    [
                        {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _etag(p)}
                        for p in repo.iterdir()
                    ],
                )
            else:
                siblings = [{"rfilename": p.name} for p in repo.iterdir()]
                self._answer(200, {"id": f"{parts[2]}/{parts[3]}", "sha": COMMIT, "siblings": siblings})
        else:
            path = self.root / parts[0] / parts[1] / parts[-1]
            if path.is_file():
                self._answer(200, path.read_bytes(), ETag=f'"{_etag(path)}"')
            else:
                self._answer(404, X_Error_Code="EntryNotFound")

    def do_HEAD(self):
        self.do_GET()


def _etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve_hub(root: Path):
    """Serve the repositories below `root` and yield the address."""
    handler = type("Hub", (_Hub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
