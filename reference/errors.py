"""The errors a user can cause. Each is one line that says what, where, given, allowed, and what to do."""


class Refusal(Exception):
    """The program declines to go on. The command line prints the message behind `error: ` and exits with status 1.

    The message is one line whatever names it quotes: line breaks in them are shown as escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(message.splitlines()))


class ArgumentRefusal(Refusal):
    """A launch argument, or a combination of several, that is not legal."""


class CheckpointRefusal(Refusal):
    """A checkpoint that is missing, torn, inconsistent, or of a family that is not supported."""


class CacheRefusal(Refusal):
    """The weight cache can't be used as asked. `code` is stable and says why.

    Codes: `no_daemon`, `key_mismatch`, `daemon_exists`, `load_failed`, `digest_mismatch`, `timeout`, `protocol`,
    `registry`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
