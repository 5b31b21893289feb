"""Exit codes of a contained run, in addition to the program's. Imports nothing."""

NOT_CONTAINED = 97  # the sandbox failed, and nothing ran
# Results of a program's tests. UNJUDGED: they failed, and use something that the judge does not
# support. ENDED: the program ended before them.
PASSED, FAILED, UNJUDGED, ENDED = 0, 1, 3, 4
