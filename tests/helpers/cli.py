"""Reading the output of commands."""


def only_error(err):
    """The one line of stderr that reports an error."""
    lines = [
        line
        for line in err.splitlines()
        if line.startswith("elude-steer: ") and not line.startswith("elude-steer: note")
    ]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]
