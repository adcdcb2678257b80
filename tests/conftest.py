"""Hypothesis tries the same examples in every run, so that a commit passes or fails for good.

`pytest --hypothesis-profile=explore` looks for new ones.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")
