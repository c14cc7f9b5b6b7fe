"""The web page of `elude-steer demo`."""
