"""The base of what a target does wrong, to be told from what goes wrong in the suite itself."""


class TargetFault(Exception):
    """The target broke its contract where the suite could not go on: it didn't start, or gave an answer of no known form.

    Such a test has failed. Any other exception that no test expected means that the harness is broken.
    """
