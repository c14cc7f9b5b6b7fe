"""Baselines for ELUDe: sparse autoencoders and other dictionaries."""

from typing import Literal, get_args

SaeKind = Literal[
    "vanilla", "topk", "batch_topk", "jumprelu", "matryoshka", "archetypal", "matching_pursuit", "transcoder"
]
SAE_KINDS: tuple[SaeKind, ...] = get_args(SaeKind)
