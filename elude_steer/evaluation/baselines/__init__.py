"""Baselines for ELUDe: sparse autoencoders and other dictionaries."""
