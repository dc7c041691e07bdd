"""The one error a user sees: what was given, what was expected, what to do."""


class NormscopeError(Exception):
    """Base of every error normscope raises on purpose."""


class UsageError(NormscopeError, ValueError):
    """The call or the model cannot be used; the command line prints it as one line and exits 2.

    Args:
        given: what the user gave, quoted where it is a value.
        expected: what would have been accepted.
        do: what to do now.
    """

    def __init__(self, given: str, expected: str, do: str) -> None:
        self.given, self.expected, self.do = given, expected, do
        super().__init__(" ".join(f"{given}: expected {expected}; {do}.".split()))
