import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.checkpoint_files import scan
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig, preset
from suzuri.model.tensor_names import LAYOUTS, Layout
from suzuri.model.tensor_table import (
    Entry,
    Storage,
    parameter_shapes,
    released_nvfp4_layers,
    table,
)
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


def test_nvfp4_small_has_the_published_sizes_by_dtype() -> None:
    """The five sums of docs/architecture.md 5.5, in numbers of values."""
    config = preset("inkling-small")
    layers = released_nvfp4_layers(config)
    assert layers == tuple(range(3, 42))
    found: Counter[str] = Counter()
    for entry in table(config, Storage(nvfp4_layers=layers)):
        found[entry.dtype] += entry.num_values
    assert found == {
        "U8": 125_627_793_408,
        "F8_E4M3": 15_703_474_176,
        "F32": 30_248,
        "I64": 234,
        "BF16": 14_700_842_072,
    }


@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_storage_covers_each_row_exactly_once(name: str, layout: Layout, names: str) -> None:
    config = PRESETS[name]
    layers = released_nvfp4_layers(config)
    entries = table(config, Storage(layout=layout, nvfp4_layers=layers, names=names))
    assert len({entry.name for entry in entries}) == len(entries)
    rows: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for entry in entries:
        if entry.field not in ("values", "codes"):
            continue
        count = sum(segment.count for segment in entry.segments())
        columns = math.prod(entry.parameter_shape[2 if len(entry.parameter_shape) == 3 else 1 :])
        packed = 2 if entry.field == "codes" else 1
        assert entry.num_values * packed == len(entry.leads) * count * columns, entry.name
        for lead in (entry.leads[0], entry.leads[-1]):
            for segment in entry.segments():
                last = segment.first + segment.step * (segment.count - 1)
                places = rows.setdefault((entry.parameter, lead), [])
                places += [(segment.first, segment.step), (last, segment.step)]
    for (parameter, _), places in rows.items():
        shape = parameter_shapes(entries)[parameter]
        total = shape[1] if len(shape) == 3 else shape[0]
        firsts = sorted(first for first, _ in places)
        assert firsts[0] == 0 and firsts[-1] == total - 1, parameter
    whole = {entry.parameter: math.prod(entry.parameter_shape) for entry in entries}
    held: Counter[str] = Counter()
    for entry in entries:
        if entry.field in ("values", "codes"):
            held[entry.parameter] += entry.num_values * (2 if entry.field == "codes" else 1)
    assert held == whole


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
