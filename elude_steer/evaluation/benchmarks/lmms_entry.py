"""What lmms-eval finds through the entry point `lmms_eval.models`: that a model `elude_steer` exists, and its class."""

from __future__ import annotations

from typing import Any


def make_manifest() -> Any:
    """The manifest of the model; called by lmms-eval, which is therefore installed."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="elude_steer", simple_class_path="elude_steer.evaluation.benchmarks.lmms_model.SteeredModel"
    )
