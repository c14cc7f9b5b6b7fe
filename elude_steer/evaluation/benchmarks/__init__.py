"""Benchmarks of hallucination and of side effects, before and after an edit, on images in COCO's formats."""
