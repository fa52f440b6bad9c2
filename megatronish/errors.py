"""Which errors are told in a sentence, without a traceback?"""


class UserError(ValueError):
    """What the user can mend: the value, the rule and the remedy. Exit status 2."""


class RunError(RuntimeError):
    """What ended a run and is no bug of ours: what happened, and what to do. Exit status 1."""
