"""Errors that end a program with a sentence and an exit status, without a traceback."""


class UserError(ValueError):
    """Mistake that the user can correct: the sentence has the value, the rule and the remedy. Exit status 2."""


class RunError(RuntimeError):
    """Failure of the machine that ended a run: the sentence says what happened and what to do. Exit status 1."""


class WholeRunError(RunError):
    """RunError about the run as a whole, which all of its ranks raise: the sentence itself names those at fault."""
