"""The architecture: one family, one definition, for serving and training alike.

Reading order: config.py, batch.py, decoder.py, attention.py, short_conv.py, moe.py, mtp.py,
vision.py, audio.py, inkling.py (all parts together); then tensor_table.py, weights.py.
Public: ModelConfig, Batch, CacheView, Decoder, DraftHead, VisionEmbedder, AudioEmbedder, Inkling,
load_weights, export_weights.
"""
