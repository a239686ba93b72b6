"""Space, cells, rules and generation against brute force."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrix.cell import Cell, CellIdError, Layout, parse_cell_id
from matrix.generate import cells, combinations
from matrix.model_shape import ConfigError, ModelShape
from matrix.rules import MODES, RULES, TRANSPORT_DEVICES, decide
from matrix.space import DEFAULT_PATH, SpaceError, load_space

SMOKE = [
    "qwen3-tiny/tp1/off/private",
    "qwen3-tiny/tp1/client/shm",
    "qwen3-tiny/tp1/daemon/shm",
    "qwen3-tiny/tp2/off/private",
    "qwen3-tiny/tp2/client/shm",
    "qwen3-tiny/tp2/daemon/shm",
    "qwen3-moe-tiny/tp1/off/private",
    "qwen3-moe-tiny/tp1/client/shm",
    "qwen3-moe-tiny/tp1/daemon/shm",
    "qwen3-moe-tiny/tp2/off/private",
    "qwen3-moe-tiny/tp2/client/shm",
    "qwen3-moe-tiny/tp2/daemon/shm",
]

DENSE = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
MOE = DENSE | {"num_experts": 4, "moe_intermediate_size": 6}

names = st.from_regex(r"[a-z0-9]{1,4}(-[a-z0-9]{1,3}){0,2}", fullmatch=True)
any_cell = st.builds(
    Cell, names, st.builds(Layout, st.integers(1, 999)), st.sampled_from(MODES), st.sampled_from([*TRANSPORT_DEVICES])
)


def dense(**fields: object) -> ModelShape:
    return ModelShape.from_config(DENSE | fields, "here", "Qwen3ForCausalLM")


def moe(**fields: object) -> ModelShape:
    return ModelShape.from_config(MOE | fields, "here", "Qwen3MoeForCausalLM")


def test_ids_of_the_smoke_tier_never_change() -> None:
    assert [cell.id for cell in cells(load_space(), "smoke")] == SMOKE


def test_every_cell_has_an_id_and_a_class_of_its_own() -> None:
    found = cells(load_space())
    assert len({cell.id for cell in found}) == len({cell.class_name for cell in found}) == len(found) == 24
    assert all(cell.class_name.isidentifier() and cell.class_name.startswith("Test") for cell in found)


@given(any_cell)
def test_a_cell_is_found_again_by_its_id(cell: Cell) -> None:
    assert parse_cell_id(cell.id) == cell


@given(st.sets(any_cell, max_size=8))
def test_ids_tell_cells_apart(some: set[Cell]) -> None:
    assert len({cell.id for cell in some}) == len(some)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/tp1/off",
        "a/tp0/off/shm",
        "a/tp01/off/shm",
        "a/pp2/off/shm",
        "a/tp1/off/shm/",
        "a/tp1/off/shm\n",
        "A/tp1/off/shm",
    ],
)
def test_what_is_no_cell_id_is_refused(text: str) -> None:
    with pytest.raises(CellIdError, match="expected MODEL/LAYOUT/MODE/TRANSPORT"):
        parse_cell_id(text)


def test_names_of_a_cell() -> None:
    cell = Cell("qwen3-moe-tiny", Layout(tp=2), "client", "shm")
    assert (cell.id, cell.class_name) == ("qwen3-moe-tiny/tp2/client/shm", "TestQwen3MoeTiny_TP2_Client")
    assert Cell("a", Layout(), "client", "cuda_vmm").class_name == "TestA_TP1_Client_CudaVmm"
    assert (cell.layout.arguments(), cell.layout.world_size) == (["--tp-size", "2"], 2)


def test_generation_is_the_legal_part_of_the_product() -> None:
    space = load_space()
    expected = [
        Cell(model.name, Layout(tp), mode, transport)
        for model, tp, mode, transport in product(space.models, space.axes.tp, space.axes.mode, space.axes.transport)
    ]
    assert combinations(space) == expected
    legal = [cell for cell in expected if (cell.mode == "off") == (cell.transport == "private")]
    assert cells(space, "full") == cells(space) == legal
    assert set(cells(space, "smoke")) < set(legal)
    assert cells(load_space(DEFAULT_PATH)) == legal, "deterministic"


def held_by_hand(shape: ModelShape, tp: int) -> bool:
    """Whether each of `tp` ranks can hold equal parts such that the KV heads it holds are those that its queries need."""
    if shape.num_attention_heads % tp or (shape.moe_layers and shape.moe_intermediate_size % tp):
        return False
    if len(shape.moe_layers) < shape.num_hidden_layers and shape.intermediate_size % tp:
        return False
    group = shape.num_attention_heads // shape.num_key_value_heads
    queries = shape.num_attention_heads // tp
    for rank in range(tp):
        needed = {head // group for head in range(rank * queries, (rank + 1) * queries)}
        first = rank * shape.num_key_value_heads // tp
        if needed != set(range(first, first + max(1, shape.num_key_value_heads // tp))):
            return False
    return True


sizes = st.integers(1, 12)


@given(kv=sizes, group=sizes, inter=sizes, moe_inter=sizes, sparse=st.integers(1, 3), tp=sizes, experts=st.booleans())
def test_legality_equals_brute_force(
    kv: int, group: int, inter: int, moe_inter: int, sparse: int, tp: int, experts: bool
) -> None:
    fields = {"num_attention_heads": kv * group, "num_key_value_heads": kv, "intermediate_size": inter}
    shape = moe(**fields, moe_intermediate_size=moe_inter, decoder_sparse_step=sparse) if experts else dense(**fields)
    broken = decide(shape, Cell("m", Layout(tp), "off", "private"))
    assert (not broken) == held_by_hand(shape, tp), [str(violation) for violation in broken]


def test_each_rule_refuses_alone_and_gives_its_values() -> None:
    refused = {
        "tp-query-heads": (dense(num_attention_heads=6, num_key_value_heads=1), Cell("m", Layout(4), "off", "private")),
        "tp-kv-heads": (
            dense(num_attention_heads=12, num_key_value_heads=3),
            Cell("m", Layout(4), "off", "private"),
        ),
        "tp-intermediate": (dense(intermediate_size=3), Cell("m", Layout(2), "off", "private")),
        "tp-moe-intermediate": (moe(moe_intermediate_size=3), Cell("m", Layout(2), "off", "private")),
        "mode-known": (dense(), Cell("m", Layout(), "on", "shm")),
        "transport-mode": (dense(), Cell("m", Layout(), "client", "private")),
        "transport-device": (dense(), Cell("m", Layout(), "client", "shm")),
    }
    assert refused.keys() == {rule.id for rule in RULES}
    for name, (shape, cell) in refused.items():
        device = "cuda:0" if name == "transport-device" else "cpu"
        assert [violation.rule.id for violation in decide(shape, cell, device)] == [name]
    [violation] = decide(*refused["tp-kv-heads"])
    assert str(violation) == "tp-kv-heads: neither of tp 4 and 3 KV heads divides the other"


def test_transports_need_their_device() -> None:
    client = Cell("m", Layout(), "client", "cuda_vmm")
    assert not decide(dense(), client)
    assert not decide(dense(), client, "cuda:1")
    assert [violation.rule.id for violation in decide(dense(), client, "cpu")] == ["transport-device"]
    assert "is none of" in decide(dense(), Cell("m", Layout(), "client", "pigeon"))[0].reason


def test_moe_layers_follow_step_and_exceptions() -> None:
    assert moe(num_hidden_layers=4).moe_layers == (0, 1, 2, 3)
    assert moe(num_hidden_layers=4, mlp_only_layers=[1]).moe_layers == (0, 2, 3)
    assert moe(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]).moe_layers == (1,)
    assert dense(num_hidden_layers=4).moe_layers == ()


def test_rope_base_is_found_in_either_place() -> None:
    assert dense().rope_base == 10000.0
    assert dense(rope_theta=500).rope_base == 500.0
    assert dense(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}).rope_base == 7.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": None}, "here: head_dim is missing"),
        ({"hidden_size": "8"}, "here: hidden_size is '8'; it must be a positive integer"),
        ({"vocab_size": 0}, "here: vocab_size is 0"),
        ({"attention_bias": True}, "here: attention_bias is true"),
        ({"rope_theta": []}, "here: rope_theta is []"),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
            "here: rope_theta is 1.0, but 2.0 in rope_parameters",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "here: rope_parameters has rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "here: rope_scaling has rope_type 'linear'"),
    ],
)
def test_bad_configurations_are_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        dense(**fields)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="architecture 'GPT2LMHeadModel' is not known; known are Qwen3ForCausalLM"):
        ModelShape.from_config(DENSE | {"architectures": ["GPT2LMHeadModel"]}, "here")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format is 2; this version reads 1"),
        ('name = "qwen3-moe-tiny"', 'name = "qwen3-tiny"', "another model has the same name"),
        ('name = "qwen3-moe-tiny"', 'name = "qwen3.tiny"', "or the same class names"),
        ('name = "qwen3-moe-tiny"', 'name = "Qwen3"', "a name is lower-case"),
        ('models = ["qwen3-tiny"', 'models = ["qwen3-tinny"', "tier smoke: models 'qwen3-tinny' is not in the space"),
        ("seed = 1", "sede = 1", "unknown field `sede`"),
        ("vocab_size = 503", "vocab_size = -1", "model qwen3-tiny: vocab_size is -1"),
        ("format = 1", "format = ", "space.toml: "),
    ],
)
def test_bad_spaces_are_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "space.toml"
    text = DEFAULT_PATH.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpaceError) as raised:
        load_space(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
