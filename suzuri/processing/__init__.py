"""Between what people send (text, pictures, sound) and what the model reads (ids, patches, bins).

Everything here loads without torch. The server calls it in its own process, the trainer before a
batch is packed: the same bytes in both, so media cannot differ between serving and training.

Reading order: `tokenizer.py` (ids and special ids), `vocabulary.py` (ids to rows of small
checkpoints), `images.py` then `image_header.py`, `audio.py` then `audio_files.py` and
`audio_decoders.py`, `mp3.py`, `sources.py`, `errors.py`. Chats: `chat.py` with `chat_blocks.py` and
`media.py` (to ids), `chat_output.py` with `tool_calls.py` (back), `grammar_request.py`,
`grammar_schema.py` and `grammar.py` (what an output may be).

Public names: `tokenizer.Tokenizer` and the special ids; `vocabulary.Vocabulary`,
`KeptVocabulary`, `FullVocabulary`, `vocabulary_of`; `images.image_patches`,
`image_size`, `num_image_tokens`; `audio.audio_bins`, `num_audio_tokens`;
`audio_files.load_waveform`; `chat.ChatRenderer`, `EFFORTS`, `effort_level`;
`chat_output.ChatOutputParser`, `Piece`, `collect`; `grammar_request.chat_grammar`, `text_grammar`;
`grammar.GrammarCompiler`, `allowed_rows`; `errors.MediaError`, `MissingDecoderError`.
"""
