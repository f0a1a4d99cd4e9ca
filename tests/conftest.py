"""Property tests draw the same examples every time; `--hypothesis-profile explore` draws new and more ones."""

from hypothesis import settings

settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False, max_examples=2000, deadline=None)
settings.load_profile("steady")
