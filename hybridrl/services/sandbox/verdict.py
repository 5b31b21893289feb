"""Exit codes of a contained run, beside those of the program. Imports nothing."""

NOT_CONTAINED = 97  # it could not be arranged, and nothing ran
# Of a program's tests. UNJUDGED: they failed, and do what the judge cannot do. ENDED: the program
# ended before them.
PASSED, FAILED, UNJUDGED, ENDED = 0, 1, 3, 4
