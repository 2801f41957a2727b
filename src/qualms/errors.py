"""The one exception that qualms raises for anything a user can put right."""


class QualmsError(ValueError):
    """One sentence: what is wrong, where, and what to do about it."""
