import msgspec
import pytest

from headrace.hooks.program import Attend, Builder, Head, Program, ShapeError, Weight, rotary_frequencies


def builder(**changes: int) -> Builder:
    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 11,
        "max_positions": 32,
    }
    return Builder(source=lambda name: f"file.{name}", **(sizes | changes))


def small_program() -> Program:
    b = builder()
    x = b.embed()
    q, k, v = b.linear(x, "q", 24, bias=True, permuted_heads=4), b.linear(x, "k", 12), b.linear(x, "v", 12)
    frequencies = rotary_frequencies(10000.0, 6)
    x = b.linear(b.attend(b.rotate(q, frequencies), b.rotate(k, frequencies), v), "o", 8)
    b.head(b.norm(x, "norm", eps=1e-5), "embed")
    return b.build()


def test_weights_have_shapes_and_the_names_of_the_checkpoint():
    weights = small_program().weights

    assert weights["q"] == Weight(name="q", shape=(24, 8), source="file.q", permuted_heads=4)
    assert weights["q.bias"] == Weight(name="q.bias", shape=(24,), source="file.q.bias", permuted_heads=4)
    assert weights["norm"].shape == (8,)


def test_a_tied_head_names_the_embedding():
    program = small_program()

    assert program.ops[-1] == Head(x=len(program.ops) - 2, weight="embed")
    assert program.weights["embed"].shape == (11, 8)


def test_matrices_are_listed_with_their_biases():
    assert small_program().matrices == {"q": "q.bias", "k": None, "v": None, "o": None, "embed": None}


def test_a_program_is_data():
    program = small_program()

    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program


def test_scores_are_scaled_by_the_width_of_a_head():
    (attend,) = (op for op in small_program().ops if isinstance(op, Attend))

    assert attend.scale == pytest.approx(6**-0.5)


def test_frequencies_are_a_geometric_series():
    assert rotary_frequencies(10000.0, 4) == (1.0, 0.01)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda b, x: b.attend(x, x, x), "must be 24, 12 and 12 wide, got 8, 8 and 8"),
        (lambda b, x: b.add(x, b.linear(x, "a", 9)), "add: both sides must be equally wide, got 8 and 9"),
        (lambda b, x: b.gated(b.linear(x, "a", 9), x), "gated: both sides must be equally wide, got 9 and 8"),
        (lambda b, x: b.rotate(x, (1.0,)), "a width of 8 is not a whole number of heads of 6"),
        (lambda b, x: b.rotate(b.linear(x, "a", 6), (1.0,) * 4), "heads of 6 have 3 pairs, got 4"),
        (lambda b, x: b.norm(x, "a", eps=1e-5, width=3), "a width of 8 has no runs of 3"),
        (lambda b, x: b.linear(b.linear(x, "a", 8), "a", 9), r"a is used as \[8, 8\] and as \[9, 8\]"),
        (lambda b, x: b.linear(x, "a", 6, permuted_heads=2), "6 rows are not 2 heads of two halves"),
        (lambda b, x: b.moe(x, "a", 4, num_experts=2, num_selected=3), "cannot select 3 of 2 experts"),
        (lambda b, x: b.softcap(x, 0.0), "softcap must be above 0"),
        (lambda b, x: b.head(b.linear(x, "a", 9), "embed"), r"embed is used as \[11, 8\] and as \[11, 9\]"),
        (lambda b, x: b.build(), "1 layers must attend 1 times, got 0"),
        (lambda b, x: rotary_frequencies(10000.0, 5), "head_dim must be even"),
    ],
)
def test_what_does_not_fit_is_refused_as_it_is_written(mistake, message):
    b = builder()

    with pytest.raises(ShapeError, match=message):
        mistake(b, b.embed())


@pytest.mark.parametrize("sizes", [{"num_layers": 0}, {"vocab_size": -1}, {"num_heads": 3}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ShapeError, match="must be"):
        builder(**sizes)


def test_a_program_without_a_head_is_refused():
    b = builder()
    x = b.embed()
    b.attend(b.linear(x, "q", 24), b.linear(x, "k", 12), b.linear(x, "v", 12))

    with pytest.raises(ShapeError, match="call head"):
        b.build()
