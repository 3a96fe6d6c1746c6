"""What torch runs at its own import, by the entry point in the group `torch.backends`.

Apart from paceline, whose import would take longer: this runs in every program that imports torch.
"""

import os


def load() -> None:
    """Imports paceline, which replaces Gloo, if the variable PACELINE_AS_GLOO is 1, as `paceline run --as-gloo` sets it."""
    if os.environ.get("PACELINE_AS_GLOO") == "1":
        import paceline  # noqa: F401
