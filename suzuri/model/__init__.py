"""The architecture: one family, one definition, for serving and training alike.

Reading order: config.py, batch.py, decoder.py, attention.py, short_conv.py, moe.py, mtp.py,
vision.py, audio.py, inkling.py (all parts together). Checkpoints: tensor_table.py (the mapping),
transfer.py (the loop), checkpoint_io.py and model_io.py (its ends), weights.py. Sizes, without
torch: sizes.py. Where a model comes from: locate.py. Public: ModelConfig, Batch, CacheView,
Decoder, DraftHead, VisionEmbedder, AudioEmbedder, Inkling, load_weights, export_weights,
initialize, Sizes, locate.
"""
