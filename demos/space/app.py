"""The page of `elude-steer demo` for toyland as a Hugging Face Space, with its functions as an MCP server.

    python demos/space/app.py

`demos/publish_space.py` uploads it. A Space sets GRADIO_SERVER_NAME and GRADIO_SERVER_PORT; without them the page is at
http://127.0.0.1:7860, for this machine only.
"""

import os

try:
    import spaces  # first, because on ZeroGPU it replaces parts of torch
except ImportError:
    spaces = None

from elude_steer import Steerer
from elude_steer.demo import launch

# Requests reach a Space through proxies with private addresses. Without their header, all visitors would count as one.
os.environ.setdefault("FORWARDED_ALLOW_IPS", "127.0.0.1,10.0.0.0/8")

launch.serve(Steerer.load("toyland"), browse=False, mcp=True, gpu=spaces.GPU if spaces else None)
