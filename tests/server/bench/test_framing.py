import pytest

from headrace.hooks.errors import StartError
from headrace.server.bench.framing import Chunked, CutShort, Sized, UntilClose, WireError, framing
from headrace.server.bench.wire import parse_url

BODY = b"5\r\nhello\r\nC;name=value\r\n wide world\n\r\n0\r\ntrailer: x\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_are_unwrapped_however_they_are_cut(size):
    body = Chunked()
    out = b"".join(body.feed(BODY[at : at + size]) for at in range(0, len(BODY), size))
    assert out == b"hello wide world\n"
    assert body.complete


def test_a_chunk_comes_before_it_is_complete():
    body = Chunked()
    assert body.feed(b"ff\r\nsome") == b"some"
    with pytest.raises(CutShort):
        body.end()


@pytest.mark.parametrize("data", [b"zz\r\n", b"x" * 20_000])
def test_what_is_no_chunk_is_refused(data):
    with pytest.raises(WireError):
        Chunked().feed(data)


def test_a_body_of_known_length_is_complete_with_its_last_byte():
    body = Sized(4)
    assert body.feed(b"abc") == b"abc"
    assert not body.complete
    assert body.feed(b"de") == b"d"
    assert body.complete


def test_a_body_of_unknown_length_ends_with_the_connection():
    body = UntilClose()
    assert body.feed(b"abc") == b"abc"
    assert not body.complete
    body.end()
    assert body.complete


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (200, {b"transfer-encoding": b"Chunked"}, Chunked),
        (200, {b"content-length": b"3"}, Sized),
        (204, {}, Sized),
        (200, {}, UntilClose),
    ],
)
def test_headers_tell_how_a_body_ends(status, headers, kind):
    assert isinstance(framing(status, headers), kind)


@pytest.mark.parametrize(
    ("url", "authority", "base"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", ""),
        ("localhost:80/v1/", "localhost", ""),
        ("https://host/some/path/v1", "host", "/some/path"),
        ("http://[::1]:8000", "[::1]:8000", ""),
    ],
)
def test_a_url_is_taken_with_and_without_its_version(url, authority, base):
    address = parse_url(url)
    assert (address.authority, address.base) == (authority, base)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(StartError, match="URL must be the address of a server"):
        parse_url(url)
