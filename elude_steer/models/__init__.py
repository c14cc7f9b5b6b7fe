"""Images in, layer inputs out: loading models, hooks, captions, the layout of patches, encoders and matchers."""
