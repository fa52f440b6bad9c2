"""Which errors are the user's to mend?"""


class UserError(ValueError):
    """What the user can mend, in a sentence with the value, the rule and the remedy. Exit status 2, no traceback."""
