"""What goes wrong with a picture or a clip, in words for the person who sent it."""


class MediaError(ValueError):
    """The picture or clip cannot be used; the message says what is wrong and what to do."""


class MissingDecoderError(MediaError):
    """The clip may be fine, but the package that reads its format is not installed here."""
