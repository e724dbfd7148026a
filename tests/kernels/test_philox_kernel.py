"""philox on a GPU: the reference's integers, which are the words of the kernels' `tl.philox`.

(The words of `tl.philox` itself are compared with the reference in test_philox.py.)
"""

import torch

from suzuri.kernels.philox import cases, philox
from tests.kernels.compare import assert_same_bits, generator
from tests.kernels.on_triton import on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync


@on_gpu
def test_words_of_the_cpu_without_waiting():
    for case in cases.SHAPES:
        given = cases.build(case, torch.float32, generator(1))
        moved = {name: value.cuda() for name, value in given.items()}
        with without_sync():
            found = philox(**moved)
        for word, expected in zip(found, philox(**given), strict=True):
            assert_same_bits(word.cpu(), expected, case)
    assert_rows_alone_on_gpu("philox", torch.float32)
