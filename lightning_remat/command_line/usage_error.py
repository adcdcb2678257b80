"""What the user of the command can put right."""


class UsageError(ValueError):
    """A question that cannot be answered as it was asked; the message is one line that says what to change."""


def one_line(error: BaseException) -> str:
    """The error's message without its line breaks, after its name where it is not one of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}".removesuffix(": ")
