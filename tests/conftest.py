"""Laws run with Hypothesis' own number of examples and no deadline: shared machines stall now and then."""

from hypothesis import settings

settings.register_profile("placewise", deadline=None)
settings.load_profile("placewise")
