"""Profiles of the property tests: `make fuzz` runs those marked `fuzz` with many more examples than `make test`."""

import os

from hypothesis import settings

settings.register_profile("short", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5000")))
settings.load_profile("short")
