"""The paper's tables and edits by one command: `elude-steer reproduce`."""
