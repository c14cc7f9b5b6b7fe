"""The demo as a Hugging Face Space: the page of `elude-steer demo` for toyland.

    python demos/app.py

A Space starts this file, and says by GRADIO_SERVER_NAME and GRADIO_SERVER_PORT where it wants the page; elsewhere it is
at http://127.0.0.1:7860, for this machine alone. Copy it there together with `requirements.txt`.
"""

# The README.md of the Space opens with:
#
# ---
# title: elude_steer
# emoji: 🧸
# colorFrom: indigo
# colorTo: gray
# sdk: gradio
# sdk_version: 6.31.0
# python_version: "3.12"
# app_file: app.py
# license: apache-2.0
# short_description: Name a concept, change what a model says of a picture
# ---

from elude_steer import Steerer
from elude_steer.demo import launch

launch.serve(Steerer.load("toyland"), browse=False)
