"""The pages of `elude-steer demo` as a Hugging Face Space, one for each atlas of the package, and an MCP server.

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
from elude_steer.atlas.manifest import list_shipped
from elude_steer.demo import launch

# Requests reach a Space through proxies with private addresses. Without their header, all visitors would count as one.
os.environ.setdefault("FORWARDED_ALLOW_IPS", "127.0.0.1,10.0.0.0/8")

steerers = [Steerer.load(name) for name in list_shipped()]
launch.serve(steerers, browse=False, mcp=True, gpu=spaces.GPU if spaces else None)
