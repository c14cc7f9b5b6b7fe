"""The paper as pure tensors: contributions, clusters, splits, layers, names. Loads no model, opens no file."""
