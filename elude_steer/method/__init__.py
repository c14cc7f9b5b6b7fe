"""The method as pure tensors: contributions, clustering, splitting, layers, labels. Loads no model, opens no file."""
