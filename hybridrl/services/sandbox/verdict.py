"""Exit codes of a sandboxed run, in addition to the program's own. Imports nothing."""

NOT_CONTAINED = 97  # The sandbox could not be created, and nothing ran.
# Verdicts on a program's tests. UNJUDGED: the tests failed, and use something that the judge does
# not support. ENDED: the program ended before the tests did.
PASSED, FAILED, UNJUDGED, ENDED = 0, 1, 3, 4
