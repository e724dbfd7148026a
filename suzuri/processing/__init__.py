"""Between what people send (text, pictures, sound) and what the model reads (ids, patches, bins).

Everything here loads without torch. The server calls it in its own process, the trainer before a
batch is packed: the same bytes in both, so media cannot differ between serving and training.

Reading order: `tokenizer.py` (ids and special ids), `vocabulary.py` (ids to rows of small
checkpoints), `images.py` then `image_header.py`, `audio.py` then `audio_files.py` and
`audio_decoders.py`, `mp3.py`, `sources.py`, `errors.py`.

Public names: `tokenizer.Tokenizer` and the special ids; `vocabulary.Vocabulary`,
`KeptVocabulary`, `FullVocabulary`, `vocabulary_of`; `images.image_patches`,
`image_size`, `num_image_tokens`; `audio.audio_bins`, `num_audio_tokens`;
`audio_files.load_waveform`; `errors.MediaError`, `MissingDecoderError`.
"""
