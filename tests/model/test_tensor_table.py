import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.checkpoint_files import scan
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig, preset
from suzuri.model.tensor_table import Entry, parameter_shapes, table
from tests.model.checkpoints import (
    CASES,
    build,
)


def totals(config: ModelConfig) -> tuple[int, int, int]:
    entries = table(config)
    return (
        sum(entry.num_bytes for entry in entries),
        sum(entry.num_values for entry in entries),
        sum(entry.num_values for entry in entries if entry.part != "mtp"),
    )


def test_small_has_the_published_size_to_the_byte() -> None:
    config = preset("inkling-small")
    num_bytes, num_values, without_mtp = totals(config)
    assert num_bytes == 531_912_898_740
    assert (round(num_values / 1e9, 1), round(without_mtp / 1e9, 1)) == (266.0, 263.7)
    entries = table(config)
    assert len(entries) == 1048
    assert sum(entry.num_bytes for entry in entries if entry.part == "mtp") == 4_463_824_912
    assert Counter(entry.part for entry in entries)["mtp"] == 160


def test_inkling_has_the_published_number_of_parameters() -> None:
    _, num_values, without_mtp = totals(preset("inkling"))
    assert (round(num_values / 1e9, 1), round(without_mtp / 1e9, 1)) == (952.4, 947.1)


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_table_lists_exactly_the_golden_tensors(folder: Path) -> None:
    found = scan(folder).tensors
    listed = {entry.name: entry for entry in table(ModelConfig.from_file(folder))}
    assert listed.keys() == found.keys()
    for name, entry in listed.items():
        place = found[name]
        assert (entry.dtype, entry.shape, entry.num_bytes) == (
            place.dtype,
            place.shape,
            place.nbytes,
        )


def assert_covers_exactly_once(entries: tuple[Entry, ...]) -> None:
    assert len({entry.name for entry in entries}) == len(entries)
    ends: dict[str, int] = {}
    for entry in entries:
        assert entry.start == ends.get(entry.parameter, 0) < entry.stop
        ends[entry.parameter] = entry.stop
        row = math.prod(entry.parameter_shape[1:])
        assert entry.num_values == (entry.stop - entry.start) * row
        assert entry.shape[0] == entry.stop - entry.start
    shapes = parameter_shapes(entries)
    assert {name: shape[0] for name, shape in shapes.items()} == ends


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_table_covers_each_parameter_exactly_once(data: st.DataObject) -> None:
    kv_heads, swa_kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    layers = data.draw(st.integers(1, 8))
    text = dataclasses.replace(
        PRESETS["tiny"].text,
        num_hidden_layers=layers,
        local_layer_ids=tuple(i for i in range(layers) if data.draw(st.booleans())),
        dense_mlp_idx=data.draw(st.integers(0, 9)),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * data.draw(st.integers(1, 3)),
        swa_num_key_value_heads=swa_kv_heads,
        swa_num_attention_heads=swa_kv_heads * data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.integers(1, 9)),
        n_shared_experts=data.draw(st.integers(0, 2)),
        sconv_kernel_size=data.draw(st.integers(1, 5)),
        torch_dtype=data.draw(st.sampled_from(["bfloat16", "float32"])),
    )
    depths = data.draw(st.integers(0, 3))
    mtp = MtpConfig(
        num_nextn_predict_layers=depths,
        chain_hidden_post_norm=data.draw(st.booleans()),
        local_layer_ids=tuple(d for d in range(depths) if data.draw(st.booleans())),
    )
    config = dataclasses.replace(PRESETS["tiny"], text=text, mtp=mtp)
    assert_covers_exactly_once(table(config))


@pytest.mark.parametrize("name", PRESETS)
def test_table_of_a_preset_covers_each_parameter_exactly_once(name: str) -> None:
    assert_covers_exactly_once(table(PRESETS[name]))


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_table_lists_exactly_the_parameters_of_the_model(folder: Path) -> None:
    model = build(folder)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == parameter_shapes(table(model.config))
