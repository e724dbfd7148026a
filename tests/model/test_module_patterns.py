import pytest

from suzuri.model.module_patterns import PREFIXES, ModulePatterns


def named(*entries: str) -> list[int]:
    patterns = ModulePatterns("ignore", [(f"ignore[{i}]", one) for i, one in enumerate(entries)])
    return [layer for layer in range(66) if patterns.name_experts(layer)]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_layout_has_the_same_modules(prefix: str) -> None:
    assert named(f"{prefix}7.mlp.experts") == [7]
    assert named(f"{prefix}7.mlp.experts.w13_weight", f"{prefix}7.mlp.experts.w2_weight") == [7]
    assert named(f"{prefix}7.mlp.shared_experts", f"{prefix}7.mlp.gate") == []


def test_one_entry_of_a_long_list_decides() -> None:
    others = [
        f"model.llm.layers.{layer}.{name}*"
        for layer in range(66)
        for name in ("attn", "mlp.gate", "mlp.shared_experts")
    ]
    assert named(*others) == []
    assert named(*others, "model.llm.layers.41.mlp.experts*") == [41]


def test_exact_names_are_no_prefixes_but_wildcards_are() -> None:
    assert named("model.llm.layers.4") == [4]
    assert named("model.llm.layers.4*") == [4, *range(40, 50)]


def test_regular_expressions_match_from_the_start() -> None:
    assert named("re:model.llm.layers.4.mlp") == [4]
    assert named("re:llm.layers.4.mlp") == [4]  # a layout without model. in front
    assert named("re:layers.4x.mlp") == []
    assert named("re:.*experts\\.\\d+\\.(gate|up|down)_proj") == list(range(66))


def test_no_entries_name_nothing() -> None:
    assert named() == []


def test_part_of_the_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="ignore names only part of the routed experts of layer 5"):
        named("model.llm.layers.5.mlp.experts.w2_weight")
