"""The page of `elude-steer demo` for toyland as a Hugging Face Space.

    python demos/app.py

Copy this file and `requirements.txt` into the Space. The Space runs it and sets GRADIO_SERVER_NAME and
GRADIO_SERVER_PORT; without them the page is at http://127.0.0.1:7860, for this machine only.
"""

# The README.md of the Space starts with:
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
# short_description: Name a concept, change what a model says about an image
# ---

from elude_steer import Steerer
from elude_steer.demo import launch

launch.serve(Steerer.load("toyland"), browse=False)
