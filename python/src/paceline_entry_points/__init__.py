"""What torch loads by the package's entry points.

Apart from the package `paceline`: torch imports this in every program, and importing paceline takes longer. Besides, torch.distributed
hides why an entry point does not load, so with another version of torch the last line of the traceback would be torch's. It shows an error
that `register` raises as it is.
"""

import os


def autoload() -> None:
    """Runs when torch is imported. Replaces Gloo if PACELINE_AS_GLOO is 1, as `paceline run --as-gloo` sets it."""
    if os.environ.get("PACELINE_AS_GLOO") == "1":
        import paceline  # noqa: F401 - it replaces Gloo


def register() -> None:
    """Registers the backend when torch.distributed first needs it."""
    import paceline

    paceline.register()
