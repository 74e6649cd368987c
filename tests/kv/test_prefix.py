import subprocess
import sys
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.kv.prefix import Computing, digests, root

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=100)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
SIZES = st.sampled_from([1, 3, 4, 16])


def test_the_format_of_version_1_does_not_change():
    assert root().hex() == "adce37b5eeef5d0bb75e4a5dd85349e1"
    assert [digest.hex() for digest in digests(range(8), 4)] == [
        "9c77072957fd8093c2b00e3191d7ba32",
        "712a17d08a1e3801a6daeca145082eb1",
    ]
    assert digests(range(4), 4, salt="tenant")[0].hex() == "8d1502d58627b36bdea8d6e977a0af26"


def test_another_process_computes_the_same_digests():
    program = "from headrace.core.kv.prefix import digests; print(digests(range(40), 16, salt='a')[-1].hex())"
    answer = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "7"}, check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == digests(range(40), 16, salt="a")[-1].hex()


def test_tokens_that_fill_no_block_have_no_digest():
    assert digests(range(15), 16) == []
    assert len(digests(range(47), 16)) == 2


def test_a_digest_depends_on_all_that_stands_before():
    assert digests([1, 2, 9, 9], 2)[1] != digests([1, 3, 9, 9], 2)[1]


def test_the_same_tokens_in_blocks_of_another_size_are_other_blocks():
    assert not set(digests(range(16), 4)) & set(digests(range(16), 8))


@PROFILE
@given(tokens=TOKENS, size=SIZES)
def test_salts_share_no_block(tokens, size):
    assert not set(digests(tokens, size, salt="one")) & set(digests(tokens, size, salt="other"))


@PROFILE
@given(tokens=TOKENS, other=TOKENS, size=SIZES)
def test_two_rows_share_exactly_the_blocks_of_their_common_prefix(tokens, other, size):
    row, fork = tokens + other, tokens[:-1] + other
    common = next((i for i, (a, b) in enumerate(zip(row, fork, strict=False)) if a != b), min(len(row), len(fork)))
    shared = common // size
    assert digests(row, size)[:shared] == digests(fork, size)[:shared]
    assert not set(digests(row, size)[shared:]) & set(digests(fork, size)[shared:])


@PROFILE
@given(tokens=TOKENS, size=SIZES, cut=st.integers(0, 10))
def test_digests_go_on_from_a_parent(tokens, size, cut):
    whole = digests(array("i", tokens), size, salt="s")
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root("s")
    assert digests(tokens, size, parent=parent, start=cut * size) == whole[cut:]


def test_a_digest_is_computed_by_whoever_claimed_it_first():
    computing = Computing[str]()
    assert computing.claim(b"a", "first")
    assert computing.claim(b"a", "first")
    assert not computing.claim(b"a", "second")
    assert computing.owner(b"a") == "first"
    assert computing.owner(b"b") is None


def test_an_owner_that_goes_leaves_its_claims_to_others():
    computing = Computing[str]()
    for digest in (b"a", b"b"):
        computing.claim(digest, "first")
    computing.claim(b"c", "second")
    computing.release("first")
    computing.release("first")
    assert computing.claim(b"a", "second")
    assert (computing.owner(b"b"), len(computing)) == (None, 2)
