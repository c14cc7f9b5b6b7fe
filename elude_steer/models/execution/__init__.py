"""How a model runs: compiled, with a quantised language model, or over several devices."""
