"""What goes wrong with what a person sent, in words for that person."""


class MediaError(ValueError):
    """The picture or clip cannot be used; the message says what is wrong and what to do."""


class MissingDecoderError(MediaError):
    """The clip may be fine, but the package that reads its format is not installed here."""


class GrammarError(ValueError):
    """The form that a request asked for takes too much work to follow; its field is named."""
